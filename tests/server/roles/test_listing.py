"""Listings that an index answers, however many tasks there are."""

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

import pytest

from leasekit.server.roles import selection
from leasekit.server.roles.selection import Search, any_kind, number_to_read
from leasekit.server.store import Filter, Run, View
from leasekit.task import TaskSelection
from tests.server.conftest import Bench

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("step", [1, 2, 100])
@pytest.mark.parametrize("newest", [False, True])
async def test_the_tasks_of_a_worker_are_listed_in_pages_without_a_look_at_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, newest: bool, step: int
) -> None:
    monkeypatch.setattr(selection, "_TAGGED", step)
    monkeypatch.setattr(selection, "LOOK", 0)  # a step without an index looks at no task, and so comes to no end
    ids = [f"t{number}" for number in range(9)]
    await bench.put(*ids)
    for number, worker in enumerate(("one", "other") * 4):
        assert await bench.ids(worker=worker, limit=1) == [ids[number]]
    await bench.engine.cancel(["t8"])
    found: list[str] = []
    cursor = None
    while True:
        page = await bench.engine.queries.list_tasks(worker="one", newest=newest, cursor=cursor, limit=2)
        found += [task.id for task in page.tasks]
        assert len(page.tasks) <= 2
        if (cursor := page.cursor) is None:
            break
    assert found == (["t6", "t4", "t2", "t0"] if newest else ["t0", "t2", "t4", "t6"])
    assert (await bench.engine.queries.list_tasks(worker="one", kind="another")).tasks == []
    assert (await bench.engine.queries.list_tasks(worker="nobody")).tasks == []


@pytest.mark.parametrize("newest", [False, True])
async def test_a_big_page_is_read_in_several_turns(bench: Bench, monkeypatch: pytest.MonkeyPatch, newest: bool) -> None:
    """A page of a thousand tasks keeps a thread of the readers busy for a while: other callers come in between."""
    monkeypatch.setattr(selection, "_SCAN", 3)
    ids = sorted(f"t{number:02}" for number in range(20))
    await bench.put(*ids)
    found, cursor, turns = list[str](), None, list[Any]()
    read = bench.engine._readers.read

    async def noted(look: Any, **options: Any) -> Any:
        turns.append(look)
        return await read(look, **options)

    monkeypatch.setattr(bench.engine._readers, "read", noted)
    for expected in (7, 7, 6):
        turns.clear()
        page = await bench.engine.queries.list_tasks(newest=newest, cursor=cursor, limit=7)
        found += [task.id for task in page.tasks]
        assert len(page.tasks) == expected
        assert len(turns) >= 3
        cursor = page.cursor
    assert cursor is None
    assert found == sorted(ids, reverse=newest)


class Asked:
    """A view that notes of which tasks runs are read."""

    def __init__(self, view: View) -> None:
        self.view, self.of = view, list[int]()
        self.asked = list[str]()

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return getattr(self.view, name)

    def last_runs(self, seqs: Collection[int], *, limit: int) -> dict[int, list[Run]]:
        self.of += seqs
        return self.view.last_runs(seqs, limit=limit)


async def test_errors_are_looked_for_in_small_steps_and_in_tasks_that_have_run(bench: Bench) -> None:
    """Those of each task are a read by itself, and other reads wait for the step."""
    await bench.settle(await bench.taken("failed"), "retry", error={"type": "E", "message": "one"}, retry_after=60)
    await bench.put("a", "b")

    def look(view: View) -> tuple[list[str], int]:
        asked: Any = Asked(view)
        found = Search(Filter(), TaskSelection(error="one"), cursor=None, limit=5000).whole(asked)
        return [row.id for row in found.rows], len(asked.of)

    assert await bench.engine._readers.read(look) == (["failed"], 1)


@pytest.mark.parametrize("wanted", [{}, {"key": "one"}, {"error": "one"}])
def test_a_step_reads_few_tasks_however_many_its_page_has_room_for(wanted: dict[str, Any]) -> None:
    assert number_to_read(5000, TaskSelection(**wanted), any_kind) == selection._SCAN


@pytest.mark.parametrize("wanted", [{"key": "one"}, {"since": datetime(1970, 1, 1, tzinfo=UTC)}])
async def test_keys_and_times_of_a_step_are_read_at_once(bench: Bench, wanted: dict[str, Any]) -> None:
    await bench.put(*(f"t{number}" for number in range(100)), key="one")

    def look(view: View) -> tuple[int, list[str]]:
        asked: Any = Asked(view)
        return len(Search(Filter(), TaskSelection(**wanted), cursor=None, limit=5000).whole(asked).rows), asked.asked

    found, asked = await bench.engine._readers.read(look)
    assert found == 100
    assert len(asked) <= 5
