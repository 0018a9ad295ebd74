"""The connection: uvicorn's HTTP/1.1 protocol, with bounds for clients that stall, or send more than is read.

Without these bounds, uvicorn waits forever for the end of a request's head, keeps all of it in memory, and waits
forever for a client to read an answer. `request` bounds request bodies, and `sending` the time to send an answer.

What arrives behind a request that has no answer yet (pipelined) is not parsed before its turn, and little of it is
read: parsed, it takes some twenty times the memory, and one connection's requests would keep all others waiting.
"""

import asyncio
import socket
import weakref
from collections import deque
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from leasekit.server.fair_bound import FairBound
from leasekit.server.http.auth import LOCAL_SOCKET
from leasekit.server.http.problems import MEDIA_TYPE
from leasekit.server.http.sending import ABORT
from leasekit.wire import Problem

MAX_HEAD = 64 * 1024  # bytes of request line and headers
HEADS = 64 * 1024 * 1024  # bytes of all heads that have not ended; the addresses that they come from share them
MAX_TARGET = 16 * 1024  # bytes of path and query
MAX_FIELDS = 100  # of a head, or of a query; each costs a hundred bytes and more, and some microseconds
SMALL_HEAD = 4 * 1024  # bytes of a head that is never refused for others
HEAD_TIMEOUT = 30.0  # seconds from the connection, or from the first byte of a request, to the end of its head
STALL_TIMEOUT = 30.0  # seconds that a full buffer of answers may stay unread

_AHEAD = 64 * 1024  # unparsed bytes of a connection; with more of them it reads no further
_PIECE = 1024  # bytes that are parsed at once, besides those of a body: in them may be the heads of many requests
_PIECES = 4  # that are parsed before other connections have their turn: chunks of a byte take milliseconds
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
    _to_come = 0  # bytes of that body, as far as its head tells
    _unparsed = b""  # read already
    _delivered = 0  # bytes of a body that the latest data had
    _around = 0  # bytes around a body without one of it: of chunks, and of fields behind it

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._cycles: deque[RequestResponseCycle] = deque()  # of requests without an answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self)
        if (limit := getattr(transport, "set_read_buffer_limits", None)) is not None:  # with TLS: it reads ahead, too
            limit(_AHEAD)
        accepted = transport.get_extra_info("socket")
        self._is_local = accepted is not None and accepted.family == socket.AF_UNIX
        self._peer = "" if self._is_local else str((transport.get_extra_info("peername") or [""])[0])
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._keep(b"")
        self._disconnect()
        self.resume_writing()
        super().connection_lost(exc)
        for cycle, _ in self.pipeline:
            del cycle.on_response  # it refers to this connection; uvicorn does the same behind each answer

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self.flow.read_paused or self._unparsed:
            self._keep(self._unparsed + data)
        else:
            self._parse(data)

    def go_on(self) -> None:
        """Parse what was kept during a pause, in which a head was not late."""
        if self._timer is not None:
            self._limit_head()
        self._parse_on()

    def _parse_on(self) -> None:
        """Parse what was kept, and read on."""
        if self.transport.is_closing():
            return
        unparsed = self._unparsed
        self._keep(b"")
        self._parse(unparsed)
        if len(self._unparsed) < _AHEAD:
            self.transport.resume_reading()

    def _parse(self, data: bytes) -> None:
        """Parse data in pieces, up to a pause, or to the end of this connection's turn."""
        at, pieces = 0, 0
        while at < len(data) and pieces < _PIECES and not self.flow.read_paused and not self.transport.is_closing():
            end = at + max(_PIECE, self._to_come)
            self._receive(data[at:end])
            at, pieces = end, pieces + 1
        self._keep(b"" if self.transport.is_closing() else data[at:])
        if self._unparsed and not self.flow.read_paused:
            self.loop.call_soon(self._parse_on)

    def _keep(self, unparsed: bytes) -> None:
        """Keep this for later, in the room of heads; read no more if it is much."""
        _heads.add(self._peer, len(unparsed) - len(self._unparsed))
        self._unparsed = unparsed
        if unparsed and _heads.is_reached(self._peer, HEADS):
            self._refuse(429, "Too Many Requests", "too many bytes of requests are on their way: try again later")
        elif len(unparsed) >= _AHEAD:
            self.transport.pause_reading()

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
            self._refuse(429, "Too Many Requests", "too many bytes of requests are on their way: try again later")

    def _count_around(self, size: int) -> None:
        """Count bytes around a body, and cut the connection if there is little else: no application sees them."""
        self._around = 0 if size <= _AROUND * self._delivered else self._around + size
        if self._around > MAX_HEAD:
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        self._delivered += len(body)
        self._to_come -= len(body)
        super().on_body(body)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_TARGET or self.url.count(b"&") >= MAX_FIELDS:
            why = f"path and query have more than {MAX_TARGET:,} bytes, or the query more than {MAX_FIELDS} fields"
            self._stop_at(414, "URI Too Long", why)

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
        super().on_message_begin()
        extensions: dict[str, dict[object, object]] = {ABORT: {"abort": self.transport.abort}}
        if self._is_local:
            extensions[LOCAL_SOCKET] = {}
        self.scope["extensions"] = extensions
        self._start_head_timer()

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        self._has_body = True
        self._to_come = max([int(value) for name, value in self.headers if name == b"content-length"], default=0)
        super().on_headers_complete()
        self._cycles.append(self.cycle)
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        self._has_body, self._to_come = False, 0
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
        self._limit_head()

    def _limit_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(HEAD_TIMEOUT, self._end_head)

    def _end_head(self) -> None:
        """Close the connection of a head that has not come, unless the rest of it waits to be parsed."""
        if self.flow.read_paused:
            self._limit_head()
        else:
            self.timeout_keep_alive_handler()

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
        waiting = [cycle for cycle in self._cycles if not cycle.response_complete]
        earlier = waiting[:-1] if self._has_body else waiting
        self._disconnect()  # answers would meet a closed connection, and each would be logged as an error
        self._stop_head_timer()
        self._keep(b"")  # others have the room from now on
        if earlier or any(cycle.response_started for cycle in waiting):
            self.transport.abort()  # a client would take this for the answer to what may have been applied
        else:
            self.transport.write(head.encode("ascii") + body)
            self.transport.close()

    def _disconnect(self) -> None:
        """Tell all requests that have no answer that none would arrive."""
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()


class _Flow(FlowControl):
    """Whether a connection parses what it reads: not while a request waits for its turn."""

    def __init__(self, transport: asyncio.Transport, connection: BoundedProtocol) -> None:
        super().__init__(transport)
        self._connection = weakref.proxy(connection)  # none waits in memory for a garbage collection

    def pause_reading(self) -> None:
        self.read_paused = True

    def resume_reading(self) -> None:
        if self.read_paused and not self._connection.pipeline:
            self.read_paused = False
            self._connection.loop.call_soon(self._connection.go_on)


class _Body:
    """Reads a body after its head: for a request that offers another protocol, such as HTTP/2, which is ignored.

    What comes behind the body is ignored too: the connection closes with the answer.
    """

    def __init__(self, connection: BoundedProtocol) -> None:
        self._connection = weakref.proxy(connection)
        self._is_over = False

    def on_body(self, body: bytes) -> None:
        if not self._is_over:
            self._connection.on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._connection.on_message_complete()


_FRAMING = (b"content-length", b"transfer-encoding")
