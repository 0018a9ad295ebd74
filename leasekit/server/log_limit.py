"""Log limit: bound the lines that requests can cause in a log; what is left out is counted."""

import logging
import time
from collections.abc import Callable

__all__ = ["LogLimit"]

_MOST = 10  # lines of a message …
_WINDOW = 60.0  # … in so many seconds


class LogLimit(logging.Filter):
    """Let the first ten records of each message in a minute pass; the next one after that says how many did not.

    A message is told by its text before the arguments are put in. Any thread; a race miscounts at worst.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._windows: dict[str, tuple[float, int]] = {}  # message → when its minute began, and its records since

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether this record is written."""
        now, message = self._clock(), str(record.msg)
        began_at, count = self._windows.get(message, (now, 0))
        left_out = 0
        if now - began_at >= _WINDOW:
            began_at, count, left_out = now, 0, max(0, count - _MOST)
        self._windows[message] = began_at, count + 1
        if left_out:
            record.msg = f"{message} ({left_out} more of these were left out)"
        return count < _MOST
