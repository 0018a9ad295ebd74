"""Several tasks of a kind in one process: each has a lease of its own, and ends by itself or with its process."""

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType

import pytest

from leasekit import Worker
from leasekit.errors import ConfigError
from leasekit.task import Status
from leasekit.testing import faults
from leasekit.testing.faults import Faulty
from tests.sampling import slow_after
from tests.waiting import eventually
from tests.worker.conftest import Submitter
from tests.worker.process.conftest import Runs

AtWork = Callable[[Worker], AbstractContextManager[Worker]]
IsDead = Callable[[int], bool]

SHORT = {"claim_timeout": 2, "heartbeat_timeout": 2}


@pytest.fixture
def worker(faulty: Faulty, bodies: ModuleType) -> Worker:
    """With one process, in which three tasks run at once."""
    worker = Worker(faulty, concurrency=3, drain_grace=0)
    worker.handler("k", run="process", threads=3)(bodies.calls)
    return worker


def start(submitter: Submitter, runs: Runs, *names: str) -> tuple[int, list[str]]:
    """Have these bodies run at once; return their process, and the ids of their tasks."""
    ids: list[str] = []
    for name in names:
        ids.append(submitter.schedule("k", [name, runs.path]))
        runs.nth(len(ids))
    (pid,) = {pid for pid, _ in runs.all}
    return pid, ids


def test_tasks_of_a_kind_run_at_once_in_one_process(
    worker: Worker, at_work: AtWork, submitter: Submitter, runs: Runs, is_dead: IsDead
) -> None:
    with at_work(worker):
        executor, ids = start(submitter, runs, "heeds", "heeds", "heeds")
        assert worker.running == 3
    assert is_dead(executor)
    for info in map(submitter.get, ids):
        assert (info.status, info.crashes) == (Status.ENQUEUED, 0)


def test_results_and_checkpoints_are_those_of_their_tasks(
    faulty: Faulty, at_work: AtWork, submitter: Submitter, bodies: ModuleType
) -> None:
    worker = Worker(faulty, concurrency=4)
    worker.handler("k", run="process", threads=4)(bodies.returns_its_payload)
    with at_work(worker):
        ids = submitter.schedule_many("k", 60)
        infos = [submitter.success(task_id) for task_id in ids]
    assert [info.result for info in infos] == [info.progress for info in infos] == list(range(60))


def test_async_handlers_run_at_once_too(
    faulty: Faulty, at_work: AtWork, submitter: Submitter, bodies: ModuleType
) -> None:
    worker = Worker(faulty, concurrency=3)
    worker.handler("k", run="process", threads=3)(bodies.meets_others)
    with at_work(worker):
        whos = [submitter.success(task_id).result for task_id in submitter.schedule_many("k", 3)]
    assert len(set(whos)) == 1


def test_the_last_process_has_as_many_threads_as_are_left(
    faulty: Faulty, at_work: AtWork, submitter: Submitter, bodies: ModuleType, runs: Runs
) -> None:
    worker = Worker(faulty, concurrency=3, drain_grace=0)
    worker.handler("k", run="process", threads=2)(bodies.heeds)
    with at_work(worker):
        for count in range(3):
            submitter.schedule("k", runs.path)
            runs.nth(count + 1)
        submitter.schedule("k", runs.path)
        assert worker.running == 3
    first, second, third = [pid for pid, _ in runs.all]
    assert first == second != third


@pytest.mark.parametrize("whom", ["executor", "guard"])
def test_after_a_kill_all_tasks_of_the_process_run_again_at_once(
    whom: str, worker: Worker, at_work: AtWork, submitter: Submitter, runs: Runs, is_dead: IsDead
) -> None:
    with at_work(worker):
        executor, ids = start(submitter, runs, "heeds", "heeds", "heeds")
        os.kill(executor if whom == "executor" else runs.nth(1)[1], signal.SIGKILL)
        runs.nth(6)  # far within the ttl: nobody waited for that
        assert is_dead(executor)
        assert executor not in {pid for pid, _ in runs.all[3:]}
        for info in map(submitter.get, ids):
            assert (info.crashes, info.attempt) == (1, 2)
            assert "SIGKILL" in info.history[0].error["message"]


def test_a_lost_body_that_goes_on_ends_its_process_and_its_neighbours_run_again_at_once(
    worker: Worker, at_work: AtWork, faulty: Faulty, submitter: Submitter, runs: Runs, runs_no_more: IsDead
) -> None:
    with at_work(worker):
        executor, neighbours = start(submitter, runs, "heeds", "heeds")
        lost = submitter.schedule("k", ["goes_on", runs.path], max_crashes=0, **SHORT)
        runs.nth(3)
        faulty.always("beat", faults.drop)
        submitter.when(lost, Status.DEAD)
        assert runs_no_more(executor)
        runs.nth(5)  # their leases would have been trusted for minutes
        assert executor not in {pid for pid, _ in runs.all[3:]}
        for info in map(submitter.get, neighbours):
            assert info.crashes == 1
            # By the guard's timer where the machine is too busy to let the worker end the process in time.
            why = info.history[0].error["message"]
            assert f"for another task in it, {lost}: " in why or "because a lease in it ended (watchdog)" in why


@pytest.mark.parametrize("whom", slow_after(1, ["both", "executor", "guard"]))
def test_no_code_of_a_lost_body_goes_on_whoever_is_stopped(
    whom: str,
    worker: Worker,
    at_work: AtWork,
    faulty: Faulty,
    submitter: Submitter,
    runs: Runs,
    runs_no_more: IsDead,
) -> None:
    with at_work(worker):
        executor, (neighbour,) = start(submitter, runs, "heeds")
        lost = submitter.schedule("k", ["goes_on", runs.path], max_crashes=0, **SHORT)
        _, guard = runs.nth(2)
        for pid in {"executor": [executor], "guard": [guard], "both": [executor, guard]}[whom]:
            os.kill(pid, signal.SIGSTOP)
        faulty.always("beat", faults.drop)
        submitter.when(lost, Status.DEAD)
        assert runs_no_more(executor)
        runs.nth(3)
        assert submitter.get(neighbour).crashes == 1


def test_a_lost_body_that_ends_in_time_leaves_its_neighbour_alone(
    worker: Worker, at_work: AtWork, faulty: Faulty, submitter: Submitter, runs: Runs
) -> None:
    with at_work(worker):
        _, (neighbour,) = start(submitter, runs, "heeds")
        submitter.schedule("k", ["heeds", runs.path], **SHORT)
        runs.nth(2)
        faulty.always("beat", faults.drop)
        eventually(lambda: worker.running == 1)
        assert submitter.get(neighbour).crashes == 0
    assert len({pid for pid, _ in runs.all}) == 1


def test_a_cancel_ends_one_body_alone(worker: Worker, at_work: AtWork, submitter: Submitter, runs: Runs) -> None:
    with at_work(worker):
        _, others = start(submitter, runs, "heeds", "heeds")
        cancelled = submitter.schedule("k", ["heeds", runs.path], **SHORT)
        runs.nth(3)
        submitter.client.cancel(cancelled)
        submitter.when(cancelled, Status.CANCELLED)
        assert worker.running == 2
        assert [submitter.get(task_id).crashes for task_id in others] == [0, 0]
    assert len({pid for pid, _ in runs.all}) == 1


def test_a_cancelled_body_that_goes_on_ends_its_process(
    worker: Worker, at_work: AtWork, submitter: Submitter, runs: Runs, is_dead: IsDead
) -> None:
    with at_work(worker):
        executor, (neighbour,) = start(submitter, runs, "heeds")
        cancelled = submitter.schedule("k", ["goes_on", runs.path], **SHORT)
        runs.nth(2)
        submitter.client.cancel(cancelled)
        submitter.when(cancelled, Status.CANCELLED)
        assert is_dead(executor)
        runs.nth(3)
        info = submitter.get(neighbour)
        assert info.crashes == 1
        assert f"for another task in it, {cancelled}: " in info.history[0].error["message"]


def test_a_stop_gives_all_tasks_of_a_process_back_with_their_progress(
    faulty: Faulty, at_work: AtWork, submitter: Submitter, bodies: ModuleType, runs: Runs
) -> None:
    worker = Worker(faulty, concurrency=2, drain_grace=0.1)
    worker.handler("k", run="process", threads=2)(bodies.goes_on_with_progress)
    with at_work(worker):
        ids = [submitter.schedule("k", runs.path) for _ in range(2)]
        runs.nth(2)
    for info in map(submitter.get, ids):
        assert (info.status, info.attempt, info.crashes, info.progress) == (Status.ENQUEUED, 0, 0, "far")


def test_a_process_whose_socket_a_body_closes_ends_as_a_crash_of_all(
    worker: Worker, at_work: AtWork, submitter: Submitter, runs: Runs
) -> None:
    with at_work(worker):
        _, (neighbour,) = start(submitter, runs, "heeds")
        submitter.when(submitter.schedule("k", ["closes_everything", ""], max_crashes=0), Status.DEAD)
        runs.nth(2)
        assert submitter.get(neighbour).crashes == 1


def test_a_guard_that_does_not_answer_costs_the_running_tasks_a_crash_and_the_new_one_nothing(
    worker: Worker,
    at_work: AtWork,
    submitter: Submitter,
    runs: Runs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("leasekit._worker.process.place._ANSWER", 1.0)
    with at_work(worker):
        _, (running,) = start(submitter, runs, "heeds")
        os.kill(runs.nth(1)[1], signal.SIGSTOP)
        new = submitter.schedule("k", ["heeds", runs.path])
        runs.nth(3)
        assert (submitter.get(running).crashes, submitter.get(new).crashes) == (1, 0)


# What is refused


def a_function(payload: None) -> None: ...


def test_threads_are_for_processes(worker: Worker) -> None:
    with pytest.raises(ConfigError, match="use concurrency"):
        worker.handler("other", threads=2)(a_function)


@pytest.mark.parametrize("threads", [0, 1.5, 1_001])
def test_a_number_of_threads_that_is_none_is_refused(worker: Worker, threads: int) -> None:
    with pytest.raises(ConfigError, match="threads must be"):
        worker.handler("other", run="process", threads=threads)(a_function)
