"""Worker: handlers, and the ways to run them.

    worker = leasekit.Worker("http://localhost:8077", concurrency=8)

    @worker.handler("thumbnail")
    def thumbnail(payload: Thumbnail, held: leasekit.Lease) -> dict: ...

    worker.run()              # or: await worker.serve(), or: leasekit work module:worker

A graceful stop: claim no more → give buffered tasks back at once → let handlers end, renewing leases to the very end →
report → only then stop the keeper. No task is released while its handler may still run. `draining` says what happens to
handlers that do not end.
"""

import logging
import os
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar, Unpack

import anyio
from anyio.from_thread import start_blocking_portal
from msgspec.structs import replace

from leasekit._arguments import checked_labels
from leasekit._driver.bridge import call_soon_here, outcome
from leasekit._driver.guarding.watchdog import Mode, check_mode
from leasekit._driver.reporting.spool import Spool
from leasekit._leased_run import not_yet
from leasekit._worker import supervisor_link
from leasekit._worker.around import AroundRun, Lifespan, living, living_in_loop
from leasekit._worker.around import is_async as is_generator_async
from leasekit._worker.declarations import Declarations
from leasekit._worker.declaring import declarations
from leasekit._worker.draining import DEFAULT_DRAIN, DrainTimeouts
from leasekit._worker.handlers import Handler, is_async
from leasekit._worker.process import here
from leasekit._worker.run import WorkerRun
from leasekit._worker.service import Service
from leasekit._worker.signals import Signals
from leasekit._worker.window import Pace, WindowSize
from leasekit.backend import Backend
from leasekit.client import Client, ServiceOptions
from leasekit.codecs import Codecs
from leasekit.config import Heartbeats
from leasekit.errors import ConfigError
from leasekit.hooks import Hook
from leasekit.lease import lease
from leasekit.task import Health, Task

logger = logging.getLogger("leasekit")

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A", bound=AroundRun)
L = TypeVar("L", bound=Lifespan)


class Worker(Declarations):
    """Run handlers on the tasks of one service.

    A run ends when the last task or executor job that an async handler started in its event loop has ended, not with
    the handler's coroutine.

    Args:
        client_or_url: Where the tasks are; None: as `leasekit work --backend` or the environment's LEASEKIT_URL says.
            A client that is given is not closed by the worker.
        heartbeats: The rhythm of heartbeats, if the worker makes its client itself.
        concurrency: Slots for async handlers, as many threads for the others, and as many for each kind that runs in
            processes.
        window: How many tasks to hold at the most: those that run, that wait after `NotYet`, and that wait for a slot.
            Async handlers, the others, and each kind with slots of its own have each a window of this size. "auto"
            follows what is measured: for how long a call of a handler takes a slot, and for how long its run waits
            then; so many tasks are held as keep all slots busy. The capacity of the heartbeats bounds both.
        ahead: Seconds of work to claim beyond the slots, at the present pace, where the window has no given size. Tasks
            that stay in the buffer for longer all the same (four times that, and at least a second; and longer in a
            window that is larger than the slots) are given back. 0 claims only tasks that begin at once.
        hooks: Callables that are called with each event, if the worker makes its client itself.
        watchdog: With "auto", the process of a worker that is run by `run()` ends before the trust in a lease whose
            handler goes on: by itself (exit code 75) if the interpreter has its turn in time, by the kernel (SIGKILL)
            if C code holds it up or the process is stopped. "required" refuses to work where the kernel cannot do
            that, in `serve()`, and over a client that was given. "soft" only tells the handler, and so does "auto" in
            these two cases.
        drain_grace: Seconds after a stop in which handlers may end by themselves, 20 by default. Then async ones are
            cancelled, processes ended, and threads get `Draining` where they call `held.check()` or
            `held.progress()`. Their tasks are given back, with their progress. `math.inf` waits for ever. A short grace
            suits handlers that go on from a checkpoint, a long one those that cannot.
        drain_timeout: Seconds after a stop, 25 by default, for which handlers that still do not end keep their leases.
            Then the process ends, if `run()` handles signals, and its supervisor gives back what it held; otherwise the
            worker waits.
        spool: A directory for results that could not be reported. They survive the process, and the next worker
            reports them. None: they are kept in memory only, as long as the process lives.
        codec: A `leasekit.codecs.Codec`, or several, as for `connect`, if the worker makes its client itself. Handlers
            and their `dedupe` functions see clear values.
        labels: What this worker has, as `{"gpu": "a100"}`: it also gets tasks that require some of these.
        options: What the backend of the URL is given, as for `connect`: `token`, `headers`, `ca`, `proxy` …
    """

    def __init__(
        self,
        client_or_url: Client | Backend | str | None = None,
        *,
        heartbeats: Heartbeats | None = None,
        concurrency: int = 8,
        window: WindowSize = "auto",
        ahead: float = 0.25,
        hooks: Sequence[Hook] = (),
        watchdog: Mode = "auto",
        drain_grace: float = DEFAULT_DRAIN.grace,
        drain_timeout: float = DEFAULT_DRAIN.timeout,
        spool: str | os.PathLike[str] | None = None,
        codec: Codecs = None,
        labels: Mapping[str, str] = MappingProxyType({}),
        **options: Unpack[ServiceOptions],
    ) -> None:
        super().__init__()
        self._service = Service(client_or_url, heartbeats=heartbeats, hooks=hooks, codec=codec, options=options)
        self._pace = Pace(concurrency, window, ahead).checked()
        check_mode(watchdog)
        self._watchdog: Mode = watchdog
        self._patience = DrainTimeouts(grace=drain_grace, timeout=drain_timeout)
        self.spool = None if spool is None else Path(spool)
        """The directory for results that could not be reported."""
        self.labels: dict[str, str] = checked_labels(labels)
        """What this worker has, as `{"gpu": "a100"}`."""
        self._run: WorkerRun | None = None
        self._at_work: Client | None = None
        self._stopping = False
        self._unsaid: str | None = None  # by which signal, until the run has said it

    def __repr__(self) -> str:
        kinds = ", ".join(map(repr, self._handlers)) or "no kinds yet"
        return f"<{type(self).__name__} for {kinds}: {'at work' if self._busy.locked() else 'not running'}>"

    def listen(self, hook: Hook) -> None:
        """Add a hook. A client that was given calls it at once, a client of the worker's own from the next run on."""
        self._service.listen(hook)

    def run(
        self,
        *,
        url: str | None = None,
        heartbeats: Heartbeats | None = None,
        concurrency: int | None = None,
        window: WindowSize | None = None,
        drain_grace: float | None = None,
        drain_timeout: float | None = None,
        **options: Unpack[ServiceOptions],
    ) -> None:
        """Work until SIGTERM, SIGINT, SIGHUP or `stop()`, or until an operator drains it; then stop gracefully.

        A second SIGTERM or SIGINT ends the process at once. After a signal, threads and tasks that handlers have left
        behind (a thread that asyncio waits for, say) delay the end of the process by 10 seconds at most.

        Blocks. Async handlers run in an event loop of their own, in a thread, so that signals and claims go on while a
        handler blocks it. Signals are only handled in the main thread. Each argument replaces the one that the worker
        was made with.

        Raises `ConfigError`, `UnknownScheme`, `MissingDependency`.
        """
        with suppress(RuntimeError):
            call_soon_here()
            raise ConfigError("an event loop runs in this thread, which run() would block: `await worker.serve()`")
        pace = self._pace.but(concurrency=concurrency, window=window)
        patience = self._patience.but(grace=drain_grace, timeout=drain_timeout)
        signals = Signals(self._signalled)
        client_of_run = self._client_at_work(url, heartbeats, options, watchdog=self._watchdog)
        with self._single_run(), signals.hearing() as heard, client_of_run as client:
            # Connect here, so that a watchdog that is required but impossible is refused here.
            self._outlive(client)
            if heard:
                supervisor_link.note_drain(patience.timeout)
            shift = self._make_run(client, pace, patience, end=signals.end_at_once if heard else None)
            self._work(shift, signals if heard else None, patience.timeout)
            shift.check()

    def _work(self, shift: WorkerRun, signals: Signals | None, timeout: float) -> None:
        """Run until the end, with start-ups and shutdowns around, which `signals` bound to `timeout`."""
        with ExitStack() as life:
            with signals.bounding(timeout) if signals is not None and self._lifespans else nullcontext():
                life.enter_context(living(self._living_here))
            with shift:
                shift.run_loop_in_thread()
                self._make_current(shift)
                shift.wait()
                if signals is not None:
                    signals.end_soon(timeout=timeout)

    async def serve(self) -> None:
        """Work inside of an event loop, asyncio's or trio's, in which async handlers run. Signals are not handled.

        Cancelling this call cancels async handlers, whose tasks are given back, and waits for handlers in threads.
        """
        with self._single_run():
            client = self._at_work = self._service.client()
            try:
                self._outlive(client)
                shift = self._make_run(client, self._pace, self._patience)
                with living(self._living_here):
                    await self._serve(shift)
                shift.check()
            finally:
                self._at_work = None  # before the client is closed: a call would be refused
                if self._service.has_made(client):
                    with anyio.CancelScope(shield=True):
                        await client.aclose()

    async def _serve(self, shift: WorkerRun) -> None:
        async with anyio.create_task_group() as group:
            with shift:
                if shift.uses_loop:
                    group.start_soon(shift.run_loops)
                self._make_current(shift)
                try:
                    await outcome(shift.over, keep=True)
                    await outcome(shift.reported())
                except BaseException:
                    # A cancelled asyncio task tells its group at the end of the block: that is only after the drain.
                    group.cancel_scope.cancel()
                    raise
                finally:
                    with anyio.CancelScope(shield=True):
                        shift.stop()
                        await outcome(shift.over, keep=True)
            shift.close_loops()

    def _make_run(
        self, client: Client, pace: Pace, patience: DrainTimeouts, *, end: Callable[[], None] | None = None
    ) -> WorkerRun:
        return WorkerRun(
            client,
            self._enclosed_handlers(),
            pace,
            patience=patience,
            end=end,
            lifespans=self._lifespans,
            declared=declarations(client.__connection__(), self._settings, self._periodic),
            labels=checked_labels(self.labels),
        )

    def drain(self) -> int:
        """Run the tasks that are due, here, one after the other, until none is due; return how many runs that took.

        For tests of your own: the code under test schedules, `drain` runs, the test looks. An exception of a handler
        settles its task as it would in `run`, is logged, and ends nothing. Tasks that wait, for a retry too, are left.
        Call this from a thread without an event loop; handlers with `run="process"` run in this process.
        """
        runs = 0
        with self._single_run(), self._client_at_work() as client:
            handlers = self._enclosed_handlers()
            with living(self._lifespans), _loop_for(self._lifespans) as run_async:
                for runs, task in enumerate(client.tasks(*handlers, until_idle=0, labels=self.labels), 1):  # noqa: B007
                    try:
                        _run_here(handlers[task.kind], task, run_async)
                    except Exception as error:  # noqa: BLE001 - it is logged, and has settled the task
                        _log_failure(task, error)
        return runs

    def stop(self) -> None:
        """Stop gracefully. Any thread may call this, a handler, or a signal handler; also before the worker runs."""
        self._stopping = True
        if (shift := self._run) is not None:
            shift.stop()

    def health(self) -> Health:
        """Return whether this worker can keep its leases. Any thread may call this; it does not wait.

        A worker that drains is healthy, and one that is not at work is not.
        """
        client = self._at_work
        health = Health(ok=False, detail="the worker is not at work") if client is None else client.health()
        drains = self._stopping or ((shift := self._run) is not None and shift.is_drained)
        return replace(health, ok=True, detail="the worker drains") if drains else health

    @property
    def running(self) -> int:
        """The number of running handlers."""
        return 0 if (shift := self._run) is None else shift.running

    @property
    def buffered(self) -> int:
        """The number of claimed tasks that wait for a slot."""
        return 0 if (shift := self._run) is None else shift.buffered

    @property
    def waiting(self) -> int:
        """The number of tasks whose handler said `NotYet`, and that wait here for its next call."""
        return 0 if (shift := self._run) is None else shift.waiting

    def _make_current(self, shift: WorkerRun) -> None:
        """Let `stop` reach this run; stop the run at once if `stop` was called before."""
        self._run = shift
        shift.say_when_reached(f"at work on {', '.join(map(repr, self._handlers))}")
        if self._stopping:  # stopped before there was a run to stop
            shift.stop()
            self._say_why_stopped(shift)

    @contextmanager
    def _single_run(self) -> Generator[None]:
        """Mark the worker as running in the block. Raises `ConfigError` if it runs already, or cannot run."""
        if here.executing:
            raise ConfigError('this is an executor of a worker: run the worker under `if __name__ == "__main__":`')
        if not self._handlers:
            raise ConfigError("this worker has no handlers: declare some with @worker.handler(kind)")
        if not self._busy.acquire(blocking=False):
            raise ConfigError("this worker runs already: make another one")
        try:
            yield
        finally:
            self._run, self._stopping = None, False
            self._busy.release()

    @contextmanager
    def _client_at_work(
        self,
        url: str | None = None,
        heartbeats: Heartbeats | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
        *,
        watchdog: Mode = "soft",
    ) -> Generator[Client]:
        """Give the client of a run, and close it at the end if it is the worker's own."""
        client = self._at_work = self._service.client(url, heartbeats, options, watchdog=watchdog)
        try:
            yield client
        finally:
            self._at_work = None  # before the client is closed: a call would be refused
            if self._service.has_made(client):
                client.close()

    def _outlive(self, client: Client) -> None:
        """Set up what outlives this process: the spool for unreported results, and the ledger for the supervisor."""
        self._check_guarded(client)
        connection, directory = client.__connection__(), None
        if self.spool is not None and client.url is not None and not client.url.startswith("memory:"):
            spool = Spool(self.spool, client.url)
            connection.driver.submit(connection.keeper.outbox.use(spool))
            directory = str(spool.directory)
        supervisor_link.note(client, spool=directory)

    def _check_guarded(self, client: Client) -> None:
        """Raise `ConfigError` if a watchdog is required, but none would end this process after its lease."""
        if self._watchdog == "required" and not client.__connection__().watchdog.guards:
            raise ConfigError(
                "watchdog='required' ends the process of a handler that outlives its lease, which is done for a worker "
                "with a URL or backend of its own that is run by run(): not in serve(), whose process belongs to other "
                "code, and not over a client that was connected before. Use Worker(url).run(), or watchdog='auto'"
            )

    def _signalled(self, number: signal.Signals) -> None:
        if not self._stopping:  # Ctrl-C comes from the terminal, and again from the supervisor
            then = "; a second signal ends it at once" if number in (signal.SIGTERM, signal.SIGINT) else ""
            self._unsaid = f"{number.name}: the worker stops{then}"
        self.stop()
        if (shift := self._run) is not None:
            self._say_why_stopped(shift)

    def _say_why_stopped(self, shift: WorkerRun) -> None:
        """Say once which signal stops the worker.

        Not logged here: the signal may have interrupted the very stream that the log would be written to.
        """
        sentence, self._unsaid = self._unsaid, None
        if sentence is not None:
            shift.say(sentence)

    def _submitter(self) -> tuple[Client, bool]:
        if (client := self._at_work) is not None:
            return client, False
        client = self._service.client_beside()
        return client, self._service.has_made(client)


@contextmanager
def _loop_for(lifespans: Sequence[Lifespan]) -> Generator[Callable[..., Any]]:
    """Give what runs an async function: `anyio.run`, or, if there are async lifespans, their event loop."""
    if not any(map(is_generator_async, lifespans)):
        yield anyio.run
        return
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(living_in_loop(lifespans)):
        yield portal.call


def _log_failure(task: Task, error: Exception) -> None:
    if not_yet(error) is None:
        logger.warning("task %s (%s) failed", task.id, task.kind, exc_info=error)
    else:
        logger.info("task %s (%s) waits: %s", task.id, task.kind, error)


def _run_here(handler: Handler, task: Task, run_async: Callable[..., Any]) -> None:
    if not is_async(handler.function):
        with lease(task, idle_timeout=handler.idle_timeout) as held:
            handler.call_with(held)
        return

    async def run() -> None:
        async with lease(task, idle_timeout=handler.idle_timeout) as held:
            await handler.acall_with(held)

    run_async(run)
