"""Backoff: how long to wait before the service is asked again."""

from collections.abc import Callable


class Backoff:
    """Compute waits that double from `first` to `most`, each cut by up to a half by `random` to spread fleets."""

    def __init__(self, first: float, most: float, *, random: Callable[[], float]) -> None:
        self._first = first
        self._most = max(first, most)
        self._next = first
        self._random = random

    def wait(self) -> float:
        """Return the seconds to wait this time; the next wait is longer."""
        wait = self._next * (1 - self._random() / 2)
        self._next = min(self._most, self._next * 2)
        return wait

    def reset(self) -> None:
        self._next = self._first
