"""`leasekit work`: run the handlers of a worker."""

import importlib
import logging
import os
import sys
from typing import Annotated

import typer

from leasekit.cli import options
from leasekit.cli.errors import spoken
from leasekit.errors import ConfigError
from leasekit.worker import Worker

__all__ = ["EXAMPLES", "Target", "load", "work"]

EXAMPLES = """\b
Exit codes: 0 stopped by a signal; 1 the module failed, or the worker did;
2 wrong usage; 75 a body outlived its lease, so the process ended:
start it again.

\b
Examples:
  leasekit work app.tasks:worker --backend http://127.0.0.1:8077
  LEASEKIT_URL=sqlite:///tasks.db leasekit work app:worker --concurrency 4
"""

Target = Annotated[
    str,
    typer.Argument(metavar="MODULE:WORKER", help="The worker, as in app.tasks:worker.", show_default=False),
]


@spoken
def work(
    target: Target,
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
    """Run the handlers of a worker until SIGTERM or Ctrl-C.

    Then it claims no more, gives back what has not begun, and lets bodies end; a second signal ends it at once.

    The module is looked for in the working directory too. What is not given is as the worker was made;
    'leasekit budget' shows what the numbers mean.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would say every request
    if backend is not None:
        os.environ["LEASEKIT_URL"] = backend  # for clients that the module makes by itself
    beats = options.rhythm(ttl=ttl, cycle=cycle, rate=rate, batch=batch)
    load(target).run(url=backend, beats=beats, concurrency=concurrency)


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
