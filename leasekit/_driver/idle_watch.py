"""Bodies with an `idle_timeout`: who reports no progress for so long, by absolute time, has to end."""

import heapq
import itertools
import math

from leasekit._driver.holding import Holding
from leasekit.errors import IdleTimeout

__all__ = ["IdleWatch"]

_STALE = 64  # entries of the heap that are not worth a clean-up


class IdleWatch:
    """A heap of when to look at whom. Progress only writes down a time: nothing is moved for it."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Holding]] = []
        self._order = itertools.count()

    def watch(self, holding: Holding, *, held: int) -> None:
        """Look after it from now on; `held` leases are there in all."""
        if len(self._heap) > 2 * held + _STALE:  # those that have ended need not stay until their time
            self._heap = [entry for entry in self._heap if entry[-1].body_runs]
            heapq.heapify(self._heap)
        self._look_at(holding.idle_at, holding)

    def step(self, now: float) -> list[Holding]:
        """Tell those to end who are idle. Returns who was told a grace ago and goes on: hung, to be beaten no more."""
        hung: list[Holding] = []
        while self._heap and self._heap[0][0] <= now:
            _, _, holding = heapq.heappop(self._heap)
            if not holding.body_runs or holding.reason is not None:
                continue
            if holding.idle_at > now:  # it moved since
                self._look_at(holding.idle_at, holding)
            elif not holding.told_idle:
                holding.told_idle = True
                holding.tell(IdleTimeout)
                self._look_at(now + holding.term.beats.grace, holding)
            else:
                hung.append(holding)
        return hung

    @property
    def wake_at(self) -> float:
        """When there is somebody to look at."""
        return self._heap[0][0] if self._heap else math.inf

    def _look_at(self, at: float, holding: Holding) -> None:
        heapq.heappush(self._heap, (at, next(self._order), holding))
