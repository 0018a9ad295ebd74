"""The seam between the keeper and a service: the protocols that an adapter implements.

A backend is one service that hands out tasks under leases. The keeper calls a backend from one asyncio event loop only,
and closes it there, so a backend needs no locks. An adapter wraps a blocking client library itself.

Every method takes a batch and answers item by item, in order. A call that fails as a whole raises a `BackendError`:
`Unavailable` (or `ProtocolError`), `Throttled` or `Refused`. Any other exception is treated as `Unavailable`.
Every call can be repeated: the second answer equals the first.

`leasekit.testing.contract` has these rules as tests; subclass it for each adapter.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol, Unpack, runtime_checkable

from leasekit._lifecycle.sameness import payload_digest
from leasekit._lifecycle.validation import check_kinds, check_limit, checked
from leasekit.errors import Refused
from leasekit.periodic import PeriodicInfo, PeriodicTask
from leasekit.task import (
    Beat,
    ChainCancelled,
    Claimed,
    CompleteSettings,
    Ended,
    GateInfo,
    KindInfo,
    KindSettings,
    Matched,
    NewTask,
    NodeInfo,
    Outcome,
    Page,
    Purged,
    Redriven,
    Rescheduled,
    Scheduled,
    Selection,
    Settlement,
    Stats,
    Status,
    Task,
    TaskInfo,
    Ticket,
    Vacuumed,
    Verdict,
    VerdictWord,
    WorkerInfo,
    effective,
)
from leasekit.task.words import REDRIVABLE
from leasekit.tokens import AuditPage, Scope, TokenInfo

__all__ = [
    "Backend", "Beat", "BulkChanger", "CancelSource", "Capabilities", "ChainCancelled", "ChainDirectory", "Claimed",
    "CompleteSettings", "DeadLetters", "EndSource", "Ended", "GateDirectory", "GateInfo", "KindDirectory", "KindInfo",
    "KindListener", "KindSettings", "Matched", "NameSource", "NewTask", "NodeDirectory", "NodeInfo", "Outcome", "Page",
    "PeriodicDirectory", "PeriodicInfo", "PeriodicTask", "Purged", "Purger", "Redriven", "Rescheduled", "Rescheduler",
    "Scheduled", "Scheduler", "Selection", "Settlement", "Stats", "Status", "Task", "TaskInfo", "TaskSink", "Ticket",
    "TicketSource", "TokenDirectory", "Vacuumed", "Verdict", "VerdictWord", "WindowListener", "WorkerDirectory",
    "WorkerInfo", "cancel_all", "check_kinds", "check_limit", "checked", "dead_ones", "effective", "payload_digest",
    "unknown_task",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Capabilities of a service, declared by its adapter and checked by the contract suite."""

    max_batch: int = 100
    """The most heartbeats or settlements in one call."""
    max_claim: int = 100
    """The most tasks in one claim."""
    fences: bool = True
    """The service grants a fence: a number that grows with every claim of a task."""
    refuses_stale: bool = True
    """The service answers *gone* to a write with the token of an earlier claim."""
    tells_waited: bool = True
    """The service says how long a claim had waited when it was granted."""
    remembers_claims: bool = True
    """A claim repeated under its `claim_id` gets the same tasks; `limit` 0 ends the claim."""
    keeps_claims: bool = False
    """Tasks that were granted to a cancelled call of `claim` go to the adapter's next claim, or are released."""
    cancel_requests: bool = True
    """The verdict of a heartbeat says that a cancel was requested."""
    progress: bool = True
    """The service keeps checkpoints for the next holder."""
    max_progress: int = 64 * 1024
    """The most bytes of one checkpoint as JSON; never more than 64 KiB."""
    max_result: int | None = 1024 * 1024
    """The most bytes of a result as JSON; None: any size is accepted, because results are not kept."""
    retries: bool = True
    """The service hands a task out again after a retry, release, crash or expiry; False: another system must do it."""
    unique_ids: bool = True
    """The service keeps one task for each id, and for each live dedupe key; named leases depend on that. A worker joins
    a second delivery of a task to its run; False: it runs each delivery, and one call may hold several tasks of an
    id, which the adapter tells apart by their tokens."""
    dependencies: bool = False
    """A task may be scheduled `after` others, in any order; False: such a task is refused."""
    keys: bool = False
    """The due tasks of a kind and priority are granted one of each `key` in turn; False: a task with a key is
    refused."""
    debounce: bool = False
    """A task that waits can be replaced by `debounce`, and a dedupe key ends with its task by `dedupe_scope`; False:
    such a task is refused."""
    start_deadlines: bool = False
    """A task that has not begun by its `start_deadline` is dropped; False: such a task is refused."""
    tags: bool = False
    """Tasks are found by their `tags`, also by `list_tasks(tags=…)`; False: a task with tags is refused."""
    labels: bool = False
    """`claim` takes `labels`, the labels of the worker, and grants tasks that `requires` some of these only to workers
    that have them; False: such a task is refused."""


class Backend(Protocol):
    """A service that hands out tasks under leases.

    If the meaning of the URL by which a backend was opened depends on the working directory, the backend has an
    attribute `url` whose meaning does not: forks and supervisors connect by that.
    """

    capabilities: Capabilities
    """What the service can do."""

    async def claim(self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str) -> Claimed:
        """Claim up to `limit` tasks of these kinds (at most 100 kinds); wait up to `wait` seconds for the first task.

        A call repeated with the same `claim_id` joins the first call, or gets those of its tasks whose leases are live.
        Where the service remembers claims, `limit` 0 ends the claim: the call does not wait and gets the same tasks,
        and no call with this `claim_id`, however late, is granted any other task. The tasks of an ended claim are only
        to be released: they come without payload and progress, so that a slow line carries them at once.
        """
        ...

    async def beat(self, beats: Sequence[Beat]) -> list[Verdict]:
        """Renew leases: `renewed`, `gone`, `throttled` or `failed` for each, in order.

        Try once: the keeper's cycle does the retries.
        """
        ...

    async def settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        """End leases: `settled`, `gone`, `throttled` or `failed` for each, in order."""
        ...

    async def aclose(self) -> None:
        """Close the connections. Leases are not touched."""
        ...


@runtime_checkable
class TaskSink(Protocol):
    """A backend that also accepts work. Like many queues, such a backend may not know the state of a single task."""

    async def schedule(self, tasks: Sequence[NewTask]) -> list[Scheduled]:
        """Accept tasks; they are durable when this returns. The same id, or live dedupe key, makes no second task."""
        ...

    async def stats(self) -> Stats:
        """Count the tasks of each kind in each status."""
        ...


@runtime_checkable
class Scheduler(TaskSink, Protocol):
    """A backend that also accepts work, and knows the state of every task."""

    async def get(self, task_id: str) -> TaskInfo | None:
        """Return everything about one task; None if no task has that id."""
        ...

    async def cancel(self, task_ids: Sequence[str]) -> list[Verdict]:
        """Cancel tasks: `cancelled` for a waiting one, `cancel_requested` for a running one, else `gone`."""
        ...

    async def list_tasks(
        self,
        *,
        kind: str | None = None,
        status: Status | None = None,
        collection: str | None = None,
        worker: str | None = None,
        newest: bool = False,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page:
        """List the tasks that match all filters, oldest or `newest` first; `cursor` is that of the page before."""
        ...


@runtime_checkable
class TicketSource(Protocol):
    """A backend whose tasks are also moved to queues of messages, and are claimed by what the messages say."""

    async def claim_tickets(
        self, kinds: Sequence[str], tickets: Sequence[Ticket], *, limit: int, claim_id: str
    ) -> Claimed:
        """Claim up to `limit` of these tasks, in order, if they are of these kinds. The call does not wait.

        A ticket whose task is neither granted nor in `refused` may be granted later. A task that waits for something
        else than a claim (a gate, a limit) is refused, and is enqueued again in its time. Repeats are those of `claim`,
        which also ends such a claim (`limit` 0).
        """
        ...


@runtime_checkable
class NameSource(Protocol):
    """A backend that makes and claims the task of a name in one call."""

    async def claim_name(self, task: NewTask, *, claim_id: str) -> Claimed:
        """Do what `schedule` does with the task of a name, and what `claim` of its kind does with `wait` 0."""
        ...


@runtime_checkable
class CancelSource(Protocol):
    """A backend that tells a holder of a cancel request before the holder's next heartbeat."""

    async def cancels(self, *, wait: float) -> list[str]:
        """Return the tasks of this worker whose cancel was requested since the last call; wait for the first.

        Only a hint, on which the keeper sends a heartbeat: an id may be missing, come twice, or be of another time.
        """
        ...


@runtime_checkable
class EndSource(Protocol):
    """A backend that answers when one of some tasks has ended, so that its callers need not poll."""

    async def ended(self, task_ids: Sequence[str], *, wait: float) -> Ended:
        """Wait until one of these tasks (at most 1,000) has ended; return all of them that have.

        After `wait` seconds, or earlier, the answer may be empty. Of many tasks, some may be left to the next call.
        """
        ...


@runtime_checkable
class KindListener(Protocol):
    """A backend that is told of all kinds of a worker, before its first claim: they may be claimed apart, or later."""

    def hear_of(self, kinds: Collection[str]) -> None:
        """Note that a worker here runs all these kinds, also those that it does not claim at present."""
        ...


@runtime_checkable
class WindowListener(Protocol):
    """A backend whose service shows the windows of workers. Few do, so this is a protocol of its own."""

    async def tell_window(self, size: int, waiting: int) -> None:
        """Note how many tasks the worker may hold, and how many of these wait for the next call of their handler.

        The service may hear of it with a later request of the worker.
        """
        ...


@runtime_checkable
class WorkerDirectory(Protocol):
    """A backend that also knows the workers of its tasks. Few services do, so this is a protocol of its own."""

    async def workers(self) -> list[WorkerInfo]:
        """List the workers that hold leases, or called the service lately."""
        ...


@runtime_checkable
class NodeDirectory(Protocol):
    """A backend that also knows the nodes of its service: the processes that have the store open."""

    async def nodes(self) -> list[NodeInfo]:
        """List the nodes, also those that have left lately."""
        ...


@runtime_checkable
class KindDirectory(Protocol):
    """A backend that also keeps settings of kinds: options for tasks whose submissions do not give them."""

    async def kinds(self) -> list[KindInfo]:
        """List the kinds that have settings, sorted by name."""
        ...

    async def kind(self, kind: str) -> KindInfo | None:
        """Return the settings of a kind; None: it has none."""
        ...

    async def set_kind(self, kind: str, settings: KindSettings, *, is_declared: bool = False) -> KindInfo:
        """Replace the settings of a kind. They hold for all tasks that are scheduled once this has returned.

        Tasks that were scheduled before keep their options. A kind of names, `named:` or `once:`, is refused.

        `is_declared`: the code of a worker says so. That takes effect once, for the settings in which it differs from
        what code declared before; the others stay as they are. Its repeats change nothing, nor does what older code
        says while workers repeat what newer code says.
        """
        ...

    async def delete_kind(self, kind: str) -> None:
        """Remove the settings of a kind, and what code has declared; a kind that has none is left as it is."""
        ...


@runtime_checkable
class PeriodicDirectory(Protocol):
    """A backend that also keeps periodic tasks, and schedules a task at each of their firings."""

    async def list_periodic(self) -> list[PeriodicInfo]:
        """List the periodic tasks, sorted by name, each with its next firing."""
        ...

    async def get_periodic(self, name: str) -> PeriodicInfo | None:
        """Return a periodic task with its next firings; None: there is none of this name."""
        ...

    async def set_periodic(self, name: str, task: PeriodicTask, *, is_declared: bool = False) -> PeriodicInfo:
        """Add a periodic task, or replace when it fires and what is scheduled. A pause stays.

        `is_declared`: the code of a worker says so. That takes effect once: its repeats change nothing, nor does what
        older code says while workers repeat what newer code says.
        """
        ...

    async def pause_periodic(self, name: str, *, is_paused: bool = True) -> PeriodicInfo:
        """Pause a periodic task, or resume it; what falls into a pause is not made up for. Refused if there is none."""
        ...

    async def trigger_periodic(self, name: str, *, at: datetime) -> Scheduled:
        """Let a periodic task fire once, also if it is paused. Refused if there is none.

        The instant `at` is in the id of the task, so that a repeated call makes no second task.
        """
        ...

    async def delete_periodic(self, name: str) -> None:
        """Remove a periodic task, if there is one; the tasks that it has scheduled stay."""
        ...


@runtime_checkable
class TokenDirectory(Protocol):
    """A backend that also keeps access tokens, and a log of what operators did.

    Whoever reaches the store itself may do everything, like an access token with all scopes for all kinds.
    """

    async def tokens(self) -> list[TokenInfo]:
        """List the access tokens, the oldest first, also those that have ended lately."""
        ...

    async def token(self, token: str) -> TokenInfo | None:
        """Return an access token by its id, or by its name if it is valid; None: there is none."""
        ...

    async def create_token(
        self,
        *,
        token_id: str,
        name: str,
        digest: str,
        scopes: Sequence[Scope],
        kinds: Sequence[str],
        expires_at: datetime | None = None,
    ) -> TokenInfo:
        """Make an access token whose secret has this SHA-256; a repeat with the same id makes no second one."""
        ...

    async def revoke_token(self, token: str) -> TokenInfo:
        """End an access token, for good. Refused if there is none."""
        ...

    async def rotate_token(self, token: str, *, digest: str, overlap: float = 0.0) -> TokenInfo:
        """Give an access token another secret; the one before it is taken for `overlap` seconds more."""
        ...

    async def audit(self, *, cursor: str | None = None, limit: int = 100) -> AuditPage:
        """Return a page of the log of what operators did, the latest first."""
        ...


@runtime_checkable
class GateDirectory(Protocol):
    """A backend with gates: it does not start the tasks of a kind or a collection whose gate is closed.

    Running tasks go on, and tasks are accepted. What is judged by a claim's answer: from the answer of `set_gate` on,
    no claim is granted such a task by any process.
    """

    async def gates(self) -> list[GateInfo]:
        """List the closed gates: those of kinds, then those of collections, sorted by name."""
        ...

    async def set_gate(
        self,
        *,
        kind: str | None = None,
        collection: str | None = None,
        mode: Literal["pause", "drop"] = "pause",
        until: datetime | None = None,
        duration: float | None = None,
        reason: str | None = None,
    ) -> GateInfo:
        """Close the gate of a kind or of a collection, in place of the gate that it has.

        Due tasks wait (*pause*), or end as *cancelled* (*drop*). The gate opens by itself at `until`, or `duration`
        seconds from now, by the service's clock. A kind of names, `named:` or `once:`, is refused.
        """
        ...

    async def open_gate(self, *, kind: str | None = None, collection: str | None = None) -> None:
        """Open a gate; a kind or collection that has none is left as it is."""
        ...


@runtime_checkable
class ChainDirectory(Protocol):
    """A backend that knows what each task came from: its `parent`, and the `root` of the chain.

    Such a backend also has the argument `root` of `list_tasks`: the first task of a chain, and all that came from it.
    """

    async def cancel_chain(self, task_id: str, *, cursor: str | None = None) -> ChainCancelled:
        """Cancel the tasks of the chain of this task that have not ended.

        One call is one step; its `cursor` begins the next one. From the answer to the first step on, a task that comes
        from this chain, by a run that goes on, is cancelled where it is accepted.
        """
        ...


@runtime_checkable
class Rescheduler(Protocol):
    """A backend that can change a task that waits."""

    async def reschedule(
        self,
        task_id: str,
        *,
        at: datetime | None = None,
        delay: float | None = None,
        priority: int | None = None,
        request_id: str | None = None,
    ) -> Rescheduled:
        """Have a waiting task be due at `at`, or `delay` seconds from now, and in the lane of this priority.

        What is not given stays. Other tasks for which it waits, gates, limits and the turn of its key hold as before.
        Refused with the reason if the task runs, has ended or is unknown. The same call with the same `request_id` has
        the same answer, and changes nothing.
        """
        ...


@runtime_checkable
class BulkChanger(Protocol):
    """A backend that can cancel or reschedule all tasks that match, after a dry run.

    One call is one step, whose `cursor` begins the next one. A dry run counts, and its answer has the token that the
    act takes; further steps of a dry run take it too. An act changes no task that was scheduled after the first step of
    the dry run. A repeated step of a cancel changes and counts what is left.
    """

    async def cancel_matching(
        self, *, dry_run: bool = False, token: str | None = None, cursor: str | None = None, **wanted: Unpack[Selection]
    ) -> Matched:
        """Cancel the tasks that match and have not ended. Refused with a token of another request, or without one."""
        ...

    async def reschedule_matching(
        self,
        *,
        at: datetime | None = None,
        delay: float | None = None,
        priority: int | None = None,
        dry_run: bool = False,
        token: str | None = None,
        cursor: str | None = None,
        **wanted: Unpack[Selection],
    ) -> Matched:
        """Reschedule the tasks that match and wait, as `Rescheduler` does. Refused as a cancel is."""
        ...


@runtime_checkable
class Purger(Protocol):
    """A backend that also removes tasks that have ended, before their retention is over."""

    async def purge(
        self,
        task_ids: Sequence[str] = (),
        *,
        older_than: float = 0.0,
        cursor: str | None = None,
        dry_run: bool = False,
        **wanted: Unpack[Selection],
    ) -> Purged:
        """Remove these tasks, or those that match, if they ended at least `older_than` seconds ago, or only count them.

        One call is one step: it removes so few tasks that no heartbeat waits long, and its `cursor` begins the next
        step. A task that has not ended, or whose end other tasks have still to be told, stays. A repeated step removes
        what is left, and counts only that.
        """
        ...

    async def vacuum(self) -> Vacuumed:
        """Give back a part of the file's free space, as small as a step of `purge`. Raises `Refused` without a file."""
        ...


@runtime_checkable
class DeadLetters(Protocol):
    """A backend in which an operator can look at dead tasks, begin new lives of them, and remove them.

    A call is for the tasks that it names, or for those that match a `Selection`. `status` is *dead* if it is not given;
    *fatal_failure* and *dropped* can be redriven too.

    A service that does not know single tasks (`TaskSink` only) takes a `kind` alone. It refuses what it cannot select,
    lists a sample, and redrives and removes all dead tasks of the kind, in the background.
    """

    async def list_dead(self, *, cursor: str | None = None, limit: int = 100, **wanted: Unpack[Selection]) -> Page:
        """List the dead tasks that match, in an order that nothing changes; `cursor` is that of the page before.

        A page may have fewer tasks than `limit`, or none, and yet a cursor. Who walks through all pages gets each task
        once that matches all the while, also if others are redriven or removed meanwhile.
        """
        ...

    async def redrive(
        self,
        task_ids: Sequence[str] = (),
        *,
        redrive_id: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
        rate: int | None = None,
        dry_run: bool = False,
        **wanted: Unpack[Selection],
    ) -> Redriven:
        """Make tasks ready again that are dead, failed for good or dropped: these, or a page of those that match.

        A new life has no failures and crashes, and its attempts and fences continue those of the life before. The
        history of the task gets an entry *redriven*. A task that cannot be redriven is *failed* with the reason, and
        does not fail the others. The same ids under the same `redrive_id` have the same answer, and change nothing.

        A service that redrives in the background does so at most `rate` a second; the others redrive at once, and
        ignore `rate`.
        """
        ...

    async def purge(
        self,
        task_ids: Sequence[str] = (),
        *,
        older_than: float = 0.0,
        cursor: str | None = None,
        dry_run: bool = False,
        **wanted: Unpack[Selection],
    ) -> Purged:
        """Remove tasks that have ended: see `Purger`."""
        ...


def dead_ones(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the filters of `list_dead` as those of `list_tasks`: *dead* ones, unless another status is given.

    Raises `Refused` for the status of tasks that cannot be redriven.
    """
    given = {name: value for name, value in wanted.items() if value is not None}
    status = given.setdefault("status", Status.DEAD)
    if status not in REDRIVABLE:
        ended = ", ".join(sorted(REDRIVABLE))
        raise Refused(f"a task that is {status} is no dead letter: name one of {ended}")
    return given


def unknown_task(task_id: str) -> str:
    """Return the refusal of a call for a task that the service does not know."""
    return f"there is no task {task_id!r}: it was never scheduled, or was deleted after its end"


_CANCEL_AGAIN = 1.0  # seconds


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel asyncio's tasks, and wait until they have ended, however they end.

    A task that goes on is cancelled again each second, because libraries swallow cancels: so does `asyncio.wait_for` of
    Python 3.11 if what it waits for ends at the same moment (python/cpython#86296).
    """
    cancelled = list(tasks)
    left = set(cancelled)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_CANCEL_AGAIN)
    await asyncio.gather(*cancelled, return_exceptions=True)  # asyncio logs errors that nobody retrieves
