"""Waiting runs: runs whose handler has said `NotYet`, in the order in which they are due. Reads no clock.

Rule 1: a run that waits keeps its lease and its place in the window, and holds no slot.
Rule 2: what ends a run (a loss, a cancel request, an idle timeout, a drain) ends one that waits at once.
Rule 3: it is no attempt and no failure: where a run that waits is given back, its task is due when the wait is over.
"""

import heapq
import itertools
import math

from leasekit._worker.claimed_task import ClaimedTask

_STALE = 64  # entries of the heap that are not worth a clean-up


class WaitingRuns:
    """The runs that wait, each until its `due_at`. For one thread."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ClaimedTask]] = []  # also of runs that were removed
        self._order = itertools.count()
        self._entries: dict[ClaimedTask, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, work: ClaimedTask) -> bool:
        return work in self._entries

    def add(self, work: ClaimedTask) -> None:
        number = self._entries[work] = next(self._order)
        heapq.heappush(self._heap, (work.due_at, number, work))

    def remove(self, work: ClaimedTask) -> bool:
        """Remove a run; return whether it was here."""
        if self._entries.pop(work, None) is None:
            return False
        if len(self._heap) > 2 * len(self._entries) + _STALE:
            self._heap = [entry for entry in self._heap if self._entries.get(entry[-1]) == entry[1]]
            heapq.heapify(self._heap)
        return True

    def due(self, now: float) -> list[ClaimedTask]:
        """Remove and return the runs that are due, the first due first."""
        works: list[ClaimedTask] = []
        while self._heap and self._heap[0][0] <= now:
            _, number, work = heapq.heappop(self._heap)
            if self._entries.get(work) == number:
                del self._entries[work]
                works.append(work)
        return works

    def take_all(self) -> list[ClaimedTask]:
        """Remove and return all runs."""
        return self.due(math.inf)

    @property
    def wake_at(self) -> float:
        """When the next run is due, or an entry of a removed one."""
        return self._heap[0][0] if self._heap else math.inf
