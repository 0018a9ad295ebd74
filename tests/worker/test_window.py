"""How much a worker claims."""

from leasekit._worker.window import Window


def moving(window: Window, *, per_second: int, seconds: float = 5.0, now: float = 0.0) -> float:
    """Bodies end at this pace, as fast as others are claimed; returns the time."""
    for _ in range(int(seconds * 10)):
        now += 0.1
        window.out += per_second // 10
        window.ended(per_second // 10)
        window.size(now)
    return now


def test_at_first_it_is_the_number_of_slots() -> None:
    assert Window(8, ahead=0.25).size(0) == 8


def test_what_runs_and_what_is_buffered_takes_from_it() -> None:
    window = Window(8, ahead=0.25)
    window.out = 5
    assert window.size(0) == 3
    window.out = 8
    assert window.size(0) == 0


def test_it_grows_as_bodies_end() -> None:
    window = Window(8, ahead=0)
    window.out = 8
    window.ended(2)
    assert window.size(0) == 2


def test_quick_bodies_open_it_for_what_they_do_in_the_time_ahead() -> None:
    window = Window(8, ahead=0.25)
    now = moving(window, per_second=1000)
    assert 8 + 240 <= window.size(now) <= 8 + 250


def test_bodies_of_minutes_claim_nothing_that_cannot_begin_at_once() -> None:
    window = Window(8, ahead=0.25)
    for minute in range(1, 20):
        window.out = 8
        window.ended(1)
        window.size(minute * 60.0)
    assert window.size(20 * 60.0) == 1


def test_with_nothing_ahead_it_is_never_more_than_the_slots() -> None:
    window = Window(8, ahead=0)
    assert window.size(moving(window, per_second=10_000)) == 8


def test_it_opens_again_when_half_of_what_is_ahead_has_run() -> None:
    window = Window(8, ahead=0.25)
    now = moving(window, per_second=1000)
    ahead = window.size(now) - 8
    window.out = 8 + ahead - ahead // 2 + 1
    assert window.size(now) == 0
    window.out -= 1
    assert window.size(now) == ahead // 2


def test_a_stall_takes_back_what_was_ahead() -> None:
    window = Window(8, ahead=0.25)
    now = moving(window, per_second=1000)
    window.stalled()
    assert window.size(now) == 8


def test_the_pace_is_that_of_the_last_moments() -> None:
    window = Window(8, ahead=0.25)
    now = moving(window, per_second=1000)
    assert window.size(now + 30) == 8
