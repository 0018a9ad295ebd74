"""One daemon thread for each process, with an event loop of its own: nothing on the user's side can hold it up.

It is started by the first client that needs it and stopped by the last one that is closed. A forked child begins
with none: threads do not survive a fork, and neither does the right to a lease.
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
from leasekit._driver.loop_monitor import LoopMonitor
from leasekit.errors import Closed, ConfigError

__all__ = ["NAME", "Driver", "acquire", "spawn"]

logger = logging.getLogger("leasekit")

P = ParamSpec("P")
T = TypeVar("T")
NAME = "leasekit-driver"
_LAST_CALLS = 5.0  # seconds for calls that were cancelled at the end to notice it


class _Threads(ThreadPoolExecutor):
    """What the loop resolves names in: a thread for each call.

    The pool that it would make takes nothing any more once the main thread has ended. Bodies in other threads may go on
    for long after that, and their beats must be able to connect anew.
    """

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - whoever waits gets it
                future.set_exception(error)

        threading.Thread(target=run, name=f"{NAME}-call", daemon=True).start()
        return future


def _check_threads() -> None:
    """Raise `ConfigError` if gevent or eventlet has replaced threads: a busy greenlet would hold up all heartbeats."""
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    if gevent is not None and gevent.is_module_patched("threading"):
        library, instead = "gevent", "gevent.monkey.patch_all(thread=False)"
    elif eventlet is not None and eventlet.is_monkey_patched("thread"):
        library, instead = "eventlet", "eventlet.monkey_patch(thread=False)"
    else:
        return
    raise ConfigError(
        f"{library} has replaced the threads of this process, so a busy greenlet would hold up all heartbeats: "
        f"patch with {instead}, or run tasks in a process that is not patched"
    )


class Driver:
    """The thread and its loop. `acquire` gives it, `release` lets go of it.

    What runs in it has a context of its own: context variables of users say that trio runs here (anyio and httpx
    believe that), or belong to a request that will have ended long before a lease.
    """

    def __init__(self) -> None:
        _check_threads()
        self.pid = os.getpid()
        self.users = 0
        self.loop_monitor = LoopMonitor()
        self.loop = asyncio.SelectorEventLoop(self.loop_monitor)
        self.loop.set_default_executor(_Threads())
        self._ending = False
        # Whoever hands in work writes here and then looks whether the thread is ending; the thread looks here after
        # that is written down. So one of the two sees the other, and no lock is needed that a user could leave held.
        self._owed: dict[Answer[Any], Coroutine[Any, Any, Any] | None] = {}  # None: the work has begun
        # A daemon: it must not keep alive a process whose main thread has ended.
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            while not self._ending:
                try:
                    self.loop.run_forever()
                except BaseException:
                    # A SystemExit in a callback leaves the loop: no reason for leases to end.
                    logger.exception("something tried to end the driver's thread; it goes on")
            self.loop.run_until_complete(self._cancel_all())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self._refuse_the_rest()
            self.loop.close()

    def _refuse_the_rest(self) -> None:
        """Cancel all work that has not ended: work that has not begun, and tasks that did not end when told to."""
        while self._owed:
            answer, work = self._owed.popitem()
            if work is not None:
                work.close()
            answer.on_cancel = None
            answer.cancel()

    async def _cancel_all(self) -> None:
        """Whoever waits for one of these tasks gets to know; one that does not end when told to is left behind."""
        until = self.loop.time() + _LAST_CALLS
        while (left := asyncio.all_tasks() - {asyncio.current_task()}) and self.loop.time() < until:
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=until - self.loop.time())

    @property
    def here(self) -> bool:
        """True on the driver's own thread, which must never wait for itself."""
        return threading.current_thread() is self._thread

    def submit(self, work: Coroutine[Any, Any, T]) -> Answer[T]:
        """Run `work` in the driver's loop; the answer is for any thread.

        Raises `Closed` where the thread has been let go of, which may happen while somebody is about to use it.
        """
        answer: Answer[T] = Answer()
        self._owed[answer] = work
        if self._ending or self.pid != os.getpid():  # a fork has no such thread
            self._owed.pop(answer, None)
            work.close()
            raise Closed
        self.call_soon(self._start, answer)
        return answer

    def _start(self, answer: Answer[Any]) -> None:
        work = self._owed.get(answer)
        if work is None:
            return
        if answer.done():  # cancelled before its turn
            work.close()
            del self._owed[answer]
            return
        task = self.loop.create_task(work)
        self._owed[answer] = None
        task.add_done_callback(partial(self._finished, answer))
        answer.on_cancel = partial(self.call_soon, task.cancel)
        if answer.cancelled():
            task.cancel()

    def _finished(self, answer: Answer[Any], task: "asyncio.Task[Any]") -> None:
        self._owed.pop(answer, None)
        answer.on_cancel = None
        if task.cancelled():
            answer.cancel()
        elif (error := task.exception()) is not None:
            answer.set_exception(error)
        else:
            answer.set_result(task.result())

    def call_soon(self, call: Callable[..., object], *args: Any) -> None:
        """Call it in the driver's loop. After the loop has ended that is a no-op: nobody is kept there any more."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(call, *args, context=Context())

    def release(self) -> None:
        """One user less; the last one ends the thread."""
        global _driver  # noqa: PLW0603 - one for each process
        with _lock:
            self.users -= 1
            if self.users or self.pid != os.getpid():
                return
            if _driver is self:
                _driver = None
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


def acquire() -> Driver:
    """This process's driver, started if need be. Each call wants one `release`."""
    global _driver  # noqa: PLW0603 - one for each process
    with _lock:
        if _driver is None:
            _driver = Driver()
        _driver.users += 1
        return _driver


def _forget() -> None:
    """In a forked child: the parent's thread is not here, and its lock may have been held by a thread that is not."""
    global _driver, _lock  # noqa: PLW0603 - one for each process
    _lock = threading.Lock()
    _driver = None


os.register_at_fork(after_in_child=_forget)
