"""The worker: handlers, and the two ways to have them run.

    worker = leasekit.Worker("http://localhost:8077", concurrency=8)

    @worker.handler("thumbnail")
    def thumbnail(payload: Thumbnail, held: leasekit.Lease) -> dict: ...

    worker.run()              # or: await worker.serve(), or: leasekit work module:worker

A graceful stop: claim no more → give buffered tasks back at once → let bodies end, beating to the very last → report →
only then stop the keeper. Nothing is released while its body may still run. `draining` has what happens to bodies that
do not end.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Concatenate, Literal, ParamSpec, TypeVar, cast

import anyio

from leasekit._arguments import check_arguments
from leasekit._driver.bridge import outcome
from leasekit._driver.spool import Spool
from leasekit._driver.watchdog import Mode, check_mode
from leasekit.backend import Backend
from leasekit.client import Client
from leasekit.config import Beats
from leasekit.errors import ConfigError
from leasekit.hooks import Hook
from leasekit.worker import supervisor_link
from leasekit.worker.declared import Declared
from leasekit.worker.draining import PATIENT, Patience
from leasekit.worker.handlers import Handler, declare
from leasekit.worker.process import here
from leasekit.worker.shift import Shift
from leasekit.worker.signals import LOST_EXIT_CODE, Signals, end_lost

__all__ = ["LOST_EXIT_CODE", "Worker"]

logger = logging.getLogger("leasekit")

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


class Worker:
    """Runs handlers on the tasks of one service.

    `client_or_url`: where the tasks are; None: as `leasekit work --backend` or the environment's LEASEKIT_URL says. A
    client that is given stays its owner's, who closes it.

    `concurrency`: slots for async handlers, and as many threads and processes for the others. `ahead`: seconds of work
    to claim beyond them, at the pace of the last moments; what lies in the buffer for longer all the same (four times
    that, and at least a second) is given back. 0 claims only what begins at once.

    `watchdog`: with "auto", the process of a worker that is run by `run()` ends before the trust in a lease whose body
    goes on: by itself (exit code 75) where the interpreter has its turn in time, by the kernel (SIGKILL) where C code
    holds it up or the process is stopped. "required" refuses to work where the kernel cannot do that, in `serve()`, and
    over a client that was given. "soft" only tells the body, and so does "auto" in these two. A run ends with the last
    task or executor job that an async handler has started in its event loop, and not with its coroutine.

    `drain_grace`: seconds after a stop in which bodies may end by themselves. Then async ones are cancelled, processes
    ended, and threads hear of it where they call `held.check()` or `held.progress()`: `Draining`. Their tasks are given
    back, with their progress. `math.inf` waits for ever. A short grace suits bodies that go on from a checkpoint, a
    long one those that cannot.

    `drain_timeout`: seconds after a stop for which bodies that do not end all the same keep their leases. Then the
    process ends, where `run()` hears signals, and its supervisor gives back what it held; elsewhere the worker waits.

    `spool`: a directory for results that could not be reported. They survive the process, and the next worker reports
    them. None: they are kept in memory only, as long as the process lives.
    """

    def __init__(
        self,
        client_or_url: Client | Backend | str | None = None,
        *,
        beats: Beats | None = None,
        concurrency: int = 8,
        ahead: float = 0.25,
        hooks: Sequence[Hook] = (),
        watchdog: Mode = "auto",
        drain_grace: float = PATIENT.grace,
        drain_timeout: float = PATIENT.timeout,
        spool: str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(client_or_url, Client) and (beats is not None or hooks):
            raise ConfigError("the client has beats and hooks of its own: give them to connect()")
        service = None if isinstance(client_or_url, Client) else client_or_url
        check_arguments(service=service, beats=beats, hooks=hooks)
        if concurrency < 1:
            raise ConfigError(f"concurrency={concurrency} would run nothing: raise it to 1 or more")
        if not ahead >= 0:
            raise ConfigError(f"ahead={ahead!r} is no number of seconds: set it to zero or more")
        check_mode(watchdog)
        self._patience = Patience(grace=drain_grace, timeout=drain_timeout)
        self._service = client_or_url
        self._beats = beats
        self._concurrency = concurrency
        self._ahead = ahead
        self._hooks = list(hooks)
        self._watchdog: Mode = watchdog
        self.spool = None if spool is None else Path(spool)
        self._handlers: dict[str, Handler] = {}
        self._shift: Shift | None = None
        self._at_work: Client | None = None
        self._busy = threading.Lock()
        self._stopping = False

    def handler(
        self,
        kind: str,
        *,
        run: Literal["async", "thread", "process"] | None = None,
        idle_timeout: float | None = None,
        concurrency: int | None = None,
    ) -> Callable[[Callable[Concatenate[T, P], R]], Declared[T, P, R]]:
        """Declare the function that runs tasks of this kind: `(payload)` or `(payload, held)`.

        The payload's annotation is its schema; what does not fit is a fatal failure that says where. What the function
        returns is the result, unless it decided itself (`held.complete`, `held.fail`, `held.release`). An exception is
        a failure that is tried again, `leasekit.Fatal` one that is not.

        `run`: "async" for an `async def`, "thread" for others, "process" for either, on Linux. A thread cannot be
        stopped from outside: it calls `held.check()`. A body in a process of its own keeps its lease whatever it does
        to its interpreter, and that process is killed where the body does not end in time.

        `idle_timeout` is that of `leasekit.lease`. `concurrency`: at most so many of this kind at once, in slots of its
        own beside the worker's, so that it neither waits for other kinds nor holds them up, and is claimed for these
        slots alone.

        What this leaves under the function's name is called as before, and has `schedule`: see `Declared`.

        Raises `ConfigError` where the function cannot be a handler, or the kind has one.
        """
        if callable(kind):
            raise ConfigError('a handler is for a kind of tasks: write @worker.handler("thumbnail")')

        def register(function: Callable[Concatenate[T, P], R]) -> Declared[T, P, R]:
            if isinstance(function, Declared):  # it serves another kind too
                function = cast("Declared[T, P, R]", function).function
            if self._busy.locked():
                raise ConfigError(f"handler {kind!r} comes too late: declare handlers before the worker runs")
            if kind in self._handlers:
                raise ConfigError(f"kind {kind!r} has a handler: one kind, one handler")
            handler = declare(kind, function, run=run, idle_timeout=idle_timeout, concurrency=concurrency)
            self._handlers[kind] = handler
            return Declared(function, handler, self._submitter)

        return register

    def __repr__(self) -> str:
        kinds = ", ".join(map(repr, self._handlers)) or "no kinds yet"
        return f"<{type(self).__name__} for {kinds}: {'at work' if self._busy.locked() else 'not running'}>"

    def listen(self, hook: Hook) -> None:
        """Have one more hook hear what happens: of a client that was given at once, else from the next run on."""
        if isinstance(self._service, Client):
            self._service.listen(hook)
        elif hook not in self._hooks:
            self._hooks.append(hook)

    # Running ------------------------------------------------------------------------------------------------------

    def run(
        self,
        *,
        url: str | None = None,
        beats: Beats | None = None,
        concurrency: int | None = None,
        drain_grace: float | None = None,
        drain_timeout: float | None = None,
    ) -> None:
        """Work until SIGTERM, SIGINT, SIGHUP or `stop()`; then stop gracefully.

        A second SIGTERM or SIGINT ends the process at once. After a signal, what bodies have left behind when they
        ended (a thread that asyncio waits for, say) holds the process up for 10 seconds at most.

        Blocks. Async handlers run in an event loop of their own, in a thread, so that signals and claims go on while
        one of them blocks it. Signals are only heard in the main thread. What is given here goes before what the worker
        was made with.

        Raises `ConfigError`, `UnknownScheme`, `MissingDependency`.
        """
        patience = self._patience.but(grace=drain_grace, timeout=drain_timeout)
        signals = Signals(self._signalled)
        with self._working(), signals.hearing() as heard:
            client = self._at_work = self._client(url, beats, watchdog=self._watchdog)
            try:
                # Connects here, so that a watchdog that is required and not to be had is refused here.
                self._outlive(client)
                with Shift(
                    client,
                    self._handlers,
                    concurrency=concurrency or self._concurrency,
                    ahead=self._ahead,
                    patience=patience,
                    end=signals.end_at_once if heard else None,
                ) as shift:
                    shift.run_loop_in_thread()
                    self._begin(shift)
                    shift.wait()
                    if heard:
                        signals.end_soon()
            finally:
                self._at_work = None  # before it is closed: a call would be refused
                if client is not self._service:
                    client.close()

    async def serve(self) -> None:
        """`run`, inside of an event loop, asyncio's or trio's: async handlers run in it. No signals are heard.

        Being cancelled cancels async handlers, whose tasks are given back, and waits for those in threads.
        """
        with self._working():
            client = self._at_work = self._client(None, None, watchdog="soft")
            try:
                self._outlive(client)
                shift = Shift(
                    client, self._handlers, concurrency=self._concurrency, ahead=self._ahead, patience=self._patience
                )
                await self._serve(shift)
                shift.check()
            finally:
                self._at_work = None  # before it is closed: a call would be refused
                if client is not self._service:
                    with anyio.CancelScope(shield=True):
                        await client.aclose()

    async def _serve(self, shift: Shift) -> None:
        async with anyio.create_task_group() as group:
            with shift:
                if shift.uses_loop:
                    group.start_soon(shift.run_loops)
                self._begin(shift)
                try:
                    await outcome(shift.over, keep=True)
                    await outcome(shift.reported())
                except BaseException:
                    # A cancelled task of asyncio tells its group at the end of the block: only after the drain.
                    group.cancel_scope.cancel()
                    raise
                finally:
                    with anyio.CancelScope(shield=True):
                        shift.stop()
                        await outcome(shift.over, keep=True)
            shift.close_loops()

    def stop(self) -> None:
        """Stop gracefully. From anywhere: a handler, another thread, a signal handler; also before it has begun."""
        self._stopping = True
        if (shift := self._shift) is not None:
            shift.stop()

    @property
    def running(self) -> int:
        """Bodies that run."""
        return 0 if (shift := self._shift) is None else shift.running

    @property
    def buffered(self) -> int:
        """Tasks that are claimed and wait for a slot."""
        return 0 if (shift := self._shift) is None else shift.buffered

    def _begin(self, shift: Shift) -> None:
        self._shift = shift
        logger.info("at work on %s", ", ".join(map(repr, self._handlers)))
        if self._stopping:  # before there was a shift to be stopped
            shift.stop()

    @contextmanager
    def _working(self) -> Generator[None]:
        if here.executing:
            raise ConfigError('this is an executor of a worker: run that under `if __name__ == "__main__":`')
        if not self._handlers:
            raise ConfigError("a worker without handlers has nothing to do: declare some with @worker.handler(kind)")
        if not self._busy.acquire(blocking=False):
            raise ConfigError("this worker runs already: make another one")
        try:
            yield
        finally:
            self._shift, self._stopping = None, False
            self._busy.release()

    def _client(self, url: str | None, beats: Beats | None, *, watchdog: Mode) -> Client:
        if isinstance(self._service, Client):
            if url is not None or beats is not None:
                raise ConfigError("this worker has a client of its own, with its URL and beats: make it without one")
            return self._service
        service = url or self._service or os.environ.get("LEASEKIT_URL")
        if service is None:
            raise ConfigError("which service? Give the worker a URL, or set LEASEKIT_URL")
        last_resort = end_lost if watchdog in ("auto", "required") else None
        return Client(
            service, beats=beats or self._beats, hooks=self._hooks, last_resort=last_resort, watchdog=watchdog
        )

    def _outlive(self, client: Client) -> None:
        """See to what is to outlive this process: results that could not be reported, and what is to be handed back."""
        self._check_guarded(client)
        connection, directory = client.connection(), None
        if self.spool is not None and client.url is not None and not client.url.startswith("memory:"):
            spool = Spool(self.spool, client.url)
            connection.driver.submit(connection.keeper.outbox.use(spool))
            directory = str(spool.directory)
        supervisor_link.note(client, spool=directory)

    def _check_guarded(self, client: Client) -> None:
        """Refuse to work where a watchdog is required, and nothing ends this process when a body outlives its lease."""
        if self._watchdog == "required" and not client.connection().watchdog.guards:
            raise ConfigError(
                "watchdog='required' ends the process of a body that outlives its lease, and that is done for a worker "
                "that has a URL or backend of its own and is run by run(): not in serve(), whose process is somebody "
                "else's, and not over a client that was connected before. Use Worker(url).run(), or watchdog='auto'"
            )

    def _signalled(self, number: signal.Signals) -> None:
        self.stop()
        # Not said here: a signal may have interrupted the very stream that the log would be written to.
        if (shift := self._shift) is not None:
            then = "; a second signal ends it at once" if number in (signal.SIGTERM, signal.SIGINT) else ""
            shift.say(f"{number.name}: the worker stops{then}")

    def _submitter(self) -> tuple[Client, bool]:
        """Who schedules what handlers are called with, and whether it is to be closed after that."""
        if (client := self._at_work) is not None:
            return client, False
        if not isinstance(self._service, Client | str | None):
            raise ConfigError(
                "a backend object is the worker's own while it works: give a client, handler.options(client=…)"
            )
        client = self._client(None, None, watchdog="soft")
        return client, client is not self._service
