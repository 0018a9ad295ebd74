"""Fair shares: the order in which the keys of a lane are taken, in each store, beside an ideal."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from leasekit.server import fair_lane
from leasekit.server.roles import claims, consumer, frontend
from leasekit.server.roles.gates import GateChange
from leasekit.server.store import Store
from leasekit.server.store.memory import MemoryStore
from leasekit.server.store.schema import share
from leasekit.server.store.sql.statements import Statement
from leasekit.server.store.sqlite.store import SqliteStore
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import NewTask, Task
from leasekit.wire import PurgeRequest, RedriveRequest
from tests.sampling import in_soak, slow_after
from tests.server.conftest import Bench

_ALL_SHARES = Statement(sa.select(share))
_DROP_SHARES = Statement(sa.delete(share))


class Desk:
    """A store, and the roles on it without an engine: one transaction for each call, at a moment that tests set."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.now = 1_000_000.0
        self._random = random.Random(7)
        self._claims = 0

    def turn(self, tx: Any) -> UnitOfWork:
        return UnitOfWork(tx, now=self.now, instant=self.now, random=self._random)

    def put(self, counts: Mapping[str, int], **options: Any) -> None:
        """Schedule so many tasks of each key, which is their payload."""
        keys = [key for key, count in counts.items() for _ in range(count)]
        tasks = [NewTask(kind="k", key=key or None, payload=key, **options) for key in keys]
        for start in range(0, len(tasks), 1000):
            with self.store.transaction() as tx:
                frontend.schedule(self.turn(tx), tasks[start : start + 1000])

    def tasks(self, limit: int) -> list[Task]:
        self._claims += 1
        asked = claims.WaitingClaim(self._claims, "w", f"c{self._claims}", ("k",), limit, 0.0)
        with self.store.transaction() as tx:
            (answer,) = claims.claim(self.turn(tx), [asked])
        return list(answer.claimed.tasks) if answer.claimed is not None else []

    def take(self, limit: int = 1) -> list[str]:
        """Claim tasks, and return their keys."""
        return [bytes(task.payload).decode().strip('"') for task in self.tasks(limit)]

    def take_all(self, limit: int) -> list[str]:
        taken: list[str] = []
        while more := self.take(limit):
            taken += more
        return taken

    def tend(self) -> None:
        with self.store.transaction() as tx:
            consumer.look(self.turn(tx))


@pytest.fixture
def desk(make_store: Callable[[], Store]) -> Iterator[Desk]:
    store = make_store()
    store.open()
    yield Desk(store)
    store.close()


def rounds(taken: Sequence[str]) -> list[int]:
    """Return of each task the number that it has among those of its key."""
    seen = Counter[str]()
    numbers: list[int] = []
    for key in taken:
        seen[key] += 1
        numbers.append(seen[key])
    return numbers


def unfairness(taken: Sequence[str], waiting: Sequence[Mapping[str, int]]) -> int:
    """Return by how many tasks two keys differ at most, that both wait during the whole of an interval.

    `waiting` has before each step, and after the last, how many tasks of each key wait. This compares all intervals.
    """
    worst = 0
    for start in range(len(taken)):
        served = {key: 0 for key, count in waiting[start].items() if count}
        for at in range(start, len(taken)):
            if taken[at] in served:
                served[taken[at]] += 1
            served = {key: count for key, count in served.items() if waiting[at + 1].get(key)}
            if len(served) < 2:
                break
            worst = max(worst, max(served.values()) - min(served.values()))
    return worst


@pytest.mark.parametrize("make", [MemoryStore, SqliteStore])
@pytest.mark.parametrize(("keys", "most"), slow_after(2, [(3, 2000), (100, 500), (10_000, 500)]))
def test_a_skewed_backlog_is_taken_in_rounds_of_one_task_of_each_key(
    keys: int, most: int, make: Callable[..., Store], tmp_path: Path
) -> None:
    """The ideal of a backlog is known: round by round."""
    desk = Desk(make(tmp_path / "tasks.db") if make is SqliteStore else make())
    desk.store.open()
    counts = {f"{number:05}": 1 + number % 2 for number in range(1, keys)} | {"giant": most}
    desk.put(counts)
    taken = desk.take_all(997)
    assert Counter(taken) == Counter(counts)
    assert rounds(taken) == sorted(rounds(taken))
    desk.store.close()


@pytest.mark.soak  # by default with a backlog of 5,000 tasks
def test_a_million_tasks_of_one_key_delay_the_single_task_of_another_by_one_task(tmp_path: Path) -> None:
    desk = Desk(SqliteStore(tmp_path / "tasks.db"))
    desk.store.open()
    desk.put({"giant": in_soak(1_000_000, by_default=5_000)})
    desk.take(100)
    desk.put({"small": 1})
    assert "small" in desk.take(2)
    desk.store.close()


@pytest.mark.parametrize("seed", slow_after(2, range(6)))
@pytest.mark.parametrize("limit", [1, 4])
def test_keys_that_come_and_go_stay_within_two_tasks_of_each_other(desk: Desk, seed: int, limit: int) -> None:
    """The bound of start-time fair queueing for tasks of one size, over all intervals: Goyal, Vin and Cheng, 1996."""
    chance = random.Random(seed)
    names = ["", *"abcdef"]
    queue, taken, waiting = Counter[str](), list[str](), list[Counter[str]]()
    for _ in range(60):
        if chance.random() < 0.5:
            arrived = Counter(chance.choices(names, weights=[5, 50, 5, 2, 1, 1, 1], k=chance.randint(1, 8)))
            desk.put(arrived)
            queue += arrived
        if chance.random() < 0.2:
            desk.tend()
        for key in desk.take(limit):
            waiting.append(queue.copy())
            taken.append(key)
            queue[key] -= 1
    assert unfairness(taken, [*waiting, queue]) <= 2, (seed, taken)


def test_five_hundred_keys_leave_one_key_its_turn(desk: Desk) -> None:
    desk.put({**{f"a{number:03}": 3 for number in range(500)}, "b": 3})
    taken = desk.take_all(100)
    assert [at // 501 for at, key in enumerate(taken) if key == "b"] == [0, 1, 2]


def test_a_key_that_was_away_has_no_credit(desk: Desk) -> None:
    desk.put({"a": 60, "b": 1})
    desk.take(40)
    desk.put({"b": 10})
    assert Counter(desk.take(10)) == {"a": 5, "b": 5}


def test_a_key_owes_one_task_at_most_when_it_comes_back(desk: Desk) -> None:
    desk.put({"a": 40})
    desk.take(40)
    desk.put({"b": 20})
    desk.take(2)
    desk.put({"a": 20})
    assert Counter(desk.take(9)) in ({"a": 4, "b": 5}, {"a": 5, "b": 4})


def test_a_key_whose_tasks_are_due_later_stops_no_clock(desk: Desk) -> None:
    desk.put({"later": 5}, delay=100.0)
    desk.put({"a": 50})
    desk.take(30)
    desk.put({"new": 3})
    assert Counter(desk.take(6)) == {"a": 3, "new": 3}
    desk.now += 101
    assert Counter(desk.take(10)) == {"a": 5, "later": 5}


def test_tasks_of_equal_times_keep_the_order_in_which_they_came(desk: Desk) -> None:
    with desk.store.transaction() as tx:
        frontend.schedule(desk.turn(tx), [NewTask(kind="k", id=f"{n:03}", key="ab"[n % 2]) for n in range(100)])
    taken = [task.id for _ in range(5) for task in desk.tasks(20)]
    assert [task_id for task_id in taken if int(task_id) % 2] == [f"{n:03}" for n in range(1, 100, 2)]
    assert taken == sorted(taken)


def test_a_task_is_granted_once_in_the_transaction_that_schedules_it(desk: Desk) -> None:
    desk.put({"a": 2, "": 1})
    asked = claims.WaitingClaim(99, "w", "c", ("k",), 100, 0.0)
    with desk.store.transaction() as tx:
        turn = desk.turn(tx)
        frontend.schedule(turn, [NewTask(kind="k", key=key) for key in "aab"])
        (answer,) = claims.claim(turn, [asked])
    assert answer.claimed is not None
    ids = [task.id for task in answer.claimed.tasks]
    assert len(ids) == len(set(ids)) == 6


def test_a_restart_in_mid_backlog_changes_nothing(make_store: Callable[[], Store]) -> None:
    store = make_store()
    store.open()
    desk = Desk(store)
    desk.put({"a": 30, "b": 30, "c": 30})
    taken = desk.take(31)
    store.close()
    desk.store = make_store()
    desk.store.open()
    taken += desk.take(29)
    assert Counter(taken) == {"a": 20, "b": 20, "c": 20}
    desk.store.close()


def test_tasks_that_expire_or_are_given_back_keep_their_key(desk: Desk) -> None:
    desk.put({"a": 2, "b": 2}, claim_timeout=10.0, max_crashes=5)
    assert sorted(desk.take(4)) == ["a", "a", "b", "b"]
    desk.now += 11
    assert sorted(desk.take(2)) == ["a", "b"]


def test_shares_without_tasks_are_forgotten(desk: Desk) -> None:
    desk.put({"a": 3, "b": 1})
    desk.take(4)
    desk.take(1)
    desk.tend()
    with desk.store.transaction() as tx:
        assert [tx.share(lane, key).taken for lane in tx.lanes(["k"]) for key in "ab"] == []
    if not isinstance(desk.store, MemoryStore):
        with desk.store.view() as view:
            assert view._session.rows(_ALL_SHARES) == []  # type: ignore[attr-defined]


def test_a_large_answer_that_is_cut_charges_only_what_was_granted(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_ALWAYS_FIT", 1)
    monkeypatch.setattr(claims, "_ANSWER", 12)  # bytes: four payloads of three
    desk.put({"a": 8, "b": 8})
    assert rounds(taken := desk.take_all(10)) == sorted(rounds(taken))
    assert Counter(taken) == {"a": 8, "b": 8}


def test_a_page_of_shares_is_followed_by_the_next(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_lane, "_LEAST", 2)
    desk.put(dict.fromkeys("abcdefgh", 3))
    taken = desk.take_all(3)
    assert rounds(taken) == sorted(rounds(taken))
    assert len(taken) == 24


def test_a_lost_share_is_mended(desk: Desk) -> None:
    if isinstance(desk.store, MemoryStore):
        pytest.skip("nothing is lost in memory")
    desk.put({"a": 2})
    with desk.store.transaction() as tx:
        tx._session.run(_DROP_SHARES)  # type: ignore[attr-defined]
    assert desk.take() == []
    desk.tend()
    assert desk.take() == ["a"]


@pytest.mark.anyio
async def test_tasks_of_a_paused_collection_are_parked_out_of_their_queues_and_come_back(bench: Bench) -> None:
    for number in range(3):
        await bench.put(f"a{number}", key="a", collection="c")
        await bench.put(f"b{number}", key="b")
    await gate(bench, "collection", "c", "pause")
    assert await bench.ids() == ["b0", "b1", "b2"]
    assert await bench.ids() == []
    info = await bench.info("a0")
    assert (info.key, info.at.timestamp()) == ("a", bench.clock.wall)
    await gate(bench, "collection", "c", "open")
    assert await bench.ids() == ["a0", "a1", "a2"]


@pytest.mark.anyio
async def test_a_kind_that_is_dropped_ends_its_tasks_with_keys(bench: Bench) -> None:
    await bench.put("a0", "a1", key="a")
    await bench.put("b0", key="b", delay=60.0)
    await bench.put("c0")
    await gate(bench, "kind", "k", "drop")
    await bench.later(1)
    assert [await bench.status(task_id) for task_id in ("a0", "a1", "b0", "c0")] == [
        *["cancelled"] * 2,
        "new",
        "cancelled",
    ]
    await bench.later(60)
    assert await bench.status("b0") == "cancelled"


@pytest.mark.anyio
async def test_a_task_that_is_redriven_keeps_its_key(bench: Bench) -> None:
    for task_id, key in (("a", "x"), ("b", "x"), ("c", "y")):
        await bench.settle(await bench.taken(task_id, key=key), "fatal")
    await bench.engine.operations.redrive(RedriveRequest(ids=["a", "b", "c"]))
    assert sorted(await bench.ids(limit=2)) == ["a", "c"]


@pytest.mark.anyio
async def test_a_task_that_is_removed_leaves_no_row(bench: Bench, make_store: Callable[[], Store]) -> None:
    await bench.settle(await bench.taken("a", key="x"))
    await bench.engine.operations.purge(PurgeRequest())
    await bench.later(1)
    await bench.later(1)
    await bench.engine.__aexit__(None, None, None)
    store = make_store()
    store.open()
    with store.view() as view:
        assert (view.keys(range(20_000)), view.lanes(["k"])) == ({}, [])
    store.close()
    await bench.engine.__aenter__()


async def gate(bench: Bench, scope: str, name: str, mode: str) -> None:
    await bench.engine.operations.set_gate(GateChange(scope, name, mode, None, None, None, None))
