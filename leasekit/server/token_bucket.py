"""A token bucket, as arithmetic: how many tasks may start now, and when the next one may."""

from typing import NamedTuple


class Bucket(NamedTuple):
    """A bucket that gets `rate` tokens a second, up to `burst`. A start takes one.

    The moment at which the bucket is full again is all that has to be kept: what is missing then comes with time. (The
    generic cell rate algorithm keeps the same moment.) So over any time t, at most burst + rate·t tokens are taken.
    """

    rate: float
    burst: int
    full_at: float

    @classmethod
    def kept(cls, rate: float, burst: int, full_at: float, *, now: float) -> "Bucket":
        """Return the bucket with what was kept of it, which may be of another rate or clock: it is empty at most."""
        return cls(rate, burst, min(full_at, now + burst / rate))

    def tokens(self, now: float) -> int:
        """Return how many tokens there are."""
        count = max(0, int(self.burst - max(0.0, self.full_at - now) * self.rate))
        # By the same arithmetic as `next_at`: at that moment there must be a token, however numbers are rounded.
        return count + (count < self.burst and now >= self._at(count + 1))

    def less(self, count: int, now: float) -> "Bucket":
        """Return the bucket without `count` of its tokens."""
        return self._replace(full_at=max(self.full_at, now) + count / self.rate)

    @property
    def next_at(self) -> float:
        """Return when there is a token, if there is none now."""
        return self._at(1)

    def _at(self, count: int) -> float:
        return self.full_at - (self.burst - count) / self.rate
