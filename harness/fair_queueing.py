"""Ideal fair shares: start-time fair queueing of tasks of one size (Goyal, Vin and Cheng, 1996), in memory.

Tests and benchmarks take tasks of a store beside it, and compare how many of each key both have started.
"""

import heapq
import itertools
from collections import Counter

__all__ = ["FairQueueing"]


class FairQueueing:
    """A queue of tasks, each of a key of weight one."""

    def __init__(self) -> None:
        self.started = Counter[str]()
        """The tasks that were started, by key."""
        self._waiting: list[tuple[float, int, str]] = []  # start tag, order of arrival, key
        self._numbers = itertools.count()
        self._finish: dict[str, float] = {}  # finish tag of each key's last task
        self._clock = 0.0  # start tag of the task that was started last

    def put(self, key: str) -> None:
        start = max(self._clock, self._finish.get(key, 0.0))
        self._finish[key] = start + 1
        heapq.heappush(self._waiting, (start, next(self._numbers), key))

    def take(self) -> str | None:
        """Start the next task, and return its key; None: none waits."""
        if not self._waiting:
            return None
        self._clock, _, key = heapq.heappop(self._waiting)
        self.started[key] += 1
        return key
