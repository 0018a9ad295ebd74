"""The values that users, the keeper, adapters and the server exchange.

All values are frozen, keyword-only and shaped like the items of messages, so that a batch is encoded and decoded as it
is. Durations are seconds; `at` is an instant with its time zone. The garbage collector does not track values that come
in batches (`gc=False`), because JSON has no cycles.
"""

import enum
import random as _random
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Annotated, Any, Literal, TypedDict, cast

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

__all__ = [
    "DEFAULTS", "Beat", "ChainCancelled", "Claimed", "CompleteSettings", "Ended", "Exponential", "FixedDelays",
    "GateInfo", "Health", "HistoryEntry", "KindInfo", "KindSettings", "Matched", "Name", "NewTask", "NodeInfo",
    "Outcome", "Page", "Polynomial", "ProgressSeq", "Purged", "Redriven", "Rescheduled", "RetryPolicy", "Scheduled",
    "Seconds", "Selection", "Settlement", "Stats", "Status", "Tag", "Task", "TaskDefaults", "TaskInfo", "TaskOptions",
    "TaskSelection", "TaskSettings", "Ticket", "Vacuumed", "Verdict", "VerdictWord", "WorkerInfo", "effective",
]  # fmt: skip

# `$` would let a trailing newline pass in Python, and JSON Schema knows no `\Z`.
_NAME = Meta(min_length=1, max_length=128, pattern=r"^[ -.0-~]+\Z")
Name = Annotated[str, _NAME]
"""Ids, kinds, tokens, workers: 1-128 printable ASCII characters without `/`."""

NAME_PREFIX = "named:"  # of the kinds that stand for a name: such a task never ends, so a cancel only frees the name

MAX_TAGS = 20
Tag = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[ -~]+\Z")]
"""A word about a task: 1-64 printable ASCII characters."""

LabelName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._/-]+\Z")]
LabelValue = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._:/-]+\Z")]
Labels = Annotated[dict[LabelName, LabelValue], Meta(max_length=16)]
"""What a worker has, as `{"gpu": "a100"}`: names and values of 1-64 letters, digits and `._/-`, values also `:`."""
MAX_REQUIRED = 4
Requires = Annotated[dict[LabelName, LabelValue], Meta(max_length=MAX_REQUIRED)]

Seconds = Annotated[float, Meta(ge=0, le=10 * 365 * 86400)]
"""A duration, up to ten years."""

Expiry = Literal["crash", "retry"]
DedupeScope = Literal["kept", "live"]
Timeout = Annotated[float, Meta(ge=2, le=365 * 86400)]
ProgressSeq = Annotated[int, Meta(ge=0, le=2**53 - 1)]
"""The number of a checkpoint among those of one claim. Every JSON reader can represent integers up to the bound."""

Outcome = Literal["success", "retry", "fatal", "release", "cancelled", "crash"]
"""How a run ends."""

VerdictWord = Literal[
    "renewed", "settled", "cancelled", "cancel_requested", "redriven", "redrivable", "gone", "throttled", "failed"
]
"""What became of one item of a batch."""


class Status(enum.StrEnum):
    """A stage in the life of a task."""

    NEW = "new"
    """Scheduled, and not claimed yet."""
    ENQUEUED = "enqueued"
    """Ready to be claimed again: its lease was released or expired, or its holder crashed."""
    CLAIMED = "claimed"
    """Under a lease; the handler has not begun."""
    PROCESSING = "processing"
    """Under a lease; the handler runs."""
    RETRIABLE_FAILURE = "retriable_failure"
    """Failed, or timed out where that counts as an attempt (`expiry`), and waiting for its next attempt."""
    SUCCESS = "success"
    """Ended well."""
    FATAL_FAILURE = "fatal_failure"
    """Failed for good."""
    CANCELLED = "cancelled"
    """Ended by a cancel."""
    DROPPED = "dropped"
    """Ended without a run: a task that this one waited for did not succeed, or was never scheduled; or this one had
    not begun by its `start_deadline`."""
    DEAD = "dead"
    """Ended by a failure, a crash or an expiry past `max_attempts` or `max_crashes`."""

    @property
    def ended(self) -> bool:
        """Whether the task has ended and will not run again."""
        return self in _ENDED


_ENDED = frozenset({Status.SUCCESS, Status.FATAL_FAILURE, Status.CANCELLED, Status.DROPPED, Status.DEAD})
REDRIVABLE = frozenset({Status.DEAD, Status.FATAL_FAILURE, Status.DROPPED})  # only by an operator


class Exponential(Struct, frozen=True, kw_only=True, tag="exponential", tag_field="policy", forbid_unknown_fields=True):
    """Wait `first · factor^(n-1)` seconds after the n-th try, at most `max`, less a random part up to `jitter`."""

    first: Annotated[float, Meta(gt=0, le=365 * 86400)] = 1.0
    """Seconds before the second attempt."""
    factor: Annotated[float, Meta(ge=1, le=100)] = 2.0
    """How much longer each further wait is."""
    max: Annotated[float, Meta(gt=0, le=365 * 86400)] = 43_200.0
    """Seconds; the longest wait."""
    jitter: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """The largest part by which a wait is shortened at random."""

    def wait(self, tries: int, random: _random.Random) -> float:
        """Seconds to wait after the `tries`-th try (1 is the first)."""
        # min() before the power: factor ** 10_000 does not fit into a float.
        exponent = min(tries - 1, 64)
        return min(self.max, self.first * self.factor**exponent) * (1 - self.jitter * random.random())


class Polynomial(Struct, frozen=True, kw_only=True, tag="polynomial", tag_field="policy", forbid_unknown_fields=True):
    """Wait `n⁴ + 15 + random · 30 · (n + 1)` seconds after the n-th try."""

    def wait(self, tries: int, random: _random.Random) -> float:
        """Seconds to wait after the `tries`-th try (1 is the first)."""
        return min(tries, 100) ** 4 + 15 + random.random() * 30 * (tries + 1)


class FixedDelays(Struct, frozen=True, kw_only=True, tag="list", tag_field="policy", forbid_unknown_fields=True):
    """Wait `waits[n-1]` seconds after the n-th try; the last entry serves for all further ones."""

    waits: Annotated[list[Seconds], Meta(min_length=1, max_length=100)]
    """Seconds, one entry for each attempt."""

    def wait(self, tries: int, random: _random.Random) -> float:
        """Seconds to wait after the `tries`-th try (1 is the first)."""
        return self.waits[min(tries, len(self.waits)) - 1]


RetryPolicy = Exponential | Polynomial | FixedDelays
"""How long to wait before a task's next attempt."""


class _Size:
    """A stand-in for a user's value, which may be private, in a repr: the number of bytes that it has as JSON."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        try:
            return f"<{len(msgspec.json.encode(self._value)):,} bytes>"
        except Exception:  # noqa: BLE001 - a repr must not fail
            return f"<{type(self._value).__name__}>"


class _Discreet(Struct, frozen=True, kw_only=True):
    """A value whose repr is fit for logs: it leaves out the token, and shows only the sizes of users' values."""

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [
            (name, _Size(value) if name in _PRIVATE and value is not None else value)
            for name, value in super().__rich_repr__()
            if name != "token" and value is not UNSET
        ]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"


_PRIVATE = frozenset({"payload", "progress", "result", "error"})


class TaskSettings(_Discreet, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The options of a task that its kind can set as well. What is not given (UNSET) comes from the kind's settings.

    What these do not set either has leasekit's default, which `CompleteSettings` has.
    """

    priority: Annotated[int, Meta(ge=0, le=4)] | UnsetType = UNSET
    """0 is the most urgent. Default: 2."""
    max_attempts: Annotated[int, Meta(ge=1, le=1_000_000)] | UnsetType | None = UNSET
    """The most attempts that may end in *retry* (or time out, see `expiry`); the last ends the task. None: no limit.
    Default: 25."""
    max_crashes: Annotated[int, Meta(ge=0, le=1_000_000)] | UnsetType = UNSET
    """The most runs that may end because their holder vanished; one more ends the task. Default: 5."""
    max_runtime: Timeout | UnsetType | None = UNSET
    """Seconds that a run may take from its first heartbeat. Then its lease is lost, and `expiry` says how it counts.
    None, the default: no limit."""
    expiry: Expiry | UnsetType = UNSET
    """What a run counts as that times out, because its lease expires or its `max_runtime` is over. *crash*, the
    default: against `max_crashes`, and the task is ready again at once. *retry*: against `max_attempts`, after a wait
    by `retry`."""
    enqueue_timeout: Annotated[float, Meta(ge=1, le=365 * 86400)] | UnsetType = UNSET
    """Seconds after which a task that was moved to a queue and not claimed is due again; no effect without queues."""
    claim_timeout: Timeout | UnsetType | None = UNSET
    """The ttl that a claim grants, which no heartbeat shortens; None, the default: `heartbeat_timeout`."""
    heartbeat_timeout: Timeout | UnsetType = UNSET
    """The ttl that a heartbeat grants. Default: 300 s."""
    retry: RetryPolicy | UnsetType = UNSET
    """How long to wait before the next attempt: `Exponential`, the default, `Polynomial` or `FixedDelays`."""
    dedupe_window: Seconds | UnsetType | None = UNSET
    """Seconds for which a `dedupe_key` counts, as long as the first task is kept; None, the default: until that is
    deleted."""
    start_deadline: Annotated[float, Meta(ge=1, le=10 * 365 * 86400)] | UnsetType | None = UNSET
    """Seconds after the due time until which the task must have begun, whatever it waits for; else it is *dropped*.
    None, the default: it is never too late."""


class KindSettings(TaskSettings, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Options for the tasks of a kind whose submissions do not give them, and what holds for the kind as a whole.

    What is not set (UNSET) has leasekit's default.
    """

    retention: Annotated[float, Meta(ge=60, le=10 * 365 * 86400)] | UnsetType = UNSET
    """Seconds for which ended tasks of the kind are kept, in place of the store's `retention`."""
    fair: bool | UnsetType = UNSET
    """Whether a task without a `key` has its collection as key. Default: false."""
    concurrency: Annotated[int, Meta(ge=1, le=1_000_000)] | UnsetType = UNSET
    """The most tasks of the kind that are under a lease at one time, in all workers together. Default: no limit."""
    key_concurrency: Annotated[int, Meta(ge=1, le=1_000_000)] | UnsetType = UNSET
    """The most tasks of one `key` of the kind that are under a lease at one time, in all workers together. Tasks
    without a key have no such limit. Default: none."""
    rate: Annotated[float, Meta(ge=1e-6, le=100_000)] | UnsetType = UNSET
    """The most tasks of the kind that are started in a second, on average. Default: no limit."""
    burst: Annotated[int, Meta(ge=1, le=1_000_000)] | UnsetType = UNSET
    """With `rate`: the most tasks that are started at once after a quiet time. Default: those of a second, at least
    one."""
    key_rate: Annotated[float, Meta(ge=1e-6, le=100_000)] | UnsetType = UNSET
    """The most tasks of one `key` of the kind that are started in a second, on average. Tasks without a key have no
    such limit. Default: none."""
    key_burst: Annotated[int, Meta(ge=1, le=1_000_000)] | UnsetType = UNSET
    """With `key_rate`: as `burst`, for each key."""
    weight: Annotated[float, Meta(ge=0.01, le=100)] | UnsetType = UNSET
    """The share of the kind where a claim finds due tasks of several kinds and of one priority. Default: 1."""
    aging: Annotated[float, Meta(ge=1, le=365 * 86400)] | UnsetType = UNSET
    """Seconds after which a due task of the kind counts as one of priority 0. Default: never."""

    def __post_init__(self) -> None:
        if self.burst is not UNSET and self.rate is UNSET:
            raise ValueError("`burst` says how many tasks a `rate` lets start at once: give `rate` too")
        if self.key_burst is not UNSET and self.key_rate is UNSET:
            raise ValueError("`key_burst` says how many tasks of a key a `key_rate` lets start at once: give it too")


class KindInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings of a kind, and when they were changed last."""

    kind: str
    """The kind."""
    settings: KindSettings
    """What the kind sets."""
    changed_at: Annotated[datetime, Meta(tz=True)]
    """When the settings were changed last."""
    changed_by: str | None = None
    """The name of the client that changed them, or its address; None: the service does not know."""


class CompleteSettings(Struct, frozen=True, kw_only=True, gc=False):
    """A value for each of `TaskSettings`. The defaults are those of leasekit."""

    priority: int = 2
    """As in `TaskSettings`, like all that follow."""
    max_attempts: int | None = 25
    """As in `TaskSettings`."""
    max_crashes: int = 5
    """As in `TaskSettings`."""
    max_runtime: float | None = None
    """As in `TaskSettings`."""
    expiry: Expiry = "crash"
    """As in `TaskSettings`."""
    enqueue_timeout: float = 60.0
    """As in `TaskSettings`."""
    claim_timeout: float | None = None
    """As in `TaskSettings`."""
    heartbeat_timeout: float = 300.0
    """As in `TaskSettings`."""
    retry: RetryPolicy = Exponential()
    """As in `TaskSettings`."""
    dedupe_window: float | None = None
    """As in `TaskSettings`."""
    start_deadline: float | None = None
    """As in `TaskSettings`."""

    @property
    def claim_ttl(self) -> float:
        """The ttl that a claim grants: `claim_timeout`, or `heartbeat_timeout` if that is None."""
        return self.heartbeat_timeout if self.claim_timeout is None else self.claim_timeout


DEFAULTS = CompleteSettings()
"""What holds for a task where neither its submission nor its kind says anything else."""


def effective(given: TaskSettings, base: CompleteSettings = DEFAULTS) -> CompleteSettings:
    """Return `base` with what is given in its place: the settings of a kind, or of a task over those of its kind."""
    values = _values_of(given)
    if values == _NOTHING:  # most tasks: tens of thousands come each second
        return base
    return replace(base, **{name: value for name, value in zip(_SETTINGS, values, strict=True) if value is not UNSET})


_SETTINGS = CompleteSettings.__struct_fields__
_NOTHING = (UNSET,) * len(_SETTINGS)
_values_of = attrgetter(*_SETTINGS)


class NewTask(TaskSettings, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """A task to be scheduled. Only `kind` is required; scheduling the same `id` again makes no second task."""

    kind: Name
    """Which handler runs the task."""
    id: Name | None = None
    """An id of the submitter's choice; None: a UUIDv7 is made up."""
    payload: Any = None
    """JSON, up to 1 MiB."""
    collection: Name | None = None
    """A name under which the task can be listed."""
    tags: Annotated[list[Tag], Meta(max_length=MAX_TAGS)] = []
    """Words about the task, by which it can be found among all tasks."""
    key: Name | None = None
    """Whose task it is, a tenant for example: the due tasks of a kind and priority are started one of each key in
    turn. None: the kind's settings say (`fair`)."""
    requires: Requires = {}
    """The labels that a worker must have, with these values, to get the task; four at most."""
    at: Annotated[datetime, Meta(tz=True)] | None = None
    """The task does not start before this instant."""
    delay: Seconds | None = None
    """Instead of `at`: the task does not start before so many seconds have passed since the service accepted it."""
    after: Annotated[list[Name], Meta(max_length=100)] = []
    """Ids of tasks that must succeed before this task starts."""
    parent: Name | None = None
    """The task from which this one comes, in whose chain it is listed. None: the task in whose run it is scheduled, or
    the first of `after`, if there is one."""
    dedupe_key: Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^\u0000]+\Z")] | None = None
    """A kind has one task for each key: scheduling another returns the first."""
    dedupe_scope: DedupeScope = "kept"
    """For how long a `dedupe_key` counts besides its `dedupe_window`. *kept*: as long as the first task is kept.
    *live*: until the first task has ended."""
    debounce: Seconds | None = None
    """Replace the payload and the due time of the task with this `dedupe_key` that was never claimed; if there is none,
    make one. It is due so many seconds after it was first scheduled, at the latest."""
    traceparent: Annotated[str, Meta(max_length=128)] | None = None
    """The W3C trace context of the scheduling code."""

    def __post_init__(self) -> None:
        if self.delay is not None and self.at is not None:
            raise ValueError("`at` and `delay` both say when the task may start: give one of them")
        if self.debounce is None and self.dedupe_scope == "kept":
            return
        if self.dedupe_key is None:
            raise ValueError("`debounce` and `dedupe_scope` say how a `dedupe_key` counts: give one")
        if self.debounce is not None and (self.dedupe_scope != "kept" or self.after):
            raise ValueError("a task with `debounce` has no `after` and no `dedupe_scope`: leave them out")


class TaskDefaults(TypedDict, total=False):
    """The options of a task that its handler can declare; `NewTask` has their meanings and bounds."""

    collection: str | None
    tags: list[str]
    requires: dict[str, str]
    priority: int
    dedupe_window: float | None
    max_attempts: int | None
    max_crashes: int
    max_runtime: float | None
    expiry: Expiry
    claim_timeout: float | None
    heartbeat_timeout: float
    retry: RetryPolicy
    start_deadline: float | None


class TaskOptions(TaskDefaults, total=False):
    """The options of a task besides its kind and payload; `NewTask` has their meanings and bounds."""

    id: str
    at: datetime
    delay: float | timedelta
    key: str | None
    after: list[str]
    parent: str | None
    dedupe_key: str | None
    dedupe_scope: DedupeScope
    debounce: float | None
    enqueue_timeout: float
    traceparent: str


class Scheduled(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The answer to one scheduled task."""

    id: str
    """The id of the task."""
    created: bool
    """False: the task, or the first task with its dedupe key, existed already."""
    status: Status
    """The stage in the life of the task."""
    conflict: bool = False
    """True: the id belongs to a task of another kind or payload; nothing was changed."""
    replaced: bool = False
    """True: the task waits, and has the new payload and due time (`debounce`)."""


class Task(_Discreet, frozen=True, kw_only=True, dict=True, weakref=True):
    """A task that this process has claimed: what to run, and the right to run it."""

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
    """1 for the first run; releases are not counted, except on SQS. 0 where the service has not said."""
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
    max_runtime: float | None = None
    """As it was scheduled; None: the run is not limited, or the service does not say."""


class Ticket(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """The content of a message in a queue: the task to claim, and before which of its runs it was enqueued."""

    id: Name
    """The id of the task."""
    fence: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """The fence of the task's last claim when it was enqueued; 0: there was none."""


class Claimed(Struct, frozen=True, kw_only=True):
    """The answer to a claim."""

    tasks: list[Task]
    """The granted tasks; empty if no task was ready in time."""
    waited: float | None = 0.0
    """Seconds for which the request had waited at the service when it was granted; None: the service does not say."""
    status: Status | None = None
    """Of the task of a name, before it was granted; only in the answer to `claim_name`."""
    refused: list[str] = []
    """The ids of tickets whose tasks cannot be claimed by them, now or later; only in the answer to `claim_tickets`."""


class Beat(_Discreet, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """A request to renew one lease."""

    id: Name
    """The id of the task."""
    token: str
    """The token of its claim."""
    progress: Any | UnsetType = UNSET
    """The latest checkpoint, where there is a new one."""
    started: bool = True
    """False: the task waits in a buffer and its handler has not begun."""
    progress_seq: ProgressSeq | None = None
    """Grows with each checkpoint of the claim; None: the service keeps the checkpoint in any case."""


class Settlement(_Discreet, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """A report of how a run ended, made only once its handler no longer runs."""

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
    """As in a `Beat`: a process that settles for a dead holder may not have the latest checkpoint."""


class Verdict(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The service's answer for one item of a batch, by position."""

    id: str
    """The id of the task."""
    verdict: VerdictWord
    """What became of the item, in one word; a server answers *failed* only to a redrive."""
    ttl: float | None = None
    """With *renewed*: the granted seconds, counted from when the request left."""
    cancel_requested: bool = False
    """With *renewed*: a cancel was requested, so the handler must wind down; the lease is kept meanwhile."""
    remaining_runtime: float | None = None
    """With *renewed*: seconds until the `max_runtime` of the run is over; None: no limit, or its handler has not begun.
    A heartbeat that leaves then is *gone* (`overdue`)."""
    reason: str | None = None
    """With *gone*: `settled`, `taken`, `expired`, `overdue`, `cancelled`, `unknown`, or a sentence, which is told as it
    is (`ConfigError: …`: a block that waits for its first heartbeat raises that); with *failed*: what failed; with
    *settled*: `dead` if the task is not tried again, where the service says."""
    retry_after: float | None = None
    """With *throttled*: seconds to wait."""


class HistoryEntry(_Discreet, frozen=True, kw_only=True, omit_defaults=True):
    """A run of a task that has ended; a redrive, after which a new life of the task begins; or the last reschedule
    between two runs.
    """

    fence: int
    """The fence of the run's lease; a redrive or reschedule has a fence of its own."""
    attempt: int
    """1 for the first run; releases are not counted."""
    outcome: str
    """An `Outcome`, *expired*, *redriven* or *rescheduled*."""
    at: datetime
    """When the run ended, or the task was redriven or rescheduled."""
    worker: str | None = None
    """The name of the worker that held the lease; of a redrive or reschedule: of the client that asked for it."""
    claimed_at: datetime | None = None
    """When the run was claimed; None, here and below: never, or the service does not say."""
    started_at: datetime | None = None
    """When the first heartbeat said that the handler runs."""
    heartbeat_at: datetime | None = None
    """When the last heartbeat of the run was accepted."""
    result: Any = None
    """The value that a successful run returned; of a reschedule: the new `at` and `priority`."""
    error: Any = None
    """The error that a failed run reported."""


class GateInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A closed gate: the tasks of a kind or of a collection are not started."""

    kind: str | None = None
    """The kind that is closed; None: it is a collection."""
    collection: str | None = None
    """The collection that is closed; None: it is a kind."""
    mode: Literal["pause", "drop"]
    """Whether due tasks wait, or end as *cancelled*."""
    until: Annotated[datetime, Meta(tz=True)] | None = None
    """When the gate opens by itself; None: it is opened by hand."""
    reason: str | None = None
    """Why it is closed, in the words of the operator."""
    changed_at: Annotated[datetime, Meta(tz=True)]
    """When the gate was closed, or changed."""
    changed_by: str | None = None
    """The name of the client that did it, or its address; None: the service does not know."""


class TaskInfo(_Discreet, frozen=True, kw_only=True):
    """Everything that the service knows about a task."""

    id: str
    """The id of the task."""
    kind: str
    """Which handler runs the task."""
    status: Status
    """The stage in the life of the task."""
    priority: int
    """0 is the most urgent."""
    attempt: int
    """The number of the current or last run; releases are not counted."""
    crashes: int
    """How many runs ended because their holder vanished, without those that count as attempts (`expiry`)."""
    fence: int
    """The fence of the last claim."""
    at: datetime
    """When the task was due, or is due next."""
    collection: str | None = None
    """As it was scheduled."""
    tags: list[str] = []
    """As they were scheduled, sorted."""
    key: str | None = None
    """As it was scheduled, or the collection where the kind is `fair`."""
    requires: dict[str, str] = {}
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
    lease_until: datetime | None = None
    """When the lease ends if no heartbeat renews it; None: there is none, or the service does not say."""
    cancel_requested: bool = False
    """Whether the holder is asked to stop."""
    scheduled_at: datetime | None = None
    """When the task was accepted; None, here and below: never, or the service does not say."""
    claimed_at: datetime | None = None
    """When the current or last run was claimed."""
    started_at: datetime | None = None
    """When the first heartbeat of that run said that the handler runs."""
    heartbeat_at: datetime | None = None
    """When the last heartbeat of that run was accepted."""
    progress_at: datetime | None = None
    """When `progress` was reported; before `claimed_at`: by an earlier run."""
    ended_at: datetime | None = None
    """When the task ended."""
    history: list[HistoryEntry] = []
    """The runs of the task as they ended, and its redrives."""
    reason: str | None = None
    """Why the task is dead, dropped, or not ready yet."""
    gate: GateInfo | None = None
    """The closed gate behind which a waiting task waits."""
    parent: str | None = None
    """The id of the task from which this one comes; None: from none, or the service does not say."""
    root: str | None = None
    """The id of the first task of the chain, by which it can be listed; None: the service does not say."""
    start_by: datetime | None = None
    """When the task is dropped unless it has begun by then (`start_deadline`); None: never, or it has begun."""


_Text = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]*\Z")]


class Selection(TypedDict, total=False):
    """Filters of tasks, as calls take them; `TaskSelection` has the meanings."""

    kind: str | None
    status: Status | None
    collection: str | None
    tags: list[str] | None
    key: str | None
    reason: str | None
    error: str | None
    error_type: str | None
    min_attempts: int | None
    since: datetime | None
    until: datetime | None


class TaskSelection(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The tasks that match all that is given; what is not given (None) selects nothing."""

    kind: Name | None = None
    """Only tasks of this kind."""
    status: Status | None = None
    """Only tasks in this status."""
    collection: Name | None = None
    """Only tasks of this collection."""
    tags: Annotated[list[Tag], Meta(min_length=1, max_length=MAX_TAGS)] | None = None
    """Only tasks that have all of these tags."""
    key: Name | None = None
    """Only tasks with this key."""
    reason: _Text | None = None
    """Only tasks with this text in their `reason`, in small letters or capitals."""
    error: _Text | None = None
    """Only tasks with this text in the message of their last error, in small letters or capitals."""
    error_type: _Text | None = None
    """Only tasks whose last error has this type."""
    min_attempts: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Only tasks that were run so many times, at least."""
    since: Annotated[datetime, Meta(tz=True)] | None = None
    """Only tasks that ended then or later; of tasks that have not ended: that were scheduled then or later."""
    until: Annotated[datetime, Meta(tz=True)] | None = None
    """Only tasks that ended, or were scheduled, before this instant."""

    @property
    def needs_a_look(self) -> bool:
        """Whether more is given than kind, status, collection and tags."""
        return any(getattr(self, name) is not None for name in _LOOKED_AT)

    def matches(self, task: "TaskInfo") -> bool:
        """Return whether a task matches what is given besides kind, status, collection and tags."""
        at = task.ended_at or task.scheduled_at or task.at
        return (
            self.key in (None, task.key)
            and (self.min_attempts is None or task.attempt >= self.min_attempts)
            and (self.since is None or at >= self.since)
            and (self.until is None or at < self.until)
            and _has(task.reason, self.reason)
            and _is_error(task.error, self.error, self.error_type)
        )


_LOOKED_AT = ("key", "reason", "error", "error_type", "min_attempts", "since", "until")


def _has(text: object, part: str | None) -> bool:
    return part is None or (isinstance(text, str) and part.casefold() in text.casefold())


def _is_error(error: Any, message: str | None, type_: str | None) -> bool:
    """Whether an error, as leasekit writes it, has this text in its message, and this type."""
    if message is None and type_ is None:
        return True
    of: dict[str, Any] = cast("dict[str, Any]", error) if isinstance(error, dict) else {"message": error}
    return type_ in (None, of.get("type")) and _has(of.get("message"), message)


class Ended(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The ends of tasks, as far as they have ended."""

    tasks: list[TaskInfo] = []
    """The tasks that have ended; of many large ones not all."""
    unknown: list[str] = []
    """The ids that no task has."""


class Stats(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The number of tasks of each kind in each status."""

    kinds: dict[str, dict[str, int]]
    """Kind → status → how many tasks; only those that occur."""
    damaged: dict[str, int] = {}
    """Kind → how many tasks were set aside because their record is damaged, if the service keeps such tasks (Redis)."""
    unmet: dict[str, list[dict[str, str]]] = {}
    """Kind → the labels that due tasks require, and no worker has that claimed the kind lately; `{}`: no worker has
    claimed the kind at all. Empty where the service does not say (Redis)."""


class ChainCancelled(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to a step of the cancel of a chain."""

    root: str
    """The first task of the chain."""
    tasks: list[Verdict] = []
    """One for each task that had not ended: `cancelled`, or `cancel_requested`."""
    cursor: str | None = None
    """Where the next step begins; None: this was the last one."""


class Rescheduled(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to a reschedule: the task, as it waits from then on."""

    id: str
    """The id of the task."""
    status: Status
    """The stage in the life of the task, which a reschedule does not change."""
    at: Annotated[datetime, Meta(tz=True)]
    """When the task is due."""
    priority: int
    """0 is the most urgent."""


class Matched(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to a bulk act, or to its dry run."""

    kinds: dict[str, dict[str, int]]
    """Kind → status before → how many tasks were changed, or would be; only those that occur."""
    token: str
    """The token of this dry run, for the act that does what the dry run has counted."""
    cursor: str | None = None
    """Where the next step begins; None: this was the last one."""


class Purged(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The ended tasks that a purge has removed, or would remove."""

    kinds: dict[str, dict[str, int]]
    """Kind → status → how many tasks; only those that occur."""
    cursor: str | None = None
    """Where the next step begins; None: this was the last one."""


class Vacuumed(Struct, frozen=True, kw_only=True):
    """The space that a vacuum has given back, in bytes."""

    freed: int
    """How much smaller the service's file has become, or will be once its log is written to it."""
    left: int = 0
    """The space that can still be given back."""


class WorkerInfo(Struct, frozen=True, kw_only=True):
    """A worker that holds leases, or called the service lately."""

    name: str
    """The name under which the worker claims."""
    last_seen: Annotated[datetime, Meta(tz=True)] | None
    """When the worker last called the service; None: not since the service started."""
    running: int
    """How many leases the worker holds."""
    kinds: list[str] | None = None
    """The kinds that the worker has claimed; None: the service does not say, or has heard no claim of the worker."""
    labels: dict[str, str] = {}
    """The labels of the worker's last claim."""
    ttl: float | None = None
    """The shortest ttl of the leases that the worker holds; None: it holds none, or the service does not say."""
    window: int | None = None
    """How many tasks the worker may hold; None, also below: it has not said, or the service does not say."""
    waiting: int | None = None
    """How many of its tasks wait, without a slot, for the next call of their handler."""


class NodeInfo(Struct, frozen=True, kw_only=True):
    """A server, or another process that has the store open itself."""

    id: str
    """Made anew at each start."""
    name: str
    """The machine and the process."""
    version: str
    """The version of leasekit."""
    role: Literal["server", "process"]
    """Whether the node serves clients over HTTP, or is a process that uses the store itself."""
    address: str | None
    """Where a server is reached; None for a process."""
    started_at: Annotated[datetime, Meta(tz=True)]
    """When the node opened the store."""
    last_seen: Annotated[datetime, Meta(tz=True)]
    """When the node gave its last sign, one of which comes each second."""
    has_left: bool
    """Whether the node has closed the store since then."""


class Health(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether a process can keep its leases, at one moment."""

    ok: bool
    """False if the process should be restarted; a service that is away is no reason while leases are trusted."""
    detail: str | None = None
    """Why not; or that the worker drains."""
    turn_age: float | None = None
    """Seconds since the driver's thread, which renews leases, had its last turn; about 1 when idle. None: not begun."""
    trust_left: float | None = None
    """Seconds until the first lease is lost unless a heartbeat is acknowledged; None: no lease is held."""
    answered_ago: float | None = None
    """Seconds since the service answered; idle claims are answered every 20 s or so. None: it never has."""


class Page(Struct, frozen=True, kw_only=True):
    """A page of a listing of tasks."""

    tasks: list[TaskInfo]
    """The tasks, oldest first."""
    cursor: str | None = None
    """Where the next page begins; None: this is the last page."""


class Redriven(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to a redrive."""

    tasks: list[Verdict] = []
    """One for each task: `redriven` (dry run: `redrivable`), `gone` if unknown, or `failed` with the reason."""
    cursor: str | None = None
    """Where the next redrive by the same filter goes on; None: no more tasks match."""
    moving: str | None = None
    """Of SQS, which redrives in the background: the handle of its move, by which SQS can be asked to cancel it."""
    about: int | None = None
    """Of SQS: about how many messages it moves, or would move (dry run)."""
