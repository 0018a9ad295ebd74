"""Dead tasks of the server: found in steps of bounded work, in each store."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import leasekit
from leasekit import Client
from leasekit.server.engine import Engine
from leasekit.server.roles import selection
from leasekit.server.store import Store
from leasekit.task import NewTask, Settlement
from leasekit.wire import PurgeRequest, RedriveRequest

pytestmark = pytest.mark.anyio


@pytest.fixture
async def engine(make_store: Callable[[], Store]) -> AsyncIterator[Engine]:
    async with Engine(make_store()) as engine:
        yield engine


async def died(engine: Engine, count: int) -> None:
    """Let tasks t0, t1, … die, each with an error of its own: even, or odd."""
    await engine.schedule([NewTask(kind="k", id=f"t{n}", max_attempts=1) for n in range(count)])
    claimed = await engine.claim(worker="w", kinds=["k"], limit=count, wait=0, claim_id="c")
    errors = [{"type": "E", "message": "odd" if int(task.id[1:]) % 2 else "even"} for task in claimed.tasks]
    await engine.results(
        "w",
        [
            Settlement(id=task.id, token=task.token, outcome="retry", error=error)
            for task, error in zip(claimed.tasks, errors, strict=True)
        ],
    )


async def test_what_does_not_match_takes_no_place_in_a_page(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_SCAN", 1)  # a page takes several steps
    await died(engine, 9)
    listed = await engine.queries.list_tasks(status=leasekit.Status.DEAD, error="odd", limit=3)
    assert [task.id for task in listed.tasks] == ["t1", "t3", "t5"]
    rest = await engine.queries.list_tasks(status=leasekit.Status.DEAD, error="odd", cursor=listed.cursor, limit=3)
    assert ([task.id for task in rest.tasks], rest.cursor) == (["t7"], None)
    found = await engine.operations.redrive(RedriveRequest(error="odd", limit=3, dry_run=True))
    assert [verdict.id for verdict in found.tasks] == ["t1", "t3", "t5"]
    purged = await engine.operations.purge(PurgeRequest(kind="k", error="odd"))
    assert (purged.kinds, purged.cursor) == ({"k": {"dead": 4}}, None)


async def test_a_search_ends_its_page_after_a_while_and_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "LOOK", 2)
    monkeypatch.setattr(selection, "_STEPS", 2)
    await died(engine, 10)
    ids: list[str] = []
    pages, cursor = 0, None
    while True:
        page = await engine.operations.redrive(RedriveRequest(error="odd", limit=100, cursor=cursor, dry_run=True))
        ids += [verdict.id for verdict in page.tasks]
        pages, cursor = pages + 1, page.cursor
        if cursor is None:
            break
    assert ids == ["t1", "t3", "t5", "t7", "t9"]
    assert pages > 2


def test_a_client_goes_on_through_pages_without_a_match(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "LOOK", 1)
    monkeypatch.setattr(selection, "_STEPS", 1)
    with leasekit.connect(url) as client:
        fail(client, 5)
        redriven = client.redrive(kind="k", error="boom 4", limit=10)
        assert [verdict.id for verdict in redriven.tasks] == ["t4"]
        assert client.purge(kind="k", error="boom", dry_run=False).kinds == {"k": {"dead": 4}}


def fail(client: Client, count: int) -> None:
    for n in range(count):
        client.schedule("k", id=f"t{n}", max_attempts=1)
    for task in client.tasks("k", until_idle=0):
        with leasekit.lease(task) as held:
            held.fail(f"boom {task.id[1:]}")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/of-client.db"


@pytest.mark.parametrize("named", [{"ids": ["t0"]}, {"error": "odd"}, {"kind": "k"}], ids=["ids", "error", "kind"])
async def test_a_made_up_cursor_is_refused_whatever_it_goes_with(engine: Engine, named: dict[str, Any]) -> None:
    with pytest.raises(leasekit.Refused, match="cursor must be the cursor of an earlier page"):
        await engine.operations.redrive(RedriveRequest(**named, cursor="made up"))
    with pytest.raises(leasekit.Refused, match="cursor must be the cursor of an earlier step"):
        await engine.operations.purge(PurgeRequest(**named, cursor="made up"))


async def test_the_steps_of_a_purge_by_what_tasks_say_go_on_where_the_one_before_ended(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await died(engine, 8)
    monkeypatch.setattr(selection, "LOOK", 1)
    monkeypatch.setattr(selection, "_STEPS", 2)
    purged, cursor = 0, None
    while True:
        step = await engine.operations.purge(PurgeRequest(error="odd", cursor=cursor))
        purged += step.kinds.get("k", {}).get("dead", 0)
        if (cursor := step.cursor) is None:
            break
    assert purged == 4
    assert [task.id for task in (await engine.queries.list_tasks()).tasks] == ["t0", "t2", "t4", "t6"]
