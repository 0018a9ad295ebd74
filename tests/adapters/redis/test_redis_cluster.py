"""What only a cluster does: kinds are spread over it, and a replica takes over."""

import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from leasekit.errors import BackendError, Refused, Unavailable
from leasekit.task import Beat, NewTask, Settlement
from leasekit_redis import RedisBackend, connect
from tests.adapters.redis.conftest import Cluster
from tests.redis_server import Server

pytestmark = pytest.mark.anyio


@pytest.fixture
async def backend(cluster: Cluster) -> AsyncIterator[RedisBackend]:
    backend = connect(cluster.url, worker="w")
    yield backend
    await backend.aclose()


async def test_kinds_are_spread_and_claimed_together(cluster: Cluster, backend: RedisBackend, kind: str) -> None:
    kinds = [f"{kind}-{n}" for n in range(12)]
    assert len({cluster.owner(f"leasekit:{{{one}}}:state").port for one in kinds}) > 1
    await backend.schedule([NewTask(kind=one) for one in kinds])
    claimed = await backend.claim(kinds, limit=20, wait=0, claim_id=kind)
    assert sorted(task.kind for task in claimed.tasks) == sorted(kinds)
    beats = await backend.beat([Beat(id=task.id, token=task.token) for task in claimed.tasks])
    assert {verdict.verdict for verdict in beats} == {"renewed"}
    then = [NewTask(kind=kinds[n - 1], payload=n) for n in range(3)]
    ends = [Settlement(id=task.id, token=task.token, outcome="success", then=then) for task in claimed.tasks]
    assert {verdict.verdict for verdict in await backend.settle(ends)} == {"settled"}
    stats = (await backend.stats()).kinds
    assert sum(stats[one]["success"] for one in kinds) == 12
    assert sum(stats[one].get("new", 0) for one in kinds) == 36


async def test_a_url_of_another_kind_of_redis_is_refused_with_what_to_write(cluster: Cluster, server: Server) -> None:
    node = cluster.nodes[0].url
    for url, right in ((node, "redis[+]cluster"), (f"{node}/1", "redis[+]cluster"), (server.url, "redis")):
        backend = connect(url.replace("redis:", "redis+cluster:") if right == "redis" else url, worker="w1")
        with pytest.raises(Refused, match=f": write {right}://…$"):
            await backend.schedule([NewTask(kind=f"kind-{n}") for n in range(20)])
        await backend.aclose()


async def test_a_batch_of_many_kinds_is_the_first_call(backend: RedisBackend, kind: str) -> None:
    answers = await backend.schedule([NewTask(kind=f"{kind}-{n}") for n in range(150)])
    assert all(answer.created for answer in answers)


async def test_a_replica_that_takes_over_goes_on_with_all_that_it_was_given(
    cluster: Cluster, backend: RedisBackend, kind: str
) -> None:
    await backend.schedule([NewTask(kind=kind, claim_timeout=2, heartbeat_timeout=2), NewTask(kind=kind, id=kind)])
    first = (await backend.claim([kind], limit=1, wait=0, claim_id="first")).tasks[0]
    primary = cluster.owner(f"leasekit:{{{kind}}}:state")
    replica = cluster.replica_of(primary)
    offset = primary.ask("ROLE")[1]
    with anyio.fail_after(60):
        while replica.ask("ROLE")[4] < offset:  # noqa: ASYNC110
            await anyio.sleep(0.01)
    primary.kill()
    replica.ask("CLUSTER", "FAILOVER", "TAKEOVER")
    try:
        with anyio.fail_after(60):
            while (verdict := await tried(backend, first.id, first.token)) is None:  # noqa: ASYNC110
                await anyio.sleep(0.05)
            # Nobody could beat meanwhile: its lease counts anew, however long that took.
            assert verdict == "renewed"
            (second,) = (await backend.claim([kind], limit=1, wait=20, claim_id=uuid.uuid4().hex)).tasks
        assert second.id == kind
    finally:
        primary.start()
        cluster.settle()


async def tried(backend: RedisBackend, task_id: str, token: str) -> str | None:
    try:
        (verdict,) = await backend.beat([Beat(id=task_id, token=token)])
    except BackendError:
        return None
    return verdict.verdict


# A shard that is away -------------------------------------------------------------------------------------------


async def test_kinds_of_shards_that_answer_are_served_while_another_is_away(
    cluster: Cluster, backend: RedisBackend, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = [f"{kind}-{n}" for n in range(12)]
    await backend.schedule([NewTask(kind=one) for one in kinds])
    away = cluster.owner(f"leasekit:{{{kinds[0]}}}:state")
    there = [one for one in kinds if cluster.owner(f"leasekit:{{{one}}}:state") is not away]
    for node in cluster.nodes:
        node.ask("CONFIG", "SET", "cluster-require-full-coverage", "no")
    away.kill()
    try:
        with anyio.fail_after(60):
            got = (await backend.claim(kinds, limit=20, wait=0, claim_id=f"{kind}-1")).tasks
            assert sorted(task.kind for task in got) == sorted(there)
            assert (await backend.claim(kinds, limit=20, wait=0, claim_id=f"{kind}-2")).tasks == []
        assert [record.levelname for record in caplog.records if "claims skip" in record.message] == ["WARNING"]
        with pytest.raises(BackendError):
            await backend.claim([kinds[0]], limit=1, wait=0, claim_id=f"{kind}-3")
    finally:
        away.start()
        cluster.settle()
    with anyio.fail_after(60):
        while {task.kind for task in got} != set(kinds):
            with suppress(BackendError):
                got += (await backend.claim(kinds, limit=20, wait=1, claim_id=uuid.uuid4().hex)).tasks


async def test_a_client_that_comes_while_a_shard_is_away_serves_the_kinds_of_the_others(
    cluster: Cluster, backend: RedisBackend, kind: str
) -> None:
    """Whichever it is, also that which redis-py chooses to ask what commands there are."""
    kinds = [f"{kind}-{n}" for n in range(12)]
    for node in cluster.nodes:
        node.ask("CONFIG", "SET", "cluster-require-full-coverage", "no")
    for away in {cluster.owner(f"leasekit:{{{one}}}:state") for one in kinds}:
        await backend.schedule([NewTask(kind=one) for one in kinds])
        there = [one for one in kinds if cluster.owner(f"leasekit:{{{one}}}:state") is not away]
        away.kill()
        late = connect(cluster.url, worker="w")
        try:
            claimed = await late.claim(there, limit=100, wait=0, claim_id=uuid.uuid4().hex)
            assert {task.kind for task in claimed.tasks} == set(there)
        finally:
            await late.aclose()
            away.start()
            cluster.settle()


async def test_what_an_away_shard_has_granted_unheard_is_ready_again_when_it_answers(
    cluster: Cluster, backend: RedisBackend, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [f"{kind}-{n}" for n in range(12)]
    await backend.schedule([NewTask(kind=one) for one in kinds])
    away = cluster.owner(f"leasekit:{{{kinds[0]}}}:state")
    there = {one for one in kinds if cluster.owner(f"leasekit:{{{one}}}:state") is not away}
    run = backend._link.run
    is_away = True

    async def lose(script: Any, keys: Any, argument: bytes) -> bytes | None:
        answer = await run(script, keys, argument)
        if is_away and cluster.owner(keys[0].decode()) is away:
            raise Unavailable("its answer was lost")
        return answer

    monkeypatch.setattr(backend._link, "run", lose)
    got = (await backend.claim(kinds, limit=20, wait=0, claim_id=kind)).tasks
    assert {task.kind for task in got} == there
    is_away = False
    with anyio.fail_after(60):  # well below the lease
        while {task.kind for task in got} != set(kinds):
            got += (await backend.claim(kinds, limit=20, wait=1, claim_id=uuid.uuid4().hex)).tasks
    assert len(got) == len(kinds)


# A claim that is ended while a shard is away ----------------------------------------------------------------------


@dataclass
class Away:
    """Two kinds that two shards keep; requests do not get through to the first while it is away."""

    kinds: list[str]
    is_away: bool = True


@pytest.fixture
def away(cluster: Cluster, backend: RedisBackend, kind: str, monkeypatch: pytest.MonkeyPatch) -> Away:
    names = [f"{kind}-{n}" for n in range(12)]
    owners = [cluster.owner(f"leasekit:{{{name}}}:state") for name in names]
    away = Away([names[0], next(name for name, owner in zip(names, owners, strict=True) if owner is not owners[0])])
    run = backend._link.run

    async def pass_on(script: Any, keys: Any, argument: bytes) -> bytes | None:
        if away.is_away and cluster.owner(keys[0].decode()) is owners[0]:
            raise Unavailable("it is away")
        return await run(script, keys, argument)

    monkeypatch.setattr(backend._link, "run", pass_on)
    return away


@pytest.fixture
async def late(cluster: Cluster) -> AsyncIterator[RedisBackend]:
    """The same worker, with requests that a network has kept."""
    backend = connect(cluster.url, worker="w")
    yield backend
    await backend.aclose()


async def test_a_claim_is_ended_only_when_all_shards_have_heard(
    backend: RedisBackend, late: RedisBackend, away: Away, kind: str
) -> None:
    first, second = await late.schedule([NewTask(kind=one) for one in away.kinds])
    for _ in range(2):  # the second time it is known to be away
        with pytest.raises(Unavailable, match="it is away"):
            await backend.claim(away.kinds, limit=0, wait=0, claim_id=kind)
    assert (await late.claim(away.kinds[1:], limit=1, wait=0, claim_id=kind)).tasks == [], "the others have heard"
    away.is_away = False
    assert (await backend.claim(away.kinds, limit=0, wait=0, claim_id=kind)).tasks == []
    assert (await late.claim(away.kinds, limit=2, wait=0, claim_id=kind)).tasks == []
    assert {task.id for task in (await late.claim(away.kinds, limit=2, wait=0, claim_id=f"{kind}-b")).tasks} == {
        first.id, second.id,
    }  # fmt: skip


async def test_a_claim_that_nobody_ends_again_is_ended_when_its_shard_answers(
    backend: RedisBackend, late: RedisBackend, away: Away, kind: str
) -> None:
    with pytest.raises(Unavailable):
        await backend.claim(away.kinds, limit=0, wait=0, claim_id=kind)
    away.is_away = False
    assert (await backend.claim(away.kinds, limit=1, wait=0, claim_id=f"{kind}-b")).tasks == []
    with anyio.fail_after(60):
        while backend._errands:  # noqa: ASYNC110 - that is where it is ended
            await anyio.sleep(0.01)
    await late.schedule([NewTask(kind=one) for one in away.kinds])
    assert (await late.claim(away.kinds, limit=2, wait=0, claim_id=kind)).tasks == []
