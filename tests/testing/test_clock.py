"""The clock that is turned by hand."""

import asyncio
import math
import threading
from datetime import UTC, datetime

import pytest

from leasekit.testing.clock import FakeClock

pytestmark = pytest.mark.anyio


def test_time_moves_by_hand_only() -> None:
    clock = FakeClock(100)
    assert (clock.now(), clock()) == (100, 100)
    clock.advance(2.5)
    assert (clock.now(), clock()) == (102.5, 102.5)
    assert clock.later(0.5) == datetime.fromtimestamp(103, UTC)


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf])
def test_time_does_not_go_back_or_nowhere(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds must be a number"):
        FakeClock().advance(seconds)


async def test_a_wait_ends_when_its_time_is_reached_and_not_before(clock: FakeClock) -> None:
    sleeping = asyncio.create_task(clock.sleep(5))
    await clock.asleep()
    clock.advance(4.9)
    assert (clock.sleepers, clock.next_wake) == (1, 5)
    clock.advance(0.1)
    assert clock.sleepers == 0
    await sleeping


async def test_a_wait_ends_when_its_event_is_set(clock: FakeClock) -> None:
    wake = asyncio.Event()
    waiting = asyncio.create_task(clock.wait(wake, math.inf))
    await clock.asleep()
    wake.set()
    assert clock.sleepers == 0
    await waiting
    assert wake.is_set()


async def test_a_wait_whose_time_has_come_or_event_is_set_does_not_sleep(clock: FakeClock) -> None:
    wake = asyncio.Event()
    await clock.wait(wake, 0)
    assert not wake.is_set()
    wake.set()
    await clock.wait(wake, math.inf)


async def test_the_time_does_not_set_the_event(clock: FakeClock) -> None:
    wake = asyncio.Event()
    waiting = asyncio.create_task(clock.wait(wake, 1))
    await clock.asleep()
    clock.advance(1)
    await waiting
    assert not wake.is_set()


async def test_sleepers_wake_the_earliest_first(clock: FakeClock) -> None:
    woken: list[int] = []

    async def sleep(seconds: int) -> None:
        await clock.sleep(seconds)
        woken.append(seconds)

    sleeping = [asyncio.create_task(sleep(seconds)) for seconds in (3, 1, 2)]
    await clock.asleep(3)
    clock.advance(10)
    await asyncio.gather(*sleeping)
    assert woken == [1, 2, 3]


async def test_a_wait_that_is_cancelled_is_over(clock: FakeClock) -> None:
    waiting = asyncio.create_task(clock.sleep(5))
    await clock.asleep()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (clock.sleepers, clock.next_wake) == (0, math.inf)
    clock.advance(10)


async def test_asleep_again_means_done_until_now(clock: FakeClock) -> None:
    beats: list[float] = []

    async def keep() -> None:
        while True:
            await clock.sleep(10)
            await asyncio.sleep(0)  # work of more than one step
            beats.append(clock.now())

    keeping = asyncio.create_task(keep())
    for _ in range(3):
        await clock.asleep()
        clock.advance(10)
    await clock.asleep()
    assert beats == [10, 20, 30]
    keeping.cancel()


async def test_it_may_be_turned_from_another_thread(clock: FakeClock) -> None:
    sleeping = asyncio.create_task(clock.sleep(5))
    await clock.asleep()
    await asyncio.to_thread(clock.advance, 5)
    await sleeping


def test_sleepers_of_another_loop_are_awaited_and_woken(clock: FakeClock) -> None:
    keeper = threading.Thread(target=lambda: asyncio.run(clock.sleep(5)))
    keeper.start()
    asyncio.run(clock.asleep())
    clock.advance(5)
    keeper.join(60)
    assert not keeper.is_alive()
