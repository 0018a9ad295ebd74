"""What a handler gets and what becomes of what it says is the same in a process of its own."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import anyio
import pytest

from leasekit import Worker
from leasekit.errors import ConfigError
from leasekit.task import Status
from tests.sampling import slow_after
from tests.worker.conftest import Submitter
from tests.worker.process.conftest import Runs

AtWork = Callable[[Worker], AbstractContextManager[Worker]]


def test_it_runs_in_a_session_of_its_own_under_a_guard(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType
) -> None:
    worker.handler("k", run="process")(bodies.who)
    with at_work(worker):
        who = submitter.success(submitter.schedule("k")).result
    assert who["session"] == who["executor"] not in (who["guard"], os.getpid())


def test_a_result_that_is_too_large_is_a_fatal_failure(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType
) -> None:
    worker.handler("k", run="process")(bodies.returns_much)
    with at_work(worker):
        info = submitter.when(submitter.schedule("k"), "fatal_failure")
    assert "this result has 9,000,002 bytes as JSON, the service takes 1,048,576" in info.error["message"]


def test_one_process_runs_one_task_after_another(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType
) -> None:
    worker.handler("k", run="process")(bodies.who)
    with at_work(worker):
        whos = [submitter.success(task_id).result for task_id in submitter.schedule_many("k", 20)]
    assert all(who == whos[0] for who in whos)


def test_a_lease_says_and_takes_what_it_does_elsewhere(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType
) -> None:
    worker.handler("k", run="process")(bodies.tells)
    with at_work(worker):
        info = submitter.success(submitter.schedule("k"))
    assert info.result == {"fence": 1, "attempt": 1, "checkpoint": None, "trusted": True, "lost": False}
    assert info.progress == {"page": 1}
    (follower,) = submitter.client.list_tasks(kind="next").tasks
    assert (follower.payload, follower.priority) == ({"after": info.id}, 0)


def test_a_handler_elsewhere_is_told_of_the_end_of_its_runtime(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType
) -> None:
    worker.handler("k", run="process")(bodies.outlasts_its_limit)
    with at_work(worker):
        info = submitter.when(submitter.schedule("k", max_runtime=2, max_crashes=0), "dead")
    assert 0 <= info.progress < 2
    assert "its max_runtime is over" in info.error["message"]


def test_what_was_reported_before_a_crash_is_the_checkpoint_of_the_next_run(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType
) -> None:
    worker.handler("k", run="process")(bodies.fails_first)
    with at_work(worker):
        assert submitter.success(submitter.schedule("k")).result == [1, 2]


def test_async_handlers_run_too(worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType) -> None:
    worker.handler("k", run="process")(bodies.sleeps)
    with at_work(worker):
        assert submitter.success(submitter.schedule("k", 0.01)).result == "slept"


def test_all_doors_of_a_worker_lead_there(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType, door: str
) -> None:
    worker.handler("k", run="process")(bodies.add)
    with at_work(worker):
        assert submitter.success(submitter.schedule("k", [1, 2])).result == 3


def test_payloads_and_results_of_many_kilobytes_pass(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType
) -> None:
    worker.handler("k", run="process")(bodies.large)
    with at_work(worker):
        assert submitter.success(submitter.schedule("k", "x" * 500_000)).result == "x" * 1_000_000


def test_a_payload_that_does_not_fit_is_a_fatal_failure_that_says_where(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType
) -> None:
    worker.handler("k", run="process")(bodies.add)
    with at_work(worker):
        info = submitter.when(submitter.schedule("k", [1, "two"]), Status.FATAL_FAILURE)
    assert "$[1]" in info.error["message"]


ENDS = {
    "raises_value_error": ("why", Status.RETRIABLE_FAILURE, "ValueError", "why"),
    "no_json": (None, Status.FATAL_FAILURE, "Fatal", "not JSON"),
    "hard_exit": (3, Status.DEAD, "ExecutorDied", "its executor exited with code 3"),
    "reads_nowhere": (None, Status.DEAD, "ExecutorDied", "its executor was killed by SIGSEGV (segmentation fault)"),
    "garbles_its_line": (None, Status.DEAD, "ExecutorDied", "closed or garbled its socket to the worker"),
    "prints_into_its_line": (None, Status.DEAD, "ExecutorDied", "closed or garbled its socket to the worker"),
    "no_number": (None, Status.FATAL_FAILURE, "Fatal", "NaN or an infinity"),
    "too_deep": (None, Status.FATAL_FAILURE, "Fatal", "this result is nested too deep"),
    "aborts": (None, Status.DEAD, "ExecutorDied", "its executor was killed by SIGABRT (aborted)"),
    "closes_everything": (None, Status.DEAD, "ExecutorDied", "its executor exited with code 1"),
    "raises_fatal": ("why", Status.FATAL_FAILURE, "Fatal", "why"),
    "exits": (3, Status.RETRIABLE_FAILURE, "SystemExit", "3"),
}


@pytest.mark.parametrize("body", slow_after(5, ENDS))
def test_whatever_a_body_does_it_ends_as_what_it_is(
    body: str, worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType
) -> None:
    payload, status, kind, message = ENDS[body]
    worker.handler("k", run="process")(getattr(bodies, body))
    with at_work(worker):
        info = submitter.when(submitter.schedule("k", payload, max_crashes=0), status)
    assert info.error["type"] == kind
    assert message in info.error["message"]


def test_a_failure_comes_with_its_traceback_in_the_task_and_in_the_log(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    worker.handler("k", run="process")(bodies.raises_value_error)
    with caplog.at_level(logging.WARNING, "leasekit"), at_work(worker):
        info = submitter.when(submitter.schedule("k", "why"), Status.RETRIABLE_FAILURE)
    assert "in raises_value_error" in info.error["traceback"]
    assert any("in raises_value_error" in record.getMessage() for record in caplog.records)


def test_tasks_that_crash_too_often_are_dead_with_the_reason(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType
) -> None:
    worker.handler("k", run="process")(bodies.hard_exit)
    with at_work(worker):
        info = submitter.when(submitter.schedule("k", 7, max_crashes=2), Status.DEAD)
    assert (info.crashes, [entry.outcome for entry in info.history]) == (3, ["crash"] * 3)
    assert "max_crashes is 2" in (info.reason or "")
    assert info.error["message"] == "its executor exited with code 7"


def test_a_child_that_a_handler_forks_does_not_become_a_second_executor(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType
) -> None:
    worker.handler("k", run="process")(bodies.forks)
    with at_work(worker):
        assert submitter.success(submitter.schedule("k")).result == 0


def test_a_worker_that_hears_of_no_childs_end_knows_how_its_executor_ended(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType
) -> None:
    worker.handler("k", run="process")(bodies.hard_exit)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with at_work(worker):
            info = submitter.when(submitter.schedule("k", 3, max_crashes=0), Status.DEAD)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert info.error["message"] == "its executor exited with code 3"


def test_a_child_that_a_handler_forks_ends_when_it_is_told_to(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType
) -> None:
    worker.handler("k", run="process")(bodies.ends_a_child)
    with at_work(worker):
        assert submitter.success(submitter.schedule("k")).result == -signal.SIGTERM


def test_what_a_body_writes_goes_where_the_worker_writes(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    worker.handler("k", run="process")(bodies.says)
    with at_work(worker):
        submitter.success(submitter.schedule("k", "hello"))
        out, err = capfd.readouterr()
    assert out == "hello\n"
    assert "hello\n" in err


def test_a_signal_to_all_processes_of_a_service_ends_no_body(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType, runs: Runs
) -> None:
    worker.handler("k", run="process")(bodies.holds_the_gil)
    with at_work(worker):
        task_id = submitter.schedule("k", {"path": runs.path, "seconds": 0.2})
        for pid in runs.nth(1):
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        submitter.success(task_id)
    assert len(runs.all) == 1


def test_kinds_with_slots_of_their_own_have_executors_of_their_own(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType, runs: Runs
) -> None:
    worker.handler("long", run="process", concurrency=1)(bodies.heeds)
    worker.handler("short", run="process", concurrency=1)(bodies.add)
    with at_work(worker):
        long = submitter.schedule("long", runs.path, heartbeat_timeout=2)
        runs.nth(1)
        assert submitter.success(submitter.schedule("short", [1])).result == 1
        submitter.client.cancel(long)
        submitter.when(long, Status.CANCELLED)


# What is refused


def a_function(payload: None) -> None: ...


class AClass:
    def __call__(self, payload: None) -> None: ...


def nested() -> Callable[[Any], None]:
    def within(payload: Any) -> None: ...

    return within


@pytest.mark.parametrize("function", [lambda payload: None, nested(), AClass()])
def test_what_has_no_name_in_a_module_is_refused(worker: Worker, function: Callable[[Any], None]) -> None:
    with pytest.raises(ConfigError, match="finds a function by its name"):
        worker.handler("k", run="process")(function)


def test_another_system_than_linux_is_refused(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(ConfigError, match="needs Linux"):
        worker.handler("k", run="process")(a_function)


def test_a_function_that_is_hidden_by_another_is_refused(
    worker: Worker, bodies: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.handler("k", run="process")(bodies.add)
    monkeypatch.setattr(bodies, "add", bodies.who)
    with pytest.raises(ConfigError, match=r"bodies\.add is not this one"):
        worker.run()


def test_a_module_that_executors_cannot_import_ends_the_worker_with_the_reason(
    worker: Worker, bodies: ModuleType, monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    monkeypatch.setattr(bodies.add, "__module__", "nowhere")
    monkeypatch.setitem(sys.modules, "nowhere", bodies)
    worker.handler("k", run="process")(bodies.add)
    with pytest.raises(ConfigError, match="No module named 'nowhere'"):
        worker.run() if door == "run" else anyio.run(worker.serve, backend=door)
