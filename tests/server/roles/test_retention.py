"""What is removed, when, and in how many steps."""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from leasekit.errors import Unavailable
from leasekit.server.roles import retention
from leasekit.server.roles.frontend import NAME_UNUSED
from leasekit.server.roles.gates import GateChange
from leasekit.server.store import RETENTION, Filter, Store
from leasekit.server.store.memory import MemoryStore
from leasekit.server.sweeper import PURGE
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import KindSettings, Purged, Status
from leasekit.wire import PurgeRequest
from tests.server.conftest import Bench
from tests.server.store.test_store_contract import add, trigger


async def ended(bench: Bench, *ids: str, **options: Any) -> None:
    await bench.put(*ids, **options)
    for task_id in ids:
        await bench.cancel(task_id)


async def purge_all(bench: Bench, **options: Any) -> list[dict[str, dict[str, int]]]:
    steps = [await bench.engine.operations.purge(PurgeRequest(**options))]
    while steps[-1].cursor is not None:
        steps.append(await bench.engine.operations.purge(PurgeRequest(**options, cursor=steps[-1].cursor)))
    return [step.kinds for step in steps]


@pytest.mark.anyio
async def test_retention_counts_from_the_end_of_a_task(bench: Bench) -> None:
    long = await bench.taken("long", heartbeat_timeout=RETENTION * 2, claim_timeout=RETENTION * 2)
    await ended(bench, "early")
    await bench.later(RETENTION + 1)
    assert (await bench.settle(long)).verdict == "settled"

    await bench.engine.sweeper.sweep()

    assert await bench.engine.queries.get("early") is None
    assert await bench.status("long") == "success"
    await bench.later(RETENTION + 1)
    await bench.engine.sweeper.sweep()
    assert await bench.engine.queries.get("long") is None


@pytest.mark.anyio
async def test_a_dead_task_is_kept_from_its_death_on(bench: Bench) -> None:
    task = await bench.taken("dead", max_attempts=2)
    await bench.settle(task, "retry", retry_after=2 * RETENTION)
    await bench.later(2 * RETENTION)
    await bench.settle(await bench.take(), "retry")
    assert await bench.status("dead") == "dead"

    await bench.later(RETENTION - 1)
    await bench.engine.sweeper.sweep()
    assert await bench.status("dead") == "dead"
    await bench.later(2)
    await bench.engine.sweeper.sweep()
    assert await bench.engine.queries.get("dead") is None


@pytest.mark.anyio
async def test_what_has_not_ended_is_kept_however_old(bench: Bench) -> None:
    await bench.put("new", kind="a")
    running = await bench.taken("running", claim_timeout=RETENTION * 9, heartbeat_timeout=RETENTION * 9)
    failed = await bench.taken("failed")
    await bench.settle(failed, "retry", retry_after=RETENTION * 9)
    await bench.later(RETENTION * 2)

    await bench.engine.sweeper.sweep()
    assert await purge_all(bench) == [{}]

    assert [await bench.status(name) for name in ("new", "running", "failed")] == [
        "new", "claimed", "retriable_failure",
    ]  # fmt: skip
    assert (await bench.settle(running)).verdict == "settled"


@pytest.mark.anyio
async def test_a_removed_task_is_unknown_and_its_id_and_key_are_free(bench: Bench) -> None:
    await bench.put("a", dedupe_key="once")
    task = await bench.take()
    await bench.settle(task)
    assert await purge_all(bench) == [{"k": {"success": 1}}]

    assert (await bench.beat(task)).reason == "unknown"
    assert (await bench.settle(task)).reason == "unknown"
    assert [(answer.id, answer.created) for answer in await bench.put("a", dedupe_key="once")] == [("a", True)]


@pytest.mark.anyio
async def test_a_restart_keeps_the_age_of_ended_tasks(bench: Bench) -> None:
    await ended(bench, "a")
    await bench.later(RETENTION / 2)
    await bench.restart()
    await bench.engine.sweeper.sweep()
    assert await bench.status("a") == "cancelled"
    await bench.later(RETENTION / 2 + 1)
    await bench.engine.sweeper.sweep()
    assert await bench.engine.queries.get("a") is None


@pytest.mark.anyio
async def test_a_dry_run_counts_and_removes_nothing(bench: Bench) -> None:
    await ended(bench, "a", "b")
    await bench.settle(await bench.taken("c", kind="other"))
    for _ in range(2):
        counted = await bench.engine.operations.purge(PurgeRequest(dry_run=True))
        assert counted.kinds == {"k": {"cancelled": 2}, "other": {"success": 1}}
    assert (await bench.engine.operations.purge(PurgeRequest(dry_run=True, older_than=5))).kinds == {}


@pytest.mark.anyio
async def test_a_name_that_nobody_asks_for_is_forgotten_and_its_fences_go_on(bench: Bench) -> None:
    name = "named:x"
    first = await bench.taken(name, kind=name)
    await bench.settle(first, "release")
    await bench.put("old", kind="waiting")
    await bench.later(RETENTION - 1)
    await bench.engine.sweeper.sweep()
    assert await bench.status(name) == "enqueued"
    await bench.later(2)
    bench.engine.sweeper._names_at = 0.0  # an hour has passed
    await bench.engine.sweeper.sweep()
    assert await bench.engine.queries.get(name) is None
    assert await bench.status("old") == "new"
    assert (await bench.taken(name, kind=name)).fence > first.fence


@pytest.mark.anyio
async def test_a_name_that_is_asked_for_or_held_is_kept(bench: Bench) -> None:
    for name in ("named:asked", "once:asked", "named:held"):
        await bench.put(name, kind=name)
    held = await bench.claim(kinds=("named:held",))
    for _ in range(3):
        await bench.later(RETENTION * 0.4)
        await bench.put("named:asked", kind="named:asked")
        await bench.put("once:asked", kind="once:asked")
        bench.engine.sweeper._names_at = 0.0
        await bench.engine.sweeper.sweep()
        (held,) = [await bench.claim(kinds=("named:held",))]
    assert [task.id for task in held.tasks] == ["named:held"]
    assert [await bench.status(name) for name in ("named:asked", "once:asked")] == ["new", "new"]


@pytest.mark.anyio
async def test_a_name_that_was_just_asked_for_is_kept_however_short_retention_is(bench: Bench) -> None:
    """Within an hour its use is not noted. Removed between question and claim, it would keep its user waiting."""
    bench.engine.sweeper._keep = 60.0
    await bench.put("named:x", kind="named:x")
    await bench.later(NAME_UNUSED - 1)
    await bench.put("named:x", kind="named:x")
    bench.engine.sweeper._names_at = -NAME_UNUSED
    await bench.engine.sweeper.sweep()
    assert len((await bench.claim(kinds=("named:x",))).tasks) == 1


@pytest.mark.anyio
async def test_each_step_is_bounded_and_heartbeats_go_first(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much there is to remove: no transaction has more of it than one step, and none comes before a beat."""
    monkeypatch.setattr(retention, "PURGE_BATCH", 10)
    held = await bench.taken("held", kind="held")
    await ended(bench, *(f"t{n}" for n in range(95)))
    transactions: list[list[tuple[str, int]]] = []
    transact = bench.engine.commit._transact

    def noted(jobs: Any) -> Any:
        transactions.append([(job.rank.name, job.size) for job in jobs])
        return transact(jobs)

    monkeypatch.setattr(bench.engine.commit, "_transact", noted)
    purging = asyncio.create_task(purge_all(bench))
    while not purging.done():
        assert (await bench.beat(held)).verdict == "renewed"

    assert sum(counts["k"]["cancelled"] for counts in await purging) == 95
    purged = [size for jobs in transactions for name, size in jobs if name == "purges"]
    assert purged == [10] * 9 + [5]
    assert all(jobs[0][0] == "heartbeats" for jobs in transactions if len(jobs) > 1)
    assert list(bench.engine.commit._queues).index(PURGE) > len(bench.engine.commit._queues) / 2


def test_a_task_that_lives_again_before_its_step_is_kept(make_store: Callable[[], Store]) -> None:
    store = make_store()
    store.open()
    over: dict[str, Any] = {"status": Status.DEAD, "next_trigger_at": None, "ended_at": 1.0}
    add(store, trigger(1, **over), trigger(2, **over), trigger(3, **over))
    with store.view() as view:
        chosen = retention.choose(view, Filter(), until=5.0, cursor=None)
    with store.transaction() as tx:
        tx.save([trigger(1), trigger(2, **over | {"ended_at": 9.0})])  # the second has ended once more since then
    with store.transaction() as tx:
        turn = UnitOfWork(tx, now=9.0, instant=9.0, random=Random(1))
        assert retention.remove(turn, [chosen.removal]) == [Purged(kinds={"k": {"dead": 1}})]
    with store.view() as view:
        assert view.triggers(["t1", "t2", "t3"]).keys() == {"t1", "t2"}
    store.close()


# Kinds with a retention of their own


async def keep(bench: Bench, kind: str, retention: float | None) -> None:
    await bench.engine.operations.set_kind(
        kind, None if retention is None else KindSettings(retention=retention), by=None
    )


async def left(bench: Bench, *ids: str) -> list[str]:
    await bench.engine.sweeper.sweep()
    return [task_id for task_id in ids if await bench.engine.queries.get(task_id) is not None]


@pytest.mark.anyio
async def test_a_kind_keeps_its_tasks_for_a_shorter_or_a_longer_time_than_the_store(bench: Bench) -> None:
    await keep(bench, "short", 3600.0)
    await keep(bench, "long", RETENTION * 2)
    for kind in ("short", "long", "k"):
        await ended(bench, kind, kind=kind)
    await bench.later(3500)
    assert await left(bench, "short", "long", "k") == ["short", "long", "k"]
    await bench.later(200)
    assert await left(bench, "short", "long", "k") == ["long", "k"]
    await bench.later(RETENTION)
    assert await left(bench, "long", "k") == ["long"]
    await bench.later(RETENTION)
    assert await left(bench, "long") == []


@pytest.mark.anyio
async def test_another_retention_holds_for_tasks_that_have_ended_before(bench: Bench) -> None:
    await ended(bench, "a", "b", kind="k")
    await bench.later(1000)
    await keep(bench, "k", 5000.0)
    assert await left(bench, "a", "b") == ["a", "b"]
    await keep(bench, "k", 900.0)
    assert await left(bench, "a", "b") == []
    await ended(bench, "c")
    await bench.later(1000)
    await keep(bench, "k", None)
    assert await left(bench, "c") == ["c"]
    await bench.later(RETENTION)
    assert await left(bench, "c") == []


@pytest.mark.anyio
async def test_a_retention_that_is_raised_while_tasks_are_removed_keeps_all_that_are_left(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search may take many minutes: the retention of its beginning must not hold for as long."""
    monkeypatch.setattr(retention, "PURGE_BATCH", 10)
    await keep(bench, "k", 60.0)
    await keep(bench, "other", 60.0)
    await ended(bench, *(f"t{n}" for n in range(35)), kind="k")
    await ended(bench, *(f"o{n}" for n in range(35)), kind="other")
    await bench.later(100)
    commit = bench.engine.sweeper._commit

    async def raise_it_after_the_first(rank: Any, request: Any, size: int) -> Any:
        if rank is PURGE and (await bench.engine.queries.stats()).kinds["k"]["cancelled"] < 35:
            await keep(bench, "k", 3600.0)
        return await commit(rank, request, size)

    monkeypatch.setattr(bench.engine.sweeper, "_commit", raise_it_after_the_first)
    await bench.engine.sweeper.sweep()
    assert (await bench.engine.queries.stats()).kinds == {
        "k": {"cancelled": 25}
    }  # and none of the others is passed over


@pytest.mark.anyio
async def test_what_could_not_be_removed_is_removed_by_the_next_sweep(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await keep(bench, "k", 60.0)
    await ended(bench, "a")
    await bench.later(100)

    async def fail(*_: object) -> None:
        raise Unavailable("the store failed")

    with monkeypatch.context() as patched:
        patched.setattr(bench.engine.sweeper, "_commit", fail)
        with pytest.raises(Unavailable):
            await bench.engine.sweeper.sweep()
    assert await left(bench, "a") == []


def swept(store: Store, old: retention.OldTasks, now: float, *, meanwhile: Callable[[], object] = lambda: None) -> int:
    """Remove what is old; return how many steps that took. `meanwhile` is called before each removal."""
    with store.view() as view:
        old.begin(view, now=now)
    for steps in range(1000):
        with store.view() as view:
            if (step := old.step(view, now=now)) is None:
                return steps
        meanwhile()
        with store.transaction() as tx:
            retention.remove(UnitOfWork(tx, now=now, instant=now, random=Random(1)), [step.removal])
        old.done(step)
    raise AssertionError("the search does not end")


def test_tasks_that_are_kept_for_longer_are_passed_once_a_day(
    make_store: Callable[[], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_LOOK", 10)
    store = make_store()
    store.open()
    with store.transaction() as tx:
        tx.set_kind("k", b'{"retention":1000000}', at=1.0, by=None)
    over: dict[str, Any] = {"status": Status.DEAD, "next_trigger_at": None}
    add(store, *(trigger(n, ended_at=float(n), **over) for n in range(1, 201)))
    old = retention.OldTasks(60.0)
    assert swept(store, old, 1000.0) > 15
    assert swept(store, old, 1001.0) == 2
    assert swept(store, old, 1001.0 + 86_400) > 15
    with store.view() as view:
        assert view.count_ended(Filter(), until=1e9) == {"k": {"dead": 200}}
    store.close()


@pytest.mark.parametrize("seed", range(20))
def test_a_search_in_parts_finds_what_is_old_and_nothing_else(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(seed)
    monkeypatch.setattr(retention, "_LOOK", random.choice([1, 2, 7, 50]))
    monkeypatch.setattr(retention, "PURGE_BATCH", random.choice([1, 3, 100]))
    store, old, now = MemoryStore(), retention.OldTasks(200.0), 1000.0
    kept: dict[str, float] = {}
    tasks: dict[int, tuple[str, float]] = {}
    gone: set[int] = set()

    def look() -> set[int]:
        """Check that only tasks are gone whose retention was over; return those that are there."""
        with store.view() as view:
            there = {row.seq for row in view.triggers([f"t{number}" for number in tasks]).values()}
        newly_gone = tasks.keys() - there - gone
        assert [n for n in newly_gone if tasks[n][1] > now - kept.get(tasks[n][0], 200.0)] == []
        gone.update(newly_gone)
        return there

    def change() -> None:
        look()
        kind, chosen = random.choice("abc"), random.choice([None, 60.0, 100.0, 300.0])
        kept.update({kind: 200.0 if chosen is None else chosen})
        with store.transaction() as tx:
            tx.set_kind(kind, None if chosen is None else b'{"retention":%d}' % chosen, at=now, by=None)

    for _ in range(12):
        if random.random() < 0.5:
            change()
        for _ in range(random.randrange(15)):
            number, kind, at = len(tasks) + 1, random.choice("abcd"), now - random.randrange(3)
            tasks[number] = kind, at
            add(store, trigger(number, kind=kind, status=Status.DEAD, next_trigger_at=None, ended_at=at))
        now += random.choice([10.0, 60.0, 150.0])
        swept(store, old, now, meanwhile=lambda: change() if random.random() < 0.1 else None)
        there = look()
        assert there & {n for n, (kind, at) in tasks.items() if at <= now - kept.get(kind, 200.0)} == set()


@pytest.mark.anyio
async def test_old_tasks_are_removed_after_a_gate_was_changed(bench: Bench) -> None:
    await bench.put("a")
    await bench.settle(await bench.take())
    await bench.engine.operations.set_gate(GateChange("kind", "other", "pause", None, None, None, None))
    await bench.later(31 * 86400.0)
    await bench.engine.sweeper.sweep()
    assert await bench.engine.queries.get("a") is None
