"""Bodies on their way: the time that each may take, the room that all have together, and turns of those to be decoded.

What has arrived stays in memory until the rest is there, so clients that send slowly would fill it. The room is shared
among callers. Small bodies have one of their own: large ones keep none of them out. Tiny ones need none.

Those that arrive together are not decoded together, or all other requests would wait for it, a few times each: callers
take turns, and the event loop sees to everything else between them. Long ones are decoded in a thread, one at a time.
That holds the interpreter lock, for up to a tenth of a second where a body has many small arrays or numbers. So the
thread rests after each body, or the event loop and the writer would get the lock for one step between two bodies.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from leasekit.errors import Throttled
from leasekit.server.commit import resolve
from leasekit.server.daemon_threads import DaemonThreads
from leasekit.server.fair_bound import CALLER, FairBound
from leasekit.server.fair_queue import FairQueue

_TINY = 8 * 1024  # bytes; a heartbeat of a hundred tasks, which is never refused for others
_SMALL = 128 * 1024  # bytes; a thousand heartbeats without progress
_TOGETHER = 64 * 1024 * 1024  # of small bodies, and of larger ones
_TURN = 64 * 1024  # bytes that are decoded in one turn of the event loop; it takes a millisecond
_LONG = 16 * 1024  # bytes; longer bodies are decoded outside of the event loop
_REST = 1.0  # how long the thread rests, as a multiple of the processor's time that it has taken
_PAUSE = 1.0  # seconds until a refused request may be repeated

_T = TypeVar("_T")
_thread = DaemonThreads(1, name="leasekit-bodies")


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """A body that waits to be decoded."""

    size: int
    has_come: asyncio.Future[None]


@dataclass(frozen=True, slots=True, eq=False)
class _LongBody:
    """A body that waits to be decoded in the thread."""

    decode: Callable[[], Any]
    decoded: asyncio.Future[Any]


class Bodies:
    """The bodies on their way. Each may take `timeout` seconds from its head on, less once the server stops."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._running: set[asyncio.Timeout] = set()
        self._small, self._large = FairBound(), FairBound()  # bytes of all that arrive, or are not decoded yet
        self._arrived = FairQueue[_Turn]()
        self._is_waking = False
        self._long = FairQueue[_LongBody]()
        self._is_busy = False  # the thread decodes, or rests

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

    async def decoded(self, size: int, decode: Callable[[], _T]) -> _T:
        """Return what `decode` makes of a body of so many bytes, once it is its turn; raise what `decode` raises."""
        if size <= _LONG:
            await self.turn(size)
            return decode()
        caller, body = CALLER.get(), _LongBody(decode, asyncio.get_running_loop().create_future())
        self._long.add(caller, body, work=size, is_urgent=size <= _SMALL)  # heartbeats, before large batches of tasks
        self._begin()
        try:
            return await body.decoded  # type: ignore[no-any-return]
        finally:
            self._long.remove(caller, body)  # in case this request was cancelled
            del body  # or an error, this frame and the body would refer to each other

    def _begin(self) -> None:
        """Have the thread decode the next body, unless it is busy."""
        if self._is_busy or not self._long:
            return
        body = self._long.take()
        taken: list[float] = []
        try:
            under_way = asyncio.get_running_loop().run_in_executor(_thread, _timed, body.decode, taken)
        except RuntimeError as error:  # the system has no thread to give
            resolve(body.decoded, error)
        else:
            self._is_busy = True
            under_way.add_done_callback(partial(self._end, body, taken))

    def _end(self, body: _LongBody, taken: list[float], under_way: "asyncio.Future[Any]") -> None:
        resolve(body.decoded, under_way.exception() or under_way.result())
        asyncio.get_running_loop().call_later(_REST * sum(taken), self._go_on)

    def _go_on(self) -> None:
        self._is_busy = False
        self._begin()

    async def turn(self, size: int) -> None:
        """Wait until a body of so many bytes may be decoded: at once if it is tiny."""
        if size <= _TINY:
            return
        loop, caller = asyncio.get_running_loop(), CALLER.get()
        mine = _Turn(size, loop.create_future())
        self._arrived.add(caller, mine, work=size)
        if not self._is_waking:
            self._is_waking = True
            loop.call_soon(self._wake, loop)
        try:
            await mine.has_come
        finally:
            self._arrived.remove(caller, mine)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give the next bodies their turn; the others wait at least for the next turn of the event loop."""
        room = _TURN
        while self._arrived and room > 0:
            turn = self._arrived.take()
            room -= turn.size
            resolve(turn.has_come, None)
        self._is_waking = bool(self._arrived)
        if self._is_waking:
            loop.call_soon(self._wake, loop)


def _timed(decode: Callable[[], _T], taken: list[float]) -> _T:
    """Return what a function returns; add the processor's time that it has taken, in seconds."""
    began_at = time.thread_time()
    try:
        return decode()
    finally:
        taken.append(time.thread_time() - began_at)
