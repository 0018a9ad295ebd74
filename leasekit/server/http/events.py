"""The event stream `/v1/events`: events of tasks and workers as Server-Sent Events.

Rule 1: the writer never waits for a reader. It records the events of a transaction while there are readers, and for
some time after; the events go into a ring of bounded size once the transaction has ended.
Rule 2: the only state of a reader is its place in the ring. A reader is dropped when the ring has overwritten its
place; it reconnects with the id of the last event that it has, and gets a `missed` event.
Rule 3: an event names the task, the worker, the change and its time; it has no contents of a task and no token.
Rule 4: a reader that shows events to people takes a sample: of what happens in a moment, the latest events only.
        An event is encoded once for all readers, and one without filters looks at no more events than it sends.
Rule 5: events of other nodes go into the ring as they arrive. Some may never arrive, and no `missed` says so.
"""

import asyncio
import functools
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import contextmanager

import msgspec

from leasekit.errors import Throttled
from leasekit.server.fair_bound import CALLER, FairBound
from leasekit.server.marks import Marks
from leasekit.server.unit_of_work import TaskEvent

_SIZE = 10_000  # events that a reader may be behind, or miss while it reconnects
_READERS = 100
_LINGER = 300.0  # seconds for which events are recorded after the last reader has left, in case it comes back
_HEARTBEAT = 15.0  # seconds of silence after which a comment shows that the stream is alive
_CHUNK = 200  # events that are sent at once, so that one reader does not block the event loop
_MOMENT = 0.5  # seconds between two samples

_Matches = Callable[[TaskEvent], bool]

_encode = msgspec.json.Encoder().encode
_COMMENT = b":\n\n"
_HELLO = b"retry: 1000\n\n"  # milliseconds until a browser reconnects


class Chain:
    """The tasks of a chain, as a reader of their events knows them; later ones are added."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.ids = {root}

    def has(self, event: TaskEvent) -> bool:
        if event.root == self.root and event.id is not None:
            self.ids.add(event.id)
        return event.id in self.ids


class Feed:
    """The latest events and their readers, in one event loop; any thread may read `wanted`.

    `pass_on` is called with the events of this node while another node wants them.
    """

    def __init__(
        self,
        *,
        size: int = _SIZE,
        heartbeat: float = _HEARTBEAT,
        now: Callable[[], float] = time.monotonic,
        pass_on: Callable[[Sequence[TaskEvent]], None] = lambda _: None,
    ) -> None:
        self.wanted_here = False  # by readers
        self.wanted_elsewhere = False  # by readers of other nodes
        self._pass_on = pass_on
        self.dropped = 0  # readers that were too slow
        self._heartbeat = heartbeat
        self._now = now
        self._quiet_since = 0.0
        # An event's id is the mark of its number, under a key of the feed: after a restart no reader continues in an
        # older feed, and no reader can tell how many events others have in between.
        secret = secrets.token_hex(32)
        self._marks = Marks(lambda: secret)
        self._ring: list[TaskEvent | None] = [None] * size
        self._lines: list[bytes | None] = [
            None
        ] * size  # the events of the ring as readers get them, once one has asked
        self._first = 1  # the oldest number in the ring
        self._next = 1  # the number of the next event
        self._readers: set[asyncio.Event] = set()
        self._of_callers = FairBound()  # the number of readers
        self._closed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._readers)

    @property
    def wanted(self) -> bool:
        """Whether events must be recorded."""
        return self.wanted_here or self.wanted_elsewhere

    def publish(self, events: Sequence[TaskEvent]) -> None:
        """Take events of this node."""
        if self.wanted_elsewhere:
            self._pass_on(events)
        self.hear(events)

    def hear(self, events: Sequence[TaskEvent]) -> None:
        """Add events to the ring and wake the readers; slow readers cost nothing here."""
        if not self.wanted_here:
            return
        size = len(self._ring)
        for event in events:
            self._ring[self._next % size] = event
            self._lines[self._next % size] = None
            self._next += 1
        self._first = max(self._first, self._next - size)
        for reader in self._readers:
            reader.set()

    def look(self) -> None:
        """Stop recording and drop all events if there has been no reader for `_LINGER` seconds."""
        if self.wanted_here and not self._readers and self._now() - self._quiet_since > _LINGER:
            self.wanted_here = False
            self._ring = [None] * len(self._ring)
            self._lines = [None] * len(self._ring)
            self._next += 1  # a reader that comes back now has missed an event
            self._first = self._next

    def close(self) -> None:
        """End all streams, also those that only wait for this."""
        self._closed.set()
        for reader in self._readers:
            reader.set()

    async def closes_within(self, seconds: float) -> bool:
        """Wait, and return whether the feed was closed meanwhile."""
        try:
            async with asyncio.timeout(seconds):
                return await self._closed.wait()
        except TimeoutError:
            return False

    def follow(
        self,
        *,
        kind: str | None = None,
        task: str | None = None,
        chain: Chain | None = None,
        after: str | None = None,
        most: int | None = None,
        of: Callable[[str | None], bool] | None = None,
    ) -> AsyncGenerator[bytes]:
        """Stream the events from now on, or after the event with the id `after`, as `text/event-stream`.

        `kind`, `task` and `chain` are filters; `of` says which kinds may be seen (None: what concerns no kind). With
        `most`, the stream is a sample: of what happens in half a second, the latest `most` events, after a
        `skipped` with the number of the others. Raises `Throttled` if there are too many readers already, also of this
        caller.
        """
        caller = CALLER.get()
        if self._of_callers.is_reached(caller, _READERS):
            raise Throttled(f"{_READERS} readers follow events already: close one, or try again later", retry_after=5.0)
        self.wanted_here = True
        self._quiet_since = self._now()  # this reader counts once its stream begins: nothing is forgotten until then
        at = self._next if after is None else self._place(after)
        has_filter = any(it is not None for it in (kind, task, chain, of))
        matches = functools.partial(_matches, kind, task, chain, of) if has_filter else None
        return self._stream(matches, at, caller) if most is None else self._sampled(matches, at, most, caller)

    def _place(self, after: str) -> int:
        """Return the number after this id; 0 if the id is unknown, or events after it may have been lost."""
        number = self._marks.open(after)
        if not number:
            return 0
        at = int(number) + 1
        return at if self._first <= at <= self._next else 0

    @contextmanager
    def _reading(self, caller: str) -> Generator[asyncio.Event]:
        """Count a reader; the event wakes it."""
        wake = asyncio.Event()
        self._readers.add(wake)
        self._of_callers.add(caller, 1)
        try:
            yield wake
        finally:
            self._readers.discard(wake)
            self._of_callers.add(caller, -1)
            self._quiet_since = self._now()

    async def _stream(self, matches: _Matches | None, at: int, caller: str) -> AsyncGenerator[bytes]:
        with self._reading(caller) as wake:
            yield _HELLO
            if at == 0:
                at = self._first
                yield self._as_sse(at - 1, "missed", b"{}")
            while not self._closed.is_set():
                wake.clear()
                if at < self._first:
                    self.dropped += 1
                    return
                until = min(self._next, at + _CHUNK)
                if chunk := self._chunk(range(at, until), matches):
                    yield chunk
                elif until == self._next and not await self._woken_in_time(wake):
                    yield _COMMENT
                at = until

    async def _sampled(self, matches: _Matches | None, at: int, most: int, caller: str) -> AsyncGenerator[bytes]:
        with self._reading(caller) as wake:
            yield _HELLO
            if at == 0:
                yield self._as_sse(self._next - 1, "missed", b"{}")
            at = at or self._next
            while not (await self.closes_within(_MOMENT) or self._closed.is_set()):
                wake.clear()
                begin, at = max(at, self._first), self._next
                chosen = self._matching(range(begin, at), matches)
                if left := len(chosen) - most if len(chosen) > most else 0:
                    yield self._as_sse(chosen[left] - 1, "skipped", b'{"count":%d}' % left)
                if chosen:
                    yield b"".join(map(self._line, chosen[left:]))
                elif not await self._woken_in_time(wake):
                    yield _COMMENT

    async def _woken_in_time(self, wake: asyncio.Event) -> bool:
        try:
            async with asyncio.timeout(self._heartbeat):
                return await wake.wait()
        except TimeoutError:
            return False

    def _chunk(self, numbers: range, matches: _Matches | None) -> bytes:
        return b"".join(map(self._line, self._matching(numbers, matches)))

    def _matching(self, numbers: range, matches: _Matches | None) -> Sequence[int]:
        if matches is None:
            return numbers
        ring, size = self._ring, len(self._ring)
        return [number for number in numbers if (event := ring[number % size]) is not None and matches(event)]

    def _line(self, number: int) -> bytes:
        """Return an event as readers get it."""
        place = number % len(self._ring)
        line, event = self._lines[place], self._ring[place]
        if line is None and event is not None:
            line = self._lines[place] = self._as_sse(number, event.event, _encode(event))
        return line or b""

    def _as_sse(self, number: int, event: str, data: bytes) -> bytes:
        return b"id: %s\nevent: %s\ndata: %s\n\n" % (self._marks.seal(str(number)).encode(), event.encode(), data)


def _matches(
    kind: str | None, task: str | None, chain: Chain | None, of: Callable[[str | None], bool] | None, event: TaskEvent
) -> bool:
    return (
        (kind is None or event.kind == kind)
        and (task is None or event.id == task)
        and (of is None or of(event.kind))
        and (chain is None or chain.has(event))  # last: it remembers tasks, but none that the reader may not see
    )
