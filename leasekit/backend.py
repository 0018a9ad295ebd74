"""THE SEAM: what an adapter implements, and nothing more.

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
from typing import Any, Protocol, runtime_checkable

from leasekit.task import Beat, Claimed, NewTask, Page, Scheduled, Settlement, Status, TaskInfo, Verdict

__all__ = ["Backend", "Intake", "Roster", "Scheduler", "Traits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a service can do, declared by its adapter; the contract suite checks the declaration."""

    max_batch: int = 100  # beats or settlements in one call
    max_claim: int = 100  # tasks in one claim
    fences: bool = True  # a number that grows with every claim
    refuses_stale: bool = True  # a write with the token of an earlier claim is *gone*
    tells_waited: bool = True  # says how long a claim had waited when it was granted
    remembers_claims: bool = True  # a repeated claim_id gets the same tasks again; limit 0 ends the claim
    keeps_claims: bool = False  # what a cancelled claim was granted goes to the adapter's next claim, or back
    orders: bool = True  # passes on a cancel with a beat's verdict
    progress: bool = True  # keeps checkpoints for the next holder
    max_progress: int = 64 * 1024  # bytes of one checkpoint as JSON; 64 KiB at most
    max_result: int | None = 1024 * 1024  # bytes of a result as JSON; None: results are not kept, of whatever size
    retries: bool = True  # hands out again what was given back or lost its holder; False: that is for others to do
    unique_ids: bool = True  # of one id, or live dedupe key, there is one task; named leases stand on that
    dependencies: bool = False  # a task may be scheduled `after` others, in any order; False: that is refused


class Backend(Protocol):
    """A service that hands out tasks under leases."""

    traits: Traits

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
class Intake(Protocol):
    """A backend that also accepts work. What has become of one task it may not know: many a queue does not."""

    async def schedule(self, tasks: Sequence[NewTask]) -> list[Scheduled]:
        """Accept tasks: when this returns they are durable. The same id, or live dedupe key, makes no second task."""
        ...

    async def stats(self) -> dict[str, Any]:
        """How many tasks of each kind are in which status: `{"kinds": {kind: {status: count}}}`."""
        ...


@runtime_checkable
class Scheduler(Intake, Protocol):
    """A backend that also accepts work, and knows what has become of it."""

    async def get(self, task_id: str) -> TaskInfo | None:
        """Everything about one task, None where there is none of that id."""
        ...

    async def cancel(self, task_ids: Sequence[str]) -> list[Verdict]:
        """Cancel: `cancelled` where it waits, `ordered` where it runs, `gone` where it has ended or is unknown."""
        ...

    # Last in the class: below it, `list` is this method and no longer the type.
    async def list(
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
class Roster(Protocol):
    """A backend that also knows who works on its tasks. Few services do: it is a protocol of its own."""

    async def workers(self) -> list[dict[str, Any]]:
        """Workers that hold leases, or were heard of lately: `name`, `last_seen` (RFC 3339, or None), `running`."""
        ...
