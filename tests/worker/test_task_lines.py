"""What a worker logs of each run: a line when it begins, and one when it has ended."""

import logging
import os
import threading
from typing import Any, Literal

import msgspec
import pytest

import leasekit
from leasekit import Worker, _log
from leasekit.testing.faults import Faulty
from tests.waiting import eventually
from tests.worker.conftest import AtWork, Submitter


def lines(caplog: pytest.LogCaptureFixture, task_id: str) -> list[tuple[int, str, dict[str, Any]]]:
    """Level, message and fields of the lines about a run."""
    names = ("kind", "attempt", "outcome")
    return [
        (record.levelno, record.getMessage(), {name: vars(record)[name] for name in names if name in vars(record)})
        for record in list(caplog.records)
        if getattr(record, "task_id", None) == task_id and hasattr(record, "kind")
    ]


def good(payload: Any) -> str:
    return "result-of-it"


async def good_in_loop(payload: Any) -> str:
    return "result-of-it"


def bad(payload: Any) -> None:
    raise leasekit.Fatal("broken")


def later(payload: Any, held: leasekit.Lease) -> None:
    held.fail("not now", retry=3600)


def given_back(payload: Any, held: leasekit.Lease) -> None:
    held.fail("later", retry=False)


@pytest.mark.parametrize(
    ("handler", "outcome", "level"),
    [
        (good, "success", logging.INFO),
        (good_in_loop, "success", logging.INFO),
        (bad, "fatal", logging.WARNING),
        (given_back, "fatal", logging.WARNING),
        (later, "retry", logging.WARNING),
    ],
)
def test_a_run_is_a_line_when_it_begins_and_one_when_it_has_ended(
    faulty: Faulty,
    submitter: Submitter,
    at_work: AtWork,
    caplog: pytest.LogCaptureFixture,
    handler: Any,
    outcome: str,
    level: int,
) -> None:
    caplog.set_level(logging.INFO, "leasekit")
    worker = Worker(faulty)
    worker.handler("k")(handler)
    with at_work(worker):
        task_id = submitter.schedule("k", {"secret": "payload-of-it"})
        eventually(lambda: len(lines(caplog, task_id)) == 2, "both lines")
    (begun, begins, first), (ended, ends, last) = lines(caplog, task_id)
    assert (begun, first) == (logging.INFO, {"kind": "k", "attempt": 1})
    assert (ended, last) == (level, {"kind": "k", "attempt": 1, "outcome": outcome})
    assert begins == f"task {task_id} (k) begins, attempt 1"
    assert f"task {task_id} (k) ended: {outcome}, attempt 1, " in ends
    assert ("unless this was its last attempt" in ends) is (outcome == "retry")
    written = "".join(str(vars(record)) for record in caplog.records)
    assert "payload-of-it" not in written
    assert "result-of-it" not in written


def count(payload: int) -> None: ...


def choose(payload: dict[str, Literal["a"]]) -> None: ...


class Fields(msgspec.Struct, forbid_unknown_fields=True):
    """None."""


def fill(payload: Fields) -> None: ...


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        (given_back, ""),  # what a handler says of its failure may be a secret
        (later, "; it is tried again, unless this was its last attempt"),
        (count, ": the payload does not fit handler 'k': Expected `int`, got `object`"),
        (choose, ": the payload does not fit handler 'k': Invalid enum value - at `$[...]`"),
        (fill, ": the payload does not fit handler 'k': Object contains unknown field"),
    ],
)
def test_a_failure_without_an_exception_has_the_reason_in_its_line_if_it_is_ours(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, caplog: pytest.LogCaptureFixture, handler: Any, why: str
) -> None:
    caplog.set_level(logging.INFO, "leasekit")
    worker = Worker(faulty)
    worker.handler("k")(handler)
    with at_work(worker):
        task_id = submitter.schedule("k", {"secret": "payload-of-it"})
        eventually(lambda: len(lines(caplog, task_id)) == 2, "both lines")
    assert lines(caplog, task_id)[-1][1].endswith(f" s{why}")


@pytest.mark.parametrize(("attempts", "is_dead"), [(1, True), (2, False)])
def test_the_log_says_that_a_task_is_dead(
    faulty: Faulty,
    submitter: Submitter,
    at_work: AtWork,
    caplog: pytest.LogCaptureFixture,
    attempts: int,
    is_dead: bool,
) -> None:
    worker = Worker(faulty)
    worker.handler("k")(later)
    with at_work(worker):
        task_id = submitter.schedule("k", max_attempts=attempts)
        eventually(lambda: submitter.get(task_id).error, "the end of the run")
    assert (submitter.get(task_id).status == "dead") is is_dead
    assert (f"task {task_id} is dead: it is not tried again" in caplog.text) is is_dead


def test_a_run_whose_lease_was_lost_is_said_to_be_lost(
    faulty: Faulty, service: Any, submitter: Submitter, at_work: AtWork, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "leasekit")
    worker = Worker(faulty)
    begun = threading.Event()

    @worker.handler("k")
    def waits(payload: Any, held: leasekit.Lease) -> None:
        begun.set()
        while True:
            held.check()
            threading.Event().wait(0.01)

    with at_work(worker):
        task_id = submitter.schedule("k", claim_timeout=4, heartbeat_timeout=4)
        assert begun.wait(30)
        service.steal(task_id)
        eventually(lambda: len(lines(caplog, task_id)) == 2, "both lines")
    level, message, fields = lines(caplog, task_id)[-1]
    assert (level, fields["outcome"]) == (logging.INFO, "lost")
    assert "taken" in message


@pytest.mark.skipif(not hasattr(os, "eventfd"), reason="handlers in processes need Linux")
def test_a_run_in_a_process_of_its_own_is_logged_as_others_are(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "leasekit")
    worker = Worker(faulty, concurrency=1)
    worker.handler("k", run="process")(dies)
    with at_work(worker):
        task_id = submitter.schedule("k", max_crashes=0)
        eventually(lambda: len(lines(caplog, task_id)) == 2, "both lines")
    level, message, fields = lines(caplog, task_id)[-1]
    assert (level, fields["outcome"]) == (logging.WARNING, "crash")
    assert "its executor" in message


def dies(payload: Any) -> None:
    os._exit(3)


def test_a_stuck_log_holds_up_no_run(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_log, "_PATIENCE", 0.2)  # as outside of tests: see the conftest
    monkeypatch.setattr(_log, "_SHARE", 0.02)
    go_on = threading.Event()

    class Stuck(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            go_on.wait(60)

    logger, stuck = logging.getLogger("leasekit"), Stuck()
    level = logger.level
    logger.addHandler(stuck)
    logger.setLevel(logging.INFO)
    worker = Worker(faulty, concurrency=1)
    worker.handler("thread")(good)
    worker.handler("loop")(good_in_loop)
    try:
        with at_work(worker):
            for task_id in [submitter.schedule(kind) for kind in ("thread", "loop") for _ in range(3)]:
                submitter.success(task_id)
            assert not go_on.is_set()
            go_on.set()
    finally:
        go_on.set()
        logger.removeHandler(stuck)
        logger.setLevel(level)
