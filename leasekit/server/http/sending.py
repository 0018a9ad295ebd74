"""Big answers to claims: few at a time, and in pieces, so that heartbeats come in between.

Rule 1: a claim has two answers under way at most. A client that asks again has given up the connection before, and
that one may not have noticed yet; more repeats get nothing out of the store.
Rule 2: the bytes of all answers under way are bounded: what is not read stays in memory. Where they are too many,
nothing is granted; what has been granted is sent. So there may be more, by the answers of claims that pass together.
Rule 3: what is refused has lost nothing: nothing was granted, or two answers with it are on their way.
Rule 4: the answer to a claim that is ended is small, and asks for no room: tasks would lie with nobody.
Rule 5: an answer that is read too slowly is cut, with its connection: clients that drip would keep the room for as long
as they like. Nothing is lost by that: the claim is repeated under its claim_id, or ended, or its leases expire.
"""

import asyncio
import random
import weakref
from collections import Counter
from typing import Any, cast

from litestar import Response
from litestar.types import Receive, Scope, Send

from leasekit.errors import Throttled
from leasekit.task import Claimed, Task
from leasekit.wire import ClaimAnswer

__all__ = ["ABORT", "ClaimResponse", "Sending"]

ABORT = "leasekit.abort"
"""The ASGI extension whose item `abort` cuts the connection. Where a server has none, the limit on time is its own."""

_BIG = 64 * 1024  # bytes; smaller answers cost about as much as their request
_ENVELOPE = 512  # bytes of a task without its values, about
_PIECE = 256 * 1024  # bytes that are sent at once
_OF_ONE_CLAIM = 2
_TOGETHER = 64 * 1024 * 1024
_GRACE = 30.0  # seconds that any answer may take, and more by its size:
_SLOWEST = 32 * 1024  # bytes a second; half of what a bad line has
_PAUSE = 1.0  # seconds until a claim may be repeated that was refused, and about as long before it is

_Key = tuple[str, str]


class Sending:
    """The big answers that are under way, by the claim (worker, claim_id) that they belong to."""

    def __init__(self) -> None:
        self._of_claim: Counter[_Key] = Counter()
        self.size = 0
        """Bytes of all of them."""

    async def wait(self, key: _Key) -> None:
        """Wait a moment where there is no room for an answer to this claim; then raise `Throttled`.

        Refused at once, clients that do not wait themselves would take the event loop's time with refusals.
        """
        if self._of_claim[key] >= _OF_ONE_CLAIM or self.size >= _TOGETHER:
            await asyncio.sleep(_PAUSE * (0.5 + random.random()))  # noqa: S311  so that not all come back at once
            self._check(key)
            self.check_room()

    def check_room(self) -> None:
        """Raise `Throttled` where too many bytes are under way: to be called before anything is granted."""
        if self.size >= _TOGETHER:
            raise Throttled("too many bytes of answers are still being sent", retry_after=_PAUSE)

    def _check(self, key: _Key) -> None:
        if self._of_claim[key] >= _OF_ONE_CLAIM:
            raise Throttled("this claim was repeated, and its answers are still being sent", retry_after=_PAUSE)

    def begin(self, key: _Key, claimed: Claimed) -> "ClaimResponse":
        """The answer to this claim, which counts until it was sent.

        Raises `Throttled` where two answers to the same claim are under way.
        """
        response = ClaimResponse(ClaimAnswer(waited=claimed.waited or 0.0, tasks=claimed.tasks))
        size = sum(map(_size, claimed.tasks))
        if size > _BIG:
            self._check(key)
            response.place = _Place(self, key, size)
        return response

    def take(self, key: _Key, size: int) -> None:
        """Count one more answer to this claim."""
        self.size += size
        self._of_claim[key] += 1

    def give_back(self, key: _Key, size: int) -> None:
        """Count an answer to this claim no longer."""
        self.size -= size
        self._of_claim[key] -= 1
        if not self._of_claim[key]:
            del self._of_claim[key]


class _Place:
    """What one answer takes up until it was sent, or nothing refers to it: its client has gone away before."""

    def __init__(self, sending: Sending, key: _Key, size: int) -> None:
        sending.take(key, size)
        self.give_back = weakref.finalize(self, sending.give_back, key, size)


class ClaimResponse(Response[ClaimAnswer]):
    """The answer to a claim; a big one is sent in pieces, and has a place among those under way."""

    place: _Place | None = None

    def to_asgi_response(self, *args: Any, **options: Any) -> Any:
        """What Litestar has sent."""
        whole = cast("Any", super()).to_asgi_response(*args, **options)
        place = self.place
        if place is None:
            return whole

        async def in_pieces(scope: Scope, receive: Receive, send: Send) -> None:
            limit = _time_for(len(whole.body))
            cut = asyncio.get_running_loop().call_later(limit, _cut, scope)
            try:
                await whole.start_response(send)
                await _send_body(memoryview(whole.body), send)
            finally:
                cut.cancel()
                place.give_back()

        return in_pieces


async def _send_body(body: memoryview, send: Send) -> None:
    for at in range(0, len(body), _PIECE):
        piece = bytes(body[at : at + _PIECE])
        await send({"type": "http.response.body", "body": piece, "more_body": at + _PIECE < len(body)})
        await asyncio.sleep(0)  # where all of it fits into buffers nobody else would get a turn


def _time_for(size: int) -> float:
    """Seconds that an answer of so many bytes may take."""
    return _GRACE + size / _SLOWEST


def _cut(scope: Scope) -> None:
    """Abort the connection: what is still written to it is dropped, so its answer ends."""
    extensions: dict[str, Any] = cast("dict[str, Any]", scope).get("extensions") or {}
    if ABORT in extensions:
        extensions[ABORT]["abort"]()


def _size(task: Task) -> int:
    return _ENVELOPE + memoryview(task.payload).nbytes + memoryview(task.progress).nbytes
