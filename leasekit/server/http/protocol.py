"""The connection: uvicorn's HTTP/1.1 protocol, with bounds for clients that stall.

Without these bounds, uvicorn waits forever for the end of a request's head, keeps all of it in memory, and waits
forever for a client to read an answer. `request` bounds request bodies, and `sending` the time to send an answer.
"""

import asyncio
import socket
from collections import deque
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from leasekit.server.fair_bound import FairBound
from leasekit.server.http.auth import LOCAL_SOCKET
from leasekit.server.http.problems import MEDIA_TYPE
from leasekit.server.http.sending import ABORT
from leasekit.wire import Problem

MAX_HEAD = 64 * 1024  # bytes of request line and headers
HEADS = 64 * 1024 * 1024  # bytes of all heads that have not ended; the addresses that they come from share them
MAX_FIELDS = 100  # of a head; each costs a hundred bytes and more
SMALL_HEAD = 4 * 1024  # bytes of a head that is never refused for others
MAX_PIPELINED = 100  # requests of a connection that wait for their answers
HEAD_TIMEOUT = 30.0  # seconds from the connection, or from the first byte of a request, to the end of its head
STALL_TIMEOUT = 30.0  # seconds that a full buffer of answers may stay unread

_PIECE = 16 * 1024  # bytes that are parsed at once
_AROUND = 8  # bytes around each byte of a body: a chunk of one has five
_heads = FairBound()


class BoundedProtocol(HttpToolsProtocol):
    """A connection that closes if a head is too long or slow, or answers stay unread; the server may abort it."""

    _timer: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _head = 0
    _peer = ""
    _is_local = False  # the socket beside the store
    _refusal: tuple[int, str, str] | None = None  # of what the parser is in the middle of
    _has_begun = False  # a request, in the latest data
    _has_body = False  # of which the end has not come
    _delivered = 0  # bytes of a body that the latest data had
    _around = 0  # bytes around a body without one of it: of chunks, and of fields behind it

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._cycles: deque[RequestResponseCycle] = deque()  # of requests without an answer: pipelined, there are more

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        accepted = transport.get_extra_info("socket")
        self._is_local = accepted is not None and accepted.family == socket.AF_UNIX
        self._peer = "" if self._is_local else str((transport.get_extra_info("peername") or [""])[0])
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        for start in range(0, len(data), _PIECE):
            if not self.transport.is_closing():
                self._receive(data[start : start + _PIECE])

    def _receive(self, data: bytes) -> None:
        self._delivered, self._has_begun = 0, False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            if self._refusal is not None:
                self._refuse(*self._refusal)
            else:
                self.send_400_response("")
        except httptools.HttpParserUpgrade as offer:
            self.parser = httptools.HttpRequestParser(_Body(self))
            framing = [b"%s: %s\r\n" % header for header in self.scope["headers"] if header[0] in _FRAMING]
            self._receive(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(framing) + data[offer.args[0] :])
        if self._timer is not None:
            self._count(len(data))
        elif self._has_body and not self._has_begun:
            self._count_around(len(data) - self._delivered)

    def _count(self, size: int) -> None:
        """Count more bytes of a head that has not ended, and refuse it if it is too large, or all together are."""
        self._head += size
        _heads.add(self._peer, size)
        if self._head > MAX_HEAD:
            self._refuse(431, "Request Header Fields Too Large", f"the head is larger than {MAX_HEAD:,} bytes")
        elif self._head > SMALL_HEAD and _heads.is_reached(self._peer, HEADS):
            self._refuse(429, "Too Many Requests", "too many bytes of heads are on their way: try again later")

    def _count_around(self, size: int) -> None:
        """Count bytes around a body, and cut the connection if there is little else: no application sees them."""
        self._around = 0 if size <= _AROUND * self._delivered else self._around + size
        if self._around > MAX_HEAD:
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        self._delivered += len(body)
        super().on_body(body)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._timer is None:
            return  # behind a chunked body: the head alone says who asks
        super().on_header(name, value)
        if len(self.headers) > MAX_FIELDS:
            self._stop_at(431, "Request Header Fields Too Large", f"the head has more than {MAX_FIELDS} fields")

    def _stop_at(self, status: int, title: str, detail: str) -> None:
        """Refuse what the parser has found; it stops here."""
        self._refusal = status, title, detail
        raise OverflowError  # the parser passes it on as an error of its own

    def on_message_begin(self) -> None:
        self._around, self._has_begun = 0, True
        while self._cycles and self._cycles[0].response_complete:
            self._cycles.popleft()
        if len(self._cycles) >= MAX_PIPELINED:
            self._stop_at(429, "Too Many Requests", f"more than {MAX_PIPELINED} requests of a connection wait")
        super().on_message_begin()
        extensions: dict[str, dict[object, object]] = {ABORT: {"abort": self.transport.abort}}
        if self._is_local:
            extensions[LOCAL_SOCKET] = {}
        self.scope["extensions"] = extensions
        self._start_head_timer()

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        self._has_body = True
        super().on_headers_complete()
        self._cycles.append(self.cycle)
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        self._has_body = False
        if not self.parser.should_upgrade():  # otherwise the body follows, which this parser takes for another protocol
            super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_TIMEOUT, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that uvicorn cannot parse, and that no application can answer."""
        self._refuse(400, "Bad Request", "the request is not valid HTTP/1.1")

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        self._timer = self.loop.call_later(HEAD_TIMEOUT, self.timeout_keep_alive_handler)

    def _stop_head_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._head:
            _heads.add(self._peer, -self._head)
            self._head = 0

    def _refuse(self, status: int, title: str, detail: str) -> None:
        body = msgspec.json.encode(
            Problem(type="urn:leasekit:problem:misdirected", status=status, title=title, detail=detail)
        )
        head = (
            f"HTTP/1.1 {status} {title}\r\ncontent-type: {MEDIA_TYPE}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        for cycle in self._cycles:  # their answers would meet a closed connection, and each would be logged as an error
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()


class _Body:
    """Reads a body after its head: for a request that offers another protocol, such as HTTP/2, which is ignored."""

    def __init__(self, connection: BoundedProtocol) -> None:
        self.on_body = connection.on_body
        self.on_message_complete = connection.on_message_complete


_FRAMING = (b"content-length", b"transfer-encoding")
