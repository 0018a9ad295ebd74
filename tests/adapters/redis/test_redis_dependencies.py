"""Tasks that run after others: whoever dies between two steps, nobody waits for ever."""

import asyncio
import contextlib
import random
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from leasekit.errors import Refused, Unavailable
from leasekit.task import NewTask, Outcome, Settlement, Status, Task, TaskInfo
from leasekit_redis import RedisBackend, dependencies
from leasekit_redis.address import parse
from leasekit_redis.dependencies import Dependencies
from tests.adapters.redis.conftest import Cluster
from tests.redis_server import Server

pytestmark = pytest.mark.anyio

Open = Callable[..., RedisBackend]


@pytest.fixture(params=["server", "cluster"])
def where(request: pytest.FixtureRequest) -> Server | Cluster:
    where: Server | Cluster = request.getfixturevalue(request.param)
    return where


@pytest.fixture
async def opened(where: Server | Cluster, kind: str) -> AsyncIterator[Open]:
    """`opened(worker)`: a connection that is closed in the end, to a service of this test's own."""
    backends: list[RedisBackend] = []

    def open_(worker: str = "w", **changes: Any) -> RedisBackend:
        backends.append(RedisBackend(replace(parse(where.url), prefix=f"p-{kind}", **changes), worker=worker))
        return backends[-1]

    yield open_
    for backend in backends:
        await backend.aclose()


@pytest.fixture
def backend(opened: Open) -> RedisBackend:
    return opened()


async def claim(backend: RedisBackend, *kinds: str, limit: int = 1) -> list[Task]:
    return (await backend.claim(kinds, limit=limit, wait=0, claim_id=uuid.uuid4().hex)).tasks


async def run(backend: RedisBackend, kind: str, outcome: Outcome = "success", **options: Any) -> str:
    """Claim the one task of a kind that is ready, and end it so: its id."""
    (task,) = await claim(backend, kind)
    (verdict,) = await backend.settle([Settlement(id=task.id, token=task.token, outcome=outcome, **options)])
    assert verdict.verdict == "settled"
    return task.id


async def info(backend: RedisBackend, task_id: str) -> TaskInfo:
    found = await backend.get(task_id)
    assert found is not None
    return found


async def maintained(backend: RedisBackend) -> None:
    """Run the maintenance, at a time when it asks again for every task that waits."""
    for kind in await backend._register.kinds():
        gated = backend._link.keys.one(kind, "gated")
        for task_id in await backend._link.command("ZRANGE", gated, 0, -1):
            await backend._link.command("ZADD", gated, "XX", 1, task_id)
        await backend._register.note([kind])
    await backend.maintain()


def dies_before(monkeypatch: pytest.MonkeyPatch, backend: RedisBackend, step: str) -> None:
    """This client gets as far as that, and no further."""

    async def die(*_: object, **__: object) -> None:
        raise Unavailable("died")

    monkeypatch.setattr(backend._dependencies, step, die)


FIRST, SECOND = NewTask(kind="a", id="a-1"), NewTask(kind="b", id="b-1", after=["a-1"])


# Crash points -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("comes", ["before", "after", "ended"])
async def test_one_whose_submitter_died_before_it_asked_is_asked_for_by_a_maintenance(
    opened: Open, monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    dying, other = opened("dying"), opened("other")
    dies_before(monkeypatch, dying, "ask")
    if comes != "after":
        await other.schedule([FIRST])
    if comes == "ended":
        await run(other, "a")
    await dying.schedule([SECOND])
    assert await claim(other, "b") == []
    await maintained(other)
    if comes == "after":
        await other.schedule([FIRST])
    if comes != "ended":
        assert await claim(other, "b") == []
        await run(other, "a")
    assert await run(other, "b") == "b-1"


async def test_a_schedule_that_is_repeated_asks_again(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    dying, other = opened("dying"), opened("other")
    dies_before(monkeypatch, dying, "ask")
    await dying.schedule([SECOND])
    await other.schedule([FIRST, SECOND])
    await run(other, "a")
    assert await run(other, "b") == "b-1"


async def test_one_that_comes_while_the_other_is_registered_and_not_made_yet_is_told(backend: RedisBackend) -> None:
    await backend._register.reserve([("a-1", "a")])
    await backend.schedule([SECOND])
    await backend.schedule([FIRST])
    await run(backend, "a")
    assert await run(backend, "b") == "b-1"


@pytest.mark.parametrize("kind_of_first", ["a", "c"])
async def test_one_whose_other_was_registered_by_a_submitter_that_died_is_found_by_a_maintenance(
    backend: RedisBackend, kind_of_first: str
) -> None:
    await backend.schedule([SECOND])
    await backend._register.reserve([("a-1", "a")])  # was told that somebody waits, and died
    await backend.schedule([NewTask(kind=kind_of_first, id="a-1")])
    await run(backend, kind_of_first)
    await maintained(backend)
    assert await run(backend, "b") == "b-1"


async def test_names_that_were_not_carried_are_made_up_for_by_a_maintenance(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying, other = opened("dying"), opened("other")
    dies_before(monkeypatch, dying, "adopt")
    await other.schedule([SECOND])
    await dying.schedule([FIRST])
    await maintained(other)
    await run(other, "a")
    assert await run(other, "b") == "b-1"
    wanted = other._link.keys.wanted[other._link.keys.part("a-1")]
    assert await other._link.command("ZCARD", wanted) == 0


@pytest.mark.parametrize("outcome", ["success", "fatal"])
async def test_an_end_that_was_not_told_is_told_by_a_maintenance(
    opened: Open, monkeypatch: pytest.MonkeyPatch, outcome: Outcome
) -> None:
    dying, other = opened("dying"), opened("other")
    dies_before(monkeypatch, dying, "release")
    await dying.schedule([FIRST, SECOND])
    await run(dying, "a", outcome)
    assert (await info(other, "b-1")).status is Status.NEW
    await asyncio.gather(other.maintain(), opened("third").maintain())
    if outcome == "success":
        assert await run(other, "b") == "b-1"
    else:
        assert (await info(other, "b-1")).reason == '"a-1", which it was to run after, ended as fatal_failure'


async def test_an_end_is_not_forgotten_before_it_was_told(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    dying, other = opened("dying"), opened("other", retention=-1.0)
    dies_before(monkeypatch, dying, "release")
    count = 120  # more than maintenance tells in one go
    await dying.schedule([NewTask(kind="a", id=f"a-{n}") for n in range(count)])
    await dying.schedule([NewTask(kind="b", id=f"b-{n}", after=[f"a-{n}"]) for n in range(count)])
    tasks = [*await claim(dying, "a", limit=count), *await claim(dying, "a", limit=count)]
    await dying.settle([Settlement(id=task.id, token=task.token, outcome="success") for task in tasks])
    await other.maintain()
    assert await other.get("a-119") is None
    ready = [*await claim(other, "b", limit=count), *await claim(other, "b", limit=count)]
    assert len(ready) == count


async def test_what_should_not_be_among_those_that_wait_stops_no_maintenance(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying, other = opened("dying"), opened("other")
    dies_before(monkeypatch, dying, "ask")
    await dying.schedule([SECOND, NewTask(kind="b", id="b-2")])
    for stranger in ("nobody", "b-2"):
        await other._link.command("ZADD", other._link.keys.one("b", "gated"), 1, stranger)
    await maintained(other)
    await other.schedule([FIRST])
    await run(other, "a")
    assert {task.id for task in await claim(other, "b", limit=5)} == {"b-1", "b-2"}
    assert await other._link.command("EXISTS", other._link.keys.one("b", "gated")) == 0


async def test_to_be_told_again_has_no_effect(backend: RedisBackend) -> None:
    await backend.schedule([FIRST, SECOND])
    await run(backend, "a")
    for status in (Status.NEW, Status.CLAIMED, Status.SUCCESS):
        key = backend._link.keys.one("a", "awaited")
        await backend._link.command("ZADD", key, 0, "a-1/b-1/b")
        await backend._link.command("ZADD", backend._link.keys.one("a", "ending"), 1, "a-1")
        await maintained(backend)
        assert await backend._link.command("EXISTS", key) == 0
        assert (await info(backend, "b-1")).status is status
        if status is Status.NEW:
            (task,) = await claim(backend, "b")
        elif status is Status.CLAIMED:
            await backend.settle([Settlement(id=task.id, token=task.token, outcome="success")])
    assert await claim(backend, "b") == []


async def test_the_death_of_a_task_whose_holders_vanished_is_told(backend: RedisBackend) -> None:
    await backend.schedule([NewTask(kind="a", id="a-1", max_crashes=0), SECOND])
    (task,) = await claim(backend, "a")
    await backend._link.command("ZADD", backend._link.keys.one("a", "leases"), 1, task.id)
    await backend.maintain()
    dropped = await info(backend, "b-1")
    assert (dropped.status, dropped.reason) == (Status.DROPPED, '"a-1", which it was to run after, ended as dead')


@pytest.mark.parametrize("seed", range(3))
async def test_whoever_dies_when_every_task_runs_once_after_all_that_it_waits_for(
    opened: Open, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = random.Random(seed)
    clients = [opened(f"w{n}") for n in range(3)]
    names = [f"t-{n}" for n in range(30)]
    tasks = [
        NewTask(kind=f"k-{n % 5}", id=name, after=chance.sample(names[:n], k=min(n, chance.randrange(4))))
        for n, name in enumerate(names)
    ]
    with monkeypatch.context() as faults:
        for name in ("ask", "adopt", "release"):
            faults.setattr(Dependencies, name, unreliable(getattr(Dependencies, name), chance))
        ran = await lived(clients, chance, tasks, until=20)
    # Once faults stop all comes to its end.
    ran += await lived(clients, chance, [], until=len(tasks) - len(ran))
    assert sorted(ran) == sorted(names)
    assert all(ran.index(other) < ran.index(task.id) for task in tasks for other in task.after if task.id)


async def lived(clients: list[RedisBackend], chance: random.Random, tasks: list[NewTask], *, until: int) -> list[str]:
    """All of these scheduled, in no order, and so many run, while maintenance runs: what ran, in this order."""
    ran: list[str] = []
    coming = chance.sample(tasks, k=len(tasks))
    for _ in range(60):
        if not coming and len(ran) >= until:
            break
        batch, coming = coming[:5], coming[5:]
        claimed = await claim(chance.choice(clients), *(f"k-{n}" for n in range(5)), limit=5)
        ends = [Settlement(id=task.id, token=task.token, outcome="success") for task in claimed]
        one, other, third = chance.choices(clients, k=3)
        await asyncio.gather(one.schedule(batch), other.settle(ends), maintained_if_it_answers(third))
        ran += [end.id for end in ends]
    return ran


def unreliable(step: Any, chance: random.Random) -> Any:
    async def maybe(*args: Any, **options: Any) -> Any:
        if chance.random() < 0.3:
            raise Unavailable("died before")
        found = await step(*args, **options)
        if chance.random() < 0.1:
            raise Unavailable("died after")
        return found

    return maybe


async def maintained_if_it_answers(backend: RedisBackend) -> None:
    with contextlib.suppress(Unavailable):  # the next maintenance goes on
        await maintained(backend)


async def test_an_end_in_the_moment_of_a_schedule_is_not_missed(opened: Open) -> None:
    one, other = opened("one"), opened("other")
    for n in range(20):
        first, second = NewTask(kind="a", id=f"a-{n}"), NewTask(kind="b", id=f"b-{n}", after=[f"a-{n}"])
        await one.schedule([first])
        await asyncio.gather(run(one, "a"), other.schedule([second]))
        assert await run(other, "b") == f"b-{n}"
        first, second = replace_ids(first), replace_ids(second)
        await asyncio.gather(one.schedule([first]), other.schedule([second]))
        assert await run(one, "a") == first.id
        assert await run(other, "b") == second.id


def replace_ids(task: NewTask) -> NewTask:
    return NewTask(kind=task.kind, id=f"{task.id}-x", after=[f"{one}-x" for one in task.after])


# What is kept, and for how long -------------------------------------------------------------------------------


async def test_one_that_waits_too_long_for_what_nobody_knows_is_dropped_and_says_why(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(retention=-1.0)  # what has ended is forgotten at once
    await backend.schedule([FIRST])
    await run(backend, "a")
    await maintained(backend)
    assert await backend.get("a-1") is None
    await backend.schedule([SECOND])
    await maintained(backend)
    assert (await info(backend, "b-1")).status is Status.NEW
    monkeypatch.setattr(dependencies, "_PATIENCE", -1.0)
    await maintained(backend)
    dropped = await info(backend, "b-1")
    assert dropped.status is Status.DROPPED
    assert '"a-1"' in (dropped.reason or "")
    assert "forgotten" in (dropped.reason or "")


@pytest.mark.parametrize("first", ["known", "unknown"])
async def test_of_one_that_waits_no_more_nothing_is_kept_for_good(opened: Open, first: str) -> None:
    backend = opened(retention=0.0)
    if first == "known":
        await backend.schedule([FIRST])
    await backend.schedule([SECOND])
    await backend.cancel(["b-1"])
    await maintained(backend)
    assert await backend.get("b-1") is None
    for key in await keys(backend):
        dump = await backend._link.command("DUMP", key)
        assert dump is None or b"b-1" not in dump, key
    assert await backend._register.find(["a-1"]) == ["a" if first == "known" else None]
    part = backend._link.keys.register[backend._link.keys.part("a-1")]
    assert await backend._link.command("HEXISTS", part, "a-1") == (first == "known")


async def keys(backend: RedisBackend) -> list[bytes]:
    kinds = [*backend._link.keys.of_kind("a"), *backend._link.keys.of_kind("b")]
    return [*kinds, *backend._link.keys.register, *backend._link.keys.wanted]


@pytest.mark.parametrize("comes", ["before", "after"])
async def test_any_number_of_tasks_may_wait_for_one(
    backend: RedisBackend, monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    monkeypatch.setattr(dependencies, "_PAGE", 7)
    batches = [[FIRST], [NewTask(kind=f"b-{n % 2}", id=f"b-{n}", after=["a-1"]) for n in range(50)]]
    for batch in batches if comes == "before" else reversed(batches):
        await backend.schedule(batch)
    await run(backend, "a")
    assert len(await claim(backend, "b-0", "b-1", limit=100)) == 50
    assert await backend._link.command("EXISTS", backend._link.keys.one("a", "ending")) == 0


async def test_a_chain_that_is_longer_than_one_call_may_tell_is_dropped_by_maintenance(
    backend: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dependencies, "_ROUNDS", 2)
    await backend.schedule([NewTask(kind=f"k-{n}", id=f"t-{n}", after=[f"t-{n - 1}"] * (n > 0)) for n in range(8)])
    await run(backend, "k-0", "fatal")
    assert (await info(backend, "t-7")).status is Status.NEW
    for _ in range(4):
        await backend._register.note([f"k-{n}" for n in range(8)])
        await backend.maintain()
    assert (await info(backend, "t-7")).reason == '"t-6", which it was to run after, ended as dropped'


# The rest of a task's life ------------------------------------------------------------------------------------


async def test_a_successor_may_wait_for_others_too(backend: RedisBackend) -> None:
    await backend.schedule([NewTask(kind="c"), FIRST])
    await run(backend, "c", then=[SECOND])
    assert await claim(backend, "b") == []
    await run(backend, "a")
    assert await run(backend, "b") == "b-1"


async def test_one_that_becomes_ready_wakes_who_waits(opened: Open) -> None:
    backend, other = opened("one"), opened("other")
    await backend.schedule([FIRST, SECOND])
    patient = asyncio.create_task(other.claim(["b"], limit=1, wait=30, claim_id="c"))
    key = other._link.keys.one("b", "waiting")
    while not await backend._link.command("EXISTS", key):  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    await run(backend, "a")
    assert [task.id for task in (await asyncio.wait_for(patient, 25)).tasks] == ["b-1"]


async def test_what_can_never_be_ready_is_refused(backend: RedisBackend) -> None:
    itself = NewTask(kind="b", id="b-1", after=["a-1", "b-1"])
    for task in (itself, NewTask(kind="b", after=["a/1"]), NewTask(kind="b", after=["a"] * 101)):
        with pytest.raises(Refused) as refusal:
            await backend.schedule([FIRST, task])
        assert refusal.value.errors[0]["item"] == 1
        assert refusal.value.errors[0]["field"].startswith("after")
    with pytest.raises(Refused) as refusal:
        await backend.settle([Settlement(id="a", token="t", outcome="success", then=[itself])])
    assert refusal.value.errors[0]["field"] == "then[0].after"
    assert await backend.get("a-1") is None


@pytest.mark.parametrize("length", [2, 4])
async def test_tasks_that_wait_for_one_another_in_a_circle_are_dropped(backend: RedisBackend, length: int) -> None:
    await backend.schedule([NewTask(kind="k", id="t", after=["t-0", "elsewhere"])])
    cycle = [NewTask(kind=f"k-{n}", id=f"t-{n}", after=[f"t-{(n + 1) % length}"]) for n in range(length)]
    await backend.schedule(cycle)
    await maintained(backend)
    reasons = [(await info(backend, f"t-{n}")).reason or "" for n in range(length)]
    assert [(await info(backend, f"t-{n}")).status for n in range(length)] == [Status.DROPPED] * length
    assert reasons[0] == "it was to run after itself: " + " after ".join(f'"t-{n % length}"' for n in range(length + 1))
    assert (await info(backend, "t")).status is Status.DROPPED


async def test_a_diamond_is_no_circle(backend: RedisBackend) -> None:
    await backend.schedule([NewTask(kind="k", id=f"t-{n}", after=[f"t-{m}" for m in range(n)]) for n in range(6)])
    await maintained(backend)
    for n in range(6):
        assert await run(backend, "k") == f"t-{n}"


async def test_tasks_that_wait_for_none_cost_no_round_trip_more(
    backend: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.schedule([SECOND])  # others may
    asked: list[str] = []
    for name in ("run", "command"):
        monkeypatch.setattr(backend._link, name, counted(getattr(backend._link, name), name, asked))
    await backend.schedule([NewTask(kind="c", id="c-1")])
    assert sorted(asked) == ["command", "run", "run"]  # its kind noted, its id registered, itself made
    (task,) = await claim(backend, "c")
    asked.clear()
    await backend.settle([Settlement(id=task.id, token=task.token, outcome="success")])
    assert asked == ["run"]


def counted(call: Any, name: str, asked: list[str]) -> Any:
    async def count(*args: Any) -> Any:
        asked.append(name)
        return await call(*args)

    return count


async def test_a_purge_keeps_a_task_until_its_end_was_told(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    dying, other = opened("dying"), opened("other")
    dies_before(monkeypatch, dying, "release")
    await dying.schedule([FIRST, SECOND])
    await run(dying, "a")
    assert (await other.purge()).kinds == {}
    await maintained(other)
    assert (await other.purge()).kinds == {"a": {"success": 1}}
    assert len(await claim(other, "b")) == 1


async def test_a_dropped_task_that_is_redriven_waits_again(backend: RedisBackend, kind: str) -> None:
    await backend.schedule([NewTask(kind=kind, id="first"), NewTask(kind=f"{kind}-2", id="second", after=["first"])])
    await run(backend, kind, "fatal")
    assert (await info(backend, "second")).status is Status.DROPPED
    answer = await backend.redrive(["first", "second"])
    assert [verdict.verdict for verdict in answer.tasks] == ["redriven", "redriven"]
    await maintained(backend)
    second = await info(backend, "second")
    assert (second.status, second.reason) == (Status.NEW, 'waits for "first" to succeed')
    assert await claim(backend, f"{kind}-2") == []
    await run(backend, kind)
    assert await run(backend, f"{kind}-2") == "second"


async def test_a_dropped_task_that_is_redriven_alone_is_dropped_again(backend: RedisBackend, kind: str) -> None:
    await backend.schedule([NewTask(kind=kind, id="first"), NewTask(kind=f"{kind}-2", id="second", after=["first"])])
    await run(backend, kind, "fatal")
    await backend.redrive(["second"])
    await maintained(backend)
    assert (await info(backend, "second")).status is Status.DROPPED
