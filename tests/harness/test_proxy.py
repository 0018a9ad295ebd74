"""What a proxy does to connections: to sockets, and to an HTTP client of ours."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.client import HTTPConnection, RemoteDisconnected
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from harness.proxy import Proxy

pytestmark = pytest.mark.anyio

PATIENCE = 30.0
SHORT = 0.3  # seconds in which nothing must come; more would only make the test stricter


class Service(BaseHTTPRequestHandler):
    """Says what it was asked, and how often it was asked anything; `/parts` answers in chunks."""

    protocol_version = "HTTP/1.1"
    asked: list[str]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        self.asked.append(self.path)
        self._say(json.dumps({"path": self.path, "body": body.decode(), "count": len(self.asked)}).encode())

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path != "/parts":
            self._say(b"x" * 100_000)
            return
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"3;why=not\r\none\r\n3\r\ntwo\r\n0\r\nx-trailer: 1\r\n\r\n")

    def _say(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


class Server(ThreadingHTTPServer):
    def handle_error(self, *args: object) -> None:
        """Connections break here all the time."""


@pytest.fixture
def asked() -> list[str]:
    return []


@pytest.fixture
def service(asked: list[str]) -> Iterator[str]:
    handler = type("Handler", (Service,), {"asked": asked})
    with Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(service: str) -> Iterator[Proxy]:
    with Proxy(service) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: Proxy) -> Iterator[HTTPConnection]:
    connection = HTTPConnection("127.0.0.1", proxy.port, timeout=PATIENCE)
    yield connection
    connection.close()


def ask(client: HTTPConnection, method: str = "POST", path: str = "/v1/results", body: str = "hello") -> bytes:
    client.request(method, path, body if method == "POST" else None)
    response = client.getresponse()
    assert response.status == 200
    return response.read()


# A line that is well


def test_what_passes_is_what_came(client: HTTPConnection) -> None:
    assert json.loads(ask(client)) == {"path": "/v1/results", "body": "hello", "count": 1}
    assert json.loads(ask(client, body="again"))["body"] == "again"  # on the same connection
    assert ask(client, "GET", "/much") == b"x" * 100_000
    assert ask(client, "GET", "/parts") == b"onetwo"
    assert ask(client, "GET", "/much?a=b") == b"x" * 100_000


def test_requests_are_written_down_with_their_answers(client: HTTPConnection, proxy: Proxy) -> None:
    ask(client)
    ask(client, "GET", "/much?a=b")
    seen = [(one.method, one.path, one.status, one.fault) for one in proxy.log]
    assert seen == [("POST", "/v1/results", 200, ""), ("GET", "/much", 200, "")]
    assert not proxy.fired


def test_bytes_of_any_protocol_pass_a_tcp_proxy() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        Proxy(f"tcp://127.0.0.1:{server.getsockname()[1]}") as proxy,
        socket.create_connection(("127.0.0.1", proxy.port), PATIENCE) as client,
    ):
        client.sendall(b"\0\r\n\r\nno HTTP")
        client.shutdown(socket.SHUT_WR)
        accepted, _ = server.accept()
        with accepted:
            assert b"".join(iter(lambda: accepted.recv(100), b"")) == b"\0\r\n\r\nno HTTP"
            accepted.sendall(b"answer after the end of the question")
        assert client.recv(100) == b"answer after the end of the question"
        assert client.recv(100) == b""


def test_what_is_open_stays_where_it_is_when_the_address_moves() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as first,
        socket.create_server(("127.0.0.1", 0)) as second,
        Proxy(f"tcp://127.0.0.1:{first.getsockname()[1]}") as proxy,
        socket.create_connection(("127.0.0.1", proxy.port)) as old,
        first.accept()[0] as old_service,
    ):
        proxy.move(f"tcp://127.0.0.1:{second.getsockname()[1]}")
        with socket.create_connection(("127.0.0.1", proxy.port)) as new, second.accept()[0] as new_service:
            old_service.sendall(b"first")
            new_service.sendall(b"second")
            assert (old.recv(10), new.recv(10)) == (b"first", b"second")
        with pytest.raises(ValueError, match="no address"):
            proxy.move("nowhere")


def test_rules_about_requests_need_http() -> None:
    with pytest.raises(ValueError, match="give the target as http://"):
        Proxy("tcp://127.0.0.1:1").lose_answer("POST", "/")
    with pytest.raises(ValueError, match="no address"):
        Proxy("127.0.0.1:1")


# A line that is not


def test_a_cut_line_refuses_until_it_is_mended(client: HTTPConnection, proxy: Proxy, asked: list[str]) -> None:
    ask(client)
    port = proxy.port
    proxy.cut()
    with pytest.raises(OSError):  # noqa: PT011 - reset, or ended: both are OSErrors
        ask(client)
    client.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), PATIENCE)
    assert len(asked) == 1
    proxy.mend()
    ask(client)
    assert proxy.port == port
    assert proxy.fired == {"cut": 1}


def test_a_reset_breaks_what_is_open_and_nothing_else(client: HTTPConnection, proxy: Proxy) -> None:
    ask(client)
    proxy.reset()
    assert client.sock is not None
    with pytest.raises(ConnectionResetError):
        client.sock.recv(1)
    client.close()
    ask(client)
    assert proxy.fired == {"reset": 1}


def test_a_hanging_line_accepts_and_says_nothing_and_delivers_when_it_is_mended(
    client: HTTPConnection, proxy: Proxy, asked: list[str]
) -> None:
    proxy.hang()
    client.request("POST", "/v1/results", "late")
    assert client.sock is not None
    client.sock.settimeout(SHORT)
    with pytest.raises(TimeoutError):
        client.getresponse()
    assert asked == []
    assert proxy.fired["hang"] >= 1
    client.close()  # its client gave up; the request is on its way all the same
    proxy.mend()
    proxy.wait(lambda: asked == ["/v1/results"])


def test_answers_alone_can_hang(client: HTTPConnection, proxy: Proxy, asked: list[str]) -> None:
    proxy.hang("answers")
    client.request("POST", "/v1/results", "x")
    proxy.wait(lambda: proxy.fired["hang"] == 1)
    assert asked == ["/v1/results"]
    proxy.mend()
    assert client.getresponse().status == 200


def test_a_slow_line_takes_its_time_each_way(client: HTTPConnection, proxy: Proxy) -> None:
    proxy.slow(0.1, jitter=0.05)
    began = time.monotonic()
    ask(client)
    assert time.monotonic() - began >= 0.2
    assert proxy.fired["slow"] >= 2


def test_a_dripping_line_gives_every_byte_by_itself(client: HTTPConnection, proxy: Proxy) -> None:
    ask(client)
    proxy.drip(0.001)
    client.request("POST", "/v1/results", "x")
    assert client.sock is not None
    assert len(client.sock.recv(1000)) < 50
    assert proxy.fired["drip"] == 1


def test_a_limit_breaks_the_connection_in_the_middle_of_an_answer(client: HTTPConnection, proxy: Proxy) -> None:
    proxy.limit(1000)
    with pytest.raises(OSError):  # noqa: PT011
        ask(client, "GET", "/much")
    assert proxy.fired == {"limit": 1}


def test_a_service_that_is_not_there_is_a_connection_that_breaks() -> None:
    with Proxy("http://127.0.0.1:1") as proxy, socket.create_connection(("127.0.0.1", proxy.port), PATIENCE) as client:
        proxy.wait(lambda: proxy.fired["unreachable"] == 1)
        assert client.recv(1) == b""


# Requests


def test_a_lost_answer_is_of_a_request_that_was_executed(
    client: HTTPConnection, proxy: Proxy, asked: list[str]
) -> None:
    proxy.lose_answer("POST", "/v1/results")
    assert json.loads(ask(client, path="/v1/claims"))["count"] == 1  # another path
    with pytest.raises((ConnectionResetError, RemoteDisconnected)):
        ask(client)
    client.close()
    assert asked == ["/v1/claims", "/v1/results"]
    assert json.loads(ask(client))["count"] == 3  # once was asked for
    assert proxy.fired == {"lose_answer": 1}
    assert [one.fault for one in proxy.log] == ["", "lose_answer", ""]


@pytest.mark.parametrize("path", ["/much", "/parts"])
def test_a_repeated_answer_comes_whole_and_again(service: str, proxy: Proxy, asked: list[str], path: str) -> None:
    request = f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
    proxy.repeat_answer("GET", path, repeats=2)
    with socket.create_connection(("127.0.0.1", proxy.port), PATIENCE) as client:
        client.sendall(request * 2)  # the second one is answered once
        client.shutdown(socket.SHUT_WR)
        received = client.makefile("rb").read()
    end = b"x" * 100_000 if path == "/much" else b"x-trailer: 1\r\n\r\n"
    answers = received.split(end)
    assert answers[0].startswith(b"HTTP/1.1 200")
    assert len(answers) == 5
    assert answers[1:3] == [answers[0]] * 2
    assert asked == [path, path]
    assert proxy.fired == {"repeat_answer": 1}
    assert [one.fault for one in proxy.log] == ["repeat_answer", ""]


def test_an_answer_cannot_be_repeated_less_than_once(proxy: Proxy) -> None:
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        proxy.repeat_answer("GET", "/", repeats=0)


def test_a_storm_is_answered_by_the_proxy(client: HTTPConnection, proxy: Proxy, asked: list[str]) -> None:
    proxy.answer(503, "POST", "/v1/results", retry_after="soon", body=b"busy", times=2)
    for _ in range(2):
        client.request("POST", "/v1/results", "x")
        response = client.getresponse()
        assert (response.status, response.headers["retry-after"], response.read()) == (503, "soon", b"busy")
    ask(client)
    assert asked == ["/v1/results"]
    assert proxy.fired == {"answer 503": 2}
    assert [one.status for one in proxy.log] == [503, 503, 200]


def test_a_rule_may_leave_it_to_chance(client: HTTPConnection, proxy: Proxy) -> None:
    proxy.answer(429, "POST", "/v1/results", times=None, chance=0.5)
    statuses = []
    for _ in range(40):
        client.request("POST", "/v1/results", "x")
        response = client.getresponse()
        response.read()
        statuses.append(response.status)
    assert 5 < statuses.count(429) < 35
    proxy.mend()
    ask(client)


async def test_an_old_request_can_arrive_again(proxy: Proxy, client: HTTPConnection, asked: list[str]) -> None:
    await asyncio.to_thread(ask, client, body="old")
    raw = await proxy.again(proxy.log[0])
    assert raw.startswith(b"HTTP/1.1 200")
    assert b'"body": "old", "count": 2' in raw
    await asyncio.to_thread(ask, client, body="x" * 20_000)
    with pytest.raises(ValueError, match="not kept"):
        await proxy.again(proxy.log[1])


# The other door


@pytest.fixture
async def here(service: str) -> AsyncIterator[Proxy]:
    async with Proxy(service) as proxy:
        yield proxy


async def test_it_lives_in_a_loop_that_runs_too(here: Proxy, asked: list[str]) -> None:
    here.lose_answer("POST", "/v1/results")
    client = HTTPConnection("127.0.0.1", here.port, timeout=PATIENCE)
    asking = asyncio.create_task(asyncio.to_thread(ask, client))
    async with asyncio.timeout(PATIENCE):
        await here.until(lambda: here.fired["lose_answer"] == 1)
    with pytest.raises((ConnectionResetError, RemoteDisconnected)):
        await asking
    client.close()
    here.cut()
    here.mend()
    await asyncio.to_thread(ask, client)
    client.close()
    assert asked == ["/v1/results"] * 2


def test_leaving_the_block_leaves_nothing_behind(service: str) -> None:
    before = threading.active_count()
    with Proxy(service) as proxy:
        port = proxy.port
        client = socket.create_connection(("127.0.0.1", port), PATIENCE)
        proxy.hang()
        client.sendall(b"POST / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        proxy.wait(lambda: proxy.fired["hang"] == 1)
    with client, pytest.raises(ConnectionResetError):
        client.recv(1)
    assert threading.active_count() <= before + 1  # the service may be about to end the thread of a connection
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), PATIENCE)


def test_what_fails_in_the_loop_of_the_proxy_is_raised_where_it_was_asked_for(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise KeyError("broken")

    monkeypatch.setattr(proxy, "_mend", fail)
    raised: list[BaseException] = []

    def mend() -> None:
        try:
            proxy.mend()
        except KeyError as error:
            raised.append(error)

    thread = threading.Thread(target=mend, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert [str(error) for error in raised] == ["'broken'"]
