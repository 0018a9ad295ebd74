"""Kinds that several consumers of one database share out among themselves, and take over from one that has died."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from leasekit.server import kind_leases
from leasekit.server.engine import Engine
from leasekit.server.kind_leases import KindLeases
from leasekit.server.store import Store
from leasekit.task import NewTask, Ticket
from leasekit.testing.queues import MemoryQueues

pytestmark = pytest.mark.anyio

KINDS = {"a", "b", "c", "d.e"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def engine(postgres_stores: Callable[[], Store]) -> AsyncIterator[Engine]:
    async with Engine(postgres_stores()) as engine:
        yield engine


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind_leases, "_EVERY", 0.0)


def consumer(engine: Engine, name: str) -> KindLeases:
    return KindLeases(engine, consumer_id=name, holders=engine.fleet.holders)


async def settle(*consumers: KindLeases) -> None:
    for _ in range(3):
        for each in consumers:
            await each.look(KINDS)


async def test_one_consumer_has_all_kinds(engine: Engine) -> None:
    one = consumer(engine, "one")
    await settle(one)
    assert one.kinds == KINDS


async def test_a_second_consumer_gets_half_of_the_kinds(engine: Engine) -> None:
    one, two = consumer(engine, "one"), consumer(engine, "two")
    await settle(one)
    await settle(two, one)
    assert (len(one.kinds), len(two.kinds)) == (2, 2)
    assert one.kinds | two.kinds == KINDS


async def test_a_consumer_that_stops_leaves_its_kinds_to_the_other(engine: Engine) -> None:
    one, two = consumer(engine, "one"), consumer(engine, "two")
    await settle(one, two)
    await one.close()
    assert one.kinds == set()
    await settle(two)
    assert two.kinds == KINDS


async def test_the_kinds_of_a_consumer_that_died_are_moved_when_its_leases_end(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind_leases, "_TTL", 2.0)
    one, two = consumer(engine, "one"), consumer(engine, "two")
    await settle(one, two)
    kept = two.kinds
    while two.kinds != KINDS:
        await two.look(KINDS)  # one is not heard of any more
        assert not one.kinds & (two.kinds - kept)
        await asyncio.sleep(0.01)


async def test_a_consumer_that_cannot_renew_gives_its_kinds_up_by_itself(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = consumer(engine, "one")
    await settle(one)
    began_at = kind_leases._now()
    assert one.kinds == KINDS
    monkeypatch.setattr(kind_leases, "_now", lambda: began_at + kind_leases._TTL)
    assert one.kinds == set()


async def test_a_kind_without_tasks_is_given_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    one = consumer(engine, "one")
    await settle(one)
    monkeypatch.setattr(kind_leases, "_IDLE", 0.0)
    await one.look(set())
    assert one.kinds == set()


async def test_names_need_no_consumer(engine: Engine) -> None:
    one = consumer(engine, "one")
    assert not one.is_new(["named:x", "once:y"])
    await one.look(["named:x"])
    assert one.kinds == set()


async def test_a_task_that_another_node_accepts_is_moved_by_the_consumer_of_its_kind(
    postgres_stores: Callable[[], Store],
) -> None:
    """The consumer that has no lease of the kind has queues of its own here, which stay empty."""
    mine, others = MemoryQueues(), MemoryQueues()
    async with AsyncExitStack() as nodes:
        first = await nodes.enter_async_context(Engine(postgres_stores(), queues=mine))
        await first.schedule([NewTask(id="t0", kind="k")])
        assert [message.ticket.id for message in await mine.receive(["k"], limit=1, wait=60)] == ["t0"]
        second = await nodes.enter_async_context(Engine(postgres_stores(), queues=others))
        await second.schedule([NewTask(id="t1", kind="k")])
        assert [message.ticket for message in await mine.receive(["k"], limit=1, wait=60)] == [Ticket(id="t1", fence=0)]
        assert await others.receive(["k"], limit=1, wait=0) == []
