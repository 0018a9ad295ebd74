"""Routes: tasks that require labels are granted to workers that have them, and cost others nothing."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from leasekit.errors import Refused
from leasekit.server.engine import Engine
from leasekit.server.roles import claims
from leasekit.server.roles.gates import GateChange
from leasekit.server.store import Store
from leasekit.server.store.routes import MOST
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import Claimed, FixedDelays, KindSettings, NewTask, Ticket
from leasekit.wire import RedriveRequest, RescheduleRequest
from tests.server.conftest import Bench
from tests.waiting import until

pytestmark = pytest.mark.anyio

GPU, EU = {"gpu": "a100"}, {"zone": "eu"}
ONLY_EU = pytest.mark.parametrize(
    "options", [{"requires": EU}, {"prefers": EU, "prefer_for": 600.0}], ids=["required", "preferred"]
)


async def test_a_task_goes_to_a_worker_with_all_labels(bench: Bench) -> None:
    await bench.put("both", requires=GPU | EU)
    await bench.put("gpu", requires=GPU)
    await bench.put("any")
    assert (await bench.info("both")).requires == {"gpu": "a100", "zone": "eu"}
    assert (await bench.info("any")).requires == {}
    for labels in ({}, {"gpu": "t4"}, {"gpu": "a100x"}):
        assert await bench.ids(labels=labels, limit=2) in (["any"], [])
    assert await bench.ids(labels=GPU | {"os": "linux"}) == ["gpu"]
    assert await bench.ids(labels=EU | GPU) == ["both"]


async def test_the_most_urgent_is_first_then_the_longest_due_of_all_that_fit(bench: Bench) -> None:
    await bench.put("gpu", requires=GPU)
    bench.clock.advance(1)
    await bench.put("any")
    bench.clock.advance(1)
    await bench.put("eu", requires=EU)
    await bench.put("urgent", requires=EU, priority=0)
    assert await bench.ids(labels=GPU | EU) == ["urgent", "gpu", "any", "eu"]


async def test_a_task_that_comes_again_requires_the_same(bench: Bench) -> None:
    await bench.put("a", requires=GPU, retry=FixedDelays(waits=[5.0]), max_attempts=2)
    await bench.settle(await bench.take(labels=GPU), "retry")
    await bench.later(5)
    assert await bench.ids() == []
    await bench.settle(await bench.take(labels=GPU), "retry")
    assert await bench.status("a") == "dead"
    await bench.restart()
    await bench.engine.operations.redrive(RedriveRequest(ids=["a"]))
    assert await bench.ids() == []
    task = await bench.take(labels=GPU)
    await bench.settle(task, "release")
    await bench.engine.operations.reschedule("a", RescheduleRequest(delay=0.0, priority=0), by=None)
    assert await bench.ids() == []
    assert await bench.ids(labels=GPU) == ["a"]


async def test_one_that_waits_is_woken_if_its_labels_fit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    look_up = claims._due_tasks

    def counted(turn: UnitOfWork, requests: Sequence[claims.WaitingClaim]) -> Any:
        tried.extend(request.worker for request in requests)
        return look_up(turn, requests)

    monkeypatch.setattr(claims, "_due_tasks", counted)
    plain = asyncio.create_task(bench.claim(worker="plain", wait=60, limit=1))
    gpu = asyncio.create_task(bench.claim(worker="gpu", wait=60, limit=1, labels=GPU))
    await until(lambda: len(bench.engine._long_polls._parked.get("k", {})) == 2)
    tried.clear()
    await bench.put("a", requires=GPU)
    assert [task.id for task in (await gpu).tasks] == ["a"]
    assert set(tried) == {"gpu"}
    await bench.put("b")
    assert [task.id for task in (await plain).tasks] == ["b"]


async def test_claims_of_one_transaction_get_what_fits_each(bench: Bench) -> None:
    for n in range(4):
        await bench.put(f"gpu{n}", requires=GPU)
        await bench.put(f"any{n}")
    with bench.engine.commit.together():
        claiming = [
            asyncio.create_task(bench.claim(worker=worker, labels=labels, limit=limit))
            for worker, labels, limit in (("gpu", GPU, 2), ("plain", {}, 9))
        ]
        await asyncio.sleep(0)  # both are with the writer
    gpu, plain = ([task.id for task in answer.tasks] for answer in await asyncio.gather(*claiming))
    assert gpu == ["gpu0", "any0"]
    assert plain == ["any1", "any2", "any3"]


async def test_keys_take_turns_and_have_limits_in_all_routes_together(bench: Bench) -> None:
    await bench.engine.operations.set_kind("k", KindSettings(key_concurrency=1), by=None)
    for n in range(2):
        await bench.put(f"a{n}", requires=GPU, key="a")
        await bench.put(f"b{n}", requires=GPU, key="b")
    await bench.put("plain", key="a")
    assert sorted(await bench.ids(labels=GPU)) == ["a0", "b0"]
    assert await bench.ids() == []  # `a` has its one place
    held = (await bench.info("a0")).worker
    assert held == "w"


async def test_the_end_of_a_run_frees_its_key_in_the_other_routes(bench: Bench) -> None:
    await bench.engine.operations.set_kind("k", KindSettings(key_concurrency=1), by=None)
    await bench.put("first", key="a")
    task = await bench.take()
    await bench.put("second", requires=GPU, key="a")
    assert await bench.ids(labels=GPU) == []
    await bench.settle(task)
    assert await bench.ids(labels=GPU) == ["second"]


async def test_a_limit_of_the_kind_counts_all_routes(bench: Bench) -> None:
    await bench.engine.operations.set_kind("k", KindSettings(concurrency=1), by=None)
    await bench.put("a", requires=GPU)
    await bench.put("b")
    task = await bench.take(labels=GPU)
    assert await bench.ids(labels=GPU) == []
    assert await bench.ids() == []
    await bench.settle(task)
    assert len(await bench.ids()) == 1


async def test_a_closed_kind_is_closed_in_all_routes(bench: Bench) -> None:
    await bench.put("a", requires=GPU)
    await bench.engine.operations.set_gate(GateChange("kind", "k", "pause", None, None, None, None))
    assert await bench.ids(labels=GPU) == []
    await bench.engine.operations.set_gate(GateChange("kind", "k", "drop", None, None, None, None))
    await bench.engine.tick()
    assert await bench.status("a") == "cancelled"


async def _both_wait(bench: Bench) -> asyncio.Task[Claimed]:
    """Have a claim without labels wait, and another after it, which is returned."""
    parked = bench.engine._long_polls._parked
    plain = asyncio.create_task(bench.claim(worker="plain", wait=60, limit=1))
    await until(lambda: len(parked.get("k", {})) == 1)
    eu = asyncio.create_task(bench.claim(worker="eu", wait=60, limit=1, labels=EU))
    await until(lambda: len(parked.get("k", {})) == 2)
    assert not plain.done()
    return eu


@ONLY_EU
async def test_a_claim_is_woken_when_its_gate_opens_though_another_waits_longer(bench: Bench, options: Any) -> None:
    await bench.engine.operations.set_gate(GateChange("kind", "k", "pause", None, None, None, None))
    await bench.put("a", **options)
    eu = await _both_wait(bench)
    await bench.engine.operations.set_gate(GateChange("kind", "k", "open", None, None, None, None))
    assert [task.id for task in (await asyncio.wait_for(eu, 30)).tasks] == ["a"]


@ONLY_EU
@pytest.mark.parametrize("is_first", [True, False])
async def test_a_claim_is_woken_when_a_gate_opens_by_itself(bench: Bench, options: Any, is_first: bool) -> None:
    await bench.engine.operations.set_gate(GateChange("kind", "k", "pause", None, 30.0, None, None))
    if is_first:
        await bench.put("a", **options)
    eu = await _both_wait(bench)
    if not is_first:
        await bench.put("a", **options)
    bench.clock.advance(30.1)
    bench.engine._long_polls.look()  # as its timer does
    assert [task.id for task in (await asyncio.wait_for(eu, 30)).tasks] == ["a"]


@ONLY_EU
@pytest.mark.parametrize("by", ["an end", "a change"])
async def test_a_claim_is_woken_when_a_limit_leaves_room_though_another_waits_longer(
    bench: Bench, options: Any, by: str
) -> None:
    await bench.engine.operations.set_kind("k", KindSettings(concurrency=1), by=None)
    running = await bench.taken("first")
    await bench.put("a", **options)
    eu = await _both_wait(bench)
    if by == "an end":
        await bench.settle(running)
    else:
        await bench.engine.operations.set_kind("k", KindSettings(), by=None)
    assert [task.id for task in (await asyncio.wait_for(eu, 30)).tasks] == ["a"]


async def test_too_many_sets_of_labels_of_one_kind_are_refused(bench: Bench) -> None:
    for n in range(MOST):
        await bench.put(f"t{n}", requires={"host": f"h{n}"})
    with pytest.raises(Refused, match="different sets of labels"):
        await bench.put("more", requires={"host": "another"})
    await bench.put("known", requires={"host": "h1"})
    await bench.put("other", kind="l", requires={"host": "another"})
    assert await bench.ids(labels={"host": "h1"}) == ["t1", "known"]


async def test_what_no_known_worker_can_have_is_listed_of_all_kinds_however_many_wait(bench: Bench) -> None:
    for number in range(3):
        await bench.engine.schedule([NewTask(kind=f"k{number}-{n // 2}") for n in range(800)])
    await bench.put("a", kind="a", requires=GPU)
    await bench.put("z", kind="z", requires=GPU)
    unmet = (await bench.engine.queries.stats()).unmet
    assert (len(unmet), unmet["a"], unmet["z"]) == (1202, [GPU], [GPU])


async def test_what_no_known_worker_can_have_is_listed(bench: Bench) -> None:
    await bench.put("a", requires=GPU | EU)
    await bench.put("b", requires=EU)
    await bench.put("c", kind="l")
    await bench.put("later", requires={"gpu": "t4"}, delay=5.0)
    await bench.put("once:n", kind="once:n")
    assert (await bench.engine.queries.stats()).unmet == {"k": [GPU | EU, EU], "l": [{}]}
    await bench.claim(kinds=("k",), labels={"gpu": "t4", "zone": "eu"}, limit=1)
    await bench.claim(worker="other", kinds=("l",))
    assert (await bench.engine.queries.stats()).unmet == {"k": [GPU | EU]}
    await bench.claim(worker="another", labels=GPU)
    assert (await bench.engine.queries.stats()).unmet == {"k": [GPU | EU]}
    await bench.later(5)
    assert (await bench.engine.queries.stats()).unmet == {"k": [GPU | EU]}  # the worker with gpu=t4 claimed lately
    await bench.later(700)  # no worker has called since, and the leases have expired
    assert (await bench.engine.queries.stats()).unmet == {"k": [GPU | EU, {"gpu": "t4"}, EU], "l": [{}]}


async def test_a_ticket_entitles_to_no_task_that_the_labels_do_not_fit(bench: Bench) -> None:
    await bench.put("a", requires=GPU)
    tickets = [Ticket(id="a", fence=0)]
    refused = await bench.claim(tickets=tickets)
    assert (refused.tasks, refused.refused) == ([], ["a"])
    assert [task.id for task in (await bench.claim(tickets=tickets, labels=GPU)).tasks] == ["a"]


async def test_another_node_wakes_claims_that_fit(postgres_stores: Callable[[], Store]) -> None:
    first = Bench(postgres_stores)
    other = Engine(postgres_stores(), clock=lambda: first.clock.wall, boot=lambda: first.clock.boot)
    async with first.engine, other:
        waiting = asyncio.create_task(first.claim(wait=60, limit=1, labels=GPU))
        await until(lambda: "k" in first.engine._long_polls._parked)
        await other.tick()
        await other.schedule([NewTask(kind="k", id="a", requires=GPU)])
        assert [task.id for task in (await asyncio.wait_for(waiting, 30)).tasks] == ["a"]
