"""Redis killed, restarted, full, read-only, strange: nothing acknowledged is lost, and every error says what it is."""

import asyncio
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

import leasekit
from leasekit.errors import ProtocolError, Refused, Unavailable
from leasekit.task import Beat, NewTask, Settlement, Task
from leasekit_redis import RedisBackend, connect
from leasekit_redis.address import parse
from leasekit_redis.client import Link
from tests.redis_server import Server
from tests.waiting import until

pytestmark = pytest.mark.anyio

DOCUMENT = Path(__file__).parents[3] / "docs" / "redis.md"


@pytest.fixture
async def backend(own_server: Server) -> AsyncIterator[RedisBackend]:
    backend = connect(own_server.url, worker="w1")
    yield backend
    await backend.aclose()


async def claim(backend: RedisBackend, kind: str, *, limit: int = 1, wait: float = 0) -> list[Task]:
    with anyio.fail_after(40):
        return (await backend.claim([kind], limit=limit, wait=wait, claim_id=uuid.uuid4().hex)).tasks


async def beat(backend: RedisBackend, task: Task, **options: Any) -> str:
    (verdict,) = await backend.beat([Beat(id=task.id, token=task.token, **options)])
    return verdict.verdict


async def settle(backend: RedisBackend, task: Task, **options: Any) -> str:
    (verdict,) = await backend.settle([Settlement(id=task.id, token=task.token, outcome="success", **options)])
    return verdict.verdict


async def statuses(backend: RedisBackend, kind: str) -> dict[str, str]:
    return {info.id: info.status.value for info in (await backend.list_tasks(kind=kind, limit=1000)).tasks}


async def test_connections_that_were_closed_meanwhile_are_replaced(own_server: Server, backend: RedisBackend) -> None:
    kinds = [uuid.uuid4().hex for _ in range(5)]
    for _ in range(2):
        await asyncio.gather(*(claim(backend, kind) for kind in kinds))
        own_server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await claim(backend, kinds[0])


# Killed and started again -------------------------------------------------------------------------------------


async def test_what_was_acknowledged_is_there_after_a_kill(
    own_server: Server, backend: RedisBackend, kind: str
) -> None:
    acknowledged: dict[str, str] = {}

    async def submit_and_run() -> None:
        for n in range(10_000):
            await backend.schedule([NewTask(kind=kind, id=f"{kind}-{n}")])
            acknowledged[f"{kind}-{n}"] = "new"
            (task,) = await claim(backend, kind)
            acknowledged[task.id] = "claimed"
            if n % 2:
                assert await settle(backend, task) == "settled"
                acknowledged[task.id] = "success"

    running = asyncio.create_task(submit_and_run())
    with anyio.fail_after(60):
        while len(acknowledged) < 50:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        own_server.kill()
        with pytest.raises(Unavailable):
            await running
    own_server.start()
    found = await statuses(backend, kind)
    # The last call may have been applied without being answered.
    order = ["new", "claimed", "success"]
    behind = [one for one, status in acknowledged.items() if order.index(found.get(one, "new")) < order.index(status)]
    assert acknowledged.keys() <= found.keys()
    assert behind == []


async def test_while_redis_is_away_calls_are_unavailable_and_then_they_are_served(
    own_server: Server, backend: RedisBackend, kind: str
) -> None:
    await backend.schedule([NewTask(kind=kind)])
    (task,) = await claim(backend, kind)
    own_server.kill()
    with pytest.raises(Unavailable, match="Redis at 127"):
        await beat(backend, task)
    with pytest.raises(Unavailable):
        await claim(backend, kind, wait=5)
    own_server.start()
    assert await beat(backend, task) == "renewed"


async def test_a_lease_has_its_whole_ttl_after_a_restart(own_server: Server, backend: RedisBackend, kind: str) -> None:
    await backend.schedule([NewTask(kind=kind, claim_timeout=2, heartbeat_timeout=2) for _ in range(2)])
    tasks = await claim(backend, kind, limit=2)
    assert await beat(backend, tasks[0]) == "renewed"
    heard = await backend.get(tasks[0].id)
    own_server.kill()
    await asyncio.sleep(2.1)  # nobody could beat
    own_server.start()
    assert await claim(backend, kind) == []
    extended = await backend.get(tasks[0].id)
    assert heard is not None
    assert extended is not None
    assert heard.heartbeat_at == extended.heartbeat_at is not None
    assert [await beat(backend, task) for task in tasks] == ["renewed", "renewed"]
    # Who does not beat then is gone as ever.
    (again,) = await claim(backend, kind, wait=30)
    assert again.fence == 2
    assert again.token not in {task.token for task in tasks}


async def test_a_claim_that_waits_through_a_restart_is_told_what_comes_then(
    own_server: Server, backend: RedisBackend, kind: str
) -> None:
    with leasekit.connect(own_server.url) as client:
        await backend.schedule([NewTask(kind=f"{kind}-other")])
        waiting = asyncio.create_task(asyncio.to_thread(lambda: next(iter(client.tasks(kind)))))
        with anyio.fail_after(60):
            while not await backend._link.command("ZCARD", f"leasekit:{{{kind}}}:waiting"):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            own_server.kill()
            own_server.start()
            (scheduled,) = await backend.schedule([NewTask(kind=kind)])
            task = await waiting
        assert task.id == scheduled.id


async def test_scripts_that_redis_forgot_are_sent_again(own_server: Server, backend: RedisBackend, kind: str) -> None:
    await backend.schedule([NewTask(kind=kind)])
    own_server.ask("SCRIPT", "FLUSH")
    (task,) = await claim(backend, kind)
    own_server.ask("SCRIPT", "FLUSH")
    assert await beat(backend, task) == "renewed"
    own_server.ask("SCRIPT", "FLUSH")
    assert await settle(backend, task) == "settled"


async def test_a_batch_of_big_values_is_sent_in_parts(own_server: Server, backend: RedisBackend, kind: str) -> None:
    """Redis takes no argument above `proto-max-bulk-len`, and serves nobody else while a script runs."""
    own_server.ask("CONFIG", "SET", "proto-max-bulk-len", str(9 * 2**20))
    big = "x" * 1_000_000
    await backend.schedule([NewTask(kind=kind, payload=big) for _ in range(12)])
    tasks = [task for _ in range(2) for task in await claim(backend, kind, limit=12)]
    assert len(tasks) == 12
    ends = [Settlement(id=one.id, token=one.token, outcome="success", result=big) for one in tasks]
    assert [verdict.verdict for verdict in await backend.settle(ends)] == ["settled"] * 12


# Full, read-only, closed --------------------------------------------------------------------------------------


async def test_full_memory_refuses_what_is_new_and_loses_nothing(
    own_server: Server, backend: RedisBackend, kind: str
) -> None:
    await backend.schedule([NewTask(kind=kind), NewTask(kind=kind)])
    (task,) = await claim(backend, kind)
    used = int(own_server.ask("INFO", "memory").partition(b"used_memory:")[2].partition(b"\r")[0])
    own_server.ask("CONFIG", "SET", "maxmemory", used + 3_000_000)
    accepted: list[str] = []

    async def fill() -> None:
        for n in range(1000):
            await backend.schedule([NewTask(kind=f"{kind}-b", id=f"{kind}-{n}", payload="x" * 100_000)])
            accepted.append(f"{kind}-{n}")

    with pytest.raises(Unavailable, match="memory is full"):
        await fill()
    assert accepted
    assert set(await statuses(backend, f"{kind}-b")) == set(accepted)
    own_server.ask("CONFIG", "SET", "maxmemory", used // 2)
    with pytest.raises(Unavailable, match="memory is full"):
        await backend.schedule([NewTask(kind=kind)])
    # Those who hold something go on, and who takes work takes it.
    assert await beat(backend, task, progress="x" * 1000) == "renewed"
    assert await settle(backend, task, result="x" * 1000) == "settled"
    (second,) = await claim(backend, kind)
    own_server.ask("CONFIG", "SET", "maxmemory", 0)
    assert await settle(backend, second) == "settled"
    await backend.schedule([NewTask(kind=kind)])


async def test_a_redis_that_would_delete_tasks_at_will_is_refused(
    own_server: Server, backend: RedisBackend, kind: str
) -> None:
    own_server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    await backend.schedule([NewTask(kind=f"{kind}-no-limit")])
    own_server.ask("CONFIG", "SET", "maxmemory", 100_000_000)
    with pytest.raises(Refused, match="noeviction"):
        await backend.schedule([NewTask(kind=kind)])
    assert await statuses(backend, kind) == {}
    own_server.ask("CONFIG", "SET", "maxmemory-policy", "volatile-lru")
    await backend.schedule([NewTask(kind=kind)])


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["CONFIG", "SET", "min-replicas-to-write", 1], "replicas"),
        (["REPLICAOF", "127.0.0.1", 1], "replica"),
    ],
    ids=["no-replicas", "replica"],
)
async def test_a_redis_that_takes_no_writes_says_why(
    own_server: Server, backend: RedisBackend, kind: str, command: list[Any], says: str
) -> None:
    await backend.schedule([NewTask(kind=kind)])
    (task,) = await claim(backend, kind)
    own_server.ask(*command)
    for call in (backend.schedule([NewTask(kind=kind)]), beat(backend, task), claim(backend, kind)):
        with pytest.raises(Unavailable, match=says):
            await call


async def test_a_wrong_password_is_refused_and_not_repeated(own_server: Server) -> None:
    own_server.ask("CONFIG", "SET", "requirepass", "right")
    backend = connect(own_server.url.replace("//", "//:hunter2@"), worker="w")
    for call in (backend.stats(), backend.claim(["k"], limit=1, wait=1, claim_id="c")):
        with pytest.raises(Refused, match="password") as refused:
            await call
        assert "hunter2" not in str(refused.value)
    await backend.aclose()
    own_server.kill()  # nobody else is to need the password


async def test_a_database_that_redis_does_not_have_is_refused(own_server: Server) -> None:
    backend = connect(f"{own_server.url}/99", worker="w")
    with pytest.raises(Refused, match="has no database 99: choose another"):
        await backend.stats()
    await backend.aclose()


async def test_a_result_waits_until_its_holder_is_let_in_again(own_server: Server, kind: str) -> None:
    """A password that is changed while a body runs costs neither the lease nor the result."""
    backend = connect(own_server.url.replace("//", "//worker:old@"), worker="w")
    user = ["ACL", "SETUSER", "worker", "on", "~*", "&*", "+@all", "resetpass"]
    own_server.ask(*user, ">old")
    await backend.schedule([NewTask(kind=kind)])
    (task,) = await claim(backend, kind)
    own_server.ask(*user, ">new")
    own_server.ask("CLIENT", "KILL", "USER", "worker")
    for call in (beat(backend, task), settle(backend, task)):
        with pytest.raises(Unavailable, match="password"):
            await call
    own_server.ask(*user, ">old")
    assert await beat(backend, task) == "renewed"
    assert await settle(backend, task) == "settled"
    await backend.aclose()


async def test_the_permissions_that_the_documents_name_are_enough(own_server: Server, kind: str) -> None:
    (line,) = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("ACL SETUSER")]
    own_server.ask(*line.replace(">password", ">p@ss").split())
    backend = connect(own_server.url.replace("//", "//worker:p%40ss@") + "?prefix=leasekit", worker="w")
    await backend.schedule([NewTask(kind=kind), NewTask(kind=kind)])
    ended, other = await claim(backend, kind, limit=2, wait=5)
    assert await beat(backend, other) == "renewed"
    assert await settle(backend, ended, then=[NewTask(kind=f"{kind}-b")]) == "settled"
    own_server.ask("ZADD", f"leasekit:{{{kind}}}:leases", 1, other.id)
    await backend.maintain()
    assert [one.id for one in await claim(backend, kind)] == [other.id]
    assert (await backend.stats()).kinds[kind] == {"success": 1, "claimed": 1}
    assert len((await backend.list_tasks()).tasks) == 3
    assert [worker.name for worker in await backend.workers()] == ["w"]
    await backend.aclose()


async def test_who_may_not_do_what_is_needed_is_refused(own_server: Server, kind: str) -> None:
    own_server.ask("ACL", "SETUSER", "reader", "on", ">pw", "~*", "&*", "+@read")
    backend = connect(own_server.url.replace("//", "//reader:pw@"), worker="w")
    with pytest.raises(Refused, match="allow"):
        await backend.schedule([NewTask(kind=kind)])
    await backend.aclose()


@pytest.mark.parametrize("command", ["hset", "hdel", "zadd", "zrem", "rpush"])
async def test_a_right_that_is_missing_for_a_while_leaves_no_half_of_a_change(
    own_server: Server, kind: str, command: str
) -> None:
    """Redis undoes nothing of a script that fails, so a script must fail before its first write."""
    backend = connect(own_server.url.replace("//", "//worker:pw@"), worker="w")
    own_server.ask("ACL", "SETUSER", "worker", "on", ">pw", "~*", "&*", "+@all")
    await backend.schedule([NewTask(kind=kind, id=f"{kind}-{number}") for number in range(3)])
    running, other = await claim(backend, kind, limit=2)
    then = [NewTask(kind=f"{kind}-b")]
    claimed: list[Task] = []

    async def claim_one() -> None:
        claimed.extend(await claim(backend, kind))

    own_server.ask("ACL", "SETUSER", "worker", f"-{command}")
    for call in (
        backend.schedule([NewTask(kind=kind, id=f"{kind}-new")]),
        claim_one(),
        beat(backend, running, progress=1),
        settle(backend, running, then=then),
        backend.settle([Settlement(id=other.id, token=other.token, outcome="retry", retry_after=0)]),
        backend.cancel([f"{kind}-2"]),
    ):
        with suppress(Refused, Unavailable):  # each is refused, or needs no such right
            await call
    own_server.ask("ACL", "SETUSER", "worker", f"+{command}")

    assert (await backend.stats()).damaged == {}
    await settle(backend, running, then=then)
    await backend.settle([Settlement(id=other.id, token=other.token, outcome="success")])
    await backend.schedule([NewTask(kind=kind, id=f"{kind}-new")])
    await backend.cancel([f"{kind}-2"])
    for task in [*claimed, *await claim(backend, kind, limit=10)]:
        assert await settle(backend, task) == "settled"
    await backend.maintain()
    found = await statuses(backend, kind)
    assert found.pop(f"{kind}-2") in {"cancelled", "success"}
    assert set(found.values()) == {"success"}
    assert (await backend.stats()).damaged == {}
    assert len(await statuses(backend, f"{kind}-b")) == 1
    await backend.aclose()


async def test_closing_waits_for_calls_under_way_and_leaves_no_connection(own_server: Server) -> None:
    """redis-py opens a connection again that is closed under a call, and then nobody would close it."""
    link = Link(parse(own_server.url))
    call = asyncio.create_task(link.command("BLPOP", "k", 10))
    await until(lambda: b"blocked_clients:1" in own_server.ask("INFO", "clients"))
    closing = asyncio.create_task(link.aclose())
    await asyncio.sleep(0)
    own_server.ask("RPUSH", "k", "v")
    assert (await call)[1] == b"v"
    await closing
    assert len(own_server.ask("CLIENT", "LIST").splitlines()) == 1
    with pytest.raises(Unavailable, match="was closed"):
        await link.command("PING")
    await link.aclose()


# Strange ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ["SET", "state", "x"],
        ["HSET", "state", "t", "\x00"],
        ["HSET", "state", "t", b"\xc1"],
        ["HSET", "task", "t", "no JSON"],
        ["HSET", "task", "t", b"\xff\xfe"],
    ],
    ids=lambda command: " ".join(repr(word) for word in command),
)
async def test_what_others_have_written_among_our_keys_is_a_protocol_error(
    server: Server, kind: str, command: list[Any]
) -> None:
    backend = connect(server.url, worker="w")
    await backend.schedule([NewTask(kind=kind, id=f"t-{kind}")])
    words = [f"t-{kind}" if word == "t" else word for word in command[2:]]
    if command[0] == "SET":
        server.ask("DEL", f"leasekit:{{{kind}}}:state")
    server.ask(command[0], f"leasekit:{{{kind}}}:{command[1]}", *words)
    with pytest.raises(ProtocolError):
        await backend.get(f"t-{kind}")
    server.ask("DEL", *(key for key in server.ask("KEYS", f"leasekit:{{{kind}}}:*")))
    await backend.aclose()


async def test_keys_of_others_under_our_prefix_are_named_as_what_is_wrong(own_server: Server, kind: str) -> None:
    own_server.ask("SET", "shop:kinds", "7")
    backend = connect(f"{own_server.url}?prefix=shop", worker="w")
    with pytest.raises(ProtocolError, match=r"begins with 'shop'.*prefix="):
        await backend.schedule([NewTask(kind=kind)])
    await backend.aclose()


async def test_a_server_that_is_no_redis_is_a_typed_error(kind: str) -> None:
    async def chatter(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    strange = await asyncio.start_server(chatter, "127.0.0.1", 0)
    backend = connect(f"redis://127.0.0.1:{strange.sockets[0].getsockname()[1]}", worker="w")
    with pytest.raises(Unavailable):
        await backend.schedule([NewTask(kind=kind)])
    await backend.aclose()
    strange.close()
    await strange.wait_closed()


# Whole processes ----------------------------------------------------------------------------------------------

HOLD = """
import sys, time, leasekit
with leasekit.connect(sys.argv[1], heartbeats=leasekit.Heartbeats().for_ttl(2)) as client:
    for task in client.tasks(sys.argv[2]):
        with leasekit.lease(task) as held:
            held.progress("begun")
            print(held.fence, flush=True)
            time.sleep(600)
"""


def test_a_worker_that_is_killed_is_followed_by_another(server: Server, kind: str) -> None:
    with leasekit.connect(server.url) as client:
        scheduled = client.schedule(kind, claim_timeout=2, heartbeat_timeout=2)
        with subprocess.Popen([sys.executable, "-c", HOLD, server.url, kind], stdout=subprocess.PIPE) as worker:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"1\n"
            deadline = time.monotonic() + 60
            while client.list_tasks(kind=kind).tasks[0].progress is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            worker.kill()
        for task in client.tasks(kind):
            with leasekit.lease(task) as held:
                assert (held.fence, held.checkpoint) == (2, "begun")
            break
        (info,) = client.wait_tasks(scheduled.id, timeout=60)
        assert [run.outcome for run in info.history] == ["expired", "success"]
        assert info.crashes == 1


def test_a_fleet_of_handlers_runs_on_redis(server: Server, kind: str) -> None:
    with leasekit.connect(server.url) as client:
        worker = leasekit.Worker(client, concurrency=8)
        left = [20]

        @worker.handler(kind)
        def double(payload: int) -> int:
            left[0] -= 1
            if not left[0]:
                worker.stop()
            return 2 * payload

        ids = [scheduled.id for scheduled in client.schedule_all([NewTask(kind=kind, payload=n) for n in range(20)])]
        worker.run()
        assert [info.result for info in client.wait_tasks(*ids, timeout=60)] == [2 * n for n in range(20)]


# Settings with which a crash, or full memory, forgets tasks ----------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"appendonly": "no"}, ["appendonly is off: after a crash of this Redis"]),
        ({"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}, ["maxmemory-policy is allkeys-lru: full memory"]),
        ({}, []),
    ],
)
async def test_a_redis_that_would_forget_tasks_is_named_once_for_each_process(
    own_server: Server,
    settings: dict[str, str],
    said: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("leasekit_redis.client._looked_at", set())
    for name, value in settings.items():
        own_server.ask("CONFIG", "SET", name, value)
    for worker in ("w1", "w2"):
        backend = connect(own_server.url, worker=worker)
        await backend.get("any")
        await backend.aclose()
    assert len(caplog.records) == len(said)
    for record, words in zip(caplog.records, said, strict=True):
        assert (record.levelname, words in record.getMessage()) == ("WARNING", True)


async def test_a_user_who_may_not_read_the_settings_of_redis_is_served_without_a_word(
    own_server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasekit_redis.client._looked_at", set())
    own_server.ask("CONFIG", "SET", "appendonly", "no")
    own_server.ask("ACL", "SETUSER", "ann", "on", ">secret", "~*", "&*", "+@all", "-info")
    backend = connect(own_server.url.replace("//", "//ann:secret@"), worker="w1")
    assert await backend.get("any") is None
    await backend.aclose()
    assert not caplog.records
