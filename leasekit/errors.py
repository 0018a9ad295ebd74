"""Every exception that leasekit raises, and the two that a body raises itself.

As a tree:

    LeasekitError
    ├── ConfigError              settings that contradict one another (also a ValueError)
    ├── UnknownScheme            no installed backend answers to this URL
    ├── MissingDependency        the backend is known, a library that it needs is not installed
    ├── Closed                   the client was closed: it stays closed, connect() again
    ├── StoreLocked              another server has this store open
    ├── StoreDamaged             the file of this store is not whole, or not what it was; says how to recover
    ├── BackendError             the service did not do what it was asked
    │   ├── Unavailable          no usable answer: refused, timed out, broken off, 5xx; worth another try
    │   │   └── ProtocolError    it answered something that is not in the protocol
    │   ├── Throttled            it answered "later"; worth another try, not before `retry_after`
    │   └── Refused              it will not take this request, now or later; says which item and field
    └── LeaseError
        ├── LeaseLost            someone else may hold this task now: stop side effects
        ├── Cancelled            whoever scheduled the task no longer wants it: wind down
        ├── Draining             the worker stops: end, the task is given back with its progress
        ├── IdleTimeout          the body reported no progress for its idle_timeout: end, the task is tried again
        ├── AlreadyDone          of what is to be run once: it was, to its end
        ├── NotGranted           a named lease is held by another, and the time to wait for it is over
        └── NotHeld              this lease has ended, or was never begun, in this process

    Fatal                        raised by a body: the task failed for good, do not run it again
    └── TooLarge                 a result, an error or successors are larger than the service takes (a ValueError, too)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "AlreadyDone", "BackendError", "Cancelled", "Closed", "ConfigError", "Draining", "Fatal", "IdleTimeout",
    "LeaseError", "LeaseEvent", "LeaseLost", "LeasekitError", "LossReason", "MissingDependency", "NotGranted",
    "NotHeld", "ProtocolError", "Refused", "StoreDamaged", "StoreLocked", "Throttled", "TooLarge", "Unavailable",
    "UnknownScheme",
]  # fmt: skip


class LeasekitError(Exception):
    """The root: catching it catches everything that leasekit raises by itself."""


class ConfigError(LeasekitError, ValueError):
    """Settings contradict one another; the message names the number to change."""


class UnknownScheme(LeasekitError, ValueError):
    """No installed backend answers to the scheme of this URL; the message lists those that are installed."""


class MissingDependency(LeasekitError, ImportError):
    """A backend needs a library that is not installed; the message is the command that installs it."""


class Closed(LeasekitError):
    """The client was closed, before the call or while it waited: connect() again."""

    def __init__(self, message: str = "this client was closed: connect() again") -> None:
        super().__init__(message)


class StoreLocked(LeasekitError):
    """Another server has this store open: two servers on one file would hand out the same task."""


class StoreDamaged(LeasekitError):
    """The file of this store is not whole, or not what it was; the message says how to recover.

    Nothing was handed out from it.
    """


class BackendError(LeasekitError):
    """The service did not do what it was asked."""


class Unavailable(BackendError):
    """No usable answer came: whether the request was applied is unknown, and every request may be repeated."""


class Throttled(BackendError):
    """The service answered "later"."""

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds to wait; None: the service did not say."""


class ProtocolError(Unavailable):
    """The service answered something that is not in the protocol: truncated, of a wrong type, or no JSON at all."""


class Refused(BackendError):
    """The service will not take this request, now or later."""

    def __init__(self, message: str, *, errors: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message)
        self.errors = list(errors)
        """What was wrong, one mapping an entry: `item` (position in the batch), `field`, `detail`."""


class LeaseError(LeasekitError):
    """Something about one lease."""


@dataclass(frozen=True, slots=True)
class LeaseEvent:
    """An event in the life of a lease, as the keeper recorded it."""

    at: float
    """CLOCK_BOOTTIME, in seconds."""
    what: str
    """`sent`, a verdict's word, or `failed` for a call without an answer; `stopped`, `starved`, `blocked` or
    `suspended` for what befell the process, and `jumped` for its wall clock."""
    seconds: float
    """With `sent`: how long after its slot was due; with verdicts and `failed`: the round trip; with the others: how
    much of it."""
    detail: str = ""
    """With `failed`: why."""


LossReason = Literal[
    "expired", "strikes", "taken", "settled", "cancelled", "unknown", "idle", "unreported", "closed",
]  # fmt: skip
"""Why a lease was lost.

- `expired`: no beat was acknowledged in time; `strikes`: too many failed in a row.
- `taken`, `settled`, `cancelled`: the service says that another holds the task, or that it has ended.
- `unknown`: the service says that the lease is gone, for no reason of this list.
- `idle`: the body reported no progress, and did not end when told to.
- `unreported`: the body has ended, and its result could not be reported while the lease lasted.
- `closed`: the client was closed while the body ran.
"""


class LeaseLost(LeaseError):
    """The lease is over, and another process may hold the task: stop side effects. The message says why."""

    def __init__(
        self, message: str, *, task_id: str = "", reason: LossReason = "unknown", events: Sequence[LeaseEvent] = ()
    ) -> None:
        super().__init__(message)
        self.task_id = task_id
        """The id of the task."""
        self.reason: LossReason = reason
        """Why, in one word."""
        self.events = events
        """What happened to the lease before, the oldest first."""


class Cancelled(LeaseError):
    """The task was cancelled while it ran: wind down; the lease is still yours until the block ends."""


class Draining(LeaseError):
    """The worker stops and waits no longer for the body: end; the task is then given back, with its progress."""


class IdleTimeout(LeaseError):
    """The body reported no progress for its `idle_timeout`: end; the task is then settled as a retriable failure."""


class AlreadyDone(LeaseError):
    """The work of a `once` was run to its end before: there is nothing left to do."""


class NotGranted(LeaseError):
    """A named lease is held by another, and the time to wait for it is over: nothing was begun."""

    def __init__(self, message: str, *, ended: str | None = None) -> None:
        super().__init__(message)
        self.ended = ended
        """How the name's task has ended (`cancelled`, `dead` …) where nobody is granted it any more, else None."""


class NotHeld(LeaseError):
    """This lease has ended, or was never begun, in this process (a forked child holds none of its parent's)."""


class Fatal(Exception):
    """Raise it in a body to settle the task as a fatal failure: it will not be run again."""


class TooLarge(Fatal, ValueError):
    """A result, an error or the successors of a task are larger than the service takes.

    Raised where they are given. A body that lets it pass fails for good, for its next run would end in the same.
    """
