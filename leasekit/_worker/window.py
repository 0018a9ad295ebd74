"""Window: how many tasks to claim. This module reads no clock: `now` is an argument."""

import math

_MEMORY = 0.5  # seconds over which the pace is averaged
_SAMPLE = 0.05  # seconds: a shorter time says nothing about the pace


class Window:
    """Compute the sliding window: `n − running − buffered`.

    `n` is the number of slots, plus the runs that end in `ahead` seconds at the present pace. So slots whose runs take
    minutes claim nothing that they could not begin at once, and slots whose runs take microseconds never wait.
    """

    def __init__(self, slots: int, ahead: float) -> None:
        self.slots = slots
        self.ahead = ahead
        self.out = 0  # claimed tasks whose handlers have not ended: running and buffered
        self._pace = 0.0  # ends per second
        self._ends = 0  # ends since …
        self._looked_at = -math.inf

    def ended(self, count: int) -> None:
        self.out -= count
        self._ends += count

    def stalled(self) -> None:
        """Claim only for free slots until handlers end again, because tasks claimed ahead could not begin."""
        self._pace, self._ends = 0.0, 0

    def size(self, now: float) -> int:
        """Return how many to claim at `now`; 0 while half of the tasks ahead are left: claims come in batches."""
        passed = now - self._looked_at
        if passed >= _SAMPLE:
            self._pace += (self._ends / passed - self._pace) * (1 - math.exp(-passed / _MEMORY))
            self._ends, self._looked_at = 0, now
        ahead = int(self._pace * self.ahead)
        free = self.slots + ahead - self.out
        return free if free >= max(1, ahead // 2) else 0
