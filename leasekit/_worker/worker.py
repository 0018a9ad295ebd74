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
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, cast, overload

import anyio
from anyio.from_thread import start_blocking_portal
from msgspec.structs import replace

from leasekit._arguments import check_arguments, check_concurrency, checked_codecs, checked_labels
from leasekit._driver.bridge import call_soon_here, outcome
from leasekit._driver.guarding.watchdog import Mode, check_mode
from leasekit._driver.reporting.spool import Spool
from leasekit._worker import supervisor_link
from leasekit._worker.around import Around, AroundRun, Lifespan, living, living_in_loop, named
from leasekit._worker.around import check as check_generator
from leasekit._worker.around import is_async as is_generator_async
from leasekit._worker.declaring import declaration, declarations, settings_of
from leasekit._worker.draining import DEFAULT_DRAIN, DrainTimeouts
from leasekit._worker.handler_function import HandlerFunction
from leasekit._worker.handlers import Dedupe, Handler, declare, is_async
from leasekit._worker.process import here
from leasekit._worker.run import WorkerRun
from leasekit._worker.signals import Signals, end_lost
from leasekit._worker.window import WindowSize, check_window
from leasekit.backend import Backend
from leasekit.client import Client, ServiceOptions
from leasekit.codecs import Codecs
from leasekit.config import Heartbeats, check_number
from leasekit.errors import ConfigError
from leasekit.flows import Flow
from leasekit.hooks import Hook
from leasekit.lease import lease
from leasekit.periodic import PeriodicOptions, PeriodicTask
from leasekit.task import Health, KindSettings, Task, TaskDefaults

logger = logging.getLogger("leasekit")

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A", bound=AroundRun)
L = TypeVar("L", bound=Lifespan)


class Worker:
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
        if isinstance(client_or_url, Client) and (heartbeats is not None or hooks or codec or options):
            raise ConfigError(
                "this client has its own heartbeats, hooks, codecs and options: give them to connect() instead"
            )
        service = None if isinstance(client_or_url, Client) else client_or_url
        check_arguments(service=service, heartbeats=heartbeats, hooks=hooks)
        check_concurrency(concurrency)
        check_window(window)
        check_number("ahead", ahead)
        check_mode(watchdog)
        self._patience = DrainTimeouts(grace=drain_grace, timeout=drain_timeout)
        self._service = client_or_url
        self._heartbeats = heartbeats
        self._concurrency = concurrency
        self._window: WindowSize = window
        self._ahead = ahead
        self._hooks = list(hooks)
        self._codecs = checked_codecs(codec)
        self._options = options
        self._watchdog: Mode = watchdog
        self.spool = None if spool is None else Path(spool)
        """The directory for results that could not be reported."""
        self.labels: dict[str, str] = checked_labels(labels)
        """What this worker has, as `{"gpu": "a100"}`."""
        self._handlers: dict[str, Handler] = {}
        self._periodic: dict[str, PeriodicTask] = {}
        self._settings: dict[str, KindSettings] = {}
        self._around: list[Around] = []
        self._lifespans: list[Lifespan] = []
        self._run: WorkerRun | None = None
        self._at_work: Client | None = None
        self._busy = threading.Lock()
        self._stopping = False
        self._unsaid: str | None = None  # by which signal, until the run has said it

    def handler(
        self,
        kind: str,
        *,
        run: Literal["async", "thread", "process"] | None = None,
        idle_timeout: float | None = None,
        concurrency: int | None = None,
        window: WindowSize | None = None,
        threads: int = 1,
        dedupe: Dedupe | None = None,
        settings: KindSettings | None = None,
        **defaults: Unpack[TaskDefaults],
    ) -> Callable[[Callable[Concatenate[T, P], R]], HandlerFunction[T, P, R]]:
        """Declare the function that runs tasks of this kind: `(payload)` or `(payload, held)`.

        The payload's annotation is its schema; a payload that does not fit is a fatal failure with a message. The
        function's return value is the result, unless it settled the task itself (`held.complete`, `held.fail`,
        `held.release`). An exception is a failure that is tried again, `leasekit.Fatal` one that is not.

        The decorated name can be called as before, and has `schedule`: see `HandlerFunction`.

        Raises `ConfigError` if the function cannot be a handler, if the kind has a handler already, or if a default has
        a wrong value, and TypeError if a default has a wrong name.

        Args:
            kind: The kind of the tasks that the function runs; a kind has one handler.
            run: "async" for an `async def`, "thread" for other functions, "process" for either, on Linux. A thread
                cannot be stopped from outside: it must call `held.check()`. A handler in a process of its own keeps its
                lease whatever it does to its interpreter, and that process is killed if the handler does not end in
                time. A process runs tasks of one kind alone.
            idle_timeout: A handler that reports no progress for so many seconds is told to stop, and the task is tried
                again.
            concurrency: Limit the runs of this kind, and give it slots of its own beside the worker's, so that
                it neither waits for other kinds nor delays them, and is claimed for these slots alone. A kind with
                `run="process"` has slots of its own also without it: as many as the worker's concurrency.
            window: A window of its own for this kind, as the worker's `window`; it has slots of its own then, too.
            threads: With `run="process"`, how many runs share a process, each in a thread of it: fewer processes, for
                handlers that mostly wait. The price: if one of them must be killed, or crashes, the others in its
                process end with it, as crashes.
            dedupe: A function that gets the payload, as the handler does, and returns the task's `dedupe_key`.
            settings: What the service holds for all tasks of the kind, whoever schedules them: retention, limits in
                all workers together, shares, and options. The service is told when the worker starts. What is changed
                there by hand holds until the code says something new about that setting; during a deploy the newer code
                wins.
            defaults: Options of the tasks that are scheduled through the decorated name: `max_attempts`, `retry` and
                the others of `TaskDefaults`. What `options(…)` says wins. A task that is scheduled by the name of its
                kind (`client.schedule`, `held.then("mail")`, `leasekit schedule`) does not get them.
        """
        if callable(kind):
            raise ConfigError('a handler is for a kind of tasks: write @worker.handler("thumbnail")')

        def register(function: Callable[Concatenate[T, P], R]) -> HandlerFunction[T, P, R]:
            if isinstance(function, HandlerFunction):  # it is the handler of another kind too
                function = cast("HandlerFunction[T, P, R]", function).function
            self._check_idle(f"handler {kind!r}")
            if kind in self._handlers:
                raise ConfigError(f"kind {kind!r} has a handler already: one kind, one handler")
            handler = declare(
                kind,
                function,
                run=run,
                idle_timeout=idle_timeout,
                concurrency=concurrency,
                window=window,
                threads=threads,
                dedupe=dedupe,
                **defaults,
            )
            if settings is not None:
                self._settings[kind] = settings_of(kind, settings)
            self._handlers[kind] = handler
            return HandlerFunction(function, handler, self._submitter)

        return register

    def add(self, flow: Flow[Any], *, concurrency: int | None = None, settings: KindSettings | None = None) -> None:
        """Run the steps of a flow here. They are `async def`, all of them or none.

        Raises `ConfigError` for a graph with a fault, and names the step.

        Args:
            flow: The flow, with all its steps.
            concurrency: As for `handler`: slots of its own.
            settings: As for `handler`: what the service holds for all tasks of its kind.
        """
        self.handler(flow.kind, concurrency=concurrency, settings=settings)(flow.__handler__())

    def periodic(
        self, cron: str | None = None, /, **options: Unpack[PeriodicOptions]
    ) -> Callable[[HandlerFunction[T, P, R]], HandlerFunction[T, P, R]]:
        """Declare, above `@worker.handler`, that the service schedules a task of this kind again and again.

        The service is told when the worker starts. What an operator changes there holds until the code says something
        new, and a pause stays also then. During a deploy the newer code wins. What is removed from the code goes on at
        the service until it is deleted there.

        Raises `ConfigError` if there is no such rule or payload, or the name is taken, and TypeError for an unknown
        option. Whether the service knows the cron expression and the time zone shows when the worker runs: it logs an
        error otherwise.

        Args:
            cron: Minute, hour, day of the month, month and day of the week, as in `0 7 * * MON-FRI`; or give `every`.
            options: Those of `PeriodicTask`: `tz`, `every`, `payload`, `overlap` and others, and of its tasks; and the
                `name` of the periodic task, which is the kind by default. The handler's own defaults hold too.
        """

        def register(function: HandlerFunction[T, P, R]) -> HandlerFunction[T, P, R]:
            if not isinstance(cast("object", function), HandlerFunction):
                raise ConfigError("a periodic task is one of a handler: write @worker.periodic above @worker.handler")
            name, task = declaration(function, cron, options)
            handler = self._handlers.get(task.kind)
            if handler is None or handler.function is not function.function:
                raise ConfigError(f"the handler of the periodic task {name!r} is another worker's: declare it there")
            self._check_idle(f"periodic task {name!r}")
            if name in self._periodic:
                raise ConfigError(f"there is a periodic task {name!r} already: give this one a name of its own, name=…")
            self._periodic[name] = task
            return function

        return register

    @overload
    def around(self, function: A, /) -> A: ...
    @overload
    def around(self, *kinds: str) -> Callable[[A], A]: ...
    def around(self, *function_or_kinds: Any) -> Any:
        """Declare code around each run of a handler: a generator function that gets the lease and yields once.

        `@worker.around` is for all kinds, `@worker.around("mail", "report")` for these. The first that is declared is
        the outermost. The code runs in the handler's own thread or task and sees its context variables; the lease is
        kept until it has ended. What it raises counts as if the handler had raised it. What the handler raised counts
        even if it is swallowed, unless `held.complete`, `fail` or `release` is called then. Nothing is run around a
        payload that does not fit.

        A plain function is for all handlers, an `async def` for those that are `async def`. For handlers in processes
        it must be a function of a module.

        Raises `ConfigError` if this is no such function, or, when the worker runs, if it cannot be around a handler.
        """
        if function_or_kinds and callable(function_or_kinds[0]):
            return self._add_around(cast("AroundRun", function_or_kinds[0]))
        return partial(self._add_around, kinds=function_or_kinds)

    def _add_around(self, function: A, *, kinds: tuple[str, ...] = ()) -> A:
        check_generator(function, "around", "held")
        self._check_idle(f"@worker.around: {named(function)}")
        self._around.append(Around(function, kinds))
        return function

    def lifespan(self, function: L, /) -> L:
        """Declare start-up and shutdown of each process that runs handlers: a generator function that yields once.

        Code before the `yield` runs before the first claim, and code after it when no handler runs any longer, in the
        reverse order of the start-ups. If a start-up raises, the process claims nothing, what was started is shut
        down, and the worker ends with that error. A shutdown is told of no error. A process that is killed has none,
        and one that takes too long is cut off: after a signal, 10 s after the last handler's end, and no later than
        `drain_timeout`; in processes of handlers after 5 s.

        A plain function runs in the thread that called `run()`, `serve()` or `drain()`, and in the main thread of each
        process of handlers with `run="process"`. An `async def` runs in the event loop of async handlers, in the
        worker's process only.

        Raises `ConfigError` if this is no such function, or, when the worker runs, if there is no such event loop.
        """
        check_generator(function, "lifespan")
        self._check_idle(f"@worker.lifespan: {named(function)}")
        self._lifespans.append(function)
        return function

    def _check_idle(self, what: str) -> None:
        if self._busy.locked():
            raise ConfigError(f"{what} is declared too late: declare it before the worker runs")

    def __repr__(self) -> str:
        kinds = ", ".join(map(repr, self._handlers)) or "no kinds yet"
        return f"<{type(self).__name__} for {kinds}: {'at work' if self._busy.locked() else 'not running'}>"

    def listen(self, hook: Hook) -> None:
        """Add a hook. A client that was given calls it at once, a client of the worker's own from the next run on."""
        if isinstance(self._service, Client):
            self._service.listen(hook)
        elif hook not in self._hooks:
            self._hooks.append(hook)

    def run(
        self,
        *,
        url: str | None = None,
        heartbeats: Heartbeats | None = None,
        concurrency: int | None = None,
        drain_grace: float | None = None,
        drain_timeout: float | None = None,
        **options: Unpack[ServiceOptions],
    ) -> None:
        """Work until SIGTERM, SIGINT, SIGHUP or `stop()`; then stop gracefully.

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
        concurrency = self._concurrency if concurrency is None else concurrency
        check_concurrency(concurrency)
        patience = self._patience.but(grace=drain_grace, timeout=drain_timeout)
        signals = Signals(self._signalled)
        with self._single_run(), signals.hearing() as heard:
            client = self._at_work = self._given_or_new_client(url, heartbeats, options, watchdog=self._watchdog)
            try:
                # Connect here, so that a watchdog that is required but impossible is refused here.
                self._outlive(client)
                if heard:
                    supervisor_link.note_drain(patience.timeout)
                shift = self._make_run(client, concurrency, patience, end=signals.end_at_once if heard else None)
                with ExitStack() as life:
                    with signals.bounding(patience.timeout) if heard and self._lifespans else nullcontext():
                        life.enter_context(living(self._living_here))
                    with shift:
                        shift.run_loop_in_thread()
                        self._make_current(shift)
                        shift.wait()
                        if heard:
                            signals.end_soon(timeout=patience.timeout)
                shift.check()
            finally:
                self._at_work = None  # before the client is closed: a call would be refused
                if client is not self._service:
                    client.close()

    async def serve(self) -> None:
        """Work inside of an event loop, asyncio's or trio's, in which async handlers run. Signals are not handled.

        Cancelling this call cancels async handlers, whose tasks are given back, and waits for handlers in threads.
        """
        with self._single_run():
            client = self._at_work = self._given_or_new_client()
            try:
                self._outlive(client)
                shift = self._make_run(client, self._concurrency, self._patience)
                with living(self._living_here):
                    await self._serve(shift)
                shift.check()
            finally:
                self._at_work = None  # before the client is closed: a call would be refused
                if client is not self._service:
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
        self, client: Client, concurrency: int, patience: DrainTimeouts, *, end: Callable[[], None] | None = None
    ) -> WorkerRun:
        return WorkerRun(
            client,
            self._enclosed_handlers(),
            concurrency=concurrency,
            ahead=self._ahead,
            window=self._window,
            patience=patience,
            end=end,
            lifespans=self._lifespans,
            declared=declarations(client.__connection__(), self._settings, self._periodic),
            labels=checked_labels(self.labels),
        )

    def _enclosed_handlers(self) -> dict[str, Handler]:
        """Return the handlers with the code around their runs. Raises `ConfigError` if some cannot be around them."""
        for around in self._around:
            if unknown := set(around.kinds) - self._handlers.keys():
                raise ConfigError(
                    f"@worker.around: {named(around.function)} is for {min(unknown)!r}, without a handler"
                )
        return {kind: handler.enclosed(self._around) for kind, handler in self._handlers.items()}

    @property
    def _living_here(self) -> Sequence[Lifespan]:
        """The lifespans of this process: none if no handler runs in it."""
        return self._lifespans if any(handler.run != "process" for handler in self._handlers.values()) else ()

    def drain(self) -> int:
        """Run the tasks that are due, here, one after the other, until none is due; return how many runs that took.

        For tests of your own: the code under test schedules, `drain` runs, the test looks. An exception of a handler
        settles its task as it would in `run`, is logged, and ends nothing. Tasks that wait, for a retry too, are left.
        Call this from a thread without an event loop; handlers with `run="process"` run in this process.
        """
        runs = 0
        with self._single_run():
            client = self._at_work = self._given_or_new_client()
            try:
                handlers = self._enclosed_handlers()
                with living(self._lifespans), _loop_for(self._lifespans) as run_async:
                    for runs, task in enumerate(client.tasks(*handlers, until_idle=0, labels=self.labels), 1):  # noqa: B007
                        try:
                            _run_here(handlers[task.kind], task, run_async)
                        except Exception:
                            logger.warning("task %s (%s) failed", task.id, task.kind, exc_info=True)
            finally:
                self._at_work = None  # before the client is closed: a call would be refused
                if client is not self._service:
                    client.close()
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
        return replace(health, ok=True, detail="the worker drains") if self._stopping else health

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

    def _given_or_new_client(
        self,
        url: str | None = None,
        heartbeats: Heartbeats | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
        *,
        watchdog: Mode = "soft",
    ) -> Client:
        options = {name: value for name, value in options.items() if value is not None}
        if isinstance(self._service, Client):
            if url is not None or heartbeats is not None or options:
                raise ConfigError(
                    "this worker has a client of its own, with URL, heartbeats and options: make it without one"
                )
            return self._service
        if url is None or self._service is None:  # the worker's own options are for its own service
            options = {**self._options, **options}
        service = url or self._service or os.environ.get("LEASEKIT_URL")
        if service is None:
            raise ConfigError("which service? Give the worker a URL, or set LEASEKIT_URL")
        last_resort = end_lost if watchdog in ("auto", "required") else None
        return Client(
            service,
            heartbeats=heartbeats or self._heartbeats,
            hooks=self._hooks,
            last_resort=last_resort,
            watchdog=watchdog,
            codec=self._codecs,
            options=options,
        )

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
        """Return the client that schedules for `HandlerFunction`, and whether it must be closed after that."""
        if (client := self._at_work) is not None:
            return client, False
        if not isinstance(self._service, Client | str | None):
            raise ConfigError(
                "a backend object belongs to the worker while it runs: give a client, handler.options(client=…)"
            )
        client = self._given_or_new_client()
        return client, client is not self._service


@contextmanager
def _loop_for(lifespans: Sequence[Lifespan]) -> Generator[Callable[..., Any]]:
    """Give what runs an async function: `anyio.run`, or, if there are async lifespans, their event loop."""
    if not any(map(is_generator_async, lifespans)):
        yield anyio.run
        return
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(living_in_loop(lifespans)):
        yield portal.call


def _run_here(handler: Handler, task: Task, run_async: Callable[..., Any]) -> None:
    if not is_async(handler.function):
        with lease(task, idle_timeout=handler.idle_timeout) as held:
            handler.call_with(held)
        return

    async def run() -> None:
        async with lease(task, idle_timeout=handler.idle_timeout) as held:
            await handler.acall_with(held)

    run_async(run)
