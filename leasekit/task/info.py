"""Answers to operators and clients: about tasks and their history, kinds, gates, workers and nodes."""

from datetime import datetime
from typing import Annotated, Any, Literal, TypedDict, cast

from msgspec import Meta, Struct

from leasekit.task.leased import (
    Verdict,
)
from leasekit.task.settings import (
    KindSettings,
)
from leasekit.task.words import (
    MAX_TAGS,
    Discreet,
    Name,
    Status,
    Tag,
)


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
    declared: KindSettings | None = None
    """What the code of a worker declares; None: no code does. What was changed by hand since holds all the same."""
    declared_at: Annotated[datetime, Meta(tz=True)] | None = None
    """When it was declared last, to a few minutes; None: no code has."""


class HistoryEntry(Discreet, frozen=True, kw_only=True, omit_defaults=True):
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


class TaskInfo(Discreet, frozen=True, kw_only=True):
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
    prefers: dict[str, str] = {}
    """As it was scheduled."""
    prefer_for: float | None = None
    """For how many seconds after its due time it prefers these labels; None: it prefers none."""
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
    """The tasks that match all filters that are given; None is no filter."""

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
        """Return whether a task matches the key, reason, error, attempts and times; callers judge the other filters."""
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
    draining_since: Annotated[datetime, Meta(tz=True)] | None = None
    """When an operator asked the worker to finish what it holds, and to stop; None: no operator has."""


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
