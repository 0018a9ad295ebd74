"""Driver's thread: one daemon thread per process, with an event loop of its own, which user code cannot hold up.

The first client that needs the thread starts it, and the last client that is closed stops it. A forked child begins
without one: threads do not survive a fork, and neither does the right to a lease.
"""

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context
from functools import partial
from typing import Any, ParamSpec, TypeVar

from leasekit._driver.answer import Answer
from leasekit._driver.explaining.loop_monitor import DescriptorsClosed, LoopMonitor
from leasekit._driver.locks import taken
from leasekit._log import LogThread
from leasekit.errors import Closed, ConfigError

logger = logging.getLogger("leasekit")

P = ParamSpec("P")
T = TypeVar("T")
NAME = "leasekit-driver"
_GEVENT = ("threading", "socket", "selectors", "ssl", "queue", "subprocess")
_OTHER_THAN = "thread=False, socket=False, select=False, ssl=False, queue=False, subprocess=False"
_EVENTLET = ("thread", "socket", "select")
_LAST_CALLS = 5.0  # seconds that cancelled calls have to end


class _Threads(ThreadPoolExecutor):
    """The loop's executor, for resolving host names: one thread per call.

    asyncio's default pool accepts no calls once the main thread has ended. Handlers in other threads may go on for long
    after that, and their heartbeats must be able to reconnect.
    """

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - the waiting caller gets it
                future.set_exception(error)

        threading.Thread(target=run, name=f"{NAME}-call", daemon=True).start()
        return future


def check_process() -> None:
    """Raise `ConfigError` if gevent or eventlet has replaced a module that the driver's thread needs.

    With greenlets for threads, a busy greenlet would hold up all heartbeats. The sockets, selectors and queues of
    greenlets do not work between threads.
    """
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    if gevent is not None and (replaced := list(filter(gevent.is_module_patched, _GEVENT))):
        library, instead = "gevent", f"gevent.monkey.patch_all({_OTHER_THAN})"
    elif eventlet is not None and (replaced := list(filter(eventlet.is_monkey_patched, _EVENTLET))):
        library, instead = "eventlet", "eventlet.monkey_patch(time=True)"
    else:
        return
    raise ConfigError(
        f"{library} has replaced {', '.join(replaced)} in this process, so leases could not be kept while a greenlet "
        "is busy: run tasks in a process that is not patched (Celery: -P prefork or threads; Dramatiq: not "
        f"dramatiq-gevent), or patch with {instead}"
    )


def _log_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of a callback as asyncio does, unless the callback is a late result of a cancelled future.

    anyio completes the read of a Unix socket in the turn of the loop in which it is cancelled. Nothing waits for it.
    """
    future = getattr(getattr(context.get("handle"), "_callback", None), "__self__", None)
    if not (isinstance(future, asyncio.Future) and future.cancelled()):
        loop.default_exception_handler(context)


class Driver:
    """The driver's thread and its loop. `acquire` returns the driver, `release` lets go of it.

    Work runs in a context of its own: a user's context variables may say that trio runs here (anyio and httpx would
    believe that), or belong to a request that ends long before a lease.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.users = 0
        self.loop_monitor = LoopMonitor()
        self.loop = asyncio.SelectorEventLoop(self.loop_monitor)
        self.loop.set_default_executor(_Threads())
        self.loop.set_exception_handler(_log_error)
        self._ending = False
        self._users_told: list[Callable[[str], object]] = []  # once this thread can no longer go on
        # A caller writes its work here and then checks `_ending`; the thread reads this dict after `_ending` is set. So
        # one of the two sees the other's write, without a lock that an interrupted user thread could leave held.
        self._owed: dict[Answer[Any], Coroutine[Any, Any, Any] | None] = {}  # None: the work has begun
        # A daemon: it must not keep alive a process whose main thread has ended.
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        with LogThread():
            try:
                while True:
                    try:
                        self.loop.run_forever()
                    except DescriptorsClosed:
                        raise
                    except BaseException:
                        # A SystemExit in a callback leaves the loop; leases must not end for that.
                        logger.exception("something tried to end the driver's thread; it goes on")
                    if self._ending:  # not before: the stop that `release` has asked for must not stop what follows
                        break
                self.loop.run_until_complete(self._cancel_all())
                self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            except DescriptorsClosed:
                self._give_up()
            else:
                self.loop.close()
            finally:
                self._refuse_the_rest()

    def when_lost(self, tell: Callable[[str], object]) -> None:
        """Call `tell(why)` in this thread, outside of the loop, if the loop cannot go on."""
        self._users_told.append(tell)

    def _give_up(self) -> None:
        """Tell all connections that the loop cannot go on; later calls are refused, and a new client gets a new thread.

        The loop is neither closed nor collected: its descriptors may have other owners by now, and would be closed.
        """
        global _driver  # noqa: PLW0603 - one per process
        self._ending = True
        _abandoned.append(self.loop)
        if _driver is self:
            _driver = None
        why = "code of this process has closed leasekit's descriptors (by os.closerange, say)"
        logger.error("%s: leases cannot be renewed any more and are lost; connect() again", why)
        for tell in self._users_told:
            try:
                tell(why)
            except Exception:
                logger.exception("a client could not be told that its leases are lost")

    def _refuse_the_rest(self) -> None:
        """Cancel all work that has not ended: work that has not begun, and tasks that did not end when cancelled."""
        while self._owed:
            answer, work = self._owed.popitem()
            if work is not None:
                work.close()
            answer.on_cancel = None
            answer.cancel()

    async def _cancel_all(self) -> None:
        """Cancel all tasks, so that their callers are told; a task that does not end in time is left behind."""
        until = self.loop.time() + _LAST_CALLS
        while (left := asyncio.all_tasks() - {asyncio.current_task()}) and self.loop.time() < until:
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=until - self.loop.time())

    @property
    def here(self) -> bool:
        """Whether this is the driver's own thread, which must never wait for itself."""
        return threading.current_thread() is self._thread

    def submit(self, work: Coroutine[Any, Any, T]) -> Answer[T]:
        """Run `work` in the driver's loop; any thread may wait for it. Raises `Closed` after the last `release`."""
        answer: Answer[T] = Answer()
        self._owed[answer] = work
        if self._ending or self.pid != os.getpid():  # a fork has no such thread
            self._owed.pop(answer, None)
            work.close()
            raise Closed
        try:
            self.call_soon(self._start_work, answer)
        except BaseException:
            answer.cancel()  # interrupted: the caller does not know that the work begins
            raise
        return answer

    def _start_work(self, answer: Answer[Any]) -> None:
        work = self._owed.get(answer)
        if work is None:
            return
        if answer.done():  # cancelled before its turn
            work.close()
            del self._owed[answer]
            return
        task = self.loop.create_task(work)
        self._owed[answer] = None
        task.add_done_callback(partial(self._deliver_outcome, answer))
        answer.on_cancel = partial(self.call_soon, task.cancel)
        if answer.cancelled():
            task.cancel()

    def _deliver_outcome(self, answer: Answer[Any], task: "asyncio.Task[Any]") -> None:
        self._owed.pop(answer, None)
        answer.on_cancel = None
        if task.cancelled():
            answer.cancel()
        elif (error := task.exception()) is not None:
            answer.set_exception(error)
        else:
            answer.set_result(task.result())

    def call_soon(self, call: Callable[..., object], *args: Any) -> None:
        """Call `call(*args)` in the driver's loop. Do nothing after the loop has ended: it keeps no lease then."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(call, *args, context=Context())

    def release(self) -> None:
        """Let go of the driver; the last user's call ends the thread."""
        global _driver  # noqa: PLW0603 - one per process
        lock = _lock
        for _ in taken(lock):
            try:
                self.users -= 1
                if self.users or self.pid != os.getpid():
                    return
                if _driver is self:
                    _driver = None
            finally:
                lock.release()
        self._ending = True
        self.call_soon(self.loop.stop)
        if not self.here:
            self._thread.join()


def spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    """Run `work` as a task that is in `tasks` until it ends: the loop itself holds tasks only weakly."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


_lock = threading.Lock()
_driver: Driver | None = None
_abandoned: list[asyncio.AbstractEventLoop] = []


def acquire() -> Driver:
    """Return this process's driver, and start it if needed. Each call needs one `release`."""
    global _driver  # noqa: PLW0603 - one per process
    lock = _lock
    for _ in taken(lock):
        try:
            if _driver is None:
                _driver = Driver()
            _driver.users += 1
            return _driver
        finally:
            lock.release()
    raise AssertionError  # the loop runs once and returns


def _forget() -> None:
    """Start afresh in a forked child: the driver's thread is not there, and a missing thread may have held the lock."""
    global _driver, _lock  # noqa: PLW0603 - one per process
    _lock = threading.Lock()
    _driver = None


os.register_at_fork(after_in_child=_forget)
