"""Outages of the service of the leases: a worker as a whole logs each one now and then, and its end."""

import logging
import mmap
import struct
import time

logger = logging.getLogger("leasekit.celery")

_TIMES = struct.Struct("=dd")  # when the outage began; when a task was put off with a warning (0: never)
_AGAIN = 300.0  # seconds after which a warning is repeated


class Outage:
    """Whether the service of the leases answers, in memory that the pool processes of a worker share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _TIMES.size)

    def begins(self, *, before_tasks: bool = False) -> bool:
        """Note that the service does not answer. Return whether a task that is put off now is worth a warning."""
        since, said_at = _TIMES.unpack_from(self._memory)
        now = time.monotonic()
        is_due = not said_at or now - said_at >= _AGAIN
        _TIMES.pack_into(self._memory, 0, since or now, now if is_due and not before_tasks else said_at)
        return is_due

    def ends(self) -> None:
        """Note that the service answers; log it if it did not before."""
        since, _ = _TIMES.unpack_from(self._memory)
        if since:
            _TIMES.pack_into(self._memory, 0, 0.0, 0.0)
            length = time.monotonic() - since
            logger.warning("the service of the leases answers again, after %.0f s", length)
