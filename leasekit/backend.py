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
from typing import Any, Protocol, runtime_checkable

from leasekit._lifecycle.sameness import payload_digest
from leasekit._lifecycle.validation import check_kinds, check_limit, checked
from leasekit._operator_protocols import (
    BulkChanger,
    ChainDirectory,
    DeadLetters,
    GateDirectory,
    KindDirectory,
    NodeDirectory,
    PeriodicDirectory,
    Purger,
    Rescheduler,
    TokenDirectory,
    WorkerDirectory,
    WorkerDrainer,
)
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

__all__ = [
    "Backend", "Beat", "BulkChanger", "CancelSource", "Capabilities", "ChainCancelled", "ChainDirectory", "Claimed",
    "CompleteSettings", "DeadLetters", "EndSource", "Ended", "GateDirectory", "GateInfo", "KindDirectory", "KindInfo",
    "KindListener", "KindSettings", "Matched", "NameSource", "NewTask", "NodeDirectory", "NodeInfo", "Outcome", "Page",
    "PeriodicDirectory", "PeriodicInfo", "PeriodicTask", "Purged", "Purger", "Redriven", "Rescheduled", "Rescheduler",
    "Scheduled", "Scheduler", "Selection", "Settlement", "Stats", "Status", "Task", "TaskInfo", "TaskSink", "Ticket",
    "TicketSource", "TokenDirectory", "Vacuumed", "Verdict", "VerdictWord", "WindowListener", "WorkerDirectory",
    "WorkerDrainer", "WorkerInfo", "cancel_all", "check_kinds", "check_limit", "checked", "dead_ones", "effective",
    "payload_digest", "unknown_task",
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
