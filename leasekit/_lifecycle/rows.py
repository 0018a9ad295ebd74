"""Where a task stands, and what bounds it: the values that transitions are made of."""

from typing import NamedTuple

from msgspec import Struct

from leasekit.task import Status

__all__ = ["Limits", "Trigger"]


class Trigger(Struct, frozen=True, array_like=True, gc=False):
    """Where a task stands. The order of the fields is that of the columns of a store's table."""

    seq: int
    id: str
    kind: str
    priority: int
    claim_timeout: float
    heartbeat_timeout: float
    status: Status = Status.NEW
    fence: int = 0
    attempt: int = 0
    crashes: int = 0
    failures: int = 0  # runs that ended in *retry*
    cancel_requested: bool = False  # to be cancelled, while it runs
    owner: str | None = None  # who holds the lease; None: nobody
    token: str | None = None  # of the last grant, as long as it may be settled
    next_trigger_at: float | None = None  # due, or the end of the lease, by its own clock; None: never again
    reason: str | None = None  # why it is dead
    max_runtime: float | None = None
    # By the clock of leases, from when on this one is not renewed; None: there is no bound, or the body has not begun.
    run_until: float | None = None


class Limits(NamedTuple):
    """How often a task may fail, and how long it waits in between."""

    max_attempts: int | None
    max_crashes: int
    retry: bytes | None  # a RetryPolicy as JSON; None: the default
