"""Listings that an index answers, however many tasks there are."""

import pytest

from leasekit.server.roles import selection
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
