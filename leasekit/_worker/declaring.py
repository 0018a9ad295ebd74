"""Declarations: periodic tasks and settings of kinds that the code of a worker declares, now and then again.

The service knows by the repeats which version of the code still runs, so that two versions of a worker do not undo
each other during a deploy.
"""

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec
from msgspec import structs

from leasekit._arguments import check_names
from leasekit._driver.coding import CLEAR, Coding
from leasekit._driver.connection import Connection
from leasekit._driver.reporting import encoding
from leasekit._driver.retrying import call_once, call_until
from leasekit._worker.handler_function import HandlerFunction
from leasekit.backend import KindDirectory, PeriodicDirectory, checked, payload_digest
from leasekit.errors import BackendError, ConfigError, Refused
from leasekit.periodic import PeriodicName, PeriodicOptions, PeriodicTask
from leasekit.task import KindSettings, TaskOptions
from leasekit.wire import MAX_PROGRESS, KindRequest, given

logger = logging.getLogger("leasekit")

_REPEAT = 300.0  # seconds until a declaration is repeated, at most; the server forgets it after three times as many
_WITHIN = 30.0  # seconds for one call

_OF_RULE = frozenset({"tz", "every", "overlap", "catch_up", "jitter"})
_OF_TASK = TaskOptions.__optional_keys__ & PeriodicOptions.__optional_keys__


def declaration(
    function: HandlerFunction[Any, ..., Any], cron: str | None, options: PeriodicOptions
) -> tuple[str, PeriodicTask]:
    """Return the name and the periodic task that a decorator declares. Raises `ConfigError` if there is no such task.

    Raises TypeError for an unknown option.
    """
    check_names(options, PeriodicOptions.__optional_keys__, "option of a periodic task")
    values = cast("dict[str, Any]", options)
    try:
        of_task = cast("TaskOptions", {name: values[name] for name in values.keys() & _OF_TASK})
        task = function.__task__(values.get("payload"), of_task)
        if (size := len(bytes(task.payload))) > MAX_PROGRESS:
            raise ValueError(f"payload must be at most {MAX_PROGRESS} bytes, got {size}")
        name = msgspec.convert(values.get("name", task.kind), PeriodicName)
        fields = {field: value for field, value in given(task).items() if field in PeriodicTask.__struct_fields__}
        rule = {field: values[field] for field in values.keys() & _OF_RULE}
        return name, msgspec.json.decode(msgspec.json.encode({**fields, **rule, "cron": cron}), type=PeriodicTask)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"@worker.periodic above {_name(function)}: {error}") from error


def _name(function: HandlerFunction[Any, ..., Any]) -> str:
    return str(getattr(function.function, "__qualname__", function.function))


def settings_of(kind: str, settings: KindSettings) -> KindSettings:
    """Return the settings that a handler declares for its kind. Raises `ConfigError` if no kind can have them."""
    if not isinstance(cast("object", settings), KindSettings):
        raise ConfigError(f"handler {kind!r}: settings must be leasekit.KindSettings(…), got {settings!r}")
    try:
        checked(KindRequest, given(settings))
    except Refused as error:
        raise ConfigError(f"handler {kind!r}: settings: {error}") from error
    return settings


class Declared(NamedTuple):
    """Something that code declares."""

    what: str
    """Its name in a sentence."""
    tell: Callable[[], Awaitable[bool]]
    """Tells the service, and returns whether it then is as declared."""


def declarations(
    connection: Connection, settings: Mapping[str, KindSettings], periodic: Mapping[str, PeriodicTask]
) -> list[Declared]:
    """Return what code declares at a service. Raises `ConfigError` if the service keeps none of that."""
    backend, declared = connection.backend, list[Declared]()
    for kind in list(settings)[:1]:
        if not isinstance(backend, KindDirectory):
            raise ConfigError(
                f"{type(backend).__name__} has no settings of kinds: leave settings=… out of the handler {kind!r}, and "
                "give options to its tasks"
            )
        declared += declared_kinds(backend, settings)
    if periodic:
        if not isinstance(backend, PeriodicDirectory):
            raise ConfigError(
                f"{type(backend).__name__} has no periodic tasks: leave @worker.periodic out, and schedule each task "
                "when it is due"
            )
        declared += declared_periodic(backend, periodic, connection.coding)
    return declared


def declared_periodic(
    directory: PeriodicDirectory, tasks: Mapping[str, PeriodicTask], coding: Coding = CLEAR
) -> list[Declared]:
    """Return the declarations of periodic tasks."""

    async def tell(name: str, task: PeriodicTask) -> bool:
        info = await directory.set_periodic(name, task, is_declared=True)
        return _compared(info.task) == _compared(task)

    sent = {name: encoding.periodic(name, task, coding) for name, task in tasks.items()}
    return [Declared(f"the periodic task {name!r} is", partial(tell, name, task)) for name, task in sent.items()]


def declared_kinds(directory: KindDirectory, settings: Mapping[str, KindSettings]) -> list[Declared]:
    """Return the declarations of settings of kinds."""

    async def tell(kind: str, wanted: KindSettings) -> bool:
        info = await directory.set_kind(kind, wanted, is_declared=True)
        return given(wanted).items() <= given(info.settings).items()

    return [Declared(f"the settings of kind {kind!r} are", partial(tell, kind, of)) for kind, of in settings.items()]


def _compared(task: PeriodicTask) -> PeriodicTask:
    return structs.replace(task, payload=payload_digest(msgspec.json.encode(task.payload)))


class Declaring:
    """Declare at the service what code says, and repeat that until this is cancelled."""

    def __init__(self, declared: Sequence[Declared]) -> None:
        self._declared = declared
        self._said: dict[str, str] = {}

    async def run(self) -> None:
        while True:
            for declared in self._declared:
                await self._declare(declared)
            await asyncio.sleep(_REPEAT * random.uniform(0.8, 1.0))  # noqa: S311 - to spread fleets

    async def _declare(self, declared: Declared) -> None:
        try:
            is_there = await call_until(partial(call_once, declared.tell, within=_WITHIN), for_at_most=math.inf)
        except BackendError as error:
            self._say(logging.ERROR, declared.what, f"not set, which is tried again in some minutes: {error}")
            return
        if not is_there:
            self._say(logging.INFO, declared.what, "not as this code declares: newer code or a client has set that")
        else:
            self._said.pop(declared.what, None)

    def _say(self, level: int, what: str, became: str) -> None:
        """Log what became of a declaration, unless it became the same before."""
        if self._said.get(what) != became:
            self._said[what] = became
            logger.log(level, "%s %s", what, became)
