"""The end of a worker: graceful, in this order: claim no more, give back, let bodies end, report, close."""

import asyncio
import signal
import threading
from typing import Any

import anyio
import pytest

import leasekit
from leasekit import Lease, Worker
from leasekit._worker.run import WorkerRun
from leasekit.hooks import Event, Renewed
from leasekit.testing import faults
from leasekit.testing.faults import Faulty, Gate
from tests.waiting import eventually
from tests.worker.conftest import AtWork, Submitter, gives_back, waits_for_a_task


def outcomes(faulty: Faulty) -> list[str]:
    return [item.outcome for call in list(faulty.log) if call.kind == "settle" for item in call.items]


def test_it_gives_back_what_is_buffered_before_bodies_have_ended(
    faulty: Faulty, submitter: Submitter, at_work: AtWork
) -> None:
    worker = Worker(faulty, concurrency=1, ahead=1e6)
    started, finish = threading.Event(), threading.Event()

    @worker.handler("k")
    def waits(payload: Any) -> str:
        if payload is not None:
            started.set()
            finish.wait(60)
        return "done"

    with at_work(worker):
        submitter.success(submitter.schedule("k"))  # so that it has a pace, and claims ahead
        task_ids = submitter.schedule_many("k", 5)
        assert started.wait(60)
        eventually(lambda: worker.buffered == 4)
        worker.stop()
        for task_id in task_ids[1:]:
            info = submitter.when(task_id, "enqueued")
            # More than once where the claim that was under way, and is given up, got it again meanwhile.
            assert {run.outcome for run in info.history} == {"release"}
        assert submitter.get(task_ids[0]).status in ("claimed", "processing")
        finish.set()
        submitter.success(task_ids[0])
    assert outcomes(faulty)[0] == outcomes(faulty)[-1] == "success"
    assert set(outcomes(faulty)[1:-1]) == {"release"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_which_signal_stops_it_although_that_comes_while_it_starts(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Handlers may run by then, and somebody reads the log to know whether the signal was heard."""
    worker = Worker("memory://")
    worker.handler("k")(lambda payload: None)
    monkeypatch.setattr(WorkerRun, "run_loop_in_thread", lambda _: signal.raise_signal(number))
    with caplog.at_level("INFO", "leasekit"):
        worker.run()
    stops = f"{number.name}: the worker stops; a second signal ends it at once"
    assert [record.message for record in caplog.records].count(stops) == 1


def test_it_makes_no_new_claim(faulty: Faulty, submitter: Submitter, at_work: AtWork) -> None:
    worker = Worker(faulty, concurrency=4)
    started, finish = threading.Event(), threading.Event()

    @worker.handler("k")
    def waits(payload: Any) -> None:
        started.set()
        finish.wait(60)

    with at_work(worker):
        first = submitter.schedule("k")
        assert started.wait(60)
        eventually(lambda: waits_for_a_task(faulty))
        worker.stop()
        eventually(lambda: gives_back(faulty), "the end of the last claim")
        another = submitter.schedule("k")
        finish.set()
        submitter.success(first)
    assert gives_back(faulty)
    assert submitter.get(another).attempt == 0


def test_it_beats_until_the_last_body_has_ended(faulty: Faulty, submitter: Submitter, at_work: AtWork) -> None:
    renewed: list[str] = []

    def hear(event: Event) -> None:
        if isinstance(event, Renewed):
            renewed.extend(event.task_ids)

    worker = Worker(faulty, hooks=[hear])
    started, finish = threading.Event(), threading.Event()

    @worker.handler("k")
    def waits(payload: Any, held: Lease) -> int:
        started.set()
        finish.wait(60)
        held.check()
        return held.fence

    with at_work(worker):
        task_id = submitter.schedule("k", claim_timeout=2, heartbeat_timeout=2)
        assert started.wait(60)
        worker.stop()
        before = len(renewed)
        eventually(lambda: len(renewed) >= before + 4)  # more than a ttl
        finish.set()
        info = submitter.success(task_id)
    assert (info.result, info.crashes) == (1, 0)


def test_it_reports_before_it_closes_the_client(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, door: str
) -> None:
    worker = Worker(faulty)
    worker.handler("k")(lambda payload: "late")
    gate = Gate()
    faulty.script("settle", faults.delay(gate))
    with at_work(worker):
        task_id = submitter.schedule("k")
        eventually(lambda: faulty.calls["settle"])
        worker.stop()
        gate.open()
    assert submitter.get(task_id).result == "late"


def test_a_claim_under_way_is_given_up_and_what_it_got_is_given_back(
    faulty: Faulty, submitter: Submitter, at_work: AtWork
) -> None:
    worker = Worker(faulty)
    runs: list[Any] = []
    worker.handler("k")(runs.append)
    faulty.script("claim", faults.delay_answer(Gate()))  # granted, and the answer does not come
    task_id = submitter.schedule("k")
    with at_work(worker):
        submitter.when(task_id, "claimed")
        worker.stop()
    assert submitter.get(task_id).status == "enqueued"
    assert not runs


def test_it_may_be_stopped_by_a_handler(faulty: Faulty, submitter: Submitter, at_work: AtWork, door: str) -> None:
    worker = Worker(faulty)

    @worker.handler("async")
    async def stops(payload: Any) -> str:
        worker.stop()
        await anyio.sleep(0.01)
        return "ended by itself"

    with at_work(worker):
        assert submitter.success(submitter.schedule("async")).result == "ended by itself"


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_cancelling_serve_gives_async_tasks_back_and_waits_for_threads(
    faulty: Faulty, submitter: Submitter, backend: str
) -> None:
    worker = Worker(faulty)
    finish = threading.Event()
    begun: list[str] = []

    @worker.handler("async")
    async def in_loop(payload: Any) -> None:
        begun.append("async")
        await anyio.sleep(60)

    @worker.handler("thread")
    def in_thread(payload: Any) -> str:
        begun.append("thread")
        finish.wait(60)
        return "ended"

    one, two = submitter.schedule("async"), submitter.schedule("thread")

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(worker.serve)
            while len(begun) < 2:  # noqa: ASYNC110 - a thread is one of them
                await anyio.sleep(0.001)
            group.start_soon(let_go)
            group.cancel_scope.cancel()

    async def let_go() -> None:
        with anyio.CancelScope(shield=True):
            while submitter.get(one).status != "enqueued":  # noqa: ASYNC110 - nobody says when
                await anyio.sleep(0.001)
            assert submitter.get(two).status in ("claimed", "processing")
            finish.set()

    anyio.run(main, backend=backend)
    assert {run.outcome for run in submitter.get(one).history} == {"release"}
    assert begun.count("async") == 1
    assert submitter.get(two).result == "ended"


def test_cancelling_serve_as_a_task_of_asyncio_gives_async_tasks_back_too(faulty: Faulty, submitter: Submitter) -> None:
    worker = Worker(faulty)
    begun: list[str] = []

    @worker.handler("async")
    async def in_loop(payload: Any) -> None:
        begun.append("async")
        await anyio.sleep(60)

    one = submitter.schedule("async")

    async def main() -> None:
        serving = asyncio.create_task(worker.serve())
        while not begun:  # noqa: ASYNC110 - a task of its own
            await anyio.sleep(0.001)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(serving, 15)  # less than the grace after which it would be told to end anyway
        assert serving.cancelled()

    asyncio.run(main())
    assert {run.outcome for run in submitter.get(one).history} == {"release"}


def test_closing_the_client_of_a_worker_stops_it(faulty: Faulty, submitter: Submitter, at_work: AtWork) -> None:
    client = leasekit.Client(faulty)
    worker = Worker(client)
    worker.handler("k")(lambda payload: None)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            worker.run()
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    submitter.success(submitter.schedule("k"))
    client.close()
    thread.join(30)
    assert not thread.is_alive()
    assert not errors
