"""A whole worker over SWF: real threads, real boto3, real time."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import leasekit
from leasekit import Cancelled, Heartbeats, Lease, LeaseLost, Worker
from tests.adapters.aws.conftest import Aws

ARN = "arn:aws:states:eu-central-1:123456789012:activity:resize"


@contextlib.contextmanager
def at_work(worker: Worker) -> Iterator[None]:
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join(60)
    assert not thread.is_alive(), "the worker does not stop"


def hold_on(held: Lease, *, meanwhile: Callable[[], None] = lambda: None) -> None:
    meanwhile()
    while True:
        held.check()
        time.sleep(0.01)


def test_a_worker_runs_its_handlers_and_reports_what_they_return(aws: Aws) -> None:
    worker = Worker(f"swf://media/render?endpoint={aws.url}", concurrency=2)

    @worker.handler("resize")
    def resize(payload: dict[str, int]) -> int:
        return payload["width"] * 2

    with at_work(worker):
        works = [aws.schedule("render", "resize", {"width": n}) for n in range(5)]
        aws.wait_until(lambda: all(work.end for work in works))
    assert sorted(work.end["result"] for work in works) == ["0", "2", "4", "6", "8"]


def test_a_payload_that_does_not_fit_is_a_fatal_failure_for_the_decider(aws: Aws) -> None:
    worker = Worker(f"swf://media/render?endpoint={aws.url}")

    @worker.handler("resize")
    def resize(payload: dict[str, int]) -> None:
        pytest.fail(f"it ran: {payload}")

    with at_work(worker):
        work = aws.schedule("render", "resize", raw="no JSON")
        aws.wait_until(lambda: work.end)
    assert work.end["reason"] == "fatal"


def test_a_cancellation_of_the_decider_reaches_the_handler(aws: Aws) -> None:
    worker = Worker(f"swf://media/render?endpoint={aws.url}&ttl=6")
    stopped = threading.Event()

    @worker.handler("resize")
    def resize(_: None, held: Lease) -> None:
        work.cancelled = True
        try:
            hold_on(held)
        except Cancelled:
            stopped.set()
            raise

    work = aws.schedule("render", "resize")
    with at_work(worker):
        assert stopped.wait(30)
        aws.wait_until(lambda: work.end)
    assert "cancelled" in work.end


def test_a_lease_that_step_functions_gave_away_is_lost_to_its_body(aws: Aws) -> None:
    work = aws.schedule(ARN, "resize")
    heartbeats = Heartbeats().for_ttl(3)
    with leasekit.connect(f"sfn://{ARN}?endpoint={aws.url}&ttl=3", heartbeats=heartbeats) as client:
        task = next(client.tasks("resize"))
        held = leasekit.lease(task)
        with pytest.raises(LeaseLost, match="expired"), held:
            hold_on(held, meanwhile=lambda: aws.turn(301))
    assert work.state == "timed out"


def test_throttling_costs_no_lease(aws: Aws) -> None:
    work = aws.schedule("render", "resize")
    with leasekit.connect(f"swf://media/render?endpoint={aws.url}&ttl=4") as client:
        task = next(client.tasks("resize"))
        with leasekit.lease(task) as held:
            before = len(aws.asked("RecordActivityTaskHeartbeat"))
            aws.next("RecordActivityTaskHeartbeat", *[aws.fault("ThrottlingException")] * 5)
            aws.wait_until(lambda: len(aws.asked("RecordActivityTaskHeartbeat")) >= before + 6)
            held.check()
    assert work.state == "ended"


def test_progress_goes_with_the_next_heartbeat_and_with_a_failure(aws: Aws) -> None:
    work = aws.schedule("render", "resize")
    with leasekit.connect(f"swf://media/render?endpoint={aws.url}&ttl=3") as client:
        task = next(client.tasks("resize"))
        with contextlib.suppress(ZeroDivisionError), leasekit.lease(task) as held:
            held.progress({"page": 7})
            aws.wait_until(lambda: work.details)
            _ = 1 / 0
    assert work.details == ['{"page":7}']
    assert work.end["details"].endswith(',"progress":{"page":7}}')


def test_a_worker_that_was_killed_is_reported_as_crashed_at_once(aws: Aws, tmp_path: Path) -> None:
    """Its supervisor sees it reaped: the decider hears of it long before the heartbeat timeout."""
    handlers = """
        import os, time
        from leasekit import Worker

        worker = Worker()

        @worker.handler("resize")
        def resize(payload):
            open("pid", "w").write(f"{os.getpid()}\\n")
            time.sleep(300)
    """
    (tmp_path / "handlers.py").write_text(textwrap.dedent(handlers))
    url = f"swf://media/render?endpoint={aws.url}"
    command = [sys.executable, "-m", "leasekit", "work", "handlers:worker", "--backend", url]
    work = aws.schedule("render", "resize")
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as supervisor:
        try:
            aws.wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"))
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
            aws.wait_until(lambda: work.end)
        finally:
            supervisor.terminate()
            supervisor.wait(30)
    assert work.end["reason"] == "crashed"
