"""What `memory://` promises beyond the contract: its clock, its boundary, its URL."""

import asyncio
import threading
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from leasekit.errors import ConfigError, Refused
from leasekit.registry import open_backend
from leasekit.server import due_tasks
from leasekit.task import Beat, Claimed, FixedDelays, NewTask, Settlement, Stats, Status, Task
from leasekit.testing.clock import FakeClock
from leasekit.testing.memory import MemoryBackend, MemoryService, connect

pytestmark = pytest.mark.anyio


async def claim(memory: MemoryBackend, *, wait: float = 0.0, claim_id: str = "c1", limit: int = 10) -> Claimed:
    return await memory.claim(["k"], limit=limit, wait=wait, claim_id=claim_id)


async def held(memory: MemoryBackend, **options: Any) -> Task:
    await memory.schedule([NewTask(kind="k", **options)])
    (task,) = (await claim(memory, claim_id=f"claim-{options.get('id')}")).tasks
    return task


def beat(task: Task, **options: Any) -> Beat:
    return Beat(id=task.id, token=task.token, **options)


def result(task: Task, outcome: Any = "success", **options: Any) -> Settlement:
    return Settlement(id=task.id, token=task.token, outcome=outcome, **options)


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


# Time


async def test_a_claim_waits_on_the_given_clock(memory: MemoryBackend, clock: FakeClock) -> None:
    asking = asyncio.create_task(claim(memory, wait=30))
    await clock.asleep()
    clock.advance(29)
    assert clock.sleepers == 1
    clock.advance(1)
    assert (await asking) == Claimed(tasks=[], waited=30)


async def test_a_task_that_is_too_late_ends_though_no_worker_asks(
    memory: MemoryBackend, service: MemoryService, clock: FakeClock
) -> None:
    await memory.schedule([NewTask(kind="k", id="t", start_deadline=60.0)])
    clock.advance(61)
    await memory.schedule([NewTask(kind="k")])
    info = service.get("t")
    assert info is not None
    assert info.status == "dropped"


async def test_only_a_lease_can_be_stolen_and_only_by_its_token(
    memory: MemoryBackend, service: MemoryService, clock: FakeClock
) -> None:
    task = await held(memory, id="t", max_crashes=1)
    assert service.steal("nobody") is None
    assert service.steal("t", token="another") is None
    stolen = service.steal("t", token=task.token, thief="w2")
    assert stolen is not None
    assert (stolen.fence, stolen.attempt, stolen.id) == (2, 2, "t")
    assert [verdict.reason for verdict in await memory.beat([beat(task), beat(stolen)])] == ["taken", None]
    assert service.steal("t") is None  # that was its second crash: it is dead
    info = await memory.get("t")
    assert info is not None
    assert info.status is Status.DEAD


async def test_waited_counts_from_the_first_call_of_a_claim(memory: MemoryBackend, clock: FakeClock) -> None:
    first = asyncio.create_task(claim(memory, wait=60))
    await clock.asleep()
    clock.advance(20)
    repeat = asyncio.create_task(claim(memory, wait=60))
    await clock.asleep(2)
    clock.advance(5)
    await memory.schedule([NewTask(kind="k")])
    assert (await first) == (await repeat)
    assert (await first).waited == 25


async def test_a_repeat_long_after_has_the_first_waited(memory: MemoryBackend, clock: FakeClock) -> None:
    asking = asyncio.create_task(claim(memory, wait=60))
    await clock.asleep()
    clock.advance(20)
    await memory.schedule([NewTask(kind="k")])
    first = await asking
    clock.advance(100)
    assert await claim(memory) == first


async def test_a_repeat_of_an_empty_answer_is_a_new_claim(memory: MemoryBackend, clock: FakeClock) -> None:
    assert (await claim(memory)).tasks == []
    clock.advance(100)
    await memory.schedule([NewTask(kind="k")])
    assert (await claim(memory)).waited == 0


async def test_a_claim_whose_caller_left_takes_nothing(memory: MemoryBackend, clock: FakeClock) -> None:
    asking = asyncio.create_task(claim(memory, wait=60))
    await clock.asleep()
    asking.cancel()
    await asyncio.wait([asking])
    await memory.schedule([NewTask(kind="k")])
    assert len((await claim(memory, claim_id="c2")).tasks) == 1


async def test_a_waiting_claim_is_woken_by_a_lease_that_runs_out(memory: MemoryBackend, clock: FakeClock) -> None:
    first = await held(memory, claim_timeout=300)
    asking = asyncio.create_task(claim(memory, wait=60, claim_id="c2"))
    await clock.asleep()
    assert clock.next_wake == 60
    clock.advance(60)
    assert (await asking).tasks == []
    clock.advance(235)
    asking = asyncio.create_task(claim(memory, wait=60, claim_id="c3"))
    await clock.asleep()
    assert clock.next_wake == 300
    clock.advance(5)
    (second,) = (await asking).tasks
    assert (second.id, second.fence, second.attempt) == (first.id, 2, 2)


async def test_a_waiting_claim_is_woken_by_a_release(memory: MemoryBackend, clock: FakeClock) -> None:
    first = await held(memory)
    asking = asyncio.create_task(claim(memory, wait=60, claim_id="c2"))
    await clock.asleep()
    await memory.settle([result(first, "release")])
    assert [task.id for task in (await asking).tasks] == [first.id]


async def test_a_clock_that_steps_back_ends_no_lease_and_revives_none() -> None:
    clock = SimpleNamespace(now=100.0)
    memory = MemoryBackend(MemoryService(now=lambda: clock.now), worker="w")
    await memory.schedule([NewTask(kind="k", claim_timeout=60, heartbeat_timeout=60)])
    (task,) = (await claim(memory)).tasks

    async def verdict_at(now: float) -> str:
        clock.now = now
        return (await memory.beat([beat(task)]))[0].verdict

    verdicts = [await verdict_at(now) for now in (50.0, 155.0, 216.0, 90.0)]
    assert verdicts == ["renewed", "renewed", "gone", "gone"]


async def test_a_claim_that_does_not_wait_goes_on_behind_a_closed_collection(
    memory: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due_tasks, "_SHUT_OUT", 2)
    await memory.set_gate(collection="c")
    await memory.schedule([NewTask(kind="k", collection="c") for _ in range(100)] + [NewTask(kind="k", id="open")])
    assert [task.id for task in (await claim(memory)).tasks] == ["open"]


async def test_a_scheduled_moment_is_of_the_services_clock(memory: MemoryBackend, clock: FakeClock) -> None:
    await memory.schedule([NewTask(kind="k", at=clock.later(60))])
    clock.advance(59)
    assert (await claim(memory)).tasks == []
    clock.advance(1)
    assert len((await claim(memory)).tasks) == 1


# The boundary


async def test_nobody_shares_a_value_with_the_service(memory: MemoryBackend) -> None:
    payload = {"list": [1]}
    await memory.schedule([NewTask(kind="k", id="a", payload=payload)])
    payload["list"].append(2)
    (task,) = (await claim(memory)).tasks
    task.payload["list"].append(3)
    (again,) = (await claim(memory)).tasks
    info = await memory.get("a")
    assert info is not None
    assert again.payload == info.payload == {"list": [1]}


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (NewTask(kind="a/b"), "kind"),
        (NewTask(kind="k", id=""), "id"),
        (NewTask(kind="k", priority=5), "priority"),
        (NewTask(kind="k", claim_timeout=1), "claim_timeout"),
        (NewTask(kind="k", retry=FixedDelays(waits=[])), "retry.waits"),
        (NewTask(kind="k", payload="x" * 1024 * 1024), "payload"),
        (NewTask(kind="k", payload=nested(65)), "payload"),
    ],
)
async def test_a_task_out_of_bounds_is_refused_with_its_place(memory: MemoryBackend, bad: NewTask, field: str) -> None:
    with pytest.raises(Refused) as refusal:
        await memory.schedule([NewTask(kind="k"), bad])
    (error,) = refusal.value.errors
    assert (error["item"], error["field"]) == (1, field)
    assert error["detail"]
    assert (await memory.stats()) == Stats(kinds={})


@pytest.mark.parametrize("payload", [object(), {1, object()}, "\ud800", {"a": [b"".join]}])
async def test_what_is_no_json_is_refused_with_its_item(memory: MemoryBackend, payload: Any) -> None:
    with pytest.raises(Refused) as refusal:
        await memory.schedule([NewTask(kind="k"), NewTask(kind="k", payload=payload)])
    assert refusal.value.errors[0]["item"] == 1


async def test_progress_and_successors_have_bounds_too(memory: MemoryBackend) -> None:
    task = await held(memory)
    with pytest.raises(Refused, match="65,540 bytes"):
        await memory.beat([beat(task, progress="x" * 65538)])
    with pytest.raises(Refused) as refusal:
        await memory.settle([result(task, "retry", then=[NewTask(kind="k")])])
    assert refusal.value.errors == [
        {"item": 0, "field": "then", "detail": "goes with success and fatal only, not with retry"}
    ]


@pytest.mark.parametrize("options", [{"limit": -1}, {"limit": 1001}, {"wait": -1}, {"claim_id": ""}])
async def test_a_claim_out_of_bounds_is_refused_with_its_field(memory: MemoryBackend, options: dict[str, Any]) -> None:
    with pytest.raises(Refused) as refusal:
        await claim(memory, **options)
    assert [error["field"] for error in refusal.value.errors] == list(options)


@pytest.mark.parametrize("options", [{"cursor": "x"}, {"limit": 0}])
async def test_a_listing_out_of_bounds_is_refused(memory: MemoryBackend, options: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        await memory.list_tasks(**options)


# Chance, threads, URLs


async def test_a_seed_repeats_a_history() -> None:
    async def history() -> list[Task]:
        memory = MemoryBackend(MemoryService(now=FakeClock(), random=Random(5)), worker="w")
        await memory.schedule([NewTask(kind="k") for _ in range(3)])
        return (await claim(memory)).tasks

    assert await history() == await history()


async def test_tokens_cannot_be_guessed_without_a_seed() -> None:
    one, two = [await held(MemoryBackend(MemoryService(), worker="w"), id="a") for _ in range(2)]
    assert one.token != two.token
    assert len(one.token) == 32


async def test_a_claim_in_one_loop_is_woken_from_another_thread(service: MemoryService, clock: FakeClock) -> None:
    got: list[Claimed] = []
    memory = MemoryBackend(service, worker="w")
    keeper = threading.Thread(target=lambda: got.append(asyncio.run(claim(memory, wait=60))))
    keeper.start()
    await clock.asleep()
    await memory.schedule([NewTask(kind="k")])
    await asyncio.to_thread(keeper.join, 10)
    assert [len(claimed.tasks) for claimed in got] == [1]


async def test_real_time_passes_without_a_clock() -> None:
    memory = connect("memory://", worker="w")
    assert (await claim(memory, wait=0.01)).tasks == []
    asking = asyncio.create_task(claim(memory, wait=60))
    await memory.schedule([NewTask(kind="k")])
    assert len((await asking).tasks) == 1


async def test_a_name_is_shared_in_this_process_and_no_name_is_not() -> None:
    one, two = (connect("memory://test-shared", worker=w) for w in ("a", "b"))
    assert one.service is two.service
    assert (one.worker, two.worker) == ("a", "b")
    assert connect("memory://other", worker="a").service is not one.service
    assert connect("memory://", worker="a").service is not connect("memory://", worker="a").service


async def test_the_registry_knows_the_scheme() -> None:
    assert isinstance(open_backend("memory://", worker="w"), MemoryBackend)


@pytest.mark.parametrize("url", ["memory://a/b", "memory:///b", "memory://a?ttl=3", "memory://a#b", "memory://me@a"])
def test_a_url_with_more_than_a_name_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="memory://name"):
        connect(url, worker="w")


# Retention


async def test_ended_tasks_and_answers_of_claims_are_removed_by_later_requests(
    memory: MemoryBackend, service: MemoryService, clock: FakeClock
) -> None:
    await memory.settle([result(await held(memory, id="a"))])
    tables = service._store._tables
    assert tables.claims
    clock.advance(29 * 86400)
    assert await memory.get("a") is not None
    clock.advance(2 * 86400)
    assert await memory.get("a") is None
    left = [tables.seqs, tables.entities, tables.triggers, tables.ended, tables.runs, tables.claims, tables.lanes]
    assert not any(left)
