"""`leasekit work`: run the handlers of a worker."""

import gc
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer

from leasekit._worker.json_log import FORMAT, TEXT, formatter
from leasekit._worker.linux import can_supervise
from leasekit._worker.supervisor import Supervisor
from leasekit._worker.supervisor_link import attach
from leasekit._worker.window import MOST_HELD, WindowSize
from leasekit.cli import options
from leasekit.cli.errors import spoken
from leasekit.cli.target import Target, load
from leasekit.client import ServiceOptions
from leasekit.errors import ConfigError
from leasekit.worker import Worker

EXAMPLES = """\b
Exit codes: 0 stopped by a signal; 1 the module failed, or the worker did;
2 wrong usage; 130, 143 ended at once, by a second signal or because handlers
did not end in time; 137 killed, also because it hung after a signal.
75, only without a supervisor: a handler outlived its lease, so the process
ended: start it again.

\b
Examples:
  leasekit work app.tasks:worker --backend http://127.0.0.1:8077
  LEASEKIT_URL=sqlite:///tasks.db leasekit work app:worker --concurrency 4
"""

Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        "-b",
        help="URL of the service that has the tasks. Without it: the worker's own, or else LEASEKIT_URL.",
    ),
]
Queue = Annotated[
    str | None,
    typer.Option(
        envvar="LEASEKIT_QUEUE",
        show_envvar=False,
        help="Queues to which the server moves due tasks: the --queue of 'leasekit serve'. Tasks are claimed as its "
        "messages say. Without it: the worker's own, or none. [LEASEKIT_QUEUE]",
    ),
]
Labels = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        metavar="NAME=VALUE",
        help="What this worker has, beside the labels in its code; may be given several times. It also gets tasks that "
        "require some of these.",
    ),
]
Concurrency = Annotated[
    int | None, typer.Option(min=1, help="Slots for async handlers, and as many threads and processes for the others.")
]
Window = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Tasks to hold at the most: running, waiting after NotYet, or for a slot; auto: as many as keep the slots "
        "busy.",
    ),
]
DrainGrace = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Seconds after a signal in which handlers may end by themselves; then they are told to end, and their "
        "tasks are given back with their progress. Default: 20; 'inf' waits for ever.",
    ),
]
DrainTimeout = Annotated[
    float | None,
    typer.Option(min=0, help="Seconds after a signal in which the process ends, whatever code runs. Default: 25."),
]
Spool = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Directory for results that could not be reported. Default: the worker's own, or else "
        "$XDG_STATE_HOME/leasekit; '' keeps them in memory only.",
    ),
]
Health = Annotated[
    str | None,
    typer.Option(
        metavar="[HOST:]PORT",
        help="Answer GET requests at this address: 200 while leases can be kept, else 503. HOST is 127.0.0.1 unless "
        "given; anyone who reaches the address may ask.",
    ),
]
Supervise = Annotated[
    bool | None,
    typer.Option(
        "--supervise/--no-supervise",
        help="Have a small process above the worker that hands its leases back and starts it again when it dies. "
        "Default: on Linux.",
    ),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    typer.Option(help="Log to stderr from this level on; info has a line when a task begins and when it ends."),
]
LogFormat = Annotated[Literal["text", "json"], typer.Option(help="Lines for people, or a JSON object a line.")]


class Source(NamedTuple):
    """The service that has the tasks of the worker, as the options of the command name it."""

    url: str | None
    """None: where the worker's code or the environment says."""
    service: ServiceOptions

    @staticmethod
    def named_by(
        *,
        backend: Backend = None,
        token_file: options.TokenFile = None,
        header: options.Header = None,
        ca: options.Ca = None,
        cert: options.Cert = None,
        proxy: options.Proxy = None,
        plain_http: options.PlainHttp = False,
        queue: Queue = None,
    ) -> "Source":
        _, given = options.Service.named_by(
            backend=backend or os.environ.get("LEASEKIT_URL") or "",
            token_file=token_file,
            header=header,
            ca=ca,
            cert=cert,
            proxy=proxy,
            plain_http=plain_http,
        )
        return Source(backend, {**given, "queue": queue})


class Limits(NamedTuple):
    """How much runs at once, and how long a stop takes: the command has the options that say it."""

    concurrency: int | None
    window: WindowSize | None
    drain_grace: float | None
    drain_timeout: float | None

    @staticmethod
    def named_by(
        *,
        concurrency: Concurrency = None,
        window: Window = None,
        drain_grace: DrainGrace = None,
        drain_timeout: DrainTimeout = None,
    ) -> "Limits":
        return Limits(concurrency, None if window is None else _size(window), drain_grace, drain_timeout)


def _size(window: str) -> WindowSize:
    if window == "auto":
        return "auto"
    if window.isascii() and window.isdecimal() and 1 <= int(window[:8]) <= MOST_HELD:
        return int(window)
    raise typer.BadParameter(f"{window!r:.100} is not a number of tasks: write 1 to {MOST_HELD}, or auto")


@spoken
def work(
    target: Target,
    *,
    source: Source,
    label: Labels = None,
    rhythm: options.Rhythm,
    limits: Limits,
    spool: Spool = None,
    supervise: Supervise = None,
    health: Health = None,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
) -> None:
    """Run the handlers of a worker until SIGTERM or Ctrl-C.

    Then (after SIGHUP too) it claims no more, gives back tasks that have not begun, and lets handlers end; a second
    signal ends it at once. When all handlers have ended, exit handlers (atexit) have 5 s.

    A worker that dies (kill -9, out of memory, a lease outlived) is started again, and its tasks are handed back at
    once: a task whose handler had begun counts a crash.

    The module is searched in the working directory too. Options that are not given are as in the worker's code;
    'leasekit budget' shows what the numbers mean.
    """
    _log_to_stderr(log_level, log_format)
    _hand_to_supervisor(source.url, supervise=supervise)
    heartbeats = rhythm.heartbeats() if rhythm.is_given else None
    worker = _load_worker(target, label, health, spool)
    worker.run(url=source.url, heartbeats=heartbeats, **limits._asdict(), **source.service)


def _hand_to_supervisor(url: str | None, *, supervise: bool | None) -> None:
    """Have the worker run below a supervisor, and exit as that does; return at once if this is the worker itself."""
    if url is not None:
        os.environ["LEASEKIT_URL"] = url  # for the supervisor, and for clients that the module makes by itself
    if not attach() and _must_supervise(supervise):
        raise typer.Exit(Supervisor([sys.executable, *sys.orig_argv[1:]]).run())


def _load_worker(target: str, label: list[str] | None, health: str | None, spool: str | None) -> Worker:
    """Load the worker, give it its labels and its spool, and have it answer probes if `health` names an address."""
    worker = load(target, Worker)
    worker.labels |= options.labels(label)
    if health is not None:
        from leasekit._worker.health import listen  # not every worker needs an HTTP server

        listen(health, worker.health)
    gc.freeze()  # what is loaded by now stays: scanning it for garbage would stop all threads, again and again
    if spool is not None or worker.spool is None:
        worker.spool = _spool(spool)
    return worker


def _log_to_stderr(level: str, form: str) -> None:
    stderr = logging.StreamHandler()
    stderr.setFormatter(formatter(FORMAT if form == FORMAT else TEXT))
    logging.basicConfig(level=level.upper(), handlers=[stderr])
    least = max(logging.WARNING, logging.getLogger().level)
    for name in ("httpx", "alembic", "uvicorn"):  # they would log every request, and how a store is opened and served
        logging.getLogger(name).setLevel(least)


def _must_supervise(supervise: bool | None) -> bool:  # noqa: FBT001 - the option's value
    if supervise and not can_supervise():
        raise ConfigError("--supervise needs Linux: elsewhere a worker's leftover processes cannot be found")
    return can_supervise() if supervise is None else supervise


def _spool(asked: str | None) -> Path | None:
    """Return the directory for results, created if needed; None: results stay in memory.

    Raises `ConfigError` if the directory that was asked for cannot be used.
    """
    if asked == "":
        return None
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    try:
        directory = Path(asked or f"{state}/leasekit").expanduser()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(f"{directory} cannot be written to")
    except (OSError, RuntimeError) as error:  # there is no home directory
        if asked is not None:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"--spool {asked} cannot be used ({why}): name a directory that can be written to"
            ) from error
        logging.getLogger("leasekit").info("results are kept in memory only, no directory for a spool: %s", error)
        return None
    return directory
