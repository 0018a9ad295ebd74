"""No body outlives its lease, no lease is lost for the sake of a body, and nobody's end is another's."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

import pytest

from leasekit import Worker
from leasekit._worker.process import place
from leasekit.hooks import Event, Lost
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


def test_a_body_that_holds_the_gil_for_several_ttls_keeps_its_lease_and_ends_once(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType, runs: Runs
) -> None:
    worker.handler("k", run="process")(bodies.holds_the_gil)
    with at_work(worker):
        info = submitter.success(submitter.schedule("k", {"path": runs.path, "seconds": 5}, **SHORT))
    assert (len(runs.all), info.crashes, len(info.history)) == (1, 0, 1)


def test_a_body_that_was_stopped_while_its_lease_was_renewed_has_not_lost_it(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType, runs: Runs
) -> None:
    """Its clock is past the end that it knows of, and the renewals are still to be read."""
    worker.handler("k", run="process")(bodies.checks_without_rest)
    with at_work(worker):
        task_id = submitter.schedule("k", runs.path, claim_timeout=4, heartbeat_timeout=4)
        executor, _ = runs.nth(1)
        os.kill(executor, signal.SIGSTOP)
        time.sleep(4)  # it is this that has to pass
        os.kill(executor, signal.SIGCONT)
        time.sleep(0.1)
        Path(f"{runs.path}-finish").touch()
        info = submitter.success(task_id)
    assert (len(runs.all), info.crashes) == (1, 0)


def test_what_a_thread_reports_that_outlives_its_body_is_not_the_next_tasks_progress(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType
) -> None:
    worker.handler("k", run="process")(bodies.leaves_a_thread)
    with at_work(worker):
        submitter.success(submitter.schedule("k"))
        info = submitter.when(submitter.schedule("k", "next", max_crashes=0), Status.DEAD)
    assert info.progress is None


def test_an_executor_that_has_changed_its_user_ends_with_its_guard_all_the_same(
    faulty: Faulty,
    at_work: AtWork,
    submitter: Submitter,
    bodies: ModuleType,
    runs: Runs,
    is_dead: IsDead,
) -> None:
    worker = Worker(faulty, concurrency=1, drain_grace=0)
    worker.handler("k", run="process")(bodies.calls)
    with at_work(worker):
        assert submitter.success(submitter.schedule("k", ["changes_its_user", ""])).result == 0
        submitter.schedule("k", ["heeds", runs.path])
        executor, guard = runs.nth(1)
        os.kill(guard, signal.SIGKILL)
        eventually(lambda: is_dead(executor))


def test_an_executor_whose_guard_does_not_answer_is_given_no_body(
    worker: Worker,
    at_work: AtWork,
    submitter: Submitter,
    bodies: ModuleType,
    runs: Runs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(place, "_ANSWER", 1.0)
    worker.handler("k", run="process")(bodies.calls)
    with at_work(worker):
        first = submitter.success(submitter.schedule("k", ["who", ""])).result
        os.kill(first["guard"], signal.SIGSTOP)
        info = submitter.success(submitter.schedule("k", ["run_once", runs.path]))
    ((executor, guard),) = runs.all
    assert {executor, guard}.isdisjoint(first.values())
    assert info.history[0].outcome == "release"
    assert info.crashes == 0


@pytest.mark.parametrize("whom", ["executor", "guard"])
def test_after_a_kill_the_task_runs_again_in_another_process(
    whom: str, faulty: Faulty, at_work: AtWork, submitter: Submitter, bodies: ModuleType, runs: Runs, is_dead: IsDead
) -> None:
    worker = Worker(faulty, concurrency=1, drain_grace=0)
    worker.handler("k", run="process")(bodies.heeds)
    with at_work(worker):
        task_id = submitter.schedule("k", runs.path)
        first = runs.nth(1)
        os.kill(first[0 if whom == "executor" else 1], signal.SIGKILL)
        second = runs.nth(2)  # far within the ttl: nobody waited for that
        assert set(first).isdisjoint(second)
        assert all(map(is_dead, first))
        info = submitter.get(task_id)
        assert (info.crashes, info.attempt) == (1, 2)
        assert "SIGKILL" in info.history[0].error["message"]


def test_a_crash_leaves_its_neighbour_alone(
    faulty: Faulty, at_work: AtWork, submitter: Submitter, bodies: ModuleType, runs: Runs, is_dead: IsDead
) -> None:
    worker = Worker(faulty, concurrency=2, drain_grace=0)
    worker.handler("long", run="process")(bodies.heeds)
    worker.handler("crash", run="process")(bodies.hard_exit)
    with at_work(worker):
        long = submitter.schedule("long", runs.path)
        executor, _ = runs.nth(1)
        submitter.when(submitter.schedule("crash", 1, max_crashes=1), Status.DEAD)
        assert not is_dead(executor)
        assert submitter.get(long).crashes == 0
    assert len(runs.all) == 1


@pytest.mark.parametrize("name", ["goes_on", "awaits_a_thread"])
def test_a_cancelled_body_that_goes_on_is_killed_and_only_then_settled(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType, runs: Runs, is_dead: IsDead, name: str
) -> None:
    worker.handler("k", run="process")(getattr(bodies, name))
    with at_work(worker):
        task_id = submitter.schedule("k", runs.path, **SHORT)
        executor, _ = runs.nth(1)
        submitter.client.cancel(task_id)
        submitter.when(task_id, Status.CANCELLED)
        assert is_dead(executor)


def test_the_checkpoint_with_which_a_body_hears_that_it_is_cancelled_is_kept(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType, runs: Runs
) -> None:
    worker.handler("k", run="process")(bodies.counts)
    with at_work(worker):
        task_id = submitter.schedule("k", runs.path)  # not SHORT: the body has 10 s to end by itself
        runs.nth(1)
        submitter.client.cancel(task_id)
        info = submitter.when(task_id, Status.CANCELLED)
    assert info.progress == int(Path(f"{runs.path}-done").read_text())


def test_a_stopped_executor_is_killed_when_its_task_is_cancelled(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType, runs: Runs, is_dead: IsDead
) -> None:
    worker.handler("k", run="process")(bodies.goes_on)
    with at_work(worker):
        task_id = submitter.schedule("k", runs.path, **SHORT)
        executor, _ = runs.nth(1)
        os.kill(executor, signal.SIGSTOP)
        submitter.client.cancel(task_id)
        submitter.when(task_id, Status.CANCELLED)
        assert is_dead(executor)


def test_an_idle_body_that_goes_on_shows_its_stacks_is_killed_and_counts_as_a_crash(
    worker: Worker,
    at_work: AtWork,
    submitter: Submitter,
    bodies: ModuleType,
    runs: Runs,
    capfd: pytest.CaptureFixture[str],
) -> None:
    worker.handler("k", run="process", idle_timeout=0.3)(bodies.goes_on)
    with at_work(worker):
        task_id = submitter.schedule("k", runs.path, max_crashes=0, claim_timeout=40, heartbeat_timeout=40)
        info = submitter.when(task_id, Status.DEAD)
    assert "reported no progress for 0.3 s, and did not end when told to" in info.error["message"]
    assert "in goes_on" in capfd.readouterr().err  # it has a second for that


def test_an_idle_body_that_ends_when_told_to_is_tried_again(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType, runs: Runs
) -> None:
    worker.handler("k", run="process", idle_timeout=0.3)(bodies.heeds)
    with at_work(worker):
        info = submitter.when(submitter.schedule("k", runs.path), Status.RETRIABLE_FAILURE)
    assert info.error["type"] == "IdleTimeout"
    assert "no progress for 0.3 s" in info.error["message"]


def test_a_body_is_told_of_its_loss_and_may_end_by_itself(
    worker: Worker,
    at_work: AtWork,
    faulty: Faulty,
    submitter: Submitter,
    bodies: ModuleType,
    runs: Runs,
    is_dead: IsDead,
) -> None:
    worker.handler("k", run="process")(bodies.counts)
    with at_work(worker):
        submitter.schedule("k", runs.path)  # not SHORT: the body has 10 s to end by itself
        executor, _ = runs.nth(1)
        faulty.always("beat", faults.steal)
        eventually(lambda: worker.running == 0)
        assert not is_dead(executor)


@pytest.mark.parametrize("whom", slow_after(2, ["nobody", "both", "executor", "guard"]))
def test_a_lost_body_that_goes_on_is_dead_before_its_task_runs_again(
    whom: str,
    faulty: Faulty,
    at_work: AtWork,
    submitter: Submitter,
    bodies: ModuleType,
    runs: Runs,
    events: list[Event],
    is_dead: IsDead,
    runs_no_more: IsDead,
) -> None:
    """Whoever of the two is stopped, and stays so. The guard runs no user code, and ends after the executor."""
    worker = Worker(faulty, concurrency=1, hooks=[events.append])
    worker.handler("k", run="process")(bodies.goes_on)
    with at_work(worker):
        task_id = submitter.schedule("k", runs.path, max_crashes=0, **SHORT)
        executor, guard = runs.nth(1)
        for pid in {"nobody": [], "executor": [executor], "guard": [guard], "both": [executor, guard]}[whom]:
            os.kill(pid, signal.SIGSTOP)
        faulty.always("beat", faults.drop)
        submitter.when(task_id, Status.DEAD)
        assert runs_no_more(executor)
        eventually(lambda: is_dead(guard))
    assert [event.task_id for event in events if isinstance(event, Lost)] == [task_id]
    assert len(runs.all) == 1


def test_one_lost_lease_takes_no_other_along(
    faulty: Faulty, at_work: AtWork, submitter: Submitter, bodies: ModuleType, runs: Runs, is_dead: IsDead
) -> None:
    worker = Worker(faulty, concurrency=2, drain_grace=0)
    worker.handler("k", run="process")(bodies.goes_on)
    with at_work(worker):
        long = submitter.schedule("k", runs.path)
        neighbour, _ = runs.nth(1)
        lost = submitter.schedule("k", runs.path, max_crashes=0, **SHORT)
        runs.nth(2)
        faulty.always("beat", faults.drop)
        submitter.when(lost, Status.DEAD)
        assert not is_dead(neighbour)
        assert submitter.get(long).crashes == 0


def test_what_a_body_has_started_dies_with_its_executor(
    worker: Worker,
    at_work: AtWork,
    submitter: Submitter,
    bodies: ModuleType,
    tmp_path: Path,
    is_dead: IsDead,
) -> None:
    worker.handler("k", run="process")(bodies.leaves_a_child)
    child = tmp_path / "child"
    with at_work(worker):
        submitter.when(submitter.schedule("k", str(child), max_crashes=0), Status.DEAD)
        eventually(lambda: is_dead(int(child.read_text())))


def test_an_executor_that_dies_without_a_body_is_replaced(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType, is_dead: IsDead
) -> None:
    worker.handler("k", run="process")(bodies.who)
    with at_work(worker):
        first = submitter.success(submitter.schedule("k")).result
        os.kill(first["executor"], signal.SIGKILL)
        eventually(lambda: is_dead(first["executor"]))
        second = submitter.success(submitter.schedule("k"))
    assert second.result != first
    assert second.crashes == 0


def test_end_all_gives_back_what_runs_with_its_progress(
    faulty: Faulty, at_work: AtWork, submitter: Submitter, bodies: ModuleType, runs: Runs, is_dead: IsDead
) -> None:
    worker = Worker(faulty, concurrency=1, drain_grace=0.1)
    worker.handler("k", run="process")(bodies.goes_on_with_progress)
    with at_work(worker):
        task_id = submitter.schedule("k", runs.path)
        executor, _ = runs.nth(1)
    info = submitter.get(task_id)
    assert (info.status, info.attempt, info.progress) == (Status.ENQUEUED, 0, "far")
    assert [entry.outcome for entry in info.history] == ["release"]
    assert is_dead(executor)
