"""Idleness by absolute time."""

import time

import pytest

from leasekit import Idle
from leasekit.testing.clock import FakeClock


def test_a_resource_is_idle_when_it_has_gone_unused_for_the_whole_time() -> None:
    clock = FakeClock(50)
    idle = Idle(480, now=clock)
    assert (idle.used_at, idle.remaining, idle.expired) == (50, 480, False)
    clock.advance(479)
    assert not idle.expired
    clock.advance(1)
    assert (idle.remaining, idle.expired) == (0, True)


def test_use_begins_the_time_anew() -> None:
    clock = FakeClock()
    idle = Idle(480, now=clock)
    clock.advance(479)
    idle.used()
    clock.advance(479)
    assert (idle.remaining, idle.expired) == (1, False)


def test_looking_often_makes_nothing_idle() -> None:
    """Four looks of two minutes that bunch up are not eight minutes."""
    clock = FakeClock()
    idle = Idle(480, now=clock)
    assert not any(idle.expired for _ in range(1000))
    clock.advance(120)
    assert not any(idle.expired for _ in range(4))


def test_looking_late_hides_nothing() -> None:
    clock = FakeClock()
    idle = Idle(480, now=clock)
    clock.advance(10_000)
    assert idle.remaining == 480 - 10_000
    assert idle.expired


def test_its_own_clock_counts_suspended_time(monkeypatch: pytest.MonkeyPatch) -> None:
    suspended = 0.0
    real = time.clock_gettime

    def clock_gettime(which: int) -> float:
        return real(which) + (suspended if which == time.CLOCK_BOOTTIME else 0)

    monkeypatch.setattr(time, "clock_gettime", clock_gettime)
    idle = Idle(480)
    assert not idle.expired
    suspended = 480.0
    assert idle.expired
