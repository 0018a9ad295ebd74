"""Code around runs: `@worker.around`, in the handler's own thread or task, under its lease."""

import contextlib
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from leasekit import ConfigError, Draining, Fatal, Lease, LeaseLost, Worker
from leasekit.testing.faults import Faulty
from tests.waiting import eventually
from tests.worker.conftest import AtWork, Submitter

tenant: ContextVar[str] = ContextVar("tenant", default="nobody")


@pytest.fixture
def worker(faulty: Faulty) -> Worker:
    return Worker(faulty, concurrency=2)


# Where it runs ------------------------------------------------------------------------------------------------


def test_it_runs_before_and_after_sync_and_async_handlers_in_their_thread_and_context(
    worker: Worker, submitter: Submitter, at_work: AtWork, door: str
) -> None:
    seen: dict[str, list[Any]] = {"plain": [], "async": []}

    @worker.around
    def around(held: Lease) -> Iterator[None]:
        seen[held.task.kind] += [threading.get_ident(), tenant.get()]
        tenant.set(held.task.payload)
        yield
        seen[held.task.kind] += ["after", tenant.get()]

    @worker.handler("plain")
    def plain(payload: str) -> None:
        seen["plain"] += [threading.get_ident(), tenant.get()]

    @worker.handler("async")
    async def run_async(payload: str) -> None:
        await anyio.lowlevel.checkpoint()
        seen["async"] += [threading.get_ident(), tenant.get()]
        tenant.set("changed")

    with at_work(worker):
        submitter.success(submitter.schedule("plain", "acme"))
        submitter.success(submitter.schedule("async", "acme"))
    first, *rest = seen["plain"]
    assert rest == ["nobody", first, "acme", "after", "acme"]
    first, *rest = seen["async"]
    assert rest == ["nobody", first, "acme", "after", "changed"]


def test_an_async_one_awaits_in_the_task_of_the_handler(
    worker: Worker, submitter: Submitter, at_work: AtWork, door: str
) -> None:
    seen: list[Any] = []

    @worker.around
    async def around(held: Lease) -> AsyncIterator[None]:
        task = anyio.get_current_task().id
        with anyio.CancelScope():
            await anyio.lowlevel.checkpoint()
            yield
            await anyio.lowlevel.checkpoint()
        seen.append(task == anyio.get_current_task().id)

    @worker.handler("k")
    async def run(payload: None) -> None:
        seen.append("handler")

    with at_work(worker):
        submitter.success(submitter.schedule("k"))
    assert seen == ["handler", True]


def test_the_first_is_the_outermost_and_kinds_choose(worker: Worker, submitter: Submitter, at_work: AtWork) -> None:
    seen: list[str] = []

    @worker.handler("a")
    def a(payload: None) -> None:
        seen.append("a")

    @worker.handler("b")
    def b(payload: None) -> None:
        seen.append("b")

    @worker.around
    def outer(held: Lease) -> Iterator[None]:
        seen.append("outer")
        yield
        seen.append("outer ends")

    @worker.around("b")
    def inner(held: Lease) -> Iterator[None]:
        seen.append("inner")
        yield
        seen.append("inner ends")

    with at_work(worker):
        submitter.success(submitter.schedule("a"))
        submitter.success(submitter.schedule("b"))
    assert seen == ["outer", "a", "outer ends", "outer", "inner", "b", "inner ends", "outer ends"]


def test_a_drain_of_a_test_runs_it_too(worker: Worker, submitter: Submitter) -> None:
    seen: list[str] = []

    @worker.around
    def around(held: Lease) -> Iterator[None]:
        yield
        seen.append("after")

    worker.handler("k")(lambda payload: None)
    worker.handler("async")(anyio.sleep)
    submitter.schedule("k")
    submitter.schedule("async", 0)
    assert worker.drain() == 2
    assert seen == ["after", "after"]


def test_nothing_is_run_around_a_payload_that_does_not_fit(
    worker: Worker, submitter: Submitter, at_work: AtWork
) -> None:
    seen: list[str] = []

    @worker.around
    def around(held: Lease) -> Iterator[None]:
        seen.append("before")
        yield

    @worker.handler("k")
    def run(payload: int) -> None: ...

    with at_work(worker):
        submitter.when(submitter.schedule("k", "text"), "fatal_failure")
    assert seen == []


def test_the_lease_is_renewed_until_the_code_after_the_handler_has_ended(
    worker: Worker, submitter: Submitter, at_work: AtWork, faulty: Faulty
) -> None:
    settled: list[bool] = []
    beats: list[int] = []

    def count() -> int:
        return sum(call.kind == "beat" for call in list(faulty.log))

    @worker.around
    def around(held: Lease) -> Iterator[None]:
        yield
        before = count()
        held.progress("late")  # brings an early heartbeat
        eventually(lambda: count() > before)
        settled.append(any(call.kind == "settle" for call in list(faulty.log)))

    @worker.handler("k")
    def run(payload: None) -> str:
        beats.append(count())
        return "result"

    with at_work(worker):
        assert submitter.success(submitter.schedule("k")).result == "result"
    assert settled == [False]


# What it raises, and what it swallows -----------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_its_error_counts_as_if_the_handler_had_raised_it(
    worker: Worker, submitter: Submitter, at_work: AtWork, when: str
) -> None:
    @worker.around
    def around(held: Lease) -> Iterator[None]:
        if when == "before":
            raise ZeroDivisionError("before")
        yield
        raise ZeroDivisionError("after")

    worker.handler("plain")(lambda payload: "result")
    with at_work(worker):
        info = submitter.when(submitter.schedule("plain", max_attempts=1), "dead")
    assert (info.error["type"], info.error["message"], info.result) == ("ZeroDivisionError", when, None)


def test_one_that_does_not_yield_is_an_error_of_the_run(worker: Worker, submitter: Submitter, at_work: AtWork) -> None:
    @worker.around
    def around(held: Lease) -> Iterator[None]:
        if held.attempt > 1:  # never here
            yield

    worker.handler("k")(lambda payload: None)
    with at_work(worker):
        info = submitter.when(submitter.schedule("k", max_attempts=1), "dead", "success")
    assert info.error["message"] == "generator didn't yield"


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_an_error_that_it_swallows_counts_all_the_same_and_the_outer_ones_see_it(
    worker: Worker, submitter: Submitter, at_work: AtWork, kind: str
) -> None:
    seen: list[str] = []

    @worker.around
    def outer(held: Lease) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            seen.append(str(error))
            raise

    @worker.around
    def swallowing(held: Lease) -> Iterator[None]:
        with contextlib.suppress(ValueError):
            yield

    @worker.around("async")
    async def swallowing_too(held: Lease) -> AsyncIterator[None]:
        with contextlib.suppress(ValueError):
            yield

    @worker.handler("plain")
    def plain(payload: None) -> None:
        raise ValueError("wrong")

    @worker.handler("async")
    async def run_async(payload: None) -> None:
        raise ValueError("wrong")

    with at_work(worker):
        info = submitter.when(submitter.schedule(kind, max_attempts=1), "dead", "success")
    assert (info.status, info.error["message"], seen) == ("dead", "wrong", ["wrong"])


def test_it_may_decide_otherwise(worker: Worker, submitter: Submitter, at_work: AtWork) -> None:
    @worker.around
    def around(held: Lease) -> Iterator[None]:
        try:
            yield
        except ConnectionError:
            held.complete("good enough")

    @worker.handler("k")
    def run(payload: None) -> None:
        raise ConnectionError

    with at_work(worker):
        assert submitter.success(submitter.schedule("k")).result == "good enough"


def test_what_the_handler_had_decided_before_its_error_does_not_make_it_a_success(
    worker: Worker, submitter: Submitter, at_work: AtWork
) -> None:
    @worker.around
    def around(held: Lease) -> Iterator[None]:
        with contextlib.suppress(ValueError):
            yield

    @worker.handler("k")
    def run(payload: None, held: Lease) -> None:
        held.complete("early")
        raise ValueError("wrong")

    with at_work(worker):
        info = submitter.when(submitter.schedule("k", max_attempts=1), "dead", "success")
    assert (info.status, info.error["message"]) == ("dead", "wrong")


def test_it_may_raise_another_error_instead(worker: Worker, submitter: Submitter, at_work: AtWork) -> None:
    @worker.around
    def around(held: Lease) -> Iterator[None]:
        try:
            yield
        except KeyError as error:
            raise Fatal("unknown") from error

    @worker.handler("k")
    def run(payload: None) -> None:
        raise KeyError

    with at_work(worker):
        assert submitter.when(submitter.schedule("k"), "fatal_failure").error["message"] == "unknown"


def test_a_lost_lease_that_it_swallows_is_lost_all_the_same(
    worker: Worker, submitter: Submitter, at_work: AtWork, faulty: Faulty
) -> None:
    swallowed: list[str] = []

    @worker.around
    def around(held: Lease) -> Iterator[None]:
        try:
            yield
        except LeaseLost:
            swallowed.append(held.task.token)

    @worker.handler("k", idle_timeout=None)
    def run(payload: None, held: Lease) -> str:
        if held.task.fence == 1:
            raise LeaseLost("as `check` would", task_id=held.task.id, reason="expired")
        return "second"

    with at_work(worker):
        task = submitter.schedule("k", heartbeat_timeout=2)
        assert submitter.success(task).result == "second"
    settled = [call.options for call in list(faulty.log) if call.kind == "settle"]
    assert len(swallowed) == 1
    assert all(swallowed[0] not in str(options) for options in settled)


def test_a_stop_that_it_swallows_releases_the_task(faulty: Faulty, submitter: Submitter, at_work: AtWork) -> None:
    worker = Worker(faulty, drain_grace=0)
    begun = threading.Event()
    swallowed: list[str] = []

    @worker.around
    def around(held: Lease) -> Iterator[None]:
        try:
            yield
        except Draining:
            swallowed.append("it")

    @worker.handler("k")
    def run(payload: None, held: Lease) -> None:
        begun.set()
        while True:
            held.check()
            threading.Event().wait(0.01)

    with at_work(worker):
        task = submitter.schedule("k")
        assert begun.wait(30)
    assert swallowed == ["it"]
    assert submitter.get(task).history[0].outcome == "release"


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of a fork in a process with threads
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_child_that_the_handler_forked_runs_nothing_of_it(
    worker: Worker, submitter: Submitter, at_work: AtWork, kind: str
) -> None:
    read, write = os.pipe()

    @worker.around
    def around(held: Lease) -> Iterator[None]:
        try:
            yield
        finally:
            os.write(write, b"x")

    @worker.handler("plain")
    def plain(payload: None) -> Any:
        child = os.fork()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else "child"

    @worker.handler("async")
    async def run_async(payload: None) -> Any:
        return plain(payload)

    with at_work(worker):
        assert submitter.success(submitter.schedule(kind)).result == 0
    os.close(write)
    assert os.read(read, 10) == b"x"
    os.close(read)


# What is refused --------------------------------------------------------------------------------------------------


def test_a_function_without_yield_is_refused(worker: Worker) -> None:
    with pytest.raises(ConfigError, match=r"@worker.around: print must be a function with one `yield` in it"):
        worker.around(print)  # type: ignore[type-var]


def test_a_function_that_does_not_take_the_lease_is_refused(worker: Worker) -> None:
    def around() -> Iterator[None]:
        yield

    with pytest.raises(ConfigError, match="around must take held"):
        worker.around(around)  # type: ignore[type-var]


def test_an_async_one_around_a_plain_handler_is_refused_where_the_worker_runs(worker: Worker) -> None:
    @worker.around
    async def around(held: Lease) -> AsyncIterator[None]:
        yield

    worker.handler("k")(lambda payload: None)
    with pytest.raises(ConfigError, match="is an `async def`, and cannot be around handler 'k'"):
        worker.drain()


def test_a_kind_without_a_handler_is_refused_where_the_worker_runs(worker: Worker) -> None:
    @worker.around("mial")
    def around(held: Lease) -> Iterator[None]:
        yield

    worker.handler("mail")(lambda payload: None)
    with pytest.raises(ConfigError, match="is for 'mial', without a handler"):
        worker.run()


def test_it_is_declared_before_the_worker_runs(worker: Worker, submitter: Submitter, at_work: AtWork) -> None:
    def around(held: Lease) -> Iterator[None]:
        yield

    worker.handler("k")(lambda payload: None)
    with at_work(worker):
        submitter.success(submitter.schedule("k"))
        with pytest.raises(ConfigError, match="is declared too late"):
            worker.around(around)
