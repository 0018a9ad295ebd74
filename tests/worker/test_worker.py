"""A worker runs its handlers: by `run()`, and by `serve()` in asyncio and trio."""

import asyncio
import contextvars
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

import leasekit
from leasekit import Client, ConfigError, Lease, Worker, registry
from leasekit._driver.guarding.kill_timer import obstacle
from leasekit._driver.reporting.ledger import Holder, Ledger, PendingClaim, SharedMemory
from leasekit._worker import handback
from leasekit.backend import Backend
from leasekit.hooks import Event, Renewed
from leasekit.testing.faults import Faulty
from leasekit.testing.memory import MemoryBackend, MemoryService
from tests.waiting import eventually
from tests.worker.conftest import AtWork, Submitter


class Thumbnail(msgspec.Struct):
    path: str
    width: int = 100


# Handlers and their results -----------------------------------------------------------------------------------


def test_async_and_thread_handlers_run_and_what_they_return_is_the_result(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, door: str
) -> None:
    worker = Worker(faulty)

    @worker.handler("async")
    async def run_async(payload: Thumbnail, held: Lease) -> Any:
        await anyio.lowlevel.checkpoint()
        return [payload.path, payload.width, held.attempt]

    @worker.handler("thread")
    def run_thread(payload: Thumbnail) -> Any:
        return [payload.path, payload.width]

    with at_work(worker):
        one = submitter.schedule("async", {"path": "x"})
        two = submitter.schedule("thread", {"path": "y", "width": 7})
        assert submitter.success(one).result == ["x", 100, 1]
        assert submitter.success(two).result == ["y", 7]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit


def test_an_error_whose_text_ends_the_program_is_a_failure_like_others(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, door: str
) -> None:
    worker = Worker(faulty, concurrency=1)

    @worker.handler("async")
    async def run_async(payload: str) -> None:
        if payload == "fail":
            raise Unspeakable

    @worker.handler("thread")
    def run_thread(payload: str) -> None:
        if payload == "fail":
            raise Unspeakable

    with at_work(worker):
        for kind in ("async", "thread"):
            failed = submitter.schedule(kind, "fail", max_attempts=1)
            assert "SystemExit" in submitter.when(failed, "dead").error["message"]
            submitter.success(submitter.schedule(kind, "end"))


def test_async_handlers_run_in_the_loop_that_awaits_the_worker(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, door: str
) -> None:
    worker = Worker(faulty)

    @worker.handler("where")
    async def where(payload: Any) -> Any:
        return [sniffed(), threading.current_thread().name]

    with at_work(worker):
        library, thread = submitter.success(submitter.schedule("where")).result
    assert library == ("trio" if door == "trio" else "asyncio")
    assert (thread == "leasekit-handlers") == (door == "run")


def sniffed() -> str:
    try:
        asyncio.current_task()
    except RuntimeError:
        return "trio"
    return "asyncio"


@pytest.mark.parametrize("mode", ["async", "thread"])
def test_a_handler_may_decide_itself(faulty: Faulty, submitter: Submitter, at_work: AtWork, mode: str) -> None:
    worker = Worker(faulty)

    def decide(payload: str, held: Lease) -> str:
        match payload:
            case "complete":
                held.complete("mine")
            case "fail":
                held.fail("broken", retry=False)
            case _:
                pass
        return "returned"

    handle(worker, "k", mode, decide)
    with at_work(worker):
        assert submitter.success(submitter.schedule("k", "complete")).result == "mine"
        assert submitter.when(submitter.schedule("k", "fail"), "fatal_failure").error == "broken"
        assert submitter.success(submitter.schedule("k", "neither")).result == "returned"


def handle(worker: Worker, kind: str, mode: str, function: Callable[..., Any]) -> None:
    """The same handler in both modes."""

    def in_thread(payload: Any, held: Lease) -> Any:
        return function(payload, held)

    async def in_loop(payload: Any, held: Lease) -> Any:
        return function(payload, held)

    worker.handler(kind)(in_loop if mode == "async" else in_thread)


@pytest.mark.parametrize("mode", ["async", "thread"])
@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (ValueError("no"), "retriable_failure"),
        (leasekit.Fatal("never"), "fatal_failure"),
        (KeyboardInterrupt("stop"), "retriable_failure"),
        (SystemExit(3), "retriable_failure"),
        (GeneratorExit("odd"), "retriable_failure"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_whatever_a_handler_raises_ends_that_run_only(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, mode: str, raised: BaseException, status: str
) -> None:
    worker = Worker(faulty, concurrency=1)

    def fails(payload: Any, held: Lease) -> None:
        raise raised

    handle(worker, "fails", mode, fails)
    handle(worker, "works", mode, lambda payload, held: "well")
    with at_work(worker):
        failed = submitter.when(submitter.schedule("fails"), status)
        assert failed.error["type"] == type(raised).__name__
        assert "Traceback" in failed.error["traceback"]
        assert submitter.success(submitter.schedule("works")).result == "well"


def test_a_cancellation_that_nobody_asked_for_is_a_failure_of_that_body(
    faulty: Faulty, submitter: Submitter, at_work: AtWork
) -> None:
    worker = Worker(faulty)

    @worker.handler("stray")
    async def stray(payload: Any) -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    @worker.handler("works")
    async def works(payload: Any) -> None: ...

    with at_work(worker):
        submitter.when(submitter.schedule("stray"), "retriable_failure")
        submitter.success(submitter.schedule("works"))


@pytest.mark.parametrize("mode", ["async", "thread"])
def test_a_result_that_is_no_json_fails_for_good_and_says_so(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, mode: str
) -> None:
    worker = Worker(faulty)
    handle(worker, "k", mode, lambda payload, held: object())
    with at_work(worker):
        assert "not JSON" in submitter.when(submitter.schedule("k"), "fatal_failure").error["message"]


@pytest.mark.parametrize("mode", ["async", "thread"])
def test_a_payload_that_does_not_fit_is_fatal_and_says_where(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, mode: str
) -> None:
    worker = Worker(faulty)
    runs: list[Any] = []
    if mode == "async":

        @worker.handler("k")
        async def in_loop(payload: Thumbnail) -> None:
            runs.append(payload)
    else:

        @worker.handler("k")
        def in_thread(payload: Thumbnail) -> None:
            runs.append(payload)

    with at_work(worker):
        error = submitter.when(submitter.schedule("k", {"path": "x", "width": "7"}), "fatal_failure").error
        assert "$.width" in error["message"]
        assert "int" in error["message"]
        assert not runs


def test_a_validation_error_of_the_handler_itself_is_not_taken_for_one_of_its_payload(
    faulty: Faulty, submitter: Submitter, at_work: AtWork
) -> None:
    worker = Worker(faulty)

    @worker.handler("k")
    def decodes(payload: Any) -> None:
        msgspec.json.decode(b"1", type=str)

    with at_work(worker):
        submitter.when(submitter.schedule("k"), "retriable_failure")


def test_payloads_are_read_as_json_is_read(faulty: Faulty, submitter: Submitter, at_work: AtWork) -> None:
    worker = Worker(faulty)

    @worker.handler("k")
    def keys(payload: dict[int, float]) -> Any:
        return [[key, value] for key, value in payload.items()]

    with at_work(worker):
        assert submitter.success(submitter.schedule("k", {"1": 2})).result == [[1, 2.0]]


variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="clean")


@pytest.mark.parametrize("mode", ["async", "thread"])
def test_context_variables_of_one_task_are_not_seen_by_the_next(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, mode: str
) -> None:
    worker = Worker(faulty, concurrency=1)

    def look(payload: Any, held: Lease) -> str:
        seen = variable.get()
        variable.set("dirty")
        return seen

    handle(worker, "k", mode, look)
    with at_work(worker):
        for _ in range(3):
            assert submitter.success(submitter.schedule("k")).result == "clean"


def test_a_handler_may_schedule_with_the_client_of_its_worker(
    faulty: Faulty, submitter: Submitter, at_work: AtWork
) -> None:
    client = leasekit.Client(faulty)
    worker = Worker(client)

    @worker.handler("first")
    async def first(payload: Any) -> str:
        scheduled = await client.aschedule("second")
        return scheduled.id

    @worker.handler("second")
    def second(payload: Any) -> str:
        return "done"

    with client, at_work(worker):
        following = submitter.success(submitter.schedule("first")).result
        assert submitter.success(following).result == "done"


# Being told to stop -------------------------------------------------------------------------------------------


def test_an_async_body_is_cancelled_by_order(faulty: Faulty, submitter: Submitter, at_work: AtWork, door: str) -> None:
    worker = Worker(faulty)
    begun = threading.Event()
    ended: list[str] = []

    @worker.handler("k")
    async def waits(payload: Any) -> None:
        try:
            begun.set()
            await anyio.sleep(60)
        finally:
            ended.append("ended")

    with at_work(worker):
        task_id = submitter.schedule("k", claim_timeout=3, heartbeat_timeout=3)
        assert begun.wait(60)
        submitter.client.cancel(task_id)
        submitter.when(task_id, "cancelled")
        assert ended == ["ended"]


def test_a_thread_body_sees_a_cancel_order_at_its_next_check(
    faulty: Faulty, submitter: Submitter, at_work: AtWork
) -> None:
    worker = Worker(faulty)

    @worker.handler("k")
    def checks(payload: Any, held: Lease) -> None:
        eventually(held.check)

    with at_work(worker):
        task_id = submitter.schedule("k", claim_timeout=3, heartbeat_timeout=3)
        eventually(lambda: worker.running)
        submitter.client.cancel(task_id)
        submitter.when(task_id, "cancelled")


def test_an_idle_body_is_stopped_and_tried_again(faulty: Faulty, submitter: Submitter, at_work: AtWork) -> None:
    worker = Worker(faulty)

    @worker.handler("k", idle_timeout=0.05)
    async def idles(payload: Any) -> None:
        await anyio.sleep(60)

    with at_work(worker):
        assert submitter.when(submitter.schedule("k"), "retriable_failure").error["type"] == "IdleTimeout"


@pytest.mark.parametrize("door", ["asyncio"], indirect=True)  # a process that `run` has would end itself
def test_what_an_idle_body_returns_after_its_lease_was_lost_is_not_reported(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, door: str
) -> None:
    worker = Worker(faulty)
    returns = threading.Event()

    @worker.handler("k", idle_timeout=0.05)
    def hangs(payload: Any, held: Lease) -> str:
        eventually(lambda: held.lost)
        returns.set()
        return "late"

    with at_work(worker):
        task_id = submitter.schedule("k", claim_timeout=20, heartbeat_timeout=20)
        returns.wait(60)
        eventually(lambda: not worker.running)
    assert faulty.calls["settle"] == 0
    assert submitter.get(task_id).status in ("claimed", "processing")  # an idle one does not renew: it may be the first


@pytest.mark.slow
def test_a_blocked_loop_keeps_its_lease_for_three_ttls_and_thread_handlers_run_meanwhile(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, door: str
) -> None:
    ttl = 2.0
    renewed: list[float] = []
    release = threading.Event()

    def hear(event: Event) -> None:
        if isinstance(event, Renewed) and blocked in event.task_ids:
            renewed.append(event.at)

    worker = Worker(faulty, concurrency=2, hooks=[hear])

    @worker.handler("blocks")
    async def blocks(payload: Any, held: Lease) -> int:
        release.wait(60)
        return held.fence

    @worker.handler("beside")
    def beside(payload: Any) -> None: ...

    with at_work(worker):
        blocked = submitter.schedule("blocks", claim_timeout=ttl, heartbeat_timeout=ttl)
        eventually(lambda: worker.running)
        started = time.clock_gettime(time.CLOCK_BOOTTIME)
        stuck = [submitter.schedule("blocks") for _ in range(4)]  # more than the loop's slots
        eventually(lambda: any(at > started + 3 * ttl for at in renewed))
        for _ in range(10):
            submitter.success(submitter.schedule("beside"))
        release.set()
        info = submitter.success(blocked)
        assert (info.result, info.attempt, info.crashes, len(info.history)) == (1, 1, 0, 1)
        for task_id in stuck:
            submitter.success(task_id)


# How it is made -----------------------------------------------------------------------------------------------


def test_a_worker_without_handlers_is_refused(faulty: Faulty) -> None:
    with pytest.raises(ConfigError, match="handler"):
        Worker(faulty).run()


def test_a_worker_without_a_service_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEASEKIT_URL", raising=False)
    worker = Worker()
    worker.handler("k")(lambda payload: None)
    with pytest.raises(ConfigError, match="LEASEKIT_URL"):
        worker.run()


def test_the_environment_says_which_service_where_nobody_else_does(
    monkeypatch: pytest.MonkeyPatch, at_work: AtWork
) -> None:
    monkeypatch.setenv("LEASEKIT_URL", "memory://of-the-environment")
    worker = Worker()
    worker.handler("k")(lambda payload: "here")
    with leasekit.connect("memory://of-the-environment") as client, at_work(worker):
        task = client.schedule("k")
        while (info := client.get(task.id)) is None or info.status != "success":
            time.sleep(0.01)
        assert info.result == "here"


@pytest.mark.parametrize("options", [{"concurrency": 0}, {"ahead": -1}, {"ahead": float("nan")}, {"watchdog": "cat"}])
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Worker(**options)


def test_a_watchdog_that_is_required_is_not_dropped_over_a_client(faulty: Faulty) -> None:
    with leasekit.Client(faulty) as client:
        worker = Worker(client, watchdog="required")
        worker.handler("k")(lambda payload: None)
        with pytest.raises(ConfigError, match=r"not over a client .* Use Worker\(url\)\.run\(\)"):
            worker.run()
        with pytest.raises(ConfigError, match=r"not in serve\(\)"):
            anyio.run(worker.serve)


def test_a_watchdog_that_is_required_is_not_dropped_in_serve(faulty: Faulty) -> None:
    worker = Worker(faulty, watchdog="required")
    worker.handler("k")(lambda payload: None)
    with pytest.raises(ConfigError, match=r"not in serve\(\)"):
        anyio.run(worker.serve)
    assert faulty.calls["claim"] == 0


@pytest.mark.skipif(obstacle() is not None, reason=obstacle() or "")
def test_a_client_that_has_the_watchdog_that_is_required_is_taken(
    faulty: Faulty, submitter: Submitter, at_work: AtWork
) -> None:
    with leasekit.Client(faulty, watchdog="required") as client:
        worker = Worker(client, watchdog="required")
        worker.handler("k")(lambda payload: "done")
        with at_work(worker):
            assert submitter.success(submitter.schedule("k")).result == "done"


def test_a_client_refuses_a_watchdog_that_nobody_knows() -> None:
    with pytest.raises(ConfigError, match="watchdog='requierd' is not a mode: use 'off', 'soft', 'auto', 'required'"):
        leasekit.Client("memory://", watchdog="requierd")  # type: ignore[arg-type]


def test_beats_of_a_client_are_not_overruled(faulty: Faulty) -> None:
    with leasekit.Client(faulty) as client:
        with pytest.raises(ConfigError, match=r"connect\(\)"):
            Worker(client, heartbeats=leasekit.Heartbeats())
        with pytest.raises(ConfigError, match=r"connect\(\)"):
            Worker(client, proxy="p")
        worker = Worker(client)
        worker.handler("k")(lambda payload: None)
        with pytest.raises(ConfigError, match="client of its own"):
            worker.run(url="memory://")


def test_a_client_that_was_given_is_left_open(faulty: Faulty, submitter: Submitter, at_work: AtWork, door: str) -> None:
    with leasekit.Client(faulty) as client:
        worker = Worker(client)
        worker.handler("k")(lambda payload: None)
        with at_work(worker):
            task_id = submitter.schedule("k")
            submitter.success(task_id)
        assert client.get(task_id) is not None


def test_a_worker_runs_once_at_a_time_and_may_run_again(faulty: Faulty, submitter: Submitter, at_work: AtWork) -> None:
    with leasekit.Client(faulty) as client:
        worker = Worker(client)
        worker.handler("k")(lambda payload: None)
        for _ in range(2):
            with at_work(worker):
                submitter.success(submitter.schedule("k"))
                with pytest.raises(ConfigError, match="runs already"):
                    worker.run()
                with pytest.raises(ConfigError, match="too late"):
                    worker.handler("another")(lambda payload: None)


def test_a_stop_that_comes_before_the_run_ends_it_at_once(faulty: Faulty) -> None:
    worker = Worker(faulty)
    worker.handler("k")(lambda payload: None)
    worker.stop()
    worker.run()
    assert not faulty.calls["settle"]


# Here and now -------------------------------------------------------------------------------------------------


def test_drain_runs_what_is_due_here_and_nothing_else(client: Client) -> None:
    worker, threads = Worker(client), set[int]()

    @worker.handler("plain")
    def plain(payload: int) -> int:
        threads.add(threading.get_ident())
        if payload < 0:
            raise RuntimeError("no")
        return payload + 1

    @worker.handler("async")
    async def other(payload: int, held: leasekit.Lease) -> None:
        held.then("plain", payload)

    first, failing = client.schedule("plain", 1), client.schedule("plain", -1)
    later = client.schedule("plain", 2, at=datetime.now(UTC) + timedelta(hours=1))
    client.schedule("async", 7)
    assert worker.drain() == 4  # with the successor
    assert threads == {threading.get_ident()}
    ended = [client.get(task.id) for task in (first, failing, later)]
    assert [(info and info.status.value, info and info.result) for info in ended] == [
        ("success", 2),
        ("retriable_failure", None),
        ("new", None),
    ]
    assert worker.drain() == 0


def test_a_drain_says_of_a_handler_that_is_not_yet_done_that_it_waits(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(client)

    @worker.handler("k")
    def run(payload: None) -> None:
        raise leasekit.NotYet("no page yet", after=600)

    task_id = client.schedule("k").id
    with caplog.at_level("INFO", "leasekit"):
        assert worker.drain() == 1
    (record,) = [record for record in caplog.records if task_id in record.getMessage()]
    assert (record.levelname, record.exc_info) == ("INFO", None)
    assert record.getMessage() == f"task {task_id} (k) waits: no page yet"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options that the backend of `optional://` was given, each time."""
    asked: list[dict[str, Any]] = []

    def connect(url: str, *, worker: str, **options: Any) -> Backend:
        asked.append(options)
        return MemoryBackend(MemoryService(), worker=worker)

    monkeypatch.setattr(registry, "_registered", {"optional": connect})
    return asked


def test_options_are_passed_to_the_backend_of_the_workers_url(asked: list[dict[str, Any]]) -> None:
    worker = Worker("optional://", headers={"a": "b"}, proxy="p")
    worker.handler("k")(lambda payload: None)
    worker.stop()
    worker.run(proxy="q")
    worker.stop()
    worker.run(url="optional://other", ca="c")  # another service is not told these secrets
    assert asked == [{"headers": {"a": "b"}, "proxy": "q"}, {"ca": "c"}]


def test_a_supervisor_hands_back_with_the_options_of_its_worker(asked: list[dict[str, Any]]) -> None:
    memory = SharedMemory()
    Ledger(os.dup(memory.fd)).open(Holder(worker="w", url="optional://", options={"ca": Path("c")}))
    past = memory.read()
    handback.hand_back(past._replace(claims=[PendingClaim("c", ["k"])]), "killed", waiting=lambda _: False)
    assert asked == [{"ca": "c"}]
    assert "optional" not in repr(past.holder)


@pytest.mark.anyio
async def test_run_inside_of_an_event_loop_says_what_to_write(client: Client) -> None:
    worker = Worker(client)
    handle(worker, "k", "thread", lambda payload, held: None)
    with pytest.raises(ConfigError, match=r"await worker\.serve"):
        worker.run()
