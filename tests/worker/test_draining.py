"""Bodies that go on after a stop: told to end past the grace, their tasks given back with what they have reached."""

import math
import threading
from typing import Any

import anyio
import pytest

import leasekit
from leasekit import ConfigError, Draining, Lease, Worker
from leasekit.hooks import Event, Renewed
from leasekit.testing.faults import Faulty
from tests.waiting import eventually
from tests.worker.conftest import AtWork, Submitter, gives_back, waits_for_a_task


def test_an_async_body_is_cancelled_and_its_task_released_with_its_progress(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, door: str
) -> None:
    worker = Worker(faulty, drain_grace=0.01, drain_timeout=math.inf)
    begun = threading.Event()

    @worker.handler("k")
    async def waits(payload: Any, held: Lease) -> None:
        held.progress({"page": 7})
        begun.set()
        await anyio.sleep(600)

    with at_work(worker):
        task_id = submitter.schedule("k")
        assert begun.wait(60)
        worker.stop()
        info = submitter.when(task_id, "enqueued")
    assert [run.outcome for run in info.history] == ["release"]
    assert (info.crashes, info.attempt, info.progress) == (0, 0, {"page": 7})


@pytest.mark.parametrize("call", ["check", "progress"])
def test_a_thread_hears_of_it_at_its_next_call(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, call: str
) -> None:
    worker = Worker(faulty, drain_grace=0.01, drain_timeout=math.inf)
    begun = threading.Event()
    raised: list[BaseException] = []

    @worker.handler("k")
    def waits(payload: Any, held: Lease) -> None:
        begun.set()
        try:
            while True:
                held.check() if call == "check" else held.progress(1)
                threading.Event().wait(0.001)
        except Draining as error:
            raised.append(error)
            raise

    with at_work(worker):
        task_id = submitter.schedule("k")
        assert begun.wait(60)
        worker.stop()
        info = submitter.when(task_id, "enqueued")
    assert [run.outcome for run in info.history] == ["release"]
    assert task_id in str(raised[0])


def test_the_checkpoint_with_which_a_thread_hears_of_it_is_kept(
    faulty: Faulty, submitter: Submitter, at_work: AtWork
) -> None:
    worker = Worker(faulty, drain_grace=0.01, drain_timeout=math.inf)
    begun = threading.Event()
    done: list[int] = []

    @worker.handler("k")
    def counts(payload: Any, held: Lease) -> None:
        while True:
            done.append(len(done))
            held.progress(len(done))
            begun.set()

    with at_work(worker):
        task_id = submitter.schedule("k")
        assert begun.wait(60)
        worker.stop()
        info = submitter.when(task_id, "enqueued")
    assert info.progress == len(done)


def test_a_body_that_decides_what_its_end_means_is_heard(faulty: Faulty, submitter: Submitter, at_work: AtWork) -> None:
    worker = Worker(faulty, drain_grace=0.01, drain_timeout=math.inf)
    begun = threading.Event()

    @worker.handler("k")
    def waits(payload: Any, held: Lease) -> str:
        begun.set()
        try:
            while True:
                held.check()
                threading.Event().wait(0.001)  # all others of this process have their turns
        except Draining:
            return "as far as I came"

    with at_work(worker):
        task_id = submitter.schedule("k")
        assert begun.wait(60)
        worker.stop()
        assert submitter.success(task_id).result == "as far as I came"


@pytest.mark.parametrize("decides", [False, True])
def test_the_result_of_a_body_that_caught_what_told_it_to_end_and_went_on_is_not_taken(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, caplog: pytest.LogCaptureFixture, decides: bool
) -> None:
    worker = Worker(faulty, drain_grace=0.01, drain_timeout=math.inf)
    begun = threading.Event()

    @worker.handler("k")
    def skips(payload: Any, held: Lease) -> str:
        begun.set()
        skipped = 0
        while skipped < 3:
            try:
                held.check()
                threading.Event().wait(0.001)
            except Exception:  # noqa: BLE001 - as such code does
                skipped += 1
        if decides:
            held.complete("whole all the same")
        return "all rows"

    with at_work(worker):
        task_id = submitter.schedule("k")
        assert begun.wait(60)
        worker.stop()
        info = submitter.when(task_id, "success" if decides else "enqueued")
    assert [run.outcome for run in info.history] == ["success" if decides else "release"]
    warned = [record.getMessage() for record in caplog.records if "had raised 3 times" in record.getMessage()]
    assert len(warned) == (0 if decides else 1)


def test_bodies_that_end_within_the_grace_are_told_nothing(
    faulty: Faulty, submitter: Submitter, at_work: AtWork
) -> None:
    worker = Worker(faulty, drain_grace=600, drain_timeout=math.inf)
    begun, finish = threading.Event(), threading.Event()

    @worker.handler("k")
    def waits(payload: Any, held: Lease) -> str:
        begun.set()
        finish.wait(60)
        held.check()
        return "done"

    with at_work(worker):
        task_id = submitter.schedule("k")
        assert begun.wait(60)
        eventually(lambda: waits_for_a_task(faulty))
        worker.stop()
        eventually(lambda: gives_back(faulty), "the end of the last claim")  # the stop has come through
        finish.set()
        assert submitter.success(task_id).result == "done"


def test_a_thread_that_does_not_end_is_beaten_as_long_as_it_runs(
    faulty: Faulty, submitter: Submitter, at_work: AtWork
) -> None:
    renewed: list[str] = []

    def hear(event: Event) -> None:
        if isinstance(event, Renewed):
            renewed.extend(event.task_ids)

    # In a thread of the test, where no signals are heard, the time-out ends no process.
    worker = Worker(faulty, drain_grace=0.01, drain_timeout=0.01, hooks=[hear])
    begun, finish = threading.Event(), threading.Event()

    @worker.handler("k")
    def never_checks(payload: Any) -> str:
        begun.set()
        finish.wait(60)
        return "done"

    with at_work(worker):
        task_id = submitter.schedule("k", claim_timeout=2, heartbeat_timeout=2)
        assert begun.wait(60)
        worker.stop()
        before = len(renewed)
        eventually(lambda: len(renewed) >= before + 4)  # more than a ttl
        finish.set()
        info = submitter.success(task_id)
    assert (info.result, info.crashes) == ("done", 0)


def test_orders_arrive_while_it_drains(faulty: Faulty, submitter: Submitter, at_work: AtWork) -> None:
    worker = Worker(faulty, drain_grace=600, drain_timeout=math.inf)
    begun = threading.Event()

    @worker.handler("k")
    def waits(payload: Any, held: Lease) -> None:
        begun.set()
        while True:
            held.check()
            threading.Event().wait(0.001)

    with at_work(worker):
        task_id = submitter.schedule("k", claim_timeout=10, heartbeat_timeout=10)
        assert begun.wait(60)
        eventually(lambda: waits_for_a_task(faulty))
        worker.stop()
        eventually(lambda: gives_back(faulty), "the end of the last claim")  # the stop has come through
        submitter.client.cancel(task_id)
        assert submitter.when(task_id, "cancelled").status == "cancelled"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"drain_grace": -1}, "drain_grace must be .*, got -1"),
        ({"drain_grace": math.nan}, "drain_grace must be .*, got nan"),
        ({"drain_grace": 30}, "drain_timeout=25"),
        ({"drain_grace": 1, "drain_timeout": 0.5}, "drain_timeout=0.5"),
    ],
)
def test_a_patience_that_contradicts_itself_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        leasekit.Worker(**options)


# By an operator --------------------------------------------------------------------------------------------------


def test_a_worker_that_an_operator_drains_finishes_what_runs_without_a_limit_and_gives_the_rest_back(
    faulty: Faulty, submitter: Submitter, door: str
) -> None:
    worker = Worker(faulty, concurrency=1, ahead=600, drain_grace=0, drain_timeout=0)
    begun, may_end = threading.Event(), threading.Event()

    @worker.handler("k")
    def waits(payload: Any) -> str:
        begun.set()
        assert may_end.wait(60)
        return "done"

    @worker.handler("idle")
    async def unused(payload: Any) -> None: ...

    thread = threading.Thread(
        target=worker.run if door == "run" else lambda: anyio.run(worker.serve, backend=door), daemon=True
    )
    thread.start()
    running, *others = submitter.schedule_many("k", 5)
    assert begun.wait(60)
    info = submitter.client.drain_worker("worker")
    assert info.draining_since is not None
    eventually(lambda: worker.health().detail == "the worker drains")
    for task_id in others:
        submitter.when(task_id, "new", "enqueued")
    assert thread.is_alive()
    assert submitter.get(running).lease_until is not None
    may_end.set()
    thread.join(60)
    assert not thread.is_alive()
    assert submitter.success(running).result == "done"
    assert {submitter.get(task_id).attempt for task_id in others} == {0}


def test_an_idle_worker_that_an_operator_drains_ends_at_once(
    faulty: Faulty, submitter: Submitter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "leasekit")
    worker = Worker(faulty)

    @worker.handler("k")
    def unused(payload: Any) -> None: ...

    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    eventually(lambda: [known.name for known in submitter.client.workers()] == ["worker"])
    submitter.client.drain_worker("worker")
    thread.join(60)
    assert not thread.is_alive()
    assert caplog.text.count("an operator drains this worker: it ends once its 0 handlers have ended") == 1


def test_a_stop_limits_the_time_of_a_worker_that_drains(faulty: Faulty, submitter: Submitter, at_work: AtWork) -> None:
    worker = Worker(faulty, drain_grace=0, drain_timeout=math.inf)
    begun = threading.Event()

    @worker.handler("k")
    async def waits(payload: Any) -> None:
        begun.set()
        await anyio.sleep(600)

    with at_work(worker):
        task_id = submitter.schedule("k")
        assert begun.wait(60)
        submitter.client.drain_worker("worker")
        eventually(lambda: worker.health().detail == "the worker drains")
        worker.stop()
        info = submitter.when(task_id, "enqueued")
    assert [run.outcome for run in info.history] == ["release"]
