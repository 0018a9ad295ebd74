"""Idleness by absolute time."""

from collections.abc import Callable

from leasekit._driver.clock import BOOT_CLOCK

__all__ = ["Idle"]


class Idle:
    """Tells whether a resource has gone unused for `timeout` seconds: since its making or last use, by the clock.

    Not by how often somebody looked: checks bunch up on a busy machine, and would then let go far too early.
    """

    __slots__ = ("_now", "timeout", "used_at")

    def __init__(self, timeout: float, *, now: Callable[[], float] = BOOT_CLOCK.now) -> None:
        self.timeout = timeout
        self._now = now
        self.used_at = now()

    def used(self) -> None:
        """It is in use now."""
        self.used_at = self._now()

    @property
    def remaining(self) -> float:
        """Seconds until it counts as idle; zero or less where it does."""
        return self.used_at + self.timeout - self._now()

    @property
    def expired(self) -> bool:
        """True where it has gone unused for the whole time."""
        return self.remaining <= 0
