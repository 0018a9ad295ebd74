"""Reads beside the writer: whose turn it is, how many wait, and what becomes of those that nobody waits for."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from random import Random

import anyio
import pytest

from leasekit.errors import Throttled, Unavailable
from leasekit.server import readers
from leasekit.server.clock import StoreClock
from leasekit.server.fair_bound import CALLER
from leasekit.server.readers import Readers
from leasekit.server.store.memory import MemoryStore
from tests.waiting import turns

pytestmark = pytest.mark.anyio


class Desk:
    """Readers with one thread, which is held up until the test lets it go."""

    def __init__(self) -> None:
        self.readers = Readers(MemoryStore(), StoreClock(None, None), Random(7))
        self.begun: list[str] = []
        self.go = threading.Event()
        self.holding: asyncio.Task[None] = asyncio.create_task(self.readers.run(self._hold))

    def _hold(self) -> None:
        self.go.wait(60)

    def ask(self, name: str, *, is_vital: bool = False) -> "asyncio.Task[None]":
        """Ask for a read; its caller is the first letter of its name."""

        async def asked() -> None:
            CALLER.set(name[0])
            await self.readers.run(lambda: self.begun.append(name), is_vital=is_vital)

        return asyncio.create_task(asked())

    async def in_order(self, *names: str, vital: str = "") -> list[str]:
        """Return these reads in the order in which they began."""
        asked = [self.ask(name, is_vital=name in vital.split()) for name in names]
        await turns()
        self.go.set()
        await asyncio.gather(*asked)
        return self.begun


@pytest.fixture
async def desk(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Desk]:
    monkeypatch.setattr(readers, "_THREADS", 1)
    desk = Desk()
    desk.readers.open()
    await turns()
    yield desk
    desk.go.set()
    await desk.readers.close()


async def test_a_caller_with_many_reads_holds_up_no_other_by_more_than_one(desk: Desk) -> None:
    order = await desk.in_order("a1", "a2", "a3", "a4", "b1", "b2", "c1")
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


async def test_of_one_caller_vital_reads_come_first_and_have_no_bound(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_WAITING", 3)
    order = await desk.in_order("a1", "b1", "a2", "a3", "b2", vital="a2 a3 b2")
    assert order == ["a2", "b2", "a3", "b1", "a1"]


async def test_the_reads_of_one_caller_keep_no_other_out(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_WAITING", 4)
    asked = [desk.ask(name) for name in ("a1", "a2", "a3")]
    await turns()
    with pytest.raises(Throttled):
        await desk.ask("a4")
    asked.append(desk.ask("b1"))
    await turns()
    desk.go.set()
    await asyncio.gather(*asked)
    assert sorted(desk.begun) == ["a1", "a2", "a3", "b1"]


async def test_a_read_that_nobody_waits_for_any_longer_leaves_its_place(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_WAITING", 2)
    gone = desk.ask("a1")
    await turns()
    gone.cancel()
    await turns()
    assert await desk.in_order("a2") == ["a2"]


async def test_a_cancelled_read_that_is_under_way_has_its_thread_until_its_end(desk: Desk) -> None:
    desk.holding.cancel()
    asked = desk.ask("a1")
    await turns()
    assert desk.begun == []
    desk.go.set()
    await asked


@pytest.mark.parametrize("end", [Readers.close, Readers.abandon])
async def test_reads_that_wait_are_refused_at_the_end_and_those_under_way_go_on(
    desk: Desk, end: Callable[[Readers], object]
) -> None:
    asked = desk.ask("a1")
    await turns()

    async def ended() -> None:
        if (closing := end(desk.readers)) is not None:
            await closing  # type: ignore[misc]

    async with anyio.create_task_group() as group:
        group.start_soon(ended)
        with pytest.raises(Unavailable):
            await asked
        desk.go.set()
    await desk.holding
    with pytest.raises(Unavailable):
        await desk.ask("a2")
    assert desk.begun == []


async def test_a_read_that_fails_is_the_answer_and_others_go_on(desk: Desk) -> None:
    failing = asyncio.create_task(desk.readers.run(lambda: 1 / 0))
    await turns()
    assert await desk.in_order("a1") == ["a1"]
    with pytest.raises(ZeroDivisionError):
        await failing
