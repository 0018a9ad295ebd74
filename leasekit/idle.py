"""Idle: detect that a resource is not used, by absolute time."""

from collections.abc import Callable

from leasekit._driver.clock import BOOT_CLOCK
from leasekit.config import check_number

__all__ = ["Idle"]


class Idle:
    """Tells whether a resource was unused for `timeout` seconds since its creation or last use, by the clock.

    Counting checks would not do: checks bunch up on a busy machine, and would let the resource go far too early.
    """

    __slots__ = ("_now", "timeout", "used_at")

    def __init__(self, timeout: float, *, now: Callable[[], float] = BOOT_CLOCK.now) -> None:
        check_number("timeout", timeout, or_infinity=True)
        self.timeout = timeout
        """Seconds without use after which the resource counts as idle."""
        self._now = now
        self.used_at = now()
        """When the resource was last used, by the clock."""

    def used(self) -> None:
        """Record that the resource is in use now."""
        self.used_at = self._now()

    @property
    def remaining(self) -> float:
        """Seconds until the resource counts as idle; zero or less if it does."""
        return self.used_at + self.timeout - self._now()

    @property
    def expired(self) -> bool:
        """Whether the resource was unused for the whole time."""
        return self.remaining <= 0
