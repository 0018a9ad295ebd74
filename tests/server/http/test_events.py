"""`/v1/events`: everything that happens is told, in order, to readers who may go, come back, or be too slow."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest

from leasekit.errors import Throttled
from leasekit.server import queries
from leasekit.server.access import KindPatterns
from leasekit.server.engine import Engine
from leasekit.server.fair_bound import CALLER
from leasekit.server.http import events
from leasekit.server.http.events import Chain, Feed
from leasekit.server.store.memory.store import MemoryStore
from leasekit.server.unit_of_work import TaskEvent
from leasekit.task import NewTask
from tests.server.http.conftest import Running, RunServer
from tests.waiting import eventually

SECRET = "canary-7f3a"
AT = datetime(2026, 1, 1, tzinfo=UTC)


class Event(NamedTuple):
    id: str
    name: str
    data: dict[str, Any]


class Reader:
    """One who follows the events over a connection of its own."""

    def __init__(self, server: Running, query: str = "", **headers: str) -> None:
        self.connection = server.open()
        lines = [f"GET /v1/events{query} HTTP/1.1", "host: localhost", *(f"{k}: {v}" for k, v in headers.items())]
        self.connection.sendall("\r\n".join([*lines, "", ""]).encode())
        self._file = self.connection.makefile("rb")
        self.status = int(self._file.readline().split()[1])
        self.headers = {}
        while (line := self._file.readline()) != b"\r\n":
            name, _, value = line.decode().partition(":")
            self.headers[name.lower()] = value.strip()
        self._lines = self._body()
        if self.status == 200:
            assert next(self._lines) == "retry: 1000"

    def _body(self) -> Iterator[str]:
        pending = b""
        while size := int(self._file.readline() or b"0", 16):
            pending += self._file.read(size)
            self._file.readline()
            *lines, pending = pending.split(b"\n")
            yield from (line.decode() for line in lines)

    def next(self) -> Event:
        """The next event; comments are no events."""
        fields: dict[str, str] = {}
        for line in self._lines:
            if line.startswith(":"):
                continue
            if not line and fields:
                return Event(fields["id"], fields["event"], json.loads(fields["data"]))
            name, _, value = line.partition(": ")
            if value:
                fields[name] = value
        raise EOFError

    def names(self, count: int) -> list[str]:
        return [self.next().name for _ in range(count)]

    def has_ended(self) -> bool:
        return not [line for line in self._lines if line and not line.startswith(":")]

    def close(self) -> None:
        self._file.close()
        self.connection.close()


def schedule(server: Running, kind: str, *ids: str, **options: Any) -> None:
    server.post("/v1/tasks", {"tasks": [{"kind": kind, "id": task_id, **options} for task_id in ids]})


def claim(server: Running, kind: str, worker: str = "w") -> dict[str, Any]:
    body = {"worker": worker, "kinds": [kind], "claim_id": f"{kind}-{worker}"}
    task: dict[str, Any]
    (task,) = server.post("/v1/claims", body)["tasks"]
    return task


def settle(server: Running, task: dict[str, Any], outcome: str = "success", **more: Any) -> None:
    result = {"id": task["id"], "token": task["token"], "outcome": outcome, **more}
    server.post("/v1/results", {"worker": "w", "results": [result]})


def test_a_life_is_told_from_beginning_to_end(server: Running) -> None:
    with closing(Reader(server, "?kind=life")) as reader:
        assert reader.headers["content-type"].startswith("text/event-stream")
        assert reader.headers["cache-control"] == "no-store"
        schedule(server, "life", "l1")
        task = claim(server, "life")
        server.post("/v1/heartbeats", {"worker": "w", "beats": [{"id": "l1", "token": task["token"]}] * 2})
        settle(server, task)
        told = [reader.next() for _ in range(4)]
    assert [event.name for event in told] == ["scheduled", "claimed", "started", "settled"]
    assert [event.data["status"] for event in told] == ["new", "claimed", "processing", "success"]
    assert [event.data.get("worker") for event in told] == [None, "w", "w", "w"]
    assert {event.data["id"] for event in told} == {"l1"}
    assert {event.data["kind"] for event in told} == {"life"}
    assert told[3].data["outcome"] == "success"
    assert all(datetime.fromisoformat(event.data["at"]).tzinfo for event in told)


@pytest.mark.anyio
async def test_foreign_tasks_in_a_chain_push_out_none_of_its_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "_CHAIN", 3)
    async with Engine(MemoryStore()) as engine:
        await engine.schedule([NewTask(kind="own", id="first"), NewTask(kind="own", id="child", parent="first")])
        await engine.schedule([NewTask(kind="foreign", parent="first") for _ in range(5)])
        chain = Chain("first")
        await engine.queries.know_chain(chain, KindPatterns(["own"]))
    assert chain.ids == {"first", "child"}


def test_a_chain_is_told_of_by_its_root(server: Running) -> None:
    schedule(server, "chain", "c1")
    schedule(server, "chain-after", "c2", after=["c1"])
    with closing(Reader(server, "?root=c1")) as reader:
        schedule(server, "chain", "alone")
        schedule(server, "chain-more", "c3", parent="c2")
        then = [{"kind": "chain-then", "id": "c4"}]
        server.post("/v1/tasks/cancel", {"ids": ["alone"]})
        settle(server, claim(server, "chain"), then=then)
        schedule(server, "chain-more", "c5", parent="c4")
        told = [reader.next() for _ in range(5)]
    assert [(event.name, event.data["id"]) for event in told] == [
        ("scheduled", "c3"), ("claimed", "c1"), ("settled", "c1"), ("scheduled", "c4"), ("scheduled", "c5"),
    ]  # fmt: skip
    assert [event.data.get("root") for event in told] == ["c1", None, None, "c1", "c1"]


def test_nothing_of_what_is_in_a_task_is_told(server: Running) -> None:
    with closing(Reader(server, "?kind=secret")) as reader:
        schedule(server, "secret", "s1", payload=SECRET, dedupe_key=SECRET)
        task = claim(server, "secret")
        beat = {"id": "s1", "token": task["token"], "progress": SECRET}
        server.post("/v1/heartbeats", {"worker": "w", "beats": [beat]})
        settle(server, task, "fatal", error=SECRET, result=SECRET)
        told = json.dumps([reader.next() for _ in range(4)])
    assert SECRET not in told
    assert task["token"][:8] not in told


def test_cancels_are_told(server: Running) -> None:
    with closing(Reader(server, "?kind=cancels")) as reader:
        schedule(server, "cancels", "runs")
        task = claim(server, "cancels")
        schedule(server, "cancels", "waits")
        server.post("/v1/tasks/cancel", {"ids": ["runs", "waits"]})
        server.post("/v1/tasks/cancel", {"ids": ["runs", "waits"]})
        settle(server, task, "cancelled")
        assert reader.names(6) == ["scheduled", "claimed", "scheduled", "cancel_requested", "cancelled", "settled"]


def test_a_lease_that_runs_out_is_told(server: Running) -> None:
    with closing(Reader(server, "?kind=expires")) as reader:
        schedule(server, "expires", "e1", claim_timeout=2)
        claim(server, "expires")
        told = [reader.next() for _ in range(3)]
    assert told[2].name == "expired"
    assert told[2].data["status"] == "enqueued"
    assert told[2].data["worker"] == "w"


def test_a_worker_that_comes_is_told(server: Running) -> None:
    with closing(Reader(server)) as reader:
        server.post("/v1/claims", {"worker": "newcomer", "kinds": ["nothing"], "claim_id": "c"})
        event = reader.next()
        while event.data.get("worker") != "newcomer":
            event = reader.next()
    assert event.name == "joined"
    assert event.data.keys() == {"event", "at", "worker"}


def test_one_may_follow_one_task(server: Running) -> None:
    with closing(Reader(server, "?task=f2")) as reader:
        schedule(server, "one", "f1", "f2", "f3")
        schedule(server, "one", "f4")
        server.post("/v1/tasks/cancel", {"ids": ["f1", "f2"]})
        assert [reader.next().data["id"] for _ in range(2)] == ["f2", "f2"]


def test_what_was_refused_or_changed_nothing_is_not_told(server: Running) -> None:
    with closing(Reader(server, "?kind=again")) as reader:
        schedule(server, "again", "a1")
        schedule(server, "again", "a1")
        task = claim(server, "again")
        settle(server, {"id": "a1", "token": "stale"})
        settle(server, task)
        settle(server, task)
        schedule(server, "again", "a2")
        assert reader.names(4) == ["scheduled", "claimed", "settled", "scheduled"]


def test_one_who_comes_back_gets_what_happened_meanwhile(server: Running) -> None:
    with closing(Reader(server, "?kind=back")) as reader:
        schedule(server, "back", "b1", "b2")
        first = reader.next()
    schedule(server, "back", "b3")
    with closing(Reader(server, "?kind=back", **{"Last-Event-ID": first.id})) as reader:
        assert [reader.next().data["id"] for _ in range(2)] == ["b2", "b3"]


@pytest.mark.parametrize("place", ["nonsense", "other-1", "-", "ffffffff-99999999999999999999"])
def test_one_whose_place_is_not_known_is_told_that_it_missed_something(server: Running, place: str) -> None:
    with closing(Reader(server, **{"Last-Event-ID": place})) as reader:
        assert reader.next().name == "missed"


def test_a_parameter_that_does_not_fit_is_refused(server: Running) -> None:
    assert server.call("GET", "/v1/events?kind=a/b").status == 422


def test_a_stream_ends_when_the_server_stops(run_server: RunServer) -> None:
    with run_server() as server:
        reader = Reader(server)
    assert reader.has_ended()
    reader.close()


def test_who_goes_is_forgotten(run_server: RunServer) -> None:
    with run_server() as server:
        reader = Reader(server)
        eventually(lambda: len(server.engine.feed) == 1)
        reader.connection.shutdown(socket.SHUT_RDWR)
        reader.close()
        eventually(lambda: len(server.engine.feed) == 0)


def test_nothing_is_noted_before_anybody_has_asked(run_server: RunServer) -> None:
    with run_server() as server:
        schedule(server, "quiet", "q1")
        assert not server.engine.feed.wanted
        with closing(Reader(server)) as reader:
            schedule(server, "quiet", "q2")
            assert reader.next().data["id"] == "q2"


def test_one_who_does_not_read_holds_up_nobody(run_server: RunServer) -> None:
    with run_server() as server, closing(Reader(server)), closing(Reader(server, "?kind=last")) as other:
        for batch in range(30):  # more than sockets and ring hold
            schedule(server, "many", *(f"{batch}-{n}-{'x' * 100}" for n in range(1000)))
        schedule(server, "last", "the-last")
        assert other.next().data["id"] == "the-last"


def test_the_metrics_are_served(server: Running) -> None:
    answer = server.call("GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain")
    assert server.call("GET", "/nowhere/at-all").status == 404
    text = server.call("GET", "/metrics").raw.decode()
    assert 'leasekit_http_requests_total{method="GET",route="/metrics",status="200"}' in text
    assert 'leasekit_http_requests_total{method="GET",route="other",status="404"}' in text
    assert "at-all" not in text


def test_routes_are_counted_by_their_template(server: Running) -> None:
    schedule(server, "template", "t-1")
    server.get("/v1/tasks/t-1")
    text = server.call("GET", "/metrics").raw.decode()
    assert 'route="/v1/tasks/{task_id}"' in text
    assert "t-1" not in text


# The ring alone -------------------------------------------------------------------------------------------------


class Hand:
    now = 0.0  # a clock that is turned by hand


def happened(count: int, kind: str = "k") -> list[TaskEvent]:
    return [TaskEvent(event="scheduled", at=AT, id=str(n), kind=kind) for n in range(count)]


async def told(stream: AsyncGenerator[bytes]) -> list[str]:
    """The events of the next chunk."""
    return values(await anext(stream), "event")


def values(chunk: bytes, name: str) -> list[str]:
    """The values of a field of the events in a chunk."""
    return [line.removeprefix(f"{name}: ") for line in chunk.decode().splitlines() if line.startswith(f"{name}: ")]


@pytest.mark.anyio
async def test_a_reader_that_the_ring_has_passed_is_dropped_and_told_when_it_comes_back() -> None:
    feed = Feed(size=10)
    stream = feed.follow()
    await anext(stream)
    feed.publish(happened(1))
    (first,) = values(await anext(stream), "id")
    feed.publish(happened(12))
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert feed.dropped == 1
    assert len(feed) == 0
    again = feed.follow(after=first)
    await anext(again)
    assert await told(again) == ["missed"]
    assert await told(again) == ["scheduled"] * 10
    await again.aclose()


@pytest.mark.anyio
async def test_silence_is_broken_by_a_comment() -> None:
    feed = Feed(heartbeat=0.001)
    stream = feed.follow()
    await anext(stream)
    assert await anext(stream) == b":\n\n"
    await stream.aclose()


@pytest.mark.anyio
async def test_a_burst_is_written_in_chunks() -> None:
    feed = Feed()
    stream = feed.follow()
    await anext(stream)
    feed.publish(happened(500))
    assert [len(await told(stream)) for _ in range(3)] == [200, 200, 100]
    await stream.aclose()


@pytest.mark.anyio
async def test_an_event_is_encoded_once_for_all_readers_until_another_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded: list[object] = []
    encode = events._encode

    def counted(event: object) -> bytes:
        encoded.append(event)
        return encode(event)

    monkeypatch.setattr(events, "_encode", counted)
    feed = Feed(size=4)
    streams = [feed.follow() for _ in range(3)]
    for stream in streams:
        await anext(stream)
    for _ in range(3):  # the ring is gone through several times
        feed.publish(happened(3))
        first, *others = [await anext(stream) for stream in streams]
        assert first.count(b"data: ") == 3
        assert others == [first, first]
    assert len(encoded) == 9
    for stream in streams:
        await stream.aclose()


@pytest.mark.anyio
async def test_closing_ends_a_reader_that_waits() -> None:
    feed = Feed()
    stream = feed.follow()
    await anext(stream)
    waiting = asyncio.ensure_future(anext(stream, None))
    await asyncio.sleep(0)
    feed.close()
    assert await waiting is None


@pytest.mark.anyio
async def test_there_are_only_so_many_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_READERS", 1)
    feed = Feed()
    stream = feed.follow()
    await anext(stream)
    with pytest.raises(Throttled):
        feed.follow()
    await stream.aclose()
    feed.follow()


@pytest.mark.anyio
async def test_the_readers_of_one_token_keep_no_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_READERS", 2)
    feed = Feed()
    CALLER.set("a")
    streams = [feed.follow() for _ in range(2)]
    for stream in streams:
        await anext(stream)
    with pytest.raises(Throttled):
        feed.follow()
    CALLER.set("b")
    other = feed.follow(most=1)
    await anext(other)
    for stream in (*streams, other):
        await stream.aclose()


@pytest.mark.anyio
async def test_events_are_kept_for_a_while_for_those_who_have_gone_and_then_forgotten() -> None:
    feed = Feed(now=lambda: Hand.now)
    stream = feed.follow()
    await anext(stream)
    feed.publish(happened(2))
    *_, last = values(await anext(stream), "id")
    await stream.aclose()
    feed.look()
    assert feed.wanted
    Hand.now += 301
    feed.look()
    assert not bool(feed.wanted)
    late = feed.follow(after=last)
    await anext(late)
    assert await told(late) == ["missed"]
    await late.aclose()


@pytest.mark.anyio
async def test_a_reader_whose_stream_has_not_begun_misses_nothing() -> None:
    """The first reader of a feed that was never read: the engine may look between its request and its first chunk."""
    Hand.now = 10_000
    feed = Feed(now=lambda: Hand.now)
    stream = feed.follow()
    feed.look()
    feed.publish(happened(1))
    await anext(stream)
    assert await told(stream) == ["scheduled"]
    await stream.aclose()
