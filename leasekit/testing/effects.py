"""Record the side effects of handlers, and find those that came after the loss of their lease.

    effects = Effects()
    client = leasekit.connect(service, hooks=[effects])
    ...
    held.check()
    effects.record(held)                 # beside the write itself, in the handler that is tested
    ...
    effects.assert_none_after_loss()

The fixture `leasekit_effects` of the pytest plugin is an `Effects`.
"""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from leasekit import hooks
from leasekit.config import DRIFT, check_number
from leasekit.lease import Lease

__all__ = ["Effects", "SideEffect"]

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # only Linux has the first


@dataclass(frozen=True, slots=True, kw_only=True)
class SideEffect:
    """A side effect of a handler under a lease."""

    task_id: str
    """The id of the task."""
    fence: int
    """The fence of the lease."""
    at: float
    """Seconds, by the clock of the leases (CLOCK_BOOTTIME)."""


@dataclass(slots=True, kw_only=True)
class _Life:
    """The life of a lease, as its holder learned of it."""

    ttl: float
    expires_at: float  # at the latest, by the service's clock
    lost_at: float = math.inf
    lost_why: str = ""
    superseded_at: float = math.inf  # by another grant of the task

    def problem(self, effect: SideEffect) -> str | None:
        """Describe what is wrong with a side effect under this lease; None: nothing."""
        ends = (
            (self.lost_at, f"its lease was lost ({self.lost_why})"),
            (self.superseded_at, "its task was granted again"),
            (self.expires_at, "its lease had expired"),
        )
        for at, end in ends:
            if effect.at > at:
                return f"task {effect.task_id}, fence {effect.fence}: a side effect {effect.at - at:.3f} s after {end}"
        return None


class Effects:
    """Record what handlers do and how their leases end: a hook for the client of these handlers.

    `now` is the clock of the leases, for a test that turns it by hand.
    """

    def __init__(self, *, now: Callable[[], float] = lambda: time.clock_gettime(_CLOCK)) -> None:
        self._now = now
        self._lives: dict[tuple[str, int], _Life] = {}  # by task and fence
        self._fences: dict[tuple[str, str], int] = {}  # by task and token
        self._newest: dict[str, int] = {}  # by task
        self._heard = threading.Condition()
        self.recorded: list[SideEffect] = []
        """The side effects, in their order."""
        self.lost: list[hooks.Lost] = []
        """The losses of leases, in their order."""

    def record(self, held: Lease) -> None:
        """Record that a side effect happens now under this lease. Raises nothing, even if the lease is lost."""
        self.recorded.append(SideEffect(task_id=held.task.id, fence=held.fence, at=self._now()))

    def __call__(self, event: hooks.Event) -> None:
        """Take an event of the client."""
        match event:
            case hooks.Claimed():
                for task in event.tasks:
                    if (before := self._newest_life(task.id)) is not None and self._newest[task.id] != task.fence:
                        before.superseded_at = event.at
                    self._fences[task.id, task.token] = self._newest[task.id] = task.fence
                    life = _Life(ttl=task.ttl, expires_at=event.at + task.ttl * (1 + DRIFT))
                    self._lives.setdefault((task.id, task.fence), life)
            case hooks.Renewed():
                for life in filter(None, map(self._newest_life, event.task_ids)):
                    life.expires_at = max(life.expires_at, event.at + life.ttl * (1 + DRIFT))
            case hooks.Lost() if (fence := self._fences.get((event.task_id, event.token))) is not None:
                life = self._lives[event.task_id, fence]
                life.lost_at, life.lost_why = event.at, event.why
                with self._heard:
                    self.lost.append(event)
                    self._heard.notify_all()
            case _:
                pass

    def assert_none_after_loss(self, *, lost: int = 1, within: float = 5.0) -> None:
        """Fail if a side effect came after its lease was lost or had expired, or after its task was granted again.

        Fail also if fewer than `lost` leases were lost, or if nothing was recorded: then nothing is proved. A handler
        may learn of a loss before this hook does: wait up to `within` seconds for the hook.
        """
        __tracebackhide__ = True
        check_number("lost", lost, unit="", whole=True)
        check_number("within", within)
        with self._heard:
            self._heard.wait_for(lambda: len(self.lost) >= lost, within)
        losses, effects = len(self.lost), len(self.recorded)
        if losses < lost or not effects:
            raise AssertionError(
                f"nothing is proved by {losses} lost leases and {effects} side effects: provoke at least {lost} and 1"
            )
        if problems := self.problems():
            raise AssertionError("\n".join(problems))

    def problems(self) -> list[str]:
        """Describe each side effect that came too late: how late, and after which event."""
        lives = ((effect, self._lives.get((effect.task_id, effect.fence))) for effect in list(self.recorded))
        return [text for effect, life in lives if life is not None and (text := life.problem(effect)) is not None]

    def _newest_life(self, task_id: str) -> _Life | None:
        return self._lives.get((task_id, self._newest.get(task_id, 0)))
