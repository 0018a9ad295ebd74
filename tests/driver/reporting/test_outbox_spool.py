"""What the outbox puts on disk: what was not accepted at the first try, and nothing on good days."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from leasekit._driver.context import Context
from leasekit._driver.reporting.outbox import Delivery, Outbox
from leasekit._driver.reporting.spool import Spool
from leasekit.hooks import Hooks
from leasekit.task import NewTask, Settlement
from leasekit.testing import faults
from leasekit.testing.clock import FakeClock
from leasekit.testing.faults import Fault, Faulty

pytestmark = pytest.mark.anyio
URL = "http://here"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "spool"


@pytest.fixture
async def make(faulty: Faulty, clock: FakeClock) -> AsyncIterator[Callable[[], Outbox]]:
    made: list[Outbox] = []

    def make() -> Outbox:
        made.append(
            Outbox(Context(faulty, clock=clock, hooks=Hooks(), chance=Mock(random=lambda: 0.5)), call_timeout=0.2)
        )
        return made[-1]

    yield make
    for outbox in made:
        await outbox.aclose()
    await faulty.aclose()


async def settlements(faulty: Faulty, count: int) -> list[Settlement]:
    await faulty.schedule([NewTask(kind="k") for _ in range(count)])
    claimed = await faulty.claim(["k"], limit=count, wait=0, claim_id="c")
    return [Settlement(id=task.id, token=task.token, outcome="success", result=1) for task in claimed.tasks]


async def until(fact: Callable[[], Any], clock: FakeClock | None = None) -> None:
    async with asyncio.timeout(30):
        while not fact():
            await asyncio.sleep(0.001)
            if clock is not None:
                clock.advance(0.5)


def kept(home: Path) -> int | None:
    """Bytes on the disk; None where there is no file."""
    sizes = [path.stat().st_size for path in home.glob("*")]
    return sum(sizes) if sizes else None


async def test_what_is_accepted_at_once_is_never_written(
    make: Callable[[], Outbox], faulty: Faulty, home: Path
) -> None:
    outbox = make()
    await outbox.use(Spool(home, URL))
    for settlement in await settlements(faulty, 3):
        outbox.put(Delivery(settlement))
    await outbox.empty()
    assert kept(home) is None


@pytest.mark.parametrize("fault", [faults.drop, faults.throttle_items(1.0), faults.lose_answer])
async def test_what_was_not_accepted_is_on_the_disk_until_it_is(
    make: Callable[[], Outbox], faulty: Faulty, clock: FakeClock, home: Path, fault: Fault
) -> None:
    outbox = make()
    await outbox.use(Spool(home, URL))
    [settlement] = await settlements(faulty, 1)
    faulty.script("settle", fault)
    outbox.put(Delivery(settlement))
    await until(lambda: kept(home))
    await until(lambda: not len(outbox), clock)
    await until(lambda: kept(home) == 0)


@pytest.mark.parametrize("fault", [faults.drop, faults.hang], ids=lambda fault: fault.name)
async def test_what_waits_its_turn_while_the_service_is_away_is_on_the_disk_too(
    make: Callable[[], Outbox], faulty: Faulty, clock: FakeClock, home: Path, fault: Fault
) -> None:
    """However many results come, and however long the tries before them hang or hold back."""
    outbox = Outbox(Context(faulty, clock=clock, hooks=Hooks(), chance=Mock(random=lambda: 0.5)), call_timeout=1000)
    spool = Spool(home, URL)
    await outbox.use(spool)
    done = await settlements(faulty, 50)
    faulty.always("settle", fault)
    for settlement in done[:10]:
        outbox.put(Delivery(settlement))
    await until(lambda: faulty.calls["settle"])
    for settlement in done[10:]:
        outbox.put(Delivery(settlement))
    reader = Spool(home, URL)
    keys = {(settlement.id, settlement.token) for settlement in done}
    await until(lambda: reader.unanswered() == keys, clock)
    reader.close()
    faulty.clear()
    faulty.release()
    await until(lambda: not len(outbox), clock)
    await until(lambda: not spool.unanswered())
    await outbox.aclose()


async def last_turn(tasks: set[asyncio.Task[None]]) -> None:
    """Return when all these tasks have ended, in the very turn of the loop in which they are still in their set."""
    while not all(task.done() for task in tasks):  # noqa: ASYNC110 - each turn counts
        await asyncio.sleep(0)
    assert tasks


async def test_what_is_answered_when_the_marking_of_others_has_just_ended_is_marked_too(
    make: Callable[[], Outbox], faulty: Faulty, home: Path
) -> None:
    outbox, spool = make(), Spool(home, URL)
    await outbox.use(spool)
    first, second = await settlements(faulty, 2)
    spool.keep([first, second])
    outbox._mark_answered(Delivery(first, spooled=True))
    await last_turn(outbox._marking)
    outbox._mark_answered(Delivery(second, spooled=True))
    await until(lambda: not spool.unanswered())


async def test_what_comes_when_the_look_at_others_has_just_ended_is_on_the_disk_too(
    faulty: Faulty, clock: FakeClock, home: Path
) -> None:
    outbox = Outbox(Context(faulty, clock=clock, hooks=Hooks(), chance=Mock(random=lambda: 0.5)), call_timeout=1000)
    spool = Spool(home, URL)
    await outbox.use(spool)
    first, second = await settlements(faulty, 2)
    faulty.always("settle", faults.hang)
    outbox.put(Delivery(first))
    await clock.asleep()
    clock.advance(1)
    await last_turn(outbox._looking)
    outbox.put(Delivery(second))
    await until(lambda: len(spool.unanswered()) == 2, clock)
    await outbox.aclose()


async def test_what_comes_while_others_wait_is_on_the_disk_within_its_own_second(
    make: Callable[[], Outbox], faulty: Faulty, clock: FakeClock, home: Path
) -> None:
    outbox = Outbox(Context(faulty, clock=clock, hooks=Hooks(), chance=Mock(random=lambda: 0.5)), call_timeout=1000)
    spool = Spool(home, URL)
    await outbox.use(spool)
    done = await settlements(faulty, 3)
    faulty.always("settle", faults.hang)
    began_at = clock.now()
    outbox.put(Delivery(done[0]))
    await clock.asleep()
    clock.advance(0.4)
    outbox.put(Delivery(done[1]))
    clock.advance(0.5)
    outbox.put(Delivery(done[2]))
    clock.advance(0.1)
    await until(lambda: len(spool.unanswered()) == 2)
    await clock.asleep()
    assert clock.next_wake - began_at == pytest.approx(1.9)
    clock.advance(0.9)
    await until(lambda: len(spool.unanswered()) == 3)
    await outbox.aclose()


async def test_what_is_answered_while_it_is_written_is_marked_as_answered(
    make: Callable[[], Outbox], faulty: Faulty, clock: FakeClock, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox, spool, gate = make(), Spool(home, URL), faults.Gate()
    written, may_end = threading.Event(), threading.Event()
    keep = spool.keep

    def slowly(settlements: Sequence[Settlement]) -> None:
        keep(settlements)
        written.set()
        may_end.wait(60)

    monkeypatch.setattr(spool, "keep", slowly)
    await outbox.use(spool)
    [settlement] = await settlements(faulty, 1)
    outbox._call_timeout = 1000
    faulty.script("settle", faults.delay_answer(gate))
    outbox.put(Delivery(settlement))
    await until(lambda: faulty.calls["settle"])
    await until(written.is_set, clock)
    gate.open()
    await until(lambda: not len(outbox))
    may_end.set()
    await until(lambda: kept(home) == 0)


async def test_the_next_process_reports_it(
    make: Callable[[], Outbox], faulty: Faulty, clock: FakeClock, home: Path
) -> None:
    first = make()
    await first.use(Spool(home, URL))
    done = await settlements(faulty, 5)
    faulty.always("settle", faults.drop)
    for settlement in done:
        first.put(Delivery(settlement))
    await until(lambda: faulty.calls["settle"])
    await first.aclose()
    faulty.clear()
    second = make()
    assert {settlement.id for settlement in await second.use(Spool(home, URL))} == {task.id for task in done}
    await until(lambda: not len(second), clock)
    await second.aclose()
    infos = [await faulty.get(settlement.id) for settlement in done]
    assert [info and (info.status, info.result) for info in infos] == [("success", 1)] * 5
    assert kept(home) is None


async def test_what_comes_too_late_is_dropped_with_a_word(
    make: Callable[[], Outbox], faulty: Faulty, clock: FakeClock, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(home, URL)
    spool.keep([Settlement(id="a", token="secret-token", outcome="success")])
    spool.close()
    outbox = make()
    with caplog.at_level(logging.INFO):
        await outbox.use(Spool(home, URL))
        await until(lambda: not len(outbox), clock)
        await outbox.aclose()
    assert any("a from the spool is dropped" in message for message in caplog.messages)
    assert not any("secret-token" in message for message in caplog.messages)
    assert kept(home) is None


async def test_a_disk_that_does_not_take_it_holds_up_no_report(
    make: Callable[[], Outbox], faulty: Faulty, clock: FakeClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    outbox = make()
    await outbox.use(Spool(tmp_path / "file" / "below", URL))
    faulty.script("settle", faults.drop, faults.drop)
    [settlement] = await settlements(faulty, 1)
    outbox.put(Delivery(settlement))
    await until(lambda: not len(outbox), clock)
    assert [message for message in caplog.messages if "cannot be kept" in message] != []
    assert not outbox.keeps


async def test_a_service_that_takes_stale_results_is_told_none_late(
    make: Callable[[], Outbox], faulty: Faulty, home: Path
) -> None:
    spool = Spool(home, URL)
    spool.keep([Settlement(id="a", token="t", outcome="success")])
    spool.close()
    faulty.capabilities = replace(faulty.capabilities, refuses_stale=False)
    outbox = make()
    assert await outbox.use(Spool(home, URL)) == []
    assert not outbox.keeps
    assert kept(home)
