"""Request bodies: untrusted bytes, read up to a maximum size and time, decoded once, and validated.

The decoder goes directly from bytes to the classes of `leasekit.wire`, in which users' JSON stays bytes. The checks of
`validation` happen here, for every operation.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Receive, Scope

from leasekit._lifecycle.validation import read
from leasekit.server.daemon_threads import DaemonThreads
from leasekit.server.engine import Engine
from leasekit.server.http.disconnect import DisconnectWatch
from leasekit.server.http.metrics import Metrics
from leasekit.server.http.problems import Malformed, TooDeep
from leasekit.server.http.sending import Sending
from leasekit.wire import MAX_BODY

_LONG = 64 * 1024  # bytes; longer bodies are decoded outside of the event loop
# One thread for all bodies: decoding holds the interpreter lock, and the event loop runs between values.
_long_bodies = DaemonThreads(1, name="leasekit-bodies")
_CLOSE = {"connection": "close"}  # the rest of the body is under way, and will not be read


class BodyTimeouts:
    """The time that request bodies may take: `timeout` seconds from their head on, less once the server stops."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._running: set[asyncio.Timeout] = set()

    async def wait(self, receiving: Coroutine[Any, Any, bytes]) -> bytes:
        timeout = asyncio.timeout(self._timeout)
        self._running.add(timeout)
        try:
            async with timeout:
                return await receiving
        finally:
            self._running.discard(timeout)

    def shorten(self, timeout: float) -> None:
        """Give the bodies under way, and all after them, at most this long from now on."""
        self._timeout = min(self._timeout, timeout)
        until = asyncio.get_running_loop().time() + timeout
        for running in self._running:
            if not running.expired():
                running.reschedule(min(until, running.when() or until))


@dataclass(frozen=True)
class Parts:
    """The parts of an application that operations use."""

    engine: Engine
    polls: DisconnectWatch
    metrics: Metrics
    sending: Sending
    bodies: BodyTimeouts


class ApiRequest(Request):
    """A request whose body is JSON of a known class, of bounded size, complete within the time of `BodyTimeouts`.

    Refuses a body with 415 (another content type), 413 (too big), 408 (too slow), 400 (not JSON), or `Refused` (422:
    JSON that does not fit).
    """

    def __init__(self, scope: Scope, receive: Receive, parts: Parts) -> None:
        super().__init__(scope, receive)
        self.parts = parts

    async def decode(self, type_: type[Struct]) -> Any:
        body = await self._read()
        try:
            if len(body) <= _LONG:
                return read(body, type_)
            return await asyncio.get_running_loop().run_in_executor(_long_bodies, read, body, type_)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Malformed(f"the body is not JSON: {error}") from None
        except RecursionError:
            raise TooDeep("the body is nested too deeply") from None

    async def _read(self) -> bytes:
        """Read the whole body: at most `MAX_BODY` bytes, and at least one."""
        self._check_headers()
        try:
            body = await self.parts.bodies.wait(self._receive_all())
        except TimeoutError:
            raise HTTPException(408, "the body took too long to arrive: repeat it", _CLOSE) from None
        if not body:
            raise Malformed("the body is empty")
        return body

    def _check_headers(self) -> None:
        media_type, _, parameters = self.headers.get("content-type", "").lower().partition(";")
        if media_type.strip() != "application/json" or parameters.strip() not in _UTF_8:
            raise HTTPException(415, "the body must be application/json in UTF-8", _CLOSE)
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise HTTPException(415, "send the body without content-encoding", _CLOSE)
        # The HTTP parser has checked that the value is a number.
        if int(self.headers.get("content-length", 0)) > MAX_BODY:
            _refuse_size()

    async def _receive_all(self) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while True:
            event = await self.receive()
            if event["type"] != "http.request":
                raise Malformed("the client disconnected before the body was complete")
            chunks.append(event["body"])
            size += len(event["body"])
            if size > MAX_BODY:
                _refuse_size()
            if not event["more_body"]:
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)


_UTF_8 = frozenset({"", "charset=utf-8", 'charset="utf-8"'})


def _refuse_size() -> NoReturn:
    raise HTTPException(413, f"the body is larger than {MAX_BODY:,} bytes: split the batch", _CLOSE)
