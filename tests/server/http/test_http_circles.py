"""Tasks that wait for one another, over HTTP: a circle is refused, and what the search for one reads is bounded."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from leasekit.server import engine
from leasekit.server.roles import circles
from leasekit.server.store.memory.view import MemoryView
from leasekit.server.store.sql.later import LaterView
from tests.server.http.conftest import Answer, Running, run

_tests = itertools.count()


class Graph:
    """Tasks of one test, with ids of their own, and what the store was asked of their waits."""

    def __init__(self, server: Running) -> None:
        self._server = server
        self._own = f"t{next(_tests)}"
        self.asked: list[int] = []
        """How many waits each statement has read since `put` was called last."""

    def name(self, short: str) -> str:
        return f"{self._own}-{short}"

    def schedule(self, after: dict[str, Sequence[str]]) -> Answer:
        self.asked.clear()
        tasks = [
            {"kind": "k", "id": self.name(task), "after": list(map(self.name, names))} for task, names in after.items()
        ]
        return self._server.call("POST", "/v1/tasks", {"tasks": tasks})

    def put(self, after: dict[str, Sequence[str]]) -> None:
        answer = self.schedule(after)
        assert answer.status == 200, answer
        assert all(task["created"] for task in answer.json["tasks"])

    def put_layers(self, count: int, *, width: int = 100) -> list[str]:
        """Schedule layers of tasks that wait for all of the layer below; return the topmost."""
        below = ["never"]
        for layer in range(count):
            names = [f"{layer}.{n}" for n in range(width)]
            self.put(dict.fromkeys(names, below))
            below = names
        return below

    def info(self, short: str) -> Any:
        return self._server.get(f"/v1/tasks/{self.name(short)}")


@pytest.fixture(scope="module")
def server(new_store: Callable[[], str]) -> Iterator[Running]:
    """A server that looks at nothing by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_PERIOD", 3600.0)
        with run(new_store()) as running:
            yield running


@pytest.fixture
def graph(server: Running, monkeypatch: pytest.MonkeyPatch) -> Graph:
    graph = Graph(server)

    def count(view: type[Any]) -> None:
        waits_of = view.waits_of

        def counted(self: Any, *args: Any, **options: Any) -> Any:
            waits = waits_of(self, *args, **options)
            graph.asked.append(len(waits))
            return waits

        monkeypatch.setattr(view, "waits_of", counted)

    count(MemoryView)
    count(LaterView)
    return graph


TOPS = [f"top{n}" for n in range(20)]


@pytest.fixture(autouse=True)
def tidy(server: Running) -> Iterator[None]:
    yield
    server.tick()  # what a test has left is not looked at in the next one


def test_what_many_awaited_tasks_wait_for_is_read_once(graph: Graph) -> None:
    below = graph.put_layers(1 + 9, width=31)
    graph.put({f"waits for {top}": [top] for top in TOPS})
    graph.put(dict.fromkeys(TOPS, below))
    assert len(graph.asked) <= 11
    assert sum(graph.asked) == 9 * 31 * 31 + 31


def test_a_search_reads_ten_thousand_waits_at_most_and_more_are_refused(graph: Graph, server: Running) -> None:
    below = graph.put_layers(3)
    graph.put({f"waits for {top}": [top] for top in TOPS})
    answer = graph.schedule({"first": [], **dict.fromkeys(TOPS, below)})
    assert len(graph.asked) <= 3
    assert sum(graph.asked) <= 10_001
    assert answer.status == 422
    (error,) = answer.json["errors"]
    assert (error["item"], error["field"]) == (1, "after")
    assert "schedule it before the tasks that wait for it" in error["detail"]
    graph.put(dict.fromkeys(["another top"], below))
    assert graph.asked == [], "no task waits for it yet"
    graph.put({"last": ["another top"]})
    assert graph.asked == []
    server.tick()
    assert sum(graph.asked) <= 10_001


def test_a_search_has_so_many_steps_at_most(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circles, "_STEPS", 50)
    row = [f"{n}" for n in range(60)]
    graph.put({task: [before] for before, task in itertools.pairwise(row)})
    assert graph.asked == [], "only the tasks of the request wait for them"
    graph.put({"x": ["top"]})
    answer = graph.schedule({"top": [row[-1]]})
    assert answer.status == 422
    assert "in a row of more than 50" in answer.json["errors"][0]["detail"]
    assert len(graph.asked) == 50
    graph.put({"top": [row[49]]})


def test_a_row_that_gets_longer_is_not_searched(graph: Graph) -> None:
    for first in range(0, 100, 20):
        graph.put({f"{n}": [f"{n - 1}"] for n in range(first, first + 20)})
        assert graph.asked == []


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_circle_in_a_wide_graph_is_refused_and_told(graph: Graph, *, is_apart: bool) -> None:
    ring = {"a": ["b", "other"], "b": ["c"], "c": ["d"], "d": ["a", *graph.put_layers(3, width=30)]}
    if is_apart:
        graph.put({task: ring[task] for task in "acb"})
        answer = graph.schedule({"x": ["y"], "d": ring["d"]})
    else:
        answer = graph.schedule({"x": ["y"], **ring})
    assert answer.status == 422
    (error,) = answer.json["errors"]
    assert error["item"] == 1
    first = "d" if is_apart else "a"
    way = [first, *"abcd"["abcd".index(first) + 1 :], *"abcd"[: "abcd".index(first)], first]
    assert error["detail"].endswith(" after ".join(f'"{graph.name(task)}"' for task in way))
    graph.put({"d": ["x"]})


def test_of_a_long_circle_the_ends_are_told(graph: Graph) -> None:
    answer = graph.schedule({f"{n}": [f"{(n + 1) % 900}"] for n in range(900)})
    assert answer.status == 422
    detail = answer.json["errors"][0]["detail"]
    assert detail.count(" after ") == 10
    assert f'"{graph.name("4")}" after … after "{graph.name("896")}"' in detail
