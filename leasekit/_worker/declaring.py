"""Periodic tasks that the code of a worker declares: what they are, and telling the service, now and then again.

The service knows by the repeats which version of the code still runs, so that two versions of a worker do not undo
each other during a deploy.
"""

import asyncio
import logging
import math
import random
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import msgspec
from msgspec import structs

from leasekit._arguments import check_names
from leasekit._driver.coding import CLEAR, Coding
from leasekit._driver.reporting import encoding
from leasekit._driver.retrying import call_once, call_until
from leasekit._worker.handler_function import HandlerFunction
from leasekit.backend import Backend, PeriodicDirectory, payload_digest
from leasekit.errors import BackendError, ConfigError
from leasekit.periodic import PeriodicName, PeriodicOptions, PeriodicTask
from leasekit.task import TaskOptions
from leasekit.wire import MAX_PROGRESS, given

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


def directory(backend: Backend) -> PeriodicDirectory:
    """Return the backend as one that keeps periodic tasks. Raises `ConfigError` if it does not."""
    if not isinstance(backend, PeriodicDirectory):
        raise ConfigError(
            f"{type(backend).__name__} has no periodic tasks: leave @worker.periodic out, and schedule each task when "
            "it is due"
        )
    return backend


def _compared(task: PeriodicTask) -> PeriodicTask:
    return structs.replace(task, payload=payload_digest(msgspec.json.encode(task.payload)))


class Declaring:
    """Declare periodic tasks at the service, and repeat that until this is cancelled."""

    def __init__(self, backend: PeriodicDirectory, tasks: Mapping[str, PeriodicTask], coding: Coding = CLEAR) -> None:
        self._backend = backend
        self._tasks = {name: encoding.periodic(name, task, coding) for name, task in tasks.items()}
        self._said: dict[str, str] = {}

    async def run(self) -> None:
        while True:
            for name, task in self._tasks.items():
                await self._declare(name, task)
            await asyncio.sleep(_REPEAT * random.uniform(0.8, 1.0))  # noqa: S311 - to spread fleets

    async def _declare(self, name: str, task: PeriodicTask) -> None:
        call = partial(self._backend.set_periodic, name, task, is_declared=True)
        try:
            info = await call_until(partial(call_once, call, within=_WITHIN), for_at_most=math.inf)
        except BackendError as error:
            self._say(logging.ERROR, name, f"is not set, and is tried again in some minutes: {error}")
            return
        if _compared(info.task) != _compared(task):
            self._say(logging.INFO, name, "is not as this code declares it: newer code or a client has set it")
        else:
            self._said.pop(name, None)

    def _say(self, level: int, name: str, what: str) -> None:
        """Log what became of a declaration, unless it became the same before."""
        if self._said.get(name) != what:
            self._said[name] = what
            logger.log(level, "the periodic task %r %s", name, what)
