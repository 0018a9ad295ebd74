"""Worker run: the executors and controllers of one run of a worker, from the first claim to the end of all handlers."""

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

import anyio

from leasekit._driver import thread
from leasekit._driver.answer import Answer
from leasekit._worker import supervisor_link
from leasekit._worker.around import Lifespan, is_async, living_in_loop, named
from leasekit._worker.controller import Controller
from leasekit._worker.declaring import Declared, Declaring
from leasekit._worker.descriptors import Descriptors
from leasekit._worker.draining import DEFAULT_DRAIN, Drain, DrainTimeouts
from leasekit._worker.executor import Executor, LoopExecutor, ThreadExecutor
from leasekit._worker.handlers import Handler, RunIn
from leasekit._worker.window import Pace
from leasekit.backend import KindListener, WindowListener
from leasekit.client import Client
from leasekit.errors import ConfigError, LeasekitError
from leasekit.hooks import register_gauges
from leasekit.wire import MAX_KINDS

if TYPE_CHECKING:
    from leasekit._worker.process.pool import ProcessExecutor

logger = logging.getLogger("leasekit")

_SILENCE = 1.0  # seconds of waiting before a warning is logged
_LISTEN = 0.5  # seconds
_TELL = 1.0  # seconds


class WorkerRun:
    """A run of a worker. Entering it starts claiming; leaving it stops, and waits until no handler runs (`over`).

    Async and thread handlers have executors, slots and controllers of their own, so that a blocked event loop delays
    neither claims nor handlers of the others. So has each kind with a concurrency of its own, so that its window is
    its own too, and each kind that runs in processes. The code that enters the run must also have `run_loops` awaited
    somewhere.
    """

    def __init__(
        self,
        client: Client,
        handlers: Mapping[str, Handler],
        pace: Pace,
        *,
        patience: DrainTimeouts = DEFAULT_DRAIN,
        end: Callable[[], None] | None = None,
        declared: Sequence[Declared] = (),
        lifespans: Sequence[Lifespan] = (),
        labels: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._connection = client.__connection__()
        self._connection.check_labels(labels)
        self._declaring = Declaring(declared) if declared else None
        self._kinds = list(handlers)
        self.hooks = client.hooks
        self._open = ExitStack()
        self._failed: list[BaseException] = []
        self._descriptors = Descriptors(self._stop_with)
        self._controllers: list[Controller] = []
        self._threads: list[ThreadExecutor | ProcessExecutor] = []
        self._loops: list[LoopExecutor] = []
        self._drain = Drain(self._connection, self._controllers, patience, end=end)
        self.over: Answer[None] = Answer()
        self.is_drained = False  # by an operator
        self._lifespans = lifespans
        self._loop_ready = asyncio.Event()  # set in the driver's loop
        for (run, _), served in _groups(handlers).items():
            self._controllers.append(self._make_controller(run, served, pace, labels))
        self._check_lifespans()

    def _check_lifespans(self) -> None:
        """Raise `ConfigError` if an `async` lifespan has no event loop to run in."""
        asynchronous = [named(lifespan) for lifespan in self._lifespans if is_async(lifespan)]
        if asynchronous and not self._loops:
            raise ConfigError(
                f"@worker.lifespan: {asynchronous[0]} is an `async def`, and runs in the event loop of async handlers: "
                "this worker has none, so write it without `async`"
            )

    def _make_controller(
        self, run: RunIn, served: Mapping[str, Handler], pace: Pace, labels: Mapping[str, str]
    ) -> Controller:
        first = next(iter(served.values()))
        return Controller(
            self._connection,
            served,
            self._make_executor(run, first.concurrency or pace.concurrency, first),
            ahead=pace.ahead,
            window=first.window or pace.window,
            peers=self._controllers,
            labels=labels,
            descriptors=self._descriptors,
            on_drain=self._be_drained,
        )

    def _make_executor(self, run: RunIn, slots: int, handler: Handler) -> Executor:
        match run:
            case "async":
                self._loops.append(LoopExecutor(slots))
                return self._loops[-1]
            case "thread":
                self._threads.append(ThreadExecutor(slots))
            case "process":
                from leasekit._worker.process.pool import ProcessExecutor  # exists on Linux only

                self._threads.append(
                    ProcessExecutor(
                        slots,
                        handler,
                        self._connection,
                        changed=self._wake_all,
                        failed=self._stop_with,
                        lifespans=self._lifespans,
                    )
                )
        return self._threads[-1]

    def _wake_all(self) -> None:
        for controller in self._controllers:
            self._connection.driver.call_soon(controller.look_around)

    def _stop_with(self, error: BaseException) -> None:
        self._failed.append(error)
        self.stop()

    @property
    def uses_loop(self) -> bool:
        return bool(self._loops)

    def __enter__(self) -> Self:
        driver = thread.acquire()  # held by the run too: it must outlive the client, up to the last handler's end
        self._open.callback(driver.release)
        for threads in self._threads:
            self._open.enter_context(threads)
        self.over = driver.submit(self._run_controllers())
        register_gauges(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self.over.exception()
        self._open.close()

    def run_loop_in_thread(self) -> None:
        """Give async handlers an event loop in a thread of their own, until this run is left."""
        if not self.uses_loop:
            return
        runner = threading.Thread(target=self._run_loop, name="leasekit-handlers", daemon=True)
        runner.start()
        self._open.callback(runner.join)
        self._open.callback(self.close_loops)

    async def run_loops(self) -> None:
        """Run async handlers in this event loop until `close_loops`. Cancelling this call gives their tasks back.

        Nothing is claimed before the start-ups in this loop have ended; their shutdowns follow the last handler.
        `check` raises the error of a start-up or a shutdown.
        """
        life = AsyncExitStack()
        try:
            await life.enter_async_context(living_in_loop(self._lifespans))
        except Exception as error:  # noqa: BLE001 - raised by `check`
            self._stop_with(error)
            return
        except BaseException:
            self.stop()
            raise
        self._connection.driver.call_soon(self._loop_ready.set)
        try:
            await self._run_loops()
        finally:
            try:
                await life.aclose()
            except Exception as error:  # noqa: BLE001 - raised by `check`
                self._stop_with(error)

    async def _run_loops(self) -> None:
        if len(self._loops) == 1:  # without a group an error goes on as it is
            await self._loops[0].run()
            return
        async with anyio.create_task_group() as group:
            for loop in self._loops:
                group.start_soon(loop.run)

    def close_loops(self) -> None:
        """End `run_loops` once no async handler runs. Any thread."""
        for loop in self._loops:
            loop.close()

    def _run_loop(self) -> None:
        try:
            anyio.run(self.run_loops)
        except BaseException as error:
            logger.critical("the event loop of async handlers has ended: the worker stops", exc_info=error)
            self._stop_with(error)

    def stop(self) -> None:
        """Stop claiming, give back tasks that have not begun, let handlers end. Any thread, or a signal handler."""
        for controller in self._controllers:
            self._connection.driver.call_soon(controller.stop)
        self._connection.driver.call_soon(self._loop_ready.set)  # nothing is claimed any longer, and nothing waits
        self._connection.driver.call_soon(self._drain.begin)

    def _be_drained(self) -> None:
        """Stop claiming because an operator asked for it: handlers have all the time that they need."""
        if not self.is_drained:
            self.is_drained = True
            logger.info(
                "an operator drains this worker: it ends once its %d handlers have ended; a signal limits their time",
                self.running,
            )
        for controller in self._controllers:
            controller.stop()

    def say(self, sentence: str) -> None:
        """Log a sentence in the driver's thread. Any thread, or a signal handler."""
        self._connection.driver.call_soon(logger.info, sentence)

    def say_when_reached(self, sentence: str) -> None:
        """Log a sentence in the driver's thread, once the service has answered."""
        when_reached = self._connection.keeper.reachability.when_reached
        self._connection.driver.call_soon(when_reached, partial(logger.info, sentence))

    def wait(self) -> None:
        """Wait until the run is over, and all results are reported. Raises the error that has ended the run."""
        _until_done(self.over)
        supervisor_link.note_drain(math.inf)  # no handler runs: reports and exit handlers take their own time
        _until_done(self.reported())
        self.check()

    def check(self) -> None:
        """Raise the error that has ended this run, if it did not end because it was stopped."""
        if self._failed:
            raise self._failed[0]

    def reported(self) -> Answer[None]:
        """Return an answer that is done when all results are reported, for as long as that takes, if it is possible."""
        return self._connection.driver.submit(self._wait_reported())

    async def _wait_reported(self) -> None:
        outbox = self._connection.keeper.outbox
        try:
            async with asyncio.timeout(_SILENCE):
                await outbox.empty()
        except TimeoutError:
            logger.warning("waiting until all results are reported; a second signal ends the worker without that")
            await self._drain.reported(gives_up=self._descriptors.has_ended_run)

    async def _run_controllers(self) -> None:
        if isinstance(self._connection.backend, KindListener):
            self._connection.backend.hear_of(self._kinds)
        beside = [asyncio.create_task(self._drain.run())]
        if isinstance(self._connection.backend, WindowListener):
            beside.append(asyncio.create_task(self._tell_window(self._connection.backend)))
        if self._declaring is not None:
            beside.append(asyncio.create_task(self._declaring.run()))
        try:
            if self.uses_loop:
                await self._loop_ready.wait()
            async with asyncio.TaskGroup() as group:
                for controller in self._controllers:
                    group.create_task(controller.run())
        finally:
            for task in beside:
                task.cancel()

    async def _tell_window(self, listener: WindowListener) -> None:
        """Tell the service of the window, once a second where it has changed."""
        clock, never, told = self._connection.clock, asyncio.Event(), None
        while True:
            if (now := (self.window, self.waiting)) != told:
                with contextlib.suppress(LeasekitError):  # heartbeats and claims say what is wrong
                    await listener.tell_window(*now)
                told = now
            await clock.wait(never, clock.now() + _TELL)

    @property
    def running(self) -> int:
        return sum(controller.running for controller in self._controllers)

    @property
    def buffered(self) -> int:
        return sum(controller.buffered for controller in self._controllers)

    @property
    def waiting(self) -> int:
        return sum(controller.waiting for controller in self._controllers)

    @property
    def window(self) -> int:
        return sum(controller.window.bound for controller in self._controllers)

    def gauges(self) -> Mapping[str, float]:
        """Return the gauges: slots; tasks that run, are buffered, or wait; the window, and how much of it is free."""
        if self.over.done():
            return {}
        controllers = self._controllers
        return {
            "leasekit.worker.slots": sum(controller.window.slots for controller in controllers),
            "leasekit.worker.running": self.running,
            "leasekit.worker.buffered": self.buffered,
            "leasekit.worker.waiting": self.waiting,
            "leasekit.worker.window": sum(controller.free for controller in controllers),
            "leasekit.worker.window.size": self.window,
        }


def _groups(handlers: Mapping[str, Handler]) -> dict[tuple[RunIn, str | None], dict[str, Handler]]:
    """Return the handlers that share an executor. One with a concurrency, a window or processes of its own does not."""
    groups: dict[tuple[RunIn, str | None], dict[str, Handler]] = {}
    for kind, handler in handlers.items():
        is_alone = handler.run == "process" or handler.concurrency is not None or handler.window is not None
        alone = kind if is_alone else None
        groups.setdefault((handler.run, alone), {})[kind] = handler
    for (run, _), served in groups.items():
        if len(served) > MAX_KINDS:
            raise ConfigError(
                f"{len(served)} kinds share the {run} slots of this worker, and a claim has {MAX_KINDS} at most: give "
                "some handlers a concurrency of their own, or have two workers"
            )
    return groups


def _until_done(answer: Answer[None]) -> None:
    """Wait, and let signal handlers run meanwhile.

    A signal that arrives just before the thread goes to sleep, or in another thread, does not wake it: Python runs the
    handler only when the main thread has its next turn.
    """
    while not answer.done():
        supervisor_link.end_with_supervisor()
        with contextlib.suppress(TimeoutError):  # the answer may come in this very moment
            answer.exception(_LISTEN)
    if answer.cancelled():
        raise LeasekitError("the worker cannot go on without its driver's thread: start it again")
    answer.result()
