"""What happened, as values, for logs, metrics and tests.

A hook is a callable that takes one event. It runs on the keeper's thread: it must be quick, and what it raises is
logged and dropped. Nobody listening costs nothing: events are only made when there is a hook.

What an event shows of itself (its `repr`) is fit for a log: no token, no payload.
"""

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from leasekit.errors import LeaseEvent
from leasekit.task import NewTask, Outcome, Task

__all__ = [
    "Answered", "AtRisk", "Claimed", "Event", "Hook", "Hooks", "Lost", "Ordered", "Overloaded", "Renewed", "Running",
    "Sent", "Settled", "Source", "Tracer", "Unreported", "about", "everywhere", "log_events", "nowhere", "show",
    "sources",
]  # fmt: skip

logger = logging.getLogger("leasekit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to leases; `at` is the keeper's clock (CLOCK_BOOTTIME, seconds)."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed(Event):
    """Tasks were granted to this process, `took` seconds after it had first asked."""

    task_ids: Sequence[str]
    waited: float | None
    took: float = 0.0
    tasks: Sequence[Task] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent(Event):
    """A batch of beats left; `late` is how long after its slot was due."""

    task_ids: Sequence[str]
    late: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed(Event):
    """Beats were acknowledged, `round_trip` seconds after they left."""

    task_ids: Sequence[str]
    round_trip: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered(Event):
    """A batch of beats came back, well or not, `round_trip` seconds after it left; `verdicts` counts each kind."""

    round_trip: float
    verdicts: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRisk(Event):
    """The first beat of a lease failed; it is tried again."""

    task_id: str
    token: str = field(repr=False)
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered(Event):
    """The service wants the body of this lease to wind down."""

    task_id: str
    token: str = field(repr=False)
    order: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(Event):
    """A lease is over for this process, and its body is told to stop; `events` is what happened to it before."""

    task_id: str
    token: str = field(repr=False)
    reason: str
    why: str
    events: Sequence[LeaseEvent] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled(Event):
    """A settlement was answered: `settled`, or `gone` with a reason."""

    task_id: str
    token: str = field(repr=False)
    outcome: str
    verdict: str
    reason: str | None
    task: Task | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreported(Event):
    """Settlements could not be reported and are kept; they will be reported again."""

    task_ids: Sequence[str]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Overloaded(Event):
    """More leases are held than can beat in one cycle: raise rate, batch or cycle, or hold fewer."""

    held: int
    capacity: int


Hook = Callable[[Event], None]


# What surrounds users' code -----------------------------------------------------------------------------------


class Running(ABC):
    """One body, from when it begins; its methods are called in the body's own thread."""

    @abstractmethod
    def enter(self) -> None:
        """The body's context is the current one: set what the body is to find there."""

    @abstractmethod
    def leave(self) -> None:
        """Take it back. Not called where the context is thrown away with the body."""

    @abstractmethod
    def end(self, task: Task, outcome: Outcome | None, error: BaseException | None) -> None:
        """The body has ended so; no outcome: its lease was lost. `task` may be a later claim of the same task."""


class Tracer(ABC):
    """A hook that is also told what its users' own threads do, while they do it: for traces."""

    @property
    @abstractmethod
    def listening(self) -> bool:
        """While this is false, nothing is made for it, events neither."""

    @abstractmethod
    def __call__(self, event: Event) -> None:
        """As every hook: something happened."""

    @abstractmethod
    def scheduling(self, tasks: Sequence[NewTask]) -> AbstractContextManager[Sequence[NewTask]]:
        """Around a call that schedules: gives the tasks as they are to be sent."""

    @abstractmethod
    def running(self, task: Task) -> Running:
        """The body of this task begins."""


# Who listens --------------------------------------------------------------------------------------------------

_everywhere: tuple[Hook, ...] = ()


def everywhere(hook: Hook) -> None:
    """Have this hook hear what happens in all of this process, from now on."""
    global _everywhere  # noqa: PLW0603 - that is what it says
    if hook not in _everywhere:
        _everywhere += (hook,)


def nowhere(hook: Hook) -> None:
    """Take back `everywhere`."""
    global _everywhere  # noqa: PLW0603
    _everywhere = tuple(one for one in _everywhere if one != hook)


class Hooks:
    """The listeners of one keeper, the log among them.

    False where only the log listens: then events that come with every beat and claim need not be made.
    """

    def __init__(self, hooks: Sequence[Hook] = ()) -> None:
        self._own = tuple(hooks)

    def add(self, hook: Hook) -> None:
        """Have one more listen, from now on. One that listens already is not told twice."""
        if hook not in self._own:
            self._own += (hook,)

    @property
    def _listeners(self) -> tuple[Hook, ...]:
        if not _everywhere:
            return self._own
        return (*self._own, *(hook for hook in _everywhere if hook not in self._own))

    def __contains__(self, hook: Hook) -> bool:
        return hook in self._own or hook in _everywhere

    def __bool__(self) -> bool:
        # The first half is all that there is to it where nobody listens.
        return bool(self._own or _everywhere) and any(
            not isinstance(hook, Tracer) or hook.listening for hook in self._listeners
        )

    def __call__(self, event: Event) -> None:
        for hook in (log_events, *self._listeners):
            try:
                hook(event)
            except BaseException:  # a hook's sys.exit() must not end the keeper
                logger.exception("a hook failed on %s", type(event).__name__)

    @property
    def _tracer(self) -> Tracer | None:
        return next((hook for hook in self._listeners if isinstance(hook, Tracer) and hook.listening), None)

    def scheduling(self, tasks: Sequence[NewTask]) -> AbstractContextManager[Sequence[NewTask]]:
        """Around a call that schedules: gives the tasks as they are to be sent."""
        tracer = self._tracer
        return nullcontext(tasks) if tracer is None else tracer.scheduling(tasks)

    def running(self, task: Task) -> Running | None:
        """The body of this task begins. None where nobody traces it."""
        tracer = self._tracer
        return None if tracer is None else tracer.running(task)


# What can be read at any time ---------------------------------------------------------------------------------


class Source(Protocol):
    """Something with numbers that go up and down: the leases of a connection, the slots of a worker."""

    hooks: Hooks

    def gauges(self) -> Mapping[str, float]:
        """The numbers as they are now, by name. From any thread."""
        ...


_sources: dict[int, weakref.ref[Source]] = {}


def show(source: Source) -> None:
    """Let those who listen to `source.hooks` read its numbers, as long as it lives."""
    key = id(source)
    _sources[key] = weakref.ref(source, lambda _: _sources.pop(key, None))


def sources(hook: Hook) -> list[Source]:
    """All that this hook may read."""
    # A copy in one step: others come and go in other threads.
    living = [source() for source in list(_sources.values())]
    return [source for source in living if source is not None and hook in source.hooks]


# The log ------------------------------------------------------------------------------------------------------


def about(task_id: str, token: str) -> dict[str, str]:
    """What a log record about a lease carries beside its text, as `extra`: of the token its first characters only."""
    return {"task_id": task_id, "token_start": token[:6]}


def log_events(event: Event) -> None:
    """The hook that ships switched on: logs *lost* and what precedes it, with the token's first characters only."""
    match event:
        case Lost():
            extra = about(event.task_id, event.token)
            logger.warning("lost %s (token %s…): %s", event.task_id, extra["token_start"], event.why, extra=extra)
        case AtRisk():
            extra = about(event.task_id, event.token)
            logger.info("at risk %s (token %s…): %s", event.task_id, extra["token_start"], event.why, extra=extra)
        case Ordered():
            extra = about(event.task_id, event.token)
            logger.info("ordered to %s: %s (token %s…)", event.order, event.task_id, extra["token_start"], extra=extra)
        case Unreported():
            logger.warning("%d results could not be reported, and are kept: %s", len(event.task_ids), event.why)
        case Overloaded():
            logger.warning(
                "%d leases held, %d can beat in a cycle: raise rate, batch or cycle", event.held, event.capacity
            )
        case _:
            pass
