"""Tags: a search reads the index of the rarest tag, in steps, and nothing else."""

from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from leasekit.server.roles import selection
from leasekit.server.store import Store, Tagged
from leasekit.task import NewTask, Status
from leasekit.wire import PurgeRequest
from tests.server.conftest import Bench

pytestmark = pytest.mark.anyio


async def put(bench: Bench, first: int, last: int, *tags: str) -> None:
    for start in range(first, last, 500):
        batch = [NewTask(kind="k", id=f"t{n}", tags=list(tags)) for n in range(start, min(start + 500, last))]
        await bench.engine.schedule(batch)


async def found(bench: Bench, *tags: str, newest: bool = False, status: Status | None = None) -> list[str]:
    ids: list[str] = []
    cursor: str | None = None
    while True:
        page = await bench.engine.queries.list_tasks(tags=tags, newest=newest, status=status, cursor=cursor, limit=3)
        ids += [task.id for task in page.tasks]
        cursor = page.cursor
        if cursor is None:
            return ids


async def test_a_search_goes_on_in_steps_however_few_match(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_TAGGED", 4)
    for n in range(20):
        await put(bench, n, n + 1, "common", "other", *(["rare"] if n % 9 == 0 else []))
    await bench.engine.cancel(["t9"])
    for newest in (False, True):
        order = slice(None, None, -1 if newest else 1)
        assert await found(bench, "common", "rare", newest=newest) == ["t0", "t9", "t18"][order]
        assert await found(bench, "rare", "common", "other", newest=newest) == ["t0", "t9", "t18"][order]
        assert await found(bench, "common", newest=newest, status=Status.CANCELLED) == ["t9"]
        assert await found(bench, "common", newest=newest) == [f"t{n}" for n in range(20)][order]
        assert await found(bench, "common", "unknown", newest=newest) == []


async def test_the_rarest_tag_from_here_on_is_looked_at(make_store: Callable[[], Store]) -> None:
    bench = Bench(make_store)
    async with bench.engine:
        await put(bench, 0, 30, "early", "all")
        await put(bench, 30, 60, "late", "all")
    store = make_store()
    store.open()
    with store.view() as view:
        seqs = view.tagged(["all"], after=0, newest=False, limit=100).seqs
        assert len(seqs) == 60
        assert view.tagged(["all", "late"], after=0, newest=False, limit=10) == Tagged(seqs[30:40], seqs[39])
        assert view.tagged(["all", "early"], after=10**18, newest=True, limit=10) == Tagged(seqs[29:19:-1], seqs[20])
        assert view.tagged(["all", "early"], after=seqs[29], newest=False, limit=10) == Tagged([], None)
    store.close()


async def test_tags_go_with_their_task(bench: Bench) -> None:
    await put(bench, 0, 2, "blue")
    await bench.settle(await bench.take())
    await bench.engine.operations.purge(PurgeRequest())
    assert await found(bench, "blue") == ["t1"]
    left = await bench.engine._readers.read(lambda view: view.tagged(["blue"], after=0, newest=False, limit=9))
    assert len(left.seqs) == 1
    await put(bench, 0, 1, "red")
    assert (await bench.info("t0")).tags == ["red"]


async def test_a_purge_by_tags_leaves_the_others(bench: Bench) -> None:
    for name, tags in (("blue", ["blue"]), ("plain", [])):
        await bench.put(name, tags=tags)
        await bench.settle(await bench.take())
    assert (await bench.engine.operations.purge(PurgeRequest(tags=["blue"]))).kinds == {"k": {"success": 1}}
    assert (await bench.status("plain")) == "success"


async def test_a_successor_has_tags(bench: Bench) -> None:
    await bench.put("first")
    task = await bench.take()
    await bench.settle(task, then=[NewTask(kind="k", id="next", tags=["blue"])])
    assert await found(bench, "blue") == ["next"]


async def test_a_replaced_task_keeps_its_tags(bench: Bench) -> None:
    for tag in ("first", "second"):
        await bench.engine.schedule([NewTask(kind="k", dedupe_key="d", debounce=60.0, delay=9.0, tags=[tag])])
    assert len(await found(bench, "first")) == 1
    assert await found(bench, "second") == []


async def test_since_and_tags_select_together(bench: Bench) -> None:
    await put(bench, 0, 1, "blue")
    bench.clock.advance(100)
    since = datetime.fromtimestamp(bench.clock.wall, UTC)
    await put(bench, 1, 2, "blue")
    page = await bench.engine.queries.list_tasks(tags=["blue"], since=since)
    assert [task.id for task in page.tasks] == ["t1"]
