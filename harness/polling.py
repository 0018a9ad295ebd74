"""Tasks that poll, in simulated time: how long each takes if slots and claims are scheduled without any delay.

A task makes so many calls of its handler, each of which holds a slot for `cost`, with `interval` between two. Slots
take runs that are due before tasks that are new. Without a window there is no bound on what is held: that is ideal
scheduling. With one, what is beyond it stays with the service until its turn, as a worker does it.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leasekit._worker.window import Window

__all__ = ["Life", "Polling", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Polling:
    """The work of each task."""

    cost: float = 0.5
    interval: float = 3.0
    calls: int = 11

    @property
    def ideal(self) -> float:
        """How long a task takes that never waits for a slot."""
        return self.cost + (self.calls - 1) * (self.interval + self.cost)


@dataclass(slots=True, kw_only=True)
class Life:
    """The life of a task: when it was there, when its first call began, and when its last one ended."""

    arrived_at: float
    calls_left: int
    began_at: float | None = None
    ended_at: float = 0.0

    @property
    def took(self) -> float:
        """Seconds from its arrival to its end."""
        return self.ended_at - self.arrived_at

    @property
    def ran(self) -> float:
        """Seconds from its first call to its end."""
        return self.ended_at - (self.arrived_at if self.began_at is None else self.began_at)


class _Simulation:
    def __init__(self, polling: Polling, slots: int, window: Window | None) -> None:
        self._polling = polling
        self._free = slots
        self._window = window
        self._events: list[tuple[float, int, Callable[[Life], None], Life]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._backlog: deque[Life] = deque()
        self._new: deque[Life] = deque()
        self._due: deque[Life] = deque()
        self.most_held = 0

    def run(self, arrivals: Sequence[float]) -> list[Life]:
        lives = [Life(arrived_at=at, calls_left=self._polling.calls) for at in arrivals]
        for life in lives:
            self._at(life.arrived_at, self._backlog.append, life)
        while self._events:
            self._now = self._events[0][0]
            while self._events and self._events[0][0] <= self._now:  # all of a moment, before slots are given
                _, _, happens, life = heapq.heappop(self._events)
                happens(life)
            self._claim()
            self._begin()
        return lives

    def _at(self, at: float, happens: Callable[[Life], None], life: Life) -> None:
        heapq.heappush(self._events, (round(at, 9), next(self._order), happens, life))

    def _claim(self) -> None:
        size = len(self._backlog) if self._window is None else min(len(self._backlog), self._window.size(self._now))
        for _ in range(size):
            self._new.append(self._backlog.popleft())
        if self._window is not None:
            self._window.out += size
            self.most_held = max(self.most_held, self._window.out)

    def _begin(self) -> None:
        while self._free and (self._due or self._new):
            life = (self._due or self._new).popleft()
            self._free -= 1
            if life.began_at is None:
                life.began_at = self._now
            self._at(self._now + self._polling.cost, self._end_call, life)

    def _end_call(self, life: Life) -> None:
        self._free += 1
        life.calls_left -= 1
        wait = self._polling.interval if life.calls_left else 0.0
        if self._window is not None:
            self._window.called("polling", 1, int(wait > 0), self._polling.cost, wait)
        if life.calls_left:
            self._count_waiting(1)
            self._at(self._now + wait, self._go_on, life)
            return
        life.ended_at = self._now
        if self._window is not None:
            self._window.ended(1)

    def _go_on(self, life: Life) -> None:
        self._count_waiting(-1)
        self._due.append(life)

    def _count_waiting(self, change: int) -> None:
        if self._window is not None:
            self._window.waiting += change


def simulate(
    arrivals: Sequence[float], polling: Polling, *, slots: int = 8, window: Window | None = None
) -> list[Life]:
    """Return the lives of tasks that arrive at these instants."""
    return _Simulation(polling, slots, window).run(arrivals)
