"""The streams of open pages: pulses, samples of events, and their end."""

import socket
import time
from contextlib import ExitStack
from datetime import UTC, datetime

import pytest

from leasekit.server.console import streams
from leasekit.server.unit_of_work import TaskEvent
from tests.server.console.conftest import Site
from tests.server.http.conftest import PATIENCE, run
from tests.waiting import eventually


def follow(site: Site, path: str) -> socket.socket:
    """Open a stream, and wait for its head."""
    connection = site.server.open()
    connection.sendall(f"GET /console/{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.recv(1)
    assert b"200 OK" in head
    return connection


def until(connection: socket.socket, part: bytes) -> bytes:
    """Read until this has come."""
    data = b""
    while part not in data:
        chunk = connection.recv(65536)
        assert chunk, data
        data += chunk
    return data


def publish(site: Site, count: int, *, kind: str = "k") -> None:
    events = [TaskEvent(event="scheduled", at=datetime.now(UTC), id=f"{kind}{n}", kind=kind) for n in range(count)]
    site.server.loop.call_soon_threadsafe(site.server.engine.feed.hear, events)


def test_a_pulse_comes_after_a_transaction(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_BEAT", 0.01)
    with follow(site, "pulse") as connection:
        site.schedule("k")
        assert b"event: pulse\n" in until(connection, b"pulse")


def test_events_come_as_they_happen(site: Site) -> None:
    with follow(site, "events?kind=seen") as connection:
        site.schedule("unseen")
        task_id = site.schedule("seen")
        data = until(connection, task_id.encode())
        assert b"unseen" not in data


def test_more_events_than_anybody_reads_are_counted(site: Site) -> None:
    with follow(site, "events?kind=flood") as connection:
        publish(site, 500, kind="flood")
        data = until(connection, b"flood499")
        assert b'event: skipped\ndata: {"count":470}\n' in data
        assert data.count(b"event: scheduled") == 30


def test_a_page_that_comes_back_gets_what_happened_meanwhile(site: Site) -> None:
    with follow(site, "events?kind=back") as connection:
        publish(site, 1, kind="back")
        data = until(connection, b"back0")
    last = data.partition(b"id: ")[2].partition(b"\n")[0].decode()
    publish(site, 2, kind="back")
    with follow(site, f"events?kind=back&after={last}") as connection:
        data = until(connection, b"back1")
        assert b"missed" not in data
    with follow(site, "events?kind=back&after=unknown-1") as connection:
        until(connection, b"event: missed")


def test_a_server_with_fifty_streams_stops_at_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    with ExitStack() as opened:
        with run(f"sqlite:///{tmp_path_factory.mktemp('stop')}/tasks.db", console="on") as server:
            site = Site(server)
            for n in range(50):
                opened.enter_context(follow(site, "events" if n % 2 else "pulse"))
            begun = time.monotonic()
        assert time.monotonic() - begun < PATIENCE / 2


def test_a_reader_that_has_left_is_forgotten(site: Site) -> None:
    before = len(site.server.engine.feed)
    with follow(site, "events"):
        eventually(lambda: len(site.server.engine.feed) == before + 1)
    publish(site, 1)
    eventually(lambda: len(site.server.engine.feed) == before)
