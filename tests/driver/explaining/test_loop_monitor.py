"""The driver's loop, watched: who held it up."""

import asyncio
import selectors
import socket
import time
from collections.abc import Iterator

import pytest

from leasekit._driver.clock import BOOT_CLOCK
from leasekit._driver.explaining.loop_monitor import LoopMonitor, take_reading
from leasekit._driver.explaining.recorder import HeldUp
from leasekit._driver.thread import acquire
from leasekit.testing.clock import FakeClock


class Time:
    """What the clocks show, and what passes while the selector waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.used = 5.0
        self.passes = self.uses = 0.0
        self.loop_monitor = LoopMonitor(now=lambda: self.now, used=lambda: self.used)

        def select(*_: object) -> list[object]:
            self.now += self.passes
            self.used += self.uses
            return []

        monkeypatch.setattr(selectors.DefaultSelector, "select", select)

    def wait(self, timeout: float | None, *, passes: float, uses: float = 0.0) -> None:
        self.passes, self.uses = passes, uses
        self.loop_monitor.select(timeout)

    @property
    def held_up(self) -> HeldUp | None:
        return self.loop_monitor.held_up(self.now)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Time]:
    one = Time(monkeypatch)
    yield one
    one.loop_monitor.close()


def test_a_wait_that_ends_in_time_is_nothing(on: Time) -> None:
    on.wait(1.0, passes=1.01)
    on.wait(1.0, passes=0.2)
    on.wait(0, passes=0.0)
    assert on.held_up is None


def test_a_wait_for_others_may_take_as_long_as_it_likes(on: Time) -> None:
    on.wait(None, passes=3600)
    assert on.held_up is None


def test_a_wait_that_ends_too_late_was_a_process_that_did_not_run(on: Time) -> None:
    on.wait(1.0, passes=42.0, uses=0.1)
    assert on.held_up == HeldUp("stopped", 101.0, 142.0)


def test_a_process_that_used_the_processor_meanwhile_was_not_stopped(on: Time) -> None:
    on.wait(1.0, passes=42.0, uses=20.0)
    assert on.held_up == HeldUp("starved", 101.0, 142.0)


def test_work_that_does_not_end_blocks(on: Time) -> None:
    on.wait(1.0, passes=0.5)
    on.now += 3
    assert on.held_up == HeldUp("blocked", 100.5, 103.5), "while it goes on"
    on.wait(0, passes=0.0)
    on.now += 0.01
    assert on.held_up == HeldUp("blocked", 100.5, 103.5), "and after"


def test_who_looks_while_the_loop_waits_too_long_sees_it(on: Time) -> None:
    on.loop_monitor._wait = (101.0, on.used)
    on.now = 105.0
    assert on.held_up == HeldUp("stopped", 101.0, 105.0)


def test_the_drivers_loop_is_watched() -> None:
    driver = acquire()
    try:

        async def block() -> None:
            time.sleep(0.3)  # noqa: ASYNC251 - that is the fault

        driver.submit(block()).result(20)
        blocked = driver.loop_monitor.held_up(BOOT_CLOCK.now())
        assert blocked is not None
        assert blocked.what == "blocked"
    finally:
        driver.release()


def test_it_waits_as_any_other_selector() -> None:
    ours, theirs = socket.socketpair()
    loop = asyncio.SelectorEventLoop(LoopMonitor())
    with ours, theirs:
        ours.setblocking(False)  # noqa: FBT003 - that is its signature
        loop.call_later(0.01, theirs.send, b"x")
        assert loop.run_until_complete(loop.sock_recv(ours, 1)) == b"x"
    loop.close()


def test_a_clock_that_is_turned_by_hand_neither_sleeps_nor_steps() -> None:
    assert take_reading(FakeClock(7), None) == (7, 7, 7, None)


def test_the_real_clocks_are_read_together() -> None:
    one = take_reading(BOOT_CLOCK, None)
    assert abs(one.wall - time.time()) < 60
    assert abs(one.awake - time.monotonic()) < 60
