"""Threads for blocking calls of the server, in place of a `ThreadPoolExecutor`.

A store may be served by any program. `ThreadPoolExecutor` takes no calls once the main thread has ended, though other
threads go on, and hangs in a forked child; both would leave the other processes without answers.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import ExitStack, suppress
from functools import partial
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

from leasekit._log import LogThread

P = ParamSpec("P")
T = TypeVar("T")
_Calls = SimpleQueue[Callable[[], None] | None]  # None ends a thread


class DaemonThreads(Executor):
    """Runs calls in at most `count` daemon threads; a forked child starts threads of its own."""

    def __init__(self, count: int, *, name: str) -> None:
        self._count = count
        self._name = name
        self._begin()

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        if self._pid != os.getpid():
            self._begin()
        future: Future[T] = Future()
        if len(self._threads) < self._count:
            self._start_thread()
        self._calls.put(partial(_run, future, partial(call, *args, **kwargs)))
        return future

    def _start_thread(self) -> None:
        """Start one more thread; if the system has none to give, those that there are do the work."""
        thread = threading.Thread(target=_run_all, args=(self._calls,), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                raise
        else:
            self._threads.append(thread)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002
        """End the threads after the calls that were queued before."""
        for _ in self._threads:
            self._calls.put(None)
        while wait and self._threads:
            self._threads.pop().join()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._calls = _Calls()
        self._threads: list[threading.Thread] = []


def _run(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - the waiting caller gets it
        future.set_exception(error)
        # Its traceback has this frame: they would hold each other, and megabytes of a body, up to a garbage collection.
        del future, call


def _run_all(calls: _Calls) -> None:
    with ExitStack() as stack:
        with suppress(RuntimeError):  # the system has no thread to give: then this one writes the log
            # Reads of a store may log each statement, and their callers must not wait for the log.
            stack.enter_context(LogThread())
        while (run := calls.get()) is not None:
            run()
            del run  # or the last call, and its answer, would stay until the next comes
