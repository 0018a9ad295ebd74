"""The store's time."""

import time
from pathlib import Path

import pytest

from leasekit.server import clock as clocks
from leasekit.server.clock import StoreClock


class Hands:
    wall = 1000.0
    boot = 5.0


def clock() -> tuple[StoreClock, Hands]:
    hands = Hands()
    return StoreClock(lambda: hands.wall, lambda: hands.boot), hands


def test_it_goes_with_the_wall_clock() -> None:
    it, hands = clock()
    hands.wall += 3
    hands.boot += 3
    assert it.read() == (1003, 1003, False)


def test_it_goes_on_where_the_wall_clock_is_set_back() -> None:
    it, hands = clock()
    hands.wall -= 100
    hands.boot += 3
    assert it.read() == (1003, 1003, False)
    hands.wall += 99
    hands.boot += 1
    assert it.read() == (1004, 1004, False)


@pytest.mark.parametrize(("times", "step"), [(1, 100.0), (200, 0.5)])
def test_what_is_due_follows_every_step_ahead_and_leases_follow_none(times: int, step: float) -> None:
    it, hands = clock()
    for _ in range(times):
        hands.wall += step
        it.read()
    assert it.read() == (1100, 1000, False)


def test_a_peek_does_not_swallow_a_step() -> None:
    it, hands = clock()
    hands.wall += 100
    assert it.peek() == 1000
    assert it.read().now == 1100


def test_it_is_not_before_what_was_written_last_by_either_clock() -> None:
    it, hands = clock()
    assert it.not_before(900) == (1000, 1000, False)
    assert it.not_before(5000) == (5000, 5000, False)
    hands.wall += 100
    hands.boot += 3
    assert it.read() == (5003, 5003, False)


def test_a_clock_without_a_reference_is_its_own() -> None:
    hands = Hands()
    it = StoreClock(lambda: hands.wall, None)
    hands.wall += 100
    assert it.read() == (1100, 1100, False)


def test_the_real_clocks_agree() -> None:
    it = StoreClock(None, None)
    first, second = it.read(), it.read()
    assert first.now <= second.now
    assert not second.after_gap


def test_a_process_that_did_not_run_for_a_while_has_missed_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(clocks, "boottime", lambda: now[0])
    it = StoreClock(lambda: now[0] + 1000, clocks.boottime)
    now[0] += 5
    assert not it.read().after_gap
    now[0] += 5.1
    assert it.read() == (1110.1, 1110.1, True)
    assert not it.read().after_gap


def test_a_clock_that_is_turned_by_hand_does_not_stall() -> None:
    it, hands = clock()
    hands.wall += 100
    hands.boot += 100
    assert not it.read().after_gap


def test_the_boot_clock_of_another_time_namespace_tells_nothing_of_the_time_that_passed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`unshare --time --boottime 100000`: the machine is the same, and so is its boot id."""
    real, offsets = time.clock_gettime, tmp_path / "timens_offsets"
    monkeypatch.setattr(clocks, "_OFFSETS", offsets, raising=False)
    offsets.write_text("monotonic 0 0\nboottime 0 0\n")
    earlier = StoreClock(None, None)
    anchor = earlier.anchor(earlier.instant())
    offsets.write_text("monotonic 0 0\nboottime 100000 0\n")
    monkeypatch.setattr(time, "clock_gettime", lambda which: real(which) + 100_000)
    later = StoreClock(None, None)
    shift = later.shift(anchor, later.instant())
    assert shift is not None
    assert abs(shift) < 1000
