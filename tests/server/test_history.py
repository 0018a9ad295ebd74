"""What happened in each minute: counted in memory, written once a minute, on each store."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from leasekit.named import PREFIXES
from leasekit.server.engine import Engine
from leasekit.server.history import KEPT, Counts, Recorder, quantile
from leasekit.server.store import MinuteRow, Store
from leasekit.server.tally import SECONDS, Tally
from leasekit.task import NewTask, Settlement

START = 1_800_000_000.0 - 1_800_000_000.0 % 60


class Clock:
    def __init__(self) -> None:
        self.now = START + 1

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def engine(make_store: Callable[[], Store], clock: Clock) -> AsyncIterator[Engine]:
    async with Engine(make_store(), clock=clock, period=3600) as engine:
        yield engine


async def live(engine: Engine, clock: Clock, outcome: Any = "success", *, kind: str = "k", waits: float = 0.0) -> None:
    """Let a task wait, run for a second, and end."""
    await engine.schedule([NewTask(kind=kind, id=kind if kind.startswith(PREFIXES) else None)])
    clock.now += waits
    claim_id = f"{clock.now}-{outcome}-{kind}"
    (task,) = (await engine.claim(worker="w", kinds=[kind], limit=1, wait=0, claim_id=claim_id)).tasks
    clock.now += 1
    await engine.results("w", [Settlement(id=task.id, token=task.token, outcome=outcome)])


@pytest.mark.anyio
async def test_each_minute_has_its_own_numbers(engine: Engine, clock: Clock) -> None:
    await live(engine, clock)
    await live(engine, clock, "retry")
    clock.now = START + 61
    await engine.tick()
    await live(engine, clock, "fatal")
    minute = int(START // 60)
    found = (await engine.queries.history())["k"]
    assert {at: (of.scheduled, of.succeeded, of.failed) for at, of in found.items()} == {
        minute: (2, 1, 1),
        minute + 1: (1, 0, 1),
    }


@pytest.mark.anyio
async def test_the_minute_under_way_is_shown_before_it_is_written(engine: Engine, clock: Clock) -> None:
    await live(engine, clock, waits=3)
    (counts,) = (await engine.queries.history(kind="k"))["k"].values()
    assert counts.succeeded == 1
    assert 1 < (quantile(counts.starts, 0.95) or 0) <= 5


@pytest.mark.anyio
async def test_the_numbers_are_there_after_a_restart(make_store: Callable[[], Store], clock: Clock) -> None:
    store = make_store()
    if store.url is None:
        pytest.skip("a store in memory ends with its process")
    async with Engine(store, clock=clock, period=3600) as engine:
        await live(engine, clock)
        clock.now += 60
        await engine.tick()
        await live(engine, clock)
    async with Engine(store, clock=clock, period=3600) as engine:
        found = (await engine.queries.history())["k"]
        assert [counts.succeeded for counts in found.values()] == [1, 1]


@pytest.mark.anyio
async def test_names_are_left_out(engine: Engine, clock: Clock) -> None:
    await live(engine, clock, kind="named:leader")
    assert await engine.queries.history() == {}


@pytest.mark.anyio
async def test_what_is_older_than_a_day_is_forgotten(engine: Engine, clock: Clock) -> None:
    await live(engine, clock)
    clock.now += 60
    await engine.tick()
    clock.now += KEPT * 60
    await engine.tick()
    await live(engine, clock)
    clock.now += 60
    await engine.tick()
    found = await engine._readers.read(lambda view: view.minutes(since=0))
    assert len(found) == 1


@pytest.mark.anyio
async def test_nodes_add_up(make_store: Callable[[], Store], engine: Engine, clock: Clock) -> None:
    minute = int(START // 60)
    rows = [MinuteRow(minute, "k", node, b"[5,%d]" % n) for n, node in enumerate(("one", "two"), 1)]
    await engine._write_minutes(rows)
    await engine._write_minutes(rows[:1])  # a repeat counts once
    assert (await engine.queries.history())["k"] == {minute: Counts(scheduled=10, succeeded=3)}


@pytest.mark.anyio
async def test_a_damaged_row_is_a_gap(engine: Engine) -> None:
    await engine._write_minutes([MinuteRow(int(START // 60), "k", "n", b"{")])
    assert await engine.queries.history() == {}


def test_a_node_that_has_seen_no_minute_end_writes_nothing() -> None:
    tally = Tally()
    recorder = Recorder(tally, "n")
    recorder.due(START)
    tally._of("k", 0.0).events["scheduled", ""] += 1
    assert recorder.rest() == []


def test_a_row_that_was_not_written_is_offered_again() -> None:
    tally = Tally()
    recorder = Recorder(tally, "n")
    recorder.due(START)
    tally._of("k", 0.0).events["scheduled", ""] += 1
    rows = recorder.due(START + 60)
    assert rows == recorder.due(START + 61)
    recorder.written(rows)
    assert recorder.due(START + 62) == []


def test_a_clock_that_goes_back_loses_no_count() -> None:
    tally = Tally()
    recorder = Recorder(tally, "n")
    recorder.due(START)
    tally._of("k", 0.0).events["scheduled", ""] += 1
    assert recorder.due(START - 600) == []
    assert len(recorder.due(START + 60)) == 1


def test_a_quantile_is_between_the_bounds_of_its_durations() -> None:
    counts = [0] * (len(SECONDS) + 1)
    assert quantile(counts, 0.95) is None
    counts[2] = 100  # between 0.1 and 0.5 s
    assert quantile(counts, 0.5) == pytest.approx(0.3)
    counts[-1] = 10
    assert (quantile(counts, 0.99) or 0) > SECONDS[-1]
