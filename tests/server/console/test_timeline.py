"""The life of a task, drawn to scale."""

from datetime import UTC, datetime, timedelta
from typing import Any

from leasekit.server.console.timeline import drawn
from leasekit.task import HistoryEntry, Status, TaskInfo

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def task(status: Status, **more: Any) -> TaskInfo:
    given: dict[str, Any] = {"scheduled_at": START, "at": START, "attempt": 1, "crashes": 0, "fence": 1} | more
    return TaskInfo(id="t", kind="k", status=status, priority=2, **given)


def run(outcome: str, claimed: float, end: float, *, fence: int = 1, **more: Any) -> HistoryEntry:
    moments = {name: at(value) for name, value in more.items() if name.endswith("_at")}
    others = {name: value for name, value in more.items() if not name.endswith("_at")}
    given: dict[str, Any] = {"claimed_at": at(claimed), "started_at": at(claimed)} | moments | others
    return HistoryEntry(fence=fence, attempt=1, outcome=outcome, at=at(end), worker="w", **given)


def test_bars_are_to_scale() -> None:
    life = drawn(task(Status.SUCCESS, ended_at=at(100), history=[run("success", 40, 100, started_at=60)]), at(500))
    wait, ran = life.picture.rows
    assert [(bar.x, bar.width) for bar in wait.bars] == [(0, 40)]
    assert [(bar.x, bar.width, bar.tone) for bar in ran.bars] == [(40, 20, "held"), (60, 40, "good")]
    assert ran.took == "1 min"


def test_a_wait_until_due_differs_from_a_wait_for_a_claim() -> None:
    life = drawn(task(Status.NEW, at=at(50)), at(100))
    assert [(bar.tone, bar.width) for bar in life.picture.rows[0].bars] == [("later", 50), ("due", 50)]


def test_a_task_that_is_not_due_is_drawn_up_to_its_due_time() -> None:
    life = drawn(task(Status.NEW, at=at(3600)), at(60))
    assert life.picture.ends_at == at(3600)


def test_the_silence_before_a_lost_lease_is_a_bar_of_its_own_and_its_reason_a_sentence() -> None:
    why = {"type": "LeaseExpired", "message": "nothing was heard from worker 'w' since noon"}
    lost = run("expired", 0, 100, heartbeat_at=30, error=why)
    life = drawn(task(Status.ENQUEUED, history=[lost]), at(100))
    silent = life.picture.rows[-1].bars[-1]
    assert (silent.tone, silent.x, silent.width) == ("silent", 30, 70)
    assert life.lost == "LeaseExpired: nothing was heard from worker 'w' since noon"


def test_a_crash_without_an_error_is_told_too() -> None:
    life = drawn(task(Status.ENQUEUED, history=[run("crash", 0, 10)]), at(20))
    assert life.lost == "worker 'w' died in run 1"


def test_a_run_that_goes_on_ends_now_and_shows_since_when_nothing_was_heard() -> None:
    running = task(
        Status.PROCESSING, claimed_at=at(0), started_at=at(0), heartbeat_at=at(90), lease_until=at(400), worker="w"
    )
    bars = drawn(running, at(100)).picture.rows[-1].bars
    assert [(bar.tone, bar.x, bar.width) for bar in bars] == [("run", 0, 90), ("silent", 90, 10)]


def test_short_runs_after_a_long_wait_are_drawn_close_up() -> None:
    life = drawn(task(Status.SUCCESS, ended_at=at(1010), history=[run("success", 1000, 1010)]), at(2000))
    assert life.is_close_up
    assert life.waited == 1000
    assert [(bar.x, bar.width) for bar in life.picture.rows[0].bars] == [(0, 100)]


def test_what_is_too_short_to_see_can_be_seen() -> None:
    runs = [run("retry", 0, 0.001), run("success", 999, 1000, fence=2)]
    bar = drawn(task(Status.SUCCESS, ended_at=at(1000), history=runs), at(1000)).picture.rows[1].bars[0]
    assert bar.width >= 0.4


def test_a_redrive_is_a_mark_without_a_run() -> None:
    redriven = HistoryEntry(fence=1, attempt=1, outcome="redriven", at=at(60), worker="operator")
    life = drawn(task(Status.ENQUEUED, history=[run("fatal", 0, 50), redriven]), at(100))
    assert life.picture.rows[-1].bars[0].tone == "act"
    assert life.picture.rows[-1].name == ""


def test_the_scale_has_a_handful_of_round_steps() -> None:
    for seconds in (0.01, 3, 47, 3600, 86_400 * 40):
        life = drawn(task(Status.SUCCESS, ended_at=at(seconds), history=[run("success", 0, seconds)]), at(seconds))
        assert 2 <= len(life.picture.ticks) <= 8, life.picture.ticks
        assert life.picture.ticks[0].label == "0 s"
