"""Claims: how many, in which order, through outages; and deliveries that come twice."""

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import anyio
import pytest
from msgspec import structs

from leasekit import Client, Heartbeats, Lease, Refused, Worker
from leasekit.backend import Capabilities
from leasekit.task import Beat, Claimed, Settlement, Status, TaskInfo, Verdict
from leasekit.testing import faults
from leasekit.testing.clock import FakeClock
from leasekit.testing.faults import Call, Fault, Faulty, Gate
from leasekit.testing.memory import MemoryBackend, MemoryService
from tests.waiting import eventually
from tests.worker.conftest import AtWork, Submitter

FAR_AHEAD = 1e8  # seconds: whatever the pace, and some seconds after it has ended too, all that there is


class Running:
    """A handler whose bodies run until they are let go; it remembers who ran, and how many at once."""

    def __init__(self) -> None:
        self.ran: list[Any] = []
        self.now = 0
        self.most = 0
        self._lock = threading.Lock()
        self._go = threading.Semaphore(0)

    def __call__(self, payload: Any, held: Lease) -> Any:
        with self._lock:
            self.ran.append(payload)
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            assert self._go.acquire(timeout=60)
        finally:
            with self._lock:
                self.now -= 1
        return held.fence

    def let_go(self, count: int = 1) -> None:
        self._go.release(count)


@pytest.fixture
def running() -> Running:
    return Running()


# How many -----------------------------------------------------------------------------------------------------


def test_no_more_is_claimed_than_there_are_slots_while_they_are_busy(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, running: Running
) -> None:
    worker = Worker(faulty, concurrency=3, ahead=0)
    worker.handler("k")(running)
    with at_work(worker):
        submitter.schedule_many("k", 10)
        eventually(lambda: running.now == 3)
        assert claimed(faulty) == 3
        running.let_go()
        eventually(lambda: len(running.ran) == 4)
        assert claimed(faulty) == 4
        running.let_go(20)
        eventually(lambda: len(running.ran) == 10)
    assert running.most == 3


def claimed(faulty: Faulty) -> int:
    answers = [call.answer for call in list(faulty.log) if call.kind == "claim" and call.answer is not None]
    return sum(len(answer.tasks) for answer in answers)


def test_with_an_async_handler_there_are_as_many_slots_again(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, running: Running
) -> None:
    worker = Worker(faulty, concurrency=2, ahead=0)
    worker.handler("thread")(running)
    inside: list[Any] = []

    @worker.handler("async")
    async def waits(payload: Any) -> None:
        inside.append(payload)
        while running.now:  # noqa: ASYNC110 - set by a thread
            await anyio.sleep(0.001)

    with at_work(worker):
        submitter.schedule_many("thread", 3)
        eventually(lambda: running.now == 2)
        submitter.schedule_many("async", 3)
        eventually(lambda: len(inside) == 2)
        assert worker.running == 4
        running.let_go(10)
        eventually(lambda: len(inside) == 3)


def test_heartbeats_bound_what_is_held(faulty: Faulty, submitter: Submitter, at_work: AtWork, running: Running) -> None:
    heartbeats = Heartbeats(ttl=300, cycle=10, rate=0.5, batch=1)
    assert heartbeats.capacity == 5
    worker = Worker(faulty, concurrency=8, heartbeats=heartbeats)
    worker.handler("k")(running)
    with at_work(worker):
        submitter.schedule_many("k", 20)
        eventually(lambda: running.now == 5)
        running.let_go(2)
        eventually(lambda: len(running.ran) == 7)
        running.let_go(40)
        eventually(lambda: len(running.ran) == 20)
    assert running.most == 5


def test_a_claim_asks_for_no_more_than_the_service_gives(faulty: Faulty, submitter: Submitter, at_work: AtWork) -> None:
    faulty.capabilities = Capabilities(max_batch=100, max_claim=2)
    worker = Worker(faulty, concurrency=8)
    worker.handler("k")(lambda payload: None)
    with at_work(worker):
        for task_id in submitter.schedule_many("k", 9):
            submitter.success(task_id)
    assert {call.options["limit"] for call in faulty.log if call.kind == "claim"} <= {0, 1, 2}  # 0 ends a claim


def test_only_kinds_that_have_a_handler_are_claimed(faulty: Faulty, submitter: Submitter, at_work: AtWork) -> None:
    worker = Worker(faulty)
    worker.handler("served")(lambda payload: None)
    with at_work(worker):
        other = submitter.schedule("other")
        submitter.success(submitter.schedule("served"))
        assert submitter.get(other).status == "new"


# What waits ---------------------------------------------------------------------------------------------------


def buffer_up(worker: Worker, submitter: Submitter, running: Running, priorities: list[int]) -> None:
    """One body runs, and tasks of these priorities wait in the buffer. The worker claims far ahead."""
    submitter.schedule("k", "pace")
    running.let_go()
    eventually(lambda: running.ran == ["pace"] and not worker.running)
    submitter.schedule("k", "first")
    eventually(lambda: running.now == 1)
    for priority in priorities:
        submitter.schedule("k", priority, priority=priority)
    eventually(lambda: worker.buffered == len(priorities))


def test_what_is_buffered_runs_by_priority(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, running: Running
) -> None:
    worker = Worker(faulty, concurrency=1, ahead=FAR_AHEAD)
    worker.handler("k")(running)
    with at_work(worker):
        buffer_up(worker, submitter, running, [3, 0, 4, 1])
        running.let_go(5)
        eventually(lambda: len(running.ran) == 6)
    assert running.ran == ["pace", "first", 0, 1, 3, 4]


def test_beats_of_what_is_buffered_say_that_it_has_not_begun(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, running: Running
) -> None:
    worker = Worker(faulty, concurrency=1, ahead=FAR_AHEAD, heartbeats=Heartbeats(rate=100, retry_wait=0.1))
    worker.handler("k")(running)
    with at_work(worker):
        buffer_up(worker, submitter, running, [2])

        def begun() -> dict[Any, bool]:
            beats = [beat for call in list(faulty.log) if call.kind == "beat" and call.is_over for beat in call.items]
            return {submitter.get(beat.id).payload: beat.started for beat in beats}

        eventually(lambda: 2 in (seen := begun()) and seen.get("first"))
        assert begun()[2] is False
        running.let_go(2)


def test_what_lies_in_the_buffer_for_too_long_is_given_back(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, running: Running
) -> None:
    worker = Worker(faulty, concurrency=1, ahead=0.25)
    worker.handler("k")(running)
    running.let_go(1000)
    with at_work(worker):
        for task_id in submitter.schedule_many("k", 1000):  # quick ones: many are claimed ahead
            submitter.success(task_id)
        slow = submitter.schedule_many("k", 50)
        eventually(lambda: running.now == 1)
        # Some were claimed.
        eventually(lambda: [info.status for info in map(submitter.get, slow)].count(Status.ENQUEUED) > 1)
        eventually(lambda: not worker.buffered)
        running.let_go(50)
        for task_id in slow:
            submitter.success(task_id)


# Outages ------------------------------------------------------------------------------------------------------


async def _break(call: Call) -> Any:
    raise ZeroDivisionError("a bug of the adapter")


broken = Fault("broken", _break)


@pytest.mark.parametrize(
    "fault", [faults.refuse, faults.lose_answer, faults.throttle(0.1), faults.garble, broken], ids=lambda f: f.name
)
def test_claims_outlast_whatever_a_service_or_an_adapter_does(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "leasekit")
    worker = Worker(faulty)
    worker.handler("k")(lambda payload: None)
    faulty.script("claim", fault, fault, fault)
    with at_work(worker):
        info = submitter.success(submitter.schedule("k"))
    assert info.attempt == 1
    said = [record.message for record in caplog.records if "fail" in record.message or "answer" in record.message]
    assert len(said) == 2, said
    assert "are tried until" in said[0] or "does not answer" in said[0]
    assert "again" in said[1]


async def _refuse(call: Call) -> Any:
    raise Refused("not you")


refused = Fault("refused", _refuse)


def test_refused_claims_are_tried_again_too(faulty: Faulty, submitter: Submitter, at_work: AtWork) -> None:
    worker = Worker(faulty)
    worker.handler("k")(lambda payload: None)
    faulty.script("claim", refused, refused)
    with at_work(worker):
        submitter.success(submitter.schedule("k"))
    assert faulty.fired["refused"] == 2


def test_refused_claims_are_not_tried_again_at_once(faulty: Faulty, at_work: AtWork) -> None:
    clock, asked_at = FakeClock(), list[float]()

    async def refuse(call: Call) -> None:
        asked_at.append(clock())
        await refused.act(call)

    def asked_again() -> bool:
        clock.advance(1)  # whoever sleeps; a claim that is tried again at once meets the same time twice
        return len(asked_at) >= 4

    faulty.always("claim", Fault("refused", refuse))
    with Client(faulty, clock=clock) as client:
        worker = Worker(client)
        worker.handler("k")(lambda payload: None)
        with at_work(worker):
            eventually(asked_again)
            worker.stop()
    assert all(later > before for before, later in itertools.pairwise(asked_at)), asked_at


def test_results_are_kept_and_reported_when_the_service_is_back(
    faulty: Faulty, submitter: Submitter, at_work: AtWork
) -> None:
    worker = Worker(faulty, concurrency=2)
    ran: list[int] = []

    @worker.handler("k")
    def result(payload: int) -> int:
        ran.append(payload)
        return payload

    faulty.always("settle", faults.refuse)
    with at_work(worker):
        ids = submitter.schedule_many("k", 10)  # more than there are slots: an unreported result holds none
        eventually(lambda: len(ran) == 10 and faulty.fired["refuse"] >= 2)
        assert not [i for i in map(submitter.get, ids) if i.status == "success"]
        faulty.clear()
        for number, task_id in enumerate(ids):
            info = submitter.success(task_id)
            assert (info.result, info.attempt) == (number, 1)


def test_results_that_are_not_reported_yet_hold_up_the_stop(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(faulty)
    worker.handler("k")(lambda payload: payload)
    faulty.always("settle", faults.refuse)
    with at_work(worker):
        task_id = submitter.schedule("k")
        eventually(lambda: faulty.calls["settle"])
        worker.stop()
        eventually(lambda: "all results are reported" in caplog.text)
        faulty.clear()
    assert submitter.get(task_id).status == "success"


# Granted long ago, and delivered again ------------------------------------------------------------------------


def test_a_lease_of_unknown_age_begins_when_a_beat_is_acknowledged(
    faulty: Faulty, submitter: Submitter, at_work: AtWork
) -> None:
    gate = Gate()
    say_nothing_of_the_wait(faulty)
    faulty.always("beat", faults.delay(gate))
    worker = Worker(faulty)
    worker.handler("k")(lambda payload: None)
    with at_work(worker):
        task_id = submitter.schedule("k")
        eventually(lambda: faulty.calls["beat"])
        assert submitter.get(task_id).status == "claimed"
        gate.open()
        submitter.success(task_id)


def say_nothing_of_the_wait(faulty: Faulty) -> None:
    async def act(call: Call) -> Any:
        answer: Claimed = await call.send()
        return Claimed(tasks=answer.tasks, waited=None)

    faulty.always("claim", Fault("no_waited", act))


def gone_after(gate: Gate, reason: str = "expired") -> Fault:
    async def act(call: Call) -> Any:
        await gate.passed()
        return [Verdict(id=beat.id, verdict="gone", reason=reason) for beat in call.items]

    return Fault("gone", act)


def test_a_lease_of_unknown_age_that_turns_out_to_be_gone_never_begins(
    faulty: Faulty, submitter: Submitter, at_work: AtWork
) -> None:
    gate = Gate()
    gate.open()
    say_nothing_of_the_wait(faulty)
    faulty.script("beat", gone_after(gate))
    runs: list[int] = []
    worker = Worker(faulty, concurrency=1)
    worker.handler("k")(runs.append)
    with at_work(worker):
        submitter.schedule("k", 1)
        eventually(lambda: faulty.fired["gone"])
        submitter.success(submitter.schedule("k", 2))  # the slot is free again
    assert runs == [2]


class Redelivered:
    """A service whose clock a test turns, so that it hands out a task again that a worker still believes in."""

    def __init__(self) -> None:
        self.clock = FakeClock(1000)
        self.service = MemoryService(now=self.clock, random=Random(1))
        self.faulty = Faulty(MemoryBackend(self.service, worker="worker"))
        self.submitter = Client(MemoryBackend(self.service, worker="submitter"))

    def again(self) -> None:
        self.clock.advance(301)

    def is_taken(self) -> bool:
        """Whether the worker has gone on since a claim's answer brought it a task again: it has sent the next claim."""
        claims = [call for call in list(self.faulty.log) if call.kind == "claim"]
        answers = [call.answer for call in claims[:-1] if call.answer is not None]
        return any(task.fence == 2 for answer in answers for task in answer.tasks)

    def status(self, task_id: str) -> TaskInfo:
        info = self.service.get(task_id)
        assert info is not None
        return info


@pytest.fixture
def redelivered() -> Iterator[Redelivered]:
    redelivered = Redelivered()
    yield redelivered
    redelivered.submitter.close()


@pytest.mark.parametrize("mode", ["async", "thread"])
def test_a_task_that_is_delivered_again_joins_its_run(redelivered: Redelivered, at_work: AtWork, mode: str) -> None:
    worker = Worker(redelivered.faulty)
    leases: list[Lease] = []
    finish = threading.Event()
    if mode == "async":

        @worker.handler("k")
        async def in_loop(payload: Any, held: Lease) -> int:
            leases.append(held)
            held.progress("half")
            while not finish.is_set():  # noqa: ASYNC110 - set by a thread
                await anyio.sleep(0.001)
            return held.fence
    else:

        @worker.handler("k")
        def in_thread(payload: Any, held: Lease) -> int:
            leases.append(held)
            held.progress("half")
            finish.wait(60)
            return held.fence

    with at_work(worker):
        task_id = redelivered.submitter.schedule("k").id
        eventually(lambda: leases)
        redelivered.again()
        eventually(lambda: leases[0].fence == 2)
        leases[0].check()
        finish.set()
        eventually(lambda: redelivered.status(task_id).status == "success")
        info = redelivered.status(task_id)
        assert (info.result, info.progress) == (2, "half")
        assert [run.outcome for run in info.history] == ["expired", "success"]
    assert len(leases) == 1


@pytest.mark.parametrize("mode", ["async", "thread"])
def test_a_body_that_goes_idle_after_its_task_was_delivered_again_is_told_to_end(
    redelivered: Redelivered, at_work: AtWork, mode: str
) -> None:
    worker = Worker(redelivered.faulty)
    leases: list[Lease] = []
    told: list[BaseException] = []
    if mode == "async":

        @worker.handler("k", idle_timeout=2)
        async def in_loop(payload: Any, held: Lease) -> None:
            leases.append(held)
            while held.fence == 1:  # not idle before
                held.progress("half")
                await anyio.sleep(0.001)
            try:
                await anyio.sleep(60)
            except BaseException as error:
                told.append(error)
                raise
    else:

        @worker.handler("k", idle_timeout=2)
        def in_thread(payload: Any, held: Lease) -> None:
            leases.append(held)
            while held.fence == 1:
                held.progress("half")
                time.sleep(0.001)
            until = time.monotonic() + 60
            while time.monotonic() < until:
                try:
                    held.check()
                except BaseException as error:
                    told.append(error)
                    raise
                time.sleep(0.01)

    with at_work(worker):
        task_id = redelivered.submitter.schedule("k").id
        eventually(lambda: leases)
        redelivered.again()
        eventually(lambda: leases[0].fence == 2)
        eventually(lambda: told)
        eventually(lambda: redelivered.status(task_id).status == "retriable_failure")


def lost_then_redelivered(redelivered: Redelivered, worker: Worker, begun: list[Lease]) -> str:
    """A thread's body has lost its lease without noticing, and its task was delivered again."""
    gate = Gate()
    redelivered.faulty.script("beat", gone_after(gate))
    task_id = redelivered.submitter.schedule("k").id
    eventually(lambda: begun)
    gate.open()
    eventually(lambda: begun[0].lost)
    redelivered.again()
    eventually(lambda: redelivered.status(task_id).fence == 2)
    eventually(lambda: redelivered.faulty.calls["beat"] >= 2)  # the newest lease is kept meanwhile
    return task_id


def test_what_a_body_finished_after_its_loss_is_settled_with_the_newest_token(
    redelivered: Redelivered, at_work: AtWork
) -> None:
    worker = Worker(redelivered.faulty)
    begun: list[Lease] = []
    finish = threading.Event()

    @worker.handler("k")
    def unaware(payload: Any, held: Lease) -> str:
        begun.append(held)
        finish.wait(60)
        return "finished"

    with at_work(worker):
        task_id = lost_then_redelivered(redelivered, worker, begun)
        finish.set()
        eventually(lambda: redelivered.status(task_id).status == "success")
        info = redelivered.status(task_id)
        assert (info.result, [run.outcome for run in info.history]) == ("finished", ["expired", "success"])
    assert len(begun) == 1


def test_a_body_that_its_loss_has_stopped_is_run_again_after_it_has_ended_and_not_before(
    redelivered: Redelivered, at_work: AtWork
) -> None:
    worker = Worker(redelivered.faulty)
    begun: list[Lease] = []
    ended: list[int] = []
    finish = threading.Event()

    @worker.handler("k")
    def checks(payload: Any, held: Lease) -> str:
        begun.append(held)
        assert len(begun) == len(ended) + 1  # alone
        try:
            finish.wait(60)
            held.check()
            return "second"
        finally:
            ended.append(held.fence)

    with at_work(worker):
        task_id = lost_then_redelivered(redelivered, worker, begun)
        assert len(begun) == 1
        finish.set()
        eventually(lambda: redelivered.status(task_id).status == "success")
        assert redelivered.status(task_id).result == "second"
    assert ended == [1, 2]


def test_a_buffered_task_that_is_delivered_again_runs_once_under_the_newest_lease(
    redelivered: Redelivered, at_work: AtWork, running: Running
) -> None:
    worker = Worker(redelivered.faulty, concurrency=1, ahead=FAR_AHEAD)
    worker.handler("k")(running)
    with at_work(worker):
        submit = redelivered.submitter.schedule
        submit("k", "pace")
        running.let_go()
        eventually(lambda: running.ran and not worker.running)
        submit("k", "long", heartbeat_timeout=100_000, claim_timeout=100_000)
        eventually(lambda: running.now == 1)
        task_id = submit("k", "buffered").id
        eventually(lambda: worker.buffered == 1)
        redelivered.again()
        eventually(redelivered.is_taken)
        running.let_go(2)
        eventually(lambda: redelivered.status(task_id).status == "success")
        assert redelivered.status(task_id).result == 2
    assert running.ran == ["pace", "long", "buffered"]


class OneIdForAll(MemoryBackend):
    """A queue that does not know its messages by id, as SQS: to its workers, all tasks have one id."""

    def __init__(self, service: MemoryService) -> None:
        super().__init__(service, worker="worker")
        self.capabilities = dataclasses.replace(self.capabilities, unique_ids=False)
        self._ids: dict[str, str] = {}  # by token

    async def claim(self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str, **more: Any) -> Claimed:
        claimed = await super().claim(kinds, limit=limit, wait=wait, claim_id=claim_id)
        self._ids.update({task.token: task.id for task in claimed.tasks})
        return structs.replace(claimed, tasks=[structs.replace(task, id="nightly") for task in claimed.tasks])

    async def beat(self, beats: Sequence[Beat]) -> list[Verdict]:
        verdicts = await super().beat([structs.replace(beat, id=self._ids[beat.token]) for beat in beats])
        return [structs.replace(verdict, id="nightly") for verdict in verdicts]

    async def settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        verdicts = await super().settle([structs.replace(one, id=self._ids[one.token]) for one in settlements])
        return [structs.replace(verdict, id="nightly") for verdict in verdicts]


def test_tasks_that_share_an_id_are_all_run_where_an_id_does_not_name_a_task(at_work: AtWork) -> None:
    service = MemoryService()
    worker = Worker(OneIdForAll(service), concurrency=2)
    ran: list[Any] = []
    both = threading.Event()

    @worker.handler("k", run="thread")
    def run(payload: Any) -> None:
        ran.append(payload)
        assert both.wait(60)

    with Client(MemoryBackend(service, worker="submitter")) as submitter, at_work(worker):
        ids = [submitter.schedule("k", payload).id for payload in ("monday", "tuesday")]
        eventually(lambda: len(ran) == len(ids))
        both.set()
        eventually(lambda: {info.status for task_id in ids if (info := service.get(task_id))} == {"success"})
    assert sorted(ran) == ["monday", "tuesday"]
