"""Memory that is full: what runs goes on, what was kept long enough goes, and then there is room again."""

import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import anyio
import pytest

import leasekit
from leasekit.errors import Unavailable
from leasekit.task import Beat, NewTask, Settlement, Status, Task
from leasekit_redis import RedisBackend
from leasekit_redis.address import parse
from leasekit_redis.errors import FullMemory
from leasekit_redis.id_index import IdIndex
from leasekit_redis.keys import Keys
from tests.adapters.redis.conftest import Cluster
from tests.redis_server import Server

pytestmark = pytest.mark.anyio


@pytest.fixture
async def backend(own_server: Server) -> AsyncIterator[RedisBackend]:
    """One that keeps nothing that has ended."""
    backend = RedisBackend(replace(parse(own_server.url), retention=0.0), worker="w1")
    yield backend
    await backend.aclose()


async def claim(backend: RedisBackend, kind: str, *, limit: int = 1, wait: float = 0) -> list[Task]:
    with anyio.fail_after(40):
        return (await backend.claim([kind], limit=limit, wait=wait, claim_id=uuid.uuid4().hex)).tasks


async def settle(backend: RedisBackend, tasks: list[Task], **options: Any) -> None:
    ends = [Settlement(id=task.id, token=task.token, outcome="success", **options) for task in tasks]
    assert {verdict.verdict for verdict in await backend.settle(ends)} == {"settled"}


@pytest.fixture
def bounded(own_server: Server) -> None:
    """The server has room for some 3 MB more than it needs for itself."""
    used = int(own_server.ask("INFO", "memory").partition(b"used_memory:")[2].partition(b"\r")[0])
    own_server.ask("CONFIG", "SET", "maxmemory", used + 3_000_000)


async def fill(backend: RedisBackend, kind: str) -> int:
    """Ended tasks, until not even the smallest is accepted; how many big ones there are."""
    big = 0

    async def add(size: int) -> None:
        nonlocal big
        while True:
            await backend.schedule([NewTask(kind=kind, payload="x" * size)])
            await settle(backend, await claim(backend, kind))
            big += size == 100_000

    for size in (100_000, 5_000, 0):
        with pytest.raises(Unavailable, match="memory is full"):
            await add(size)
    return big


@pytest.mark.usefixtures("bounded")
async def test_what_was_kept_long_enough_makes_room(backend: RedisBackend, kind: str) -> None:
    big = await fill(backend, kind)
    assert big > 5
    await backend.maintain()
    assert (await backend.stats()).kinds == {}
    assert await fill(backend, kind) > big // 2


@pytest.mark.usefixtures("bounded")
async def test_tasks_for_which_there_is_no_room_leave_nothing_behind(
    own_server: Server, backend: RedisBackend, kind: str
) -> None:
    known = NewTask(kind=kind, id=f"{kind}-known")
    await backend.schedule([known])

    async def add_for_ever() -> None:
        while True:
            await backend.schedule([known, *(NewTask(kind=kind, payload="x" * 3_000) for _ in range(250))])

    with pytest.raises(Unavailable, match="memory is full"):
        await add_for_ever()
    made = (await backend.stats()).kinds[kind][Status.NEW]
    assert sum(own_server.ask("HLEN", part) for part in Keys(parse(own_server.url).prefix).register) == made
    assert await backend.get(f"{kind}-known")


async def test_an_id_stays_known_if_another_client_finds_room_before_it_is_freed(
    monkeypatch: pytest.MonkeyPatch, own_server: Server, backend: RedisBackend, kind: str
) -> None:
    task = NewTask(kind=kind, id=f"{kind}-1")
    other, free = RedisBackend(parse(own_server.url), worker="w2"), IdIndex.forget
    await backend.schedule([NewTask(kind=kind, id=kind)])

    async def have_no_room(*_: object) -> None:
        raise FullMemory("its memory is full")

    async def be_late(register: IdIndex, of: str, ids: list[str]) -> None:
        monkeypatch.undo()  # there is room again
        await other.schedule([task])
        await free(register, of, ids)

    monkeypatch.setattr(IdIndex, "note", have_no_room)
    monkeypatch.setattr(IdIndex, "forget", be_late)
    (answer,) = await backend.schedule([task])
    assert not answer.created
    assert (await other.get(task.id or "")) is not None
    await other.aclose()


async def test_tasks_whose_kind_has_no_room_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, own_server: Server, backend: RedisBackend, kind: str
) -> None:
    async def note(*_: object) -> None:
        raise FullMemory("its memory is full")

    monkeypatch.setattr(IdIndex, "note", note)
    with pytest.raises(FullMemory):
        await backend.schedule([NewTask(kind=kind) for _ in range(3)])
    assert sum(own_server.ask("HLEN", part) for part in Keys(parse(own_server.url).prefix).register) == 0


@pytest.mark.usefixtures("bounded")
async def test_successors_that_have_no_room_hold_nothing_up(backend: RedisBackend, kind: str) -> None:
    """What is to be added comes after what is to be dropped; it is brought when there is room."""
    await backend.schedule([NewTask(kind=kind), NewTask(kind=f"{kind}-after", after=[f"{kind}-unknown"])])
    first = await claim(backend, kind)
    await fill(backend, kind)
    successors = [NewTask(kind=f"{kind}-next", id=f"{kind}-{n}", payload="x" * 100_000) for n in range(3)]
    await settle(backend, first, then=successors)
    await backend.maintain()
    with anyio.fail_after(30):
        while len(next_tasks := await claim(backend, f"{kind}-next", limit=3)) < 3:
            await backend.maintain()
    assert {task.id for task in next_tasks} == {f"{kind}-{n}" for n in range(3)}


# Full to the last byte, and for good ----------------------------------------------------------------------------


Fill = Callable[[], None]


@pytest.fixture(params=["server", "cluster"])
def where(request: pytest.FixtureRequest) -> Server | Cluster:
    """One Redis, or a cluster."""
    where: Server | Cluster = request.getfixturevalue(request.param)
    return where


@pytest.fixture
def full(where: Server | Cluster) -> Iterator[Fill]:
    """`full()`: no byte more, on every node, until the test is over."""
    nodes = where.nodes if isinstance(where, Cluster) else [where]

    def be(limit: int) -> None:
        for node in nodes:
            node.ask("CONFIG", "SET", "maxmemory", limit)

    yield lambda: be(1)
    be(0)


async def test_all_that_ends_something_or_makes_room_is_let_through(
    where: Server | Cluster, full: Fill, kind: str
) -> None:
    backend = RedisBackend(replace(parse(where.url), retention=0.0, prefix=kind), worker="w1")
    await backend.schedule([NewTask(kind=kind, id=f"{kind}-{n}") for n in range(5)])
    await backend.schedule([NewTask(kind=kind, id=f"{kind}-after", after=[f"{kind}-0"])])
    ended, lost, running = await claim(backend, kind, limit=3)
    await settle(backend, [ended])
    where.owner(f"{kind}:{{{kind}}}:leases").ask("ZADD", f"{kind}:{{{kind}}}:leases", 1, lost.id)
    full()
    with pytest.raises(Unavailable, match="memory is full"):
        await backend.schedule([NewTask(kind=f"{kind}-more")])
    await backend.maintain()
    assert await backend.get(ended.id) is None
    (verdict,) = await backend.beat([Beat(id=running.id, token=running.token, progress="x" * 1000)])
    assert verdict.verdict == "renewed"
    (verdict,) = await backend.cancel([f"{kind}-3"])
    assert verdict.verdict == "cancelled"
    await settle(backend, [running], result="x" * 1000)
    again = await claim(backend, kind, limit=5)
    assert {task.id for task in again} == {lost.id, f"{kind}-4", f"{kind}-after"}
    assert await claim(backend, kind, wait=0.01) == []  # nothing to be had is no refusal
    await settle(backend, again)
    await backend._maintenance.maintain(kind)  # before its time has come
    assert (await backend.list_tasks()).tasks == []
    await backend.aclose()


async def test_a_kind_of_which_nothing_is_left_is_let_go_of(where: Server | Cluster, full: Fill, kind: str) -> None:
    backend = RedisBackend(replace(parse(where.url), retention=0.0, prefix=kind), worker="w1")
    await backend.schedule([NewTask(kind=kind, id=kind)])
    await backend.cancel([kind])
    full()
    await backend.maintain()
    assert await backend._register.kinds() == []
    await backend.aclose()


async def test_what_is_there_already_is_scheduled_again(where: Server | Cluster, full: Fill, kind: str) -> None:
    backend = RedisBackend(replace(parse(where.url), prefix=kind), worker="w1")
    there = [NewTask(kind=f"{kind}-{n}", id=f"{kind}-{n}") for n in range(3)]
    await backend.schedule(there)
    full()
    assert [(answer.id, answer.created) for answer in await backend.schedule(there)] == [
        (task.id, False) for task in there
    ]
    with pytest.raises(Unavailable, match="memory is full"):
        await backend.schedule([*there, NewTask(kind=kind, id=f"{kind}-new")])
    await backend.aclose()


async def test_a_name_that_was_leased_before_is_leased_again(where: Server | Cluster, full: Fill, kind: str) -> None:
    with leasekit.connect(where.url) as client:
        async with leasekit.lease(client.named(kind)) as first:
            pass
        full()
        async with leasekit.lease(client.named(kind, wait=20)) as held:
            assert held.fence == first.fence + 1


async def test_a_name_that_is_new_is_waited_for_no_longer_than_asked(own_server: Server, kind: str) -> None:
    own_server.ask("CONFIG", "SET", "maxmemory", 1)
    with (
        leasekit.connect(own_server.url) as client,
        anyio.fail_after(20),  # and not the 30 s of other calls
        pytest.raises(Unavailable, match="memory is full"),
    ):
        async with client.named(kind, wait=1):
            pytest.fail("it was granted")
