"""The seam: what an adapter implements, and nothing more.

A backend is one service that hands out tasks under leases. It is called from the keeper's event loop (asyncio) only,
so it needs no locks; a blocking client library is wrapped inside the adapter. It may be opened in one loop and is
closed in the same.

Every method takes a batch and answers item by item, in order. Errors of the whole call are `BackendError`s:
`Unavailable` (also `ProtocolError`), `Throttled`, `Refused`. Anything else that escapes is treated as `Unavailable`.
Every call can be repeated: the second answer equals the first.

`leasekit.testing.contract` is the suite that says the same in tests; subclass it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from leasekit._lifecycle.validation import check_kinds, check_limit, checked
from leasekit.task import (
    Beat,
    Claimed,
    NewTask,
    Outcome,
    Page,
    Scheduled,
    Settlement,
    Stats,
    Status,
    Task,
    TaskInfo,
    Verdict,
    VerdictWord,
    WorkerInfo,
)

__all__ = [
    "Backend", "Beat", "Capabilities", "Claimed", "NewTask", "Outcome", "Page", "Scheduled", "Scheduler", "Settlement",
    "Stats", "Status", "Task", "TaskInfo", "TaskSink", "Verdict", "VerdictWord", "WorkerDirectory", "WorkerInfo",
    "check_kinds", "check_limit", "checked",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Capabilities of a service, declared by its adapter and checked by the contract suite."""

    max_batch: int = 100
    """Heartbeats or settlements in one call."""
    max_claim: int = 100
    """Tasks in one claim."""
    fences: bool = True
    """The service grants a number that grows with every claim."""
    refuses_stale: bool = True
    """A write with the token of an earlier claim is *gone*."""
    tells_waited: bool = True
    """The service says how long a claim had waited when it was granted."""
    remembers_claims: bool = True
    """A repeated `claim_id` gets the same tasks again; `limit` 0 ends the claim."""
    keeps_claims: bool = False
    """What a cancelled claim was granted goes to the adapter's next claim, or back."""
    orders: bool = True
    """A beat's verdict passes on a cancel."""
    progress: bool = True
    """The service keeps checkpoints for the next holder."""
    max_progress: int = 64 * 1024
    """Bytes of one checkpoint as JSON; 64 KiB at most."""
    max_result: int | None = 1024 * 1024
    """Bytes of a result as JSON; None: results are not kept, of whatever size."""
    retries: bool = True
    """The service hands out again what was given back or lost its holder; False: others must do that."""
    unique_ids: bool = True
    """There is one task for each id, or live dedupe key; named leases depend on that."""
    dependencies: bool = False
    """A task may be scheduled `after` others, in any order; False: such a task is refused."""


class Backend(Protocol):
    """A service that hands out tasks under leases.

    Where the URL that a backend was opened by means something else in another working directory, the backend has an
    attribute `url` that does not: forks and supervisors connect by it.
    """

    capabilities: Capabilities
    """What the service can do."""

    async def claim(self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str) -> Claimed:
        """Take up to `limit` tasks of these kinds (100 at most); wait up to `wait` seconds for the first.

        A call repeated with the same `claim_id` joins the first, or gets what the first got and what is still live.
        With `limit` 0 it ends the claim, where the service remembers claims: it gets what the first got and what is
        still live, does not wait, and no call with this `claim_id` is granted anything more, however late it arrives.
        Its tasks are for releasing: they come without payload and progress, so that a slow line carries them at once.
        """
        ...

    async def beat(self, beats: Sequence[Beat]) -> list[Verdict]:
        """Renew leases: `renewed`, `gone`, `throttled` or `failed` for each, in order.

        One try: the cycle is its retry.
        """
        ...

    async def settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        """End leases: `settled`, `gone`, `throttled` or `failed` for each, in order."""
        ...

    async def aclose(self) -> None:
        """Let go of connections. Leases are not touched."""
        ...


@runtime_checkable
class TaskSink(Protocol):
    """A backend that also accepts work. What has become of one task it may not know: many a queue does not."""

    async def schedule(self, tasks: Sequence[NewTask]) -> list[Scheduled]:
        """Accept tasks: when this returns they are durable. The same id, or live dedupe key, makes no second task."""
        ...

    async def stats(self) -> Stats:
        """Count the tasks of each kind in each status."""
        ...


@runtime_checkable
class Scheduler(TaskSink, Protocol):
    """A backend that also accepts work, and knows what has become of it."""

    async def get(self, task_id: str) -> TaskInfo | None:
        """Everything about one task, None where there is none of that id."""
        ...

    async def cancel(self, task_ids: Sequence[str]) -> list[Verdict]:
        """Cancel: `cancelled` if it waits, `cancel_requested` if it runs, `gone` if it has ended or is unknown."""
        ...

    async def list_tasks(
        self,
        *,
        kind: str | None = None,
        status: Status | None = None,
        collection: str | None = None,
        worker: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page:
        """Tasks that match all that is given, oldest first; `cursor` is where an earlier page ended."""
        ...


@runtime_checkable
class WorkerDirectory(Protocol):
    """A backend that also knows who works on its tasks. Few services do: it is a protocol of its own."""

    async def workers(self) -> list[WorkerInfo]:
        """List the workers that hold leases, or were heard of lately."""
        ...
