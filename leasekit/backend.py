"""The seam between the keeper and a service: the protocols that an adapter implements.

A backend is one service that hands out tasks under leases. The keeper calls a backend from one asyncio event loop only,
and closes it there, so a backend needs no locks. An adapter wraps a blocking client library itself.

Every method takes a batch and answers item by item, in order. A call that fails as a whole raises a `BackendError`:
`Unavailable` (or `ProtocolError`), `Throttled` or `Refused`. Any other exception is treated as `Unavailable`.
Every call can be repeated: the second answer equals the first.

`leasekit.testing.contract` has these rules as tests; subclass it for each adapter.
"""

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol, runtime_checkable

from leasekit._lifecycle.validation import check_kinds, check_limit, checked
from leasekit.task import (
    Beat,
    ChainCancelled,
    Claimed,
    CompleteSettings,
    GateInfo,
    KindInfo,
    KindSettings,
    NewTask,
    NodeInfo,
    Outcome,
    Page,
    Purged,
    Redriven,
    Scheduled,
    Settlement,
    Stats,
    Status,
    Task,
    TaskInfo,
    Vacuumed,
    Verdict,
    VerdictWord,
    WorkerInfo,
    effective,
)

__all__ = [
    "Backend", "Beat", "CancelSource", "Capabilities", "ChainCancelled", "ChainDirectory", "Claimed",
    "CompleteSettings", "GateDirectory", "GateInfo", "KindDirectory", "KindInfo", "KindListener", "KindSettings",
    "NameSource", "NewTask", "NodeDirectory", "NodeInfo", "Outcome", "Page", "Purged", "Purger", "Redriven",
    "Redriver", "Scheduled", "Scheduler", "Settlement", "Stats", "Status", "Task", "TaskInfo", "TaskSink", "Vacuumed",
    "Verdict", "VerdictWord", "WorkerDirectory", "WorkerInfo", "cancel_all", "check_kinds", "check_limit", "checked",
    "effective",
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
class KindListener(Protocol):
    """A backend that is told of all kinds of a worker, before its first claim: they may be claimed apart, or later."""

    def hear_of(self, kinds: Collection[str]) -> None:
        """Note that these kinds are all run here, whichever of them are claimed at present."""
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

    async def set_kind(self, kind: str, settings: KindSettings) -> KindInfo:
        """Replace the settings of a kind. They hold for all tasks that are scheduled once this has returned.

        Tasks that were scheduled before keep their options. A kind of names, `named:` or `once:`, is refused.
        """
        ...

    async def delete_kind(self, kind: str) -> None:
        """Remove the settings of a kind; a kind that has none is left as it is."""
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
class Purger(Protocol):
    """A backend that also removes tasks that have ended, before their retention is over."""

    async def purge(
        self,
        *,
        kind: str | None = None,
        status: Status | None = None,
        older_than: float = 0.0,
        cursor: str | None = None,
        dry_run: bool = False,
    ) -> Purged:
        """Remove the tasks that match, and ended at least `older_than` seconds ago, or only count them (`dry_run`).

        One call is one step: it removes so few tasks that no heartbeat waits long, and its `cursor` begins the next
        step. A task that has not ended, or whose end other tasks have still to be told, stays. A repeated step removes
        what is left, and counts only that.
        """
        ...

    async def vacuum(self) -> Vacuumed:
        """Give back a part of the file's free space, as small as a step of `purge`. Raises `Refused` without a file."""
        ...


@runtime_checkable
class Redriver(Protocol):
    """A backend in which an operator can begin a new life of dead tasks."""

    async def redrive(
        self,
        task_ids: Sequence[str] = (),
        *,
        redrive_id: str | None = None,
        kind: str | None = None,
        status: Status | None = None,
        collection: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
        rate: int | None = None,
        dry_run: bool = False,
    ) -> Redriven:
        """Make tasks ready again that are dead, failed for good or dropped: these, or a page of those that match.

        A new life has no failures and crashes, and its attempts and fences continue those of the life before. The
        history of the task gets an entry *redriven*. A task that cannot be redriven is *failed* with the reason, and
        does not fail the others. The same ids under the same `redrive_id` have the same answer, and change nothing.

        A service that does not know single tasks (`TaskSink` only) takes a `kind` alone, and redrives all its dead
        tasks in the background, at most `rate` a second; the others redrive at once, and ignore `rate`.
        """
        ...


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
