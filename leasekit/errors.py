"""Every exception that leasekit raises, and `Fatal` and `NotYet`, which handlers raise.

As a tree:

    LeasekitError
    ├── ConfigError              settings that contradict one another (also a ValueError)
    ├── UnknownScheme            no installed backend has this URL's scheme
    ├── MissingDependency        a needed library is not installed; the message says how to install it
    ├── Closed                   the client was closed, and stays closed: connect() again
    ├── CannotDecode             a value of a task is encoded: this client has no such codec, or another key
    ├── BackendError             a request to the service failed
    │   ├── Unavailable          no usable answer: refused, timed out, broken off, 5xx; worth another try
    │   │   └── ProtocolError    the service's answer is not in the protocol
    │   ├── Throttled            the service answered "later"; worth another try, not before `retry_after`
    │   ├── Refused              the service will never take this request; says which item and field
    │   ├── AccessDenied         the access token is missing or not valid, or lacks a right; says which
    │   ├── Untrusted            the certificate of the service is not trusted; says what to do
    │   ├── StoreLocked          another process has this store open, and cannot be joined
    │   └── StoreDamaged         the file of this store is damaged, missing or replaced; says how to recover
    └── LeaseError
        ├── LeaseLost            another process may hold this task now: stop side effects
        ├── Cancelled            the task was cancelled while it ran: wind down
        ├── Draining             the worker stops: end now; the task is released with its progress
        ├── IdleTimeout          no progress was reported for idle_timeout: end now; the task is tried again
        ├── AlreadyDone          the work of a `once` was completed before
        ├── NotGranted           the named lease was not granted within the time to wait for it
        └── NotHeld              the lease has ended, or was never begun, in this process

    Fatal                        raised by a handler: the task failed for good and must not run again
    └── TooLarge                 a result, an error or successors are larger than the service takes (a ValueError, too)

    NotYet                       raised by a handler: what it waits for is not there yet; call it again later
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

__all__ = [
    "AccessDenied", "AlreadyDone", "BackendError", "Cancelled", "CannotDecode", "Closed", "ConfigError", "Draining",
    "Fatal", "IdleTimeout", "LeaseError", "LeaseEvent", "LeaseLost", "LeasekitError", "LossReason", "MissingDependency",
    "NotGranted", "NotHeld", "NotYet", "ProtocolError", "Refused", "StoreDamaged", "StoreLocked", "Throttled",
    "TooLarge", "Unavailable", "UnknownScheme", "Untrusted",
]  # fmt: skip

_LONGEST = 10 * 365 * 86400.0  # seconds: what settings accept as a duration


class LeasekitError(Exception):
    """The root of every exception that leasekit raises by itself."""


class ConfigError(LeasekitError, ValueError):
    """Settings contradict one another; the message names the number to change."""


class UnknownScheme(LeasekitError, ValueError):
    """No installed backend has the scheme of this URL; the message lists the installed schemes."""


class MissingDependency(LeasekitError, ImportError):
    """A library that this part of leasekit needs is not installed; the message names the extra."""


class Closed(LeasekitError):
    """The client was closed, before the call or while it waited: connect() again."""

    def __init__(self, message: str = "this client was closed: connect() again") -> None:
        super().__init__(message)


class CannotDecode(LeasekitError):
    """A payload or a checkpoint is encoded, and this client cannot decode it: none of the task's code has run."""

    def __init__(self, message: str, *, codec: str = "", has_codec: bool = False) -> None:
        super().__init__(message)
        self.codec = codec
        """The name of the codec that has encoded the value."""
        self.has_codec = has_codec
        """Whether the client has that codec. False: the task was given back, and is ready again some seconds later.
        True: the value is damaged, or was encoded with another key, and the run has failed and is tried again."""


class BackendError(LeasekitError):
    """A request to the service failed."""


class Unavailable(BackendError):
    """No usable answer came. Whether the request was applied is unknown; every request may be repeated."""


class Throttled(BackendError):
    """The service answered "later": try again, not before `retry_after`."""

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds to wait; None: the service did not say."""


class ProtocolError(Unavailable):
    """The service's answer is not in the protocol: truncated, of a wrong type, or not JSON at all."""


class Refused(BackendError):
    """The service will not take this request, now or later."""

    def __init__(self, message: str, *, errors: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message)
        self.errors = list(errors)
        """One mapping for each fault: `item` (position in the batch), `field`, `detail`."""


class AccessDenied(BackendError):
    """The access token is missing or not valid, or lacks a scope, or a kind that the call names: nothing was done."""

    def __init__(self, message: str, *, errors: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message)
        self.errors = list(errors)
        """Of kinds that the call names, and the token is not for: one mapping for each, like those of `Refused`."""


class Untrusted(BackendError):
    """The certificate of the service is not trusted, or is for another host: nothing was sent."""


class StoreLocked(BackendError):
    """Another process has this store open, and cannot be joined: two on one file would hand out the same task."""


class StoreDamaged(BackendError):
    """The file of this store is damaged, missing or replaced; the message says how to recover.

    No task was handed out from that file.
    """


class LeaseError(LeasekitError):
    """The root of the exceptions about one lease."""


@dataclass(frozen=True, slots=True)
class LeaseEvent:
    """An event in the life of a lease, as the keeper recorded it."""

    at: float
    """CLOCK_BOOTTIME, in seconds."""
    what: str
    """`sent`, a verdict's word, or `failed` for a call without an answer; `stopped`, `starved`, `blocked` or
    `suspended` for events of the process, and `jumped` for its wall clock."""
    seconds: float
    """With `sent`: how late after its slot; with verdicts and `failed`: the round trip; with the others: how long the
    process was held up, or how far the clock jumped."""
    detail: str = ""
    """With `failed`: why."""


LossReason = Literal[
    "expired", "strikes", "taken", "overdue", "settled", "cancelled", "unknown", "idle", "unreported", "closed",
]  # fmt: skip
"""Why a lease was lost.

- `expired`: no beat was acknowledged in time; `strikes`: too many failed in a row.
- `taken`, `settled`, `cancelled`: the service says that another process holds the task, or that the task has ended.
- `overdue`: the service says that the `max_runtime` of the task is over.
- `unknown`: the service says that the lease is gone, for no reason of this list.
- `idle`: the handler reported no progress, and did not end when told to.
- `unreported`: the handler has ended, and its result could not be reported while the lease lasted.
- `closed`: the client was closed while the handler ran, or other code has closed its descriptors.
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
        """Why the lease was lost, in one word."""
        self.events = events
        """The recorded events of the lease, the oldest first."""


class Cancelled(LeaseError):
    """The task was cancelled while it ran: wind down; the lease is kept until the block ends."""


class Draining(LeaseError):
    """The worker stops and no longer waits for the handler: end now; the task is then released with its progress."""


class IdleTimeout(LeaseError):
    """The handler reported no progress for its `idle_timeout`: end now; the task is then settled as *retry*."""


class AlreadyDone(LeaseError):
    """The work of a `once` was completed before: nothing is left to do."""


class NotGranted(LeaseError):
    """The named lease was not granted within the time to wait for it: the block did not begin."""

    def __init__(self, message: str, *, ended: str | None = None) -> None:
        super().__init__(message)
        self.ended = ended
        """How the name's task has ended (`cancelled`, `dead` …) if the name can no longer be granted, else None."""


class NotHeld(LeaseError):
    """The lease has ended, or was never begun, in this process (a forked child holds no lease of its parent)."""


class Fatal(Exception):
    """Raise `Fatal` in a handler to settle the task as a fatal failure: the task will not run again."""


class TooLarge(Fatal, ValueError):
    """A result, an error or the successors of a task are larger than the service takes.

    Raised where the value is given. A handler that does not catch it fails for good: the next run would end the same.
    """


class NotYet(Exception):
    """Raise `NotYet` in a handler if what it waits for is not there yet: the handler is called again `after` seconds.

    This is no failure, and no attempt: the task keeps its lease, and the worker's thread is free meanwhile. A long wait
    goes back to the service, and any worker goes on then. Outside of a worker, in a `with` block, the task is released,
    and is ready again after that time.
    """

    def __init__(self, message: str = "not yet", *, after: float | None = None) -> None:
        super().__init__(message)
        if after is not None and (
            isinstance(cast("object", after), bool)
            or not isinstance(cast("object", after), int | float)
            or not 0 <= after <= _LONGEST
        ):
            raise ConfigError(f"after must be a number of seconds from 0 to {_LONGEST:,.0f}, got {after!r:.100}")
        self.after = after
        """Seconds until the next call; None: a second."""
