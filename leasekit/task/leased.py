"""Tasks from their submission to their result: leases, heartbeats, settlements, and verdicts on each."""

from datetime import datetime, timedelta
from typing import Annotated, Any, Protocol, TypedDict

from msgspec import UNSET, Meta, Struct, UnsetType

from leasekit.task.settings import (
    RetryPolicy,
    TaskSettings,
)
from leasekit.task.words import (
    MAX_TAGS,
    NAME_PREFIXES,
    DedupeScope,
    Discreet,
    Expiry,
    Name,
    Outcome,
    PreferFor,
    ProgressSeq,
    Requires,
    Seconds,
    Status,
    Tag,
    VerdictWord,
)


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
    prefers: Requires = {}
    """Further labels, four at most: until the task has been due for `prefer_for` seconds, only workers that have these
    too get it."""
    prefer_for: PreferFor | None = None
    """For how many seconds after each of its due times the task `prefers` labels. None: ten."""
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
        if self.id != self.kind and (
            self.kind.startswith(NAME_PREFIXES) or (self.id is not None and self.id.startswith(NAME_PREFIXES))
        ):  # a task of another kind would take the name of others, or end what they do once
            raise ValueError("`named:` and `once:` begin ids of tasks that stand for a name, whose kind is their id")
        if self.delay is not None and self.at is not None:
            raise ValueError("`at` and `delay` both say when the task may start: give one of them")
        check_preference(self)
        if self.debounce is None and self.dedupe_scope == "kept":
            return
        if self.dedupe_key is None:
            raise ValueError("`debounce` and `dedupe_scope` say how a `dedupe_key` counts: give one")
        if self.debounce is not None and (self.dedupe_scope != "kept" or self.after):
            raise ValueError("a task with `debounce` has no `after` and no `dedupe_scope`: leave them out")


class _Labelled(Protocol):
    @property
    def requires(self) -> dict[str, str]: ...

    @property
    def prefers(self) -> dict[str, str]: ...

    @property
    def prefer_for(self) -> float | None: ...

    @property
    def key(self) -> str | None: ...


def check_preference(task: _Labelled) -> None:
    """Raise `ValueError` if a task cannot prefer what it says."""
    if not task.prefers:
        if task.prefer_for is not None:
            raise ValueError("`prefer_for` says for how long a task prefers labels: give `prefers` too")
        return
    if both := sorted(task.requires.keys() & task.prefers.keys()):
        raise ValueError(f"label {both[0]!r} is in `requires` and in `prefers`: leave it out of one of them")
    if task.key is not None:
        raise ValueError("a task with a `key` cannot prefer workers: leave out `prefers` or `key`")


class TaskDefaults(TypedDict, total=False):
    """The options of a task that its handler can declare; `NewTask` has their meanings and bounds."""

    collection: str | None
    tags: list[str]
    requires: dict[str, str]
    prefers: dict[str, str]
    prefer_for: float | None
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


class Task(Discreet, frozen=True, kw_only=True, dict=True, weakref=True):
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
    draining: bool = False
    """An operator drains this worker: it is granted nothing, and is to stop once it has finished what it holds."""


class Beat(Discreet, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
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


class Settlement(Discreet, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
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
