"""Due tasks that the consumer moves to queues, and claims by what the messages say."""

from collections.abc import Sequence
from typing import Any

import pytest

from leasekit.server.enqueuer import MOVE, PUT_BACK
from leasekit.server.roles.enqueueing import Due, Moved
from leasekit.server.roles.gates import GateChange
from leasekit.task import Claimed, KindSettings, Ticket
from tests.server.conftest import Bench

pytestmark = pytest.mark.anyio


async def move(bench: Bench, *kinds: str, most: int = 100, without: Sequence[tuple[str, int]] = ()) -> list[Moved]:
    return await bench.engine.commit.ask(MOVE, Due(kinds or ("k",), most, without), size=1)  # type: ignore[no-any-return]


async def enqueued(bench: Bench, task_id: str, **options: Any) -> Ticket:
    """A task put and moved; what its message says."""
    await bench.put(task_id, **options)
    (task,) = await move(bench, options.get("kind", "k"))
    return ticket(task)


def ticket(task: Moved) -> Ticket:
    return Ticket(id=task.id, fence=task.fence)


async def claim(
    bench: Bench, *tickets: Ticket, claim_id: str = "by-ticket", limit: int = 10, kind: str = "k"
) -> Claimed:
    return await bench.engine.claim(worker="w", kinds=[kind], limit=limit, wait=0, claim_id=claim_id, tickets=tickets)


def ids(claimed: Claimed) -> list[str]:
    return [task.id for task in claimed.tasks]


async def test_a_due_task_is_moved_once_and_again_after_its_timeout(bench: Bench) -> None:
    await bench.put("a", enqueue_timeout=30)
    (task,) = await move(bench)
    assert (task.id, task.kind, task.priority, task.fence) == ("a", "k", 2, 0)
    assert await bench.status("a") == "enqueued"
    await bench.later(29.9)
    assert await move(bench) == []
    await bench.later(0.2)
    assert [task.id for task in await move(bench)] == ["a"]


async def test_a_task_that_is_not_due_is_not_moved(bench: Bench) -> None:
    await bench.put("a", delay=10)
    assert await move(bench) == []
    await bench.later(10)
    assert len(await move(bench)) == 1


async def test_a_ticket_is_granted_its_task_alone(bench: Bench) -> None:
    await bench.put("a", "b")
    of_a = await enqueued_both(bench)
    claimed = await claim(bench, of_a["b"])
    assert (ids(claimed), claimed.refused) == (["b"], [])
    assert await bench.status("a") == "enqueued"


async def enqueued_both(bench: Bench) -> dict[str, Ticket]:
    return {task.id: ticket(task) for task in await move(bench)}


async def test_a_message_that_comes_twice_is_of_no_use_the_second_time(bench: Bench) -> None:
    of_a = await enqueued(bench, "a")
    assert ids(await claim(bench, of_a)) == ["a"]
    again = await claim(bench, of_a, claim_id="another")
    assert (ids(again), again.refused) == ([], ["a"])


async def test_a_repeated_claim_gets_the_same_lease(bench: Bench) -> None:
    of_a = await enqueued(bench, "a")
    first, second = await claim(bench, of_a), await claim(bench, of_a)
    assert first.tasks == second.tasks != []


async def test_a_late_message_is_good_after_the_task_was_moved_again(bench: Bench) -> None:
    of_a = await enqueued(bench, "a", enqueue_timeout=10)
    await bench.later(11)
    assert len(await move(bench)) == 1
    assert ids(await claim(bench, of_a)) == ["a"]


async def test_a_ticket_of_a_task_that_has_ended_is_refused(bench: Bench) -> None:
    of_a = await enqueued(bench, "a")
    await bench.cancel("a")
    assert (await claim(bench, of_a)).refused == ["a"]
    assert await bench.status("a") == "cancelled"


async def test_a_ticket_of_a_task_that_is_unknown_is_refused(bench: Bench) -> None:
    assert (await claim(bench, Ticket(id="nobody", fence=0))).refused == ["nobody"]


async def test_a_ticket_for_another_kind_is_neither_granted_nor_refused(bench: Bench) -> None:
    of_a = await enqueued(bench, "a")
    claimed = await claim(bench, of_a, kind="other")
    assert (claimed.tasks, claimed.refused) == ([], [])


async def test_an_old_message_does_not_bring_a_retry_forward(bench: Bench) -> None:
    of_a = await enqueued(bench, "a")
    (task,) = (await claim(bench, of_a)).tasks
    await bench.settle(task, "retry", retry_after=100)
    assert (await claim(bench, of_a, claim_id="early")).refused == ["a"]
    await bench.later(100)
    (moved,) = await move(bench)
    assert moved.fence == 1
    assert ids(await claim(bench, ticket(moved), claim_id="due")) == ["a"]


async def test_an_old_message_does_not_bring_a_release_forward(bench: Bench) -> None:
    of_a = await enqueued(bench, "a")
    (task,) = (await claim(bench, of_a)).tasks
    await bench.settle(task, "release", retry_after=100)
    assert await bench.status("a") == "enqueued"
    assert (await claim(bench, of_a, claim_id="early")).refused == ["a"]


async def test_a_lease_that_expires_is_moved_with_its_new_fence(bench: Bench) -> None:
    of_a = await enqueued(bench, "a", claim_timeout=10)
    await claim(bench, of_a)
    await bench.later(11)
    (moved,) = await move(bench)
    assert moved.fence == 1
    assert (await bench.info("a")).crashes == 1


async def test_a_claim_without_tickets_does_not_take_what_is_in_a_queue(bench: Bench) -> None:
    await enqueued(bench, "a", enqueue_timeout=10)
    assert await bench.ids() == []
    await bench.later(10)
    assert await bench.ids() == ["a"]


async def test_tasks_of_a_paused_kind_are_not_moved_and_tickets_make_them_wait(bench: Bench) -> None:
    of_a = await enqueued(bench, "a")
    await gate(bench, "pause")
    assert (await claim(bench, of_a)).refused == ["a"]
    assert await move(bench) == []
    await gate(bench, "open")
    assert [task.id for task in await move(bench)] == ["a"]


async def test_a_task_in_a_queue_is_dropped_at_its_claim_if_its_kind_is_closed(bench: Bench) -> None:
    of_a = await enqueued(bench, "a")
    await gate(bench, "drop")
    assert (await claim(bench, of_a)).refused == ["a"]
    await bench.later(1)
    assert await bench.status("a") == "cancelled"


async def test_a_task_of_a_paused_collection_is_parked_at_its_claim_and_comes_back(bench: Bench) -> None:
    of_a = await enqueued(bench, "a", collection="c")
    await gate(bench, "pause", scope="collection", name="c")
    assert (await claim(bench, of_a)).refused == ["a"]
    assert (await claim(bench, of_a, claim_id="again")).refused == ["a"]
    await gate(bench, "open", scope="collection", name="c")
    await bench.later(1)
    assert [task.id for task in await move(bench)] == ["a"]


async def gate(bench: Bench, mode: str, *, scope: str = "kind", name: str = "k") -> None:
    await bench.engine.operations.set_gate(GateChange(scope, name, mode, None, None, None, "me"))


async def test_tickets_do_not_exceed_the_concurrency_of_a_kind(bench: Bench) -> None:
    await bench.engine.operations.set_kind("k", KindSettings(concurrency=1), by=None)
    await bench.put("a", "b")
    first = await move(bench, most=1)
    second = await move(bench, most=1)
    claimed = await claim(bench, *map(ticket, first + second))
    assert (len(claimed.tasks), len(claimed.refused)) == (1, 1)
    assert await move(bench) == []
    await bench.settle(claimed.tasks[0])
    assert [task.id for task in await move(bench)] == claimed.refused


async def test_tickets_do_not_exceed_the_concurrency_of_a_key(bench: Bench) -> None:
    await bench.put("a", "b", key="x")
    tickets = list((await enqueued_both(bench)).values())
    await bench.engine.operations.set_kind("k", KindSettings(key_concurrency=1), by=None)
    claimed = await claim(bench, *tickets)
    assert (ids(claimed), claimed.refused) == (["a"], ["b"])
    await bench.settle(claimed.tasks[0])
    assert [task.id for task in await move(bench)] == ["b"]


async def test_a_ticket_beyond_the_limit_of_a_claim_stays_good(bench: Bench) -> None:
    await bench.put("a", "b")
    tickets = list((await enqueued_both(bench)).values())
    claimed = await claim(bench, *tickets, limit=1)
    assert (len(claimed.tasks), claimed.refused) == (1, [])


async def test_what_a_queue_has_not_taken_is_due_again_at_once(bench: Bench) -> None:
    await bench.put("a")
    moved = await move(bench)
    assert await bench.engine.commit.ask(PUT_BACK, moved, size=1) == 1
    assert await move(bench) != []


async def test_a_task_that_was_put_back_is_not_enqueued_any_more(bench: Bench) -> None:
    await bench.put("a")
    await bench.engine.commit.ask(PUT_BACK, await move(bench), size=1)
    assert await bench.status("a") == "new"
    (task,) = (await claim(bench, Ticket(id="a", fence=0))).tasks
    await bench.settle(task, "retry", retry_after=0)
    await bench.engine.commit.ask(PUT_BACK, await move(bench), size=1)
    assert await bench.status("a") == "retriable_failure"


async def test_a_task_that_a_gate_stops_at_its_claim_is_not_enqueued_any_more(bench: Bench) -> None:
    of_a = await enqueued(bench, "a")
    await gate(bench, "pause")
    await claim(bench, of_a)
    assert await bench.status("a") == "new"


async def test_what_was_claimed_meanwhile_is_not_put_back(bench: Bench) -> None:
    await bench.put("a")
    moved = await move(bench)
    await claim(bench, ticket(moved[0]))
    assert await bench.engine.commit.ask(PUT_BACK, moved, size=1) == 0
    assert await bench.status("a") == "claimed"


async def test_lanes_that_are_left_out_do_not_hold_up_others(bench: Bench) -> None:
    await bench.put("a", priority=0)
    await bench.put("b", priority=1)
    assert [task.id for task in await move(bench, without=[("k", 0)])] == ["b"]


async def test_names_are_never_moved(bench: Bench) -> None:
    await bench.put("named:n", kind="named:n")
    assert await move(bench, "named:n") == []


async def test_tasks_with_keys_are_moved_one_of_each_key_in_turn_and_claimed(bench: Bench) -> None:
    await bench.put("a1", "a2", "a3", key="a")
    await bench.put("b1", key="b")
    assert sorted(task.id for task in await move(bench, most=2)) == ["a1", "b1"]
    rest = await move(bench)
    assert [task.id for task in rest] == ["a2", "a3"]
    assert ids(await claim(bench, *map(ticket, rest))) == ["a2", "a3"]


async def test_a_task_that_follows_another_is_not_moved_before_that_has_succeeded(bench: Bench) -> None:
    await bench.put("first")
    await bench.put("second", after=["first"])
    (moved,) = await move(bench)
    (task,) = (await claim(bench, ticket(moved))).tasks
    assert (await claim(bench, Ticket(id="second", fence=0), claim_id="early")).refused == ["second"]
    await bench.settle(task)
    assert [task.id for task in await move(bench)] == ["second"]


async def test_of_two_moves_only_one_gets_a_task(bench: Bench) -> None:
    await bench.put(*(f"t{n}" for n in range(20)))
    both = await move(bench) + await move(bench)
    assert len({task.id for task in both}) == len(both) == 20
