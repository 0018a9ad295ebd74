"""Request bodies: untrusted bytes, read up to a maximum size and time, decoded once, and validated.

The decoder goes directly from bytes to the classes of `leasekit.wire`, in which users' JSON stays bytes; Litestar's
way through dicts would decode twice. The checks of `validation` happen here, for every route.
"""

import asyncio
from typing import Any, NoReturn

import msgspec
from litestar import Request
from litestar.exceptions import HTTPException
from litestar.types import Empty, EmptyType

from leasekit._lifecycle.validation import read
from leasekit.server.daemon_threads import DaemonThreads
from leasekit.server.http.problems import Malformed, TooDeep
from leasekit.wire import MAX_BODY

__all__ = ["ApiRequest"]

_LONG = 64 * 1024  # bytes; longer bodies are decoded outside of the event loop
# One thread for all bodies: decoding holds the interpreter lock, and the event loop runs between values.
_long_bodies = DaemonThreads(1, name="leasekit-bodies")
_CLOSE = {"connection": "close"}  # the rest of the body is under way, and will not be read


class ApiRequest(Request[Any, Any, Any]):
    """A request whose body is JSON of a known class, of bounded size, complete within `body_timeout` seconds.

    Refuses a body with 415 (another content type), 413 (too big), 408 (too slow), 400 (not JSON), or `Refused` (422:
    JSON that does not fit).
    """

    _read: bytes | EmptyType = Empty

    async def json(self) -> Any:
        """Decode the body into the class that annotates the route's `data` parameter."""
        type_ = self.route_handler.parsed_fn_signature.parameters["data"].annotation
        body = await self.body()
        try:
            if len(body) <= _LONG:
                return read(body, type_)
            return await asyncio.get_running_loop().run_in_executor(_long_bodies, read, body, type_)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Malformed(f"the body is not JSON: {error}") from None
        except RecursionError:
            raise TooDeep("the body is nested too deeply") from None

    async def body(self) -> bytes:
        """Read the whole body: at most `MAX_BODY` bytes, and at least one."""
        if isinstance(self._read, bytes):
            return self._read
        self._check_headers()
        try:
            async with asyncio.timeout(self.app.state.body_timeout):
                self._read = await self._receive_all()
        except TimeoutError:
            raise HTTPException(
                "the body took too long to arrive: repeat it", status_code=408, headers=_CLOSE
            ) from None
        if not self._read:
            raise Malformed("the body is empty")
        return self._read

    def _check_headers(self) -> None:
        media_type, _, parameters = self.headers.get("content-type", "").lower().partition(";")
        if media_type.strip() != "application/json" or parameters.strip() not in _UTF_8:
            raise HTTPException("the body must be application/json in UTF-8", status_code=415, headers=_CLOSE)
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise HTTPException("send the body without content-encoding", status_code=415, headers=_CLOSE)
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
    raise HTTPException(f"the body is larger than {MAX_BODY:,} bytes: split the batch", status_code=413, headers=_CLOSE)
