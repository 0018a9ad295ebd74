"""What happened, as values, for logs, metrics and tests.

A hook is a callable that takes one event. It runs on the keeper's thread: it must be quick, and what it raises is
logged and dropped. Nobody listening costs nothing: events are only made when there is a hook.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = [
    "AtRisk", "Claimed", "Event", "Hook", "Hooks", "Lost", "Ordered", "Overloaded", "Renewed", "Sent", "Settled",
    "Unreported", "log_events",
]  # fmt: skip

logger = logging.getLogger("leasekit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to leases; `at` is the keeper's clock (CLOCK_BOOTTIME, seconds)."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed(Event):
    """Tasks were granted to this process."""

    task_ids: Sequence[str]
    waited: float | None


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
class AtRisk(Event):
    """The first beat of a lease failed; it is tried again."""

    task_id: str
    token: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered(Event):
    """The service wants the body of this lease to wind down."""

    task_id: str
    token: str
    order: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(Event):
    """A lease is over for this process, and its body is told to stop."""

    task_id: str
    token: str
    reason: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled(Event):
    """A settlement was answered: `settled`, or `gone` with a reason."""

    task_id: str
    token: str
    outcome: str
    verdict: str
    reason: str | None


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


class Hooks:
    """The listeners of one keeper, the log among them.

    False where only the log listens: then events that come with every beat and claim need not be made.
    """

    def __init__(self, hooks: Sequence[Hook] = ()) -> None:
        self._hooks = [log_events, *hooks]

    def __bool__(self) -> bool:
        return len(self._hooks) > 1

    def __call__(self, event: Event) -> None:
        for hook in self._hooks:
            try:
                hook(event)
            except BaseException:  # a hook's sys.exit() must not end the keeper
                logger.exception("a hook failed on %s", type(event).__name__)


def log_events(event: Event) -> None:
    """The hook that ships switched on: logs *lost* and what precedes it, with the token's first characters only."""
    match event:
        case Lost():
            logger.warning("lost %s (token %.6s…): %s", event.task_id, event.token, event.why)
        case AtRisk():
            logger.info("at risk %s (token %.6s…): %s", event.task_id, event.token, event.why)
        case Ordered():
            logger.info("ordered to %s: %s (token %.6s…)", event.order, event.task_id, event.token)
        case Unreported():
            logger.warning("%d results could not be reported, and are kept: %s", len(event.task_ids), event.why)
        case Overloaded():
            logger.warning(
                "%d leases held, %d can beat in a cycle: raise rate, batch or cycle", event.held, event.capacity
            )
        case _:
            pass
