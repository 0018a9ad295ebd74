"""Deadline set: the earliest end of the leases of very many running handlers, for one timer.

Leases that were renewed in one call end at the same moment. Such a cohort is one entry of the heap, whatever its size,
so that a renewal costs a move from one set to another. `earliest` is exact at any time: a deadline that is too early
would kill a process that holds all its leases, one that is too late would let a handler run after its lease.

The class is not safe for two threads at once. But a thread may be interrupted anywhere in `add` and `remove` (by a
signal handler that raises), so the order of their writes decides what may be left behind.
"""

import heapq
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_STALE = 64  # entries of the heap that are not worth a clean-up


class DeadlineSet(Generic[K]):
    """Keys, each with the moment at which the lease of its running handler ends."""

    __slots__ = ("_cohorts", "_ends", "_fixed", "_heap")

    def __init__(self) -> None:
        self._ends: dict[K, float] = {}
        self._fixed: dict[K, float] = {}  # the same, for keys that `move` does not touch
        self._cohorts: dict[float, set[K]] = {}
        self._heap: list[float] = []  # the ends of all cohorts, and of some that were removed

    def __len__(self) -> int:
        return len(self._ends) + len(self._fixed)

    @property
    def earliest(self) -> float | None:
        """The deadline of the key that ends first; None if the set is empty."""
        heap, cohorts = self._heap, self._cohorts
        while heap:
            if cohorts.get(heap[0]):
                return heap[0]
            cohorts.pop(heap[0], None)  # first: a cohort that is not in the heap would be overlooked
            heapq.heappop(heap)
        return None

    def add(self, key: K, at: float) -> None:
        """Add `key`, whose handler begins under a lease that ends at `at`. A known key gets `at`, even a fixed one."""
        self.remove(key)
        self._ends[key] = at
        self._ensure_cohort(at).add(key)

    def move(self, keys: Iterable[K], at: float) -> None:
        """Change the deadline of `keys` to `at`, later or earlier. Unknown and fixed keys are ignored."""
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
        self._ensure_cohort(at).update(moved)

    def fix(self, key: K, at: float) -> None:
        """Fix the deadline of `key`: the earlier of `at` and its deadline so far, which no later `move` changes."""
        was = self._ends.get(key)
        if was is None:
            return
        at = min(was, at)
        self.remove(key)
        self._fixed[key] = at
        self._ensure_cohort(at).add(key)

    def remove(self, key: K) -> None:
        for ends in (self._ends, self._fixed):
            at = ends.get(key)
            if at is None:
                continue
            if cohort := self._cohorts.get(at):
                cohort.discard(key)
                if not cohort:
                    self._cohorts.pop(at, None)
            ends.pop(key, None)  # last: a key that only its cohort knows would never leave it

    def _ensure_cohort(self, at: float) -> set[K]:
        cohort = self._cohorts.get(at)
        if cohort is None:
            if len(self._heap) > 2 * len(self._cohorts) + _STALE:
                self._heap = sorted(self._cohorts)  # which is a heap
            heapq.heappush(self._heap, at)  # first: a cohort that is not in the heap would be overlooked
            cohort = self._cohorts[at] = set()
        return cohort
