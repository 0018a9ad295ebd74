"""Handlers: a function, the kind of tasks that it runs, and the schema of their payload."""

import inspect
import re
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal, TypedDict, Unpack, cast

import msgspec

from leasekit._arguments import check_concurrency, check_fields, check_idle_timeout, check_names, new_task
from leasekit._driver.reporting import encoding
from leasekit._leased_run import LeasedRun
from leasekit._worker.around import Around, AroundRun, around_async_run, around_run, named
from leasekit._worker.around import is_async as is_async_generator
from leasekit._worker.window import WindowSize, check_window
from leasekit.config import check_number
from leasekit.errors import ConfigError, Fatal, NotHeld
from leasekit.lease import Lease
from leasekit.task import Name, TaskDefaults, TaskOptions

RunIn = Literal["async", "thread", "process"]
Dedupe = Callable[[Any], str | None]
"""Returns the dedupe key of the task with this payload; None: the task has none."""

_WITH_FIELDS = (msgspec.inspect.StructType, msgspec.inspect.DataclassType, msgspec.inspect.TypedDictType)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """A declared function. `schema` is the annotation of its payload; Any takes the payload unchecked."""

    kind: str
    function: Callable[..., Any]
    run: RunIn
    schema: Any = Any
    takes_held: bool = False
    idle_timeout: float | None = None
    concurrency: int | None = None  # slots of its own; None: it shares those of the worker
    window: WindowSize | None = None  # a window of its own, and slots; None: that of the worker
    threads: int = 1  # runs at once in each of its processes
    defaults: TaskDefaults = field(default_factory=TaskDefaults)  # of tasks that are scheduled through the handler
    dedupe: Dedupe | None = None
    around: tuple[AroundRun, ...] = ()  # code around each run, the outermost first

    def enclosed(self, around: Sequence[Around]) -> "Handler":
        """Return this handler with the code around its runs. Raises `ConfigError` if that cannot be around it."""
        functions = tuple(one.function for one in around if one.encloses(self.kind))
        for function in functions:
            if is_async_generator(function) and not is_async(self.function):
                raise ConfigError(
                    f"@worker.around: {named(function)} is an `async def`, and cannot be around handler {self.kind!r}, "
                    'which is none: write it without `async`, or name the kinds that it is for: @worker.around("mail")'
                )
        return replace(self, around=functions)

    def call(self, run: LeasedRun) -> None:
        """Run the function under a lease, in a context of its own. Its value is the result, unless it has settled."""
        run.attach()
        self.call_with(Lease(run))

    def call_with(self, held: Lease) -> None:
        if (arguments := self._arguments(held)) is None:
            return
        if not self.around:
            _complete(held, self.function(*arguments))
            return
        with around_run(self.around, held):
            _complete(held, self.function(*arguments))

    async def acall(self, run: LeasedRun) -> None:
        await self.acall_with(Lease(run))

    async def acall_with(self, held: Lease) -> None:
        if (arguments := self._arguments(held)) is None:
            return
        if not self.around:
            _complete(held, await self.function(*arguments))
            return
        async with around_async_run(self.around, held):
            _complete(held, await self.function(*arguments))

    def payload(self, payload: tuple[Any, ...], fields: dict[str, Any]) -> msgspec.Raw:
        """Return a payload, given as one value or as fields, as JSON that fits. Raises TypeError or ValueError."""
        if len(payload) > 1 or (payload and fields):
            raise TypeError(f"handler {self.kind!r} takes one payload, or the fields of one by name")
        what = f"payload of handler {self.kind!r}"
        raw = encoding.encoded(payload[0] if payload else self._from_fields(fields), what)
        if self.schema is not Any:
            try:
                msgspec.json.decode(bytes(raw), type=self.schema)
            except msgspec.ValidationError as error:
                raise ValueError(f"this {what} does not fit: {error}") from error
        return raw

    def options(self, payload: msgspec.Raw, given: TaskOptions) -> TaskOptions:
        """Return the options of a task with this payload: those that are given, and defaults for the others."""
        options: TaskOptions = {**self.defaults, **given}
        if self.dedupe is not None and "dedupe_key" not in given:
            key = self.dedupe(msgspec.json.decode(bytes(payload), type=self.schema))
            if key is not None:
                options["dedupe_key"] = key
        return options

    def _from_fields(self, fields: dict[str, Any]) -> Any:
        known = msgspec.inspect.type_info(self.schema)
        schema = self.schema
        if isinstance(known, msgspec.inspect.Metadata):
            known, schema = known.type, schema.__origin__
        if not isinstance(known, _WITH_FIELDS):
            if fields:
                raise TypeError(f"the payload of handler {self.kind!r} has no fields: give it as one positional value")
            return None
        if unknown := fields.keys() - {field.name for field in known.fields}:
            raise TypeError(f"the payload of handler {self.kind!r} has no field {', '.join(sorted(unknown))}")
        if missing := {field.name for field in known.fields if field.required} - fields.keys():
            raise TypeError(f"the payload of handler {self.kind!r} needs {', '.join(sorted(missing))}")
        return schema(**fields)

    def _arguments(self, held: Lease) -> tuple[Any, ...] | None:
        """Return the arguments; None if the payload does not fit, which fails the task for good with a message."""
        payload = held.task.payload
        if self.schema is not Any:
            try:
                payload = msgspec.convert(payload, self.schema, str_keys=True)
            except msgspec.ValidationError as error:
                what = _VALUE.sub(r"\1\2", str(error))
                message = f"the payload does not fit handler {self.kind!r}: {what}"
                held.fail({"type": "ValidationError", "message": message}, retry=False)
                return None
        return (payload, held) if self.takes_held else (payload,)


# What msgspec tells of a payload, which is in no log of leasekit.
_VALUE = re.compile(
    r"\A(Invalid (?:enum )?value|Object contains unknown field) .*?( - at (?:`key` in )?`\$[^`]*`)?\Z", re.S
)


def _complete(held: Lease, result: Any) -> None:
    try:
        held.__returned__(result)
    except NotHeld:  # a child that the handler forked came back from it: the worker ends it
        pass
    except ValueError as error:
        if isinstance(error, Fatal):
            raise
        raise Fatal(str(error)) from error  # the next run would return the like


def is_async(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", function)  # noqa: B004 - of an object with `__call__`
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def check_options(kind: str, options: TaskDefaults) -> None:
    """Raise TypeError or ValueError if no service would take a task of this kind with these options."""
    task = new_task(kind, None, cast("TaskOptions", options))
    check_fields([task])
    encoding.successor(task)


class HandlerSettings(TypedDict, total=False):
    """The settings that `Worker.handler` takes: fields of `Handler`."""

    idle_timeout: float | None
    concurrency: int | None
    window: WindowSize | None
    threads: int
    dedupe: Dedupe | None


def declare(
    kind: str,
    function: Callable[..., Any],
    *,
    run: str | None,
    defaults: TaskDefaults | None = None,
    **settings: Unpack[HandlerSettings],
) -> Handler:
    """Return a handler. Raises `ConfigError` if the function cannot be one, TypeError for a wrong name of a default."""
    defaults = {} if defaults is None else defaults
    check_names(defaults, TaskDefaults.__optional_keys__, "default of tasks that a handler declares")
    what = f"handler {kind!r} ({getattr(function, '__qualname__', function)})"
    try:
        msgspec.convert(kind, Name)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{what}: this kind is not a valid name: {error}") from error
    schema, takes_held = signature(what, function)
    handler = Handler(
        kind=kind,
        function=function,
        run=_checked_run_in(what, function, run),
        schema=schema,
        takes_held=takes_held,
        defaults=defaults,
        **settings,
    )
    _check_settings(what, handler)
    return handler


def _check_settings(what: str, handler: Handler) -> None:
    """Raise `ConfigError` for a setting that no handler can have, or that contradicts another one."""
    check_idle_timeout(handler.idle_timeout, owner=f"{what}: ")
    if handler.concurrency is not None:
        check_concurrency(handler.concurrency, owner=f"{what}: ")
    if handler.window is not None:
        check_window(handler.window, owner=f"{what}: ")
    check_number(f"{what}: threads", handler.threads, unit="", least=1, most=1_000, whole=True)
    if handler.threads != 1 and handler.run != "process":
        raise ConfigError(f"{what}: threads={handler.threads} is for the processes of run='process': use concurrency")
    if handler.dedupe is not None and not callable(handler.dedupe):
        raise ConfigError(
            f"{what}: dedupe must be a function of the payload that returns the key, got {handler.dedupe!r}"
        )
    try:
        check_options(handler.kind, handler.defaults)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}: {error}") from error


def _checked_run_in(what: str, function: Callable[..., Any], run: str | None) -> RunIn:
    call = getattr(function, "__call__", function)  # noqa: B004 - of an object with `__call__`
    if any(map(inspect.isgeneratorfunction, (function, call))) or any(
        map(inspect.isasyncgenfunction, (function, call))
    ):
        raise ConfigError(f"{what} yields: return the result, and report what comes before with held.progress()")
    match run:
        case None:
            return "async" if is_async(function) else "thread"
        case "async" if is_async(function):
            return "async"
        case "thread" if not is_async(function):
            return "thread"
        case "process":
            _check_process(what, function)
            return "process"
        case "async":
            raise ConfigError(f"{what} is not an `async def` and would block the event loop: use run='thread'")
        case "thread":
            raise ConfigError(f"{what} is an `async def`: use run='async'")
        case _:
            raise ConfigError(f"{what}: run={run!r} is unknown; use 'async', 'thread' or 'process'")


def _check_process(what: str, function: Callable[..., Any]) -> None:
    """Raise `ConfigError` if an executor cannot find the function, as far as this shows at its declaration."""
    if sys.platform != "linux":
        raise ConfigError(f"{what}: run='process' needs Linux, whose kernel ends it in time: use run='thread'")
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module is None or name is None or "<" in name:
        raise ConfigError(
            f"{what}: run='process' finds a function by its name in its module, and this one has no name there: "
            "declare a function of a module, not a lambda, an inner function, or an object with `__call__`"
        )


def signature(
    what: str, function: Callable[..., Any], *, takes: str = "payload", held: str = "lease"
) -> tuple[Any, bool]:
    """Return the schema of the first parameter, and whether there is a second. Raises `ConfigError` for any other.

    `takes` and `held` name the two in messages.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} has no signature that can be read: wrap it in a function") from error
    positional = [parameter for parameter in parameters if parameter.kind in _POSITIONAL]
    if not 1 <= len(positional) <= 2 or any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        second = "held" if held == "lease" else held
        raise ConfigError(f"{what} must take the {takes}, and may take the {held}: ({takes}) or ({takes}, {second})")
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.default is inspect.Parameter.empty:
            raise ConfigError(f"{what}: the worker does not pass {parameter.name!r}: give that parameter a default")
    return _schema(what, function, positional[0]), len(positional) == 2


def _schema(what: str, function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    if parameter.annotation is inspect.Parameter.empty:
        return Any
    names = getattr(inspect.unwrap(function), "__globals__", {})
    # Of this one parameter only: annotations of the others may be known to type checkers alone.
    alone = SimpleNamespace(__annotations__={"payload": parameter.annotation})
    try:
        schema = typing.get_type_hints(alone, globalns=names, include_extras=True)["payload"]
        known = msgspec.inspect.type_info(schema)
    except (NameError, TypeError) as error:
        raise ConfigError(f"{what}: the annotation of {parameter.name!r} is not a schema: {error}") from error
    if isinstance(known, msgspec.inspect.CustomType):
        raise ConfigError(
            f"{what}: the annotation of {parameter.name!r} is not a schema: msgspec cannot read {schema!r}; "
            "use a Struct, a dataclass, a TypedDict, or a type of JSON"
        )
    return schema
