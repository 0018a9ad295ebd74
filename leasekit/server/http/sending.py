"""Big answers to claims and waits: a few at a time, and in pieces, so that heartbeats are served in between.

Rule 1: at most two answers to a claim are under way. A client that repeats a claim has given up the earlier connection,
which may not have noticed yet; further repeats are refused.
Rule 2: the bytes of all answers under way are bounded, because unread answers stay in memory. Above the bound nothing
is granted to callers that have their share of it, but granted tasks are still sent; so claims that pass the check
together may exceed the bound. A caller that reads slowly, or not at all, holds up no other.
Rule 3: a refused claim loses nothing: nothing was granted to it, or two answers with its tasks are under way.
Rule 4: the answer to an ended claim is small and never refused: otherwise its tasks would wait until they expire.
Rule 5: the bytes of other big answers have a room of their own; above it, reads are refused, and writes are not.
Rule 6: the end of one task may be awaited by thousands. Its answer is not encoded for all of them at once: big ones
are encoded, and sent, a few at a time.
Rule 7: an answer that is read too slowly is cut, and its connection closed: slow clients must not occupy the room.
Nothing is lost by that: the claim is repeated under its claim_id, or ended, or its leases expire.
"""

import asyncio
import random
from collections import Counter
from typing import Any
from weakref import WeakValueDictionary, finalize

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from leasekit.errors import Throttled
from leasekit.server.fair_bound import CALLER, FairBound, caller_of
from leasekit.task import Claimed, TaskInfo
from leasekit.wire import ClaimAnswer

ABORT = "leasekit.abort"
"""The ASGI extension whose item `abort` cuts the connection; a server without it must limit the time itself."""

BIG = 64 * 1024
"""Bytes of an answer; a smaller one costs about as much as its request."""
_ENVELOPE = 512  # bytes of a task without its values, roughly
_PIECE = 256 * 1024  # bytes that are sent at once
_OF_ONE_CLAIM = 2
_OF_TASKS = 32  # big answers about tasks that are sent to one caller at the same time
_TOGETHER = 64 * 1024 * 1024
_GRACE = 30.0  # seconds that any answer may take, plus the time for its size at the slowest rate
_SLOWEST = 32 * 1024  # bytes per second; half the rate of a bad line
_PAUSE = 1.0  # seconds until a refused claim may be repeated, and about the seconds before it is refused

_JSON = "application/json"

_Key = tuple[str, str]


class Sending:
    """The big answers under way, by their claims (worker, claim_id)."""

    def __init__(self) -> None:
        self._of_claim: Counter[_Key] = Counter()
        self._bytes = FairBound()  # of all answers to claims under way
        self._reads = FairBound()  # of all other big answers
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by caller

    @property
    def size(self) -> int:
        """The bytes of all answers under way."""
        return self._bytes.total + self._reads.total

    async def wait(self, key: _Key) -> None:
        """Wait a moment if there is no room for an answer to this claim; raise `Throttled` if there is still none.

        Without the wait, clients that repeat at once would keep the event loop busy with refusals.
        """
        if self._of_claim[key] >= _OF_ONE_CLAIM or self._bytes.is_reached(caller_of(key[1]), _TOGETHER):
            await asyncio.sleep(_PAUSE * (0.5 + random.random()))  # noqa: S311  random, so that repeats are spread
            self._check_claim(key)
            self.check_room(key[1])

    def check_room(self, claim_id: str) -> None:
        """Raise `Throttled` if too many bytes are under way; call this method before granting tasks to a claim."""
        if self._bytes.is_reached(caller_of(claim_id), _TOGETHER):
            raise Throttled("too many bytes of answers are still being sent", retry_after=_PAUSE)

    def _check_claim(self, key: _Key) -> None:
        if self._of_claim[key] >= _OF_ONE_CLAIM:
            raise Throttled("this claim was repeated, and its answers are still being sent", retry_after=_PAUSE)

    def begin(self, key: _Key, claimed: Claimed) -> "ClaimResponse":
        """Make the answer to this claim, counted until it is sent. Raises `Throttled` if it has two under way."""
        tasks, place = claimed.tasks, None
        size = sum(_ENVELOPE + memoryview(it.payload).nbytes + memoryview(it.progress).nbytes for it in tasks)
        if size > BIG:
            self._check_claim(key)
            place = _Place(self, key, size)
        waited, refused = claimed.waited or 0.0, claimed.refused
        answer = ClaimAnswer(waited=waited, tasks=tasks, refused=refused, draining=claimed.draining)
        return ClaimResponse(answer, place)

    def check_reads(self) -> None:
        """Raise `Throttled` if too many bytes of other answers are under way, and the caller has its share of them."""
        if self._reads.is_reached(CALLER.get(), _TOGETHER):
            raise Throttled("too many bytes of answers are still being sent", retry_after=_PAUSE)

    def of(self, body: bytes) -> Response:
        """Make an answer, counted until it is sent if it is big."""
        return BigResponse(body, self._reads) if len(body) > BIG else Response(body, media_type=_JSON)

    def of_task(self, info: TaskInfo) -> Response:
        """Make the answer about a task: a big one is encoded and sent when it is its turn."""
        size = sum(memoryview(it).nbytes for it in (info.payload, info.progress, info.result, info.error))
        turns = self._turns.setdefault(CALLER.get(), asyncio.Semaphore(_OF_TASKS)) if size > BIG else None
        return TaskResponse(info, turns)

    def take(self, key: _Key, size: int) -> None:
        self._bytes.add(caller_of(key[1]), size)
        self._of_claim[key] += 1

    def give_back(self, key: _Key, size: int) -> None:
        self._bytes.add(caller_of(key[1]), -size)
        self._of_claim[key] -= 1
        if not self._of_claim[key]:
            del self._of_claim[key]


class _Place:
    """The room of one answer, freed when the answer is sent, or dropped because its client has disconnected."""

    def __init__(self, sending: Sending, key: _Key, size: int) -> None:
        sending.take(key, size)
        self.give_back = finalize(self, sending.give_back, key, size)


class ClaimResponse(Response):
    """The answer to a claim; a big answer is sent in pieces, and has a place among the answers under way."""

    def __init__(self, answer: ClaimAnswer, place: _Place | None) -> None:
        super().__init__(msgspec.json.encode(answer), media_type="application/json")
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. A big one is cut when its time is over."""
        if self._place is None:
            await super().__call__(scope, receive, send)
            return
        try:
            await _send_in_time(self, scope, send)
        finally:
            self._place.give_back()


class BigResponse(Response):
    """A big answer: it is sent in pieces, cut when its time is over, and counted in a room until then."""

    def __init__(self, body: bytes, room: FairBound) -> None:
        super().__init__(body, media_type=_JSON)
        room.add(CALLER.get(), len(body))
        self._give_back = finalize(self, room.add, CALLER.get(), -len(body))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        try:
            await _send_in_time(self, scope, send)
        finally:
            self._give_back()


class TaskResponse(Response):
    """The answer about a task; a big answer waits for one of `turns`, and is sent in pieces."""

    def __init__(self, info: TaskInfo, turns: asyncio.Semaphore | None) -> None:
        super().__init__(None if turns else msgspec.json.encode(info), media_type="application/json")
        self._info = info
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._turns is None:
            await super().__call__(scope, receive, send)
            return
        async with self._turns:
            answer = Response(msgspec.json.encode(self._info), media_type=self.media_type)
            await _send_in_time(answer, scope, send)


async def _send_in_time(answer: Response, scope: Scope, send: Send) -> None:
    """Send a big answer in pieces; it is cut when its time is over."""
    cut = asyncio.get_running_loop().call_later(_time_for(len(answer.body)), _cut, scope)
    try:
        await send({"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers})
        await _send_body(memoryview(answer.body), send)
    finally:
        cut.cancel()


async def _send_body(body: memoryview, send: Send) -> None:
    for at in range(0, len(body), _PIECE):
        piece = bytes(body[at : at + _PIECE])
        await send({"type": "http.response.body", "body": piece, "more_body": at + _PIECE < len(body)})
        await asyncio.sleep(0)  # lets other requests run, also if all pieces fit into buffers


def _time_for(size: int) -> float:
    """Return the seconds that an answer of `size` bytes may take."""
    return _GRACE + size / _SLOWEST


def _cut(scope: Scope) -> None:
    """Abort the connection: later writes to it are dropped, so the answer ends."""
    extensions: dict[str, Any] = scope.get("extensions") or {}
    if ABORT in extensions:
        extensions[ABORT]["abort"]()
