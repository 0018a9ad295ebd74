"""The lease through its other door, in asyncio and trio: what cancels a body, and what a cancelled body comes to."""

# ruff: noqa: PT012, ASYNC110, ASYNC251 - whole blocks are tested, facts of other threads waited for, loops blocked

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

import leasekit
from leasekit import Cancelled, Client, Fatal, Heartbeats, IdleTimeout, LeaseLost, NotHeld, Task
from leasekit.hooks import Event, Lost
from leasekit.task import NewTask, Status, TaskInfo
from leasekit.testing import faults
from leasekit.testing.clock import FakeClock
from leasekit.testing.faults import Call, Fault, Faulty, Gate
from leasekit.testing.memory import MemoryBackend, MemoryService
from tests.waiting import turns, until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def client(faulty: Faulty, clock: FakeClock, events: list[Event]) -> AsyncIterator[Client]:
    async with Client(faulty, clock=clock, hooks=[events.append]) as client:
        yield client
        faulty.clear()
        clock.advance(60)


async def let_pass(client: Client, clock: FakeClock, seconds: float) -> None:
    """Let time pass second by second, the keeper always keeping up."""
    end = clock.now() + seconds
    while clock.now() < end:
        clock.advance(min(1, end - clock.now()))
        await client.__connection__().arun(turns())


async def claimed(client: Client, **options: Any) -> Task:
    scheduled = await client.aschedule("k", **options)
    task = await anext(client.tasks("k"))
    assert task.id == scheduled.id
    return task


async def beaten(client: Client, faulty: Faulty, **options: Any) -> Task:
    """A task that was claimed, and whose first beat was acknowledged."""
    task = await claimed(client, **options)
    await until(lambda: any(call.kind == "beat" and call.is_over for call in faulty.log))
    return task


async def info(client: Client, task: Task) -> TaskInfo:
    found = await client.aget(task.id)
    assert found is not None
    return found


async def status(client: Client, task: Task) -> Status:
    return (await info(client, task)).status


# How a block ends


async def test_leaving_the_block_is_a_success_with_its_result(client: Client) -> None:
    task = await claimed(client)
    async with leasekit.lease(task) as held:
        await anyio.lowlevel.checkpoint()
        held.complete([1])
    assert (await info(client, task)).result == [1]


async def test_an_exception_is_a_retriable_failure(client: Client) -> None:
    task = await claimed(client)
    with pytest.raises(KeyError):
        async with leasekit.lease(task):
            raise KeyError("page")
    assert (await info(client, task)).error["type"] == "KeyError"
    assert await status(client, task) is Status.RETRIABLE_FAILURE


async def test_fatal_out_of_a_task_group_is_a_fatal_failure(client: Client) -> None:
    async def fail() -> None:
        raise Fatal("never")

    task = await claimed(client)
    with pytest.raises(ExceptionGroup):
        async with leasekit.lease(task), anyio.create_task_group() as group:
            group.start_soon(fail)
            await anyio.sleep_forever()
    assert await status(client, task) is Status.FATAL_FAILURE


async def test_lease_lost_out_of_a_task_group_settles_nothing(client: Client, clock: FakeClock, faulty: Faulty) -> None:
    async def watch(held: leasekit.Lease) -> None:
        while True:
            held.check()
            clock.advance(10)
            await anyio.lowlevel.checkpoint()

    task = await beaten(client, faulty)
    faulty.always("beat", faults.hang)
    with pytest.raises((ExceptionGroup, LeaseLost)):
        async with leasekit.lease(task) as held, anyio.create_task_group() as group:
            group.start_soon(watch, held)
            await anyio.sleep_forever()  # a body that ended by itself just now would be reported
    assert faulty.calls["settle"] == 0


async def test_leased_runs_an_async_function_under_the_lease_of_its_task(client: Client) -> None:
    @leasekit.leased
    async def plain(task: Task) -> str:
        await anyio.lowlevel.checkpoint()
        return f"ran {task.payload}"

    @leasekit.leased(idle_timeout=60)
    async def wants(task: Task, *, held: leasekit.Lease) -> None:
        held.complete(held.fence)

    first = await claimed(client, payload="it")
    assert await plain(first) == "ran it"
    assert (await info(client, first)).result == "ran it"
    second = await claimed(client)
    await wants(second)  # type: ignore[call-arg] # `held` is given
    assert (await info(client, second)).result == 1


async def test_a_lease_is_used_once(client: Client) -> None:
    held = leasekit.lease(await claimed(client))
    async with held:
        pass
    with pytest.raises(NotHeld):
        async with held:
            pytest.fail("it began")


async def test_who_wants_a_body_that_runs_already_does_not_make_it_deaf(
    client: Client, clock: FakeClock, faulty: Faulty
) -> None:
    """The second claim on the lease is refused, and the body of the first is cancelled on loss as before."""
    task = await beaten(client, faulty)
    with pytest.raises(LeaseLost), anyio.fail_after(20):
        async with leasekit.lease(task):
            with pytest.raises(NotHeld):
                async with leasekit.lease(task):
                    pytest.fail("it began")
            faulty.always("beat", faults.refuse)
            clock.advance(300)
            await anyio.sleep_forever()


# What cancels a body


async def test_a_body_is_cancelled_when_its_lease_is_lost_and_the_block_says_why(
    client: Client, clock: FakeClock, faulty: Faulty
) -> None:
    task = await beaten(client, faulty)
    cancelled = False
    with pytest.raises(LeaseLost, match="no beat was sent for 274 s because") as caught, anyio.fail_after(20):
        async with leasekit.lease(task):
            faulty.always("beat", faults.hang)
            clock.advance(Heartbeats().slack)
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                cancelled = True
                raise
    assert cancelled
    assert caught.value.task_id == task.id
    assert faulty.calls["settle"] == 0


async def test_a_body_is_cancelled_by_order_and_its_task_is_cancelled(
    client: Client, clock: FakeClock, faulty: Faulty
) -> None:
    task = await beaten(client, faulty)
    cleaned = False
    with pytest.raises(Cancelled), anyio.fail_after(20):
        async with leasekit.lease(task) as held:
            await client.acancel(task.id)
            clock.advance(120)
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0.01)
                assert not held.lost
                cleaned = True
    assert cleaned
    assert await status(client, task) is Status.CANCELLED


async def test_a_body_that_swallows_its_cancellation_and_finishes_is_a_success(
    client: Client, clock: FakeClock, faulty: Faulty
) -> None:
    task = await beaten(client, faulty)
    async with leasekit.lease(task) as held:
        await client.acancel(task.id)
        clock.advance(120)
        with suppress(anyio.get_cancelled_exc_class()):
            await anyio.sleep_forever()
        held.complete("all the same")
    assert (await info(client, task)).result == "all the same"


async def test_a_body_that_fails_while_it_winds_down_is_settled_as_that(
    client: Client, clock: FakeClock, faulty: Faulty
) -> None:
    task = await beaten(client, faulty)
    with pytest.raises(Fatal):
        async with leasekit.lease(task):
            await client.acancel(task.id)
            clock.advance(120)
            try:
                await anyio.sleep_forever()
            finally:
                raise Fatal("it cannot be undone")
    assert await status(client, task) is Status.FATAL_FAILURE


async def test_what_else_a_task_group_raised_is_not_lost_with_the_cancellation(
    client: Client, clock: FakeClock, faulty: Faulty
) -> None:
    """A group of our cancellation and an error: the error is what the body ended with, and the lease is let go of."""

    async def stubborn() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise ValueError("on the way out")

    task = await beaten(client, faulty)
    with pytest.raises((ExceptionGroup, Cancelled)):
        async with leasekit.lease(task), anyio.create_task_group() as group:
            group.start_soon(stubborn)
            await client.acancel(task.id)
            clock.advance(120)
            await anyio.sleep_forever()
    assert await status(client, task) is Status.CANCELLED
    await until(lambda: not len(client.__connection__().keeper))


async def test_a_group_with_our_cancellation_in_it_ends_the_lease(
    client: Client, clock: FakeClock, faulty: Faulty, anyio_backend_name: str
) -> None:
    if anyio_backend_name != "asyncio":
        pytest.skip("trio's cancellations are made by trio alone")
    task = await beaten(client, faulty)
    with pytest.raises(BaseExceptionGroup):
        async with leasekit.lease(task):
            await client.acancel(task.id)
            clock.advance(120)
            try:
                await anyio.sleep_forever()
            except BaseException as cancelled:  # noqa: BLE001 - raised again
                raise BaseExceptionGroup("both", [cancelled, ValueError()]) from None
    assert faulty.calls["settle"] == 1
    await until(lambda: not len(client.__connection__().keeper))


async def test_an_idle_body_is_cancelled_and_its_task_tried_again(
    client: Client, clock: FakeClock, faulty: Faulty
) -> None:
    task = await beaten(client, faulty)
    with pytest.raises(IdleTimeout), anyio.fail_after(20):
        async with leasekit.lease(task, idle_timeout=60) as held:
            await let_pass(client, clock, 50)
            held.progress(1)
            await let_pass(client, clock, 50)
            held.check()
            clock.advance(10)
            await anyio.sleep_forever()
    assert await status(client, task) is Status.RETRIABLE_FAILURE


async def test_an_order_that_came_before_the_body_began_cancels_it(
    client: Client, clock: FakeClock, faulty: Faulty
) -> None:
    """Not too early, and not never."""
    task = await beaten(client, faulty)
    await client.acancel(task.id)
    clock.advance(120)
    held = client.__connection__().keeper.get(task)
    assert held is not None
    await until(lambda: held.stop is Cancelled)
    with pytest.raises(Cancelled), anyio.fail_after(20):
        async with leasekit.lease(task):
            await anyio.sleep_forever()
    assert await status(client, task) is Status.CANCELLED


async def test_nothing_is_cancelled_after_the_block(client: Client, clock: FakeClock, faulty: Faulty) -> None:
    """What was told too late hits nobody."""
    task = await beaten(client, faulty)
    async with leasekit.lease(task):
        await client.acancel(task.id)
        await until(lambda: clock.sleepers)
        clock.advance(120)
        time.sleep(0.1)  # the keeper hears of it, while this loop does not get its turn
    for _ in range(20):
        await anyio.sleep(0.001)
    assert await status(client, task) is Status.SUCCESS


# Cancellation from outside


async def test_cancellation_from_outside_is_not_swallowed_and_releases_the_task(client: Client) -> None:
    task = await claimed(client)
    with anyio.CancelScope() as outside:
        async with leasekit.lease(task):
            outside.cancel()
            await anyio.sleep_forever()
    assert outside.cancelled_caught
    assert await status(client, task) is Status.ENQUEUED
    assert (await info(client, task)).attempt == 0


async def test_a_timeout_around_the_block_is_a_timeout(client: Client) -> None:
    task = await claimed(client)
    with pytest.raises(TimeoutError), anyio.fail_after(0.05):
        async with leasekit.lease(task):
            await anyio.sleep_forever()
    assert await status(client, task) is Status.ENQUEUED


async def test_a_timeout_within_the_body_is_the_bodys_own_business(client: Client) -> None:
    task = await claimed(client)
    async with leasekit.lease(task) as held:
        with anyio.move_on_after(0.01):
            await anyio.sleep_forever()
        held.complete("went on")
    assert (await info(client, task)).result == "went on"


async def test_cancelled_from_outside_and_told_at_once_is_cancelled_from_outside(
    client: Client, clock: FakeClock, faulty: Faulty
) -> None:
    task = await beaten(client, faulty)
    with anyio.CancelScope() as outside:
        async with leasekit.lease(task) as held:
            await client.acancel(task.id)
            clock.advance(120)
            with anyio.CancelScope(shield=True):
                record = client.__connection__().keeper.get(task)
                assert record is not None
                await until(lambda: record.stop is Cancelled)
            outside.cancel()
            await anyio.sleep_forever()
        pytest.fail(f"not reached, {held}")
    assert outside.cancelled_caught


async def test_being_cancelled_during_the_report_does_not_lose_it(client: Client, faulty: Faulty) -> None:
    task = await claimed(client)
    answered = Gate()
    faulty.script("settle", faults.delay(answered))

    async def report() -> None:
        async with leasekit.lease(task) as held:
            held.complete("reported")

    async with anyio.create_task_group() as group:
        group.start_soon(report)
        await until(lambda: faulty.calls["settle"] == 1)
        group.cancel_scope.cancel()
        answered.open()
    assert (await info(client, task)).result == "reported"


async def test_being_cancelled_before_the_body_begins_gives_the_task_back(client: Client, faulty: Faulty) -> None:
    async def silent(call: Call) -> Any:
        answer = await call.send()
        return type(answer)(tasks=answer.tasks, waited=None)

    faulty.script("claim", Fault("silent", silent))
    faulty.script("beat", faults.hang)
    task = await claimed(client)
    with anyio.move_on_after(0.05):
        async with leasekit.lease(task):
            pytest.fail("it began")
    with anyio.fail_after(20):
        while await status(client, task) is not Status.ENQUEUED:
            await anyio.sleep(0.002)


# Several at a time


async def test_two_leases_in_one_task_group_end_each_by_itself(
    client: Client, clock: FakeClock, faulty: Faulty
) -> None:
    ended: dict[str, BaseException | None] = {}

    async def run(task: Task) -> None:
        try:
            async with leasekit.lease(task):
                await anyio.sleep_forever()
        except Cancelled as cancelled:
            ended[task.id] = cancelled

    first, second = await beaten(client, faulty), await claimed(client)
    async with anyio.create_task_group() as group:
        group.start_soon(run, first)
        group.start_soon(run, second)
        await anyio.wait_all_tasks_blocked()
        await client.acancel(first.id)
        await let_pass(client, clock, 125)
        await until(lambda: ended)
        assert set(ended) == {first.id}
        group.cancel_scope.cancel()
    assert await status(client, first) is Status.CANCELLED
    assert await status(client, second) is Status.ENQUEUED


async def test_the_loss_of_the_outer_lease_ends_the_inner_one(client: Client, clock: FakeClock, faulty: Faulty) -> None:
    outer, inner = await beaten(client, faulty, id="outer"), await claimed(client, id="inner")
    with pytest.raises(Cancelled), anyio.fail_after(20):
        async with leasekit.lease(outer), leasekit.lease(inner):
            await client.acancel(outer.id)
            clock.advance(120)
            await anyio.sleep_forever()
    assert await status(client, outer) is Status.CANCELLED
    assert await status(client, inner) is Status.ENQUEUED


async def test_the_cancellation_of_the_inner_lease_is_a_failure_of_the_outer_one(
    client: Client, clock: FakeClock, faulty: Faulty
) -> None:
    outer, inner = await beaten(client, faulty, id="outer"), await claimed(client, id="inner")
    await let_pass(client, clock, 2)
    with pytest.raises(Cancelled), anyio.fail_after(20):
        async with leasekit.lease(outer), leasekit.lease(inner):
            await client.acancel(inner.id)
            await let_pass(client, clock, 120)
            await anyio.sleep_forever()
    assert await status(client, inner) is Status.CANCELLED
    assert await status(client, outer) is Status.RETRIABLE_FAILURE


async def test_a_lease_handed_to_a_task_group_is_not_given_back_by_the_loop(client: Client) -> None:
    done: list[str] = []

    async def run(held: leasekit.Lease) -> None:
        async with held:
            await anyio.lowlevel.checkpoint()
            done.append(held.task.id)

    ids = [(await client.aschedule("k")).id for _ in range(5)]
    async with anyio.create_task_group() as group:
        async for task in client.tasks("k", until_idle=0):
            group.start_soon(run, leasekit.lease(task))
    assert sorted(done) == sorted(ids)
    assert {(await client.aget(task_id)).attempt for task_id in ids} == {1}  # type: ignore[union-attr]


# With asyncio's own tools


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancelled_asyncio_task_stays_cancelled(client: Client) -> None:
    task = await claimed(client)
    began = asyncio.Event()

    async def run() -> None:
        async with leasekit.lease(task):
            began.set()
            await asyncio.sleep(3600)

    running = asyncio.create_task(run())
    await began.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await status(client, task) is Status.ENQUEUED


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_loss_ends_an_asyncio_task_group_in_the_body(client: Client, clock: FakeClock, faulty: Faulty) -> None:
    task = await beaten(client, faulty)
    with pytest.raises(LeaseLost):
        async with asyncio.timeout(20), leasekit.lease(task), asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(3600))
            faulty.always("beat", faults.refuse)
            clock.advance(300)
            await asyncio.sleep(3600)
    current = asyncio.current_task()
    assert current is not None
    assert current.cancelling() == 0


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_asyncio_timeout_around_the_block_is_a_timeout(client: Client) -> None:
    task = await claimed(client)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), leasekit.lease(task):
            await asyncio.sleep(3600)
    assert await status(client, task) is Status.ENQUEUED


# While the loop is blocked


async def test_beats_go_on_while_the_users_loop_is_blocked() -> None:
    """The keeper has a thread and a loop of its own."""
    events: list[Event] = []
    async with Client(MemoryBackend(MemoryService(), worker="w"), hooks=[events.append]) as client:
        task = await claimed(client, claim_timeout=2, heartbeat_timeout=2)
        async with leasekit.lease(task) as held:
            time.sleep(2.5)
            held.check()
            await anyio.lowlevel.checkpoint()
        assert (await info(client, task)).history[0].outcome == "success"
    assert not [event for event in events if isinstance(event, Lost)]


async def test_a_body_that_was_blocked_beyond_its_loss_is_cancelled_as_soon_as_it_lets_go(
    client: Client, clock: FakeClock, faulty: Faulty
) -> None:
    task = await beaten(client, faulty)
    reached = False
    with pytest.raises(LeaseLost):
        async with leasekit.lease(task) as held:
            faulty.always("beat", faults.refuse)
            clock.advance(300)
            while client.__connection__().keeper.get(task) is not None and not held._run.held.reason:
                time.sleep(0.002)
            await anyio.sleep(3600)
            reached = True
    assert not reached


async def test_a_body_in_a_worker_thread_may_use_its_lease(client: Client, clock: FakeClock, faulty: Faulty) -> None:
    task = await beaten(client, faulty)
    async with leasekit.lease(task) as held:
        await anyio.to_thread.run_sync(held.progress, 5)
        await anyio.to_thread.run_sync(held.check)
    assert (await info(client, task)).progress == 5


# Blocks that are left elsewhere than they were entered


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # trio ends the program of who does that
@pytest.mark.parametrize(
    ("error", "expected"),
    [(None, "success"), (GeneratorExit(), "enqueued"), (ValueError("no"), "retriable_failure")],
    ids=["well", "abandoned", "failed"],
)
async def test_a_block_that_is_left_in_another_task_ends_as_it_ended(
    client: Client, error: BaseException | None, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    held = leasekit.lease(task := await claimed(client))
    await asyncio.create_task(held.__aenter__())
    if error is None:
        held.complete("done")
    await held.__aexit__(None if error is None else type(error), error, None)
    info = await client.aget(task.id)
    assert info is not None
    assert info.status == expected
    assert "could not have been cancelled" in caplog.text


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_blocks_that_are_not_left_in_nested_order_end_as_they_ended(client: Client) -> None:
    ids = [one.id for one in await client.aschedule_all([NewTask(kind="k", max_attempts=1)] * 2)]
    first, second = leasekit.lease(await anext(client.tasks("k"))), leasekit.lease(await anext(client.tasks("k")))
    await first.__aenter__()
    await second.__aenter__()
    await first.__aexit__(None, None, None)
    await second.__aexit__(None, None, None)
    infos = [await client.aget(task_id) for task_id in ids]
    assert [info and info.status for info in infos] == [Status.SUCCESS] * 2


async def test_the_stack_of_async_code_is_found_while_it_waits(client: Client) -> None:
    """Whatever its event loop does meanwhile; and leasekit keeps no coroutine alive for that."""
    async with leasekit.lease(await claimed(client)) as held:
        coroutine = held._run.held.coroutine
        assert coroutine is not None
        assert coroutine() is anyio.get_current_task().coro
        assert held._run.held.thread == threading.get_ident()
