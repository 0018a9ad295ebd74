"""What no script has written, in keys that concern a kind as a whole: the kind goes on all the same."""

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest
from redis import Redis

from leasekit.errors import Unavailable
from leasekit.task import NewTask, Settlement, Task
from leasekit_redis.backend import RedisBackend, connect
from tests.redis_server import Server
from tests.sampling import slow_after

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Redis]:
    server = Server(tmp_path / "redis")
    server.start()
    with Redis(port=server.port) as client:
        yield client
    server.kill()


@pytest.fixture
async def backend(server: Redis) -> AsyncIterator[RedisBackend]:
    backend = connect(f"redis://127.0.0.1:{server.connection_pool.connection_kwargs['port']}", worker="w")
    yield backend
    await backend.aclose()


async def claim(backend: RedisBackend, kind: str) -> list[Task]:
    return (await backend.claim([kind], limit=10, wait=0, claim_id=uuid.uuid4().hex)).tasks


@pytest.mark.parametrize("key", ["ended", "ending", "damaged"])
async def test_a_member_that_is_no_id_holds_up_no_successor(
    server: Redis, backend: RedisBackend, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    async def nobody(*_: object) -> None:
        raise Unavailable("the client died before it brought them")

    await backend.schedule([NewTask(kind="k", id="a")])
    (task,) = await claim(backend, "k")
    with monkeypatch.context() as patch:
        patch.setattr(backend._renewing, "_deliver", nobody)
        await backend.settle(
            [Settlement(id="a", token=task.token, outcome="success", then=[NewTask(kind="s", id="b")])]
        )
    server.zadd("leasekit:{k}:" + key, {b"\x90": 1})
    await backend.maintain()
    assert [task.id for task in await claim(backend, "s")] == ["b"]


@pytest.mark.parametrize("seq", ["nan", "inf", "-1", "1e308", "9007199254740993"])
async def test_a_number_that_nobody_has_counted_to_is_not_gone_on_from(
    server: Redis, backend: RedisBackend, seq: str
) -> None:
    await backend.schedule([NewTask(kind="k", id="a")])
    server.hset("leasekit:{k}:meta", "seq", seq)
    (answer,) = await backend.schedule([NewTask(kind="k", id="b")])
    assert answer.created
    assert {task.id for task in await claim(backend, "k")} == {"a", "b"}


@pytest.mark.parametrize("at", slow_after(1, ["nan", "inf", "1e15"]))
async def test_a_restart_that_is_yet_to_come_keeps_no_lease_for_ever(
    server: Redis, backend: RedisBackend, at: str
) -> None:
    await backend.schedule([NewTask(kind="k", id="a", claim_timeout=2, heartbeat_timeout=2)])
    assert await claim(backend, "k")
    server.hset("leasekit:{k}:meta", "restarted_at", at)
    until = time.monotonic() + 10
    while not (again := await claim(backend, "k")) and time.monotonic() < until:  # noqa: ASYNC110 - no event says so
        await anyio.sleep(0.2)
    assert [task.fence for task in again] == [2]


@pytest.mark.parametrize("at", [1e308, float("inf"), 0.5 + 1e15])
@pytest.mark.parametrize("key", ["due:2", "leases", "ended", "claimed"])
async def test_a_time_that_is_none_fails_no_claim_and_no_maintenance(
    server: Redis, backend: RedisBackend, key: str, at: float
) -> None:
    await backend.schedule([NewTask(kind="k", id="a")])
    await claim(backend, "k")
    for name in ("due:2", "leases", "ended", "claimed"):
        server.delete("leasekit:{k}:" + name)
    server.zadd("leasekit:{k}:" + key, {"x": at})
    assert await claim(backend, "k") == []
    await backend.maintain()
