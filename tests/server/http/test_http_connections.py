"""Connections: slow ones are cut, closed ones give up their claims, long polls end when the server stops."""

import asyncio
import contextlib
import itertools
import json
import re
import socket
import threading
from collections import Counter
from random import Random
from typing import Any

import pytest

from leasekit.server.http import bodies, protocol, sending
from leasekit.server.http.operations import Operation
from leasekit.server.http.protocol import BoundedProtocol
from leasekit.server.http.routes import OPERATIONS
from tests.server.http.conftest import Running, RunServer, read_all
from tests.waiting import eventually

_ids = (f"claim-{n}" for n in itertools.count())
GET = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


def claim(kind: str, *, wait: float = 60, limit: int = 1) -> dict[str, Any]:
    return {"worker": "w", "kinds": [kind], "limit": limit, "wait": wait, "claim_id": next(_ids)}


def request(path: str, body: Any) -> bytes:
    raw = json.dumps(body).encode()
    return POST % (path.encode(), len(raw)) + raw


# Claims that wait ---------------------------------------------------------------------------------------------


def test_a_client_that_went_away_is_granted_nothing(server: Running) -> None:
    with server.open() as connection:
        connection.sendall(request("/v1/claims", claim("left")))
        eventually(lambda: len(server.polls) == 1)
    eventually(lambda: len(server.polls) == 0)

    server.post("/v1/tasks", {"tasks": [{"kind": "left", "id": "left-1"}]})
    assert server.get("/v1/tasks/left-1")["attempt"] == 0
    (task,) = server.post("/v1/claims", claim("left", wait=0))["tasks"]
    assert (task["id"], task["attempt"]) == ("left-1", 1)


def test_a_client_that_broke_off_is_granted_nothing(server: Running) -> None:
    with server.open() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close with a RST
        connection.sendall(request("/v1/claims", claim("broken")))
        eventually(lambda: len(server.polls) == 1)
    eventually(lambda: len(server.polls) == 0)


def test_a_claim_that_waits_is_answered_when_a_task_comes(server: Running) -> None:
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(server.post("/v1/claims", claim("awaited"))))
    waiting.start()
    eventually(lambda: len(server.polls) == 1)
    server.post("/v1/tasks", {"tasks": [{"kind": "awaited", "id": "awaited-1"}]})
    waiting.join(30)
    (answer,) = answers
    assert [task["id"] for task in answer["tasks"]] == ["awaited-1"]
    assert answer["waited"] > 0


def test_a_claim_that_waits_in_vain_is_answered_with_nothing(server: Running) -> None:
    assert server.post("/v1/claims", claim("vain", wait=0.05))["tasks"] == []
    assert len(server.polls) == 0


def test_claims_that_wait_are_answered_at_once_when_the_server_stops(run_server: RunServer) -> None:
    answers: list[Any] = []
    with run_server() as server:
        threads = [
            threading.Thread(target=lambda: answers.append(server.post("/v1/claims", claim("stopped"))))
            for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        eventually(lambda: len(server.polls) == 5)
    for thread in threads:
        thread.join(30)
    assert [answer["tasks"] for answer in answers] == [[]] * 5


# Requests that wait for the end of a task ---------------------------------------------------------------------


def scheduled(server: Running, task_id: str, **options: Any) -> None:
    server.post("/v1/tasks", {"tasks": [{"kind": "ends", "id": task_id, **options}]})


def in_thread(server: Running, path: str, answers: list[Any]) -> threading.Thread:
    thread = threading.Thread(target=lambda: answers.append(server.get(path)))
    thread.start()
    return thread


def test_a_request_is_answered_when_its_task_has_ended(server: Running) -> None:
    scheduled(server, "ends-1")
    answers: list[Any] = []
    waiting = in_thread(server, "/v1/tasks/ends-1?wait=60", answers)
    eventually(lambda: len(server.waits) == 1)
    server.post("/v1/tasks/cancel", {"ids": ["ends-1"]})
    waiting.join(30)
    assert [answer["status"] for answer in answers] == ["cancelled"]


def test_many_requests_get_a_big_result_each(server: Running) -> None:
    scheduled(server, "ends-big", payload="x" * 1_000_000)
    answers: list[Any] = []
    waiting = [in_thread(server, "/v1/tasks/ends-big?wait=60", answers) for _ in range(40)]
    eventually(lambda: len(server.waits) == len(waiting))
    server.post("/v1/tasks/cancel", {"ids": ["ends-big"]})
    for thread in waiting:
        thread.join(30)
    assert [(answer["status"], len(answer["payload"])) for answer in answers] == [("cancelled", 1_000_000)] * 40


def test_an_unknown_task_is_not_waited_for(server: Running) -> None:
    assert server.call("GET", "/v1/tasks/ends-never?wait=60").status == 404


def test_a_client_that_went_away_waits_for_no_end(server: Running) -> None:
    scheduled(server, "ends-left")
    with server.open() as connection:
        connection.sendall(b"GET /v1/tasks/ends-left?wait=60 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        eventually(lambda: server.engine.ends_awaited == 1)
    eventually(lambda: server.engine.ends_awaited == 0)


_COUNT = {"reason": "none", "dry_run": True}


@pytest.mark.parametrize(
    ("part", "name", "asked"),
    [
        ("queries", "list_tasks", b"GET /v1/tasks?reason=none HTTP/1.1\r\nhost: localhost\r\n\r\n"),
        ("operations", "cancel_matching", request("/v1/tasks/cancel-matching", _COUNT)),
        ("operations", "reschedule_matching", request("/v1/tasks/reschedule-matching", _COUNT | {"delay": 1})),
        ("operations", "redrive", request("/v1/tasks/redrive", _COUNT)),
        ("operations", "purge", request("/v1/tasks/purge", _COUNT)),
    ],
    ids=["list", "dry cancel", "dry reschedule", "dry redrive", "dry purge"],
)
def test_a_search_ends_when_its_client_has_gone(
    server: Running, monkeypatch: pytest.MonkeyPatch, part: str, name: str, asked: bytes
) -> None:
    begun, given_up = threading.Event(), threading.Event()

    async def search(*_: object, **__: object) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    monkeypatch.setattr(getattr(server.engine, part), name, search)
    with server.open() as connection:
        connection.sendall(asked)
        assert begun.wait(60)
    assert given_up.wait(60)


def test_requests_for_ends_are_answered_at_once_when_the_server_stops(run_server: RunServer) -> None:
    answers: list[Any] = []
    with run_server() as server:
        scheduled(server, "ends-stopped")
        waiting = [in_thread(server, "/v1/tasks/ends-stopped?wait=60", answers) for _ in range(5)]
        eventually(lambda: len(server.waits) == 5)
    for thread in waiting:
        thread.join(30)
    assert [answer["status"] for answer in answers] == ["new"] * 5


def test_a_request_too_many_is_told_to_come_later(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasekit.server.end_waits._MOST", 0)
    answer = server.call("GET", "/v1/tasks/ends-full?wait=60")
    assert (answer.status, answer.headers["retry-after"]) == (429, "1")
    assert "wait for the ends of" in answer.json["detail"]


# Bodies, connections ------------------------------------------------------------------------------------------


def test_a_body_that_does_not_come_holds_up_no_stop(run_server: RunServer) -> None:
    with run_server(body_timeout=1e6) as server:
        slow = server.open()
        slow.sendall(
            b"POST /v1/tasks HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n{"
        )
        server.post("/v1/tasks/cancel", {"ids": ["nobody"]})  # the head arrived before this was answered
    with slow:
        assert read_all(slow).startswith(b"HTTP/1.1 408 ")


def test_a_connection_serves_many_requests(server: Running) -> None:
    with server.open() as connection:
        for n in range(5):
            connection.sendall(request("/v1/tasks/cancel", {"ids": [f"nobody-{n}"]}))
            data = b""
            while not data.endswith(b"]}"):
                data += connection.recv(65536)
            assert data.startswith(b"HTTP/1.1 200 OK"), data


def test_connections_that_come_together_are_accepted_in_a_few_turns_of_the_loop(server: Running) -> None:
    """A flood's connections come before others, and its requests make each turn long."""

    async def come(count: int) -> int:
        """Connect while the loop stands still; return the turns until all connections are served."""
        before, turns = len(server.connections), 0
        with contextlib.ExitStack() as opened:
            for _ in range(count):
                opened.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            while len(server.connections) < before + count:
                turns += 1
                await asyncio.sleep(0)
        return turns

    turns = asyncio.run_coroutine_threadsafe(come(100), server.loop).result(30)
    assert turns <= 20


@pytest.mark.parametrize("is_split", [False, True])
def test_an_offer_of_http_2_is_ignored_and_its_body_read(server: Running, is_split: bool) -> None:
    """`curl --http2` and Java's client send it with their first request."""
    offer = b"\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n\r\n"
    sent = request("/v1/tasks/cancel", {"ids": ["offered"]}).replace(b"\r\n\r\n", offer)
    at = sent.index(offer) + len(offer)
    with server.open() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in [sent[:at], sent[at : at + 5], sent[at + 5 :]] if is_split else [sent]:
            connection.sendall(part)
            server.get("/healthz")  # the part arrived before this was answered
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 200 OK"), answer
    assert b"offered" in answer


def test_what_comes_behind_an_offer_is_not_of_its_body(server: Running) -> None:
    """A proxy may send it for another client: the task of one would have the request of the other as its payload."""
    offer = b"\r\nconnection: Upgrade\r\nupgrade: h2c\r\n\r\n"
    first = request("/v1/tasks/cancel", {"ids": ["offered"]}).replace(b"\r\n\r\n", offer)
    with server.open() as connection:
        connection.sendall(first + request("/v1/tasks/cancel", {"ids": ["behind"]}))
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 200 OK"), answer
    assert answer.count(b"HTTP/1.1") == 1
    assert b"behind" not in answer


def test_pipelined_requests_are_answered_in_their_order(server: Running) -> None:
    with server.open() as connection:
        connection.sendall(b"".join(request("/v1/tasks/cancel", {"ids": [f"pipe-{n}"]}) for n in range(3)))
        data = b""
        while data.count(b"HTTP/1.1 200 OK") < 3 or not data.endswith(b"]}"):
            data += connection.recv(65536)
    assert [data.find(b"pipe-%d" % n) for n in range(3)] == sorted(data.find(b"pipe-%d" % n) for n in range(3))


@pytest.mark.parametrize("seed", range(6))
def test_requests_arrive_wherever_they_are_split(server: Running, seed: int) -> None:
    """Also where a head or a body ends with a piece that is parsed at once."""
    rng, sent = Random(seed), b""
    for number in range(60):
        body = json.dumps({"ids": [f"split-{number}"]}).encode()
        is_chunked = rng.random() < 0.3
        framing = b"transfer-encoding: chunked" if is_chunked else b"content-length: %d"
        head = (
            b"POST /v1/tasks/cancel HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n%s\r\nx: "
            % framing
        )
        size = rng.choice((len(body), len(body), 1024, 2048, 5000, rng.randrange(100, 3000)))
        body = body.ljust(size)
        head = head if is_chunked else head % len(body)
        ends_at = len(sent) + len(head) + 4 + len(body)
        filler = rng.choice((0, -ends_at % 1024, -(ends_at - len(body)) % 1024))  # so that one of them ends a piece
        sent += head + b"y" * filler + b"\r\n\r\n"
        while is_chunked and body:
            part, body = body[: (cut := rng.choice((1, 7, 1024, 5000)))], body[cut:]
            sent += b"%x\r\n%s\r\n" % (len(part), part)
        sent += b"0\r\n\r\n" if is_chunked else body
    with server.open() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while sent:
            cut = rng.choice((1, 10, 1023, 1024, 1025, 16_384, 70_000))
            connection.sendall(sent[:cut])
            sent = sent[cut:]
        data = b""
        while data.count(b"HTTP/1.1 200 OK") < 60 or not data.endswith(b"]}"):
            more = connection.recv(65536)
            assert more, data[-500:]
            data += more
    assert re.findall(rb"split-(\d+)", data) == [b"%d" % number for number in range(60)]


def test_what_comes_behind_a_request_without_an_answer_waits_unparsed(server: Running) -> None:
    """Parsed at once, the tiny requests of a few connections filled the memory, and kept all heartbeats waiting."""
    with server.open() as connection:
        connection.sendall(request("/v1/claims", claim("behind")) + GET * 1000)
        eventually(lambda: any(it.pipeline for it in server.connections))
        assert server.get("/healthz") == {"status": "ok"}
        assert max(len(it.pipeline) for it in server.connections) < 30
        server.post("/v1/tasks", {"tasks": [{"kind": "behind", "id": "behind"}]})
        data = b""
        while data.count(b'{"status":"ok"}') < 1000:
            data += connection.recv(65536)
    assert 0 < data.index(b'"id":"behind"') < data.index(b'{"status":"ok"}')
    eventually(lambda: protocol._heads.total == 0)


def test_what_comes_behind_requests_has_the_room_of_heads(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEADS", 110_000)
    behind = GET * 1200
    with server.open() as first, server.open() as second, server.open() as third:
        for connection in (first, second):
            connection.sendall(request("/v1/claims", claim("never")) + behind)
        eventually(lambda: protocol._heads.total > 100_000)
        with contextlib.suppress(ConnectionResetError):
            third.sendall(request("/v1/claims", claim("never")) + behind)
            assert read_all(third) == b"", "the claim has no answer yet: another one would be taken for it"
        assert server.get("/healthz") == {"status": "ok"}
    eventually(lambda: protocol._heads.total == 0)


def test_a_head_that_waits_to_be_parsed_is_not_late(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT", 0.05)
    limited, limit = Counter[BoundedProtocol](), BoundedProtocol._limit_head

    def count(connection: BoundedProtocol) -> None:
        limited[connection] += 1
        limit(connection)

    monkeypatch.setattr(BoundedProtocol, "_limit_head", count)
    with server.open() as connection:
        connection.sendall(request("/v1/claims", claim("late")) + GET + GET[:9])
        eventually(lambda: max(limited.values(), default=0) > 6)
        monkeypatch.setattr(protocol, "HEAD_TIMEOUT", 30.0)
        server.post("/v1/tasks", {"tasks": [{"kind": "late", "id": "late"}]})
        data = b""
        while b'{"status":"ok"}' not in data:
            data += connection.recv(65536)
        connection.sendall(GET[9:])
        assert b'{"status":"ok"}' in connection.recv(65536)


def test_a_client_that_went_away_with_requests_behind_its_claim_is_granted_nothing(server: Running) -> None:
    with server.open() as connection:
        connection.sendall(request("/v1/claims", claim("left")) + GET * 3)
        eventually(lambda: any(it.pipeline for it in server.connections))
    eventually(lambda: len(server.polls) == 0, within=30)  # the claim would wait for 60


def test_the_heads_on_their_way_have_a_room_together(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """They need no access token: some thousands of slow connections filled the memory."""
    monkeypatch.setattr(protocol, "HEADS", 33_000)
    head = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 15_000
    with server.open() as first, server.open() as second, server.open() as third:
        for connection in (first, second):
            connection.sendall(head)
        eventually(lambda: protocol._heads.total == 2 * len(head))
        third.sendall(head[:2000])  # less than waits to be parsed
        eventually(lambda: protocol._heads.total == 2 * len(head) + 2000)
        third.sendall(head[2000:5000])
        assert read_all(third).startswith(b"HTTP/1.1 429 ")
        assert server.get("/healthz") == {"status": "ok"}
        first.sendall(b"\r\nconnection: close\r\n\r\n")
        assert read_all(first).startswith(b"HTTP/1.1 200 ")
    eventually(lambda: protocol._heads.total == 0)


def test_the_bodies_on_their_way_have_a_room_together(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may be of eight megabytes, and take half a minute: clients that send slowly filled the memory."""
    monkeypatch.setattr(bodies, "_TOGETHER", 1_250_000)
    part = b" " * 600_000
    with server.open() as first, server.open() as second, server.open() as third:
        for connection in (first, second):
            connection.sendall(POST % (b"/v1/tasks", 700_000) + part)
        eventually(lambda: server.bodies.size == 1_200_000)
        third.sendall(POST % (b"/v1/tasks", 700_000) + part)
        refused = third.recv(65536)
        assert refused.startswith(b"HTTP/1.1 429 ")
        while b"on their way" not in refused:  # the body may come by itself
            more = third.recv(65536)
            assert more
            refused += more
        assert server.post("/v1/tasks", {"tasks": [{"kind": "small", "payload": "x" * 50_000}]})["tasks"]
        first.sendall(b" " * 100_000)
        assert first.recv(65536).startswith(b"HTTP/1.1 4")  # it is no JSON
    eventually(lambda: server.bodies.size == 0)


def test_small_bodies_on_their_way_have_a_room_of_their_own(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with server.open() as first, server.open() as second:
        first.sendall(POST % (b"/v1/tasks", 80_000) + b" " * 70_000)
        eventually(lambda: server.bodies.size == 70_000)
        monkeypatch.setattr(bodies, "_TOGETHER", 70_000)
        second.sendall(POST % (b"/v1/tasks", 80_000) + b" " * 70_000)
        assert second.recv(65536).startswith(b"HTTP/1.1 429 ")
        large = {"tasks": [{"kind": "large", "payload": "x" * 200_000}]}
        assert server.call("POST", "/v1/tasks", large).status == 429, "it was small at first"
        assert server.post("/v1/tasks/cancel", {"ids": ["nobody"]}), "it is tiny"
    eventually(lambda: server.bodies.size == 0)
    assert server.post("/v1/tasks", {"tasks": [{"kind": "small", "payload": "x" * 50_000}]})["tasks"]


def test_a_body_that_has_arrived_waits_for_its_turn_and_a_tiny_one_does_not(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.bodies, "_is_waking", True)  # as if others had their turn
    answers: list[Any] = []
    waiting = threading.Thread(
        target=lambda: answers.append(server.call("POST", "/v1/tasks", {"tasks": [{"kind": "x" * 50}] * 200}))
    )
    waiting.start()
    eventually(lambda: len(server.bodies._arrived) == 1)
    assert server.call("POST", "/v1/tasks", {"tasks": [{"kind": "tiny"}]}).status == 200
    assert answers == []
    server.loop.call_soon_threadsafe(server.bodies._wake, server.loop)
    waiting.join(30)
    assert [answer.status for answer in answers] == [200]


def test_a_head_has_a_hundred_fields(server: Running) -> None:
    for number, status in ((90, b"200"), (101, b"431")):
        with server.open() as connection:
            fields = b"".join(b"x-%d: y\r\n" % n for n in range(number))
            connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + fields + b"\r\n")
            assert read_all(connection).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"/healthz?" + b"&".join([b"%"] * 100), b"200"),
        (b"/healthz?" + b"&".join([b"%"] * 101), b"414"),
        (b"/healthz?" + b"x" * 16_000, b"200"),
        (b"/v1/tasks/" + b"x" * 16_400, b"414"),
    ],
    ids=["100 fields", "101 fields", "a long one", "a longer one"],
)
def test_a_path_with_its_query_has_a_bound(server: Running, target: bytes, status: bytes) -> None:
    """The fields of a query are decoded one by one in the event loop, before anybody knows who asks."""
    with server.open() as connection:
        connection.sendall(b"GET %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n" % target)
        assert read_all(connection).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: f"{each.method} {each.path}")
def test_an_operation_tells_of_the_refusals_of_heads(operation: Operation) -> None:
    assert operation.refusals.keys() >= {400, 414, 431}


@pytest.mark.parametrize("part", [b"a:b\r\n" * 1000, b"x" * 5000], ids=["fields", "one field"])
def test_what_stands_behind_a_chunked_body_is_bounded(server: Running, part: bytes) -> None:
    """A connection that was answered long ago filled the memory with fields that nobody reads."""
    head = b"POST /v1/tasks/ended HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"
    with server.open() as connection:
        connection.sendall(head + b"content-type: application/json\r\n\r\n2\r\n{}\r\n0\r\nx: ")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            connection.sendall(part * 4000)
    assert server.get("/healthz") == {"status": "ok"}


def test_a_body_of_many_tiny_chunks_arrives(server: Running) -> None:
    body = json.dumps({"tasks": [{"kind": "chunks", "payload": "x" * 100_000}]}).encode()
    head = b"POST /v1/tasks HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\nconnection: close\r\n"
    with server.open() as connection:
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        connection.sendall(head + b"content-type: application/json\r\n\r\n" + chunks + b"0\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_tiny_chunks_are_parsed_in_turns(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a megabyte of them takes a tenth of a second: some connections would keep all others waiting."""
    turns, parse, receive = Counter[int](), BoundedProtocol._parse, BoundedProtocol._receive

    def begin(connection: BoundedProtocol, data: bytes) -> None:
        turns[len(turns)] = 0
        parse(connection, data)

    def count(connection: BoundedProtocol, data: bytes) -> None:
        turns[len(turns) - 1] += 1
        receive(connection, data)

    monkeypatch.setattr(BoundedProtocol, "_parse", begin)
    monkeypatch.setattr(BoundedProtocol, "_receive", count)
    head = b"POST /v1/tasks/cancel HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\nconnection: close\r\n"
    with server.open() as connection:
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in json.dumps({"ids": ["x" * 100] * 200}).encode())
        connection.sendall(head + b"content-type: application/json\r\n\r\n" + chunks + b"0\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")
    assert sum(turns.values()) > 20
    assert max(turns.values()) <= protocol._PIECES


# Slow and odd clients -----------------------------------------------------------------------------------------


def test_a_body_that_drips_is_cut_at_the_deadline_of_the_whole_request(run_server: RunServer) -> None:
    with run_server(body_timeout=0.3) as server, server.open() as connection:
        connection.sendall(POST % (b"/v1/tasks", 1000))
        cut = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not cut.wait(0.02):
                    connection.sendall(b" ")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            assert server.get("/healthz") == {"status": "ok"}  # others are served meanwhile
            head = connection.recv(65536)
        finally:
            cut.set()
            dripping.join()
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"application/problem+json" in head


def test_a_head_that_never_ends_is_cut(run_server: RunServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT", 0.3)
    with run_server() as server, server.open() as silent, server.open() as slow, server.open() as second:
        slow.sendall(b"POST /v1/tasks HTTP/1.1\r\nhost: loc")
        second.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\nGET /he")
        assert read_all(silent) == b""
        assert read_all(slow) == b""
        assert read_all(second).startswith(b"HTTP/1.1 200 OK")


def test_an_answer_that_is_not_read_is_not_kept_for_ever(
    run_server: RunServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "STALL_TIMEOUT", 0.3)
    with run_server() as server, server.open() as connection:
        for n in range(20):  # more than the kernel keeps for a connection
            server.post("/v1/tasks", {"tasks": [{"kind": "big", "id": f"big-{n}", "payload": "x" * 1_000_000}]})
        connection.sendall(request("/v1/claims", claim("big", wait=0, limit=20)))
        assert connection.recv(1)
        eventually(lambda: not server.connections)


def test_answers_that_are_not_read_have_a_room_together(run_server: RunServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list has megabytes of values: clients that read none of them filled the memory."""
    monkeypatch.setattr(sending, "_TOGETHER", 2_000_000)
    tags = [f"{n:064}" for n in range(20)]
    with run_server() as server, contextlib.ExitStack() as opened:
        server.post("/v1/tasks", {"tasks": [{"kind": "tagged", "tags": tags} for _ in range(1000)]})
        for _ in range(3):
            connection = opened.enter_context(server.open())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            connection.sendall(b"GET /v1/tasks?limit=1000 HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20)
        eventually(lambda: server.call("GET", "/v1/tasks?limit=1").status == 429)
        assert server.call("GET", "/healthz").status == 200
        assert server.call("POST", "/v1/tasks/cancel", {"ids": ["nobody"]}).status == 200
        opened.close()
        eventually(lambda: server.call("GET", "/v1/tasks?limit=1").status == 200)


def test_an_answer_that_drips_is_cut_and_others_are_granted_again(
    run_server: RunServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read all the time, so its buffer never stalls; the claims of others find no room as long as it lasts."""
    monkeypatch.setattr(protocol, "STALL_TIMEOUT", 3600.0)
    monkeypatch.setattr(sending, "_TOGETHER", 1_000_000)
    monkeypatch.setattr(sending, "_GRACE", 0.3)
    monkeypatch.setattr(sending, "_SLOWEST", 1e12)
    monkeypatch.setattr(sending, "_PAUSE", 0.01)
    ended = threading.Event()

    def drip(connection: socket.socket) -> None:
        while not ended.wait(0.02) and connection.recv(100):
            pass

    with run_server() as server, server.open() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        for n in range(7):
            server.post("/v1/tasks", {"tasks": [{"kind": "big", "id": f"big-{n}", "payload": "x" * 1_000_000}]})
        server.post("/v1/tasks", {"tasks": [{"kind": "small", "id": "small"}]})
        connection.sendall(request("/v1/claims", claim("big", wait=0, limit=7)))
        assert connection.recv(1)
        dripping = threading.Thread(target=drip, args=[connection])
        dripping.start()
        try:
            eventually(lambda: server.call("POST", "/v1/claims", claim("small", wait=0)).status == 200)
        finally:
            ended.set()
            dripping.join()
        assert len(read_all(connection)) < 6_000_000


@pytest.mark.parametrize("size", [64 * 1024, 1024**2, 8 * 1024**2, 16 * 1024**2])
def test_an_answer_has_the_time_that_a_bad_line_takes(size: int) -> None:
    assert 1.5 * size / 64_000 < sending._time_for(size) < 600


@pytest.mark.parametrize("filler", [b"x: y\r\n", b"x"], ids=["many headers", "a long one"])
def test_a_head_that_grows_too_big_is_431(server: Running, filler: bytes) -> None:
    start = b"GET /healthz HTTP/1.1\r\n"
    head = start + filler * (protocol.MAX_HEAD // len(filler))
    with server.open() as connection:
        # One byte too many and no more: what it has not read would make the close a RST, which may overtake the answer.
        connection.sendall(head[: protocol.MAX_HEAD + 1])
        assert read_all(connection).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/tasks HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/tasks HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"POST /v1/tasks HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ],
)
def test_what_is_no_http_is_400_and_a_problem_document_all_the_same(server: Running, data: bytes) -> None:
    with server.open() as connection:
        connection.sendall(data)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"application/problem+json" in answer


@pytest.mark.parametrize("field", [b"content-type: application/json", b"host: evil.example", b"origin: http://evil"])
def test_what_stands_behind_a_chunked_body_is_no_header(server: Running, field: bytes) -> None:
    has_type = b"" if b"content-type" in field else b"content-type: application/json\r\n"
    head = b"POST /v1/tasks/ended HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\nconnection: close\r\n"
    with server.open() as connection:
        connection.sendall(head + has_type + b'\r\nb\r\n{"ids":["a"\r\n2\r\n]}\r\n0\r\n' + field + b"\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 200 " if has_type else b"HTTP/1.1 415 ")


def test_a_client_that_breaks_off_in_its_body_troubles_nobody(server: Running) -> None:
    with server.open() as connection:
        connection.sendall(POST % (b"/v1/tasks", 1000) + b'{"tasks":')
    assert server.get("/healthz") == {"status": "ok"}


def test_a_body_is_asked_for_only_where_it_would_be_read(server: Running) -> None:
    head = (POST % (b"/v1/tasks", 9_000_000)).replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n")
    with server.open() as connection:
        connection.sendall(head)
        assert read_all(connection).startswith(b"HTTP/1.1 413 ")
