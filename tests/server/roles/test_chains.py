"""Chains: what each task came from, how that is listed, and how all of it is cancelled."""

from typing import Any

import pytest

from leasekit.server.roles import chains
from leasekit.server.store import Filter
from leasekit.task import NewTask, Settlement
from leasekit.wire import ChainRequest, PurgeRequest
from tests.server.conftest import Bench

pytestmark = pytest.mark.anyio


async def end(bench: Bench, name: str, *then: NewTask) -> None:
    task = await bench.take(kinds=(name,))
    settlement = Settlement(id=name, token=task.token, outcome="success", then=list(then))
    (verdict,) = await bench.engine.results("w", [settlement])
    assert verdict.verdict == "settled"


async def put(bench: Bench, *names: str, **options: Any) -> None:
    await bench.engine.schedule([NewTask(kind=name, id=name, **options) for name in names])


async def listed(bench: Bench, root: str, **options: Any) -> list[str]:
    return [task.id for task in (await bench.engine.queries.list_tasks(root=root, **options)).tasks]


async def place(bench: Bench, name: str) -> tuple[str | None, str | None]:
    info = await bench.info(name)
    return info.parent, info.root


async def a_chain(bench: Bench) -> None:
    """The task `a`; `b`, after it; `c`, which `a` has scheduled; `d`, which follows `c`; and `x`, which is alone."""
    await put(bench, "a", "x")
    await put(bench, "b", after=["a"])
    await put(bench, "c", parent="a")
    await end(bench, "c", NewTask(kind="d", id="d"), NewTask(kind="e", id="e", parent="x"))


async def test_each_task_has_its_parent_and_its_root(bench: Bench) -> None:
    await a_chain(bench)
    await bench.restart()
    places = {name: await place(bench, name) for name in "abcdex"}
    assert places == {
        "a": (None, "a"), "b": ("a", "a"), "c": ("a", "a"), "d": ("c", "a"), "e": ("c", "a"), "x": (None, "x"),
    }  # fmt: skip


async def test_tasks_that_come_together_have_the_root_of_the_first(bench: Bench) -> None:
    names = [f"t{n}" for n in range(9)]
    pairs = zip(names[1:], names, strict=False)
    await bench.engine.schedule([NewTask(kind="k", id=one, parent=other) for one, other in reversed(list(pairs))])
    assert {await place(bench, name) for name in names[1:]} == {(other, "t0") for other in names[:-1]}
    await bench.engine.schedule([NewTask(kind="k", id=one, parent=two) for one, two in ("uv", "vu")])
    assert (await place(bench, "u"))[0] == "v"


async def test_a_chain_is_listed_by_its_root_with_other_filters_and_in_pages(bench: Bench) -> None:
    await a_chain(bench)
    assert await listed(bench, "a") == ["a", "b", "c", "d", "e"]
    assert await listed(bench, "a", newest=True) == ["e", "d", "c", "b", "a"]
    assert await listed(bench, "a", kind="d") == ["d"]
    assert await listed(bench, "c") == ["c"]
    assert await listed(bench, "unknown") == []
    first = await bench.engine.queries.list_tasks(root="a", limit=2)
    assert [task.id for task in first.tasks] == ["a", "b"]
    assert await listed(bench, "a", cursor=first.cursor) == ["c", "d", "e"]


@pytest.mark.parametrize("name", ["a", "d"])
async def test_a_chain_is_cancelled_from_any_of_its_tasks_in_steps(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(chains, "STEP", 2)
    await a_chain(bench)
    running = await bench.take(kinds=("d",))
    cursor, verdicts = None, dict[str, str]()
    while True:
        step = await bench.engine.cancel_chain(ChainRequest(id=name, cursor=cursor))
        assert step.root == "a"
        assert len(step.tasks) <= 2
        verdicts |= {verdict.id: verdict.verdict for verdict in step.tasks}
        cursor = step.cursor
        if cursor is None:
            break
    assert verdicts == {"a": "cancelled", "b": "cancelled", "d": "cancel_requested", "e": "cancelled"}
    assert (await bench.settle(running, "cancelled")).verdict == "settled"
    assert {name: await bench.status(name) for name in "abcdex"} == {
        "a": "cancelled", "b": "cancelled", "c": "success", "d": "cancelled", "e": "cancelled", "x": "new",
    }  # fmt: skip


async def test_what_comes_late_from_a_cancelled_chain_is_cancelled_too(bench: Bench) -> None:
    await put(bench, "a")
    task = await bench.take(kinds=("a",))
    await bench.engine.cancel_chain(ChainRequest(id="a"))
    await bench.restart()
    await put(bench, "inside", parent="a")
    await bench.settle(task, then=[NewTask(kind="then", id="then")])
    await put(bench, "after", after=["then", "other"])
    assert await bench.status("a") == "success"
    for name in ("inside", "then", "after"):
        info = await bench.info(name)
        assert (info.status, info.reason) == ("cancelled", 'the chain of "a" was cancelled')
    assert await bench.ids(kinds=("inside", "then", "after")) == []


async def test_a_chain_that_is_unknown_is_none(bench: Bench) -> None:
    step = await bench.engine.cancel_chain(ChainRequest(id="a"))
    assert (step.root, step.tasks, step.cursor) == ("a", [], None)
    await put(bench, "b", parent="a")
    assert await bench.status("b") == "new"


async def test_what_is_removed_is_forgotten(bench: Bench) -> None:
    await a_chain(bench)
    await bench.engine.cancel_chain(ChainRequest(id="a"))
    await bench.engine.operations.purge(PurgeRequest())
    with bench.engine._store.transaction() as tx:
        assert tx.page(Filter(root="a"), after=0, limit=9) == []
        assert tx.cancelled_chains({"a"}) == set()
    await put(bench, "a")
    assert await listed(bench, "a") == ["a"]


async def test_names_are_in_no_chain(bench: Bench) -> None:
    await bench.engine.schedule([NewTask(kind="named:n", id="named:n", parent="a")])
    assert await place(bench, "named:n") == (None, "named:n")


async def test_what_waits_for_a_late_task_of_a_cancelled_chain_is_told_of_its_end(bench: Bench) -> None:
    await put(bench, "a")
    await put(bench, "before", after=["w", "late"])
    await bench.engine.cancel_chain(ChainRequest(id="a"))
    batch = [NewTask(kind="k", id="late", parent="a"), NewTask(kind="k", id="beside", after=["w", "late"])]
    await bench.engine.schedule(batch)
    await bench.engine.tick()
    for name in ("before", "beside"):
        info = await bench.info(name)
        assert (info.status, info.reason) == ("dropped", '"late", which it was to run after, ended as cancelled')


class _Counting(dict[str, str]):
    """Counts how many times it is asked for a parent."""

    asked = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.asked += 1
        return super().get(key, default)


@pytest.mark.parametrize("step", [1, -1])
def test_the_roots_of_a_thousand_tasks_in_a_row_are_found_in_one_walk(step: int) -> None:
    """Walked anew for each of them, they kept the writer of the store for seconds."""
    ids = [f"t{n}" for n in range(1000)]
    parents = _Counting({ids[n]: ids[n - 1] for n in range(1, 1000)})
    roots = chains.roots_of(ids[1:][::step], parents, {"t0": "first"})
    assert roots == dict.fromkeys(ids[1:], "first")
    assert parents.asked <= 2000


def test_tasks_that_come_from_each_other_have_one_root() -> None:
    assert chains.roots_of(["a", "b"], {"a": "b", "b": "a"}, {}) == {"a": "b", "b": "b"}
