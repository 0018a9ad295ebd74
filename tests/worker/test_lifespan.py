"""Start-up and shutdown of a worker's process: `@worker.lifespan`."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Protocol

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from leasekit import ConfigError, Lease, Worker, connect
from leasekit.testing.faults import Faulty
from tests.sampling import slow_after
from tests.waiting import eventually
from tests.worker.conftest import AtWork, Submitter


@pytest.fixture
def worker(faulty: Faulty) -> Worker:
    return Worker(faulty, concurrency=2)


@pytest.fixture
def seen() -> list[str]:
    return []


class Declaring(Protocol):
    def __call__(self, worker: Worker, name: str, seen: list[str], *, fails: str = "") -> None: ...


def note(what: str, seen: list[str], fails: str) -> None:
    if fails and what.endswith(fails):
        raise ConnectionError(what)
    seen.append(what)


def declare(worker: Worker, name: str, seen: list[str], *, fails: str = "") -> None:
    @worker.lifespan
    def lifespan() -> Iterator[None]:
        note(f"{name} starts", seen, fails)
        yield
        note(f"{name} ends", seen, fails)


def declare_async(worker: Worker, name: str, seen: list[str], *, fails: str = "") -> None:
    @worker.lifespan
    async def lifespan() -> AsyncIterator[None]:
        await anyio.lowlevel.checkpoint()
        note(f"{name} starts", seen, fails)
        yield
        await anyio.lowlevel.checkpoint()
        note(f"{name} ends", seen, fails)


def claims(faulty: Faulty) -> int:
    return sum(call.kind == "claim" for call in list(faulty.log))


def test_start_ups_come_before_the_first_claim_and_shutdowns_after_the_last_handler(
    worker: Worker, submitter: Submitter, at_work: AtWork, faulty: Faulty, door: str
) -> None:
    seen: list[str] = []
    begun = threading.Event()

    @worker.lifespan
    def first() -> Iterator[None]:
        seen.append(f"first starts, {claims(faulty)} claims")
        yield
        seen.append("first ends")

    @worker.lifespan
    async def second() -> AsyncIterator[None]:
        await anyio.sleep(0.05)
        seen.append(f"second starts, {claims(faulty)} claims")
        yield
        await anyio.lowlevel.checkpoint()
        seen.append("second ends")

    @worker.handler("async")
    async def run_async(payload: None) -> None:
        begun.set()
        await anyio.to_thread.run_sync(eventually, lambda: worker._stopping)
        seen.append("async")

    @worker.handler("thread")
    def run(payload: None) -> None:
        seen.append("thread")

    with at_work(worker):
        submitter.success(submitter.schedule("thread"))
        submitter.schedule("async")
        assert begun.wait(30)
    assert seen == [
        "first starts, 0 claims", "second starts, 0 claims", "thread", "async", "second ends", "first ends",
    ]  # fmt: skip


def test_an_async_one_runs_in_the_event_loop_of_the_handlers(
    worker: Worker, submitter: Submitter, at_work: AtWork
) -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    @worker.lifespan
    async def lifespan() -> AsyncIterator[None]:
        loops.append(asyncio.get_running_loop())
        yield

    @worker.handler("k")
    async def run(payload: None) -> None:
        loops.append(asyncio.get_running_loop())

    with at_work(worker):
        submitter.success(submitter.schedule("k"))
    assert loops[0] is loops[1]


@pytest.mark.parametrize("declaring", [declare, declare_async])
def test_a_start_up_that_fails_ends_the_worker_which_claims_nothing_and_shuts_down_what_was_started(
    worker: Worker, submitter: Submitter, at_work: AtWork, faulty: Faulty, seen: list[str], declaring: Declaring,
    door: str, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    declare(worker, "first", seen)
    declaring(worker, "broken", seen, fails="starts")
    declaring(worker, "never", seen)

    @worker.handler("k")
    async def run(payload: None) -> None: ...

    worker.handler("thread")(lambda payload: None)
    task = submitter.schedule("k")
    with pytest.raises(ConnectionError, match="broken starts") as raised, at_work(worker):
        eventually(lambda: not worker._busy.locked() and seen == ["first starts", "first ends"])
    assert "lifespan failed, nothing was claimed in this process" in raised.value.__notes__[0]
    assert claims(faulty) == 0
    assert submitter.get(task).status == "new"
    assert "lifespan failed, nothing was claimed in this process: ConnectionError: broken starts" in caplog.text


@pytest.mark.parametrize("declaring", [declare, declare_async])
def test_a_shutdown_that_fails_is_raised_once_all_others_have_ended(
    worker: Worker, submitter: Submitter, at_work: AtWork, seen: list[str], declaring: Declaring, door: str
) -> None:
    declare(worker, "first", seen)
    declaring(worker, "broken", seen, fails="ends")

    @worker.handler("k")
    async def run(payload: None) -> None: ...

    with pytest.raises(ConnectionError, match="broken ends"), at_work(worker):
        task = submitter.success(submitter.schedule("k"))
    assert task.status == "success"
    assert seen == ["first starts", "broken starts", "first ends"]


def test_a_worker_that_is_cancelled_in_a_start_up_claims_nothing(worker: Worker, faulty: Faulty) -> None:
    @worker.lifespan
    async def hanging() -> AsyncIterator[None]:
        await anyio.sleep_forever()
        yield

    @worker.handler("k")
    async def run(payload: None) -> None: ...

    async def main() -> None:
        with anyio.move_on_after(0.05):
            await worker.serve()

    anyio.run(main)
    assert claims(faulty) == 0


def test_a_worker_whose_handlers_are_cancelled_shuts_down_all_the_same(
    worker: Worker, submitter: Submitter, seen: list[str]
) -> None:
    declare_async(worker, "pool", seen)
    runs = anyio.Event()

    @worker.handler("k")
    async def run(payload: None) -> None:
        seen.append("runs")
        runs.set()
        await anyio.sleep_forever()

    submitter.schedule("k")

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(worker.serve)
            await runs.wait()
            group.cancel_scope.cancel()

    anyio.run(main)
    assert seen == ["pool starts", "runs", "pool ends"]


def test_a_drain_of_a_test_has_them_too(worker: Worker, submitter: Submitter, seen: list[str]) -> None:
    declare(worker, "plain", seen)
    loops: list[asyncio.AbstractEventLoop] = []

    @worker.lifespan
    async def lifespan() -> AsyncIterator[None]:
        loops.append(asyncio.get_running_loop())
        yield
        seen.append("async ends")

    @worker.handler("k")
    async def run(payload: None) -> None:
        loops.append(asyncio.get_running_loop())

    submitter.schedule("k")
    assert worker.drain() == 1
    assert loops[0] is loops[1]
    assert seen == ["plain starts", "async ends", "plain ends"]


def test_an_async_one_without_async_handlers_is_refused(worker: Worker, faulty: Faulty) -> None:
    declare_async(worker, "pool", [])
    worker.handler("k")(lambda payload: None)
    with pytest.raises(ConfigError, match="runs in the event loop of async handlers: this worker has none"):
        worker.run()
    assert claims(faulty) == 0


def test_one_that_takes_an_argument_is_refused(worker: Worker) -> None:
    def lifespan(held: Lease) -> Iterator[None]:
        yield

    with pytest.raises(ConfigError, match="lifespan must take no argument"):
        worker.lifespan(lifespan)  # type: ignore[type-var]


# Signals ----------------------------------------------------------------------------------------------------------

PROGRAM = """
import sys, time
import leasekit

def hang():
    while True:  # one long sleep might not be interrupted by a signal that comes just before it
        time.sleep(0.05)

worker = leasekit.Worker(sys.argv[1], concurrency=1, drain_grace=0.2, drain_timeout=0.5, spool=None)

@worker.lifespan
{prefix}def pool():
    if sys.argv[2] == "start-up":
        print("hangs", flush=True)
        hang()
    print("started", flush=True)
    yield
    if sys.argv[2] == "shutdown":
        print("hangs", flush=True)
        hang()
    print("shut down", flush=True)

@worker.handler("k")
async def run(payload: None) -> None:
    print("runs", flush=True)

worker.run()
"""


@pytest.mark.parametrize(
    ("prefix", "where"),
    slow_after(1, [("", "start-up"), ("async ", "shutdown"), ("", "shutdown"), ("async ", "start-up")]),
)
def test_one_that_hangs_does_not_outlast_the_drain(tmp_path: Path, prefix: str, where: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM.format(prefix=prefix)))
    url = f"sqlite:///{tmp_path}/tasks.db"
    with connect(url) as client:
        task = client.schedule("k").id
    process = subprocess.Popen(
        [sys.executable, str(program), url, where], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stdout is not None
    with process:
        awaited = "hangs" if where == "start-up" else "runs"
        assert any(awaited in line for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
        assert "shut down" not in process.stdout.read()
    with connect(url) as client:
        info = client.get(task)
        assert info is not None
        assert info.status == ("new" if where == "start-up" else "success")
