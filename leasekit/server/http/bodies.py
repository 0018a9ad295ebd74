"""Bodies on their way: the time that each may take, and the room that all have together.

What has arrived stays in memory until the rest is there, so clients that send slowly would fill it. The room is shared
among callers. Small bodies have one of their own: large ones keep none of them out. Tiny ones need none.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any

from leasekit.errors import Throttled
from leasekit.server.fair_bound import CALLER, FairBound

_TINY = 8 * 1024  # bytes; a heartbeat of a hundred tasks, which is never refused for others
_SMALL = 128 * 1024  # bytes; a thousand heartbeats without progress
_TOGETHER = 64 * 1024 * 1024  # of small bodies, and of larger ones
_PAUSE = 1.0  # seconds until a refused request may be repeated


class Bodies:
    """The bodies on their way. Each may take `timeout` seconds from its head on, less once the server stops."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._running: set[asyncio.Timeout] = set()
        self._small, self._large = FairBound(), FairBound()  # bytes of all that arrive, or are not decoded yet

    async def wait(self, receiving: Coroutine[Any, Any, bytes]) -> bytes:
        timeout = asyncio.timeout(self._timeout)
        self._running.add(timeout)
        try:
            async with timeout:
                return await receiving
        finally:
            self._running.discard(timeout)

    def shorten(self, timeout: float) -> None:
        """Give each body under way at most `timeout` more seconds, and each later body as many from its head on."""
        self._timeout = min(self._timeout, timeout)
        until = asyncio.get_running_loop().time() + timeout
        for running in self._running:
            if not running.expired():
                running.reschedule(min(until, running.when() or until))

    @property
    def size(self) -> int:
        """The bytes of all bodies on their way."""
        return self._small.total + self._large.total

    @contextmanager
    def arriving(self) -> Generator[Callable[[int], None]]:
        """Count a body until the end of the block; yield what counts its next bytes.

        That raises `Throttled` if all together have no room, and the caller's have their share of it, unless the body
        is tiny. Small bodies have a room of their own.
        """
        caller, size, room = CALLER.get(), 0, self._small

        def count(more: int) -> None:
            nonlocal size, room
            if room is self._small and size + more > _SMALL:
                self._small.add(caller, -size)
                room = self._large
                room.add(caller, size)
            if size + more > _TINY and room.is_reached(caller, _TOGETHER):
                raise Throttled("too many bytes of requests are on their way: try again later", retry_after=_PAUSE)
            size += more
            room.add(caller, more)

        try:
            yield count
        finally:
            room.add(caller, -size)
