"""A run has ended when its coroutine has, and all tasks and executor jobs that it has started."""

import asyncio
import contextlib
import contextvars
import logging
import math
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio.to_thread
import pytest

import leasekit
from leasekit import Worker
from leasekit._worker import jobs
from leasekit.hooks import Event, Renewed
from leasekit.testing.faults import Faulty
from tests.waiting import eventually, until
from tests.worker.conftest import AtWork, Submitter

Job = Callable[[], None]

# Many beats, of leases that last: on a busy machine a short one is lost.
OFTEN = leasekit.Heartbeats(ttl=60, cycle=0.3, rate=20)
LONG = {"claim_timeout": 60, "heartbeat_timeout": 60}


class Renewals:
    """A hook that counts beats that were acknowledged."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, event: Event) -> None:
        self.count += isinstance(event, Renewed)


class Body:
    """What goes on in a thread when its coroutine has ended, until it is told to end."""

    def __init__(self) -> None:
        self.began, self.finish = threading.Event(), threading.Event()
        self.ended = False

    def job(self) -> None:
        self.began.set()
        assert self.finish.wait(60)
        self.ended = True

    async def start(self) -> asyncio.Task[None]:
        """Have it run in a thread; returns once it does."""
        task = asyncio.create_task(asyncio.to_thread(self.job))
        await until(self.began.is_set)
        return task


@pytest.fixture
def beats() -> Renewals:
    return Renewals()


@pytest.fixture
def body() -> Iterator[Body]:
    body = Body()
    yield body
    body.finish.set()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
def is_held(submitter: Submitter, beats: Renewals) -> Callable[[str], bool]:
    """Whether a task is still held, two beats from now."""

    def is_held(task_id: str) -> bool:
        def look() -> bool:
            return submitter.get(task_id).status in ("claimed", "processing")

        until = beats.count + 3
        eventually(lambda: beats.count >= until or not look())
        return look()

    return is_held


async def _in_thread(job: Job, pool: ThreadPoolExecutor) -> None:
    await asyncio.to_thread(job)


async def _in_default_executor(job: Job, pool: ThreadPoolExecutor) -> None:
    await asyncio.get_running_loop().run_in_executor(None, job)


async def _in_own_executor(job: Job, pool: ThreadPoolExecutor) -> None:
    await asyncio.get_running_loop().run_in_executor(pool, job)


async def _in_gathered_threads(job: Job, pool: ThreadPoolExecutor) -> None:
    await asyncio.gather(asyncio.to_thread(job), asyncio.to_thread(job))


async def _in_anyio_thread(job: Job, pool: ThreadPoolExecutor) -> None:
    await anyio.to_thread.run_sync(job)


async def _in_task(job: Job, pool: ThreadPoolExecutor) -> None:
    loop = asyncio.get_running_loop()
    stubborn = asyncio.create_task(_until_ended(loop.run_in_executor(pool, job)))
    await asyncio.wait([stubborn])


async def _until_ended(future: Awaitable[None]) -> None:
    """As tasks that are not to be cancelled do."""
    task = asyncio.ensure_future(future)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            continue


async def _in_thread_of_a_thread(job: Job, pool: ThreadPoolExecutor) -> None:
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, lambda: asyncio.run_coroutine_threadsafe(asyncio.to_thread(job), loop))
    await loop.create_future()


@pytest.mark.parametrize(
    "starts",
    [
        _in_thread, _in_default_executor, _in_own_executor, _in_gathered_threads, _in_anyio_thread, _in_task,
        _in_thread_of_a_thread,
    ],
)  # fmt: skip
def test_a_task_that_is_cancelled_is_settled_when_nothing_of_its_body_runs(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, beats: Renewals, body: Body, pool: ThreadPoolExecutor,
    is_held: Callable[[str], bool], starts: Callable[[Job, ThreadPoolExecutor], Awaitable[None]],
) -> None:  # fmt: skip
    worker = Worker(faulty, heartbeats=OFTEN, hooks=[beats])

    @worker.handler("k")
    async def awaits(payload: Any) -> None:
        await starts(body.job, pool)

    with at_work(worker):
        task_id = submitter.schedule("k", **LONG)
        assert body.began.wait(60)
        submitter.client.cancel(task_id)
        assert is_held(task_id)
        body.finish.set()
        submitter.when(task_id, "success" if starts is _in_anyio_thread else "cancelled")  # anyio waits by itself
    assert body.ended


async def _returns(body: Body) -> None:
    await body.start()


async def _fails(body: Body) -> None:
    await body.start()
    raise leasekit.Fatal


async def _is_too_slow(body: Body) -> None:
    try:
        async with asyncio.timeout(None) as timeout:
            task = await body.start()
            timeout.reschedule(0)
            await task
    except TimeoutError:
        raise leasekit.Fatal from None


async def _swallows(body: Body) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await (await body.start())


@pytest.mark.parametrize("door", ["run", "asyncio"])
@pytest.mark.parametrize(
    ("runs", "status"),
    [(_returns, "success"), (_fails, "fatal_failure"), (_is_too_slow, "fatal_failure"), (_swallows, "success")],
)
def test_a_task_is_settled_when_nothing_of_its_body_runs(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, beats: Renewals, body: Body, is_held: Callable[[str], bool],
    runs: Callable[[Body], Awaitable[None]], status: str, door: str,
) -> None:  # fmt: skip
    """Although its coroutine has ended by itself, or because the worker stops."""
    worker = Worker(faulty, heartbeats=OFTEN, hooks=[beats], drain_grace=0, drain_timeout=math.inf)

    @worker.handler("k")
    async def leaves_a_thread(payload: Any) -> None:
        await runs(body)

    with at_work(worker):
        task_id = submitter.schedule("k", **LONG)
        assert body.began.wait(60)
        if runs is _swallows:
            worker.stop()
        assert is_held(task_id)
        body.finish.set()
        submitter.when(task_id, status)
    assert body.ended


@pytest.mark.parametrize(
    ("in_thread", "outcome"), [(asyncio.to_thread, "release"), (anyio.to_thread.run_sync, "success")]
)
def test_who_cancels_serve_gives_tasks_back_when_nothing_of_their_bodies_runs(
    faulty: Faulty, submitter: Submitter, beats: Renewals, body: Body, is_held: Callable[[str], bool], in_thread: Any,
    outcome: str,
) -> None:  # fmt: skip
    worker = Worker(faulty, heartbeats=OFTEN, hooks=[beats])

    @worker.handler("k")
    async def awaits(payload: Any) -> None:
        await in_thread(body.job)

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(worker.serve)
            await until(body.began.is_set)
            group.cancel_scope.cancel()

    thread = threading.Thread(target=asyncio.run, args=[main()], daemon=True)
    thread.start()
    task_id = submitter.schedule("k", **LONG)
    assert body.began.wait(60)
    assert is_held(task_id)
    body.finish.set()
    thread.join(60)
    assert body.ended
    assert [run.outcome for run in submitter.get(task_id).history] == [outcome]


def test_a_job_that_has_not_begun_when_its_run_is_to_end_never_begins(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, body: Body
) -> None:
    worker = Worker(faulty, heartbeats=OFTEN)
    begun: list[str] = []
    late: list[asyncio.Task[None]] = []

    @worker.handler("k")
    async def fills_an_executor(payload: Any) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        await body.start()
        late.append(asyncio.create_task(asyncio.to_thread(begun.append, "late")))
        await asyncio.shield(late[0])

    with at_work(worker):
        task_id = submitter.schedule("k", **LONG)
        assert body.began.wait(60)
        submitter.client.cancel(task_id)
        eventually(lambda: late and late[0].cancelled())
        body.finish.set()
        submitter.when(task_id, "cancelled")
    assert body.ended
    assert not begun


@pytest.mark.parametrize("door", ["run", "asyncio"])
def test_what_is_started_in_an_empty_context_outlives_its_run(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, body: Body, door: str
) -> None:
    worker = Worker(faulty)
    kept: list[Any] = []

    @worker.handler("k")
    async def starts_a_service(payload: Any) -> None:
        loop = asyncio.get_running_loop()
        kept.append(loop.create_task(asyncio.sleep(600), context=contextvars.Context()))
        kept.append(contextvars.Context().run(loop.run_in_executor, None, body.job))

    with at_work(worker):
        submitter.success(submitter.schedule("k"))
        assert not body.ended
        body.finish.set()


def test_a_look_up_of_a_name_holds_up_no_end(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they do for long, where the network is away, and then many at once."""
    worker = Worker(faulty, heartbeats=OFTEN)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: body.job())

    @worker.handler("k")
    async def looks_up(payload: Any) -> None:
        await asyncio.get_running_loop().getaddrinfo("example.org", 80)

    with at_work(worker):
        task_id = submitter.schedule("k", **LONG)
        assert body.began.wait(60)
        submitter.client.cancel(task_id)
        submitter.when(task_id, "cancelled")
        assert not body.ended
        body.finish.set()


def test_who_leaves_something_running_hears_of_it(
    faulty: Faulty,
    submitter: Submitter,
    at_work: AtWork,
    body: Body,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(jobs, "_SILENCE", 0.1)
    worker = Worker(faulty)

    @worker.handler("k")
    async def leaves_a_task(payload: Any) -> None:
        (await body.start()).set_name("the-pool")

    with at_work(worker), caplog.at_level(logging.WARNING, "leasekit"):
        task_id = submitter.schedule("k")
        eventually(lambda: "go on: the lease is kept" in caplog.text)
        body.finish.set()
        submitter.success(task_id)
    assert f"the handler of task {task_id} (k) has ended, and 1 executor jobs and 1 tasks ['the-pool']" in caplog.text


def test_a_loop_goes_on_as_before_for_who_belongs_to_no_run() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        jobs.count_in(loop)
        create_task = loop.create_task
        jobs.count_in(loop)
        assert loop.create_task is create_task  # once
        assert await asyncio.to_thread(int, "7") == 7
        with pytest.raises(ValueError, match="invalid literal"):
            await loop.run_in_executor(None, int, "seven")
        task = asyncio.create_task(asyncio.sleep(0, "slept"), name="sleeper")
        assert (task.get_name(), await task) == ("sleeper", "slept")

    asyncio.run(main())
