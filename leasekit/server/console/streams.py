"""The streams of open pages, as Server-Sent Events: a pulse when it is time to look again, and the events themselves.

Rule 1: a pulse says nothing but that something may have changed. What a page shows is asked for once, however many
        readers it has.
Rule 2: nobody reads more than some dozen events a second: the live page gets a sample (`Feed.follow`).
Rule 3: all streams end when the server stops, and when the session does with which they began: also while nothing
        happens, and no event is told from then on.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec import Struct

from leasekit.server.console.visit import Visit
from leasekit.task import Name

_BEAT = 2.0  # seconds between two pulses, at least
_LOOK = 0.5  # seconds between two looks whether a session goes on, at most
_SILENCE = 3  # beats after which a pulse comes in any case: ages grow, and other nodes have changed something
_SAMPLE = 30  # events in half a second


class EventsWanted(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The filters of a stream of events, and the last event that the page has."""

    kind: Name | None = None
    task: Name | None = None
    after: Name | None = None


async def pulses(visit: Visit) -> AsyncGenerator[bytes]:
    """Stream a pulse whenever a transaction has ended, and now and then."""
    engine = visit.engine
    last, silence = engine.commit.last_at, 0
    yield b"retry: 1000\n\n"
    while await visit.goes_on() and not await engine.feed.closes_within(_BEAT):
        before, last = last, engine.commit.last_at
        silence = silence + 1 if last == before else _SILENCE
        if silence >= _SILENCE:
            silence = 0
            yield b"event: pulse\ndata: {}\n\n"


def events(visit: Visit) -> AsyncGenerator[bytes]:
    """Stream a sample of the events of this node, and of others. Raises `Throttled` if there are too many readers."""
    wanted = visit.params(EventsWanted)
    stream = visit.engine.feed.follow(kind=wanted.kind, task=wanted.task, after=wanted.after, most=_SAMPLE)
    return _while_it_goes_on(visit, stream)


async def _while_it_goes_on(visit: Visit, stream: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Pass a stream on until its session has ended."""
    part: asyncio.Future[bytes | None] | None = None
    async with aclosing(stream):
        try:
            while True:
                part = part or asyncio.ensure_future(anext(stream, None))
                await asyncio.wait((part,), timeout=_LOOK)
                if not await visit.goes_on():
                    return
                if part.done():
                    if (chunk := part.result()) is None:
                        return
                    part = None
                    yield chunk
        finally:
            if part is not None:
                part.cancel()
                await asyncio.wait((part,))
