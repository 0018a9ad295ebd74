"""`leasekit work`: run the handlers of a worker."""

import importlib
import logging
import os
import sys
from typing import Annotated

import typer

from leasekit.cli import options
from leasekit.config import Beats
from leasekit.errors import ConfigError, MissingDependency, UnknownScheme
from leasekit.worker import Worker

__all__ = ["load", "work"]

_WRONG_USAGE = 2


def work(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:WORKER", help="Where the worker is, as in app.tasks:worker.")
    ],
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            "-b",
            help="URL of the service that has the tasks. Without it: the worker's own, or else LEASEKIT_URL.",
        ),
    ] = None,
    ttl: options.Ttl = None,
    cycle: options.Cycle = None,
    rate: options.Rate = None,
    batch: options.Batch = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Slots for async handlers, and as many threads for the others.")
    ] = None,
) -> None:
    """Run the handlers of a worker until SIGTERM or Ctrl-C, then let them end; a second signal ends it at once.

    The module is looked for in the working directory too.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if backend is not None:
        os.environ["LEASEKIT_URL"] = backend  # for clients that the module makes by itself
    try:
        beats = _beats(ttl=ttl, cycle=cycle, rate=rate, batch=batch)
        load(target).run(url=backend, beats=beats, concurrency=concurrency)
    except (ConfigError, MissingDependency, UnknownScheme) as error:
        typer.echo(f"leasekit work: {error}", err=True)
        raise typer.Exit(_WRONG_USAGE) from error


def load(target: str) -> Worker:
    """The worker that `module:attribute` names. Raises `ConfigError`; what the module itself raises goes on its way."""
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise ConfigError(f"{target!r} names no worker: write module:attribute, as in app.tasks:worker")
    if (here := str(os.getcwd())) not in sys.path:  # noqa: PTH109 - sys.path wants strings
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Only where it is this module that is missing, not one that it needs.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"there is no module {error.name!r} in {here} or on the path") from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise ConfigError(f"there is no {name!r} in {target.removesuffix(name).rstrip(':.')!r}") from error
    if not isinstance(found, Worker):
        raise ConfigError(f"{target!r} is no leasekit.Worker, but of type {type(found).__qualname__}")
    return found


def _beats(**asked: float | None) -> Beats | None:
    """The rhythm, where one is asked for."""
    return None if all(value is None for value in asked.values()) else options.beats(**asked)  # type: ignore[arg-type]
