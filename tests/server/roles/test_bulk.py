"""Bulk acts: a dry run counts and answers with a token, and the act with that token touches nothing that came later."""

from collections.abc import Callable
from typing import Any

import pytest

from leasekit.backend import checked
from leasekit.errors import Refused
from leasekit.server.engine import Engine
from leasekit.server.request_classes import CANCEL_MATCHING
from leasekit.server.roles import bulk, selection
from leasekit.server.store import Store
from leasekit.task import Matched, NewTask
from leasekit.wire import CancelMatchingRequest, PurgeRequest, RescheduleMatchingRequest
from tests.server.conftest import Bench

pytestmark = pytest.mark.anyio


async def cancel(bench: Bench, **wanted: Any) -> Matched:
    wanted = {"kind": "k"} | wanted
    return await bench.engine.operations.cancel_matching(checked(CancelMatchingRequest, wanted))


async def move(bench: Bench, **wanted: Any) -> Matched:
    wanted = {"kind": "k", "delay": 60.0} | wanted
    return await bench.engine.operations.reschedule_matching(checked(RescheduleMatchingRequest, wanted), by="ada")


async def test_a_dry_run_counts_and_changes_nothing(bench: Bench) -> None:
    await bench.put("a", "b")
    await bench.put("c", kind="other")
    running = await bench.take()
    tried = await cancel(bench, dry_run=True)
    assert (tried.kinds, tried.cursor) == ({"k": {"new": 1, "claimed": 1}}, None)
    assert (await move(bench, dry_run=True)).kinds == {"k": {"new": 1}}
    assert [await bench.status(name) for name in "abc"] == ["claimed", "new", "new"]
    done = await cancel(bench, token=tried.token)
    assert (done.kinds, done.token) == (tried.kinds, tried.token)
    assert (await bench.beat(running)).cancel_requested
    assert [await bench.status(name) for name in "bc"] == ["cancelled", "new"]
    await bench.settle(running, "cancelled")
    assert (await cancel(bench, token=tried.token)).kinds == {}


async def test_another_task_that_has_the_id_of_one_that_was_found_is_left_alone(bench: Bench) -> None:
    await bench.put("a")
    engine = bench.engine
    found = await engine._readers.read(lambda view: list(view.triggers({"a"}).values()))
    await bench.cancel("a")
    await engine.operations.purge(PurgeRequest(ids=["a"]))
    await bench.put("a")
    assert await engine.commit.ask(CANCEL_MATCHING, bulk.Change(found), size=1) == []
    assert await bench.status("a") == "new"


async def test_what_comes_after_the_dry_run_is_not_touched(bench: Bench) -> None:
    await bench.put("a")
    tried = await cancel(bench, dry_run=True)
    moved = await move(bench, dry_run=True)
    await bench.put("b")
    await bench.restart()
    assert (await move(bench, token=moved.token)).kinds == {"k": {"new": 1}}
    assert await bench.ids() == ["b"]
    assert (await cancel(bench, token=tried.token)).kinds == {"k": {"new": 1}}
    assert (await bench.status("a"), await bench.status("b")) == ("cancelled", "claimed")


@pytest.mark.parametrize("fraction", [0.1234567, 0.12345678, 0.9999999, 0.7654321], ids=str)
async def test_a_dry_run_counts_what_was_scheduled_at_its_own_instant(bench: Bench, fraction: float) -> None:
    bench.clock.wall = bench.clock.boot = 1_795_770_000 + fraction  # between two microseconds
    await bench.put("a")
    assert (await cancel(bench, dry_run=True)).kinds == {"k": {"new": 1}}


def node(bench: Bench, store: Store) -> Engine:
    return Engine(store, clock=lambda: bench.clock.wall, boot=lambda: bench.clock.boot)


async def test_what_another_node_takes_later_under_an_earlier_number_is_not_touched(
    postgres_stores: Callable[[], Store],
) -> None:
    first = Bench(postgres_stores)
    async with first.engine, node(first, postgres_stores()) as other:
        await first.put("a")  # the first node has reserved numbers by now, and the other one greater ones
        await other.schedule([NewTask(kind="k", id="b")])
        first.clock.advance(1)
        await first.engine.tick()
        tried = await cancel(first, dry_run=True)
        assert tried.kinds == {"k": {"new": 2}}
        first.clock.advance(0.01)
        await first.put("c")
        assert (await cancel(first, token=tried.token)).kinds == {"k": {"new": 2}}
        assert await first.status("c") == "new"


async def test_an_act_takes_the_token_of_the_same_request_only(bench: Bench) -> None:
    await bench.put("a")
    token = (await cancel(bench, dry_run=True)).token
    later = (await move(bench, dry_run=True)).token
    for wrong in ({"kind": "other", "token": token}, {"token": later}, {"token": "made-up"}, {"token": token[:-1]}):
        with pytest.raises(Refused, match="must be the answer to a dry run of the same request"):
            await cancel(bench, **wrong)
    with pytest.raises(Refused, match="dry run of the same request"):
        await move(bench, token=later, delay=61.0)
    assert await bench.status("a") == "new"


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"kind": "k"}, "takes the `token` of a dry run"),
        ({"dry_run": True}, "selects tasks by"),
        ({"kind": "k", "status": "dead", "dry_run": True}, "a task that is dead has ended"),
    ],
    ids=str,
)
def test_what_is_no_bulk_act_is_refused(wanted: Any, why: str) -> None:
    with pytest.raises(Refused, match=why):
        checked(CancelMatchingRequest, wanted)


async def test_an_act_goes_in_steps_and_can_be_cut_off(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "STEP", 2)
    monkeypatch.setattr(bulk, "_COUNTED", 3)
    monkeypatch.setattr(selection, "LOOK", 4)
    await bench.put(*"abcde", collection="c")
    await bench.put(*"fgh")
    tried = await move(bench, collection="c", dry_run=True)
    assert (tried.kinds, tried.cursor is None) == ({"k": {"new": 3}}, False)
    rest = await move(bench, collection="c", dry_run=True, token=tried.token, cursor=tried.cursor)
    assert (rest.kinds, rest.cursor) == ({"k": {"new": 2}}, None)
    counts, cursor = 0, None
    while True:
        step = await move(bench, collection="c", token=tried.token, cursor=cursor)
        counts += sum(step.kinds.get("k", {}).values())
        if (cursor := step.cursor) is None:
            break
    assert counts == 5
    assert await bench.ids() == ["f", "g", "h"]
    assert [entry.worker for entry in (await bench.info("a")).history] == ["ada"]


async def test_other_filters_select_too(bench: Bench) -> None:
    await bench.put("a", "b", key="tenant")
    await bench.put("c")
    tried = await cancel(bench, key="tenant", dry_run=True)
    assert (await cancel(bench, key="tenant", token=tried.token)).kinds == {"k": {"new": 2}}
    assert await bench.ids() == ["c"]


async def test_a_task_that_has_changed_since_it_was_found_is_left_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.put("a", "b")
    tried = await cancel(bench, status="new", dry_run=True)
    found = bench.engine._readers.find

    async def find_and_run(search: Any) -> Any:
        page = await found(search)
        assert (await bench.take()).id == "a"
        return page

    monkeypatch.setattr(bench.engine._readers, "find", find_and_run)
    assert (await cancel(bench, status="new", token=tried.token)).kinds == {"k": {"new": 1}}
    assert not (await bench.info("a")).cancel_requested
    assert await bench.status("b") == "cancelled"


async def test_leases_of_names_are_left_alone(bench: Bench) -> None:
    await bench.engine.schedule([NewTask(kind="named:x", id="named:x")])
    assert (await cancel(bench, kind="named:x", dry_run=True)).kinds == {}
