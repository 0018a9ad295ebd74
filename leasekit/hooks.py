"""Hooks: events of leases as values, for logs, metrics and tests.

A hook is a callable that takes one event. It runs on the keeper's thread: it must be quick, and its errors are logged
and dropped. Events of single heartbeats and claims are made only if a hook of yours listens.

The `repr` of an event is fit for a log: no token, no payload.
"""

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, Protocol

from leasekit.errors import LeaseEvent, LossReason
from leasekit.task import NewTask, Outcome, Task

__all__ = [
    "Answered", "AtRisk", "CancelRequested", "CapacityExceeded", "Claimed", "Event", "Hook", "Hooks", "Lost",
    "Redriven", "Renewed", "ReportDelayed", "Running", "Sent", "Settled", "Source", "Tracer", "add_global_hook",
    "gauge_sources", "log_events", "log_fields", "register_gauges", "remove_global_hook",
]  # fmt: skip

logger = logging.getLogger("leasekit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event in the life of leases."""

    at: float
    """The time of the event, by the keeper's clock (CLOCK_BOOTTIME, seconds)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed(Event):
    """Tasks were granted to this process."""

    task_ids: Sequence[str]
    """The ids of the tasks."""
    waited: float | None
    """Seconds for which the request had waited at the service; None: the service does not say."""
    took: float = 0.0
    """Seconds from the first request to the answer."""
    tasks: Sequence[Task] = field(default=(), repr=False)
    """The tasks themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent(Event):
    """A batch of heartbeats was sent."""

    task_ids: Sequence[str]
    """The ids of the tasks whose leases are to be renewed."""
    late: float
    """Seconds after the slot was due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed(Event):
    """Heartbeats were acknowledged."""

    task_ids: Sequence[str]
    """The ids of the tasks whose heartbeats were acknowledged."""
    round_trip: float
    """Seconds from request to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered(Event):
    """A batch of heartbeats was answered, or failed."""

    round_trip: float
    """Seconds from request to answer."""
    verdicts: Mapping[str, int]
    """The number of heartbeats for each verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRisk(Event):
    """The first heartbeat of a lease failed; it is tried again."""

    task_id: str
    """The id of the task."""
    token: str = field(repr=False)
    """The token of its claim; not in the `repr`, and never for a log."""
    why: str
    """The failure, in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested(Event):
    """The service asks the code under this lease to wind down."""

    task_id: str
    """The id of the task."""
    token: str = field(repr=False)
    """The token of its claim; not in the `repr`, and never for a log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(Event):
    """A lease is over for this process, and the code under it is told to stop."""

    task_id: str
    """The id of the task."""
    token: str = field(repr=False)
    """The token of its claim; not in the `repr`, and never for a log."""
    reason: LossReason
    """The reason, as in `LeaseLost`."""
    why: str
    """The reason, in one sentence."""
    events: Sequence[LeaseEvent] = field(default=(), repr=False)
    """Earlier events of the lease, the oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled(Event):
    """A settlement was answered: `settled`, or `gone` with a reason."""

    task_id: str
    """The id of the task."""
    token: str = field(repr=False)
    """The token of its claim; not in the `repr`, and never for a log."""
    outcome: str
    """The outcome that was reported."""
    verdict: str
    """`settled` or `gone`."""
    reason: str | None
    """Why the verdict is `gone`; `dead` if the run was the task's last one, by a failure or a crash."""
    task: Task | None = field(default=None, repr=False)
    """The task itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Redriven(Event):
    """Tasks that had ended were made ready again, because this process asked for it."""

    task_ids: Sequence[str]
    """The ids of the tasks that have a new life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportDelayed(Event):
    """Settlements could not be reported and are kept; they will be reported again."""

    task_ids: Sequence[str]
    """The ids of the tasks whose settlements are kept."""
    why: str
    """The failure, in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityExceeded(Event):
    """More leases are held than can be renewed in one cycle: raise rate, batch or cycle, or hold fewer."""

    held: int
    """The number of leases held."""
    capacity: int
    """The number of leases that can be renewed in one cycle."""


Hook = Callable[[Event], None]
"""A callable that takes one event."""


RunEnd = Outcome | Literal["not_yet"]
"""How a call of a handler ended: as its task was settled, or with `NotYet`, so that another run goes on."""


class Running(ABC):
    """A run of a task, from its begin; its methods are called in the thread of the handler."""

    @abstractmethod
    def enter(self) -> None:
        """Set what the handler must find in its context, which is the current one."""

    @abstractmethod
    def leave(self) -> None:
        """Undo `enter`. This is not called where the context ends with the handler."""

    @abstractmethod
    def end(self, task: Task, outcome: RunEnd | None, error: BaseException | None) -> None:
        """Record the end of the run; no outcome: its lease was lost. `task` may be a later claim of the same task."""


class Tracer(ABC):
    """A hook that is also called in users' threads, around their calls and runs: for traces."""

    @property
    @abstractmethod
    def listening(self) -> bool:
        """Whether anything is recorded. While this is False, nothing is made for this hook, not even events."""

    @abstractmethod
    def __call__(self, event: Event) -> None:
        """Take an event, as every hook does."""

    @abstractmethod
    def scheduling(self, tasks: Sequence[NewTask]) -> AbstractContextManager[Sequence[NewTask]]:
        """Surround a call that schedules: give the tasks as they must be sent."""

    @abstractmethod
    def running(self, task: Task) -> Running:
        """Record that the run of this task begins."""


_global_hooks: tuple[Hook, ...] = ()


def add_global_hook(hook: Hook) -> None:
    """Call this hook with all events of this process, from now on."""
    global _global_hooks  # noqa: PLW0603 - the name says so
    if hook not in _global_hooks:
        _global_hooks += (hook,)


def remove_global_hook(hook: Hook) -> None:
    """Undo `add_global_hook`."""
    global _global_hooks  # noqa: PLW0603
    _global_hooks = tuple(one for one in _global_hooks if one != hook)


class Hooks:
    """The listeners of one keeper, the log among them.

    `active` is False if only the log listens: then events of every heartbeat and claim need not be made.
    """

    def __init__(self, hooks: Sequence[Hook] = ()) -> None:
        self._own = tuple(hooks)

    def add(self, hook: Hook) -> None:
        """Add a hook, from now on. A hook that is there already is not called twice."""
        if hook not in self._own:
            self._own += (hook,)

    @property
    def _listeners(self) -> tuple[Hook, ...]:
        if not _global_hooks:
            return self._own
        return (*self._own, *(hook for hook in _global_hooks if hook not in self._own))

    def __contains__(self, hook: Hook) -> bool:
        return hook in self._own or hook in _global_hooks

    @property
    def active(self) -> bool:
        """Whether a hook besides the log listens: only then events are made."""
        # Without hooks, the first half is all that is evaluated.
        return bool(self._own or _global_hooks) and any(
            not isinstance(hook, Tracer) or hook.listening for hook in self._listeners
        )

    def __call__(self, event: Event) -> None:
        for hook in (log_events, *self._listeners):
            try:
                hook(event)
            except BaseException:  # a hook's sys.exit() must not end the keeper
                logger.exception("a hook failed on %s", type(event).__name__)

    @property
    def tracer(self) -> Tracer | None:
        """The tracer that listens; None: no tracer does."""
        return next((hook for hook in self._listeners if isinstance(hook, Tracer) and hook.listening), None)

    def scheduling(self, tasks: Sequence[NewTask]) -> AbstractContextManager[Sequence[NewTask]]:
        """Surround a call that schedules: give the tasks as they must be sent."""
        tracer = self.tracer
        return nullcontext(tasks) if tracer is None else tracer.scheduling(tasks)


class Source(Protocol):
    """An object with numbers that go up and down: the leases of a connection, the slots of a worker."""

    hooks: Hooks
    """The hooks that may read the numbers."""

    def gauges(self) -> Mapping[str, float]:
        """Return the current numbers, by name. Any thread."""
        ...


_sources: dict[int, weakref.ref[Source]] = {}


def register_gauges(source: Source) -> None:
    """Let the hooks of `source.hooks` read the numbers of `source`, as long as it lives."""
    key = id(source)
    _sources[key] = weakref.ref(source, lambda _: _sources.pop(key, None))


def gauge_sources(hook: Hook) -> list[Source]:
    """Return all sources that this hook may read."""
    # A copy in one step, because other threads add and remove sources.
    living = [source() for source in list(_sources.values())]
    return [source for source in living if source is not None and hook in source.hooks]


def log_fields(task_id: str, token: str) -> dict[str, str]:
    """Return the fields (`extra`) of a log record about a lease, with only the first characters of its token."""
    return {"task_id": task_id, "token_start": token[:6]}


def log_events(event: Event) -> None:
    """Log lost leases and what precedes a loss, with only the first characters of the token. This hook is always on."""
    match event:
        case Lost():
            extra = log_fields(event.task_id, event.token)
            logger.warning("lost %s (token %s…): %s", event.task_id, extra["token_start"], event.why, extra=extra)
        case AtRisk():
            extra = log_fields(event.task_id, event.token)
            logger.info("at risk %s (token %s…): %s", event.task_id, extra["token_start"], event.why, extra=extra)
        case CancelRequested():
            extra = log_fields(event.task_id, event.token)
            logger.info("asked to cancel: %s (token %s…)", event.task_id, extra["token_start"], extra=extra)
        case CapacityExceeded():
            logger.warning(
                "%d leases held, %d can beat in a cycle: raise rate, batch or cycle", event.held, event.capacity
            )
        case _:
            pass
