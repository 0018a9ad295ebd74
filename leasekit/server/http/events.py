"""What happens to tasks and workers, told as it happens: `/v1/events`, as Server-Sent Events.

Rule 1: the writer waits for nobody. It notes what a transaction did while somebody listens, and for a while after;
the notes go into a ring of bounded size once the transaction has ended.
Rule 2: a reader has a place in the ring and nothing else. One who is so slow that the ring has gone past it is dropped;
it comes back with the id of the last event that it has, and is told that it missed some.
Rule 3: events say who, what and when; never what is in a task, and no token.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from leasekit.errors import Throttled
from leasekit.server.unit_of_work import TaskEvent

__all__ = ["Feed"]

_SIZE = 10_000  # events that a reader may be behind, or miss while it reconnects
_READERS = 100
_LINGER = 300.0  # seconds for which events are kept for those who have gone, and may come back
_HEARTBEAT = 15.0  # seconds of silence after which a comment says that all is well
_CHUNK = 200  # events that are written at once, so that one reader does not hold up everything else

_encode = msgspec.json.Encoder().encode
_COMMENT = b":\n\n"
_HELLO = b"retry: 1000\n\n"  # milliseconds until a browser reconnects


class Feed:
    """The latest events, and those who read them. It belongs to one event loop; `wanted` is for any thread."""

    def __init__(
        self, *, size: int = _SIZE, heartbeat: float = _HEARTBEAT, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.wanted = False  # while false, nothing needs to be noted
        self.dropped = 0  # readers that were too slow
        self._heartbeat = heartbeat
        self._now = now
        self._quiet_since = 0.0
        # An event's id is that of the feed and a number: after a restart nobody goes on from an older feed's place.
        self._name = secrets.token_hex(4)
        self._ring: list[TaskEvent | None] = [None] * size
        self._first = 1  # the oldest number in the ring …
        self._next = 1  # … and the one that comes next
        self._readers: set[asyncio.Event] = set()
        self._closed = False

    def __len__(self) -> int:
        """How many read."""
        return len(self._readers)

    def publish(self, events: Sequence[TaskEvent]) -> None:
        """Tell what a transaction has done. Costs the same however slow, or many, readers are."""
        size = len(self._ring)
        for event in events:
            self._ring[self._next % size] = event
            self._next += 1
        self._first = max(self._first, self._next - size)
        for reader in self._readers:
            reader.set()

    def look(self) -> None:
        """Nobody has come back for long enough: note no more, and forget."""
        if self.wanted and not self._readers and self._now() - self._quiet_since > _LINGER:
            self.wanted = False
            self._ring = [None] * len(self._ring)
            self._next += 1  # whoever comes back now has missed something
            self._first = self._next

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        for reader in self._readers:
            reader.set()

    def follow(
        self, *, kind: str | None = None, task: str | None = None, after: str | None = None
    ) -> AsyncGenerator[bytes]:
        """The events from now on, or those after the one of this id, as the body of a `text/event-stream`.

        Only those of a kind, or a task, where that is given. Raises `Throttled` where too many read already.
        """
        if len(self._readers) >= _READERS:
            raise Throttled(f"{_READERS} readers follow events already", retry_after=5.0)
        self.wanted = True
        self._quiet_since = self._now()  # this reader counts once its stream begins: nothing is forgotten until then
        return self._stream(kind, task, self._next if after is None else self._place(after))

    def _place(self, after: str) -> int:
        """The number that follows this id; 0 where it is not known (any more)."""
        name, _, number = after.partition("-")
        if name != self._name or not number.isascii() or not number.isdigit() or len(number) > 18:
            return 0
        at = int(number) + 1
        return at if self._first <= at <= self._next else 0

    async def _stream(self, kind: str | None, task: str | None, at: int) -> AsyncGenerator[bytes]:
        wake = asyncio.Event()
        self._readers.add(wake)
        try:
            yield _HELLO
            if at == 0:
                at = self._first
                yield self._said(at - 1, "missed", b"{}")
            while not self._closed:
                wake.clear()
                if at < self._first:
                    self.dropped += 1
                    return
                until = min(self._next, at + _CHUNK)
                if chunk := self._chunk(range(at, until), kind, task):
                    yield chunk
                elif until == self._next and not await self._woken(wake):
                    yield _COMMENT
                at = until
        finally:
            self._readers.discard(wake)
            self._quiet_since = self._now()

    async def _woken(self, wake: asyncio.Event) -> bool:
        try:
            async with asyncio.timeout(self._heartbeat):
                return await wake.wait()
        except TimeoutError:
            return False

    def _chunk(self, numbers: range, kind: str | None, task: str | None) -> bytes:
        ring, size = self._ring, len(self._ring)
        found: list[bytes] = []
        for number in numbers:
            event = ring[number % size]
            if event is None or (kind is not None and event.kind != kind) or (task is not None and event.id != task):
                continue
            found.append(self._said(number, event.event, _encode(event)))
        return b"".join(found)

    def _said(self, number: int, event: str, data: bytes) -> bytes:
        return b"id: %s-%d\nevent: %s\ndata: %s\n\n" % (self._name.encode(), number, event.encode(), data)
