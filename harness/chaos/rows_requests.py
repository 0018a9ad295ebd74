"""Rows about requests: the largest legal ones, and refused ones, beside heartbeats."""

import json
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from threading import Event
from typing import Any

from harness.chaos.processes import wait_for
from harness.chaos.scenarios import scenario
from harness.chaos.world import World
from leasekit.wire import MAX_BATCH, MAX_BODY, MAX_KINDS, MAX_NODES, MAX_SUCCESSORS

SENDERS = 4
SECONDS = 3.0  # for which each kind of request is sent
SLOWEST = 20.0  # seconds that a heartbeat may take: a tenth of the ttl that most have

Request = tuple[str, bytes]


@scenario(35, "worst-requests", faults=("load",), alone=True)
def worst_requests(world: World) -> None:
    """The worst requests of each operation, from four clients at once: heartbeats beside them stay fast enough."""
    world.work()
    world.schedule("steady", 4)
    # A store of its own: no worker claims the tasks that are scheduled there.
    server = world.intrude("loaded", store="loaded.db")
    wait_for(lambda: "listening on" in server.said, what="the second server")
    address = re.search(r"listening on http://127\.0\.0\.1:(\d+)", server.said)
    assert address is not None
    port = int(address[1])
    _call(port, "/v1/tasks", _body(tasks=[{"kind": "beaten", "claim_timeout": 600, "heartbeat_timeout": 600}]))
    (held,) = _claim(port, "beaten", 1)
    beat = _body(worker="w", beats=[{"id": held["id"], "token": held["token"]}])
    for name, make in _REQUESTS.items():
        slowest, answers = _beside(port, beat, make(port), senders=_SENDERS.get(name, SENDERS))
        print(f"      {name:<34} slowest heartbeat {slowest:6.3f} s, {len(answers):>4} answers {sorted(set(answers))}")
        assert slowest < SLOWEST, f"{name}: a heartbeat took {slowest:.1f} s"
        world.fault("load", target=name)
    assert server.stop() == 0


def _beside(port: int, beat: bytes, requests: Sequence[Request], *, senders: int) -> tuple[float, list[int]]:
    """Send these requests again and again beside heartbeats; return the slowest heartbeat and the statuses."""
    over, answers, slowest = Event(), list[int](), 0.0

    def send(first: int) -> None:
        at = first
        while not over.is_set():
            answers.append(_call(port, *requests[at % len(requests)])[0])
            at += senders

    with ThreadPoolExecutor(senders) as threads:
        sending = [threads.submit(send, first) for first in range(senders)]
        until = time.monotonic() + SECONDS
        while time.monotonic() < until or not answers:
            began_at = time.monotonic()
            status, _ = _call(port, "/v1/heartbeats", beat)
            slowest = max(slowest, time.monotonic() - began_at)
            assert status == 200
            time.sleep(0.02)
        over.set()
        for sender in sending:
            sender.result(120)
    return slowest, answers


def _call(port: int, path: str, body: bytes) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def _claim(port: int, kind: str, limit: int) -> list[dict[str, Any]]:
    body = _body(worker="w", kinds=[kind], limit=limit, claim_id=f"{kind}-{time.monotonic_ns()}")
    tasks: list[dict[str, Any]] = json.loads(_call(port, "/v1/claims", body)[1])["tasks"]
    return tasks


def _filled(before: bytes, item: bytes, after: bytes) -> bytes:
    count = (MAX_BODY - len(before) - len(after)) // (len(item) + 1)
    return before + b",".join([item] * count) + after


def _repeats(port: int) -> Sequence[Request]:
    _call(port, "/v1/tasks", _body(tasks=[{"kind": "big", "id": "big", "payload": list(range(150_000))}]))
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
    _call(port, "/v1/tasks", _body(tasks=[{"kind": "ends"}] * 200))
    then = [{"kind": "next", "payload": {"number": n}} for n in range(MAX_SUCCESSORS)]
    return [
        ("/v1/results", _body(worker="w", results=[dict(lease, outcome="success", then=then)]))
        for lease in ({"id": task["id"], "token": task["token"]} for task in _claim(port, "ends", 200))
    ]


def _big_payloads(port: int) -> Sequence[Request]:
    payload = "x" * (MAX_BODY // 8 - 100)
    return [("/v1/tasks", _body(tasks=[{"kind": "big", "payload": payload}] * 7))]


def _polls(port: int) -> Sequence[Request]:
    return [
        ("/v1/claims", _body(worker="w", claim_id=f"p{n}", wait=0.2, kinds=[f"{n}-{m}" for m in range(MAX_KINDS)]))
        for n in range(400)
    ]


def _late_results(port: int) -> Sequence[Request]:
    results = [{"id": "big", "token": f"t{n}", "outcome": "retry"} for n in range(MAX_BATCH)]
    return [("/v1/results", _body(worker="w", results=results))]


def _big_answers(port: int) -> Sequence[Request]:
    payload = "x" * (MAX_BODY // 8 - 100)
    for _ in range(2):
        _call(port, "/v1/tasks", _body(tasks=[{"kind": "answered", "payload": payload}] * 7))
    return [("/v1/claims", _body(worker="w", claim_id="again", limit=MAX_BATCH, kinds=["answered"]))]


_REQUESTS: dict[str, Callable[[int], Sequence[Request]]] = {
    "repeats of a big task": _repeats,
    "brackets": _brackets,
    "lists that are too long": _long_lists,
    "successors": _successors,
    "big payloads": _big_payloads,
    "polls of many kinds": _polls,
    "results of nobody": _late_results,
    "repeats of a claim's big answer": _big_answers,
}
_SENDERS = {"repeats of a claim's big answer": 200}
