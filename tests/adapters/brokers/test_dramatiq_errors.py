"""A Dramatiq message that cannot be run now is never lost, and never run without its lease: whatever else fails."""

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq import Middleware
from dramatiq.asyncio import get_event_loop_thread
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import (
    AgeLimit,
    AsyncIO,
    Interrupt,
    MiddlewareError,
    Retries,
    Shutdown,
    SkipMessage,
    TimeLimitExceeded,
    raise_thread_exception,
)
from dramatiq.results import ResultFailure, ResultMissing, Results
from dramatiq.results.backends import StubBackend
from dramatiq.worker import Worker

import leasekit
from leasekit import _blocks
from leasekit_dramatiq import Leases, coroutines, current_lease, middleware
from tests.waiting import eventually


class Stored(StubBackend):
    """Results in memory; `look` is called when one has been stored."""

    def __init__(self) -> None:
        super().__init__()
        self.look: Callable[[], object] = lambda: None

    def store_result(self, *args: Any, **kwargs: Any) -> None:
        super().store_result(*args, **kwargs)
        self.look()


class Shop:
    """A broker in memory, one actor, and a worker."""

    def __init__(self, *, asyncs: bool = False) -> None:
        self.broker = StubBroker(middleware=[AsyncIO()] if asyncs else [])
        self.results = Stored()
        self.broker.add_middleware(Results(backend=self.results, store_results=True))  # type: ignore[no-untyped-call]
        self.leases = Leases("memory://", ttl=6)
        self.broker.add_middleware(self.leases)
        self.ran: list[str] = []
        dramatiq.actor(broker=self.broker, actor_name="runs", queue_name="q")(self.run)
        self.message: Any = self.broker.get_actor("runs").message("a")
        self.name = self.leases._client.once(f"dramatiq:{self.message.message_id}")
        self.worker = Worker(self.broker, worker_timeout=50, worker_threads=1)
        self.worker.start()

    def run(self, name: str) -> str:
        self.ran.append(name)
        return name

    @property
    def status(self) -> str:
        """Of its lease, at the service."""
        info = self.leases._client.get(f"once:dramatiq:{self.message.message_id}")
        return str(info.status) if info else "unknown"

    def deliver(self) -> None:
        """And wait until it was processed."""
        self.broker.enqueue(self.message)
        self.broker.join("q", timeout=30_000, fail_fast=False)


@pytest.fixture
def shop() -> Iterator[Shop]:
    shop = Shop()
    yield shop
    shop.worker.stop()


def test_one_that_runs_already_and_cannot_be_put_off_is_a_dead_letter_and_does_not_run(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def enqueue(message: Any, *, delay: Any = None) -> Any:
        if delay is not None:
            raise ConnectionError("the broker is away")
        return take(message)

    take = shop.broker.enqueue
    monkeypatch.setattr(shop.broker, "enqueue", enqueue)
    monkeypatch.setattr(middleware, "_BROKER_PATIENCE", 0)
    with leasekit.lease(shop.name) as held:
        shop.deliver()
        held.release()
    assert shop.ran == []
    assert [message.message_id for message in shop.broker.dead_letters] == [shop.message.message_id]


@pytest.mark.parametrize("error", [ConnectionError("the broker is away"), TimeLimitExceeded(), Shutdown()])
def test_one_that_cannot_be_put_off_at_first_is_put_off_later(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def enqueue(message: Any, *, delay: Any = None) -> Any:
        if delay is not None and errors:
            raise errors.pop()
        return take(message, delay=delay)

    take, errors, hears = shop.broker.enqueue, [error] * 3, Hears()
    shop.broker.add_middleware(hears)
    monkeypatch.setattr(shop.broker, "enqueue", enqueue)
    monkeypatch.setattr(middleware, "_BROKER_PAUSE", 0)
    monkeypatch.setattr(shop.leases, "_again_in", 0.1)
    with leasekit.lease(shop.name) as held:
        shop.broker.enqueue(shop.message)
        assert hears.acknowledged.wait(30)
        held.release()
    eventually(lambda: shop.status == "success")
    assert (shop.ran, errors, shop.broker.dead_letters) == (["a"], [], [])


class Skips(Middleware):
    """Has no message run, in one way or the other."""

    def __init__(self, how: str) -> None:
        self.how = how

    def before_process_message(self, broker: Any, message: Any) -> None:
        if self.how == "fail":
            message.fail()
        else:
            raise SkipMessage("not today")


@pytest.mark.parametrize("how", ["skip", "fail"])
def test_one_that_another_middleware_skips_gives_its_lease_back(shop: Shop, how: str) -> None:
    shop.broker.add_middleware(Skips(how))
    shop.deliver()
    with leasekit.lease(shop.name) as held:  # it is neither held nor has it ended
        held.release()
    assert shop.ran == []


def test_its_end_is_reported_after_dramatiq_has_stored_its_result(shop: Shop) -> None:
    seen: list[str] = []
    shop.results.look = lambda: seen.append(shop.status)
    shop.deliver()
    assert (seen, shop.status) == (["processing"], "success")


def test_its_result_outlives_another_delivery(shop: Shop) -> None:
    shop.deliver()
    shop.deliver()
    assert (shop.message.get_result(backend=shop.results), shop.ran) == ("a", ["a"])


def test_its_result_outlives_another_delivery_that_comes_too_late(shop: Shop) -> None:
    shop.deliver()
    shop.broker.add_middleware(AgeLimit(max_age=1), before=Leases)
    shop.message = shop.message.copy(message_timestamp=0)
    shop.deliver()
    assert len(shop.broker.dead_letters) == 1
    assert (shop.message.get_result(backend=shop.results), shop.ran) == ("a", ["a"])


def test_one_that_comes_too_late_at_first_has_failed(shop: Shop) -> None:
    shop.broker.add_middleware(AgeLimit(max_age=1), before=Leases)
    shop.message = shop.message.copy(message_timestamp=0)
    shop.deliver()
    with pytest.raises(ResultFailure, match="age limit"):
        shop.message.get_result(backend=shop.results)


class Hears(Middleware):
    """Of acknowledgements."""

    def __init__(self) -> None:
        self.acknowledged = threading.Event()

    def after_ack(self, broker: Any, message: Any) -> None:
        self.acknowledged.set()


def test_while_it_runs_another_delivery_stores_no_result(shop: Shop) -> None:
    hears = Hears()
    shop.broker.add_middleware(hears)
    with leasekit.lease(shop.name) as held:
        shop.broker.enqueue(shop.message)
        assert hears.acknowledged.wait(30)
        with pytest.raises(ResultMissing):
            shop.message.get_result(backend=shop.results)
        held.release()


def test_while_it_runs_another_delivery_that_comes_too_late_waits(shop: Shop) -> None:
    hears = Hears()
    shop.broker.add_middleware(hears)
    shop.broker.add_middleware(AgeLimit(max_age=1), before=Leases)
    shop.leases._again_in = 0.1
    shop.message = shop.message.copy(message_timestamp=0)
    with leasekit.lease(shop.name) as held:
        shop.broker.enqueue(shop.message)
        assert hears.acknowledged.wait(30)
        with pytest.raises(ResultMissing):
            shop.message.get_result(backend=shop.results)
        held.release()
    with pytest.raises(ResultFailure, match="age limit"):  # that run has died
        shop.message.get_result(backend=shop.results, block=True, timeout=30_000)
    assert (len(shop.broker.dead_letters), shop.ran) == (1, [])


@pytest.mark.parametrize("error", [leasekit.LeasekitError("away"), TimeLimitExceeded()])
def test_while_it_may_run_another_delivery_that_comes_too_late_waits(
    shop: Shop, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an outage of the service, which cannot say whether it runs."""
    hears = Hears()
    shop.broker.add_middleware(hears)
    shop.broker.add_middleware(AgeLimit(max_age=1), before=Leases)
    shop.leases._again_in = 0.1
    shop.message = shop.message.copy(message_timestamp=0)

    def away(_: str) -> None:
        raise error

    with monkeypatch.context() as outage:
        outage.setattr(shop.leases._client, "get", away)
        shop.broker.enqueue(shop.message)
        eventually(lambda: hears.acknowledged.is_set() or shop.broker.dead_letters)
        assert shop.broker.dead_letters == []
    with pytest.raises(ResultFailure, match="age limit"):  # the service knows of no run
        shop.message.get_result(backend=shop.results, block=True, timeout=30_000)


def test_one_that_was_cancelled_at_the_service_is_a_dead_letter_and_never_runs(shop: Shop) -> None:
    with leasekit.lease(shop.name) as held:
        held.release()
    shop.leases._client.cancel(f"once:dramatiq:{shop.message.message_id}")
    shop.deliver()
    assert (shop.ran, len(shop.broker.dead_letters)) == ([], 1)
    with pytest.raises(ResultFailure, match="cancelled"):
        shop.message.get_result(backend=shop.results)


class FailsLate(Middleware):
    """Makes a dead letter of what has ended well."""

    def after_process_message(self, broker: Any, message: Any, *, result: Any = None, exception: Any = None) -> None:
        message.fail()


@pytest.mark.parametrize("interrupt", [TimeLimitExceeded, Shutdown])
def test_one_that_is_interrupted_before_it_has_its_lease_is_put_off(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, interrupt: type[Interrupt]
) -> None:
    interrupts = [interrupt()]
    once = shop.leases._client.once

    def interrupted(name: str) -> Any:
        if interrupts:
            raise interrupts.pop()
        return once(name)

    monkeypatch.setattr(shop.leases, "_again_in", 0.1)
    monkeypatch.setattr(shop.leases._client, "once", interrupted)
    shop.deliver()
    eventually(lambda: shop.status == "success")
    assert (shop.ran, interrupts) == (["a"], [])


@pytest.mark.parametrize("interrupt", [TimeLimitExceeded, Shutdown])
def test_one_that_is_interrupted_just_after_it_has_got_its_lease_is_put_off(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, interrupt: type[Interrupt]
) -> None:
    class Interrupted:
        """In place of what the middleware sets once it has the lease."""

        def set(self, lease: Any) -> None:
            if lease is not None and interrupts:
                raise interrupts.pop()

    interrupts = [interrupt()]
    shop.broker.add_middleware(Retries(max_retries=0), before=Results)
    monkeypatch.setattr(middleware, "_current", Interrupted())
    monkeypatch.setattr(shop.leases, "_again_in", 0.1)
    shop.deliver()
    eventually(lambda: shop.status == "success")
    assert (shop.ran, interrupts, shop.broker.dead_letters) == (["a"], [], [])


@pytest.mark.parametrize("interrupt", [TimeLimitExceeded, Shutdown])
def test_a_failure_that_is_interrupted_while_its_lease_is_left_is_retried(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, interrupt: type[Interrupt]
) -> None:
    interrupts, patience = [interrupt()], _blocks._patience

    def interrupted(run: Any) -> float:
        if interrupts:
            raise interrupts.pop()
        return patience(run)

    def fails_once() -> None:
        shop.ran.append("b")
        if len(shop.ran) == 1:
            raise ValueError("oops")

    monkeypatch.setattr(_blocks, "_patience", interrupted)
    shop.broker.add_middleware(Retries(min_backoff=10, max_backoff=20), before=Results)
    shop.message = dramatiq.actor(broker=shop.broker, queue_name="q")(fails_once).message()
    shop.deliver()
    eventually(lambda: shop.status == "success")
    assert (shop.ran, interrupts) == (["b", "b"], [])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it ends Dramatiq's thread
def test_a_failure_that_is_interrupted_before_dramatiq_tells_of_it_is_no_success(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise ValueError("oops")

    def interrupted(*text: Any, **extra: Any) -> None:
        raise TimeLimitExceeded

    monkeypatch.setattr(shop.worker.workers[0].logger, "error", interrupted)
    shop.message = dramatiq.actor(broker=shop.broker, queue_name="q")(fails).message()
    shop.deliver()
    assert shop.status == "enqueued"


def test_one_that_another_middleware_makes_a_dead_letter_of_may_be_sent_again(shop: Shop) -> None:
    shop.broker.add_middleware(FailsLate(), before=Results)
    shop.deliver()
    assert (shop.ran, shop.status) == (["a"], "enqueued")


@pytest.mark.parametrize("wrap", [lambda error: error, lambda error: ExceptionGroup("several", [error])])
def test_one_that_fails_for_good_is_retried_as_dramatiq_decides_and_then_a_dead_letter(
    shop: Shop, wrap: Callable[[Exception], Exception]
) -> None:
    def fails() -> None:
        shop.ran.append("b")
        raise wrap(leasekit.Fatal("bad input"))

    retries = Retries(max_retries=1, min_backoff=10, max_backoff=20)
    shop.broker.add_middleware(retries, before=Results)
    shop.message = dramatiq.actor(broker=shop.broker, queue_name="q")(fails).message()
    shop.deliver()
    with pytest.raises(ResultFailure, match=r"bad input|several"):
        shop.message.get_result(backend=shop.results, block=True, timeout=30_000)
    assert (shop.ran, shop.status) == (["b", "b"], "enqueued")


# Async actors


def awaiting_thread(shop: Shop) -> int:
    """Return a worker's thread when it awaits its actor's coroutine: Dramatiq cancels none for an earlier interrupt."""
    thread = shop.worker.workers[0].ident
    assert thread is not None

    def functions(thread: int = thread) -> set[str]:
        return {entry.name for entry in traceback.extract_stack(sys._current_frames()[thread])}

    eventually(lambda: {"run_coroutine", "result"} <= functions())
    return thread


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when Dramatiq waits for a coroutine no longer, and the middleware does."""
    waits, wait = threading.Event(), coroutines._wait

    def begins(*coroutine: Any) -> None:
        waits.set()
        wait(*coroutine)

    monkeypatch.setattr(coroutines, "_wait", begins)
    return waits


def test_an_async_actor_that_takes_long_to_be_cancelled_does_not_overlap_with_its_retry(waits: threading.Event) -> None:
    shop, begun, cleaning, go = Shop(asyncs=True), threading.Event(), threading.Event(), threading.Event()
    seen: list[str] = []

    async def slow(name: str) -> None:
        seen.append("begins")
        if begun.is_set():
            return
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            cleaning.set()
            while not go.is_set():  # noqa: ASYNC110 - a fact of another thread has no event
                await asyncio.sleep(0.01)
            seen.append("ended")

    retries = Retries(max_retries=1, min_backoff=10, max_backoff=20)
    shop.broker.add_middleware(retries, before=Results)
    shop.message = dramatiq.actor(broker=shop.broker, actor_name="slow", queue_name="q")(slow).message("a")
    shop.broker.enqueue(shop.message)
    try:
        assert begun.wait(30)
        thread = awaiting_thread(shop)
        raise_thread_exception(thread, TimeLimitExceeded)  # type: ignore[no-untyped-call]
        assert cleaning.wait(30)
        assert waits.wait(30)
        raise_thread_exception(thread, Shutdown)  # type: ignore[no-untyped-call]
        assert (seen, shop.status) == (["begins"], "processing")
        go.set()
        eventually(lambda: shop.status == "success")
        assert seen == ["begins", "ended", "begins"]
    finally:
        go.set()
        shop.worker.stop()


def test_an_async_actor_that_was_cancelled_before_its_loop_began_it_holds_up_no_thread(waits: threading.Event) -> None:
    shop, go, busy = Shop(asyncs=True), threading.Event(), threading.Event()

    async def returns() -> None:
        shop.ran.append("b")

    async def block() -> None:
        busy.set()
        assert go.wait(30)

    loop = get_event_loop_thread()
    assert loop is not None
    blocked = asyncio.run_coroutine_threadsafe(block(), loop.loop)
    shop.message = dramatiq.actor(broker=shop.broker, actor_name="returns", queue_name="q")(returns).message()
    try:
        assert busy.wait(30)
        shop.broker.enqueue(shop.message)
        raise_thread_exception(awaiting_thread(shop), TimeLimitExceeded)  # type: ignore[no-untyped-call]
        assert waits.wait(30)
        assert shop.status == "processing"
        go.set()
        shop.broker.join("q", timeout=30_000, fail_fast=False)
        assert shop.status == "enqueued"
        blocked.result(30)
    finally:
        go.set()
        shop.worker.stop()


def test_an_async_actor_that_is_interrupted_before_dramatiq_awaits_it_is_cancelled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shop, submit = Shop(asyncs=True), asyncio.run_coroutine_threadsafe
    loop = get_event_loop_thread()
    assert loop is not None
    begun = threading.Event()

    async def sleeps() -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.01)  # a second cancel would end it here
            shop.ran.append("cleaned up")

    def interrupt(coroutine: Any, loop: Any) -> Any:
        monkeypatch.undo()
        submit(coroutine, loop)
        assert begun.wait(30)
        raise TimeLimitExceeded

    shop.message = dramatiq.actor(broker=shop.broker, actor_name="sleeps", queue_name="q")(sleeps).message()
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupt)
    try:
        shop.deliver()
        assert (shop.ran, shop.status) == (["cleaned up"], "enqueued")
    finally:
        loop.loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop.loop)])
        shop.worker.stop()


def test_a_function_that_is_not_dramatiqs_wrapper_of_a_coroutine_is_left_as_it_is(shop: Shop) -> None:
    assert shop.broker.get_actor("runs").fn == shop.run


# Several workers of one broker


def test_a_lease_outlives_a_worker_that_did_not_wait_for_its_run(shop: Shop) -> None:
    begun, go = threading.Event(), threading.Event()

    def wait(name: str) -> None:
        begun.set()
        assert go.wait(30)

    dramatiq.actor(broker=shop.broker, actor_name="waits", queue_name="q")(wait)
    shop.message = shop.broker.get_actor("waits").message("a")
    shop.broker.enqueue(shop.message)
    assert begun.wait(30)
    shop.worker.stop(timeout=1)
    assert shop.status == "processing"
    go.set()
    eventually(lambda: shop.leases._is_closed)
    with pytest.raises(leasekit.Closed):
        shop.name.__enter__()


def test_a_lease_outlives_the_shutdown_of_another_worker(shop: Shop) -> None:
    begun, go = threading.Event(), threading.Event()

    def wait(name: str) -> None:
        begun.set()
        assert go.wait(30)

    dramatiq.actor(broker=shop.broker, actor_name="waits", queue_name="q")(wait)
    shop.message = shop.broker.get_actor("waits").message("a")
    shop.broker.enqueue(shop.message)
    assert begun.wait(30)
    other = Worker(shop.broker, worker_timeout=50, worker_threads=1)
    other.start()
    other.stop()
    assert shop.status == "processing"
    go.set()
    shop.broker.join("q", timeout=30_000, fail_fast=False)
    assert shop.status == "success"


def test_a_worker_that_boots_after_the_last_one_was_shut_down_is_connected_again(shop: Shop) -> None:
    shop.worker.stop()
    shop.worker = Worker(shop.broker, worker_timeout=50, worker_threads=1)
    shop.worker.start()
    shop.deliver()
    assert (shop.ran, shop.status) == (["a"], "success")


def test_a_worker_does_not_start_with_the_leases_of_one_service_twice(shop: Shop) -> None:
    shop.broker.add_middleware(shop.leases)
    with pytest.raises(MiddlewareError, match="add it once"):
        Worker(shop.broker).start()
    shop.broker.middleware.remove(shop.leases)
    shop.deliver()
    assert shop.ran == ["a"]


def test_a_worker_that_was_started_before_it_got_its_leases_runs_every_message(shop: Shop) -> None:
    shop.leases._client.close()
    shop.broker.middleware.remove(shop.leases)
    shop.leases = Leases("memory://")
    shop.broker.add_middleware(shop.leases)
    shop.deliver()
    shop.message = shop.message.copy(message_id="another")
    shop.deliver()
    assert (shop.ran, shop.status) == (["a", "a"], "success")
    shop.worker.stop()
    assert shop.leases._is_closed


def test_a_worker_that_boots_has_its_connection_before_a_time_limit_can_strike(shop: Shop) -> None:
    assert shop.leases._client._session.current is not None


def test_a_worker_does_not_start_where_its_process_can_keep_no_lease(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise leasekit.ConfigError("gevent has replaced threading in this process")

    monkeypatch.setattr(shop.leases._client, "check_process", refuse)
    with pytest.raises(MiddlewareError, match="gevent"):
        Worker(shop.broker).start()


@pytest.mark.parametrize("odd", ["x" * 400, "reports/" * 30, "reports/" * 12, "", "\ud800", 7, None])
def test_an_id_may_be_whatever_dramatiq_lets_it_be(shop: Shop, odd: Any) -> None:
    shop.message = shop.message.copy(message_id=odd)
    shop.deliver()
    shop.deliver()
    assert shop.ran == ["a"]


def test_an_actor_has_its_lease_at_hand_while_it_runs(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[leasekit.Lease | None] = []

    def run(_: str) -> None:
        seen.append(held := current_lease())
        if held is not None:
            held.check()

    actor = shop.broker.get_actor("runs")
    monkeypatch.setattr(actor, "fn", run)
    shop.deliver()
    actor("a")
    assert [held is None for held in seen] == [False, True]
