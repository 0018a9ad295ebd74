"""The client: claims that are given back, loops that end, calls that are repeated, and letting go."""

# ruff: noqa: PT012, ASYNC110 - what a whole block raises is tested here, and facts of other threads are waited for

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest

import leasekit
from leasekit import Client, ConfigError, KindSettings, LeaseLost, NewTask, Refused, Task, Throttled, Unavailable
from leasekit._driver.thread import NAME
from leasekit.backend import Capabilities
from leasekit.errors import Closed, LeasekitError
from leasekit.hooks import CapacityExceeded, Claimed, Event, Lost, Renewed
from leasekit.periodic import PeriodicTask
from leasekit.task import Purged, Stats, Status
from leasekit.testing import faults
from leasekit.testing.clock import FakeClock
from leasekit.testing.faults import Call, Fault, Faulty, Gate
from leasekit.testing.memory import MemoryBackend, MemoryService
from tests.sampling import slow_after
from tests.waiting import eventually, interrupting, until


def reaches(count: int, number: Callable[[], int]) -> None:
    eventually(lambda: number() >= count)


def status(client: Client, task_id: str) -> Status:
    found = client.get(task_id)
    assert found is not None
    return found.status


def drivers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


@pytest.mark.parametrize("nothing", [None, ""])
def test_a_client_of_no_service_is_refused_at_once(nothing: Any) -> None:
    with pytest.raises(ConfigError, match="which service"):
        leasekit.connect(nothing)


# Claiming


def test_tasks_come_one_at_a_time_until_it_is_quiet(client: Client) -> None:
    ids = [client.schedule("k", n).id for n in range(3)]
    seen: list[str] = []
    for task in client.tasks("k", until_idle=0):
        with leasekit.lease(task):
            seen.append(task.id)
    assert seen == ids


def test_until_idle_waits_for_so_long_by_the_clock(client: Client, clock: FakeClock, faulty: Faulty) -> None:
    ended: list[float] = []
    thread = threading.Thread(target=lambda: ended.append(len(list(client.tasks("k", until_idle=50)))))
    thread.start()
    for _ in range(9):
        eventually(lambda: clock.sleepers >= 2)  # the keeper, and the claim
        clock.advance(5)
    eventually(lambda: clock.sleepers >= 2)
    assert not ended
    clock.advance(5)
    thread.join(20)
    assert ended == [0]


def test_tasks_of_no_kind_are_refused(client: Client) -> None:
    with pytest.raises(ConfigError, match="got no kind"):
        client.tasks()


def test_tasks_of_more_kinds_than_a_claim_may_have_are_refused(client: Client) -> None:
    client.tasks(*(f"k{n}" for n in range(100)))
    with pytest.raises(ConfigError, match="101 kinds: a claim has 100 at most"):
        client.tasks(*(f"k{n}" for n in range(101)))


def test_a_claim_serves_several_kinds(client: Client) -> None:
    client.schedule("a")
    client.schedule("b")
    tasks = client.tasks("b", "a")
    first = leasekit.lease(next(tasks))
    assert {first.task.kind, next(tasks).kind} == {"a", "b"}


def test_what_was_not_leased_is_given_back_at_the_next_step(client: Client, faulty: Faulty) -> None:
    task = client.schedule("k").id
    tasks = client.tasks("k", until_idle=0)
    assert [(next(tasks).id, next(tasks).fence) for _ in range(3)] == [(task, fence) for fence in (2, 4, 6)]
    assert next(tasks).attempt == 1


def test_what_was_leased_in_another_thread_is_not_given_back(client: Client) -> None:
    """`lease(task)` alone reserves it."""
    for _ in range(5):
        client.schedule("k")
    go = threading.Event()
    runs: list[str] = []

    def run(held: leasekit.Lease) -> None:
        go.wait(20)
        with held:
            runs.append(held.task.id)

    with ThreadPoolExecutor() as pool:
        for task in client.tasks("k", until_idle=0):
            pool.submit(run, leasekit.lease(task))
        go.set()
    assert len(set(runs)) == len(runs) == 5


def test_a_claimed_task_is_beaten_before_it_is_leased(client: Client, clock: FakeClock, events: list[Event]) -> None:
    client.schedule("k")
    task = next(client.tasks("k"))
    for count in range(1, 6):
        reaches(count, lambda: sum(isinstance(event, Renewed) for event in events))
        clock.advance(120)
    with leasekit.lease(task) as held:
        held.check()


def test_a_claim_whose_answer_was_lost_is_repeated_under_its_id_with_trust_from_the_first_send(
    client: Client, clock: FakeClock, faulty: Faulty
) -> None:
    """No task lies about for a ttl, and no trust is bought by asking again."""

    async def lose(call: Call) -> Any:
        await call.send()
        clock.advance(100)
        raise Unavailable("the answer was lost")

    client.schedule("k")
    faulty.script("claim", Fault("lose", lose))
    faulty.always("beat", faults.hang)
    task = next(client.tasks("k"))
    claims = [call for call in faulty.log if call.kind == "claim"]
    assert len({call.options["claim_id"] for call in claims}) == 1
    assert task.fence == 1
    with leasekit.lease(task) as held:
        assert held.remaining() == pytest.approx(client.heartbeats.slack - 100)


def test_every_claim_has_an_id_of_its_own(client: Client, faulty: Faulty) -> None:
    client.schedule("k")
    client.schedule("k")
    leases = [leasekit.lease(task) for task in client.tasks("k", until_idle=0)]
    assert len(leases) == 2
    ids = [call.options["claim_id"] for call in faulty.log if call.kind == "claim"]
    assert len(set(ids)) == len(ids) == 3


def test_what_an_adapter_lets_through_is_tried_again(client: Client, faulty: Faulty) -> None:
    async def stumble(call: Call) -> Any:
        raise ZeroDivisionError

    async def quit_(call: Call) -> Any:
        raise SystemExit

    faulty.script("claim", Fault("stumble", stumble), faults.garble, Fault("quit", quit_))
    client.schedule("k")
    assert next(client.tasks("k")).fence == 1


@pytest.mark.anyio
async def test_a_claim_is_repeated_whichever_loop_the_user_has(service: MemoryService, clock: FakeClock) -> None:
    """The driver's is asyncio's also where trio asks."""
    faulty = Faulty(MemoryBackend(service, worker="w"), sleep=clock.sleep)
    async with Client(faulty, clock=clock) as client:
        await client.aschedule("k")
        faulty.script("claim", faults.refuse, faults.drop)
        assert (await anext(client.tasks("k"))).fence == 1


def test_a_service_that_lies_about_its_wait_buys_no_trust(client: Client, faulty: Faulty) -> None:
    """No grant is later than its answer."""

    async def lie(call: Call) -> Any:
        answer = await call.send()
        return type(answer)(tasks=answer.tasks, waited=1e9)

    client.schedule("k")
    faulty.script("claim", Fault("lie", lie))
    with leasekit.lease(next(client.tasks("k"))) as held:
        assert held.remaining() == pytest.approx(client.heartbeats.slack)


def test_ctrl_c_while_waiting_for_a_task_ends_the_wait(client: Client, faulty: Faulty) -> None:
    with pytest.raises(KeyboardInterrupt), interrupting(lambda: faulty.calls["claim"] == 1):
        next(client.tasks("k"))
    task = client.schedule("k").id
    eventually(lambda: faulty.calls["claim"] == 2)
    assert next(client.tasks("k")).id == task


def test_what_was_granted_to_an_interrupted_claim_is_given_back(client: Client, faulty: Faulty) -> None:
    """A pending fetch must not take what nobody will run."""
    task = client.schedule("k").id
    faulty.script("claim", faults.delay_answer(Gate()))
    with pytest.raises(KeyboardInterrupt), interrupting(lambda: status(client, task) is Status.CLAIMED):
        next(client.tasks("k"))
    eventually(lambda: status(client, task) is Status.ENQUEUED)
    assert not len(client.__connection__().keeper)


def test_what_was_granted_at_the_very_moment_of_the_interruption_is_given_back(
    client: Client, faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = client.schedule("k").id
    connection = client.__connection__()

    def interrupted(work: Any) -> Any:
        connection.driver.submit(work).result()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(connection, "run", interrupted)
        next(client.tasks("k"))
    eventually(lambda: status(client, task) is Status.ENQUEUED)


def test_a_service_that_forgets_claims_is_asked_to_the_end_by_an_interrupted_one(
    service: MemoryService, clock: FakeClock
) -> None:
    """Only the call that was granted the tasks can say which they were."""
    faulty = Faulty(MemoryBackend(service, worker="w"), sleep=clock.sleep)
    faulty.capabilities = Capabilities(remembers_claims=False)
    with Client(faulty, clock=clock) as client:
        task = client.schedule("k").id
        answered = Gate()
        faulty.script("claim", faults.delay_answer(answered))
        with pytest.raises(KeyboardInterrupt), interrupting(lambda: status(client, task) is Status.CLAIMED):
            next(client.tasks("k"))
        answered.open()
        eventually(lambda: status(client, task) is Status.ENQUEUED)
        assert faulty.calls["claim"] == 1


def test_an_adapter_that_keeps_what_a_claim_was_granted_is_not_asked_to_the_end(service: MemoryService) -> None:
    """A long poll of a minute must not hold up closing."""
    asked, cancelled = threading.Event(), threading.Event()

    class Patient(MemoryBackend):
        capabilities = Capabilities(remembers_claims=False, keeps_claims=True)

        async def claim(self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str, **more: Any) -> Any:
            asked.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise
            raise AssertionError

    with Client(Patient(service, worker="w")) as client:
        with pytest.raises(KeyboardInterrupt), interrupting(asked.is_set):
            next(client.tasks("k"))
        assert cancelled.wait(20)


@pytest.mark.anyio
async def test_a_cancelled_loop_gives_back_what_it_may_have_been_granted(
    service: MemoryService, clock: FakeClock
) -> None:
    faulty = Faulty(MemoryBackend(service, worker="w"), sleep=clock.sleep)
    async with Client(faulty, clock=clock) as client:
        task = (await client.aschedule("k")).id
        faulty.script("claim", faults.delay_answer(Gate()))
        async with anyio.create_task_group() as group:
            group.start_soon(client.tasks("k").__anext__)
            with anyio.fail_after(20):
                while (await client.aget(task)).status is not Status.CLAIMED:  # type: ignore[union-attr]
                    await anyio.sleep(0.002)
            group.cancel_scope.cancel()
        with anyio.fail_after(20):
            while (await client.aget(task)).status is not Status.ENQUEUED:  # type: ignore[union-attr]
                await anyio.sleep(0.002)


def test_a_task_whose_ttl_is_too_short_to_be_kept_is_left_alone(client: Client, faulty: Faulty) -> None:
    async def hurry(call: Call) -> Any:
        answer = await call.send()
        return type(answer)(tasks=[Task(id="t", kind="k", token="x", ttl=0.5)], waited=0.0)

    faulty.script("claim", Fault("hurry", hurry))
    assert list(client.tasks("k", until_idle=0)) == []


def test_more_leases_than_can_beat_are_told_of(clock: FakeClock, service: MemoryService) -> None:
    """Capacity is a number, and going beyond it an event."""
    events: list[Event] = []
    heartbeats = leasekit.Heartbeats(ttl=300, cycle=3, rate=1, batch=1)
    with Client(
        MemoryBackend(service, worker="w"), clock=clock, heartbeats=heartbeats, hooks=[events.append]
    ) as client:
        client.schedule_all([NewTask(kind="k") for _ in range(5)])
        leases = [leasekit.lease(next(client.tasks("k"))) for _ in range(5)]
        told = [event for event in events if isinstance(event, CapacityExceeded)]
        assert [(event.held, event.capacity) for event in told] == [(4, 3)]
        del leases


# Calls


def test_scheduling_is_repeated_under_the_same_id_while_the_service_is_away(client: Client, faulty: Faulty) -> None:
    faulty.script("schedule", faults.lose_answer, faults.refuse, faults.throttle())
    scheduled = client.schedule("k")
    assert not scheduled.created  # the first, whose answer was lost, has made it
    assert len(client.list_tasks().tasks) == 1


def test_a_refusal_is_not_repeated(client: Client, faulty: Faulty) -> None:
    with pytest.raises(Refused):
        client.schedule("k", object())
    assert faulty.calls["schedule"] == 1


def test_a_service_that_stays_away_is_given_up(client: Client, faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasekit._driver.retrying._RETRY_FOR", 0.05)
    faulty.always("schedule", faults.refuse)
    with pytest.raises(Unavailable):
        client.schedule("k")
    faulty.always("schedule", faults.throttle(0.01))
    with pytest.raises(Throttled):
        client.schedule("k")


def test_a_service_that_hangs_is_given_up(client: Client, faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasekit._driver.retrying._RETRY_FOR", 0.05)
    faulty.always("get", faults.hang)
    with pytest.raises(Unavailable, match="no answer"):
        client.get("t")


def test_a_backend_that_accepts_no_work_says_so(service: MemoryService) -> None:
    class Hands:
        capabilities = Capabilities()
        claim = beat = settle = aclose = MemoryBackend.aclose

    with Client(Hands()) as client, pytest.raises(LeasekitError, match="schedule at the service"):  # type: ignore[arg-type]
        client.schedule("k")


@pytest.mark.anyio
async def test_a_batch_of_any_length_is_scheduled(service: MemoryService) -> None:
    async with Client(MemoryBackend(service, worker="w")) as client:
        for schedule in (client.aschedule_all, lambda tasks: anyio.to_thread.run_sync(client.schedule_all, tasks)):
            tasks = [NewTask(kind="k", payload=n) for n in range(2500)]
            answers = await schedule(tasks)
            assert all(answer.created for answer in answers)
            assert len({answer.id for answer in answers}) == 2500
            last = await client.aget(answers[-1].id)
            assert last is not None
            assert last.payload == 2499


def test_a_refusal_counts_positions_from_the_begin_of_the_whole_batch(client: Client) -> None:
    tasks = [NewTask(kind="k") for _ in range(1500)]
    tasks[1200] = NewTask(kind="k", collection="x" * 1000)
    with pytest.raises(Refused, match=r"^item 1200 .*\(the 1,000 tasks before this part are scheduled\)$") as refused:
        client.schedule_all(tasks)
    assert [error["item"] for error in refused.value.errors] == [1200]
    assert client.stats().kinds == {"k": {"new": 1000}}


@pytest.mark.anyio
async def test_every_method_has_two_doors(service: MemoryService) -> None:
    async with Client(MemoryBackend(service, worker="w")) as client:
        task = (await client.aschedule("k", 1)).id
        assert (await client.aget(task)).payload == 1  # type: ignore[union-attr]
        assert [found.id for found in (await client.alist_tasks(kind="k")).tasks] == [task]
        assert await client.astats() == Stats(kinds={"k": {"new": 1}}, unmet={"k": [{}]})
        assert [verdict.verdict for verdict in await client.acancel(task)] == ["cancelled"]
        cancelled = Purged(kinds={"k": {"cancelled": 1}})
        assert client.purge(kind="k") == await client.apurge() == cancelled  # nothing is removed by default
        assert await client.apurge(older_than=60, dry_run=False) == Purged(kinds={})
        assert await client.apurge(status=Status.CANCELLED, dry_run=False) == cancelled
        assert await client.astats() == Stats(kinds={})
        with pytest.raises(Refused, match="there is no file"):
            await client.avacuum()
    doors = {name for name in dir(Client) if not name.startswith("_")}
    both = {"schedule", "schedule_all", "get", "cancel", "wait_tasks", "stats", "workers", "list_tasks", "close"}
    both |= {"purge", "vacuum"}
    assert both | {f"a{name}" for name in both} <= doors


def test_wait_tasks_returns_once_all_have_ended(service: MemoryService) -> None:
    with Client(MemoryBackend(service, worker="w")) as client, ThreadPoolExecutor(1) as others:
        first, second = client.schedule("k").id, client.schedule("other").id
        waiting = others.submit(client.wait_tasks, second, first)
        with leasekit.lease(next(client.tasks("k"))) as held:
            held.complete("done")
        assert not waiting.done()
        client.cancel(second)
        infos = waiting.result(20)
    assert [(info.id, info.status) for info in infos] == [(second, Status.CANCELLED), (first, Status.SUCCESS)]
    assert infos[1].result == "done"


def test_wait_tasks_names_who_has_not_ended_and_who_is_unknown(service: MemoryService) -> None:
    with Client(MemoryBackend(service, worker="w")) as client:
        task = client.schedule("k").id
        with pytest.raises(TimeoutError, match=task):
            client.wait_tasks(task, timeout=0)
        with pytest.raises(LeasekitError, match="no task 'typo'"):
            client.wait_tasks(task, "typo")


def test_closing_the_client_ends_the_wait_also_where_another_goes_on(service: MemoryService, faulty: Faulty) -> None:
    with Client(MemoryBackend(service, worker="another")) as another, ThreadPoolExecutor(1) as others:
        client = Client(faulty)
        waiting = others.submit(client.wait_tasks, another.schedule("k").id, timeout=60)
        reaches(2, lambda: faulty.calls["get"])
        client.close()
        with pytest.raises(Closed):
            waiting.result(20)


@pytest.mark.anyio
async def test_await_for_is_the_other_door_and_can_be_cancelled(service: MemoryService) -> None:
    async with Client(MemoryBackend(service, worker="w")) as client:
        task = (await client.aschedule("k")).id
        with anyio.move_on_after(0.01) as scope:
            await client.await_tasks(task)
        assert scope.cancelled_caught
        await client.acancel(task)
        assert [info.status for info in await client.await_tasks(task)] == [Status.CANCELLED]


def test_threads_that_use_a_client_at_once_share_one_connection(service: MemoryService) -> None:
    """Otherwise the thread of the one that nobody closes would stay."""
    for _ in range(20):
        barrier = threading.Barrier(4)
        connections: set[int] = set()
        client = Client("memory://")

        def connect(client: Client = client, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            connections.add(id(client.__connection__()))  # noqa: B023 - joined below

        threads = [threading.Thread(target=connect) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(connections) == 1
        client.close()
    eventually(lambda: not drivers())


# Letting go


def test_closing_gives_back_what_was_not_begun(service: MemoryService, clock: FakeClock) -> None:
    with Client(MemoryBackend(service, worker="w"), clock=clock) as client:
        task = client.schedule("k").id
        next(client.tasks("k"))
    assert service.get(task).status is Status.ENQUEUED  # type: ignore[union-attr]
    assert service.get(task).attempt == 0  # type: ignore[union-attr]


def test_closing_ends_the_thread_and_closing_again_does_nothing(service: MemoryService) -> None:
    client = Client(MemoryBackend(service, worker="w"))
    client.schedule("k")
    assert drivers()
    client.close()
    assert not drivers()
    client.close()


def test_two_clients_share_a_thread_that_ends_with_the_last(service: MemoryService) -> None:
    with Client(MemoryBackend(service, worker="a")) as first:
        first.stats()
        with Client(MemoryBackend(service, worker="b")) as second:
            second.stats()
            assert len(drivers()) == 1
        assert len(drivers()) == 1
        first.stats()
    assert not drivers()


@pytest.mark.parametrize("was_used", [True, False])
def test_a_closed_client_stays_closed_and_says_so(*, was_used: bool) -> None:
    client = leasekit.connect("memory://closed")
    if was_used:
        client.stats()
    client.close()
    for call in (client.stats, lambda: client.schedule("k"), lambda: next(client.tasks("k"))):
        with pytest.raises(leasekit.Closed, match=r"connect\(\) again"):
            call()
    client.close()
    assert not drivers()


def test_closing_while_a_body_runs_tells_it_and_gives_nothing_back(
    service: MemoryService, clock: FakeClock, events: list[Event]
) -> None:
    """Nothing is released while its body may still run."""
    client = Client(MemoryBackend(service, worker="w"), clock=clock, hooks=[events.append])
    task = client.schedule("k").id
    with pytest.raises(LeaseLost, match="closed") as caught, leasekit.lease(next(client.tasks("k"))) as held:
        client.close()
        assert held.lost
    assert caught.value.reason == "closed"
    assert service.get(task).status in (Status.CLAIMED, Status.PROCESSING)  # type: ignore[union-attr]
    assert [event.reason for event in events if isinstance(event, Lost)] == ["closed"]


def test_closing_ends_a_loop_that_waits_in_another_thread(client: Client, faulty: Faulty) -> None:
    ended: list[list[Task]] = []
    thread = threading.Thread(target=lambda: ended.append(list(client.tasks("k"))))
    thread.start()
    eventually(lambda: faulty.calls["claim"] == 1)
    client.close()
    thread.join(20)
    assert ended == [[]]


def test_closing_ends_a_loop_whose_body_runs_in_another_thread() -> None:
    """It does not connect anew."""
    client = leasekit.connect("memory://loop")
    client.schedule("k")
    began, go = threading.Event(), threading.Event()

    def loop() -> None:
        for task in client.tasks("k"):
            with pytest.raises(LeaseLost), leasekit.lease(task):
                began.set()
                go.wait(20)

    thread = threading.Thread(target=loop)
    thread.start()
    began.wait(20)
    client.close()
    go.set()
    thread.join(20)
    assert not thread.is_alive()
    assert not drivers()


def test_what_a_pending_claim_is_granted_while_closing_is_given_back(client: Client, faulty: Faulty) -> None:
    task = client.schedule("k").id
    faulty.script("claim", faults.delay_answer(Gate()))
    thread = threading.Thread(target=lambda: list(client.tasks("k")))
    thread.start()
    eventually(lambda: status(client, task) is Status.CLAIMED)
    client.close()
    thread.join(20)
    assert faulty.backend.service.get(task).status is Status.ENQUEUED  # type: ignore[attr-defined]


def test_closing_waits_for_reports_under_way(client: Client, faulty: Faulty, service: MemoryService) -> None:
    client.schedule("k")
    task = next(client.tasks("k"))
    answered = Gate()
    faulty.script("settle", faults.delay(answered))
    lease = leasekit.lease(task)

    def run() -> None:
        with lease as held:
            held.complete("kept")

    thread = threading.Thread(target=run)
    thread.start()
    eventually(lambda: faulty.calls["settle"] == 1)
    closing = threading.Thread(target=client.close)
    closing.start()
    eventually(lambda: client._session._connection is None)
    answered.open()
    closing.join(20)
    thread.join(20)
    assert service.get(task.id).result == "kept"  # type: ignore[union-attr]


def test_closing_a_client_whose_service_hangs_ends(
    client: Client, faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasekit._driver.keeping.keeper._SETTLE_TIMEOUT", 0.1)
    client.schedule("k")
    next(client.tasks("k"))
    faulty.always("*", faults.hang)
    client.close()
    assert not drivers()


def test_a_backend_that_fails_to_close_leaves_no_thread(service: MemoryService) -> None:
    class Stubborn(MemoryBackend):
        async def aclose(self) -> None:
            raise OSError("no")

    client = Client(Stubborn(service, worker="w"))
    client.stats()
    with pytest.raises(OSError, match="no"):
        client.close()
    assert not drivers()


def test_ctrl_c_while_closing_leaves_no_thread(client: Client, faulty: Faulty) -> None:
    client.schedule("k")
    next(client.tasks("k"))
    faulty.always("settle", faults.hang)
    with pytest.raises(KeyboardInterrupt), interrupting(lambda: faulty.calls["settle"] == 1):
        client.close()
    assert not drivers()


@pytest.mark.anyio
async def test_a_cancelled_close_gives_back_all_the_same(service: MemoryService) -> None:
    with anyio.CancelScope() as scope:
        async with Client(MemoryBackend(service, worker="w")) as client:
            task = (await client.aschedule("k")).id
            await anext(client.tasks("k"))
            scope.cancel()
    assert service.get(task).status is Status.ENQUEUED  # type: ignore[union-attr]
    assert not drivers()


def test_asyncios_own_cancels_do_not_stop_a_close(client: Client, faulty: Faulty, service: MemoryService) -> None:
    answered = Gate()
    faulty.always("settle", faults.delay(answered))

    async def cancel_twice() -> str:
        task = (await client.aschedule("k")).id
        await anext(client.tasks("k"))
        closing = asyncio.create_task(client.aclose())
        await until(lambda: faulty.calls["settle"])
        for _ in range(2):
            closing.cancel()
            await asyncio.sleep(0)
        answered.open()
        with pytest.raises(asyncio.CancelledError):
            await closing
        return task

    task = asyncio.run(cancel_twice())
    assert service.get(task).status is Status.ENQUEUED  # type: ignore[union-attr]
    assert not drivers()


def test_calls_that_cross_the_closing_end_with_an_error_of_ours() -> None:
    """Neither do they hang, nor is their work left unawaited."""
    for _ in range(30):
        client = leasekit.connect("memory://crossing")
        client.stats()
        go = threading.Barrier(3)

        def call(client: Client = client, go: threading.Barrier = go) -> None:
            go.wait()
            for _ in range(5):
                try:
                    client.stats()
                except LeasekitError:
                    return

        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        go.wait()
        client.close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        client.close()  # a call may have connected it anew
    gc.collect()


# Hooks


def test_a_hook_that_raises_harms_nobody(faulty: Faulty, clock: FakeClock) -> None:
    def hook(event: Event) -> None:
        raise SystemExit if isinstance(event, Claimed) else ValueError

    with Client(faulty, clock=clock, hooks=[hook]) as client:
        client.schedule("k")
        with leasekit.lease(next(client.tasks("k"))) as held:
            eventually(lambda: faulty.calls["beat"] == 1)
            clock.advance(120)
            eventually(lambda: faulty.calls["beat"] == 2)
            held.check()


def test_a_hook_that_calls_a_blocking_method_is_refused(faulty: Faulty, clock: FakeClock) -> None:
    refused: list[str] = []
    clients: list[Client] = []

    def hook(event: Event) -> None:
        for client in clients:
            for call in (client.stats, client.close, lambda client=client: next(client.tasks("k"))):
                try:
                    call()
                except LeasekitError as error:
                    refused.append(str(error))

    with Client(faulty, clock=clock, hooks=[hook]) as client:
        client.schedule("k")
        clients.append(client)
        next(client.tasks("k"))
        eventually(lambda: len(refused) >= 3)
        assert all("hook" in why for why in refused)
        client.stats()  # it was not closed
    assert not drivers()


# The end of the interpreter


def run(script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )


PRELUDE = """
import logging, threading, time, leasekit
logging.getLogger("asyncio").setLevel(logging.ERROR)  # in dev mode it warns of each call that a busy machine slows down
client = leasekit.connect("memory://")
client.schedule("k", claim_timeout=2, heartbeat_timeout=2)
"""


@pytest.mark.parametrize(
    "rest",
    [
        "client.stats()",
        "task = next(client.tasks('k'))",
        "held = leasekit.lease(next(client.tasks('k'))).__enter__()",
        "threading.Thread(target=lambda: list(client.tasks('other')), daemon=True).start(); time.sleep(0.2)",
        "with leasekit.lease(next(client.tasks('k'))): raise SystemExit(0)",
    ],
)
@pytest.mark.parametrize("flags", slow_after(1, ["-X dev -W error", "-W error"]))
def test_an_interpreter_that_ends_without_close_neither_hangs_nor_complains(rest: str, flags: str) -> None:
    ended = run(PRELUDE + rest, *flags.split())
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_body_in_another_thread_keeps_its_lease_when_the_main_thread_ends() -> None:
    ended = run(
        PRELUDE
        + """
def beaten_at():
    return client.get(task_id).heartbeat_at

def body():
    with leasekit.lease(next(client.tasks("beaten"))) as held:
        threading.main_thread().join()
        before = beaten_at()
        while beaten_at() == before:
            time.sleep(0.01)
        held.check()
    print(client.get(task_id).status, client.get(task_id).history[0].outcome)

task_id = client.schedule("beaten", claim_timeout=6, heartbeat_timeout=6).id
threading.Thread(target=body).start()
""",
        "-W",
        "error",
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "success success\n", "")


def test_a_daemon_threads_body_does_not_hold_up_the_end() -> None:
    began = time.monotonic()
    ended = run(
        PRELUDE
        + """
def body():
    with leasekit.lease(next(client.tasks("k"))):
        began.set()
        time.sleep(3600)

began = threading.Event()
threading.Thread(target=body, daemon=True).start()
began.wait()
""",
        "-W",
        "error",
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert time.monotonic() - began < 30


# Names


def test_every_process_claims_under_a_name_of_its_own() -> None:
    first, second = leasekit.connect("memory://"), leasekit.connect("memory://")
    assert first.worker != second.worker
    assert f":{os.getpid()}:" in first.worker
    assert leasekit.connect("memory://", worker="mine").worker == "mine"


# Drains


def test_a_loop_over_tasks_ends_when_its_worker_is_drained(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "leasekit")
    with leasekit.connect("memory://drained", worker="w") as client, leasekit.connect("memory://drained") as operator:
        operator.schedule_all([leasekit.NewTask(kind="k", id=task_id) for task_id in ("a", "b")])
        seen: list[str] = []
        for task in client.tasks("k"):
            with leasekit.lease(task):
                info = operator.drain_worker("w")
                assert (info.name, info.running) == ("w", 1)
                seen.append(task.id)
        assert (seen, status(client, "a"), status(client, "b")) == (["a"], Status.SUCCESS, Status.NEW)
        assert list(client.tasks("k")) == []  # while it drains, each loop ends at once
        assert "an operator drains this worker: its loop over tasks of k ends" in caplog.text
        operator.undrain_worker("w")
        assert next(client.tasks("k")).id == "b"


@pytest.mark.anyio
async def test_an_event_loop_drains_and_hears_of_a_drain() -> None:
    async with leasekit.connect("memory://", worker="w") as client:
        assert [task async for task in client.tasks("k", until_idle=0)] == []
        assert (await client.adrain_worker("w")).draining_since is not None
        assert [task async for task in client.tasks("k")] == []
        await client.aundrain_worker("w")
        assert (await client.aworkers())[0].draining_since is None


def test_a_backend_that_cannot_drain_says_so() -> None:
    with leasekit.connect("sqs://queue?region=x") as client:
        for call in (client.drain_worker, client.undrain_worker):
            with pytest.raises(LeasekitError, match="SqsBackend cannot drain workers: send SIGTERM to the worker"):
                call("w")


# Gates


def test_a_client_pauses_drops_and_opens() -> None:
    with leasekit.connect("memory://", worker="ada") as client:
        paused = client.pause(kind="k", until=3600, reason="why")
        assert (paused.kind, paused.mode, paused.reason, paused.changed_by) == ("k", "pause", "why", "ada")
        assert paused.until is not None
        assert paused.until - paused.changed_at == timedelta(seconds=3600)
        dropped = client.drop(collection="c", until=paused.until)
        assert (dropped.collection, dropped.mode, dropped.until) == ("c", "drop", paused.until)
        assert client.gates() == [paused, dropped]
        client.open(kind="k")
        client.open(collection="c")
        assert client.gates() == []


@pytest.mark.anyio
async def test_an_event_loop_pauses_drops_and_opens() -> None:
    async with leasekit.connect("memory://") as client:
        gates = [await client.apause(kind="k"), await client.adrop(collection="c")]
        assert await client.agates() == gates
        await client.aopen(kind="k")
        assert await client.agates() == gates[1:]


def test_a_waiting_claim_gets_the_task_of_a_kind_that_is_opened() -> None:
    with leasekit.connect("memory://") as client:
        client.pause(kind="k", until=0.2)
        client.schedule("k", id="a")
        for task in client.tasks("k"):
            assert (task.id, task.attempt) == ("a", 1)
            break


def test_a_wait_of_a_wrong_type_is_refused() -> None:
    with leasekit.connect("memory://") as client, pytest.raises(ConfigError, match="until must be"):
        client.pause(kind="k", until="tomorrow")  # type: ignore[arg-type]


def test_a_backend_without_gates_says_so() -> None:
    with leasekit.connect("sqs://queue?region=x") as client:
        for call in (client.gates, lambda: client.pause(kind="k"), lambda: client.open(kind="k")):
            with pytest.raises(LeasekitError, match="SqsBackend has no gates: stop the workers, or cancel tasks"):
                call()


# Periodic tasks


def test_a_client_sets_pauses_triggers_and_deletes_a_periodic_task() -> None:
    with leasekit.connect("memory://", worker="ada") as client:
        info = client.set_periodic("p", PeriodicTask(kind="k", cron="0 7 1 1 *"))
        assert (info.changed_by, client.list_periodic()) == ("ada", [info])
        assert client.pause_periodic("p").is_paused
        assert client.trigger_periodic("p").created
        assert not client.resume_periodic("p").is_paused
        client.delete_periodic("p")
        assert client.get_periodic("p") is None


@pytest.mark.anyio
async def test_an_event_loop_sets_pauses_triggers_and_deletes_a_periodic_task() -> None:
    async with leasekit.connect("memory://") as client:
        info = await client.aset_periodic("p", PeriodicTask(kind="k", cron="0 7 1 1 *"))
        assert await client.alist_periodic() == [info]
        assert (await client.apause_periodic("p")).is_paused
        assert (await client.atrigger_periodic("p")).created
        assert not (await client.aresume_periodic("p")).is_paused
        await client.adelete_periodic("p")
        assert await client.aget_periodic("p") is None


def test_a_backend_without_periodic_tasks_says_so() -> None:
    with leasekit.connect("sqs://queue?region=x") as client:
        for call in (client.list_periodic, lambda: client.get_periodic("p"), lambda: client.delete_periodic("p")):
            with pytest.raises(LeasekitError, match="SqsBackend has no periodic tasks: schedule each task when it is"):
                call()


def test_what_is_no_periodic_task_is_refused_before_it_is_sent() -> None:
    with leasekit.connect("http://127.0.0.1:1", retry_for=600) as client:
        with pytest.raises(TypeError, match="names of periodic tasks are strings"):
            client.get_periodic(1)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"leasekit\.periodic\.PeriodicTask"):
            client.set_periodic("p", {"every": 60})  # type: ignore[arg-type]


# Reschedules


def test_a_client_reschedules_a_task_and_its_name_is_in_the_history() -> None:
    with leasekit.connect("memory://", worker="ada") as client:
        client.schedule("k", id="a", delay=600)
        assert client.reschedule("a", delay=timedelta(0), priority=0).priority == 0
        info = client.get("a")
        assert info is not None
        assert [(entry.outcome, entry.worker) for entry in info.history] == [("rescheduled", "ada")]
        assert next(client.tasks("k")).id == "a"


@pytest.mark.anyio
async def test_an_event_loop_reschedules_a_task() -> None:
    async with leasekit.connect("memory://") as client:
        await client.aschedule("k", id="a")
        at = datetime(2100, 1, 1, tzinfo=UTC)
        assert (await client.areschedule("a", at=at)).at == at


def test_a_backend_that_cannot_change_tasks_says_so() -> None:
    with (
        leasekit.connect("sqs://queue?region=x") as client,
        pytest.raises(
            LeasekitError, match="SqsBackend cannot change a task that waits: cancel it, and schedule another"
        ),
    ):
        client.reschedule("a", delay=0)


# Settings of kinds


def test_a_client_sets_reads_and_deletes_the_settings_of_a_kind() -> None:
    with leasekit.connect("memory://", worker="ada") as client:
        info = client.set_kind("k", KindSettings(priority=0))
        assert (info.kind, info.settings, info.changed_by) == ("k", KindSettings(priority=0), "ada")
        assert client.kind("k") == info
        assert client.kinds() == [info]
        client.delete_kind("k")
        assert client.kind("k") is None
        assert client.kinds() == []


@pytest.mark.anyio
async def test_an_event_loop_sets_reads_and_deletes_the_settings_of_a_kind() -> None:
    async with leasekit.connect("memory://") as client:
        info = await client.aset_kind("k", KindSettings(priority=0))
        assert await client.akind("k") == info
        assert await client.akinds() == [info]
        await client.adelete_kind("k")
        assert await client.akind("k") is None


def test_what_a_handler_declares_wins_over_the_settings_of_its_kind() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    worker = leasekit.Worker(url)
    with leasekit.connect(url) as client:

        @worker.handler("k", priority=1)
        def handle(payload: None) -> None: ...

        client.set_kind("k", KindSettings(priority=0, max_attempts=1))
        declared, bare = handle.options(client=client).schedule(), client.schedule("k")
        found = [client.get(task.id) for task in (declared, bare)]
    assert [task.priority for task in found if task] == [1, 0]


def test_what_is_no_settings_is_refused_before_it_is_sent() -> None:
    with leasekit.connect("memory://") as client, pytest.raises(TypeError, match=r"leasekit\.KindSettings"):
        client.set_kind("k", {"priority": 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [1, b"k", ["k"], None])
def test_what_is_no_kind_is_refused_at_once(kind: Any) -> None:
    """The adapter would fail on it at each try, as if the service were away."""
    with leasekit.connect("http://127.0.0.1:1", retry_for=600) as client:
        with pytest.raises(TypeError, match="kinds are strings"):
            client.kind(kind)
        with pytest.raises(TypeError, match="kinds are strings"):
            client.delete_kind(kind)
        with pytest.raises(TypeError, match="kinds are strings"):
            client.set_kind(kind, KindSettings())


def test_a_backend_without_settings_of_kinds_says_so() -> None:
    with leasekit.connect("sqs://queue?region=x") as client:
        for call in (client.kinds, lambda: client.kind("k"), lambda: client.delete_kind("k")):
            with pytest.raises(LeasekitError, match="SqsBackend has no settings of kinds: give options with each task"):
                call()
