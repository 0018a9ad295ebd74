"""Nothing that a request leaves behind waits for a garbage collection, which may come after hundreds of them."""

import contextlib
import gc
import json
import socket
from collections.abc import Callable, Iterator

import pytest
from starlette.requests import Request
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from leasekit.server.http.protocol import BoundedProtocol
from tests.server.http.conftest import Running
from tests.waiting import eventually

_HELD = (BaseException, BoundedProtocol, RequestResponseCycle, Request)
"""What holds a body, or the head of a request."""

_LONG = 1_000_000
_JSON = b"host: localhost\r\ncontent-type: application/json\r\n"
_CLAIM = b'{"worker":"w","claim_id":"c","kinds":["a"],"wait":60}'
_BODIES = {
    "no JSON": b"[" * 100,
    "no JSON, long": b"{" * _LONG,
    "too deep": b'{"ids":' + b"[" * _LONG,
    "no text": b'{"ids":["\xff' + b" " * _LONG,
    "another type": b'{"ids":' + b"1" * _LONG + b"}",
    "too many": json.dumps({"ids": ["a"] * 100_000}).encode(),
    "unknown field": json.dumps({"odd": " " * _LONG}).encode(),
    "empty": b"",
    "too large": b" " * 9_000_000,
    "what fits": json.dumps({"ids": ["a"]}).encode(),
}
_HEADS = {
    "no HTTP": b"BREW\r\n\r\n",
    "another method": b"BREW /v1/tasks HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "another path": b"GET /v1/odd HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "another host": b"GET /v1/tasks HTTP/1.1\r\nhost: example.org\r\n\r\n",
    "a wrong parameter": b"GET /v1/tasks?limit=odd HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "no task": b"GET /v1/tasks/nobody HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "an offer": b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
    "a list": b"GET /v1/tasks HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "many behind": b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n" * 200,
    "many fields": b"GET /healthz HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n",
    "half a head": b"GET /healthz HTTP/1.1\r\nhost: loc",
    "half a body": b"POST /v1/tasks HTTP/1.1\r\n%scontent-length: 9\r\n\r\n{" % _JSON,
    "a bad chunk": b"POST /v1/tasks HTTP/1.1\r\n%stransfer-encoding: chunked\r\n\r\n2\r\n{}\r\nodd\r\n" % _JSON,
    "a claim that waits": b"POST /v1/claims HTTP/1.1\r\n%scontent-length: %d\r\n\r\n%s" % (_JSON, len(_CLAIM), _CLAIM),
}  # fmt: skip


@contextlib.contextmanager
def collected() -> Iterator[Callable[[], list[object]]]:
    """Collect no garbage in the block; yield what tells which objects of `_HELD` would have been collected."""
    found: list[object] = []

    def tell() -> list[object]:
        gc.collect()
        found.extend(it for it in gc.garbage if issubclass(type(it), _HELD))  # a dead proxy has no class
        gc.garbage.clear()
        return found

    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield tell
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("body", _BODIES.values(), ids=_BODIES)
def test_a_body_is_not_kept(server: Running, body: bytes) -> None:
    with collected() as found:
        for _ in range(2):
            with contextlib.suppress(OSError):  # what is too large is not read to its end
                server.call("POST", "/v1/tasks/cancel", body)
        eventually(lambda: not server.connections)
        assert not found()


@pytest.mark.parametrize("sent", _HEADS.values(), ids=_HEADS)
def test_a_request_is_not_kept(server: Running, sent: bytes) -> None:
    with collected() as found:
        for _ in range(2):
            with server.open() as connection:
                connection.sendall(sent)
                server.get("/healthz")  # it arrived before this was answered
                connection.shutdown(socket.SHUT_WR)
        eventually(lambda: not server.connections)
        assert not found()
