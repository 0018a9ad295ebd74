"""How much to claim. No clock in here: `now` is an argument."""

import math

__all__ = ["Window"]

_MEMORY = 0.5  # seconds: the pace is that of about so long
_SAMPLE = 0.05  # seconds: a shorter look says nothing about a pace


class Window:
    """The sliding window: `n − running − buffered`.

    `n` is the number of slots, and what they do in `ahead` seconds at their present pace: slots that run for minutes
    claim nothing that they could not begin at once, and those that run for microseconds never wait for a claim.
    """

    def __init__(self, slots: int, ahead: float) -> None:
        self.slots = slots
        self.ahead = ahead
        self.out = 0  # claimed, and the body has not ended: running and buffered
        self._pace = 0.0  # ends a second
        self._ends = 0  # since …
        self._looked_at = -math.inf

    def ended(self, count: int) -> None:
        """So many bodies have ended."""
        self.out -= count
        self._ends += count

    def stalled(self) -> None:
        """What was claimed ahead could not be begun: claim no more than there are slots, until they move again."""
        self._pace, self._ends = 0.0, 0

    def size(self, now: float) -> int:
        """How many to claim at `now`. Zero also while half of what is ahead is left: claims come in batches."""
        ahead = int(self._pace_at(now) * self.ahead)
        free = self.slots + ahead - self.out
        return free if free >= max(1, ahead // 2) else 0

    def _pace_at(self, now: float) -> float:
        passed = now - self._looked_at
        if passed >= _SAMPLE:
            self._pace += (self._ends / passed - self._pace) * (1 - math.exp(-passed / _MEMORY))
            self._ends, self._looked_at = 0, now
        return self._pace
