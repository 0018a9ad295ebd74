"""The faults do what they say, and the wrapper says what it did."""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import anyio
import pytest

from leasekit.backend import Backend, Capabilities, Scheduler
from leasekit.errors import ProtocolError, Throttled, Unavailable
from leasekit.task import Beat, NewTask, Settlement, Status, Task, Verdict
from leasekit.testing import faults
from leasekit.testing.clock import FakeClock
from leasekit.testing.faults import Call, Fault, Faulty, Gate
from leasekit.testing.memory import MemoryBackend

pytestmark = pytest.mark.anyio


@pytest.fixture
def faulty(memory: MemoryBackend, clock: FakeClock) -> Faulty:
    return Faulty(memory, random=Random(3), sleep=clock.sleep)


@pytest.fixture
async def tasks(memory: MemoryBackend) -> list[Task]:
    await memory.schedule([NewTask(kind="k", id=f"t{n}") for n in range(4)])
    return (await memory.claim(["k"], limit=4, wait=0, claim_id="c")).tasks


def beats(tasks: list[Task]) -> list[Beat]:
    return [Beat(id=task.id, token=task.token) for task in tasks]


def results(tasks: list[Task]) -> list[Settlement]:
    return [Settlement(id=task.id, token=task.token, outcome="success") for task in tasks]


async def status(memory: MemoryBackend, task: Task) -> Status:
    info = await memory.get(task.id)
    assert info is not None
    return info.status


def words(verdicts: list[Verdict]) -> list[str]:
    return [verdict.verdict for verdict in verdicts]


# Rules


async def test_without_rules_all_goes_through(faulty: Faulty, tasks: list[Task]) -> None:
    assert words(await faulty.beat(beats(tasks))) == ["renewed"] * 4
    assert words(await faulty.settle(results(tasks))) == ["settled"] * 4
    await faulty.schedule([NewTask(kind="k", id="x")])
    assert (await faulty.claim(["k"], limit=1, wait=0, claim_id="x")).tasks[0].id == "x"
    assert (await faulty.list_tasks(kind="k", limit=1)).tasks[0].id == "t0"
    assert await faulty.get("nobody") is None
    assert words(await faulty.cancel(["x"])) == ["cancel_requested"]
    assert "k" in (await faulty.stats()).kinds
    assert faulty.fired == {"ok": 8}


async def test_a_script_is_followed_once_in_order(faulty: Faulty, tasks: list[Task]) -> None:
    faulty.script("beat", faults.refuse, faults.ok)
    faulty.script("beat", faults.garble)
    with pytest.raises(Unavailable):
        await faulty.beat(beats(tasks))
    await faulty.beat(beats(tasks))
    with pytest.raises(ProtocolError):
        await faulty.beat(beats(tasks))
    await faulty.beat(beats(tasks))
    assert faulty.calls == {"beat": 4}
    assert faulty.fired == {"refuse": 1, "ok": 2, "garble": 1}


async def test_a_script_is_for_its_kind_only(faulty: Faulty, tasks: list[Task]) -> None:
    faulty.script("beat", faults.refuse)
    await faulty.settle(results(tasks))
    with pytest.raises(Unavailable):
        await faulty.beat(beats(tasks))


async def test_always_is_until_told_otherwise(faulty: Faulty, tasks: list[Task]) -> None:
    faulty.always("beat", faults.drop)
    faulty.script("beat", faults.ok)
    await faulty.beat(beats(tasks))
    for _ in range(3):
        with pytest.raises(Unavailable):
            await faulty.beat(beats(tasks))
    faulty.clear()
    await faulty.beat(beats(tasks))


async def test_a_star_is_for_all_kinds_without_a_rule_of_their_own(faulty: Faulty, tasks: list[Task]) -> None:
    faulty.always("*", faults.refuse)
    faulty.always("beat", faults.ok)
    await faulty.beat(beats(tasks))
    with pytest.raises(Unavailable):
        await faulty.settle(results(tasks))


async def test_chance_is_replayed_by_its_seed(memory: MemoryBackend, tasks: list[Task]) -> None:
    async def history(seed: int) -> list[str]:
        faulty = Faulty(memory, random=Random(seed))
        faulty.sometimes("beat", {faults.repeat: 0.3, faults.shuffle: 0.3})
        for _ in range(50):
            await faulty.beat(beats(tasks))
        return [call.fault for call in faulty.log]

    assert await history(1) == await history(1) != await history(2)
    assert set(await history(1)) == {"ok", "repeat", "shuffle"}


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (lambda f: f.script("heartbeat", faults.ok), "'heartbeat': use beat, cancel"),
        (lambda f: f.script("claim", faults.shuffle), "cannot meet a claim: only beat"),
        (lambda f: f.sometimes("beat", {faults.drop: 0.7, faults.repeat: 0.7}), "at most 1 in all"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(faulty: Faulty, rule: Callable[[Faulty], None], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rule(faulty)


async def test_a_fault_of_ones_own(faulty: Faulty, tasks: list[Task]) -> None:
    async def half(call: Call) -> Any:
        return await call.send(call.items[:2])

    faulty.script("beat", Fault("half", half))
    assert len(await faulty.beat(beats(tasks))) == 2
    assert faulty.fired["half"] == 1


# Faults


@pytest.mark.parametrize("fault", [faults.refuse, faults.drop], ids=lambda fault: fault.name)
async def test_a_request_that_is_lost_is_not_applied(
    faulty: Faulty, memory: MemoryBackend, tasks: list[Task], fault: Fault
) -> None:
    faulty.script("settle", fault)
    with pytest.raises(Unavailable):
        await faulty.settle(results(tasks))
    assert await status(memory, tasks[0]) is Status.CLAIMED


@pytest.mark.parametrize("fault", [faults.lose_answer, faults.garble], ids=lambda fault: fault.name)
async def test_a_request_whose_answer_is_lost_is_applied(
    faulty: Faulty, memory: MemoryBackend, tasks: list[Task], fault: Fault
) -> None:
    faulty.script("settle", fault)
    with pytest.raises(Unavailable):
        await faulty.settle(results(tasks))
    assert await status(memory, tasks[0]) is Status.SUCCESS


async def test_a_claim_whose_answer_was_lost_is_got_by_its_repeat(faulty: Faulty) -> None:
    await faulty.schedule([NewTask(kind="k")])
    faulty.script("claim", faults.lose_answer)
    with pytest.raises(Unavailable):
        await faulty.claim(["k"], limit=1, wait=0, claim_id="c")
    assert len((await faulty.claim(["k"], limit=1, wait=0, claim_id="c")).tasks) == 1


async def test_what_hangs_fails_when_released(faulty: Faulty, memory: MemoryBackend, tasks: list[Task]) -> None:
    faulty.always("settle", faults.hang)
    settling = asyncio.create_task(faulty.settle(results(tasks)))
    call = await faulty.next("settle")
    assert not call.is_over
    faulty.release()
    with pytest.raises(Unavailable):
        await settling
    assert await status(memory, tasks[0]) is Status.CLAIMED
    assert not (await _begun(faulty, faulty.settle(results(tasks)))).is_over  # the next one hangs again
    faulty.clear()


async def test_what_hangs_ends_with_a_caller_that_gives_up(faulty: Faulty, tasks: list[Task]) -> None:
    faulty.script("beat", faults.hang)
    beating = asyncio.create_task(faulty.beat(beats(tasks)))
    call = await faulty.next("beat")
    beating.cancel()
    await call.over()
    assert isinstance(call.error, asyncio.CancelledError)


async def test_a_delayed_request_is_applied_late(
    faulty: Faulty, memory: MemoryBackend, tasks: list[Task], clock: FakeClock
) -> None:
    faulty.script("settle", faults.delay(3))
    settling = asyncio.create_task(faulty.settle(results(tasks)))
    await clock.asleep()
    assert await status(memory, tasks[0]) is Status.CLAIMED
    clock.advance(3)
    assert words(await settling) == ["settled"] * 4


async def test_a_delayed_answer_is_of_a_request_that_was_applied_at_once(
    faulty: Faulty, memory: MemoryBackend, tasks: list[Task]
) -> None:
    gate = Gate()
    faulty.script("settle", faults.delay_answer(gate))
    settling = asyncio.create_task(faulty.settle(results(tasks)))
    await anyio.wait_all_tasks_blocked()
    assert await status(memory, tasks[0]) is Status.SUCCESS
    assert not settling.done()
    gate.open()
    assert words(await settling) == ["settled"] * 4


async def test_a_late_request_arrives_after_its_caller_gave_up(
    faulty: Faulty, memory: MemoryBackend, tasks: list[Task], clock: FakeClock
) -> None:
    faulty.script("settle", faults.late(60))
    with pytest.raises(Unavailable):
        await faulty.settle(results(tasks))
    await clock.asleep()
    assert await status(memory, tasks[0]) is Status.CLAIMED
    clock.advance(60)
    await anyio.wait_all_tasks_blocked()
    assert await status(memory, tasks[0]) is Status.SUCCESS


async def test_closing_gives_up_what_is_late(faulty: Faulty, memory: MemoryBackend, tasks: list[Task]) -> None:
    gate = Gate()
    faulty.script("settle", faults.late(gate))
    with pytest.raises(Unavailable):
        await faulty.settle(results(tasks))
    await faulty.aclose()
    gate.open()
    assert await status(memory, tasks[0]) is Status.CLAIMED


async def test_a_repeated_request_is_answered_the_second_time(tasks: list[Task]) -> None:
    class Counting:
        capabilities = Capabilities()
        sent = 0

        async def beat(self, beats: list[Beat]) -> list[Verdict]:
            self.sent += 1
            return [Verdict(id=beat.id, verdict="renewed", ttl=self.sent) for beat in beats]

    counting: Any = Counting()
    faulty = Faulty(counting)
    faulty.script("beat", faults.repeat)
    assert [verdict.ttl for verdict in await faulty.beat(beats(tasks[:1]))] == [2]


async def test_an_old_beat_arrives_again_after_the_result(
    faulty: Faulty, memory: MemoryBackend, tasks: list[Task]
) -> None:
    await faulty.beat(beats(tasks))
    faulty.script("settle", faults.replay("beat"))
    assert words(await faulty.settle(results(tasks))) == ["settled"] * 4
    assert words(await faulty.again(faulty.log[0])) == ["gone"] * 4
    assert await status(memory, tasks[0]) is Status.SUCCESS


async def test_a_throttled_call_says_when_to_come_back(faulty: Faulty, tasks: list[Task]) -> None:
    faulty.script("beat", faults.throttle(7))
    with pytest.raises(Throttled) as throttled:
        await faulty.beat(beats(tasks))
    assert throttled.value.retry_after == 7


async def test_a_share_of_the_items_is_throttled_and_the_rest_goes_through(
    faulty: Faulty, memory: MemoryBackend, tasks: list[Task]
) -> None:
    faulty.script("settle", faults.throttle_items([1, 3], retry_after=2), faults.fail_items(1.0))
    verdicts = await faulty.settle(results(tasks))
    assert words(verdicts) == ["settled", "throttled", "settled", "throttled"]
    assert [verdict.id for verdict in verdicts] == [task.id for task in tasks]
    assert verdicts[1].retry_after == 2
    assert await status(memory, tasks[1]) is Status.CLAIMED
    assert words(await faulty.settle(results(tasks))) == ["failed"] * 4


async def test_nonsense_is_made_of_the_true_answer(faulty: Faulty, tasks: list[Task]) -> None:
    faulty.script("beat", faults.shorten, faults.lengthen, faults.shuffle, faults.misspell)
    ids = [task.id for task in tasks]
    short, long, shuffled, misspelt = [await faulty.beat(beats(tasks)) for _ in range(4)]
    assert [verdict.id for verdict in short] == ids[:-1]
    assert [verdict.id for verdict in long] == [*ids, ids[-1]]
    assert [verdict.id for verdict in shuffled] == [*ids[1:], ids[0]]
    assert words(misspelt) == ["perhaps"] * 4


async def test_what_is_stolen_is_gone_at_the_service_and_somebody_else_has_it(
    faulty: Faulty, memory: MemoryBackend, tasks: list[Task]
) -> None:
    faulty.script("beat", faults.steal)
    assert [verdict.reason for verdict in await faulty.beat(beats(tasks[:2]))] == ["taken", "taken"]
    assert words(await faulty.beat(beats(tasks))) == ["gone", "gone", "renewed", "renewed"]
    stolen = await memory.get(tasks[0].id)
    assert stolen is not None
    assert (stolen.status, stolen.worker, stolen.fence, stolen.crashes) == (Status.CLAIMED, "thief", 2, 1)


async def test_a_result_comes_too_late_for_what_was_stolen(
    faulty: Faulty, memory: MemoryBackend, tasks: list[Task]
) -> None:
    faulty.script("settle", faults.steal)
    assert words(await faulty.settle(results(tasks))) == ["gone"] * 4
    assert await status(memory, tasks[0]) is Status.CLAIMED


def test_only_where_the_backend_lets_itself_be_robbed() -> None:
    bare: Any = object.__new__(type("Bare", (), {"capabilities": Capabilities()}))
    with pytest.raises(ValueError, match=r"needs a backend with steal\(\)"):
        Faulty(bare).always("*", faults.steal)


# Facts


async def test_next_returns_every_call_once_also_those_made_before(faulty: Faulty, tasks: list[Task]) -> None:
    await faulty.beat(beats(tasks[:1]))
    await faulty.beat(beats(tasks[1:]))
    first, second = await faulty.next("beat"), await faulty.next("beat")
    assert [item.id for item in first.items] == ["t0"]
    assert [item.id for item in second.items] == ["t1", "t2", "t3"]
    third = asyncio.create_task(faulty.next("beat"))
    await asyncio.sleep(0)
    assert not third.done()
    await faulty.beat(beats(tasks))
    assert (await third).answer is not None


async def test_facts_are_seen_from_another_loop(faulty: Faulty, tasks: list[Task]) -> None:
    seeing = asyncio.create_task(asyncio.to_thread(asyncio.run, faulty.until(lambda: faulty.calls["beat"] == 2)))
    await faulty.beat(beats(tasks))
    await faulty.beat(beats(tasks))
    async with asyncio.timeout(60):
        await seeing


async def test_a_batch_is_remembered_as_it_was(faulty: Faulty, tasks: list[Task]) -> None:
    batch = beats(tasks)
    await faulty.beat(batch)
    batch.clear()
    assert len(faulty.log[0].items) == 4


# What it is


def test_it_is_a_scheduler_where_the_wrapped_one_is(faulty: Faulty, memory: MemoryBackend) -> None:
    class Bare:
        capabilities = Capabilities(max_batch=7)
        claim = beat = settle = aclose = MemoryBackend.beat

    bare: Any = Bare()
    backend: Backend = Faulty(bare)
    assert isinstance(faulty, Scheduler)
    assert not isinstance(backend, Scheduler)
    assert (faulty.capabilities, backend.capabilities.max_batch) == (memory.capabilities, 7)


async def _begun(faulty: Faulty, request: Any) -> Call:
    asyncio.ensure_future(request).add_done_callback(lambda done: done.exception())
    return await faulty.next("settle")
