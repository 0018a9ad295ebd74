"""The clock of leases counts while the machine sleeps, and whoever sleeps by it looks again."""

import asyncio
import time

import pytest

from leasekit._driver import clock as module
from leasekit._driver.clock import BOOT_CLOCK, BootClock

pytestmark = pytest.mark.anyio


def test_it_is_boottime() -> None:
    """Neither the wall clock, nor one that stands still in suspend."""
    assert abs(BOOT_CLOCK.now() - time.clock_gettime(time.CLOCK_BOOTTIME)) < 60
    assert module._CLOCK == time.CLOCK_BOOTTIME


def test_a_step_of_the_wall_clock_is_nothing_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = BOOT_CLOCK.now()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 0 <= BOOT_CLOCK.now() - before < 60


async def test_a_wait_ends_when_it_is_woken() -> None:
    wake = asyncio.Event()
    asyncio.get_running_loop().call_soon(wake.set)
    await BOOT_CLOCK.wait(wake, BOOT_CLOCK.now() + 3600)


async def test_a_wait_ends_at_its_time() -> None:
    until = BOOT_CLOCK.now() + 0.05
    await BOOT_CLOCK.wait(asyncio.Event(), until)
    assert BOOT_CLOCK.now() >= until


async def test_a_wait_for_what_is_past_gives_others_a_turn() -> None:
    """Whoever waits for the past in a loop must not starve all calls in flight."""
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1

    for _ in range(3):
        asyncio.get_running_loop().call_soon(turn)
        await BOOT_CLOCK.wait(asyncio.Event(), 0)
    assert turns == 3


async def test_suspended_time_counts_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's own timers stand still in suspend: an hour of it must not be slept once more."""
    suspended = 0.0
    real = time.clock_gettime

    def clock_gettime(which: int) -> float:
        return real(which) + (suspended if which == time.CLOCK_BOOTTIME else 0)

    monkeypatch.setattr(time, "clock_gettime", clock_gettime)
    monkeypatch.setattr(module, "_LONGEST_SLEEP", 0.01)
    clock = BootClock()
    waiting = asyncio.create_task(clock.wait(asyncio.Event(), clock.now() + 3600))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    suspended = 3600.0
    await asyncio.wait_for(waiting, 20)
    assert module._LONGEST_SLEEP <= 1
