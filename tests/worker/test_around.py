"""Code around runs: `@worker.around`, in the handler's own thread or task, under its lease."""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from leasekit import Cancelled, ConfigError, Draining, Fatal, Lease, LeaseLost, NotYet, Worker
from leasekit.testing import faults
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


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_what_it_sets_is_seen_by_all_that_the_handler_starts_and_not_by_the_next_run(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, kind: str
) -> None:
    worker, seen = Worker(faulty, concurrency=1), list[str]()

    @worker.around
    def around(held: Lease) -> Iterator[None]:
        seen.append(tenant.get())
        tenant.set(held.task.payload)
        yield

    @worker.handler("plain")
    def plain(payload: str) -> None:
        seen.append(tenant.get())

    @worker.handler("async")
    async def run_async(payload: str) -> None:
        seen.append(await asyncio.to_thread(tenant.get))

    with at_work(worker):
        for name in ("acme", "other"):
            submitter.success(submitter.schedule(kind, name))
    assert seen == ["nobody", "acme", "nobody", "other"]


def test_it_is_around_each_call_of_a_handler_that_is_not_yet_done(
    worker: Worker, submitter: Submitter, at_work: AtWork
) -> None:
    seen: list[str] = []

    @worker.around
    def around(held: Lease) -> Iterator[None]:
        seen.append("before")
        with contextlib.suppress(NotYet):
            yield
        seen.append("after")

    @worker.handler("k")
    def run(payload: None) -> None:
        if len(seen) < 4:
            raise NotYet(after=0)

    with at_work(worker):
        info = submitter.success(submitter.schedule("k"))
    assert (info.attempt, seen) == (1, ["before", "after"] * 2 + ["before", "after"])


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


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_it_is_told_of_a_lease_that_is_lost_and_ends_before_the_task_runs_again(
    worker: Worker, submitter: Submitter, at_work: AtWork, faulty: Faulty, kind: str
) -> None:
    seen: list[Any] = []

    @worker.around
    def around(held: Lease) -> Iterator[None]:
        seen.append("before")
        try:
            yield
        except BaseException:
            seen.append(held.lost)
            raise
        finally:
            seen.append("after")

    def lose(held: Lease) -> None:
        if held.task.fence == 1:
            faulty.script("beat", faults.steal)
            held.progress("has it sent a heartbeat")

    @worker.handler("plain", idle_timeout=None)
    def plain(payload: None, held: Lease) -> str:
        lose(held)
        eventually(lambda: held.lost or held.task.fence > 1)
        held.check()
        return "second"

    @worker.handler("async", idle_timeout=None)
    async def run_async(payload: None, held: Lease) -> str:
        lose(held)
        await anyio.sleep(600 if held.task.fence == 1 else 0)
        return "second"

    with at_work(worker):
        task = submitter.schedule(kind, heartbeat_timeout=2, claim_timeout=2)
        info = submitter.success(task)
    assert info.result == "second"
    assert seen == ["before", True, "after", "before", "after"]


@pytest.mark.parametrize("swallows", [False, True])
def test_after_a_cancel_async_code_goes_on_where_it_is_shielded_and_the_task_is_cancelled(
    worker: Worker, submitter: Submitter, at_work: AtWork, door: str, swallows: bool
) -> None:
    begun, seen = threading.Event(), list[str]()

    @worker.around
    async def around(held: Lease) -> AsyncIterator[None]:
        try:
            yield
        except BaseException:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.001)
                seen.append("put away")
            if not swallows:
                raise

    @worker.handler("k")
    async def run(payload: None) -> None:
        begun.set()
        await anyio.sleep(600)

    with at_work(worker):
        task = submitter.schedule("k", heartbeat_timeout=2, claim_timeout=2)
        assert begun.wait(60)
        submitter.client.cancel(task)
        submitter.when(task, "cancelled")
    assert seen == ["put away"]


def test_a_cancel_that_it_swallows_cancels_the_task(worker: Worker, submitter: Submitter, at_work: AtWork) -> None:
    begun = threading.Event()

    @worker.around
    def around(held: Lease) -> Iterator[None]:
        with contextlib.suppress(Cancelled):
            yield

    @worker.handler("k", idle_timeout=None)
    def run(payload: None, held: Lease) -> None:
        begun.set()
        while True:
            held.check()
            threading.Event().wait(0.01)

    with at_work(worker):
        task = submitter.schedule("k", heartbeat_timeout=2, claim_timeout=2)
        assert begun.wait(60)
        submitter.client.cancel(task)
        submitter.when(task, "cancelled")


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


def test_a_stop_lets_async_code_put_away_what_it_has_and_releases_the_task(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, door: str
) -> None:
    worker, begun, seen = Worker(faulty, drain_grace=0), threading.Event(), list[str]()

    @worker.around
    async def around(held: Lease) -> AsyncIterator[None]:
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.001)
                seen.append("put away")

    @worker.handler("k")
    async def run(payload: None) -> None:
        begun.set()
        await anyio.sleep(600)

    with at_work(worker):
        task = submitter.schedule("k")
        assert begun.wait(60)
    assert seen == ["put away"]
    assert [run.outcome for run in submitter.get(task).history] == ["release"]


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
