"""Handler import: an executor finds its handler by the name of a module, and by the handler's name in it.

An executor is a fresh interpreter, never a fork: a worker has threads, and locks that they hold would stay held in a
fork. If the worker is the main module, that is imported as multiprocessing does it, under the name `__mp_main__`: so
the worker must be run under `if __name__ == "__main__":`.
"""

import importlib
import logging
import multiprocessing.spawn
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

from leasekit._driver.connection import Connection
from leasekit._worker.around import Lifespan, is_async
from leasekit._worker.handler_function import HandlerFunction
from leasekit._worker.handlers import Handler
from leasekit._worker.process.messages import Address, FunctionAddress, Setup
from leasekit.backend import Scheduler
from leasekit.errors import ConfigError


def setup(handler: Handler, connection: Connection, lifespans: Sequence[Lifespan] = ()) -> Setup:
    """Return the names of functions, and the service's limits, for executors.

    Raises `ConfigError` if executors would not find a function.
    """
    address = _address(handler.function, f"handler {handler.kind!r}")
    around = [_address(function, "@worker.around") for function in handler.around]
    # An executor has an event loop for each run, and none between them.
    living = [_address(function, "@worker.lifespan") for function in lifespans if not is_async(function)]
    main = _main_import() if any(one.module == "__main__" for one in (address, *around, *living)) else {}
    root = logging.getLogger()
    formats = [handler.formatter for handler in root.handlers if handler.formatter is not None]
    return Setup(
        handler=Address(module=address.module, name=address.name, kind=handler.kind, idle_timeout=handler.idle_timeout),
        around=around,
        lifespans=living,
        main=main,
        argv=sys.argv,
        accepts_work=isinstance(connection.backend, Scheduler),
        dependencies=connection.backend.capabilities.dependencies,
        max_progress=connection.max_progress,
        max_result=connection.max_result,
        log_level=root.level if root.handlers else None,
        log_format=getattr(formats[0], "_fmt", None) if formats else None,
    )


def _address(function: Callable[..., Any], what: str) -> FunctionAddress:
    module, name = function.__module__, function.__qualname__
    address = FunctionAddress(module=module, name=name)
    try:
        found = find(address, sys.modules[module])
    except (KeyError, AttributeError):
        found = None
    if found is not function:
        raise ConfigError(
            f"{what}: run='process' finds a function by its name, "
            f"and {module}.{name} is not this one: keep it in its module under its own name"
        )
    return address


def _main_import() -> dict[str, str]:
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:
        return {"init_main_from_name": spec.name}
    if (file := getattr(main, "__file__", None)) is not None:
        return {"init_main_from_path": os.path.abspath(file)}  # noqa: PTH100
    raise ConfigError(
        "run='process' needs handlers that a fresh interpreter can import, and this main module is not a file "
        "(python -c, a prompt, a notebook): put them into a module"
    )


def prepare(setup: Setup) -> None:
    """Set up this fresh interpreter so that it imports what the worker imports."""
    data: dict[str, Any] = {"sys_argv": list(setup.argv), **setup.main}
    multiprocessing.spawn.prepare(data)


def find(address: FunctionAddress, module: Any = None) -> Callable[..., Any]:
    """Return the function at `address`. Raises the errors of importing its module, and AttributeError."""
    found: Any = importlib.import_module(address.module) if module is None else module
    for part in address.name.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = cast("Any", found).function if isinstance(found, HandlerFunction) else found
    return function
