"""A handler in a process of its own says `NotYet`: its run waits in the worker, and takes no place in a process."""

from types import ModuleType

from leasekit import Worker
from tests.waiting import eventually
from tests.worker.conftest import AtWork, Submitter
from tests.worker.process.conftest import Runs


def test_it_is_called_again_under_the_same_lease(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType, runs: Runs
) -> None:
    worker.handler("k", run="process")(bodies.polls)
    with at_work(worker):
        info = submitter.success(submitter.schedule("k", runs.path))
    assert info.result == [3, "asked once", 1, 1]
    assert info.progress == "asked once"
    assert [run.outcome for run in info.history] == ["success"]
    assert len(runs.all) == 3


def test_a_run_that_waits_takes_no_place_in_a_process(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType, runs: Runs
) -> None:
    worker.handler("k", run="process", window=4)(bodies.polls_for_long)
    with at_work(worker):
        tasks = [submitter.schedule("k", runs.path) for _ in range(4)]
        eventually(lambda: worker.waiting == 4)
    assert len({executor for executor, _ in runs.all}) == 1
    for task_id in tasks:
        info = submitter.get(task_id)
        assert (info.status, info.progress) == ("enqueued", "asked once")
        assert [run.outcome for run in info.history] == ["release"]


def test_a_cancel_request_ends_it_at_once(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType, runs: Runs
) -> None:
    worker.handler("k", run="process")(bodies.polls_for_long)
    with at_work(worker):
        task_id = submitter.schedule("k", runs.path)
        eventually(lambda: worker.waiting == 1)
        submitter.client.cancel(task_id)
        submitter.when(task_id, "cancelled")
        eventually(lambda: worker.waiting == 0)
    assert len(runs.all) == 1
