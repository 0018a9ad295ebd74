"""Target: the argument MODULE:WORKER, and the worker, or another object, that it names."""

import importlib
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar

import typer

from leasekit.errors import ConfigError, LeasekitError

T = TypeVar("T")

Target = Annotated[
    str, typer.Argument(metavar="MODULE:WORKER", help="The worker, as in app.tasks:worker.", show_default=False)
]


def parts(target: str, what: str = "worker") -> tuple[str, str]:
    """Return module and attribute. Raises `ConfigError` for a target of another form."""
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise ConfigError(f"{target!r} does not name a {what}: write module:attribute, as in app.tasks:{what}")
    return module_name, path


def load(target: str, type_: type[T]) -> T:
    """Return the object that `module:attribute` names, of this type: a `Worker`, say.

    Raises `ConfigError` if there is none, and `LeasekitError` if the module fails, with its traceback on stderr.
    """
    module_name, path = parts(target, type_.__name__.lower())
    if (here := str(os.getcwd())) not in sys.path:  # noqa: PTH109 - sys.path wants strings
        sys.path.insert(0, here)
    found: Any = _imported(module_name)
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise ConfigError(f"there is no {name!r} in {target.removesuffix(name).rstrip(':.')!r}") from error
    if not isinstance(found, type_):
        raise ConfigError(f"{target!r} is not a leasekit.{type_.__name__}, but of type {type(found).__qualname__}")
    return found


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        # Only if this module is missing, not a module that it imports.
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            hint = ": a module is named without .py" if name.endswith(".py") else ""
            raise ConfigError(f"there is no module {error.name!r} in {Path.cwd()} or on the path{hint}") from error
        own = error.__traceback__
        while own is not None and _is_machinery(own.tb_frame.f_code.co_filename):
            own = own.tb_next
        traceback.print_exception(error.with_traceback(own))
        raise LeasekitError(f"the module {name!r} cannot be imported: its error is above") from error


def _is_machinery(filename: str) -> bool:
    """Return whether a frame is between the command and the module, so that it does not help to find the error."""
    return filename in {__file__, importlib.__file__} or filename.startswith("<frozen importlib")
