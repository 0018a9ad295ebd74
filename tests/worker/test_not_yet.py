"""Handlers that say `NotYet`: their runs wait without a slot, under the same lease, and end at once when they must."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from leasekit import Client, Heartbeats, Lease, NotYet, Worker
from leasekit._driver.guarding.watchdog import Watchdog
from leasekit._driver.reporting.ledger import Ledger, SharedMemory
from leasekit._worker.claimed_task import LONGEST_WAIT
from leasekit.task import TaskInfo, Verdict
from leasekit.testing.clock import FakeClock
from leasekit.testing.faults import Call, Fault, Faulty
from leasekit.testing.memory import MemoryBackend, MemoryService
from tests.waiting import eventually, turns
from tests.worker.conftest import Submitter

LONG = 20.0  # seconds: the test's clock stands still


class World:
    """A service, a submitter and a worker by one clock, which tests move."""

    def __init__(self) -> None:
        self.clock = FakeClock(1000)
        self.service = MemoryService(now=self.clock, random=Random(1))
        self.faulty = Faulty(MemoryBackend(self.service, worker="worker"))
        self.client = Client(self.faulty, clock=self.clock, heartbeats=Heartbeats().for_ttl(30))
        self.submitter = Client(MemoryBackend(self.service, worker="submitter"), clock=self.clock)

    def worker(self, **options: Any) -> Worker:
        return Worker(self.client, **options)

    def schedule(self, payload: Any = None, **options: Any) -> str:
        return self.submitter.schedule("k", payload, claim_timeout=30, heartbeat_timeout=30, **options).id

    def pass_time(self, seconds: float) -> None:
        """Let time pass in small steps, the worker always keeping up."""
        until = self.clock.now() + seconds
        while (left := until - self.clock.now()) > 0:
            self.clock.advance(min(0.5, left))
            self.client.__connection__().run(turns())

    def get(self, task_id: str) -> TaskInfo:
        info = self.service.get(task_id)
        assert info is not None
        return info

    def when(self, task_id: str, *statuses: str) -> TaskInfo:
        eventually(lambda: self.get(task_id).status in statuses)
        return self.get(task_id)

    def when_passing(self, task_id: str, status: str, *, step: float = 0.01, within: float = 0.9 * LONG) -> None:
        """Let time pass, slowly, until the task has this status; that is before the next call of a handler."""
        until = self.clock.now() + within

        def is_there() -> bool:
            self.pass_time(step)
            return self.get(task_id).status == status

        eventually(is_there)
        assert self.clock.now() < until, f"the task was {status} only with the next call of its handler"

    def outcomes(self, task_id: str) -> list[str]:
        return [run.outcome for run in self.get(task_id).history]


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.client.close()
    world.submitter.close()


@contextmanager
def at_work(worker: Worker) -> Iterator[Worker]:
    """A worker at work until the block ends, by a clock that stands still meanwhile."""
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        thread.join(60)
    assert not thread.is_alive(), "the worker does not stop"


class Polls:
    """A handler that says `NotYet` until it is let through; it remembers the lease of each call."""

    def __init__(self, *, after: float = LONG) -> None:
        self.calls: list[tuple[int, int, int]] = []  # fence, attempt, executions
        self.checkpoints: list[Any] = []
        self.is_there = False
        self._after = after

    def __call__(self, payload: Any, held: Lease) -> int:
        self.calls.append((held.fence, held.attempt, held.executions))
        self.checkpoints.append(held.checkpoint)
        held.progress(len(self.calls))
        if not self.is_there:
            raise NotYet("the VM boots", after=self._after)
        return len(self.calls)


def waits(worker: Worker, polls: Polls, *, calls: int = 1, waiting: int = 1) -> None:
    eventually(lambda: len(polls.calls) >= calls and worker.waiting == waiting)


# The next call


@pytest.mark.parametrize("mode", ["thread", "async"])
def test_the_handler_is_called_again_after_that_time_under_the_same_lease(world: World, mode: str) -> None:
    worker, polls = world.worker(), Polls()
    if mode == "thread":
        worker.handler("k")(polls)
    else:

        @worker.handler("k")
        async def polling(payload: Any, held: Lease) -> int:
            await anyio.lowlevel.checkpoint()
            return polls(payload, held)

    with at_work(worker):
        task_id = world.schedule()
        waits(worker, polls)
        world.pass_time(LONG - 0.5)
        assert len(polls.calls) == 1
        polls.is_there = True
        world.pass_time(0.5)
        info = world.when(task_id, "success")
    assert polls.calls == [(1, 1, 1), (1, 1, 2)]
    assert info.result == 2
    assert world.outcomes(task_id) == ["success"]


def test_the_lease_is_renewed_meanwhile(world: World) -> None:
    worker, polls = world.worker(), Polls(after=LONGEST_WAIT)
    worker.handler("k")(polls)
    with at_work(worker):
        task_id = world.schedule()
        for calls in range(1, 4):  # of half a minute each, which is the ttl
            waits(worker, polls, calls=calls)
            world.pass_time(LONGEST_WAIT)
        waits(worker, polls, calls=4)
        assert world.get(task_id).status == "processing"
    assert polls.calls == [(1, 1, calls) for calls in range(1, 5)]


def test_a_run_that_waits_holds_no_slot(world: World) -> None:
    worker, polls = world.worker(concurrency=1, window=8), Polls()
    worker.handler("k")(polls)
    with at_work(worker):
        tasks = [world.schedule() for _ in range(5)]
        waits(worker, polls, calls=5, waiting=5)
        assert worker.running == 0
        polls.is_there = True
        world.pass_time(LONG)
        for task_id in tasks:
            world.when(task_id, "success")


def test_a_run_that_waits_keeps_its_place_in_the_window(world: World) -> None:
    worker, polls = world.worker(concurrency=8, window=2), Polls()
    worker.handler("k")(polls)
    with at_work(worker):
        for number in range(3):
            world.schedule(number)
        waits(worker, polls, calls=2, waiting=2)
        world.pass_time(LONG - 1)
        assert len(polls.calls) == 2
        polls.is_there = True
        world.pass_time(1)
        eventually(lambda: len(polls.calls) == 5)


def test_a_window_bounds_a_handler_of_its_own(world: World) -> None:
    worker, polls, others = world.worker(concurrency=4, window=4), Polls(), Polls()
    worker.handler("k", window=2)(polls)
    worker.handler("other")(others)
    with at_work(worker):
        for _ in range(6):
            world.schedule()
            world.submitter.schedule("other")
        waits(worker, polls, calls=2, waiting=6)
        assert (len(polls.calls), len(others.calls)) == (2, 4)


def test_without_a_window_as_many_are_held_as_keep_the_slots_busy(world: World) -> None:
    worker, polls = world.worker(concurrency=2), Polls()  # whose calls take no time, by this clock
    worker.handler("k")(polls)
    with at_work(worker):
        for number in range(60):
            world.schedule(number)
        waits(worker, polls, calls=60, waiting=60)


def test_runs_that_are_due_come_before_tasks_that_have_not_begun(world: World) -> None:
    worker = world.worker(concurrency=1, window=8)
    called: list[str] = []
    go = threading.Semaphore(0)

    @worker.handler("k")
    def polling(name: str, held: Lease) -> None:
        called.append(name)
        if name == "waits" and held.executions == 1:
            raise NotYet(after=1)
        go.acquire(timeout=60)

    with at_work(worker):
        world.schedule("waits")
        eventually(lambda: worker.waiting == 1)
        world.schedule("busy")
        eventually(lambda: called == ["waits", "busy"])
        world.schedule("new")
        eventually(lambda: worker.buffered == 1)
        world.pass_time(1)
        eventually(lambda: worker.waiting == 0)
        go.release(3)
        eventually(lambda: len(called) == 4)
    assert called == ["waits", "busy", "waits", "new"]


def test_the_next_call_has_the_latest_progress_as_its_checkpoint(world: World) -> None:
    worker, polls = world.worker(), Polls()
    worker.handler("k")(polls)
    with at_work(worker):
        task_id = world.schedule()
        waits(worker, polls)
        world.pass_time(LONG)
        waits(worker, polls, calls=2)
        polls.is_there = True
        world.pass_time(LONG)
        assert world.when(task_id, "success").progress == 3
    assert polls.checkpoints == [None, 1, 2]


def test_the_log_counts_the_calls(world: World, caplog: pytest.LogCaptureFixture) -> None:
    worker, polls = world.worker(), Polls()
    worker.handler("k")(polls)
    with caplog.at_level(logging.INFO, "leasekit"), at_work(worker):
        task_id = world.schedule()
        waits(worker, polls)
        polls.is_there = True
        world.pass_time(LONG)
        world.when(task_id, "success")
    lines = [record.getMessage() for record in caplog.records if task_id in record.getMessage()]
    assert [line.split(") ")[1] for line in lines] == [
        "begins, attempt 1",
        f"ended: success, attempt 1, 2 calls, {LONG} s",
    ]


def test_the_log_has_no_traceback_of_a_long_wait(world: World, caplog: pytest.LogCaptureFixture) -> None:
    worker = world.worker()

    @worker.handler("k")
    def patient(payload: Any) -> None:
        raise NotYet("it boots", after=600)

    with caplog.at_level(logging.INFO, "leasekit"), at_work(worker):
        task_id = world.schedule()
        (line,) = eventually(lambda: [it for it in caplog.records if f"{task_id} (k) ended" in it.getMessage()])
    assert "ended: release, attempt 1, 0 s: it boots" in line.getMessage()
    assert line.exc_info is None


def test_a_lease_of_an_earlier_call_is_of_no_use(world: World) -> None:
    worker = world.worker()
    leases: list[Lease] = []

    @worker.handler("k")
    def polling(payload: Any, held: Lease) -> None:
        leases.append(held)
        if held.executions == 1:
            raise NotYet(after=LONG)
        with pytest.raises(Exception, match="has ended"):
            leases[0].progress("late")
        with pytest.raises(Exception, match="has ended"):
            leases[0].complete("late")

    with at_work(worker):
        task_id = world.schedule()
        eventually(lambda: worker.waiting)
        world.pass_time(LONG)
        assert world.when(task_id, "success").result is None


def test_successors_of_a_call_that_said_not_yet_are_dropped(world: World) -> None:
    worker = world.worker()

    @worker.handler("k")
    def polling(payload: Any, held: Lease) -> None:
        held.then("next", held.executions)
        if held.executions == 1:
            raise NotYet(after=LONG)

    with at_work(worker):
        task_id = world.schedule()
        eventually(lambda: worker.waiting)
        world.pass_time(LONG)
        world.when(task_id, "success")
    assert [task.payload for task in world.submitter.list_tasks(kind="next").tasks] == [2]


def test_what_the_handler_has_decided_before_stands(world: World) -> None:
    worker = world.worker()

    @worker.handler("k")
    def decides(payload: Any, held: Lease) -> None:
        held.fail("never", retry=False)
        raise NotYet(after=LONG)

    with at_work(worker):
        task_id = world.schedule()
        assert world.when(task_id, "fatal_failure")
    assert world.outcomes(task_id) == ["fatal"]


def test_a_long_wait_goes_back_to_the_service_and_counts_no_attempt(world: World) -> None:
    worker, polls = world.worker(), Polls(after=LONGEST_WAIT + 1)
    worker.handler("k")(polls)
    with at_work(worker):
        task_id = world.schedule()
        world.when(task_id, "enqueued")
        assert worker.waiting == 0
        polls.is_there = True
        world.pass_time(LONGEST_WAIT)
        assert len(polls.calls) == 1
        world.pass_time(1.5)
        world.when(task_id, "success")
    assert polls.calls == [(1, 1, 1), (2, 1, 1)]
    assert polls.checkpoints == [None, 1]
    assert world.outcomes(task_id) == ["release", "success"]


def test_the_service_lists_the_window_and_what_waits(service: MemoryService, submitter: Submitter) -> None:
    worker, polls = Worker(MemoryBackend(service, worker="worker"), window=5), Polls()
    worker.handler("k")(polls)

    def told() -> list[tuple[int | None, int | None]]:
        return [(info.window, info.waiting) for info in submitter.client.workers() if info.name == "worker"]

    with at_work(worker):
        submitter.schedule("k")
        eventually(lambda: told() == [(5, 1)])


# Its end


@pytest.fixture
def polls() -> Polls:
    return Polls()


def test_a_stop_gives_the_task_back_at_once_with_its_progress_and_its_wait(world: World, polls: Polls) -> None:
    worker = world.worker()
    worker.handler("k")(polls)
    with at_work(worker):
        task_id = world.schedule()
        waits(worker, polls)
        world.pass_time(5)
    info = world.get(task_id)
    assert (info.status, info.progress) == ("enqueued", 1)
    assert world.outcomes(task_id) == ["release"]
    world.clock.advance(LONG - 6)
    assert list(world.submitter.tasks("k", until_idle=0)) == []
    world.clock.advance(2)
    (again,) = world.submitter.tasks("k", until_idle=0)
    assert (again.attempt, again.progress) == (1, 1)


def test_a_run_that_says_it_while_the_worker_stops_is_given_back(world: World) -> None:
    worker = world.worker()
    begun, go = threading.Event(), threading.Event()

    @worker.handler("k")
    def polling(payload: Any) -> None:
        begun.set()
        go.wait(60)
        raise NotYet(after=LONG)

    with at_work(worker):
        task_id = world.schedule()
        assert begun.wait(60)
        worker.stop()
        eventually(lambda: worker._stopping)
        go.set()
    assert world.outcomes(task_id) == ["release"]


def test_a_cancel_request_ends_it_at_once(world: World, polls: Polls) -> None:
    worker = world.worker()
    worker.handler("k")(polls)
    with at_work(worker):
        task_id = world.schedule()
        waits(worker, polls)
        world.submitter.cancel(task_id)
        world.when_passing(task_id, "cancelled")
        eventually(lambda: worker.waiting == 0)
    assert len(polls.calls) == 1


def test_a_lost_lease_ends_it_at_once_and_frees_its_place(world: World, polls: Polls) -> None:
    worker = world.worker(window=1)
    worker.handler("k")(polls)
    with at_work(worker):
        world.schedule("lost")
        waits(worker, polls)
        world.faulty.always("beat", Fault("gone", _gone))
        world.pass_time(15)
        eventually(lambda: worker.waiting == 0)
        world.faulty.clear()
        world.schedule("next")
        eventually(lambda: len(polls.calls) == 2)
    assert polls.calls[1][2] == 1


def test_the_end_of_max_runtime_ends_it_at_once_as_a_crash(world: World) -> None:
    worker, polls = world.worker(), Polls()
    worker.handler("k")(polls)
    with at_work(worker):
        task_id = world.schedule(max_runtime=5, max_crashes=0)
        waits(worker, polls)
        world.pass_time(7)
        world.when(task_id, "dead")
        eventually(lambda: worker.waiting == 0)
    assert world.outcomes(task_id) == ["crash"]


def test_waiting_is_no_progress_for_the_idle_timeout(world: World) -> None:
    worker, polls = world.worker(), Polls()
    worker.handler("k", idle_timeout=5)(polls)
    with at_work(worker):
        task_id = world.schedule(max_attempts=1)
        waits(worker, polls)
        world.pass_time(4)
        assert worker.waiting == 1
        world.pass_time(2)
        info = world.when(task_id, "dead")
    assert world.outcomes(task_id) == ["retry"]
    assert info.history[0].error["type"] == "IdleTimeout"


def test_a_run_that_is_due_and_finds_no_slot_is_ended_too(world: World) -> None:
    worker, polls = world.worker(concurrency=1, window=8), Polls(after=1)
    begun, busy = threading.Event(), threading.Event()

    @worker.handler("k")
    def polling(payload: Any, held: Lease) -> None:
        if payload == "waits":
            polls(payload, held)
        begun.set()
        busy.wait(120)  # longer than the test waits for the end

    with at_work(worker):
        task_id = world.schedule("waits")
        waits(worker, polls)
        world.schedule("busy")
        assert begun.wait(60)
        world.pass_time(1)
        eventually(lambda: worker.buffered == 1)
        world.submitter.cancel(task_id)
        world.when_passing(task_id, "cancelled", step=0.2)  # the next heartbeat tells of it
        eventually(lambda: worker.buffered == 0)
        busy.set()
    assert len(polls.calls) == 1


def test_a_stop_gives_back_a_run_that_is_due_and_finds_no_slot(world: World) -> None:
    worker, polls = world.worker(concurrency=1, window=8), Polls(after=1)
    begun, busy = threading.Event(), threading.Event()

    @worker.handler("k")
    def polling(payload: Any, held: Lease) -> None:
        if payload == "waits":
            polls(payload, held)
        begun.set()
        busy.wait(60)

    with at_work(worker):
        task_id = world.schedule("waits")
        waits(worker, polls)
        world.schedule("busy")
        assert begun.wait(60)
        world.pass_time(1)
        eventually(lambda: worker.buffered == 1)
        worker.stop()
        world.when(task_id, "enqueued")
        busy.set()
    assert len(polls.calls) == 1


async def _gone(call: Call) -> Any:
    return [Verdict(id=beat.id, verdict="gone", reason="taken") for beat in call.items]


def test_a_task_that_is_delivered_again_waits_on_under_the_newest_lease() -> None:
    clock = FakeClock(1000)  # of the service alone: it believes in a lease no longer that the worker still trusts
    service = MemoryService(now=clock, random=Random(1))
    with Client(MemoryBackend(service, worker="submitter")) as submitter:
        worker, polls = Worker(MemoryBackend(service, worker="worker")), Polls()
        worker.handler("k")(polls)
        with at_work(worker):
            task_id = submitter.schedule("k").id
            waits(worker, polls)
            clock.advance(301)
            eventually(lambda: (info := service.get(task_id)) is not None and info.history)
            eventually(lambda: (info := service.get(task_id)) is not None and info.status == "processing")
            assert worker.waiting == 1
        info = service.get(task_id)
    assert info is not None
    assert [(run.outcome, run.fence) for run in info.history] == [("expired", 1), ("release", 2)]
    assert len(polls.calls) == 1


# Its guards


def paused(watch: Callable[[Any], Any]) -> list[Any]:
    """What `watch` returns of a lease: while the handler runs, while its run waits, and when it runs again."""
    seen: list[Any] = []
    client = Client(MemoryBackend(MemoryService(), worker="w"))
    with client:
        client.schedule("k")
        task = next(client.tasks("k"))
        held = client.__connection__().keeper.get(task)
        assert held is not None
        held.begin(None)
        seen.append(watch(held))
        held.pause()
        seen.append(watch(held))
        held.resume()
        seen.append(watch(held))
    return seen


class Timer:
    """A timer of the kernel that ends nothing."""

    def __init__(self) -> None:
        self.at: float | None = None

    def arm(self, at: float) -> None:
        self.at = at

    def disarm(self) -> None:
        self.at = None

    def close(self) -> None: ...


def test_the_timer_that_ends_the_process_does_not_run_for_it() -> None:
    timer = Timer()
    watchdog = Watchdog("off", timer=timer)

    def is_armed(held: Any) -> bool:
        if held.watchdog is not watchdog:
            held.watchdog = watchdog
            watchdog.begins(held.term)
        return timer.at is not None

    assert paused(is_armed) == [True, False, True]


def test_it_is_not_to_blame_if_its_process_dies() -> None:
    memory = SharedMemory()
    ledger = Ledger(memory.fd)

    def is_to_blame(held: Any) -> bool:
        if held.ledger is not ledger:
            held.enter(ledger)
            ledger.begins(held.entry)
        return [left.begun for left in memory.read().leases] == [True]

    assert paused(is_to_blame) == [True, False, True]
