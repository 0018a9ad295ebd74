"""Rows about requests: the largest legal ones, refused ones, and what no client sends, beside heartbeats."""

import json
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from random import Random
from threading import Event
from typing import Any

from harness.chaos.batches import batches
from harness.chaos.calls import MEGABYTES, SLOWEST, call, claim, encoded, loaded, peak
from harness.chaos.scenarios import scenario
from harness.chaos.streams import stream
from harness.chaos.world import World
from leasekit.wire import MAX_BATCH, MAX_BODY, MAX_KINDS, MAX_NODES, MAX_SUCCESSORS

SENDERS = 4
SECONDS = 3.0  # for which each kind of request is sent
STREAMS = 60
CLIENTS = 24  # that make up batches

Request = tuple[str, bytes]


@scenario(35, "worst-requests", faults=("load",), alone=True)
def worst_requests(world: World) -> None:
    """The worst requests of each operation, from four clients at once: heartbeats beside them stay fast enough."""
    server, port, beat = loaded(world)
    for name, make in _REQUESTS.items():
        requests, senders, answers = make(port), _SENDERS.get(name, SENDERS), list[int]()
        loads = [partial(_send, port, [*requests[first:], *requests[:first]], answers) for first in range(senders)]
        slowest = _slowest_beat(port, beat, *loads)
        print(f"      {name:<34} slowest heartbeat {slowest:6.3f} s, {len(answers):>4} answers {sorted(set(answers))}")
        assert slowest < SLOWEST, f"{name}: a heartbeat took {slowest:.1f} s"
        world.fault("load", target=name)
    assert server.stop() == 0


@scenario(35, "odd-streams", faults=("load",), alone=True)
def odd_streams(world: World) -> None:
    """Streams of what no client sends, on many connections: heartbeats stay fast enough, and the memory bounded."""
    server, port, beat = loaded(world)
    for seed in range(STREAMS):
        connections, reads = Random(seed).choice((1, 4, 30, 200)), seed % 2 == 0
        slowest = _slowest_beat(port, beat, partial(_pour, port, seed, connections, reads), seconds=1.0)
        megabytes = peak(server)
        print(f"      stream {seed:<3} x {connections:<4} slowest heartbeat {slowest:6.3f} s, at most {megabytes} MB")
        assert slowest < SLOWEST, f"stream {seed}: a heartbeat took {slowest:.1f} s"
        assert megabytes < MEGABYTES, f"stream {seed}: the server has {megabytes} MB"
        world.fault("load", target=str(seed))
    assert server.stop() == 0


@scenario(35, "odd-batches", faults=("load",), alone=True)
def odd_batches(world: World) -> None:
    """Batches of odd shapes from four clients at once: heartbeats stay fast enough, and each is answered or refused."""
    _converse_beside(world, "loaded.db")


@scenario(35, "odd-batches-on-postgresql", faults=("load",), service="postgresql", alone=True)
def odd_batches_on_postgresql(world: World) -> None:
    """The same with a database that is new: nothing has counted the rows of its tables."""
    _converse_beside(world, world.database.create("loaded"))


def _converse_beside(world: World, store: str) -> None:
    server, port, beat = loaded(world, store)
    for first in range(0, CLIENTS, SENDERS):
        statuses = Counter[int]()
        loads = [partial(_converse, port, seed, statuses) for seed in range(first, first + SENDERS)]
        slowest = _slowest_beat(port, beat, *loads, seconds=10.0)
        print(f"      clients {first:<3} slowest heartbeat {slowest:6.3f} s, answers {dict(sorted(statuses.items()))}")
        assert slowest < SLOWEST, f"clients {first}: a heartbeat took {slowest:.1f} s"
        assert statuses.keys() <= {200, 409, 422, 429}
        assert statuses[200] > 0
        world.fault("load", target=str(first))
    assert peak(server) < MEGABYTES
    assert server.stop() == 0


def _converse(port: int, seed: int, statuses: "Counter[int]", over: Event) -> None:
    """Send batches, each made up with the answer to the one before."""
    talk, answer = batches(Random(seed), f"odd-{seed}"), None
    method, path, body = next(talk)
    while not over.is_set():
        status, raw = call(port, path, b"" if body is None else encoded(**body), method=method)
        statuses[status] += 1
        answer = json.loads(raw) if status == 200 else None
        method, path, body = talk.send(answer)


def _slowest_beat(port: int, beat: bytes, *loads: Callable[[Event], None], seconds: float = SECONDS) -> float:
    """Run these loads beside heartbeats; return the seconds that the slowest heartbeat took."""
    over, slowest = Event(), 0.0
    with ThreadPoolExecutor(len(loads)) as threads:
        loading = [threads.submit(load, over) for load in loads]
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            began_at = time.monotonic()
            status, _ = call(port, "/v1/heartbeats", beat)
            slowest = max(slowest, time.monotonic() - began_at)
            assert status == 200
            time.sleep(0.02)
        over.set()
        for load in loading:
            load.result(120)
    return slowest


def _send(port: int, requests: Sequence[Request], answers: list[int], over: Event) -> None:
    """Send these requests again and again, at least one of them."""
    while not (over.is_set() and answers):
        for request in requests:
            answers.append(call(port, *request)[0])
            if over.is_set():
                break


def _pour(port: int, seed: int, connections: int, reads: bool, over: Event) -> None:  # noqa: FBT001
    """Send a stream on so many connections; one that is cut is opened anew."""
    with selectors.DefaultSelector() as ready, ExitStack() as opened:

        def begin() -> None:
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            connection.settimeout(0)
            ready.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, _Left(stream(Random(seed))))

        for _ in range(connections):
            begin()
        while not over.is_set():
            for key, events in ready.select(0.05):
                connection: Any = key.fileobj
                try:
                    if reads and events & selectors.EVENT_READ and not connection.recv(65_536):
                        raise ConnectionResetError
                    if events & selectors.EVENT_WRITE:
                        key.data.send(connection)
                except OSError:
                    ready.unregister(connection)
                    connection.close()
                    begin()


class _Left:
    """Part of a stream that is not sent yet."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._piece = b""

    def send(self, connection: socket.socket) -> None:
        self._piece = self._piece or next(self._pieces)
        with suppress(BlockingIOError):
            self._piece = self._piece[connection.send(self._piece) :]


def _filled(before: bytes, item: bytes, after: bytes) -> bytes:
    count = (MAX_BODY - len(before) - len(after)) // (len(item) + 1)
    return before + b",".join([item] * count) + after


def _repeats(port: int) -> Sequence[Request]:
    call(port, "/v1/tasks", encoded(tasks=[{"kind": "big", "id": "big", "payload": list(range(150_000))}]))
    ids = ["".join(f"\\u{ord(c):04x}" if n >> at & 1 else c for at, c in enumerate("big")) for n in range(8)]
    items = ",".join(f'{{"kind":"big","id":"{ids[n % 8]}","payload":{n}}}' for n in range(100))
    return [("/v1/tasks", f'{{"tasks":[{items}]}}'.encode())]


def _brackets(port: int) -> Sequence[Request]:
    legal = b"[" + b",".join([b"[]"] * (MAX_NODES - 1)) + b"]"
    task = b'{"kind":"brackets","payload":%s}'
    most = b'{"tasks":[%s]}' % b",".join([task % legal] * 2)
    return [("/v1/tasks", most), ("/v1/tasks", _filled(b'{"tasks":[{"kind":"a","payload":[', b"[]", b"]}]}"))]


def _long_lists(port: int) -> Sequence[Request]:
    return [
        ("/v1/tasks/cancel", _filled(b'{"ids":[', b'"a"', b"]}")),
        ("/v1/claims", _filled(b'{"worker":"w","claim_id":"c","kinds":[', b'"a"', b"]}")),
        ("/v1/tasks", _filled(b'{"tasks":[', b'{"kind":"a"}', b"]}")),
        ("/v1/heartbeats", _filled(b'{"worker":"w","beats":[', b'{"id":"a","token":"t"}', b"]}")),
    ]


def _successors(port: int) -> Sequence[Request]:
    call(port, "/v1/tasks", encoded(tasks=[{"kind": "ends"}] * 200))
    then = [{"kind": "next", "payload": {"number": n}} for n in range(MAX_SUCCESSORS)]
    return [
        ("/v1/results", encoded(worker="w", results=[dict(lease, outcome="success", then=then)]))
        for lease in ({"id": task["id"], "token": task["token"]} for task in claim(port, "ends", 200))
    ]


def _numbers(port: int) -> Sequence[Request]:
    numbers = ",".join(["1e308"] * 150_000)
    return [
        ("/v1/tasks", f'{{"tasks":[{",".join([f"""{{"kind":"numbers","payload":[{numbers}]}}"""] * 7)}]}}'.encode())
    ]


def _claims_of_own_kinds(port: int) -> Sequence[Request]:
    return [
        ("/v1/claims", encoded(worker="w", claim_id=f"o{n}", wait=0, kinds=[f"{n}-{m}-{'x' * 50}" for m in range(100)]))
        for n in range(4000)
    ]


def _big_payloads(port: int) -> Sequence[Request]:
    payload = "x" * (MAX_BODY // 8 - 100)
    return [("/v1/tasks", encoded(tasks=[{"kind": "big", "payload": payload}] * 7))]


def _polls(port: int) -> Sequence[Request]:
    return [
        ("/v1/claims", encoded(worker="w", claim_id=f"p{n}", wait=0.2, kinds=[f"{n}-{m}" for m in range(MAX_KINDS)]))
        for n in range(400)
    ]


def _late_results(port: int) -> Sequence[Request]:
    results = [{"id": "big", "token": f"t{n}", "outcome": "retry"} for n in range(MAX_BATCH)]
    return [("/v1/results", encoded(worker="w", results=results))]


def _big_answers(port: int) -> Sequence[Request]:
    payload = "x" * (MAX_BODY // 8 - 100)
    for _ in range(2):
        call(port, "/v1/tasks", encoded(tasks=[{"kind": "answered", "payload": payload}] * 7))
    return [("/v1/claims", encoded(worker="w", claim_id="again", limit=MAX_BATCH, kinds=["answered"]))]


_REQUESTS: dict[str, Callable[[int], Sequence[Request]]] = {
    "repeats of a big task": _repeats,
    "brackets": _brackets,
    "lists that are too long": _long_lists,
    "successors": _successors,
    "numbers at the end of the range": _numbers,
    "claims of ever new kinds": _claims_of_own_kinds,
    "big payloads": _big_payloads,
    "polls of many kinds": _polls,
    "results of nobody": _late_results,
    "repeats of a claim's big answer": _big_answers,
}
_SENDERS = {"repeats of a claim's big answer": 200, "claims of ever new kinds": 1000}
