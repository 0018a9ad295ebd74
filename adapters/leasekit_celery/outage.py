"""Outages of the service of the leases: each is logged once, and so is its end, by a worker as a whole."""

import logging
import mmap
import struct
import time

logger = logging.getLogger("leasekit.celery")

_SINCE = struct.Struct("=d")


class Outage:
    """Whether the service of the leases answers, in memory that the pool processes of a worker share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SINCE.size)  # when the outage began; negative: no task was put off in it yet

    def begins(self, *, before_tasks: bool = False) -> bool:
        """Note that the service does not answer. Return whether no task was put off in this outage before."""
        (since,) = _SINCE.unpack_from(self._memory)
        at = abs(since) or time.monotonic()
        _SINCE.pack_into(self._memory, 0, -at if before_tasks else at)
        return bool(since <= 0)

    def ends(self) -> None:
        """Note that the service answers; log it if it did not before."""
        (since,) = _SINCE.unpack_from(self._memory)
        if since:
            _SINCE.pack_into(self._memory, 0, 0.0)
            length = time.monotonic() - abs(since)
            logger.warning("the service of the leases answers again, after %.0f s", length)
