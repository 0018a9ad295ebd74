"""More than the store can write: new work is told to come later, and those who hold leases keep them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from leasekit.server import commit, engine
from leasekit.server.request_classes import CLAIM, HEARTBEAT, SCHEDULE
from tests.server.http.conftest import Running, RunServer
from tests.waiting import eventually

ROOM = 2  # items that may wait, of claims and of schedules


class Slowly:
    """A store that writes one request when it is told to."""

    def __init__(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self._permits = threading.Semaphore(0)
        self._really = server.engine._store.transaction
        monkeypatch.setattr(commit, "_COMMIT", 1)
        monkeypatch.setattr(server.engine._store, "transaction", self._transaction)

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        self.reached.set()
        self._permits.acquire()
        with self._really() as tx:
            yield tx

    def write(self, count: int = 1) -> None:
        self._permits.release(count)


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(engine, "_PERIOD", 3600.0)  # the consumer's transactions would come in between
    ranks = [CLAIM, SCHEDULE]
    capacities = [rank.capacity for rank in ranks]
    for rank in ranks:
        object.__setattr__(rank, "capacity", ROOM)
    weight = HEARTBEAT.weight
    object.__setattr__(HEARTBEAT, "weight", 1.0)  # one in a transaction, as of the others
    yield
    object.__setattr__(HEARTBEAT, "weight", weight)
    for rank, capacity in zip(ranks, capacities, strict=True):
        object.__setattr__(rank, "capacity", capacity)


class Callers:
    """Requests that wait for their answers, each in a thread; `answered` has their paths in order."""

    def __init__(self, server: Running) -> None:
        self._server = server
        self._threads: list[threading.Thread] = []
        self.answered: list[tuple[str, int]] = []

    def post(self, path: str, body: Any) -> None:
        def call() -> None:
            self.answered.append((path, self._server.call("POST", path, body).status))

        self._threads.append(threading.Thread(target=call))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(30)


def beat(task: Any) -> Any:
    return {"worker": "w", "beats": [{"id": task["id"], "token": task["token"]}]}


def claim(name: str) -> Any:
    return {"worker": "w", "kinds": ["none"], "claim_id": name}


NEW = {"tasks": [{"kind": "late"}]}


@pytest.mark.usefixtures("little_room")
def test_beats_and_results_pass_while_claims_and_schedules_are_told_to_come_later(
    run_server: RunServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_server() as server:
        server.post("/v1/tasks", {"tasks": [{"kind": "a", "id": "a1"}, {"kind": "a", "id": "a2"}]})
        held = server.post("/v1/claims", {"worker": "w", "kinds": ["a"], "limit": 2, "claim_id": "c"})["tasks"]
        store, callers = Slowly(server, monkeypatch), Callers(server)
        try:
            callers.post("/v1/tasks", NEW)  # the writer has this one, and is held up
            assert store.reached.wait(30)
            for n in range(ROOM):
                callers.post("/v1/tasks", NEW)
                callers.post("/v1/claims", claim(f"c{n}"))
            eventually(
                lambda: (
                    (server.engine.commit.backlog["schedules"], server.engine.commit.backlog["claims"]) == (ROOM, ROOM)
                )
            )
            for path, body in [("/v1/tasks", NEW), ("/v1/claims", claim("one-more"))]:
                answer = server.call("POST", path, body)
                assert answer.status == 429
                assert int(answer.headers["retry-after"]) >= 1
            done = {"id": held[1]["id"], "token": held[1]["token"], "outcome": "success"}
            callers.post("/v1/results", {"worker": "w", "results": [done]})
            for _ in range(2 * ROOM):
                callers.post("/v1/heartbeats", beat(held[0]))
            eventually(
                lambda: (
                    (server.engine.commit.backlog["heartbeats"], server.engine.commit.backlog["results"])
                    == (2 * ROOM, 1)
                )
            )
            monkeypatch.setattr(commit, "_PASSED", 1000)  # so that the order of classes is that of the answers
            for number in range(1 + 2 * ROOM + 1 + 2 * ROOM):
                store.write()
                eventually(lambda number=number: len(callers.answered) > number)  # type: ignore[misc]
        finally:
            store.write(1000)
            callers.join()
    assert [path for path, _ in callers.answered] == [
        "/v1/tasks",
        *["/v1/heartbeats"] * 2 * ROOM,
        "/v1/results",
        *["/v1/claims"] * ROOM,
        *["/v1/tasks"] * ROOM,
    ]
    assert {status for _, status in callers.answered} == {200}
