"""Who ends when, and who first: what one timer has to know of very many leases.

Leases that were renewed in one call end at the same moment. Such a cohort is one entry of the heap, however many are in
it, so that a renewal costs a move from one set to another. `earliest` is exact at any time: a moment that is too early
would kill a process that holds all its leases, one that is too late would let a body run after its lease.

Not for two threads at once, except that a thread may be interrupted anywhere in `add` and `remove` (a signal handler
that raises): what is written first there is what may be left behind.
"""

import heapq
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

__all__ = ["DeadlineSet"]

K = TypeVar("K", bound=Hashable)

_STALE = 64  # entries of the heap that are not worth a clean-up


class DeadlineSet(Generic[K]):
    """Keys, each with the moment at which it ends."""

    __slots__ = ("_cohorts", "_ends", "_fixed", "_heap")

    def __init__(self) -> None:
        self._ends: dict[K, float] = {}
        self._fixed: dict[K, float] = {}  # the same for those that nothing moves any more
        self._cohorts: dict[float, set[K]] = {}
        self._heap: list[float] = []  # the ends of all cohorts, and of some that are no more

    def __len__(self) -> int:
        return len(self._ends) + len(self._fixed)

    @property
    def earliest(self) -> float | None:
        """When the first of them ends; None where nobody is in."""
        heap, cohorts = self._heap, self._cohorts
        while heap:
            if cohorts.get(heap[0]):
                return heap[0]
            cohorts.pop(heap[0], None)  # first: a cohort that is not in the heap would be overlooked
            heapq.heappop(heap)
        return None

    def add(self, key: K, at: float) -> None:
        """It is in, and ends at `at`."""
        self.remove(key)
        self._ends[key] = at
        self._cohort(at).add(key)

    def move(self, keys: Iterable[K], at: float) -> None:
        """Those of `keys` that are in, and not fixed, end at `at` from now on: later than so far, or earlier."""
        ends, cohorts = self._ends, self._cohorts
        moved = [key for key in keys if key in ends]
        if not moved:
            return
        for key in moved:
            was = ends[key]
            if cohort := cohorts.get(was):
                cohort.discard(key)
                if not cohort:
                    del cohorts[was]
        ends.update(dict.fromkeys(moved, at))
        self._cohort(at).update(moved)

    def fix(self, key: K, at: float) -> None:
        """It ends at `at`, or when it would have ended if that is earlier, and no later `move` changes that."""
        was = self._ends.get(key)
        if was is None:
            return
        at = min(was, at)
        self.remove(key)
        self._fixed[key] = at
        self._cohort(at).add(key)

    def remove(self, key: K) -> None:
        """It is in no more. Who is not in is no error."""
        for ends in (self._ends, self._fixed):
            at = ends.get(key)
            if at is None:
                continue
            if cohort := self._cohorts.get(at):
                cohort.discard(key)
                if not cohort:
                    self._cohorts.pop(at, None)
            ends.pop(key, None)  # last: a key in a cohort that nobody knows of would never leave it

    def _cohort(self, at: float) -> set[K]:
        cohort = self._cohorts.get(at)
        if cohort is None:
            if len(self._heap) > 2 * len(self._cohorts) + _STALE:
                self._heap = sorted(self._cohorts)  # which is a heap
            heapq.heappush(self._heap, at)  # first: a cohort that is not in the heap would be overlooked
            cohort = self._cohorts[at] = set()
        return cohort
