"""Declarations: what code declares of a worker before it runs: handlers, periodic tasks, code around runs.

Rule: nothing is declared while the worker runs, and no kind and no name twice.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, cast, overload

from leasekit._worker.around import Around, AroundRun, Lifespan, named
from leasekit._worker.around import check as check_generator
from leasekit._worker.declaring import declaration, settings_of
from leasekit._worker.handler_function import HandlerFunction
from leasekit._worker.handlers import Dedupe, Handler, declare
from leasekit._worker.window import WindowSize
from leasekit.client import Client
from leasekit.errors import ConfigError
from leasekit.flows import Flow
from leasekit.periodic import PeriodicOptions, PeriodicTask
from leasekit.task import KindSettings, TaskDefaults

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A", bound=AroundRun)
L = TypeVar("L", bound=Lifespan)


class Declarations:
    """The part of `Worker` by which code declares what the worker runs."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._periodic: dict[str, PeriodicTask] = {}
        self._settings: dict[str, KindSettings] = {}
        self._around: list[Around] = []
        self._lifespans: list[Lifespan] = []
        self._busy = threading.Lock()  # held while the worker runs

    def _submitter(self) -> tuple[Client, bool]:
        """Return the client that schedules for `HandlerFunction`, and whether it must be closed after that."""
        raise NotImplementedError

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
                defaults=defaults,
                idle_timeout=idle_timeout,
                concurrency=concurrency,
                window=window,
                threads=threads,
                dedupe=dedupe,
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
            self._add_periodic(function, cron, options)
            return function

        return register

    def _add_periodic(
        self, function: HandlerFunction[Any, ..., Any], cron: str | None, options: PeriodicOptions
    ) -> None:
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
