"""A request's body: bytes of a stranger, read up to a size and a moment, and decoded once.

The decoder goes straight from bytes to the wire's classes, where users' JSON stays the bytes that came; Litestar's
own way through Python's dicts would decode twice. What `validation` checks is checked here, for every route.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import msgspec
from litestar import Request
from litestar.exceptions import HTTPException
from litestar.types import Empty, EmptyType

from leasekit._lifecycle.validation import read
from leasekit.server.http.problems import Malformed, TooDeep
from leasekit.wire import MAX_BODY

__all__ = ["ApiRequest"]

_LONG = 64 * 1024  # bytes; what is longer is decoded outside of the event loop
# One thread for all: while it decodes a value it holds the interpreter lock, and the event loop comes between values.
_long_bodies = ThreadPoolExecutor(1, thread_name_prefix="leasekit-bodies")
_CLOSE = {"connection": "close"}  # there is more of the body under way, and nobody will read it


class ApiRequest(Request[Any, Any, Any]):
    """A request whose body is JSON of a known class, of bounded size, complete within `body_timeout` seconds.

    Refuses with 415 (another content type), 413 (too big), 408 (too slow), 400 (not JSON), and `Refused` (422: JSON
    that does not fit).
    """

    _read: bytes | EmptyType = Empty

    async def json(self) -> Any:
        """The body as what the route's `data` is annotated with."""
        kind = self.route_handler.parsed_fn_signature.parameters["data"].annotation
        body = await self.body()
        try:
            if len(body) <= _LONG:
                return read(body, kind)
            return await asyncio.get_running_loop().run_in_executor(_long_bodies, read, body, kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Malformed(f"the body is not JSON: {error}") from None
        except RecursionError:
            raise TooDeep("the body is nested too deeply") from None

    async def body(self) -> bytes:
        """The whole body, at most `MAX_BODY` bytes; a body is never empty."""
        if isinstance(self._read, bytes):
            return self._read
        self._check_headers()
        try:
            async with asyncio.timeout(self.app.state.body_timeout):
                self._read = await self._receive_all()
        except TimeoutError:
            raise HTTPException("the body took too long to arrive", status_code=408, headers=_CLOSE) from None
        if not self._read:
            raise Malformed("the body is empty")
        return self._read

    def _check_headers(self) -> None:
        media_type, _, parameters = self.headers.get("content-type", "").lower().partition(";")
        if media_type.strip() != "application/json" or parameters.strip() not in _UTF_8:
            raise HTTPException("the body must be application/json in UTF-8", status_code=415, headers=_CLOSE)
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise HTTPException("the body must not be compressed", status_code=415, headers=_CLOSE)
        # The protocol below has checked that it is a number.
        if int(self.headers.get("content-length", 0)) > MAX_BODY:
            _refuse_size()

    async def _receive_all(self) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while True:
            event = await self.receive()
            if event["type"] != "http.request":
                raise Malformed("the client went away")
            chunks.append(event["body"])
            size += len(event["body"])
            if size > MAX_BODY:
                _refuse_size()
            if not event["more_body"]:
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)


_UTF_8 = frozenset({"", "charset=utf-8", 'charset="utf-8"'})


def _refuse_size() -> NoReturn:
    raise HTTPException(f"the body is larger than {MAX_BODY:,} bytes", status_code=413, headers=_CLOSE)
