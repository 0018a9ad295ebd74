"""Idle watch: end handlers with an `idle_timeout` that report no progress for that long, by absolute time."""

import heapq
import itertools
import math

from leasekit._driver.keeping.held_lease import HeldLease
from leasekit.errors import IdleTimeout

_STALE = 64  # entries of the heap that are not worth a clean-up


class IdleWatch:
    """A heap of leases by the time of their next check. Progress only records a time: it moves nothing in the heap."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, HeldLease]] = []
        self._order = itertools.count()

    def watch(self, held: HeldLease, *, total: int) -> None:
        if len(self._heap) > 2 * total + _STALE:  # entries of ended handlers need not stay until their time
            self._heap = [entry for entry in self._heap if entry[-1].handler_runs]
            heapq.heapify(self._heap)
        self._schedule_check(held.idle_at, held)

    def step(self, now: float) -> list[HeldLease]:
        """Tell idle handlers to end. Return those that go on a grace later: hung, their leases must not be renewed."""
        hung: list[HeldLease] = []
        while self._heap and self._heap[0][0] <= now:
            _, _, held = heapq.heappop(self._heap)
            if not held.handler_runs or held.reason is not None:
                continue
            if held.idle_at > now:  # progress was reported since
                self._schedule_check(held.idle_at, held)
            elif not held.told_idle:
                held.told_idle = True
                held.tell(IdleTimeout)
                self._schedule_check(now + held.term.heartbeats.grace, held)
            else:
                hung.append(held)
        return hung

    @property
    def wake_at(self) -> float:
        return self._heap[0][0] if self._heap else math.inf

    def _schedule_check(self, at: float, held: HeldLease) -> None:
        heapq.heappush(self._heap, (at, next(self._order), held))
