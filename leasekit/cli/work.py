"""`leasekit work`: run the handlers of a worker."""

import importlib
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from leasekit.cli import options
from leasekit.cli.errors import spoken
from leasekit.errors import ConfigError
from leasekit.worker import Worker
from leasekit.worker.kernel import can_supervise
from leasekit.worker.supervised import attach
from leasekit.worker.supervisor import Supervisor

__all__ = ["EXAMPLES", "Target", "load", "work"]

EXAMPLES = """\b
Exit codes: 0 stopped by a signal; 1 the module failed, or the worker did;
2 wrong usage; 130, 143 ended at once, by a second signal or because bodies
did not end in time; 137 killed. 75, only without a supervisor: a body
outlived its lease, so the process ended: start it again.

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
        int | None,
        typer.Option(min=1, help="Slots for async handlers, and as many threads and processes for the others."),
    ] = None,
    drain_grace: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds after a signal in which bodies may end by themselves; then they are told to, and their tasks "
            "given back with their progress. Default: 20; 'inf' waits for ever.",
        ),
    ] = None,
    drain_timeout: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds after a signal in which the process ends, whatever runs in it. Default: 25."),
    ] = None,
    spool: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Where results survive that could not be reported. Default: the worker's own, or else "
            "$XDG_STATE_HOME/leasekit; '' keeps them in memory only.",
        ),
    ] = None,
    supervise: Annotated[
        bool | None,
        typer.Option(
            "--supervise/--no-supervise",
            help="Have a small process above the worker that hands its leases back and starts it again when it dies. "
            "Default: where the system is Linux.",
        ),
    ] = None,
) -> None:
    """Run the handlers of a worker until SIGTERM or Ctrl-C.

    Then it claims no more, gives back what has not begun, and lets bodies end; a second signal ends it at once.

    A worker that dies (kill -9, out of memory, a lease outlived) is started again, and what it held is handed back at
    once: a task whose body had begun counts a crash.

    The module is looked for in the working directory too. What is not given is as the worker was made;
    'leasekit budget' shows what the numbers mean.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would say every request
    if not attach() and _is_wanted(supervise):
        raise typer.Exit(Supervisor([sys.executable, *sys.orig_argv[1:]]).run())
    if backend is not None:
        os.environ["LEASEKIT_URL"] = backend  # for clients that the module makes by itself
    beats = options.rhythm(ttl=ttl, cycle=cycle, rate=rate, batch=batch)
    worker = load(target)
    if spool is not None or worker.spool is None:
        worker.spool = _spool(spool)
    worker.run(
        url=backend,
        beats=beats,
        concurrency=concurrency,
        drain_grace=drain_grace,
        drain_timeout=drain_timeout,
    )


def _is_wanted(supervise: bool | None) -> bool:  # noqa: FBT001 - as the option is
    if supervise and not can_supervise():
        raise ConfigError("--supervise needs Linux: elsewhere nobody can say that nothing of a worker runs any more")
    return can_supervise() if supervise is None else supervise


def _spool(asked: str | None) -> Path | None:
    """The directory for results, made if need be. Raises `ConfigError` where one that was asked for cannot be used."""
    if asked == "":
        return None
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    try:
        directory = Path(asked or f"{state}/leasekit").expanduser()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(f"{directory} is not ours to write to")
    except (OSError, RuntimeError) as error:  # no home
        if asked is not None:
            raise ConfigError(f"--spool {asked}: {error}") from error
        logging.getLogger("leasekit").info("results are kept in memory only, there is no place for a spool: %s", error)
        return None
    return directory


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
