"""One shift of a worker: its executors and controllers, from the first claim until all bodies have ended."""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

import anyio

from leasekit._driver import thread
from leasekit._driver.answer import Answer
from leasekit.client import Client
from leasekit.errors import ConfigError
from leasekit.hooks import show
from leasekit.wire import MAX_KINDS
from leasekit.worker import supervisor_link
from leasekit.worker.controller import Controller
from leasekit.worker.draining import PATIENT, Drain, Patience
from leasekit.worker.executor import Executor, LoopExecutor, ThreadExecutor
from leasekit.worker.handlers import Handler, RunIn

if TYPE_CHECKING:
    from leasekit.worker.process.pool import ProcessExecutor

__all__ = ["Shift"]

logger = logging.getLogger("leasekit")

_SILENCE = 1.0  # seconds of waiting before something is said about it
_LISTEN = 0.5  # seconds


class Shift:
    """Entering it starts claiming; `over` is done when it was stopped and no body runs; leaving it waits for that.

    Async and thread handlers have executors, slots and controllers of their own, so that a blocked event loop holds up
    neither claims nor bodies of the others; and so has each kind with a concurrency of its own, so that its window is
    its own too. Whoever enters the shift also has `run_loops` awaited somewhere.
    """

    def __init__(
        self,
        client: Client,
        handlers: Mapping[str, Handler],
        *,
        concurrency: int,
        ahead: float,
        patience: Patience = PATIENT,
        end: Callable[[], None] | None = None,
    ) -> None:
        self._client = client
        self._connection = client.connection()
        self.hooks = client.hooks
        self._open = ExitStack()
        self._failed: list[BaseException] = []
        self._controllers: list[Controller] = []
        self._threads: list[ThreadExecutor | ProcessExecutor] = []
        self._loops: list[LoopExecutor] = []
        self._drain = Drain(self._connection, self._controllers, patience, end=end)
        self.over: Answer[None] = Answer()
        for (run, slots, _), served in _groups(handlers).items():
            executor = self._executor(run, slots or concurrency, served)
            self._controllers.append(
                Controller(client, self._connection, served, executor, ahead=ahead, peers=self._controllers)
            )

    def _executor(self, run: RunIn, slots: int, served: Mapping[str, Handler]) -> Executor:
        match run:
            case "async":
                self._loops.append(LoopExecutor(slots))
                return self._loops[-1]
            case "thread":
                self._threads.append(ThreadExecutor(slots))
            case "process":
                from leasekit.worker.process.pool import ProcessExecutor  # of Linux alone

                self._threads.append(
                    ProcessExecutor(slots, served, self._connection, changed=self._look, failed=self._give_up)
                )
        return self._threads[-1]

    def _look(self) -> None:
        for controller in self._controllers:
            self._connection.driver.call_soon(controller.look_around)

    def _give_up(self, error: BaseException) -> None:
        self._failed.append(error)
        self.stop()

    @property
    def uses_loop(self) -> bool:
        """True where there are async handlers."""
        return bool(self._loops)

    def __enter__(self) -> Self:
        driver = thread.acquire()  # held by the shift too: it hears of its last body, whoever closes the client
        self._open.callback(driver.release)
        for threads in self._threads:
            self._open.enter_context(threads)
        self.over = driver.submit(self._control())
        show(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self.over.exception()
        self._open.close()

    def run_loop_in_thread(self) -> None:
        """Give async handlers a loop and thread of their own, until the shift is left."""
        if not self.uses_loop:
            return
        runner = threading.Thread(target=self._run_loop, name="leasekit-handlers", daemon=True)
        runner.start()
        self._open.callback(runner.join)
        self._open.callback(self.close_loops)

    async def run_loops(self) -> None:
        """Run async bodies in this event loop, until `close_loops`. Being cancelled gives their tasks back."""
        if len(self._loops) == 1:  # without a group an error goes on as it is
            await self._loops[0].run()
            return
        async with anyio.create_task_group() as group:
            for loop in self._loops:
                group.start_soon(loop.run)

    def close_loops(self) -> None:
        """End `run_loops`, once no async body runs any more. From any thread."""
        for loop in self._loops:
            loop.close()

    def _run_loop(self) -> None:
        try:
            anyio.run(self.run_loops)
        except BaseException as error:
            logger.critical("the event loop of async handlers has ended: the worker stops", exc_info=error)
            self._failed.append(error)
            self.stop()

    def stop(self) -> None:
        """Claim no more, give back what has not begun, let bodies end. From any thread, and from a signal handler."""
        for controller in self._controllers:
            self._connection.driver.call_soon(controller.stop)
        self._connection.driver.call_soon(self._drain.begin)

    def say(self, sentence: str) -> None:
        """Log it, in the driver's thread. From anywhere, a signal handler too."""
        self._connection.driver.call_soon(logger.info, sentence)

    def wait(self) -> None:
        """Until it is over, and all is reported."""
        _until_done(self.over)
        _until_done(self.reported())
        self.check()

    def check(self) -> None:
        """Raise what has ended it, where it did not end because it was stopped."""
        if self._failed:
            raise self._failed[0]

    def reported(self) -> Answer[None]:
        """Done when all results are reported, for as long as that takes."""
        return self._connection.driver.submit(self._report())

    async def _report(self) -> None:
        outbox = self._connection.keeper.outbox
        try:
            async with asyncio.timeout(_SILENCE):
                await outbox.empty()
        except TimeoutError:
            logger.warning("waiting until all results are reported; a second signal ends the worker without that")
            await self._drain.reported()

    async def _control(self) -> None:
        draining = asyncio.create_task(self._drain.run())
        try:
            async with asyncio.TaskGroup() as group:
                for controller in self._controllers:
                    group.create_task(controller.run())
        finally:
            draining.cancel()

    @property
    def running(self) -> int:
        return sum(controller.running for controller in self._controllers)

    @property
    def buffered(self) -> int:
        return sum(controller.buffered for controller in self._controllers)

    def gauges(self) -> Mapping[str, float]:
        """How the slots are used, and how many tasks would be claimed: the window."""
        if self.over.done():
            return {}
        controllers = self._controllers
        return {
            "leasekit.worker.slots": sum(controller.window.slots for controller in controllers),
            "leasekit.worker.running": self.running,
            "leasekit.worker.buffered": self.buffered,
            "leasekit.worker.window": sum(controller.free for controller in controllers),
        }


def _groups(handlers: Mapping[str, Handler]) -> dict[tuple[RunIn, int | None, str | None], dict[str, Handler]]:
    """Which handlers share an executor: those with a concurrency of their own do not."""
    groups: dict[tuple[RunIn, int | None, str | None], dict[str, Handler]] = {}
    for kind, handler in handlers.items():
        alone = None if handler.concurrency is None else kind
        groups.setdefault((handler.run, handler.concurrency, alone), {})[kind] = handler
    for (run, _, _), served in groups.items():
        if len(served) > MAX_KINDS:
            raise ConfigError(
                f"{len(served)} kinds share the {run} slots of this worker, and a claim has {MAX_KINDS} at most: give "
                "some handlers a concurrency of their own, or have two workers"
            )
    return groups


def _until_done(answer: Answer[None]) -> None:
    """Wait, and hear signals meanwhile.

    One that comes just before the thread goes to sleep, or to another thread, does not wake it: Python runs its handler
    only when the main thread has its next turn.
    """
    while True:
        supervisor_link.stay()
        try:
            answer.result(_LISTEN)
        except TimeoutError:
            if not answer.done():
                continue
            raise
        return
