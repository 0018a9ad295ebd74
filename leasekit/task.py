"""The values that everyone exchanges: users, keeper, adapters, server.

Frozen, keyword-only, and shaped like the items of the wire, so that a batch is encoded and decoded
as it is. Times are seconds, except `at`, which is a point in time with its zone. What comes in batches is told to the
garbage collector as nothing that it has to look at (`gc=False`): JSON has no cycles.
"""

import enum
import random as _random
from datetime import datetime
from typing import Annotated, Any, Literal, TypedDict

from msgspec import UNSET, Meta, Struct, UnsetType

__all__ = [
    "Beat", "Claimed", "Exponential", "FixedDelays", "HistoryEntry", "Name", "NewTask", "Outcome", "Page", "Polynomial",
    "ProgressSeq", "RetryPolicy", "Scheduled", "Seconds", "Settlement", "Stats", "Status", "Task", "TaskInfo",
    "TaskOptions", "Verdict", "VerdictWord", "WorkerInfo",
]  # fmt: skip

# `$` would let a trailing newline pass in Python, and JSON Schema knows no `\Z`.
_NAME = Meta(min_length=1, max_length=128, pattern=r"^[ -.0-~]+\Z")
Name = Annotated[str, _NAME]
"""Ids, kinds, tokens, workers: 1-128 printable ASCII characters without `/`."""

Seconds = Annotated[float, Meta(ge=0, le=10 * 365 * 86400)]
"""A duration, up to ten years."""

Timeout = Annotated[float, Meta(ge=2, le=365 * 86400)]
ProgressSeq = Annotated[int, Meta(ge=0, le=2**53 - 1)]
"""The number of a checkpoint among those of one claim. Every JSON reader has numbers so large."""

Outcome = Literal["success", "retry", "fatal", "release", "cancelled", "crash"]
"""How a run ends."""

VerdictWord = Literal["renewed", "settled", "cancelled", "cancel_requested", "gone", "throttled", "failed"]
"""What became of one item of a batch."""


class Status(enum.StrEnum):
    """Where a task is in its life."""

    NEW = "new"
    """Scheduled, and not claimed yet."""
    ENQUEUED = "enqueued"
    """Ready to be claimed again: its lease was released or expired, or its holder crashed."""
    CLAIMED = "claimed"
    """Under a lease; its body has not begun."""
    PROCESSING = "processing"
    """Under a lease; its body runs."""
    RETRIABLE_FAILURE = "retriable_failure"
    """Failed, and waiting for its next attempt."""
    SUCCESS = "success"
    """Ended well."""
    FATAL_FAILURE = "fatal_failure"
    """Failed for good."""
    CANCELLED = "cancelled"
    """Ended because somebody cancelled the task."""
    DROPPED = "dropped"
    """Ended without a run: what it was to follow did not succeed, or never came."""
    DEAD = "dead"
    """Ended by a failure, a crash or an expiry past `max_attempts` or `max_crashes`."""

    @property
    def ended(self) -> bool:
        """True where nothing follows: the task will not run again."""
        return self in _ENDED


_ENDED = frozenset({Status.SUCCESS, Status.FATAL_FAILURE, Status.CANCELLED, Status.DROPPED, Status.DEAD})


# How long to wait before a task's next attempt ----------------------------------------------------------------


class Exponential(Struct, frozen=True, kw_only=True, tag="exponential", tag_field="policy"):
    """Wait `first · factor^(n-1)` seconds after the n-th try, at most `max`, less a random part up to `jitter`."""

    first: Annotated[float, Meta(gt=0, le=365 * 86400)] = 1.0
    """Seconds before the second attempt."""
    factor: Annotated[float, Meta(ge=1, le=100)] = 2.0
    """How much longer each further wait is."""
    max: Annotated[float, Meta(gt=0, le=365 * 86400)] = 3600.0
    """Seconds; the longest wait."""
    jitter: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """The largest part by which a wait is shortened at random."""

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


class FixedDelays(Struct, frozen=True, kw_only=True, tag="list", tag_field="policy"):
    """Wait `waits[n-1]` seconds after the n-th try; the last entry serves for all further ones."""

    waits: Annotated[list[Seconds], Meta(min_length=1, max_length=100)]
    """Seconds, one entry for each attempt."""

    def wait(self, tries: int, random: _random.Random) -> float:
        """Seconds to wait after the `tries`-th try (1 is the first)."""
        return self.waits[min(tries, len(self.waits)) - 1]


RetryPolicy = Exponential | Polynomial | FixedDelays
"""How long to wait before a task's next attempt."""


# Scheduling ---------------------------------------------------------------------------------------------------


class NewTask(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """A task to be scheduled. Only `kind` is required; scheduling the same `id` again makes no second task."""

    kind: Name
    """Which handler runs the task."""
    id: Name | None = None
    """The submitter's own id; a UUIDv7 is made up where there is none."""
    payload: Any = None
    """JSON, up to 1 MiB."""
    collection: Name | None = None
    """A name under which the task can be listed."""
    priority: Annotated[int, Meta(ge=0, le=4)] = 2
    """0 is the most urgent."""
    at: Annotated[datetime, Meta(tz=True)] | None = None
    """The task does not start before this moment."""
    after: Annotated[list[Name], Meta(max_length=100)] = []
    """Ids of tasks: this one does not start before they have succeeded."""
    dedupe_key: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """One task for each kind and key: scheduling another one returns the first."""
    dedupe_window: Seconds | None = None
    """Seconds for which the key counts; None: as long as the first task is kept."""
    max_attempts: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    """Bounds the attempts that ended in *retry*; None: no bound."""
    max_crashes: Annotated[int, Meta(ge=0, le=1_000_000)] = 5
    """Bounds the runs that ended because their holder vanished."""
    max_runtime: Timeout | None = None
    """Seconds that a run may take from its first beat. Then its lease is no longer renewed, which counts as a crash."""
    enqueue_timeout: Annotated[float, Meta(ge=1, le=365 * 86400)] = 60.0
    """Kept with the task; nothing acts on it while the store is the queue."""
    claim_timeout: Timeout | None = None
    """The ttl that a claim grants: no beat shortens it; None: `heartbeat_timeout`."""
    heartbeat_timeout: Timeout = 300.0
    """The ttl that a beat grants."""
    retry: RetryPolicy = Exponential()
    """How long to wait before the next attempt: `Exponential`, `Polynomial` or `FixedDelays`."""
    traceparent: Annotated[str, Meta(max_length=128)] | None = None
    """The W3C trace context of the scheduling code."""

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
    """The id of the task."""
    created: bool
    """False: the task, or the first one with its dedupe key, existed already."""
    status: Status
    """Where the task is in its life."""
    conflict: bool = False
    """True: the id belongs to a task of another kind or payload; nothing was changed."""


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
    """The id of the task."""
    kind: str
    """Which handler runs the task."""
    token: str
    """Unguessable, and new for every claim; every later write carries it."""
    ttl: float
    """Seconds that the lease lasts, counted from the grant."""
    fence: int = 0
    """Grows with every claim of the task; 0 where the service has no fences."""
    attempt: int = 1
    """1 for the first run; releases are not counted."""
    payload: Any = None
    """JSON, as it was scheduled."""
    collection: str | None = None
    """As it was scheduled."""
    priority: int = 2
    """As it was scheduled."""
    progress: Any = None
    """The checkpoint that the last holder left."""
    traceparent: str | None = None
    """As it was scheduled."""


class Claimed(Struct, frozen=True, kw_only=True):
    """The answer to a claim."""

    tasks: list[Task]
    """The tasks that were granted; none where none was ready in time."""
    waited: float | None = 0.0
    """Seconds for which the request had waited at the service when it was granted; None: the service does not say."""


class Beat(_WithToken, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """One lease to be renewed."""

    id: Name
    """The id of the task."""
    token: str
    """The token of its claim."""
    progress: Any | UnsetType = UNSET
    """The latest checkpoint, where there is a new one."""
    started: bool = True
    """False: the task waits in a buffer and its body has not begun."""
    progress_seq: ProgressSeq | None = None
    """Grows with each checkpoint of the claim; None: keep the checkpoint in any case."""


class Settlement(_WithToken, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """How a run ended. Nothing is settled while its body may still run."""

    id: Name
    """The id of the task."""
    token: str
    """The token of its claim."""
    outcome: Outcome
    """How the run ended."""
    result: Any = None
    """JSON, up to 1 MiB."""
    error: Any = None
    """JSON, up to 64 KiB; leasekit writes `{"type", "message", "traceback"}`."""
    retry_after: Seconds | None = None
    """With *retry* and *release*: seconds to wait, instead of the policy's wait."""
    progress: Any | UnsetType = UNSET
    """The latest checkpoint, where there is a new one."""
    then: list[NewTask] = []
    """Successors, scheduled in the same transaction; with *success* and *fatal* only."""
    progress_seq: ProgressSeq | None = None
    """As in a `Beat`: a process that settles for a dead holder may not have its latest checkpoint."""


class Verdict(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The service's answer for one item of a batch, by position."""

    id: str
    """The id of the task."""
    verdict: VerdictWord
    """What became of the item, in one word; a server never answers *failed*."""
    ttl: float | None = None
    """With *renewed*: what was granted, counted from when the request left."""
    order: Literal["cancel"] | None = None
    """With *renewed*: wind the body down; the lease is kept meanwhile."""
    reason: str | None = None
    """With *gone*: `settled`, `taken`, `expired`, `cancelled` or `unknown`; with *failed*: what failed."""
    retry_after: float | None = None
    """With *throttled*: seconds to wait."""


# Reading ------------------------------------------------------------------------------------------------------


class HistoryEntry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run of a task, as it ended."""

    fence: int
    """The fence of the run's lease."""
    attempt: int
    """1 for the first run; releases are not counted."""
    outcome: str
    """An `Outcome`, or *expired*."""
    at: datetime
    """When the run ended."""
    worker: str | None = None
    """The name of the worker that held the lease."""
    result: Any = None
    """What a success returned."""
    error: Any = None
    """What a failure reported."""


class TaskInfo(Struct, frozen=True, kw_only=True):
    """All about one task."""

    id: str
    """The id of the task."""
    kind: str
    """Which handler runs the task."""
    status: Status
    """Where the task is in its life."""
    priority: int
    """0 is the most urgent."""
    attempt: int
    """The number of the current or last run; releases are not counted."""
    crashes: int
    """How many runs ended because their holder vanished."""
    fence: int
    """The fence of the last claim."""
    at: datetime
    """When the task was due, or is due next."""
    collection: str | None = None
    """As it was scheduled."""
    payload: Any = None
    """As it was scheduled."""
    progress: Any = None
    """The latest checkpoint."""
    result: Any = None
    """The result of the success."""
    error: Any = None
    """The error of the last failure."""
    worker: str | None = None
    """The name of the current or last holder."""
    history: list[HistoryEntry] = []
    """The runs of the task, as they ended."""
    reason: str | None = None
    """Why the task is dead, dropped, or not ready yet."""


class Stats(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many tasks there are."""

    kinds: dict[str, dict[str, int]]
    """Kind → status → how many tasks; only those that occur."""
    damaged: dict[str, int] = {}
    """Kind → how many tasks were set aside because their record is damaged, where the service keeps such (Redis)."""


class WorkerInfo(Struct, frozen=True, kw_only=True):
    """One worker that holds leases, or was heard of lately."""

    name: str
    """The name under which the worker claims."""
    last_seen: Annotated[datetime, Meta(tz=True)] | None
    """When the service last heard of the worker; None: not since the service started."""
    running: int
    """How many leases the worker holds."""


class Page(Struct, frozen=True, kw_only=True):
    """Some tasks of a listing, and where to go on."""

    tasks: list[TaskInfo]
    """The tasks, oldest first."""
    cursor: str | None = None
    """Where the next page begins; None: this is the last one."""
