"""Every exception that leasekit raises, and the two that a body raises itself.

LeasekitError
├── ConfigError              settings that contradict one another (also a ValueError)
├── UnknownScheme            no installed backend answers to this URL
├── MissingDependency        the backend is known, a library that it needs is not installed
├── Closed                   the client was closed: it stays closed, connect() again
├── StoreLocked              another server has this store open
├── StoreDamaged             the file of this store is not whole, or not what it was; says how to recover
├── BackendError             the service did not do what it was asked
│   ├── Unavailable          no usable answer: refused, timed out, broken off, 5xx; worth another try
│   ├── Throttled            it answered "later"; worth another try, not before `retry_after`
│   ├── ProtocolError        it answered something that is not in the protocol
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
from typing import Any

__all__ = [
    "AlreadyDone", "BackendError", "Cancelled", "Closed", "ConfigError", "Draining", "Fatal", "IdleTimeout",
    "LeaseError", "LeaseEvent", "LeaseLost", "LeasekitError", "MissingDependency", "NotGranted", "NotHeld",
    "ProtocolError", "Refused", "StoreDamaged", "StoreLocked", "Throttled", "TooLarge", "Unavailable", "UnknownScheme",
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
    """The service answered "later". `retry_after` is in seconds, None where it did not say."""

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ProtocolError(Unavailable):
    """The service answered something that is not in the protocol: truncated, of a wrong type, or no JSON at all."""


class Refused(BackendError):
    """The service will not take this request, now or later.

    `errors` names what was wrong, one mapping an entry: `item` (position in the batch), `field`, `detail`.
    """

    def __init__(self, message: str, *, errors: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message)
        self.errors = list(errors)


class LeaseError(LeasekitError):
    """Something about one lease."""


@dataclass(frozen=True, slots=True)
class LeaseEvent:
    """One line of the story of a lease.

    `at` is CLOCK_BOOTTIME in seconds, `what` one of: `sent` (`seconds`: how long after its slot was due); a verdict's
    word, or `failed` for a call without an answer (`seconds`: the round trip; `detail`: why); `stopped`, `starved`,
    `blocked`, `suspended` for what befell the process, and `jumped` for its wall clock (`seconds`: how much of it).
    """

    at: float
    what: str
    seconds: float
    detail: str = ""


class LeaseLost(LeaseError):
    """Someone else may hold this task now: stop side effects.

    `reason` is one word (`expired`, `taken`, `settled`, `unknown`, `strikes`, `idle` …), the message one sentence
    that says why, `task_id` which task, `events` what happened to the lease before, the oldest first.
    """

    def __init__(self, message: str, *, task_id: str = "", reason: str = "", events: Sequence[LeaseEvent] = ()) -> None:
        super().__init__(message)
        self.task_id = task_id
        self.reason = reason
        self.events = events


class Cancelled(LeaseError):
    """The task was cancelled while it ran: wind down; the lease is still yours until the block ends."""


class Draining(LeaseError):
    """The worker stops and waits no longer for the body: end; the task is then given back, with its progress."""


class IdleTimeout(LeaseError):
    """The body reported no progress for its `idle_timeout`: end; the task is then settled as a retriable failure."""


class AlreadyDone(LeaseError):
    """What is to be run once was run to its end before: there is nothing left to do."""


class NotGranted(LeaseError):
    """A named lease is held by another, and the time to wait for it is over: nothing was begun.

    `ended` is how its task has ended (`cancelled`, `dead` …) where nobody is granted it any more, else None.
    """

    def __init__(self, message: str, *, ended: str | None = None) -> None:
        super().__init__(message)
        self.ended = ended


class NotHeld(LeaseError):
    """This lease has ended, or was never begun, in this process (a forked child holds none of its parent's)."""


class Fatal(Exception):
    """Raise it in a body to settle the task as a fatal failure: it will not be run again."""


class TooLarge(Fatal, ValueError):
    """A result, an error or the successors of a task are larger than the service takes.

    Raised where they are given. A body that lets it pass fails for good, for its next run would end in the same.
    """
