"""The values that everyone exchanges: users, keeper, adapters, server.

Frozen, keyword-only, and shaped like the items of the wire, so that a batch is encoded and decoded
as it is. Times are seconds, except `at`, which is a point in time with its zone. What comes in batches is told to the
garbage collector as nothing that it has to look at (`gc=False`): JSON has no cycles.
"""

import enum
import random as _random
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from msgspec import UNSET, Meta, Struct, UnsetType

if TYPE_CHECKING:
    from leasekit.client import Client

__all__ = [
    "Beat", "Claimed", "Exponential", "HistoryEntry", "Name", "NewTask", "Outcome", "Page", "Polynomial", "ProgressSeq",
    "RetryPolicy", "Scheduled", "Seconds", "Settlement", "Status", "Task", "TaskInfo", "TaskOptions", "Verdict",
    "VerdictWord", "Waits",
]  # fmt: skip

# `$` would let a trailing newline pass in Python, and JSON Schema knows no `\Z`.
_NAME = Meta(min_length=1, max_length=128, pattern=r"^[ -.0-~]+\Z")
Name = Annotated[str, _NAME]
"""Ids, kinds, tokens, workers: 1-128 printable ASCII characters without `/`."""

Seconds = Annotated[float, Meta(ge=0, le=10 * 365 * 86400)]
Timeout = Annotated[float, Meta(ge=2, le=365 * 86400)]
ProgressSeq = Annotated[int, Meta(ge=0, le=2**53 - 1)]
"""The number of a checkpoint among those of one claim. Every JSON reader has numbers so large."""

Outcome = Literal["success", "retry", "fatal", "release", "cancelled", "crash"]
VerdictWord = Literal["renewed", "settled", "cancelled", "ordered", "gone", "throttled", "failed"]


class Status(enum.StrEnum):
    """Where a task is in its life."""

    NEW = "new"
    ENQUEUED = "enqueued"
    CLAIMED = "claimed"
    PROCESSING = "processing"
    RETRIABLE_FAILURE = "retriable_failure"
    SUCCESS = "success"
    FATAL_FAILURE = "fatal_failure"
    CANCELLED = "cancelled"
    DROPPED = "dropped"
    DEAD = "dead"

    @property
    def ended(self) -> bool:
        """True where nothing follows: the task will not run again."""
        return self in _ENDED


_ENDED = frozenset({Status.SUCCESS, Status.FATAL_FAILURE, Status.CANCELLED, Status.DROPPED, Status.DEAD})


# How long to wait before a task's next attempt ----------------------------------------------------------------


class Exponential(Struct, frozen=True, kw_only=True, tag="exponential", tag_field="policy"):
    """Wait `first · factor^(n-1)` seconds after the n-th try, at most `max`, less a random part up to `jitter`."""

    first: Annotated[float, Meta(gt=0, le=365 * 86400)] = 1.0
    factor: Annotated[float, Meta(ge=1, le=100)] = 2.0
    max: Annotated[float, Meta(gt=0, le=365 * 86400)] = 3600.0
    jitter: Annotated[float, Meta(ge=0, le=1)] = 0.5

    def wait(self, tries: int, random: _random.Random) -> float:
        """Seconds to wait after the `tries`-th try (1 is the first)."""
        # min() before the power: factor ** 10_000 does not fit into a float.
        exponent = min(tries - 1, 64)
        return min(self.max, self.first * self.factor**exponent) * (1 - self.jitter * random.random())


class Polynomial(Struct, frozen=True, kw_only=True, tag="polynomial", tag_field="policy"):
    """Wait `n⁴ + 15 + random · 30 · (n + 1)` seconds after the n-th try."""

    def wait(self, tries: int, random: _random.Random) -> float:
        """Seconds to wait after the `tries`-th try (1 is the first)."""
        return min(tries, 100) ** 4 + 15 + random.random() * 30 * (tries + 1)


class Waits(Struct, frozen=True, kw_only=True, tag="list", tag_field="policy"):
    """Wait `waits[n-1]` seconds after the n-th try; the last entry serves for all further ones."""

    waits: Annotated[list[Seconds], Meta(min_length=1, max_length=100)]

    def wait(self, tries: int, random: _random.Random) -> float:
        """Seconds to wait after the `tries`-th try (1 is the first)."""
        return self.waits[min(tries, len(self.waits)) - 1]


RetryPolicy = Exponential | Polynomial | Waits


# Scheduling ---------------------------------------------------------------------------------------------------


class NewTask(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """A task to be scheduled. Only `kind` is required; scheduling the same `id` again makes no second task."""

    kind: Name
    id: Name | None = None  # the submitter's own; a UUIDv7 is made up where there is none
    payload: Any = None  # JSON, up to 1 MiB
    collection: Name | None = None
    priority: Annotated[int, Meta(ge=0, le=4)] = 2  # 0 is the most urgent
    at: Annotated[datetime, Meta(tz=True)] | None = None  # not before this moment
    after: Annotated[list[Name], Meta(max_length=100)] = []  # not before these have succeeded, by their ids
    dedupe_key: Annotated[str, Meta(min_length=1, max_length=256)] | None = None  # one task per kind and key
    dedupe_window: Seconds | None = None  # how long the key counts; None: as long as the first task is kept
    max_attempts: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None  # bounds attempts that ended in *retry*
    max_crashes: Annotated[int, Meta(ge=0, le=1_000_000)] = 5  # bounds runs that ended because a holder vanished
    max_runtime: Timeout | None = None
    enqueue_timeout: Annotated[float, Meta(ge=1, le=365 * 86400)] = 60.0
    claim_timeout: Timeout | None = None  # the ttl that a claim grants: no beat shortens it; None: `heartbeat_timeout`
    heartbeat_timeout: Timeout = 300.0  # the ttl that a beat grants
    retry: RetryPolicy = Exponential()
    traceparent: Annotated[str, Meta(max_length=128)] | None = None

    @property
    def claim_ttl(self) -> float:
        """Seconds that a claim of this task grants: `claim_timeout`, or `heartbeat_timeout` where none is given."""
        return self.heartbeat_timeout if self.claim_timeout is None else self.claim_timeout


class TaskOptions(TypedDict, total=False):
    """What may be said of a task besides its kind and payload; `NewTask` has the meanings and bounds."""

    id: str
    collection: str
    priority: int
    at: datetime
    after: list[str]
    dedupe_key: str
    dedupe_window: float
    max_attempts: int
    max_crashes: int
    max_runtime: float
    enqueue_timeout: float
    claim_timeout: float
    heartbeat_timeout: float
    retry: RetryPolicy
    traceparent: str


class Scheduled(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The answer to one scheduled task."""

    id: str
    created: bool  # False: it, or the first with its dedupe key, was there already
    status: Status
    conflict: bool = False  # the id is taken by a task of another kind or payload; nothing was changed


# Running ------------------------------------------------------------------------------------------------------


class _WithToken(Struct, frozen=True, kw_only=True):
    """A value that shows itself without its token: who reads a log must not be able to settle the task."""

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in super().__rich_repr__() if name != "token"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"


class Task(_WithToken, frozen=True, kw_only=True, dict=True, weakref=True):
    """One task, claimed by this process: what to run, and the right to run it."""

    id: str
    kind: str
    token: str  # unguessable, new for every claim; every later write carries it
    ttl: float  # counts from the grant
    fence: int = 0  # grows with every claim of the task; 0 where the service has none
    attempt: int = 1
    payload: Any = None
    collection: str | None = None
    priority: int = 2
    progress: Any = None  # the checkpoint that the last holder left
    traceparent: str | None = None

    # The client is in the instance's __dict__, where it is neither compared nor serialised.
    @property
    def client(self) -> "Client | None":
        """The client that claimed this task; it keeps the lease alive."""
        return vars(self).get("client")

    def bind(self, client: "Client", *, adopted: bool = False) -> "Task":
        """Remember which client claimed this task, or is to adopt it, and return the task."""
        vars(self)["client"] = client
        vars(self)["adopted"] = adopted
        return self

    def adopted_by(self, client: "Client") -> bool:
        """True once, for the client that was asked to keep a task which it has not claimed."""
        return self.client is client and bool(vars(self).pop("adopted", False))


class Claimed(Struct, frozen=True, kw_only=True):
    """The answer to a claim."""

    tasks: list[Task]
    waited: float | None = 0.0  # how long the request had waited at the service when granted; None: it does not say


class Beat(_WithToken, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """One lease to be renewed."""

    id: Name
    token: str
    progress: Any | UnsetType = UNSET  # the latest checkpoint, where there is a new one
    started: bool = True  # False: claimed and waiting in a buffer, its body has not begun
    progress_seq: ProgressSeq | None = None  # grows with each checkpoint of the claim; None: keep it in any case


class Settlement(_WithToken, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """How a run ended. Nothing is settled while its body may still run."""

    id: Name
    token: str
    outcome: Outcome
    result: Any = None  # JSON, up to 1 MiB
    error: Any = None  # JSON, up to 64 KiB; leasekit writes {"type", "message", "traceback"}
    retry_after: Seconds | None = None  # with *retry* and *release*: instead of the policy's wait
    progress: Any | UnsetType = UNSET
    then: list[NewTask] = []  # successors, scheduled in the same transaction; with *success* and *fatal* only
    progress_seq: ProgressSeq | None = None  # as in a Beat: who settles for a dead holder may not have its latest


class Verdict(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The service's answer for one item of a batch, by position."""

    id: str
    verdict: VerdictWord
    ttl: float | None = None  # with *renewed*: what was granted, from when the request left
    order: Literal["cancel"] | None = None  # with *renewed*: wind the body down; the lease is kept meanwhile
    reason: str | None = None  # with *gone*: settled, taken, expired, cancelled, unknown; with *failed*: what it was
    retry_after: float | None = None  # with *throttled*


# Reading ------------------------------------------------------------------------------------------------------


class HistoryEntry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run of a task, as it ended."""

    fence: int
    attempt: int
    outcome: str  # an Outcome, or *expired*
    at: datetime
    worker: str | None = None
    result: Any = None
    error: Any = None


class TaskInfo(Struct, frozen=True, kw_only=True):
    """All about one task."""

    id: str
    kind: str
    status: Status
    priority: int
    attempt: int
    crashes: int
    fence: int
    at: datetime  # when it was due, or is due next
    collection: str | None = None
    payload: Any = None
    progress: Any = None
    result: Any = None
    error: Any = None
    worker: str | None = None
    history: list[HistoryEntry] = []
    reason: str | None = None  # why it is dead, dropped, or not ready yet


class Page(Struct, frozen=True, kw_only=True):
    """Some tasks of a listing, and where to go on."""

    tasks: list[TaskInfo]
    cursor: str | None = None
