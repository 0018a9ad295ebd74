"""Periodic tasks on each store: each firing once, the policies, changes by operators, and what is noted."""

import logging
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from leasekit.errors import Refused
from leasekit.periodic import Firing, PeriodicInfo, PeriodicTaskItem
from leasekit.server import consumers_work, declarations
from leasekit.server.firings import firing_id
from leasekit.server.roles import firing
from leasekit.server.roles.gates import GateChange
from leasekit.server.roles.periodic import Pause, Put, Remove, Trigger
from leasekit.server.store.sqlite.store import SqliteStore
from leasekit.task import KindSettings, Scheduled, Status
from leasekit.wire import PurgeRequest
from tests.server.conftest import Bench, plain

pytestmark = [pytest.mark.anyio, pytest.mark.slow_with("postgres")]

HOUR = 3600
START = 1_000_800  # the first full hour after the bench's clock begins, and 800 s later


def item(**options: Any) -> PeriodicTaskItem:
    rule: dict[str, Any] = {} if "cron" in options else {"every": HOUR}
    return PeriodicTaskItem(**({"kind": "k"} | rule | options))


async def put(
    bench: Bench, name: str = "p", *, by: str = "ada", is_declared: bool = False, **options: Any
) -> PeriodicInfo:
    info = await bench.engine.operations.change_periodic(Put(name, item(**options), by, is_declared))
    assert isinstance(info, PeriodicInfo)
    return info


async def declared(bench: Bench, **options: Any) -> PeriodicInfo:
    return await put(bench, is_declared=True, **options)


async def pause(bench: Bench, *, is_paused: bool = True) -> PeriodicInfo:
    info = await bench.engine.operations.change_periodic(Pause("p", is_paused, "bob"))
    assert isinstance(info, PeriodicInfo)
    return info


async def shown(bench: Bench, name: str = "p", count: int = 1) -> PeriodicInfo:
    info = await bench.engine.queries.periodic(name, count=count)
    assert info is not None
    return info


async def fates(bench: Bench, name: str = "p") -> list[tuple[int, str]]:
    """What became of the firings, the oldest first: which hour after `START`, and the outcome."""
    notes = reversed((await shown(bench, name)).firings)
    return [(int(note.at.timestamp() - START) // HOUR, note.outcome) for note in notes]


async def listed(bench: Bench) -> list[str]:
    return [task.id for task in (await bench.engine.queries.list_tasks(limit=1000)).tasks]


def hour(number: int, name: str = "p") -> str:
    return firing_id(name, START + number * HOUR)


async def until(bench: Bench, number: float) -> None:
    """Let the clock show so many hours after `START`."""
    await bench.later(START + number * HOUR - bench.clock.wall)


def test_the_bench_begins_shortly_before_a_full_hour() -> None:
    assert START % HOUR == 0


# Each firing once -----------------------------------------------------------------------------------------------


async def test_a_firing_is_a_task_with_the_name_and_the_instant(bench: Bench) -> None:
    info = await put(bench, payload=Raw(b'{"to": "all"}'), collection="reports", key="t", priority=1)
    assert info.next_at == [datetime.fromtimestamp(START, UTC)]
    assert info.firings == []
    await until(bench, -0.001)
    assert await bench.ids() == []
    await until(bench, 0)
    (task,) = (await bench.claim()).tasks
    assert task.id == "p@1970-01-12T14:00:00Z" == hour(0)
    assert plain(task.payload) == {"to": "all"}
    assert (task.collection, task.priority) == ("reports", 1)
    assert (await bench.info(task.id)).key == "t"
    info = await shown(bench)
    assert info.next_at == [datetime.fromtimestamp(START + HOUR, UTC)]
    assert info.firings == [Firing(at=datetime.fromtimestamp(START, UTC), outcome="scheduled", id=hour(0))]


async def test_each_firing_is_made_once_through_restarts(bench: Bench) -> None:
    await put(bench, overlap="queue")
    for quarter in range(9):
        await bench.restart()
        await until(bench, quarter / 4)
        await bench.engine.tick()
    assert await listed(bench) == [hour(number) for number in range(3)]


async def test_a_cron_fires_by_the_wall_clock_of_its_zone(bench: Bench) -> None:
    info = await put(bench, cron="30 15 * * *", tz="Europe/Berlin")
    assert info.next_at == [datetime(1970, 1, 12, 14, 30, tzinfo=UTC)]
    await until(bench, 0.5)
    assert await bench.ids() == ["p@1970-01-12T14:30:00Z"]
    assert len((await shown(bench, count=5)).next_at) == 5


async def test_jitter_delays_a_firing_and_leaves_its_id(bench: Bench) -> None:
    info = await put(bench, jitter=600.0)
    (at,) = info.next_at
    assert START < at.timestamp() < START + 600
    await bench.later(at.timestamp() - bench.clock.wall - 0.01)
    assert await bench.ids() == []
    await bench.later(0.02)
    assert await bench.ids() == [hour(0)]


async def test_a_firing_takes_the_settings_of_its_kind_and_waits_behind_its_gate(bench: Bench) -> None:
    await bench.engine.operations.set_kind("k", KindSettings(priority=4), by=None)
    await bench.engine.operations.set_gate(GateChange("kind", "k", "pause", None, None, None, None))
    await put(bench)
    await until(bench, 0)
    assert await bench.ids() == []
    assert (await bench.info(hour(0))).priority == 4
    await bench.engine.operations.set_gate(GateChange("kind", "k", "open", None, None, None, None))
    assert await bench.ids() == [hour(0)]


async def test_a_task_that_has_the_id_already_is_the_firing(bench: Bench) -> None:
    await bench.put(hour(0))
    await put(bench)
    await until(bench, 0)
    assert await listed(bench) == [hour(0)]
    (note,) = (await shown(bench)).firings
    assert (note.outcome, note.reason) == ("scheduled", "there was a task with this id")


@pytest.mark.parametrize("overlap", ["queue", "skip", "replace"])
async def test_a_foreign_task_that_took_the_id_in_advance_stops_no_firing(bench: Bench, overlap: Any) -> None:
    await bench.put(hour(0), kind="foreign")
    await put(bench, overlap=overlap)
    await until(bench, 0)
    (note,) = (await shown(bench)).firings
    assert (note.outcome, note.reason) == ("scheduled", None)
    (fired,) = await bench.ids()
    assert fired == note.id != hour(0)
    await until(bench, 1)
    assert [fate for _, fate in await fates(bench)] == ["scheduled", "skipped" if overlap == "skip" else "scheduled"]
    assert (await bench.status(hour(0))) == "new"


async def test_a_tick_fires_a_bounded_number_of_periodic_tasks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firing, "STEP", 2)
    monkeypatch.setattr(consumers_work, "_FIRE_MOST", 4)
    for number in range(10):
        await put(bench, f"p{number}")
    fired = list[int]()
    await until(bench, 0)
    for _ in range(3):
        fired.append(len(await listed(bench)))
        await bench.engine.tick()
    assert fired == [4, 8, 10], "leases that end, and a start, wait for no more"


async def test_the_firings_of_one_author_keep_out_none_of_another(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firing, "STEP", 2)
    monkeypatch.setattr(firing, "_MOST", 1)  # a late periodic task makes many tasks at once
    monkeypatch.setattr(consumers_work, "_FIRE_MOST", 4)
    for number in range(10):
        await put(bench, f"a{number}", by="flood")
    for name, by in (("y", "eve"), ("z", "ada")):
        await put(bench, name, by=by)
    await until(bench, 0)
    assert sorted(await listed(bench)) == [hour(0, "a0"), hour(0, "y")]
    await bench.engine.tick()
    assert hour(0, "z") in await listed(bench)


async def test_many_periodic_tasks_that_are_due_together_all_fire(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firing, "STEP", 3)
    monkeypatch.setattr(firing, "_MOST", 2)
    for number in range(10):
        await put(bench, f"p{number}")
    await until(bench, 0)
    assert sorted(await listed(bench)) == [hour(0, f"p{number}") for number in range(10)]


# Outages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("catch_up", "made"), [(0, []), (1, [23]), (3, [21, 22, 23])])
async def test_after_a_day_of_outage_as_many_are_made_up_for_as_it_says(
    bench: Bench, catch_up: int, made: list[int]
) -> None:
    await put(bench, catch_up=catch_up, overlap="queue")
    await until(bench, 23.5)
    assert await listed(bench) == [hour(number) for number in made]
    missed = (await shown(bench)).firings[-1]
    assert (missed.outcome, missed.count) == ("missed", 24 - catch_up)
    assert missed.reason == f"too late: catch_up is {catch_up}"


async def test_the_task_of_a_firing_has_what_is_left_of_its_start_deadline(bench: Bench) -> None:
    await put(bench, start_deadline=100.0)
    await until(bench, 70 / HOUR)
    (fired,) = (await shown(bench)).firings
    assert fired.id is not None
    assert (await bench.info(fired.id)).start_by == fired.at + timedelta(seconds=100)
    asked = await bench.engine.operations.change_periodic(Trigger("p", fired.at.timestamp() + 1, "bob"))
    assert isinstance(asked, Scheduled)
    assert (await bench.info(asked.id)).start_by is None


async def test_a_firing_past_its_start_deadline_is_noted_and_not_made(bench: Bench) -> None:
    await put(bench, start_deadline=100.0)
    await until(bench, 101 / HOUR)
    assert await listed(bench) == []
    (note,) = (await shown(bench)).firings
    assert (note.outcome, note.reason) == ("missed", "too late: catch_up is 1, and start_deadline is 100 s")
    await until(bench, 1 + 100 / HOUR)
    assert await listed(bench) == [hour(1)]


async def test_no_task_is_made_while_the_store_is_cramped_and_it_is_made_up_for(bench: Bench) -> None:
    await put(bench)
    bench.engine._store.cramped = lambda: "the disk is full"  # type: ignore[method-assign]
    await until(bench, 0)
    assert await listed(bench) == []
    bench.engine._store.cramped = lambda: None  # type: ignore[method-assign]
    await until(bench, 0.5)
    assert await listed(bench) == [hour(0)]


async def test_only_the_latest_firings_are_noted(bench: Bench) -> None:
    await put(bench, overlap="queue")
    for number in range(25):
        await until(bench, number)
    assert [number for number, _ in await fates(bench)] == list(range(5, 25))


# Overlap --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_claimed", [False, True])
async def test_skip_leaves_a_firing_out_while_the_one_before_has_not_ended(bench: Bench, is_claimed: bool) -> None:
    await put(bench, heartbeat_timeout=86400.0)
    await until(bench, 0)
    if is_claimed:
        await bench.take()
    await until(bench, 1)
    assert await listed(bench) == [hour(0)]
    note = (await shown(bench)).firings[0]
    assert (note.outcome, note.reason) == ("skipped", f'"{hour(0)}" has not ended')
    if not is_claimed:
        await bench.cancel(hour(0))
        await until(bench, 2)
        assert await bench.ids() == [hour(2)]


async def test_skip_makes_one_of_those_that_are_made_up_for_together(bench: Bench) -> None:
    await put(bench, catch_up=3)
    await until(bench, 5.5)
    assert await listed(bench) == [hour(3)]
    assert await fates(bench) == [(2, "missed"), (3, "scheduled"), (4, "skipped"), (5, "skipped")]


async def test_skip_goes_on_once_the_one_before_has_ended(bench: Bench) -> None:
    await put(bench)
    for number in range(3):
        await until(bench, number)
        await bench.settle(await bench.take(), ("success", "fatal", "success")[number])
    assert await fates(bench) == [(0, "scheduled"), (1, "scheduled"), (2, "scheduled")]


async def test_queue_schedules_a_firing_all_the_same(bench: Bench) -> None:
    await put(bench, overlap="queue")
    await until(bench, 0)
    await until(bench, 1)
    assert await bench.ids() == [hour(0), hour(1)]


async def test_replace_cancels_the_one_before_if_it_waits(bench: Bench) -> None:
    await put(bench, overlap="replace")
    await until(bench, 0)
    await until(bench, 1)
    assert await bench.ids() == [hour(1)]
    info = await bench.info(hour(0))
    assert (info.status, info.reason) == ("cancelled", f'replaced by "{hour(1)}"')


@pytest.mark.parametrize("overlap", ["skip", "replace"])
async def test_a_task_of_another_kind_that_has_the_id_of_the_last_firing_by_now_is_not_its_own(
    bench: Bench, overlap: Any
) -> None:
    await put(bench, overlap=overlap)
    await until(bench, 0)
    await bench.cancel(hour(0))
    await bench.engine.operations.purge(PurgeRequest(ids=[hour(0)]))
    await bench.put(hour(0), kind="other")
    await until(bench, 1)
    assert await bench.status(hour(0)) == "new"
    assert await bench.ids() == [hour(1)]


async def test_replace_lets_a_run_go_on(bench: Bench) -> None:
    await put(bench, overlap="replace", heartbeat_timeout=86400.0)
    await until(bench, 0)
    task = await bench.take()
    await until(bench, 1)
    await until(bench, 2)
    verdict = await bench.beat(task)
    assert (verdict.verdict, verdict.cancel_requested) == ("renewed", False)
    assert await bench.ids() == [hour(2)]
    assert await bench.status(hour(1)) == "cancelled"


async def test_replace_makes_the_latest_of_those_that_are_made_up_for_together(bench: Bench) -> None:
    await put(bench, overlap="replace", catch_up=3)
    await until(bench, 5.5)
    assert await listed(bench) == [hour(5)]
    assert await fates(bench) == [(2, "missed"), (3, "replaced"), (4, "replaced"), (5, "scheduled")]


async def test_replace_cancels_a_task_that_waits_for_its_next_attempt_with_what_waits_for_it(bench: Bench) -> None:
    await put(bench, overlap="replace")
    await until(bench, 0)
    await bench.put("follower", kind="other", after=[hour(0)])
    await bench.settle(await bench.take(), "retry", retry_after=86400.0)
    await until(bench, 1)
    assert await bench.status(hour(0)) == "cancelled"
    assert await bench.status("follower") == "dropped"


# Changes --------------------------------------------------------------------------------------------------------


async def test_the_same_again_writes_nothing(bench: Bench) -> None:
    before = await put(bench)
    bench.clock.advance(10)
    assert await put(bench) == before


async def test_another_payload_keeps_the_next_firing(bench: Bench) -> None:
    await put(bench)
    await until(bench, 0.5)
    info = await put(bench, payload=Raw(b"2"))
    assert info.next_at == [datetime.fromtimestamp(START + HOUR, UTC)]
    await bench.settle(await bench.take())
    await until(bench, 1)
    assert plain((await bench.take()).payload) == 2


async def test_another_rule_makes_no_firing_of_the_past(bench: Bench) -> None:
    await put(bench, cron="0 20 * * *")
    await until(bench, 0.5)
    info = await put(bench, cron="10 14 * * *")
    assert info.next_at == [datetime(1970, 1, 13, 14, 10, tzinfo=UTC)]
    await bench.engine.tick()
    assert await listed(bench) == []


async def test_frequent_changes_put_no_firing_off(bench: Bench) -> None:
    for quarter in range(12):
        await put(bench, payload=Raw(str(quarter).encode()), every=HOUR - quarter % 2 * HOUR // 2, overlap="queue")
        await until(bench, quarter / 4)
    assert {hour(0), hour(1), hour(2)} <= set(await listed(bench))


async def test_a_change_makes_what_was_due_before_it(bench: Bench) -> None:
    await put(bench)
    bench.clock.advance(START - bench.clock.wall)  # and the consumer has not looked
    await put(bench, every=7 * HOUR)
    assert await listed(bench) == [hour(0)]


async def test_a_paused_one_does_not_fire_and_makes_up_for_nothing_when_it_is_resumed(bench: Bench) -> None:
    await put(bench, catch_up=100)
    info = await pause(bench)
    assert (info.is_paused, info.next_at, info.changed_by) == (True, [], "bob")
    await bench.restart()
    await until(bench, 5.5)
    assert await listed(bench) == []
    info = await pause(bench, is_paused=False)
    assert info.next_at == [datetime.fromtimestamp(START + 6 * HOUR, UTC)]
    await until(bench, 6)
    assert await listed(bench) == [hour(6)]


async def test_a_pause_is_kept_through_changes_and_repeats(bench: Bench) -> None:
    await put(bench)
    before = await pause(bench)
    bench.clock.advance(5)
    assert await pause(bench) == before
    assert (await put(bench, every=60)).is_paused
    await until(bench, 3)
    assert await listed(bench) == []


async def test_what_code_declares_again_changes_nothing_that_an_operator_has_changed(bench: Bench) -> None:
    await declared(bench)
    await put(bench, every=60)
    assert (await declared(bench)).task.every == 60
    assert (await declared(bench, every=120)).task.every == 120


async def test_what_an_operator_has_set_is_known_as_declared_once_code_says_the_same(bench: Bench) -> None:
    await put(bench)
    await declared(bench)
    await put(bench, every=60)
    assert (await declared(bench)).task.every == 60


async def test_what_an_operator_has_paused_stays_so_whatever_code_declares(bench: Bench) -> None:
    await declared(bench)
    await pause(bench)
    assert (await declared(bench)).is_paused
    assert (await declared(bench, every=60)).is_paused


async def test_workers_of_two_versions_do_not_undo_each_other(bench: Bench) -> None:
    for version in range(2):
        await declared(bench, every=60 + version)
    for _ in range(20):
        await bench.later(300)
        await bench.restart()
        for version in range(2):
            assert (await declared(bench, every=60 + version)).task.every == 61


async def test_code_that_was_taken_back_holds_no_longer_once_no_worker_repeats_it(bench: Bench) -> None:
    for every in (60, 61):
        await declared(bench, every=every)
    await bench.later(declarations.FORGOTTEN - 1)
    assert (await declared(bench, every=60)).task.every == 61
    await bench.later(1)
    assert (await declared(bench, every=60)).task.every == 60
    assert (await declared(bench, every=61)).task.every == 60


async def test_a_fleet_that_repeats_a_declaration_writes_once_a_minute_and_tells_nobody(bench: Bench) -> None:
    first = await declared(bench)
    events = bench.engine.feed.follow()
    await anext(events)
    bench.clock.advance(59)
    assert await declared(bench) == first
    bench.clock.advance(1)
    info = await declared(bench)
    assert first.declared_at is not None
    assert info.declared_at == first.declared_at + timedelta(seconds=60)
    assert info.changed_at == first.changed_at
    await pause(bench)
    assert b'"worker":"bob"' in await anext(events)


async def test_what_only_operators_have_set_is_not_declared(bench: Bench) -> None:
    assert (await put(bench)).declared_at is None


async def test_one_that_is_triggered_fires_at_once_beside_its_rule(bench: Bench) -> None:
    await put(bench)
    await pause(bench)
    bench.clock.advance(0.25)
    answer = await bench.engine.operations.change_periodic(Trigger("p", None, None))
    assert answer == Scheduled(id="p@1970-01-12T13:46:40.250Z", created=True, status=Status.NEW)
    await bench.settle(await bench.take())
    (note,) = (await shown(bench)).firings
    assert (note.outcome, note.id) == ("triggered", "p@1970-01-12T13:46:40.250Z")
    await pause(bench, is_paused=False)
    await until(bench, 0)
    assert await bench.ids() == [hour(0)]


async def test_a_trigger_that_is_repeated_makes_one_task(bench: Bench) -> None:
    await put(bench)
    for created in (True, False):
        answer = await bench.engine.operations.change_periodic(Trigger("p", START - 7200.0, None))
        assert isinstance(answer, Scheduled)
        assert (answer.id, answer.created) == (hour(-2), created)
    assert await fates(bench) == [(-2, "triggered")]


async def test_one_that_is_removed_fires_no_more_and_its_tasks_stay(bench: Bench) -> None:
    await put(bench)
    await until(bench, 0)
    removed = await bench.engine.operations.change_periodic(Remove("p", None))
    assert isinstance(removed, PeriodicInfo)
    assert removed.name == "p"
    assert await bench.engine.operations.change_periodic(Remove("p", None)) is None
    assert await bench.engine.queries.periodic("p") is None
    await until(bench, 2)
    assert await listed(bench) == [hour(0)]
    await put(bench)
    await until(bench, 3)
    assert await listed(bench) == [hour(0), hour(3)]


@pytest.mark.parametrize("change", [Pause("p", True, None), Trigger("p", None, None), Remove("p", None)])  # noqa: FBT003
async def test_one_that_does_not_exist_cannot_be_changed(bench: Bench, change: Any) -> None:
    assert await bench.engine.operations.change_periodic(change) is None


@pytest.mark.parametrize(
    "options", [{"kind": "named:x"}, {"cron": "0 0 31 2 *"}, {"cron": "0 0 1 1 *", "tz": "Mars/Base"}]
)
async def test_one_that_would_never_fire_is_refused(bench: Bench, options: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        await put(bench, **options)
    assert await bench.engine.queries.periodics() == []


async def test_none_fires_tasks_whose_ids_are_those_of_names(bench: Bench) -> None:
    with pytest.raises(Refused, match="stands for the lease of a name"):
        await put(bench, "once:report")


async def test_the_log_says_what_was_set_without_the_payload(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="leasekit.server")
    await put(bench, "report", payload=Raw(b'"secret"'))
    (line,) = [record.getMessage() for record in caplog.records if "periodic task" in record.getMessage()]
    assert '"payload":"<8 bytes>"' in line


async def test_they_are_listed_by_name_in_pages(bench: Bench) -> None:
    for name in ("b", "a", "d", "c"):
        await put(bench, name)
    names = [info.name for info in await bench.engine.queries.periodics(limit=3)]
    assert names == ["a", "b", "c"]
    assert [info.name for info in await bench.engine.queries.periodics(after="c", limit=3)] == ["d"]


# Damage ---------------------------------------------------------------------------------------------------------


async def test_one_that_cannot_be_judged_is_noted_keeps_no_other_from_firing_and_can_be_set_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasekit.server.engine._PERIOD", 3600.0)
    bench = Bench(lambda: SqliteStore(tmp_path / "tasks.db"))
    async with bench.engine:
        for name in ("a", "b", "p"):
            await put(bench, name)
        unknown = b'{"kind":"k","cron":"0 7 * * *","tz":"No/Zone"}'
        for name, damaged in {"a": b"{", "b": unknown}.items():
            with closing(sqlite3.connect(tmp_path / "tasks.db")) as connection, connection:
                connection.execute("UPDATE periodic SET task = ? WHERE name = ?", (damaged, name))
        await until(bench, 0)
        assert await listed(bench) == [hour(0)]
        await bench.later(30)
        assert len([record for record in caplog.records if "cannot be judged" in record.message]) == 2
        await bench.later(31)
        assert len([record for record in caplog.records if "cannot be judged" in record.message]) == 4
        info = await shown(bench, "b")
        assert [note.outcome for note in info.firings] == ["failed"]
        assert "tz is no time zone that the service knows" in str(info.firings[0].reason)
        failed = {kind: of.events["firing", "failed"] for kind, of in bench.engine.commit.tally.kinds.items()}
        assert failed == {"k": 1, "other": 1}  # the kind of the other one cannot be read
        assert [info.name for info in await bench.engine.queries.periodics()] == ["b", "p"]
        with pytest.raises(Refused, match=r"the periodic task 'a' is damaged: set it again"):
            await bench.engine.queries.periodic("a")
        await put(bench, "a")
        await until(bench, 1)
        assert await listed(bench) == [hour(0), hour(1, "a")]


# Events and counts ----------------------------------------------------------------------------------------------


async def test_firings_and_changes_are_events_and_firings_are_counted(bench: Bench) -> None:
    events = bench.engine.feed.follow()
    await anext(events)
    await put(bench)
    await until(bench, 0)
    await until(bench, 1)
    await pause(bench)
    await bench.engine.operations.change_periodic(Remove("p", None))
    heard = b""
    while heard.count(b'"periodic_changed"') < 3:
        heard += await anext(events)
    assert heard.count(b'"event":"firing"') == 2
    assert f'"id":"{hour(0)}","kind":"k","outcome":"scheduled","periodic":"p"'.encode() in heard
    assert b'"kind":"k","outcome":"skipped","periodic":"p"' in heard
    assert bench.engine.commit.tally.kinds["k"].events["firing", "scheduled"] == 1
    assert bench.engine.commit.tally.kinds["k"].events["firing", "skipped"] == 1


async def test_a_firing_that_is_refused_is_tried_again_and_keeps_no_other_from_firing(bench: Bench) -> None:
    await put(bench, "a", prefers={"zone": "eu"}, collection="c", overlap="replace")
    await put(bench, "b", kind="l")
    await bench.engine.operations.set_kind("k", KindSettings(fair=True), by=None)
    await bench.later(START + 1 - bench.clock.wall)
    (failed,) = (await shown(bench, "a")).firings
    assert (failed.outcome, "cannot prefer workers" in (failed.reason or "")) == ("failed", True)
    assert [outcome for _, outcome in await fates(bench, "b")] == ["scheduled"]
    await bench.engine.operations.set_kind("k", KindSettings(fair=False), by=None)
    await bench.later(61)
    assert [outcome for _, outcome in await fates(bench, "a")][-1] == "scheduled"
