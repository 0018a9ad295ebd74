"""What Redis keeps of tasks, beyond the contract: ids, waits, retention, successors, those who wait."""

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import msgspec
import pytest

from harness.chaos import redis_clock
from leasekit.errors import ProtocolError, Refused, Unavailable
from leasekit.task import (
    Beat,
    Claimed,
    Exponential,
    FixedDelays,
    NewTask,
    Outcome,
    Polynomial,
    RetryPolicy,
    Settlement,
    Task,
    Verdict,
)  # fmt: skip
from leasekit_redis import RedisBackend, claiming, connect, maintenance, scripts
from leasekit_redis.address import parse
from leasekit_redis.clocks import Clocks, Told
from tests.redis_server import Server
from tests.waiting import until

pytestmark = pytest.mark.anyio

Open = Callable[..., RedisBackend]


@pytest.fixture
async def opened(server: Server) -> AsyncIterator[Open]:
    """`opened(worker)`: a connection that is closed in the end."""
    backends: list[RedisBackend] = []

    def open_(worker: str = "w", **changes: Any) -> RedisBackend:
        chance = changes.pop("chance", None)
        backends.append(RedisBackend(replace(parse(server.url), **changes), worker=worker, chance=chance))
        return backends[-1]

    yield open_
    for backend in backends:
        await backend.aclose()


@pytest.fixture
def backend(opened: Open) -> RedisBackend:
    return opened()


async def claim(backend: RedisBackend, *kinds: str, limit: int = 1, wait: float = 0, claim_id: str = "") -> list[Task]:
    with anyio.fail_after(30):
        return (await backend.claim(kinds, limit=limit, wait=wait, claim_id=claim_id or uuid.uuid4().hex)).tasks


async def held(backend: RedisBackend, kind: str, **options: Any) -> Task:
    await backend.schedule([NewTask(kind=kind, **options)])
    (task,) = await claim(backend, kind)
    return task


async def beat(backend: RedisBackend, task: Task) -> Verdict:
    (verdict,) = await backend.beat([Beat(id=task.id, token=task.token)])
    return verdict


async def settle(backend: RedisBackend, task: Task, outcome: Outcome = "success", **options: Any) -> str:
    (verdict,) = await backend.settle([Settlement(id=task.id, token=task.token, outcome=outcome, **options)])
    return verdict.verdict


# Ids and kinds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["}{", "{}", "a b.c", "%7B", "k" * 110])
async def test_a_kind_may_have_any_name(backend: RedisBackend, kind: str, name: str) -> None:
    task = await held(backend, name + kind)
    (verdict,) = await backend.beat([Beat(id=task.id, token=task.token)])
    assert verdict.verdict == "renewed"
    assert await settle(backend, task) == "settled"
    assert (await backend.list_tasks(kind=name + kind)).tasks[0].kind == name + kind


async def test_a_batch_of_beats_of_one_kind_is_one_round_trip(server: Server, backend: RedisBackend, kind: str) -> None:
    await backend.schedule([NewTask(kind=kind) for _ in range(100)])
    tasks = await claim(backend, kind, limit=100)
    before = calls(server)
    await backend.beat([Beat(id=task.id, token=task.token) for task in tasks])
    assert calls(server) == before + 1


def calls(server: Server) -> int:
    stats = server.ask("INFO", "commandstats").decode()
    return int(stats.partition("cmdstat_evalsha:calls=")[2].partition(",")[0])


async def test_beats_of_several_kinds_come_back_in_order(backend: RedisBackend, kind: str) -> None:
    tasks = [await held(backend, f"{kind}-{n % 3}") for n in range(7)]
    await settle(backend, tasks[3])
    verdicts = await backend.beat([Beat(id=task.id, token=task.token) for task in tasks])
    assert [verdict.id for verdict in verdicts] == [task.id for task in tasks]
    assert [verdict.verdict == "renewed" for verdict in verdicts] == [n != 3 for n in range(7)]


async def test_the_token_of_another_task_writes_nothing(backend: RedisBackend, kind: str) -> None:
    mine, other = await held(backend, kind), await held(backend, kind)
    stolen = Task(id=mine.id, kind=kind, token=other.token, ttl=1)
    (verdict,) = await backend.beat([Beat(id=mine.id, token=other.token, progress="stolen")])
    assert (verdict.verdict, verdict.reason) == ("gone", "taken")
    assert await settle(backend, stolen, result="stolen") == "gone"
    info = await backend.get(mine.id)
    assert info is not None
    assert (info.status, info.progress, info.result) == ("claimed", None, None)


async def test_an_id_that_was_registered_and_never_made_is_free(backend: RedisBackend, kind: str) -> None:
    await backend._register.reserve([(kind, kind), (f"{kind}-2", kind)])  # and then the submitter died
    same, other = await backend.schedule([NewTask(kind=kind, id=kind), NewTask(kind=kind + "-b", id=f"{kind}-2")])
    assert (same.created, other.created) == (True, True)
    info = await backend.get(f"{kind}-2")
    assert info is not None
    assert info.kind == kind + "-b"


async def test_a_dedupe_key_leaves_nothing_behind_of_those_that_made_no_task(backend: RedisBackend, kind: str) -> None:
    await backend.schedule([NewTask(kind=kind, dedupe_key="k")])
    await backend.schedule([NewTask(kind=kind, id=kind, dedupe_key="k")])
    assert await backend._register.find([kind]) == [None]


async def test_first_come_first_served_within_a_lane(backend: RedisBackend, kind: str) -> None:
    ids = [f"{kind}-{uuid.uuid4().hex}" for _ in range(50)]
    await backend.schedule([NewTask(kind=kind, id=task_id) for task_id in ids])
    assert [task.id for task in await claim(backend, kind, limit=50)] == ids


async def test_big_payloads_do_not_all_come_at_once(backend: RedisBackend, kind: str) -> None:
    for _ in range(10):
        await backend.schedule([NewTask(kind=kind, payload="x" * 1_000_000)])
    first = await claim(backend, kind, limit=10)
    assert 0 < len(first) < 10
    assert len(await claim(backend, kind, limit=10)) == 10 - len(first)


# Refusals -----------------------------------------------------------------------------------------------------


async def refused(call: Awaitable[Any]) -> list[dict[str, Any]]:
    with pytest.raises(Refused) as refusal:
        await call
    return [{name: error.get(name) for name in ("item", "field")} for error in refusal.value.errors]


async def test_what_is_out_of_bounds_is_refused_with_item_and_field(backend: RedisBackend, kind: str) -> None:
    deep: list[Any] = []
    for _ in range(65):
        deep = [deep]
    good, long = Settlement(id="a", token="t", outcome="success"), "x" * 70_000
    late = NewTask(kind=kind, payload=[long] * 16)
    assert await refused(backend.schedule([NewTask(kind=kind), NewTask(kind=kind, payload=deep)])) == [
        {"item": 1, "field": "payload"}
    ]
    assert await refused(backend.schedule([NewTask(kind="a/b")])) == [{"item": 0, "field": "kind"}]
    assert await refused(backend.schedule([NewTask(kind=kind, payload=object())])) == [{"item": 0, "field": "payload"}]
    assert await refused(backend.beat([Beat(id="a", token="t", progress=long)])) == [{"item": 0, "field": "progress"}]
    assert await refused(backend.beat([Beat(id="a", token="t", progress={1, object()})])) == [
        {"item": 0, "field": "progress"}
    ]
    assert await refused(backend.settle([good, Settlement(id="a", token="t", outcome="fatal", error=long)])) == [
        {"item": 1, "field": "error"}
    ]
    assert await refused(
        backend.settle([Settlement(id="a", token="t", outcome="retry", then=[NewTask(kind="k")])])
    ) == [{"item": 0, "field": "then"}]
    assert await refused(backend.settle([Settlement(id="a", token="t", outcome="success", then=[late])])) == [
        {"item": 0, "field": "then[0].payload"}
    ]
    assert await refused(backend.claim([], limit=1, wait=0, claim_id="c")) == [{"item": None, "field": "kinds"}]
    assert await refused(backend.list_tasks(limit=0)) == [{"item": None, "field": "limit"}]
    assert await refused(backend.list_tasks(cursor="nowhere")) == [{"item": None, "field": "cursor"}]
    assert await refused(backend.beat([Beat(id="a", token="t")] * 1001)) == [{"item": None, "field": "beats"}]


# Waits and ends -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        Exponential(),
        Exponential(first=0.5, factor=3, max=100, jitter=1),
        Exponential(first=10, factor=100, max=1e6, jitter=0),
        Polynomial(),
        FixedDelays(waits=[5, 0.25, 7]),
    ],
    ids=repr,
)
async def test_redis_waits_as_the_policy_says(opened: Open, kind: str, policy: RetryPolicy) -> None:
    for tries in range(1, 6):
        backend = opened(chance=random.Random(tries))
        if tries == 1:
            await backend.schedule([NewTask(kind=kind, id=kind, retry=policy)])
        else:  # its time has come
            key = f"leasekit:{{{kind}}}:due:2"
            (member,) = await backend._link.command("ZRANGE", key, 0, 0)
            await backend._link.command("ZADD", key, 1, member)
        (task,) = await claim(backend, kind)
        before = datetime.now(UTC)
        await settle(backend, task, "retry")
        info = await backend.get(kind)
        assert info is not None
        wait = timedelta(seconds=policy.wait(tries, random.Random(tries)) - 0.001)
        assert (
            before + wait - timedelta(milliseconds=1) <= info.at <= datetime.now(UTC) + wait + timedelta(seconds=0.002)
        )


async def test_a_task_that_was_kept_long_enough_is_not_redriven(opened: Open, kind: str) -> None:
    """Another client may be about to delete it, and has freed its id already."""
    backend = opened(retention=0.0, prefix=f"p-{kind}")
    await settle(backend, await held(backend, kind, id="ended", max_attempts=1), "retry")
    (verdict,) = (await backend.redrive(["ended"])).tasks
    assert (verdict.verdict, verdict.reason) == ("gone", "unknown")


async def test_what_ended_is_found_by_its_day(backend: RedisBackend, kind: str) -> None:
    good, bad = await held(backend, kind), await held(backend, kind, max_attempts=1)
    await settle(backend, good)
    await settle(backend, bad, "retry")
    today = datetime.now(UTC).date()
    days = [today, today - timedelta(days=1)]  # midnight may have passed
    ended = [info for day in days for info in await backend.ended_on(kind, day)]
    assert {info.id for info in ended} == {good.id, bad.id}
    dead = [info.id for day in days for info in await backend.ended_on(kind, day, status=ended[0].status)]
    assert len(dead) == 1
    assert await backend.ended_on(kind, today - timedelta(days=5)) == []


async def test_what_ended_long_ago_is_dropped_with_all_that_was_kept_of_it(
    server: Server, opened: Open, kind: str
) -> None:
    backend = opened(retention=0.0, prefix=f"p-{kind}")
    ended = await held(backend, kind, id="ended", dedupe_key="k", max_attempts=1)
    await settle(backend, ended, "retry", error=[1], progress=[2])
    await opened(prefix=f"p-{kind}").redrive(["ended"])
    (ended,) = await claim(backend, kind)
    await settle(backend, ended, result=[3])
    await held(backend, kind, id="running")
    await backend.schedule([NewTask(kind=kind, id="waiting")])
    await backend.maintain()
    assert await backend.get("ended") is None
    assert [info.id for info in (await backend.list_tasks(kind=kind)).tasks] == ["running", "waiting"]
    assert (await backend.stats()).kinds == {kind: {"claimed": 1, "new": 1}}
    for key in server.ask("KEYS", f"p-{kind}:*"):
        assert b"ended" not in server.ask("DUMP", key) or key.endswith(b":claims"), key
    (again,) = await backend.schedule([NewTask(kind=kind, id="ended", dedupe_key="k")])
    assert again.created


async def test_a_kind_of_which_nothing_is_left_leaves_no_key(server: Server, opened: Open, kind: str) -> None:
    backend = opened(retention=0.0, prefix=f"p-{kind}")
    await settle(backend, await held(backend, kind), "success")
    claimed = f"p-{kind}:{{{kind}}}:claimed"
    server.ask("ZADD", claimed, 1, server.ask("ZRANGE", claimed, 0, 0)[0])
    await backend.maintain()
    assert server.ask("KEYS", f"p-{kind}:*") == [f"p-{kind}:clients".encode()]
    await settle(backend, await held(backend, kind), "success")


async def test_clients_know_how_many_share_the_maintenance(server: Server, opened: Open, kind: str) -> None:
    fleet = [opened(prefix=f"p-{kind}") for _ in range(3)]
    for one in fleet + fleet:
        await one.maintain()
    assert [one._maintenance._clients for one in fleet] == [3, 3, 3]
    clients = f"p-{kind}:clients"
    server.ask("ZADD", clients, 1, fleet[0]._maintenance._name)  # it has not been heard of since
    await fleet[-1].maintain()
    assert fleet[-1]._maintenance._clients == 2


async def test_kinds_that_may_have_work_are_due_for_maintenance(server: Server, opened: Open, kind: str) -> None:
    backend = opened(prefix=f"p-{kind}")
    await settle(backend, await held(backend, f"{kind}-ended"), "success")
    await backend.schedule([NewTask(kind=f"{kind}-waiting")])
    await backend.maintain()
    server.ask("DEL", f"p-{kind}:{{{kind}-ended}}:claimed")
    await backend.schedule([NewTask(kind=f"{kind}-ended", id="more")])
    await backend.cancel(["more"])
    await backend.maintain()
    days = {}
    for name in ("ended", "waiting"):
        score = float(server.ask("ZSCORE", f"p-{kind}:kinds", f"{kind}-{name}"))
        days[name] = round((score / 1000 - time.time()) / 86400)
    assert days == {"ended": 14, "waiting": 0}
    await backend.schedule([NewTask(kind=f"{kind}-ended")])
    assert float(server.ask("ZSCORE", f"p-{kind}:kinds", f"{kind}-ended")) == 0


async def hours_until_due(server: Server, kind: str) -> float:
    """In how many hours the kind is due for maintenance."""
    return float(server.ask("ZSCORE", f"p-{kind}:kinds", kind)) / 3_600_000 - time.time() / 3600


async def test_a_quiet_kind_is_maintained_more_and_more_rarely(server: Server, opened: Open, kind: str) -> None:
    backend = opened(prefix=f"p-{kind}")
    await backend.schedule([NewTask(kind=kind) for _ in range(2)])
    for quiet, hours in ((4, 4), (1000, 24)):
        server.ask("HSET", f"p-{kind}:{{{kind}}}:meta", "asked", round(1000 * (time.time() - 3600 * quiet)))
        await backend._register.note([kind])
        await backend.maintain()
        assert await hours_until_due(server, kind) == pytest.approx(hours, abs=0.1)
    await claim(backend, kind)
    await backend._register.note([kind])
    await backend.maintain()
    assert await hours_until_due(server, kind) < 0.1


async def test_a_granted_task_makes_its_kind_due_for_maintenance(server: Server, opened: Open, kind: str) -> None:
    """A quiet kind is maintained rarely, and the worker that was granted the task may die."""
    backend, other = opened(prefix=f"p-{kind}"), opened("other", prefix=f"p-{kind}")
    await backend.schedule([NewTask(kind=kind)])
    server.ask("ZADD", f"p-{kind}:kinds", round(1000 * (time.time() + 86400)), kind)
    await claim(other, kind)
    with anyio.fail_after(30):
        while await hours_until_due(server, kind) > 0:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("prefix", ["named:", "once:"])
@pytest.mark.parametrize("was_leased", ["leased", "never leased"])
async def test_a_name_that_was_free_for_long_is_forgotten_and_its_fences_are_not(
    server: Server, opened: Open, kind: str, prefix: str, was_leased: str
) -> None:
    backend, name = opened(retention=0.0, prefix=f"p-{kind}"), prefix + kind
    await backend.schedule([NewTask(kind=name, id=name)])
    fences = [0]
    if was_leased == "leased":
        for _ in range(3):
            (task,) = await claim(backend, name)
            fences.append(task.fence)
            await settle(backend, task, "release", progress=1)
        claimed = f"p-{kind}:{{{name}}}:claimed"
        for claim_name in server.ask("ZRANGE", claimed, 0, -1):
            server.ask("ZADD", claimed, 1, claim_name)
    await backend.maintain()
    assert server.ask("KEYS", f"p-{kind}:*") == [f"p-{kind}:clients".encode()]
    fences.append((await held(backend, name, id=name)).fence)
    assert fences == sorted(set(fences))


async def test_a_name_that_is_leased_or_was_asked_for_lately_is_kept(server: Server, opened: Open, kind: str) -> None:
    backend, name = opened(retention=60.0, prefix=f"p-{kind}"), f"named:{kind}"
    task = await held(backend, name, id=name)
    await backend.maintain()
    await settle(backend, task, "release")
    (waiting,) = server.ask("ZRANGE", f"p-{kind}:{{{name}}}:due:2", 0, 0)
    server.ask("ZADD", f"p-{kind}:{{{name}}}:due:2", 1, waiting)
    await backend.maintain()
    await backend._maintenance._drop_name(name, 60_000)  # by a client that has looked before the name was asked for
    info = await backend.get(name)
    assert info is not None
    assert info.status == "enqueued"
    server.ask("HSET", f"p-{kind}:{{{name}}}:meta", "asked", 1)
    await backend._register.note([name])
    await backend.maintain()
    assert await backend.get(name) is None


async def test_a_task_that_waits_is_kept_for_as_long_as_it_waits(opened: Open, kind: str) -> None:
    backend = opened(retention=0.0, prefix=f"p-{kind}")
    await backend.schedule([NewTask(kind=kind, id=kind)])
    await backend.maintain()
    assert len(await claim(backend, kind)) == 1


async def test_a_kind_that_is_noted_during_its_maintenance_is_not_forgotten(opened: Open, kind: str) -> None:
    register = opened(prefix=f"p-{kind}")._register
    await register.note([kind])
    due = await register.due_kinds(interval=60_000, limit=1000)
    assert kind in due.kinds
    assert (await register.due_kinds(interval=60_000, limit=1000)).kinds == []
    await register.note([kind])
    await register.reschedule_kind(kind, own_until=due.own_until, due_at=None)
    assert kind in (await register.due_kinds(interval=60_000, limit=1000)).kinds
    await register.reschedule_kind(kind, own_until=0, due_at=None)
    assert kind in await register.kinds()


async def test_history_is_kept_to_a_hundred_runs(server: Server, backend: RedisBackend, kind: str) -> None:
    await backend.schedule([NewTask(kind=kind, id=kind)])
    for _ in range(105):
        (task,) = await claim(backend, kind)
        await settle(backend, task, "release")
    info = await backend.get(kind)
    assert info is not None
    assert [run.fence for run in info.history] == list(range(6, 106))
    assert server.ask("HLEN", f"leasekit:{{{kind}}}:runs") == 100


async def test_workers_are_known_by_what_they_hold(backend: RedisBackend, opened: Open, kind: str) -> None:
    name = f"w-{kind}"
    busy = opened(name)
    tasks = [await held(busy, f"{kind}-{n}") for n in range(2)]
    assert [one.running for one in await backend.workers() if one.name == name] == [2]
    for task in tasks:
        await settle(busy, task)
    (worker,) = [one for one in await backend.workers() if one.name == name]
    assert worker.running == 0
    assert worker.last_seen is not None
    assert worker.kinds == [f"{kind}-0", f"{kind}-1"]


async def test_pages_over_all_kinds_are_in_the_order_in_which_tasks_came(opened: Open, kind: str) -> None:
    backend = opened(prefix=f"p-{kind}")
    ids = [f"{kind}-{n}" for n in range(7)]
    for n, task_id in enumerate(ids):
        await backend.schedule([NewTask(kind=f"{kind}-{n % 3}", id=task_id)])
    found, cursor = [], None
    for _ in range(4):
        page = await backend.list_tasks(cursor=cursor, limit=2)
        found += [info.id for info in page.tasks]
        cursor = page.cursor
    assert (found, cursor) == (ids, None)


async def test_a_page_finds_the_few_among_the_many(backend: RedisBackend, kind: str) -> None:
    for start in range(0, 1200, 600):
        await backend.schedule([NewTask(kind=kind, collection="many") for _ in range(600)])
        await backend.schedule([NewTask(kind=kind, id=f"{kind}-{start}", collection="few")])
    page = await backend.list_tasks(kind=kind, collection="few")
    assert [info.id for info in page.tasks] == [f"{kind}-0", f"{kind}-600"]
    assert page.cursor is None


@pytest.mark.parametrize("outcome", ["success", "retry"])
async def test_a_late_result_takes_back_that_its_holder_had_vanished(
    server: Server, backend: RedisBackend, kind: str, outcome: Outcome
) -> None:
    task = await held(backend, kind, id=kind, retry=FixedDelays(waits=[3600]))
    server.ask("ZADD", f"leasekit:{{{kind}}}:leases", 1, task.id)
    await backend.maintain()
    lapsed = await backend.get(kind)
    assert lapsed is not None
    assert (lapsed.status, lapsed.crashes) == ("enqueued", 1)
    assert await settle(backend, task, outcome, result="late") == "settled"
    info = await backend.get(kind)
    assert info is not None
    assert (info.crashes, info.result) == (0, "late")
    assert [(run.outcome, run.worker) for run in info.history] == [(outcome, "w")]
    assert await claim(backend, kind) == []
    assert await settle(backend, task, outcome, result="late") == "settled"


async def test_a_claim_takes_back_what_has_ended_before_it_looks(
    server: Server, backend: RedisBackend, kind: str
) -> None:
    task = await held(backend, kind)
    server.ask("ZADD", f"leasekit:{{{kind}}}:leases", 1, task.id)
    assert [again.id for again in await claim(backend, kind)] == [task.id]


def step(server: Server, backend: RedisBackend, task: Task) -> None:
    """As if the clock of Redis had gone ahead by an hour, over the end of this task's lease, unknown to the client."""
    backend._clocks.told(task.kind, round(1000 * (time.time() - 3600)), asked_at=time.monotonic() - 60)
    server.ask("ZADD", f"leasekit:{{{task.kind}}}:leases", round(1000 * (time.time() - 1800)), task.id)


async def test_a_clock_that_jumps_ends_no_lease(server: Server, backend: RedisBackend, kind: str) -> None:
    task = await held(backend, kind, claim_timeout=2, heartbeat_timeout=2)
    assert await claim(backend, kind) == []
    step(server, backend, task)
    assert await claim(backend, kind) == []
    (verdict,) = await backend.beat([Beat(id=task.id, token=task.token)])
    assert verdict.verdict == "renewed"
    # It has its ttl, not more.
    (again,) = await claim(backend, kind, wait=20)
    assert again.fence == 2


async def test_after_a_jump_a_lease_has_as_long_as_its_holder_may_go_by(
    server: Server, backend: RedisBackend, kind: str
) -> None:
    task = await held(backend, kind, claim_timeout=300, heartbeat_timeout=2)
    step(server, backend, task)
    assert await claim(backend, kind) == []  # by which it notices the step
    assert await claim(backend, kind) == []
    assert float(server.ask("ZSCORE", f"leasekit:{{{kind}}}:leases", task.id)) / 1000 - time.time() > 200


async def test_small_steps_of_the_clock_add_up_until_they_are_a_jump(
    server: Server, backend: RedisBackend, kind: str
) -> None:
    """As a daemon makes them that corrects the clock of Redis, each too small to be noticed."""
    task = await held(backend, kind, claim_timeout=300, heartbeat_timeout=300)
    leases = f"leasekit:{{{kind}}}:leases"
    for steps in range(1, 4):
        # As if, but for the last answers, Redis had always told a time that is behind by some more of these steps.
        ((clock, told),) = backend._clocks._told.items()
        backend._clocks._told[clock] = told._replace(now=told.now - 900)
        server.ask("ZADD", leases, "XX", round(1000 * (time.time() + 300 - 0.9 * steps)), task.id)
        assert await claim(backend, kind) == []
    server.ask("ZADD", leases, "XX", 1, task.id)
    assert await claim(backend, kind) == []
    assert (await beat(backend, task)).verdict == "renewed"


async def test_a_clock_that_goes_as_it_should_is_never_said_to_jump(
    server: Server, backend: RedisBackend, kind: str
) -> None:
    task = await held(backend, kind)
    for _ in range(20):
        ((clock, told),) = backend._clocks._told.items()
        # As if half a second had passed, by a clock that is a little slow.
        earlier = Told(told.now - 500, told.asked_at - 0.4999, told.answered_at - 0.4999)
        backend._clocks._told[clock] = earlier
        await beat(backend, task)
    assert server.ask("HGET", f"leasekit:{{{kind}}}:meta", "restarted_at") in (None, b"0")


@pytest.mark.parametrize("call", ["beat", "cancel"])
async def test_a_jump_is_noticed_before_a_lease_is_said_to_have_ended(
    server: Server, backend: RedisBackend, kind: str, call: str
) -> None:
    task = await held(backend, kind, id=kind)
    step(server, backend, task)
    if call == "cancel":
        assert [verdict.verdict for verdict in await backend.cancel([kind])] == ["cancel_requested"]
    assert (await beat(backend, task)).verdict == "renewed"


async def test_a_jump_that_a_result_noticed_gives_the_other_leases_their_time(
    server: Server, backend: RedisBackend, kind: str
) -> None:
    first, second = await held(backend, kind), await held(backend, kind)
    step(server, backend, first)
    assert await settle(backend, first) == "settled"
    server.ask("ZADD", f"leasekit:{{{kind}}}:leases", 1, second.id)
    assert await claim(backend, kind) == []


async def test_a_step_is_told_to_a_kind_by_the_first_client_that_notices_it(
    server: Server, backend: RedisBackend, kind: str
) -> None:
    """At once, though it asks nothing more: a client that has just started cannot know, and would take leases back."""
    task = await held(backend, kind)
    step(server, backend, task)
    before = server.ask("TIME")[0]
    assert (await beat(backend, task)).verdict == "renewed"
    with anyio.fail_after(30):
        while int(server.ask("HGET", f"leasekit:{{{kind}}}:meta", "restarted_at")) < 1000 * int(before):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


# Requests that are late ---------------------------------------------------------------------------------------


def late(backend: RedisBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on each request of this client is under way for five seconds."""
    known = backend._clocks.known

    def known_when_it_left(kind: str) -> dict[str, int | None]:
        return {name: value and value - 5000 for name, value in known(kind).items()}

    monkeypatch.setattr(backend._clocks, "known", known_when_it_left)


CALLS: dict[str, Callable[[RedisBackend, Task], Awaitable[Any]]] = {
    "claim": lambda backend, task: claim(backend, task.kind),
    "beat": beat,
    "settle": settle,
    "cancel": lambda backend, task: backend.cancel([task.id]),
    "maintain": lambda backend, task: backend._maintenance.maintain(task.kind),
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_request_that_is_late_prolongs_no_lease_of_others(
    server: Server, opened: Open, kind: str, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Or one client with slow requests would keep what the dead have left for ever."""
    backend, slow = opened(), opened("slow")
    task = await held(backend, kind, id=kind)
    other = await held(slow, kind)
    late(slow, monkeypatch)
    leases = f"leasekit:{{{kind}}}:leases"
    ended_at = round(1000 * (time.time() - 1))
    server.ask("ZADD", leases, ended_at, task.id)
    await CALLS[call](slow, other)
    assert float(server.ask("ZSCORE", leases, task.id)) == ended_at
    assert [again.id for again in await claim(backend, kind)] == [task.id]


async def test_a_request_that_is_late_takes_back_what_had_ended_when_it_left(
    server: Server, opened: Open, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all requests are slow, what the dead have left is taken back all the same."""
    backend, slow = opened(), opened("slow")
    task = await held(backend, kind)
    assert await claim(slow, kind) == []
    late(slow, monkeypatch)
    server.ask("ZADD", f"leasekit:{{{kind}}}:leases", round(1000 * (time.time() - 8)), task.id)
    assert [again.id for again in await claim(slow, kind)] == [task.id]


@pytest.fixture
def shift(server: Server) -> Iterator[Callable[[float], None]]:
    """`shift(seconds)`: the clock that the scripts see is off by so much."""
    kept = [(one, one.text, one.sha) for one in vars(scripts).values() if isinstance(one, scripts.Script)]
    redis_clock.install()
    yield lambda seconds: server.ask("SET", redis_clock.KEY, round(1e6 * seconds))
    server.ask("DEL", redis_clock.KEY)
    for script, text, sha in kept:
        object.__setattr__(script, "text", text)
        object.__setattr__(script, "sha", sha)


WorkerRun = Callable[[float], None]


@pytest.mark.parametrize("noticed_by", ["the claim", "another kind's claim", "another kind's beat", "maintenance"])
async def test_a_step_of_the_clock_ends_no_lease_of_a_kind_that_a_client_asks_about_for_the_first_time(
    opened: Open, kind: str, shift: WorkerRun, noticed_by: str
) -> None:
    backend, other = opened(prefix=f"p-{kind}"), opened("other", prefix=f"p-{kind}")
    task = await held(backend, kind, claim_timeout=60, heartbeat_timeout=60)
    own = await held(other, f"{kind}-b")
    shift(120)
    if noticed_by == "another kind's claim":
        assert await claim(other, f"{kind}-b") == []
    elif noticed_by == "another kind's beat":
        assert (await beat(other, own)).verdict == "renewed"
    elif noticed_by == "maintenance":
        await other.maintain()
    assert await claim(other, kind) == []
    assert (await beat(backend, task)).verdict == "renewed"


async def test_a_step_that_one_client_tells_of_is_known_to_a_client_that_has_just_started(
    opened: Open, kind: str, shift: WorkerRun
) -> None:
    backend, other = opened(), opened("other")
    task = await held(backend, kind, claim_timeout=60, heartbeat_timeout=60)
    assert await claim(other, f"{kind}-b") == []
    shift(50)  # and the lease has not ended yet
    assert await claim(other, f"{kind}-b") == []
    assert await claim(other, kind) == []
    shift(90)
    assert await claim(opened("new"), kind) == []
    assert (await beat(backend, task)).verdict == "renewed"


async def test_after_a_step_the_lease_of_a_dead_worker_ends_once_its_ttl_is_over(
    opened: Open, kind: str, shift: WorkerRun
) -> None:
    backend, other = opened(), opened("other")
    await held(backend, kind, claim_timeout=2, heartbeat_timeout=2)
    assert await claim(other, f"{kind}-b") == []
    shift(120)
    assert await claim(other, f"{kind}-b") == []
    assert await claim(other, kind) == []
    (again,) = await claim(other, kind, wait=20)
    assert again.fence == 2


async def test_a_failover_to_a_clock_that_is_ahead_prolongs_a_lease_once(
    opened: Open, server: Server, kind: str, shift: WorkerRun
) -> None:
    backend = opened()
    await held(backend, kind, claim_timeout=60, heartbeat_timeout=60)
    meta = f"leasekit:{{{kind}}}:meta"
    server.ask("HSET", meta, "run", "of another process")
    shift(120)
    assert await claim(backend, kind) == []
    await until(lambda: server.ask("HGET", meta, "run") != b"of another process")  # the client has told the kind
    await backend.aclose()  # to it the next shift is another step
    shift(181)
    (again,) = await claim(opened("new"), kind)  # to which nothing has jumped
    assert again.fence == 2


async def test_a_clock_that_is_set_back_after_a_step_keeps_no_lease_for_ever(
    opened: Open, kind: str, shift: WorkerRun
) -> None:
    backend, other = opened(), opened("other")
    await held(backend, kind, claim_timeout=2, heartbeat_timeout=2)
    assert await claim(other, f"{kind}-b") == []
    shift(120)
    assert await claim(other, f"{kind}-b") == []
    shift(60)
    assert await claim(other, kind) == []
    (again,) = await claim(other, kind, wait=20)
    assert again.fence == 2


@pytest.mark.parametrize("after", [0, -150, 600])
@pytest.mark.parametrize("by", ["a client that knows the kind", "a client that knows another kind", "a new client"])
@pytest.mark.parametrize("asked", ["the kind", "another kind first"])
async def test_a_lease_that_was_granted_between_a_step_back_and_a_step_ahead_ends_no_earlier(
    opened: Open, kind: str, shift: WorkerRun, after: float, by: str, asked: str
) -> None:
    """The client that was silent in between can notice neither step."""
    holder, other = opened("holder"), opened("other")
    await other.schedule([NewTask(kind=kind, at=datetime.now(UTC) + timedelta(hours=9))])
    assert await claim(other, kind, f"{kind}-b") == []
    if by != "a new client":
        assert await claim(holder, kind if by == "a client that knows the kind" else f"{kind}-c") == []
    shift(-300)
    task = await held(holder, kind, claim_timeout=60, heartbeat_timeout=60)
    shift(after)
    if asked == "another kind first":
        assert await claim(other, f"{kind}-b") == []
    assert await claim(other, kind) == []
    assert (await beat(holder, task)).verdict == "renewed"


async def test_a_request_that_is_late_is_no_step_for_other_kinds(kind: str) -> None:
    clocks = Clocks(is_one=True)
    at = time.monotonic()
    clocks.told(kind, 1_000_000, asked_at=at - 20)
    clocks.told(kind, 1_020_000, asked_at=at - 10)  # ten seconds on its way
    known = clocks.known(f"{kind}-b")
    assert known["jumped"] is None
    assert known["latest"] is not None
    assert known["latest"] < 1_030_000


async def test_in_a_cluster_a_kind_has_a_clock_of_its_own_and_a_step_of_any_is_told_to_all(kind: str) -> None:
    clocks = Clocks(is_one=False)
    at = time.monotonic()
    clocks.told(kind, 1_000_000, asked_at=at)
    clocks.told(f"{kind}-b", 9_000_000, asked_at=at)
    assert set(clocks.known(f"{kind}-c").values()) == {None}
    clocks.told(kind, 1_060_000, asked_at=at)
    jumped = clocks.known(f"{kind}-c")["jumped"]
    assert jumped is not None
    assert 0 <= jumped < 60_000


async def test_a_run_that_lasted_too_long_stays_gone_though_the_clock_of_redis_is_set_back(
    server: Server, backend: RedisBackend, kind: str
) -> None:
    task = await held(backend, kind, max_runtime=60)
    assert (await beat(backend, task)).verdict == "renewed"
    working = f"leasekit:{{{kind}}}:working"
    lease = msgspec.msgpack.decode(server.ask("HGET", working, task.id))
    server.ask("HSET", working, task.id, msgspec.msgpack.encode({**lease, "ends": lease["ends"] - 60_000}))
    assert (await beat(backend, task)).verdict == "gone"
    assert msgspec.msgpack.decode(server.ask("HGET", working, task.id))["ends"] == 0


async def test_claims_are_not_remembered_for_good(server: Server, backend: RedisBackend, kind: str) -> None:
    await backend.schedule([NewTask(kind=kind) for _ in range(20)])
    for _ in range(19):
        await claim(backend, kind)
    claimed = f"leasekit:{{{kind}}}:claimed"
    for name in server.ask("ZRANGE", claimed, 0, -1):
        server.ask("ZADD", claimed, 1, name)
    await claim(backend, kind)
    assert server.ask("ZCARD", claimed) == server.ask("HLEN", f"leasekit:{{{kind}}}:claims") == 10
    await backend.maintain()
    assert server.ask("ZCARD", claimed) == server.ask("HLEN", f"leasekit:{{{kind}}}:claims") == 1


# Successors ---------------------------------------------------------------------------------------------------


async def test_successors_of_a_client_that_died_are_brought_by_another(
    opened: Open, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, other = opened(prefix=f"p-{kind}"), opened("other", prefix=f"p-{kind}")

    async def die(*_: object) -> None:
        raise Unavailable("died")

    monkeypatch.setattr(backend._renewing, "_deliver", die)
    task = await held(backend, kind)
    assert await settle(backend, task, then=[NewTask(kind=f"{kind}-b", payload=n) for n in range(15)]) == "settled"
    assert await claim(other, f"{kind}-b") == []
    await asyncio.gather(other.maintain(), opened("third", prefix=f"p-{kind}").maintain())
    assert [task.payload for task in await claim(other, f"{kind}-b", limit=20)] == list(range(15))


@pytest.fixture
async def bringer(server: Server, opened: Open, kind: str) -> RedisBackend:
    """A client whose tasks of this kind may have successors; none can be brought to the kind that ends in `-bad`."""
    server.ask("SET", f"p-{kind}:{{{kind}-bad}}:state", "a foreign key")
    backend = opened(prefix=f"p-{kind}")
    await backend.schedule([NewTask(kind=kind, id=kind)])
    return backend


def leave(server: Server, kind: str, successors: dict[str, str]) -> str:
    """Successors (id → kind) of a client that died before it brought them; gives the key where they are."""
    outbox = f"p-{kind}:{{{kind}}}:outbox"
    for task_id, of in successors.items():
        server.ask("RPUSH", outbox, msgspec.json.encode({"kind": of, "id": task_id, "payload": {}}))
    return outbox


@pytest.mark.parametrize("count", [1, 12, 25])
async def test_a_successor_that_cannot_be_brought_holds_up_no_other(
    server: Server, bringer: RedisBackend, kind: str, count: int
) -> None:
    bad = {f"bad-{n}": f"{kind}-bad" for n in range(count)}
    outbox = leave(server, kind, {**bad, "good": f"{kind}-good"})
    with pytest.raises(ProtocolError):
        await bringer.maintain()
    assert [task.id for task in await claim(bringer, f"{kind}-good")] == ["good"]
    assert server.ask("LLEN", outbox) == count
    server.ask("DEL", f"p-{kind}:{{{kind}-bad}}:state")
    await bringer._maintenance.maintain(kind)
    assert {task.id for task in await claim(bringer, f"{kind}-bad", limit=100)} == set(bad)
    assert server.ask("LLEN", outbox) == 0


async def test_successors_that_take_their_time_to_fail_are_left_to_the_next_maintenance(
    server: Server, bringer: RedisBackend, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other kinds wait meanwhile. They are the last then, so that the next maintenance gets on."""
    monkeypatch.setattr(maintenance, "INTERVAL", 0.0)
    leave(server, kind, {**{f"bad-{n}": f"{kind}-bad" for n in range(10)}, "good": f"{kind}-good"})
    for _ in range(2):
        assert await claim(bringer, f"{kind}-good") == []
        with pytest.raises(ProtocolError):
            await bringer._maintenance.maintain(kind)
    assert [task.id for task in await claim(bringer, f"{kind}-good")] == ["good"]


async def test_ends_that_cannot_be_told_hold_up_neither_other_ends_nor_successors(
    server: Server, bringer: RedisBackend, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [f"{kind}-{n:03}" for n in range(102)]
    for first in range(0, 102, 51):
        await bringer.schedule([NewTask(kind=kind, id=one) for one in ids[first : first + 51]])
    await bringer.schedule([NewTask(kind=f"{kind}-after", id="after", after=[ids[-1]])])
    after = f"p-{kind}:{{{kind}}}:awaited"
    for one in ids[:-1]:  # by tasks of a kind that can be told nothing
        server.ask("ZADD", after, 0, f"{one}/who/{kind}-bad")
    leave(server, kind, {"good": f"{kind}-good"})

    async def die(*_: object) -> None:
        raise Unavailable("died")

    with monkeypatch.context() as patch:
        patch.setattr(bringer._dependencies, "release", die)
        with anyio.fail_after(30):
            while tasks := await claim(bringer, kind, limit=200):
                for task in tasks:
                    with contextlib.suppress(Unavailable):
                        await settle(bringer, task)
    ending = f"p-{kind}:{{{kind}}}:ending"
    for place, one in enumerate(ids):
        server.ask("ZADD", ending, place + 1, one)
    with pytest.raises(ProtocolError):
        await bringer.maintain()
    assert [task.id for task in await claim(bringer, f"{kind}-good")] == ["good"]
    assert [task.id for task in await claim(bringer, f"{kind}-after")] == ["after"]


async def test_a_result_that_is_refused_has_no_successors(backend: RedisBackend, kind: str) -> None:
    task = await held(backend, kind)
    await settle(backend, task)
    assert await settle(backend, task, "fatal", then=[NewTask(kind=f"{kind}-b")]) == "gone"
    await backend.maintain()
    assert await claim(backend, f"{kind}-b") == []


# Those who wait -----------------------------------------------------------------------------------------------


@pytest.fixture
def only_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims that wait look again when they are told, and not otherwise; no maintenance tells them."""
    monkeypatch.setattr(claiming, "_LOOK", 1000.0)
    monkeypatch.setattr(maintenance, "INTERVAL", 1000.0)


async def waiting(backend: RedisBackend, kind: str, count: int = 1) -> "asyncio.Task[Claimed]":
    """A claim that waits, as Redis knows: so many are there with it."""
    task = asyncio.create_task(backend.claim([kind], limit=1, wait=30, claim_id=uuid.uuid4().hex))
    with anyio.fail_after(30):
        while await backend._link.command("ZCARD", f"leasekit:{{{kind}}}:waiting") < count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return task


@pytest.mark.usefixtures("only_told")
async def test_a_wake_is_passed_on_by_a_claim_that_was_given_up(opened: Open, kind: str) -> None:
    first, second = opened("first"), opened("second")
    given_up = await waiting(first, kind)
    given_up.cancel()
    await asyncio.wait([given_up])
    patient = await waiting(second, kind, 2)
    await first.schedule([NewTask(kind=kind)])
    with anyio.fail_after(25):
        assert len((await patient).tasks) == 1


@pytest.mark.usefixtures("only_told")
async def test_a_client_that_is_away_is_passed_over(opened: Open, kind: str) -> None:
    first, second = opened("first"), opened("second")
    abandoned = await waiting(first, kind)
    abandoned.cancel()
    await asyncio.wait([abandoned])
    await first.aclose()
    patient = await waiting(second, kind, 2)
    await second.schedule([NewTask(kind=kind)])
    with anyio.fail_after(25):
        assert len((await patient).tasks) == 1


@pytest.mark.usefixtures("only_told")
async def test_as_many_are_woken_as_there_are_tasks(opened: Open, kind: str) -> None:
    backends = [opened(f"w{n}") for n in range(3)]
    claims = [await waiting(one, kind, n + 1) for n, one in enumerate(backends)]
    await backends[0].schedule([NewTask(kind=kind) for _ in range(2)])
    with anyio.fail_after(25):
        while sum(claim.done() for claim in claims) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await backends[0].schedule([NewTask(kind=kind)])
        assert [len((await claim).tasks) for claim in claims] == [1, 1, 1]


@pytest.mark.usefixtures("only_told")
@pytest.mark.parametrize("outcome", ["release", "crash"])
async def test_a_task_that_is_given_back_wakes_who_waits(opened: Open, kind: str, outcome: Outcome) -> None:
    backend, other = opened("one"), opened("other")
    task = await held(backend, kind)
    patient = await waiting(other, kind)
    await settle(backend, task, outcome)
    with anyio.fail_after(25):
        assert [one.id for one in (await patient).tasks] == [task.id]


@pytest.mark.usefixtures("only_told")
async def test_what_is_left_by_a_claim_goes_to_the_next(opened: Open, kind: str) -> None:
    backend, other = opened("one"), opened("other")
    patient = await waiting(other, kind)
    # Two tasks, and one told: it is the first claim that tells the other.
    await backend.schedule([NewTask(kind=kind, at=datetime.now(UTC) + timedelta(seconds=0.3)) for _ in range(2)])
    with anyio.fail_after(25):
        mine = await claim(backend, kind, wait=20)
        assert len(mine) + len((await patient).tasks) == 2


async def test_waited_counts_up_to_when_the_request_that_was_granted_left(
    backend: RedisBackend, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.schedule([NewTask(kind=kind)])
    run, left_at = backend._link.run, []

    async def slowly(*args: Any) -> Any:
        left_at.append(time.monotonic())
        await asyncio.sleep(0.2)
        return await run(*args)

    monkeypatch.setattr(backend._link, "run", slowly)
    began_at = time.monotonic()
    claimed = await backend.claim([kind], limit=1, wait=0, claim_id=kind)
    assert claimed.waited is not None
    assert len(claimed.tasks) == 1
    assert 0 <= claimed.waited <= left_at[-1] - began_at


async def test_a_repeated_claim_of_several_kinds_gets_the_same(backend: RedisBackend, kind: str) -> None:
    kinds = [f"{kind}-{n}" for n in range(3)]
    await backend.schedule([NewTask(kind=one) for one in kinds[:2]])
    first = await claim(backend, *kinds, limit=5, claim_id=kind)
    await backend.schedule([NewTask(kind=one) for one in kinds])
    for _ in range(3):
        again = await claim(backend, *kinds, limit=5, claim_id=kind)
        assert sorted(task.token for task in again) == sorted(task.token for task in first)


@pytest.mark.usefixtures("only_told")
@pytest.mark.parametrize("count", [1, 2])
async def test_a_repeated_claim_of_which_nothing_is_live_does_not_wait(
    backend: RedisBackend, kind: str, count: int
) -> None:
    kinds = [f"{kind}-{n}" for n in range(count)]
    await backend.schedule([NewTask(kind=kinds[0])])
    (task,) = await claim(backend, *kinds, claim_id=kind)
    await settle(backend, task)
    with anyio.fail_after(25):
        assert await claim(backend, *kinds, claim_id=kind, wait=60) == []


async def test_of_kinds_without_end_a_client_remembers_the_latest(
    backend: RedisBackend, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is leased once by its name is a kind of its own."""
    monkeypatch.setattr("leasekit_redis.lru.MOST", 3)
    for n in range(9):
        await claim(backend, f"{kind}-{n}")
    clocks = Clocks(is_one=False)  # as in a cluster
    for n in range(9):
        clocks.told(f"{kind}-{n}", 1, asked_at=0)
    kept = (backend._link.keys._known, clocks._told, backend._claims._told_as)
    assert [len(one) for one in kept] == [3, 3, 3]


async def test_no_kind_is_passed_over_for_good(backend: RedisBackend, kind: str) -> None:
    kinds = [f"{kind}-{n}" for n in range(3)]
    await backend.schedule([NewTask(kind=one) for one in kinds for _ in range(5)])
    got = {(await claim(backend, *kinds))[0].kind for _ in range(3)}
    assert got == set(kinds)


def test_both_doors_make_the_same_backend() -> None:
    assert type(connect("redis://localhost", worker="w")) is RedisBackend
