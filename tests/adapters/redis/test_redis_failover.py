"""A primary is demoted, and its address leads to another: clients follow, though their connections stay open."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import redis

import leasekit
from harness.proxy import Proxy
from leasekit.errors import Unavailable
from leasekit.task import Beat, NewTask, Settlement, Task
from leasekit_redis import RedisBackend, claiming, client, connect, connecting, waiting
from tests.redis_server import Server

pytestmark = pytest.mark.anyio


class Pair:
    """Two servers, the second a replica of the first, behind one address."""

    def __init__(self, first: Any, second: Any, proxy: Proxy) -> None:
        self.first, self.second, self._proxy = first, second, proxy
        self.url = f"redis://127.0.0.1:{proxy.port}"

    async def caught_up(self) -> None:
        """Return once the replica has all that the primary has."""
        with anyio.fail_after(60):
            while True:
                role = self.second.ask("ROLE")
                if role[3:4] == [b"connected"] and role[4] >= self.first.ask("ROLE")[1]:
                    return
                await asyncio.sleep(0.01)

    async def promote(self) -> None:
        await self.caught_up()
        self.second.ask("REPLICAOF", "NO", "ONE")

    def move(self) -> None:
        self._proxy.move(f"tcp://127.0.0.1:{self.second.port}")

    async def fail_over(self, *, demoted: bool = True) -> None:
        """The replica takes over; connections to the demoted one stay open."""
        await self.promote()
        if demoted:
            self.first.ask("REPLICAOF", "127.0.0.1", self.second.port)
        self.move()

    async def fail_back(self) -> None:
        """The demoted one is the primary again."""
        self.first, self.second = self.second, self.first
        await self.fail_over()


@pytest.fixture
def pair(own_server: Server, tmp_path: Path) -> Iterator[Pair]:
    second = type(own_server)(tmp_path / "second")
    try:
        second.start()
        second.ask("REPLICAOF", "127.0.0.1", own_server.port)
        with Proxy(f"tcp://127.0.0.1:{own_server.port}") as proxy:
            yield Pair(own_server, second, proxy)
    finally:
        second.kill()


@pytest.fixture
async def backend(pair: Pair) -> AsyncIterator[RedisBackend]:
    backend = connect(pair.url, worker="w1")
    yield backend
    await backend.aclose()


async def claim(backend: RedisBackend, *kinds: str, limit: int = 1, wait: float = 0) -> list[Task]:
    with anyio.fail_after(40):
        return (await backend.claim(kinds, limit=limit, wait=wait, claim_id=uuid.uuid4().hex)).tasks


async def verdict(backend: RedisBackend, task: Task) -> str:
    (verdict,) = await backend.beat([Beat(id=task.id, token=task.token)])
    return verdict.verdict


async def test_each_call_follows_the_address(pair: Pair, backend: RedisBackend, kind: str) -> None:
    await backend.schedule([NewTask(kind=kind) for _ in range(8)])
    tasks = await claim(backend, kind, limit=4)
    await asyncio.gather(*(verdict(backend, task) for task in tasks))  # on several connections
    await pair.fail_over()
    assert await asyncio.gather(*(verdict(backend, task) for task in tasks)) == ["renewed"] * 4
    ends = [Settlement(id=task.id, token=task.token, outcome="success") for task in tasks]
    assert {one.verdict for one in await backend.settle(ends)} == {"settled"}
    await backend.schedule([NewTask(kind=kind)])
    assert len(await claim(backend, kind, limit=9)) == 5
    assert pair.second.ask("ROLE")[0] == b"master"


Call = Callable[[RedisBackend, Task], Awaitable[Any]]

CALLS: dict[str, tuple[Call, Callable[[Any], bool]]] = {
    "beat": (verdict, lambda answer: answer == "renewed"),
    "settle": (
        lambda backend, task: backend.settle([Settlement(id=task.id, token=task.token, outcome="success")]),
        lambda answer: answer[0].verdict == "settled",
    ),
    "schedule": (
        lambda backend, task: backend.schedule([NewTask(kind=task.kind, id=task.id)]),
        lambda answer: not answer[0].created,
    ),
    "claim": (lambda backend, task: claim(backend, task.kind), lambda answer: answer == []),
    "cancel": (lambda backend, task: backend.cancel([task.id]), lambda answer: answer[0].verdict == "cancel_requested"),
    "maintain": (lambda backend, _: backend.maintain(), lambda answer: answer is None),
    "get": (lambda backend, task: backend.get(task.id), lambda answer: answer is not None),
    "list_tasks": (lambda backend, _: backend.list_tasks(), lambda answer: len(answer.tasks) == 1),
    "stats": (lambda backend, _: backend.stats(), lambda answer: len(answer.kinds) == 1),
}


@pytest.mark.parametrize("call", CALLS)
async def test_whichever_call_comes_first_follows(pair: Pair, backend: RedisBackend, kind: str, call: str) -> None:
    """Also of a task whose kind is too long for its token, and is looked up: the demoted one knows less by then."""
    long = kind.ljust(110, "k")
    await backend.get(kind)
    await pair.fail_over()
    other = connect(f"redis://127.0.0.1:{pair.second.port}", worker="w1")
    pair.first.ask("REPLICAOF", "127.0.0.1", 1)  # it hears no news
    await other.schedule([NewTask(kind=long, id=kind)])
    (task,) = await claim(other, long)
    ask, is_right = CALLS[call]
    assert is_right(await ask(backend, task))
    await other.aclose()


async def test_until_the_address_has_moved_calls_say_what_is_wrong(
    pair: Pair, backend: RedisBackend, kind: str
) -> None:
    await backend.schedule([NewTask(kind=kind)])
    (task,) = await claim(backend, kind)
    await pair.promote()
    pair.first.ask("REPLICAOF", "127.0.0.1", pair.second.port)
    for _ in range(3):
        with pytest.raises(Unavailable, match="replica"):
            await verdict(backend, task)
    pair.move()
    assert await verdict(backend, task) == "renewed"


async def test_a_primary_that_lost_its_replicas_is_left(pair: Pair, backend: RedisBackend, kind: str) -> None:
    """It was cut off, and does not know that another has taken over; that it takes no writes is all that it says."""
    await backend.schedule([NewTask(kind=kind)])
    (task,) = await claim(backend, kind)
    await pair.fail_over(demoted=False)
    pair.first.ask("CONFIG", "SET", "min-replicas-to-write", 1)
    with anyio.fail_after(30):
        while takes_writes(pair.first):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await verdict(backend, task) == "renewed"


def takes_writes(server: Server) -> bool:
    try:
        server.ask("SET", "probe", 1)
    except redis.ResponseError:
        return False
    return True


@pytest.mark.parametrize("noted_by", ["both", "the first alone"])
async def test_a_primary_that_is_one_again_gives_every_lease_its_whole_ttl(
    pair: Pair, backend: RedisBackend, kind: str, noted_by: str
) -> None:
    """Its own process never ended, and the beats that the other has acknowledged in between may have been lost."""
    first, leases = pair.first, f"leasekit:{{{kind}}}:leases"
    await backend.schedule([NewTask(kind=kind, claim_timeout=60, heartbeat_timeout=60)])
    (task,) = await claim(backend, kind)
    await pair.fail_over()
    if noted_by == "both":
        pair.second.ask("ZADD", leases, 1, task.id)
        assert await claim(backend, kind) == []  # which notes that another server is the primary
    assert await verdict(backend, task) == "renewed"
    await pair.fail_back()
    first.ask("ZADD", leases, 1, task.id)  # as if the last beats had not arrived in time
    assert await claim(backend, kind) == []
    assert await verdict(backend, task) == "renewed"


async def test_a_failover_is_noticed_by_maintenance(pair: Pair, backend: RedisBackend, kind: str) -> None:
    """And not only by whoever finds a lease that seems to have ended: which then would last twice as long."""
    await backend.schedule([NewTask(kind=kind)])
    await claim(backend, kind)
    await pair.fail_over()
    before = pair.second.ask("TIME")[0]
    await backend.maintain()
    noted = pair.second.ask("HGET", f"leasekit:{{{kind}}}:meta", "restarted_at")
    assert int(noted) >= 1000 * int(before)


async def test_a_server_that_hangs_is_left_with_all_connections_to_it(
    pair: Pair, backend: RedisBackend, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections to a machine that is gone do not break: each of them would cost a call its patience."""
    monkeypatch.setattr(client, "_STUCK", 0.05)
    monkeypatch.setattr(connecting, "_TIMEOUT", 1000.0)
    await backend.schedule([NewTask(kind=kind) for _ in range(4)])
    tasks = await claim(backend, kind, limit=4)
    await asyncio.gather(*(verdict(backend, task) for task in tasks))
    await pair.fail_over(demoted=False)
    pair.first.ask("CLIENT", "PAUSE", 600_000, "ALL")
    with anyio.move_on_after(1):
        await verdict(backend, tasks[0])
    with anyio.fail_after(60):
        for task in tasks:
            assert await verdict(backend, task) == "renewed"


async def test_a_claim_that_waits_is_woken_by_the_new_primary(
    pair: Pair, backend: RedisBackend, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only does it look there again: it listens there, and the demoted one, which hears no news, is left."""
    monkeypatch.setattr(waiting, "_PAUSE", 0.01)
    patient = asyncio.create_task(claim(backend, kind, wait=35))
    key = f"leasekit:{{{kind}}}:waiting"
    with anyio.fail_after(30):
        while not pair.first.ask("ZCARD", key):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await pair.fail_over()
        pair.first.ask("REPLICAOF", "127.0.0.1", 1)
        # Until the claim has looked again, in vain, and so found out.
        while not pair.second.ask("PUBSUB", "CHANNELS"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not patient.done()
        monkeypatch.setattr(claiming, "_LOOK", 1000.0)
        assert pair.second.ask("ZCARD", key)
        other = connect(f"redis://127.0.0.1:{pair.second.port}", worker="w2")
        await other.schedule([NewTask(kind=kind, id=kind)])
        assert [task.id for task in await patient] == [kind]
        await other.aclose()


@pytest.mark.slow
def test_a_lease_outlives_a_failover(pair: Pair, kind: str) -> None:
    """The same through the doors of users: nothing is lost, nothing runs twice."""
    with leasekit.connect(pair.url) as client:
        scheduled = client.schedule(kind, claim_timeout=20, heartbeat_timeout=20)
        with leasekit.lease(next(iter(client.tasks(kind)))) as held:
            anyio.run(pair.fail_over)
            renewed = 1000 * (time.time() + 20)
            while float(pair.second.ask("ZRANGE", f"leasekit:{{{kind}}}:leases", 0, 0, "WITHSCORES")[1]) < renewed:
                held.check()
                time.sleep(0.02)
            held.complete("done")
        (info,) = client.wait_tasks(scheduled.id, timeout=60)
        assert (info.result, info.attempt, info.crashes) == ("done", 1, 0)
