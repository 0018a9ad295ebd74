"""Why was it lost? Each cause has a sentence of its own, in the exception, the hook and the log."""

import asyncio
import logging
import random
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from leasekit import Client, Heartbeats, Lease, lease
from leasekit._driver.clock import Clock
from leasekit._driver.explaining.loop_monitor import LoopMonitor
from leasekit._driver.explaining.recorder import HeldUp, Reading
from leasekit._driver.keeping import keeper as module
from leasekit._driver.keeping.held_lease import HeldLease
from leasekit._driver.keeping.keeper import Keeper
from leasekit.errors import LeaseLost
from leasekit.hooks import Event, Hooks, Lost, Renewed
from leasekit.task import NewTask, Verdict
from leasekit.testing import faults
from leasekit.testing.clock import FakeClock
from leasekit.testing.faults import Call, Fault, Faulty
from leasekit.testing.memory import MemoryBackend, MemoryService

pytestmark = pytest.mark.anyio


class Rig:
    """A keeper in the loop of the test, on a clock that is turned by hand."""

    def __init__(self, faulty: Faulty, clock: FakeClock) -> None:
        self.faulty, self.clock = faulty, clock
        self.losses: list[Lost] = []
        self.keeper: Keeper
        self._running: asyncio.Task[None]

    def start(self, heartbeats: Heartbeats | None = None) -> None:
        hooks, chance = Hooks([self._hear]), random.Random(1)
        self.keeper = Keeper(self.faulty, heartbeats or Heartbeats(), clock=self.clock, hooks=hooks, chance=chance)
        self._running = asyncio.create_task(self.keeper.run())

    def _hear(self, event: Event) -> None:
        if isinstance(event, Lost):
            self.losses.append(event)

    async def hold(self, count: int = 1) -> list[HeldLease]:
        await self.faulty.schedule([NewTask(kind="k") for _ in range(count)])
        leases = await self.keeper.claim(["k"], limit=count, wait=0, started=True)
        for held in leases:
            held.begin(None)
        return leases

    async def let_pass(self, seconds: float, step: float = 1.0) -> None:
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self.clock.advance(min(step, end - self.clock.now()))
            for _ in range(15):
                await asyncio.sleep(0)

    async def aclose(self) -> None:
        self.faulty.clear()
        await self.keeper.aclose()
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)


@pytest.fixture
async def rig(faulty: Faulty, clock: FakeClock) -> AsyncIterator[Rig]:
    one = Rig(faulty, clock)
    yield one
    await one.aclose()


def said(held: HeldLease) -> str:
    """What the exception says; that hook and exception agree is a test of its own."""
    with pytest.raises(LeaseLost) as lost:
        held.check()
    return str(lost.value)


async def test_the_exception_the_hook_and_the_log_say_the_same(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.start()
    [held] = await rig.hold()
    await rig.let_pass(1)
    rig.faulty.always("beat", faults.refuse)
    with caplog.at_level(logging.WARNING, logger="leasekit"):
        await rig.let_pass(280)
    [event] = rig.losses
    with pytest.raises(LeaseLost) as lost:
        held.check()
    assert str(lost.value) == f"lost task {held.task.id}: {event.why}"
    assert lost.value.events == event.events
    assert [one.what for one in event.events[:3]] == ["sent", "renewed", "sent"]
    assert event.events[-1].detail == "Unavailable: beat: the connection was refused"
    assert event.why in caplog.text


async def test_a_network_that_is_gone(rig: Rig) -> None:
    rig.start()
    [held] = await rig.hold()
    await rig.let_pass(1)
    rig.faulty.always("beat", faults.refuse)
    await rig.let_pass(280)
    why = said(held)
    assert "beats in a row were not answered (Unavailable: beat: the connection was refused)" in why
    assert "the last acknowledged one left 26" in why
    assert "; trust ended at " in why


async def test_a_service_that_throttles(rig: Rig) -> None:
    rig.start()
    [held] = await rig.hold()
    await rig.let_pass(1)
    rig.faulty.always("beat", faults.throttle())
    await rig.let_pass(280)
    assert "beats in a row were throttled, the last acknowledged one left 275 s ago" in said(held)


async def test_a_task_that_another_worker_has(rig: Rig) -> None:
    async def taken(call: Call) -> list[Verdict]:
        return [Verdict(id=beat.id, verdict="gone", reason="taken") for beat in call.items]

    rig.start()
    [held] = await rig.hold()
    rig.faulty.always("beat", Fault("taken", taken))
    await rig.let_pass(130)
    assert "the service said that it was taken: another worker claimed it after this lease had expired" in said(held)


async def test_more_leases_than_can_beat(rig: Rig) -> None:
    rig.start(Heartbeats(batch=1))
    await rig.hold(400)
    await rig.let_pass(290)
    assert rig.losses
    never_sent = [loss.why for loss in rig.losses if "sent" not in {event.what for event in loss.events}]
    assert never_sent
    assert all("because 400 leases were held and 120 can beat in a cycle: raise rate" in why for why in never_sent)


async def test_a_process_that_was_stopped(rig: Rig) -> None:
    rig.start()
    [held] = await rig.hold()
    await rig.let_pass(1)
    rig.clock.advance(280)
    before = said(held)
    assert "no beat was sent for 280 s because the process was stopped for 16" in before, "before the keeper is back"
    await rig.let_pass(1)
    assert "because the process was stopped for 16" in said(held)


def read(what: Any, suspended: float = 0.0) -> Any:
    """Readings in which the time that passed at once was spent so."""

    def take(clock: Clock, _: LoopMonitor | None) -> Reading:
        now = clock.now()
        by = HeldUp(what, 1000.0, now) if what is not None else None
        return Reading(now, now - (suspended if now > 1200 else 0.0), now, by)

    return take


@pytest.mark.parametrize(
    ("take", "because"),
    [
        (read("starved"), "other code of this process held the interpreter (the GIL) for 16"),
        (read("blocked"), "a hook or the adapter blocked the driver's event loop for 16"),
        (read(None, suspended=280), "the machine was suspended for 280 s"),
    ],
)
async def test_a_process_that_was_held_up(rig: Rig, monkeypatch: pytest.MonkeyPatch, take: Any, because: str) -> None:
    monkeypatch.setattr(module, "take_reading", take)
    rig.start()
    [held] = await rig.hold()
    await rig.let_pass(1)
    rig.clock.advance(280)
    await rig.let_pass(1)
    assert because in said(held)


async def test_a_stall_is_known_even_where_an_answer_comes_back_before_the_keeper(rig: Rig) -> None:
    """What was sent before the process stopped is answered as soon as it goes on."""

    async def gone(call: Call) -> list[Verdict]:
        await call.sleep(5)
        return [Verdict(id=beat.id, verdict="gone", reason="taken") for beat in call.items]

    rig.start()
    [held] = await rig.hold()
    await rig.let_pass(1)
    rig.faulty.always("beat", Fault("gone", gone))
    await rig.let_pass(120)
    rig.clock.advance(150)  # the call is woken first
    for _ in range(15):
        await asyncio.sleep(0)
    why = said(held)
    assert "the service said that it was taken" in why
    assert "because the process was stopped for" in why


def check_for_ever(held: Lease) -> None:
    while True:
        time.sleep(0.01)
        held.check()


def test_a_hook_that_blocks_is_found_out_while_it_does() -> None:
    """For real: the driver's own loop, and the clock of leases."""
    told = threading.Event()

    def block(event: Event) -> None:
        if isinstance(event, Renewed):
            told.wait(60)

    backend = MemoryBackend(MemoryService(), worker="w")
    with Client(backend, hooks=[block], heartbeats=Heartbeats().for_ttl(2)) as client:
        client.schedule("k", claim_timeout=2, heartbeat_timeout=2)
        try:
            with pytest.raises(LeaseLost) as lost, lease(next(client.tasks("k"))) as held:
                check_for_ever(held)
        finally:
            told.set()
    assert "because a hook or the adapter blocked the driver's event loop for" in str(lost.value)
    assert lost.value.events[-1].what == "blocked"
