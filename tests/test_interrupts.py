"""An exception out of a signal handler, anywhere: the driver's thread goes on, and no lease outlives its block."""

import asyncio
import gc
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from random import Random
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest

import leasekit
import leasekit._session
from leasekit import Client, Task, _lineage
from leasekit._driver import thread
from leasekit._driver.guarding.watchdog import Watchdog
from leasekit.hooks import Hooks
from leasekit.named import Named, Once
from leasekit.testing.memory import MemoryBackend, MemoryService
from tests.injecting import Interrupt, Place, interrupts, places
from tests.sampling import in_soak
from tests.waiting import eventually

_ENDED = 20.0  # seconds


@pytest.fixture
def client() -> Iterator[Client]:
    gc.collect()
    gc.freeze()  # `is_over` looks for garbage after each interrupt: not among what was there before
    with Client(MemoryBackend(MemoryService(), worker="w")) as client:
        yield client


def claimed(client: Client, *, ttl: float | None = None) -> Task:
    client.schedule("k", claim_timeout=ttl, heartbeat_timeout=ttl or 300)
    return next(client.tasks("k"))


def block(client: Client, tasks: list[Task]) -> None:
    with leasekit.lease(tasks.pop()) as held:
        held.progress(1)
        held.then("other")
        held.complete(2)


def failing(client: Client, tasks: list[Task]) -> None:
    with suppress(ZeroDivisionError), leasekit.lease(tasks.pop()):
        _ = 1 / 0


def in_a_stack(client: Client, tasks: list[Task]) -> None:
    with ExitStack() as stack:
        stack.enter_context(leasekit.lease(tasks.pop()))


def loop(client: Client, tasks: list[Task]) -> None:
    with leasekit.lease(tasks.pop()):
        client.schedule("k")
    for another in client.tasks("k", until_idle=0):
        with leasekit.lease(another):
            pass


def claiming(client: Client, tasks: list[Task]) -> None:
    with leasekit.lease(tasks.pop()):
        client.schedule("k")
    with leasekit.lease(next(client.tasks("k"))):
        pass


def named(client: Client, tasks: list[Task]) -> None:
    with leasekit.lease(tasks.pop()), leasekit.lease(client.named("name")):
        pass


def once(client: Client, tasks: list[Task]) -> None:
    with leasekit.lease(tasks.pop()), leasekit.lease(client.once("once")):
        pass


async def async_block(client: Client, tasks: list[Task]) -> None:
    async with leasekit.lease(tasks.pop()) as held:
        held.progress(1)
        held.complete(2)


async def async_named(client: Client, tasks: list[Task]) -> None:
    async with leasekit.lease(tasks.pop()), leasekit.lease(client.named("name")):
        pass


async def async_loop(client: Client, tasks: list[Task]) -> None:
    async with leasekit.lease(tasks.pop()):
        await client.aschedule("k")
    async for another in client.tasks("k", until_idle=0):
        async with leasekit.lease(another):
            pass


async def async_claiming(client: Client, tasks: list[Task]) -> None:
    async with leasekit.lease(tasks.pop()):
        await client.aschedule("k")
    async with leasekit.lease(await anext(client.tasks("k"))):
        pass


async def within(place: Place, work: Coroutine[Any, Any, None]) -> None:
    with interrupts(place):
        await work


def interrupted(place: Place, body: Callable[[Client, list[Task]], Any], client: Client) -> BaseException | None:
    """What came out of an interrupt there."""
    tasks = [claimed(client)]
    try:
        if asyncio.iscoroutinefunction(body):
            asyncio.run(within(place, body(client, tasks)))
        else:
            with interrupts(place):
                body(client, tasks)
    except BaseException as error:
        # RuntimeError: a cancel scope of anyio's that was interrupted cannot be left any more.
        if not isinstance(error, Interrupt | asyncio.CancelledError | leasekit.LeasekitError | RuntimeError):
            raise
        tasks.clear()
        return error
    return None


async def nothing() -> None: ...


def is_over(client: Client, where: str | None, error: BaseException | None, *, at_once: bool) -> None:
    """The driver's thread answers, and keeps no lease: `at_once`, even while the traceback is held.

    Where a variable in the traceback refers to a task that `lease` has not yet taken, the task is kept with it.
    """
    connection = client.__connection__()
    connection.driver.submit(nothing()).result(_ENDED)
    keeper = connection.keeper
    if at_once:
        is_named = any(code in f"{where}" for code in _NAMING)
        eventually(
            lambda: not any(one.reserved or not is_named for one in list(keeper._leases.values())),
            f"{where}",
            within=_ENDED,
        )
    if error is not None:
        error.__traceback__ = error.__context__ = error.__cause__ = None
    gc.collect()  # an event loop that was interrupted leaves rings
    eventually(lambda: len(keeper) == 0, where or "", within=_ENDED)
    assert _lineage.current() is None, f"{where}: tasks are still scheduled as by the run that is over"


# Sample: each seventh place of the plain `with`, each 61st of the others.
_STEP_OF_BLOCK, _STEP = in_soak(1, by_default=7), in_soak(1, by_default=61)
_STEP_OF_NAME = in_soak(1, by_default=11)
# Code that has a task in a variable, and what it calls with one.
_NAMING = (" lease +", " loop +", " async_loop +", " check_idle_timeout +", " check_number +")
_ALL: list[Callable[[Client, list[Task]], Any]] = [block, failing, in_a_stack, loop, claiming, named, once]
_ALL += [async_block, async_loop, async_claiming, async_named]


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine:RuntimeWarning")
@pytest.mark.parametrize("body", _ALL, ids=lambda one: one.__name__)
def test_an_interrupt_anywhere_holds_up_no_beats_and_leaves_no_lease(
    client: Client, body: Callable[[Client, list[Task]], Any]
) -> None:
    for place in places(also=[body.__code__], step=_STEP_OF_BLOCK if body is block else _STEP, more_than=100):
        error = interrupted(place, body, client)
        # A stack holds the lease itself, and so does the traceback of who was interrupted in it.
        is_over(client, place.at, error, at_once=body is not in_a_stack)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine:RuntimeWarning")
@pytest.mark.parametrize("enter", [Client.named, Client.once], ids=["named", "once"])
def test_a_name_that_was_interrupted_anywhere_can_be_entered_again(
    client: Client, enter: Callable[..., Named | Once]
) -> None:
    def body() -> None:
        with name as held:
            held.release()

    name = enter(client, "name", wait=_ENDED)
    for place in places(also=[body.__code__], step=_STEP_OF_NAME, more_than=100):
        try:
            with interrupts(place):
                body()
        except Interrupt as error:
            with name as held:  # while the traceback is kept
                held.release()
            error.__traceback__ = None


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine:RuntimeWarning")
def test_an_interrupt_while_a_client_is_closed_harms_no_other(client: Client) -> None:
    for place in places(more_than=20):
        other = Client(MemoryBackend(MemoryService(), worker="x"))
        task = claimed(other)
        connection = other.__connection__()
        with suppress(Interrupt), interrupts(place):
            other.close()
        client.__connection__().driver.submit(nothing()).result(_ENDED)
        if not connection.closed:
            connection.run(connection.aclose())
        connection.driver.users = 1  # who was interrupted may not have let go
        del task


def test_an_interrupt_that_is_an_exception_is_not_taken_for_an_error_of_a_tracer(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A soft time limit of Celery's, say, that comes while a block begins and no tracer listens."""
    task = claimed(client)
    monkeypatch.setattr(Hooks, "_listeners", property(Mock(side_effect=TimeoutError)))
    with pytest.raises(TimeoutError), leasekit.lease(task):
        pytest.fail("it began")
    eventually(lambda: len(client.__connection__().keeper) == 0)


def test_an_interrupt_while_the_driver_is_let_go_of_holds_up_no_other(client: Client) -> None:
    driver = client.__connection__().driver
    for place in places():
        thread.acquire()
        with suppress(Interrupt), interrupts(place):
            driver.release()
        assert not thread._lock.locked(), place.at
        driver.users = 1  # the client's: what was interrupted may not have let go


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_lease_whose_block_was_left_by_two_interrupts_is_given_back_with_its_next_heartbeat(client: Client) -> None:
    """The second comes in the callback that would have told the keeper of the end."""
    task, keeper = claimed(client, ttl=4), client.__connection__().keeper
    entered = [leasekit.lease(task)]
    entered[0].__enter__()
    with interrupts(callback := Place(0)):
        entered.clear()
    assert "Connection.owner.<locals>.dead" in str(callback.at)
    eventually(lambda: len(keeper) == 0, within=_ENDED)


class EnteredInVain:
    """A lock in Python 3.14, at worst: the handler comes between the call of `__enter__` and the block of a `with`."""

    def __init__(self, lock: Any) -> None:
        self.acquire, self.release = lock.acquire, lock.release

    def __enter__(self) -> None:
        self.acquire()
        raise Interrupt

    def __exit__(self, *_: object) -> None:
        self.release()


def test_an_interrupt_between_a_lock_and_its_block_leaves_it_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, clients, timer = threading.Lock(), threading.Lock(), threading.Lock()
    monkeypatch.setattr(thread, "_lock", EnteredInVain(driver))
    monkeypatch.setattr(leasekit._session, "_connecting", EnteredInVain(clients))
    watchdog = Watchdog("off", timer=Mock())
    watchdog._lock = EnteredInVain(timer)  # type: ignore[assignment]
    client = Client(MemoryBackend(MemoryService(), worker="w"))
    for use in (client.__connection__, client.close, watchdog.close):
        with suppress(Interrupt):
            use()
        assert not any(lock.locked() for lock in (driver, clients, timer)), use


@contextmanager
def interrupts_of_the_system(body: Callable[..., Any], after: float) -> Iterator[None]:
    """Interrupt this thread while the code of `body` runs: after so many seconds, then each second until it has ended.

    Again: an exception that is raised where nothing can hear of it (a finalizer) is lost. SIGALRM is pytest-timeout's.
    """
    main, over = threading.get_ident(), threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is body.__code__:
                raise Interrupt
            frame = frame.f_back

    def send() -> None:
        wait = after
        while not over.wait(wait):
            signal.pthread_kill(main, signal.SIGUSR1)
            wait = 1

    before, switch = signal.signal(signal.SIGUSR1, interrupt), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # or the signal would only be sent where the body waits
    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        over.set()
        sender.join()
        sys.setswitchinterval(switch)
        signal.signal(signal.SIGUSR1, before)


# Sample: ten signals that interrupt the body; some come when it has ended.
@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine:RuntimeWarning")
@pytest.mark.parametrize("body", [block, failing, loop], ids=lambda one: one.__name__)
def test_real_signals_hold_up_no_beats_and_leave_no_lease(
    client: Client, body: Callable[[Client, list[Task]], Any]
) -> None:
    rng, number = Random(1), 0
    while number < in_soak(200, by_default=10):
        tasks, error = [claimed(client)], None
        with interrupts_of_the_system(body, after=rng.uniform(0.0, 0.003)):
            try:
                body(client, tasks)
            except (Interrupt, leasekit.LeasekitError) as raised:
                error = raised
                number += 1
        is_over(client, "a signal", error, at_once=True)
