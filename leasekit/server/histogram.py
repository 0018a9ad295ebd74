"""Counting how often a value was how big, for whoever wants to read it: one thread counts, any other reads."""

import bisect
from collections.abc import Sequence

__all__ = ["Histogram"]


class Histogram:
    """A histogram: how many values were at most each of `bounds`, how many there were, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """One more value."""
        self._counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulated(self) -> list[int]:
        """For each bound how many values were at most so big; last, how many there were."""
        total = 0
        return [total := total + count for count in list(self._counts)]
