"""Executors: run handlers in threads, or in one event loop (`process/` runs them in processes of their own).

Each executor has slots and a buffer.

Rule 1: an executor pulls: a free slot takes the most urgent task in the buffer. No thread is woken for each task.
Rule 2: a slot is free as soon as its handler has ended; the keeper reports the outcome.
Rule 3: an exception of a handler, of whatever type, ends that handler only.
"""

import asyncio
import contextvars
import math
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, cast

import anyio
import anyio.lowlevel

from leasekit._driver.bridge import call_soon_here, ring
from leasekit._leased_run import LeasedRun
from leasekit._worker.buffer import Buffer
from leasekit._worker.claimed_task import ClaimedTask
from leasekit._worker.handlers import Handler
from leasekit._worker.jobs import Jobs, count_in


class Executor(Protocol):
    """The place where handlers run."""

    buffer: Buffer

    @property
    def slots(self) -> int:
        """The number of handlers that can run at once, at present."""
        ...

    def put(self, works: Sequence[ClaimedTask]) -> None:
        """Run these tasks when there are slots for them. Any thread."""
        ...


class ThreadExecutor:
    """Run handlers in threads, one per slot. Leaving the `with` block waits for running handlers."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.buffer = Buffer()
        self._threads = [
            # Daemons: if a handler never ends, a second signal still ends the process.
            threading.Thread(target=self._serve, name=f"leasekit-handler-{number}", daemon=True)
            for number in range(slots)
        ]

    def put(self, works: Sequence[ClaimedTask]) -> None:
        self.buffer.put(works)

    def __enter__(self) -> "ThreadExecutor":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.buffer.close()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (work := self.buffer.wait()) is not None:
            self._run(work)

    def _run(self, work: ClaimedTask) -> None:
        if (run := work.begin()) is None:
            return
        error: BaseException | None = None
        try:
            # A context of its own: context variables that one task sets must not be visible to the next.
            contextvars.copy_context().run(work.handler.call, run)
        except BaseException as raised:  # noqa: BLE001 - a handler's sys.exit() must not end the thread
            error = raised
        work.end(run, error)


class LoopExecutor:
    """Run async handlers in one event loop, asyncio's or trio's: the loop in which `run` is awaited."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.buffer = Buffer()
        self._free = slots
        self._running: set[ClaimedTask] = set()
        self._closed = False
        self._cancelled = False
        self._call_soon: Callable[..., object] | None = None  # set once `run` has begun
        self._wake: anyio.Event | None = None

    async def run(self) -> None:
        """Run tasks until closed. Cancelling this call cancels the handlers, and gives their tasks back."""
        self._wake = anyio.Event()
        self._call_soon = call_soon_here()
        async with _task_starter() as start:
            while not self._closed:
                # Started here and not where a slot becomes free: a task inherits the context variables of its creator.
                while self._free and (work := self.buffer.take()) is not None:
                    self._free -= 1
                    start(self._run, work, self._call_soon, name=f"{work.handler.kind} {work.task_id}")
                try:
                    await self._wake.wait()
                    await anyio.lowlevel.checkpoint_if_cancelled()
                except BaseException:
                    self._cancelled = True
                    # By their cancel scopes: a cancelled task would leave behind a shielded call (anyio.to_thread).
                    for work in self._running:  # each has made its first step: the loop runs in order
                        work.interrupt()
                    raise
                self._wake = anyio.Event()

    def put(self, works: Sequence[ClaimedTask]) -> None:
        self.buffer.put(works)
        self._wake_loop()

    def close(self) -> None:
        """End `run` once no handler runs. Any thread."""
        self._closed = True
        self._wake_loop()

    def _wake_loop(self) -> None:
        if self._call_soon is not None:
            ring(self._call_soon, self._wake_here)

    def _wake_here(self) -> None:
        if self._wake is not None:
            self._wake.set()

    async def _run(self, work: ClaimedTask, call_soon: Callable[..., object]) -> None:
        try:
            if (run := work.begin()) is not None:
                await self._run_handler(work, run, call_soon)
        finally:
            self._free += 1
            self._wake_here()

    async def _run_handler(self, work: ClaimedTask, run: LeasedRun, call_soon: Callable[..., object]) -> None:
        self._running.add(work)
        error = await run_here(work.handler, run, call_soon)
        self._running.discard(work)
        # A cancellation without a request (the handler awaited something that was cancelled) is a failure.
        # A forked child, which may come back here, has no loop whose deadline it could ask for: only after an error.
        interrupted = (
            error is not None
            and _is_cancellation(error)
            and (
                self._cancelled or anyio.current_effective_deadline() == -math.inf  # the scope around it is cancelled
            )
        )
        work.end(run, error, interrupted=interrupted)
        if error is not None and interrupted:
            raise error


async def run_here(handler: Handler, run: LeasedRun, call_soon: Callable[..., object]) -> BaseException | None:
    """Run an async handler until all that it started in this event loop has ended. Return its error, or None."""
    jobs, error = Jobs(run.task), None
    jobs.belong_here()
    run.enter_scope(call_soon)
    try:
        await handler.acall(run)
    except BaseException as raised:  # noqa: BLE001 - a handler's sys.exit() must not end the loop
        error = raised
    await jobs.ended()
    try:
        return run.leave_scope(error)
    except Exception as raised:  # noqa: BLE001 - the handler left a cancel scope open
        return raised


def _is_cancellation(error: BaseException) -> bool:
    cancelled = anyio.get_cancelled_exc_class()
    if isinstance(error, BaseExceptionGroup):
        return cast("BaseExceptionGroup[BaseException]", error).subgroup(cancelled) is not None
    return isinstance(error, cancelled)


@asynccontextmanager
async def _task_starter() -> AsyncGenerator[Callable[..., object]]:
    """Give a function that starts tasks in this thread's event loop. Leaving the block waits for these tasks."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        async with anyio.create_task_group() as group:
            yield group.start_soon
        return
    count_in(loop)
    tasks: set[asyncio.Task[None]] = set()

    def start(function: Callable[..., Coroutine[Any, Any, None]], *args: Any, name: str) -> None:
        # anyio's task groups do the same, but take five times as long for it.
        task = loop.create_task(function(*args), name=name)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    try:
        yield start
    finally:
        if tasks:
            with anyio.CancelScope(shield=True):
                await asyncio.wait(tasks)
