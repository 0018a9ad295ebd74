"""Histograms for metrics: one thread adds values, any thread reads."""

import bisect
from collections.abc import Sequence


class Histogram:
    """Count values by size: how many were at most each of `bounds`, how many in total, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def counts(self) -> list[int]:
        """Return how many values were up to each bound and above the one before; the last item has the others."""
        return list(self._counts)

    def cumulated(self) -> list[int]:
        """Return for each bound how many values were at most that large; the last item is the total."""
        total = 0
        return [total := total + count for count in list(self._counts)]
