"""Preferred labels: for a while, a due task is for workers that have them; then for all that fit."""

import asyncio
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from leasekit.errors import Refused
from leasekit.periodic import PeriodicTaskItem
from leasekit.server.engine import Engine
from leasekit.server.roles.gates import GateChange
from leasekit.server.roles.periodic import Put
from leasekit.server.store import Store
from leasekit.server.store.routes import MOST
from leasekit.task import FixedDelays, KindSettings, NewTask, Ticket
from leasekit.wire import RedriveRequest, RescheduleMatchingRequest, RescheduleRequest
from tests.server.conftest import Bench
from tests.waiting import until

pytestmark = pytest.mark.anyio

GPU, EU, US = {"gpu": "a100"}, {"zone": "eu"}, {"zone": "us"}


async def test_a_worker_without_the_labels_gets_the_task_later(bench: Bench) -> None:
    await bench.put("a", prefers=EU, prefer_for=30.0)
    await bench.put("b", prefers=EU)  # for 10 s
    await bench.put("any")
    assert ((await bench.info("a")).prefers, (await bench.info("a")).prefer_for) == (EU, 30.0)
    assert ((await bench.info("b")).prefer_for, (await bench.info("any")).prefer_for) == (10.0, None)
    assert await bench.ids(limit=9) == ["any"]
    await bench.later(9.9)
    assert await bench.ids(limit=9, labels=US) == []
    await bench.later(0.2)
    assert await bench.ids(limit=9, labels=US) == ["b"]
    await bench.later(20)
    assert await bench.ids(limit=9) == ["a"]


async def test_a_worker_with_the_labels_gets_the_task_at_once(bench: Bench) -> None:
    await bench.put("a", prefers=EU)
    assert await bench.ids(labels=EU | GPU) == ["a"]


async def test_what_is_required_is_required_for_ever(bench: Bench) -> None:
    await bench.put("a", requires=GPU, prefers=EU, prefer_for=5.0)
    assert await bench.ids(labels=GPU) == []
    assert await bench.ids(labels=EU) == []
    await bench.later(5)
    assert await bench.ids(labels=EU) == []
    assert await bench.ids(labels=GPU) == ["a"]
    await bench.put("b", requires=GPU, prefers=EU, prefer_for=5.0)
    assert await bench.ids(labels=GPU | EU) == ["b"]


async def test_claims_of_one_transaction_get_what_is_open_for_each(bench: Bench) -> None:
    await bench.put("old", prefers=EU, prefer_for=5.0)
    await bench.later(5)
    await bench.put("new", prefers=EU, prefer_for=5.0)
    with bench.engine.commit.together():
        claiming = [
            asyncio.create_task(bench.claim(worker=worker, labels=labels, limit=9))
            for worker, labels in (("plain", {}), ("eu", EU))
        ]
        await asyncio.sleep(0)  # both are with the writer
    plain, eu = ([task.id for task in answer.tasks] for answer in await asyncio.gather(*claiming))
    assert (plain, eu) == (["old"], ["new"])


async def test_urgent_tasks_that_are_kept_for_others_delay_none(bench: Bench) -> None:
    await bench.put("urgent", prefers=EU, priority=0)
    await bench.put("other", prefers=US, priority=0)
    await bench.put("plain", priority=4)
    assert await bench.ids() == ["plain"]


async def test_the_preference_counts_anew_from_each_due_time(bench: Bench) -> None:
    await bench.put("a", prefers=EU, prefer_for=5.0, retry=FixedDelays(waits=[20.0]), max_attempts=2)
    await bench.settle(await bench.take(labels=EU), "retry")
    await bench.later(20)
    assert await bench.ids() == []
    await bench.later(5)
    await bench.settle(await bench.take(), "retry")
    assert await bench.status("a") == "dead"
    await bench.restart()
    await bench.engine.operations.redrive(RedriveRequest(ids=["a"]))
    assert await bench.ids() == []
    await bench.later(5)
    await bench.settle(await bench.take(), "release")
    await bench.engine.operations.reschedule("a", RescheduleRequest(delay=0.0), by=None)
    assert await bench.ids() == []
    await bench.later(4)
    await bench.engine.operations.reschedule("a", RescheduleRequest(priority=0), by=None)
    await bench.later(1.1)
    assert await bench.ids() == ["a"]


async def test_a_claim_that_waits_is_woken_once_it_may_have_the_task(bench: Bench) -> None:
    plain = asyncio.create_task(bench.claim(worker="plain", wait=60, limit=1))
    await until(lambda: "k" in bench.engine._long_polls._parked)
    await bench.put("a", prefers=EU, prefer_for=5.0)
    await bench.later(4.9)
    assert not plain.done()
    await bench.later(0.2)
    assert [task.id for task in (await asyncio.wait_for(plain, 30)).tasks] == ["a"]


async def test_a_claim_that_comes_to_a_task_that_is_kept_is_woken_in_time(bench: Bench) -> None:
    await bench.put("a", prefers=EU, prefer_for=5.0)
    plain = asyncio.create_task(bench.claim(worker="plain", wait=60, limit=1))
    await until(lambda: "k" in bench.engine._long_polls._parked)
    await bench.later(5.1)
    assert [task.id for task in (await asyncio.wait_for(plain, 30)).tasks] == ["a"]


async def test_a_preferred_worker_that_waits_behind_another_is_woken_at_once(bench: Bench) -> None:
    plain = asyncio.create_task(bench.claim(worker="plain", wait=60, limit=1))
    eu = asyncio.create_task(bench.claim(worker="eu", wait=60, limit=1, labels=EU))
    await until(lambda: len(bench.engine._long_polls._parked.get("k", {})) == 2)
    await bench.put("a", prefers=EU)
    assert [task.id for task in (await asyncio.wait_for(eu, 30)).tasks] == ["a"]
    await bench.put("b")
    assert [task.id for task in (await asyncio.wait_for(plain, 30)).tasks] == ["b"]


async def test_all_claims_that_wait_get_what_opens_for_them(bench: Bench) -> None:
    waiting = [asyncio.create_task(bench.claim(worker=f"w{n}", wait=60, limit=1)) for n in range(4)]
    await until(lambda: len(bench.engine._long_polls) == 4)
    for n in range(4):
        await bench.put(f"t{n}", prefers=EU, prefer_for=5.0)
    await bench.later(5.1)
    answers = await asyncio.wait_for(asyncio.gather(*waiting), 30)
    assert sorted(task.id for answer in answers for task in answer.tasks) == ["t0", "t1", "t2", "t3"]


async def test_a_closed_kind_and_a_limit_hold_for_preferred_workers_too(bench: Bench) -> None:
    await bench.engine.operations.set_kind("k", KindSettings(concurrency=1), by=None)
    await bench.put("a", prefers=EU)
    await bench.put("b", prefers=EU)
    task = await bench.take(labels=EU)
    assert await bench.ids(labels=EU) == []
    await bench.later(10)
    assert await bench.ids() == []
    await bench.settle(task)
    await bench.engine.operations.set_gate(GateChange("kind", "k", "pause", None, None, None, None))
    assert await bench.ids() == []
    await bench.engine.operations.set_gate(GateChange("kind", "k", "open", None, None, None, None))
    assert await bench.ids() == ["b"]


async def test_a_task_with_a_key_prefers_nothing(bench: Bench) -> None:
    await bench.engine.operations.set_kind("k", KindSettings(fair=True), by=None)
    with pytest.raises(Refused, match=r"is `fair`.*leave out `prefers`"):
        await bench.put("a", prefers=EU, collection="c")
    await bench.put("a", prefers=EU)
    assert await bench.ids(labels=EU) == ["a"]


async def test_preferences_count_as_sets_of_labels(bench: Bench) -> None:
    for n in range(MOST):
        await bench.put(f"t{n}", prefers=EU, prefer_for=n + 1.0)
    with pytest.raises(Refused, match="different sets of labels"):
        await bench.put("more", prefers=EU, prefer_for=100.0)


async def test_only_what_is_required_is_unmet(bench: Bench) -> None:
    await bench.claim(labels=US)
    await bench.put("a", prefers=EU)
    assert (await bench.engine.queries.stats()).unmet == {}
    await bench.put("b", requires=GPU, prefers=EU)
    await bench.put("c", requires=GPU, prefers={"x": "y"})
    await bench.later(20)
    assert (await bench.engine.queries.stats()).unmet == {"k": [GPU]}


async def test_a_ticket_of_a_task_that_is_kept_stays_good(bench: Bench) -> None:
    await bench.put("a", prefers=EU, prefer_for=5.0)
    tickets = [Ticket(id="a", fence=0)]
    early = await bench.claim(tickets=tickets)
    assert (early.tasks, early.refused) == ([], [])
    await bench.later(5)
    assert [task.id for task in (await bench.claim(tickets=tickets)).tasks] == ["a"]


async def test_what_is_put_off_or_replaced_prefers_its_labels_anew(bench: Bench) -> None:
    wanted = {"prefers": EU, "prefer_for": 5.0, "dedupe_key": "d", "debounce": 60.0}
    await bench.put("a", **wanted)
    await bench.later(4)
    (answer,) = await bench.put("other", **{**wanted, "prefers": US, "prefer_for": 50.0}, delay=2.0)
    assert (answer.id, answer.replaced) == ("a", True)
    assert (await bench.info("a")).prefers == EU  # as of the first submission
    await bench.later(6.9)
    assert await bench.ids() == []
    await bench.later(0.2)
    assert await bench.ids() == ["a"]


async def test_a_task_that_waits_for_others_prefers_labels_from_when_it_is_ready(bench: Bench) -> None:
    first = await bench.taken("first")
    await bench.put("a", after=["first"], prefers=EU, prefer_for=5.0)
    await bench.later(100)
    then = NewTask(kind="k", id="b", prefers=EU, prefer_for=5.0, payload=None)
    await bench.settle(first, then=[then])
    assert await bench.ids(labels=US) == []
    await bench.later(5)
    assert await bench.ids(labels=US, limit=1) == ["a"]
    assert await bench.ids() == ["b"]


async def test_a_dead_worker_that_was_preferred_leaves_its_task_to_its_like_first(bench: Bench) -> None:
    await bench.put("a", prefers=EU, prefer_for=5.0, claim_timeout=10, heartbeat_timeout=10)
    await bench.take(labels=EU)
    await bench.later(10.1)
    assert await bench.status("a") == "enqueued"
    assert await bench.ids() == []
    await bench.later(5)
    assert await bench.ids() == ["a"]


async def test_all_tasks_of_a_kind_can_be_put_off_and_prefer_labels_anew(bench: Bench) -> None:
    for task_id, labels in (("a", EU), ("b", US)):
        await bench.put(task_id, prefers=labels, prefer_for=5.0)
    await bench.later(10)
    wanted = RescheduleMatchingRequest(kind="k", delay=0.0, dry_run=True)
    tried = await bench.engine.operations.reschedule_matching(wanted, by=None)
    wanted = replace(wanted, dry_run=False, token=tried.token)
    await bench.engine.operations.reschedule_matching(wanted, by=None)
    assert await bench.ids() == []
    assert await bench.ids(labels=US) == ["b"]
    await bench.later(5)
    assert await bench.ids() == ["a"]


async def test_an_urgent_task_is_first_also_among_those_that_prefer(bench: Bench) -> None:
    await bench.put("a", prefers=EU, prefer_for=5.0)
    await bench.later(1)
    await bench.put("b", prefers=EU, prefer_for=5.0)
    await bench.engine.operations.reschedule("b", RescheduleRequest(priority=0), by=None)
    assert await bench.ids(labels=EU, limit=1) == ["b"]


async def test_the_same_submission_again_changes_no_preference(bench: Bench) -> None:
    await bench.put("a", prefers=EU, prefer_for=5.0)
    (again,) = await bench.put("a", prefers=US, prefer_for=50.0)
    assert (again.created, again.conflict) == (False, False)
    assert ((await bench.info("a")).prefers, (await bench.info("a")).prefer_for) == (EU, 5.0)


async def test_a_start_deadline_counts_while_a_task_is_kept(bench: Bench) -> None:
    await bench.put("a", prefers=EU, prefer_for=60.0, start_deadline=30)
    await bench.later(31)
    assert await bench.ids(labels=EU) == []
    assert await bench.status("a") == "dropped"


async def test_a_firing_prefers_labels(bench: Bench) -> None:
    task = PeriodicTaskItem(kind="k", every=3600, prefers=EU, prefer_for=5.0)
    await bench.engine.operations.change_periodic(Put("p", task, "ada", is_declared=False))
    await bench.later(3601)
    assert await bench.ids() == []
    assert len(await bench.ids(labels=EU)) == 1


async def test_claims_at_other_nodes_are_woken_in_time(postgres_stores: Callable[[], Store]) -> None:
    """The third node tells when the task is open; the preferred worker at one node, the other at another."""
    first = Bench(postgres_stores)
    others = [Engine(postgres_stores(), clock=lambda: first.clock.wall, boot=lambda: first.clock.boot) for _ in "23"]
    async with first.engine, others[0] as second, others[1] as third:
        plain = asyncio.create_task(first.claim(wait=60, limit=1))
        eu = asyncio.create_task(second.claim(worker="eu", claim_id="eu", kinds=("k",), limit=1, wait=60, labels=EU))
        for node in (first.engine, second):
            await until(lambda node=node: "k" in node._long_polls._parked)  # type: ignore[misc]
        await third.tick()
        await third.schedule([NewTask(kind="k", id=task_id, prefers=EU, prefer_for=5.0) for task_id in "ab"])
        assert len((await asyncio.wait_for(eu, 30)).tasks) == 1
        await until(lambda: first.engine._long_polls._due)  # another node has told when the task is open
        assert not plain.done()
        first.clock.advance(5.1)
        first.engine._long_polls.look()  # as its timer does
        assert len((await asyncio.wait_for(plain, 30)).tasks) == 1
