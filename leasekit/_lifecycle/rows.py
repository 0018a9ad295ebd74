"""The state of a task and its limits: the values that transitions take and return."""

from typing import NamedTuple

from msgspec import Struct

from leasekit.task import Status


class Trigger(Struct, frozen=True, array_like=True, gc=False):
    """The state of a task. The order of the fields is that of the columns of a store's table."""

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
    failures: int = 0  # runs that ended in *retry*, or timed out and count as attempts
    cancel_requested: bool = False  # while the task runs
    owner: str | None = None  # the worker that holds the lease; None: the task is not leased
    token: str | None = None  # of the last grant, as long as its run may be settled
    next_trigger_at: float | None = None  # due, by the store's time; or the lease's end, by the clock of leases
    reason: str | None = None  # why the task is dead
    max_runtime: float | None = None
    # By the clock of leases: from then on the lease is not renewed. None: no bound, or the handler has not begun.
    run_until: float | None = None
    was_extended: bool = False  # a restart has moved the lease's end, and nothing was heard from its holder since
    ended_at: float | None = None  # by the store's time, as all that follow; None: the task has not ended
    # Of the current run, or the last one.
    claimed_at: float | None = None
    started_at: float | None = None  # when the first beat came that says that the handler has begun
    heartbeat_at: float | None = None  # when the last beat was accepted


class Limits(NamedTuple):
    """The bounds on failures of a task, and its waits: between attempts, and in a queue."""

    max_attempts: int | None
    max_crashes: int
    retry: bytes | None  # a RetryPolicy as JSON; None: the default
    expiry: str | None = None  # "retry": a run that times out counts as an attempt; None: as a crash
    enqueue_timeout: float = 60.0  # seconds after which a task in a queue is due again
