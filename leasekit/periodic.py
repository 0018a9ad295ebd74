"""Values of periodic tasks: when they are scheduled, what is scheduled, and what became of it."""

from datetime import datetime
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from leasekit.task import Name, Tag, TaskDefaults, TaskSettings
from leasekit.task.leased import check_preference
from leasekit.task.words import MAX_TAGS, PreferFor, Requires

__all__ = [
    "Firing", "FiringOutcome", "Overlap", "PeriodicInfo", "PeriodicName", "PeriodicOptions", "PeriodicTask",
    "PeriodicTaskItem",
]  # fmt: skip

PeriodicName = Annotated[str, Meta(min_length=1, max_length=100, pattern=r"^[ -.0-~]+\Z")]
"""The name of a periodic task: 1-100 printable ASCII characters without `/`, so that the ids of its firings fit."""

Overlap = Literal["skip", "queue", "replace"]
"""What becomes of a firing while the task of the one before has not ended."""

FiringOutcome = Literal["scheduled", "skipped", "missed", "replaced", "triggered", "failed"]
"""What became of a firing."""


class PeriodicTask(TaskSettings, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A task that is scheduled again and again: when (`cron` or `every`), and what."""

    kind: Name
    """Which handler runs the tasks."""
    payload: Any = None
    """JSON, up to 64 KiB; the same for each task."""
    collection: Name | None = None
    """As in `NewTask`."""
    tags: Annotated[list[Tag], Meta(max_length=MAX_TAGS)] = []
    """As in `NewTask`."""
    key: Name | None = None
    """As in `NewTask`."""
    requires: Requires = {}
    """As in `NewTask`."""
    prefers: Requires = {}
    """As in `NewTask`."""
    prefer_for: PreferFor | None = None
    """As in `NewTask`."""
    cron: Annotated[str, Meta(min_length=9, max_length=256, pattern=r"^[ -~]+\Z")] | None = None
    """Minute, hour, day of the month, month and day of the week, as in `0 7 * * MON-FRI`."""
    tz: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    """The time zone of `cron`, as in `Europe/Berlin`. None: UTC."""
    every: Annotated[int, Meta(ge=1, le=10 * 365 * 86400)] | None = None
    """Instead of `cron`: the seconds between two firings, which are counted from 1970-01-01 00:00 UTC."""
    overlap: Overlap = "skip"
    """What becomes of a firing while the task of the one before has not ended. *skip*: no task. *queue*: its task is
    scheduled all the same. *replace*: its task is scheduled, and the one before is cancelled if no worker has it."""
    catch_up: Annotated[int, Meta(ge=0, le=100)] = 1
    """How many firings are made up for after an outage, the latest ones; 0: none."""
    jitter: Annotated[float, Meta(ge=0, le=86400)] = 0.0
    """Seconds by which a firing comes later, at most: the part depends on its name and instant only."""
    start_deadline: Annotated[float, Meta(ge=10, le=10 * 365 * 86400)] | UnsetType | None = UNSET
    """Seconds after which it is too late for a firing, and after which its task is dropped unless it has begun. None:
    it never is."""

    def __post_init__(self) -> None:
        if (self.cron is None) is (self.every is None):
            raise ValueError("`cron` and `every` both say when a periodic task fires: give one of them")
        if self.tz is not None and self.cron is None:
            raise ValueError("`tz` is the time zone of a `cron`: leave it out with `every`")
        if self.every is not None and self.jitter > self.every:
            raise ValueError(f"`jitter` must be at most `every`, which is {self.every} s, got {self.jitter:g}")
        check_preference(self)


class PeriodicOptions(TaskDefaults, total=False):
    """The options of `@worker.periodic`; `PeriodicTask` has their meanings and bounds, also of `start_deadline`."""

    name: str
    """The name of the periodic task. Default: the kind of the handler."""
    payload: Any
    """The payload of each task, which must fit the handler; the default None only fits a handler that takes it."""
    tz: str | None
    """The time zone of the cron expression."""
    every: int
    """In place of a cron expression: seconds."""
    overlap: Overlap
    """What becomes of a firing while the task before has not ended."""
    catch_up: int
    """How many firings are made up for after an outage."""
    jitter: float
    """Seconds by which a firing comes later, at most."""
    key: str | None
    """The key of its tasks."""


def _null() -> Raw:
    return Raw(b"null")


class PeriodicTaskItem(PeriodicTask, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A `PeriodicTask` whose payload is the bytes that came."""

    payload: Raw = field(default_factory=_null)
    """JSON, as it was sent."""


class Firing(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outcome of one firing of a periodic task, or of several that were missed together."""

    at: Annotated[datetime, Meta(tz=True)]
    """The instant of the firing; of several, that of the latest."""
    outcome: FiringOutcome
    """*scheduled*: there is a task. *skipped*, *replaced*: by the overlap policy. *missed*: it was too late.
    *triggered*: on request. *failed*: it could not be judged, and is judged again."""
    id: Name | None = None
    """The id of its task."""
    reason: str | None = None
    """Why there is no task."""
    count: int = 1
    """How many firings this stands for."""


class PeriodicInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A periodic task, when it fires next, and what became of its latest firings."""

    name: str
    """Its name."""
    task: PeriodicTask
    """When it fires, and what is scheduled."""
    changed_at: Annotated[datetime, Meta(tz=True)]
    """When it was changed last: added, changed, paused or resumed."""
    changed_by: str | None = None
    """The name of the client that changed it, or its address; None: the service does not know."""
    declared_at: Annotated[datetime, Meta(tz=True)] | None = None
    """When the code of a worker declared it last, to a few minutes; None: no code has."""
    is_paused: bool = False
    """Whether it fires only on request, until it is resumed."""
    next_at: list[Annotated[datetime, Meta(tz=True)]] = []
    """When it fires next, jitter included; empty while it is paused, and if it never fires again."""
    firings: list[Firing] = []
    """What became of the latest firings, the newest first."""
