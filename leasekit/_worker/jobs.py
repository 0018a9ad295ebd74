"""Jobs: count what a run has started in its event loop. The run has ended when all of that has ended.

Cancelling `await asyncio.to_thread(…)` ends the coroutine and not the thread. If the lease were given back at that
moment, the task would have two holders.

Rule 1: a context variable names the run. Its tasks, their children and jobs of `asyncio.to_thread` inherit it.
Rule 2: tasks and jobs are counted in `create_task` and `run_in_executor` of the loop, which all of them pass through.
Rule 3: the count is zero only if it is still zero a turn of the loop later.
Rule 4: code that is started in an empty context (`contextvars.Context().run(…)`) belongs to no run.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Executor, Future
from contextvars import ContextVar
from typing import Any, cast
from weakref import WeakSet

import anyio

from leasekit._driver.bridge import call_soon_here, ring
from leasekit.hooks import log_fields
from leasekit.task import Task

logger = logging.getLogger("leasekit")

_SILENCE = 10.0  # seconds of waiting before a warning is logged

_current: ContextVar["Jobs | None"] = ContextVar("leasekit_jobs", default=None)
_counting: "WeakSet[asyncio.AbstractEventLoop]" = WeakSet()


class Jobs:
    """Tasks and executor jobs that were started in the context of one run, and have not ended."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._pid = os.getpid()
        self._left: set[Future[Any] | asyncio.Future[Any]] = set()  # written by any thread
        self._call_soon: Callable[..., object] | None = None  # set once the run waits
        self._one_ended = asyncio.Event()

    def belong_here(self) -> None:
        """Count what is started in this context, and in copies of it, from now on."""
        _current.set(self)

    def add(self, job: Future[Any] | asyncio.Future[Any]) -> None:
        """Count a job until it is done; a job that is cancelled before it has begun never begins."""
        self._left.add(job)
        cast("Future[Any]", job).add_done_callback(self._ended)

    def _ended(self, job: Future[Any] | asyncio.Future[Any]) -> None:
        self._left.discard(job)  # first: a thread that begins to wait now sees this, or is woken
        if self._call_soon is not None:
            ring(self._call_soon, self._one_ended.set)

    async def ended(self) -> None:
        """Wait until all jobs have ended. A cancellation meanwhile is passed on to them, and does not end the wait."""
        if self._pid != os.getpid() or not _in_asyncio():  # a child that the handler forked has none of its threads
            return
        self._call_soon = call_soon_here()
        saying = asyncio.get_running_loop().call_later(_SILENCE, self._warn)
        looked = False
        with anyio.CancelScope() as patience:
            while self._left or not looked:
                # A turn of the loop before nothing is left: a scheduled call may become a task only then, for example
                # the end of a broken-off async generator, or a call that a thread made with its last line.
                looked = not self._left
                try:
                    if looked:
                        await asyncio.sleep(0)
                        continue
                    await self._one_ended.wait()
                    self._one_ended.clear()
                except asyncio.CancelledError:
                    patience.shield = True
                    for job in list(self._left):
                        job.cancel()
        saying.cancel()

    def _warn(self) -> None:
        """Warn that the handler has ended, and work that it started has not."""
        left = list(self._left)
        tasks = [job.get_name() for job in left if isinstance(job, asyncio.Task)]
        logger.warning(
            "the handler of task %s (%s) has ended, and %d executor jobs and %d tasks %s that it started go on: the "
            "lease is kept until they end; start work that must outlive a run with contextvars.Context().run(...)",
            self._task.id, self._task.kind, len(left) - len(tasks), len(tasks), tasks[:10],
            extra=log_fields(self._task.id, self._task.token),
        )  # fmt: skip


def count_in(loop: asyncio.AbstractEventLoop) -> None:
    """Make this loop report to runs what they start, for as long as it lives. Other code is not affected."""
    if loop in _counting:
        return
    _counting.add(loop)
    create_task, run_in_executor = loop.create_task, loop.run_in_executor

    def create_counted(coroutine: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
        task = create_task(coroutine, **options)
        context = options.get("context")
        jobs = _current.get() if context is None else context.get(_current)
        if jobs is not None:
            jobs.add(task)
        return task

    def run_counted(executor: Executor | None, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        jobs = _current.get()
        # A look-up of names has no side effects, and hangs where the network is away: it must not delay the run's end.
        if jobs is None or function is socket.getaddrinfo or function is socket.getnameinfo:
            return run_in_executor(executor, function, *args)
        if executor is not None:  # `_run_in_thread` cannot be sent to a process
            return run_in_executor(_Counted(executor, jobs), function, *args)
        job: Future[None] = Future()
        result = run_in_executor(None, _run_in_thread, jobs, job, function, *args)
        jobs.add(job)
        result.add_done_callback(lambda _: job.cancel())
        return result

    loop.create_task = create_counted  # type: ignore[method-assign,assignment]
    loop.run_in_executor = run_counted  # type: ignore[method-assign,assignment]


class _Counted(Executor):
    """A user's executor, whose jobs are counted."""

    def __init__(self, executor: Executor, jobs: Jobs) -> None:
        self._executor = executor
        self._jobs = jobs

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = self._executor.submit(function, *args, **kwargs)
        self._jobs.add(future)
        return future


def _in_asyncio() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # the loop is trio's
        return False
    return True


def _run_in_thread(jobs: Jobs, job: Future[None], function: Callable[..., Any], *args: Any) -> Any:
    """Run a job of the loop's default executor, unless it was cancelled before."""
    if not job.set_running_or_notify_cancel():
        raise CancelledError
    before = _current.set(jobs)  # `run_in_executor` copies no context to its thread
    try:
        return function(*args)
    finally:
        _current.reset(before)
        job.set_result(None)
