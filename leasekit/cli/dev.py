"""`leasekit dev`: a server, a worker and a store for developing handlers; the worker restarts when code changes."""

import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated, Self

import typer

from leasekit._worker.signals import LOST_EXIT_CODE
from leasekit.cli.dev_processes import Child, say
from leasekit.cli.dev_sources import Sources
from leasekit.cli.errors import FAILED, fail, spoken
from leasekit.cli.target import Target, parts

_SERVER_GRACE = 10.0

EXAMPLES = """\b
When a .py file changes, the worker is told to stop, ends what it runs, and
starts anew with the new code. Tasks and the server stay. A worker that fails
starts anew at the next change.

\b
Examples:
  leasekit dev app.tasks:worker
  leasekit dev app.tasks:worker --store sqlite:///dev.db --port 8100
"""


Port = Annotated[int, typer.Option(min=0, max=65535, help="Port of the server; 0 takes any that is free.")]
Store = Annotated[
    str, typer.Option(help="Where tasks are kept; memory: is gone with the command, sqlite:///dev.db stays.")
]
Concurrency = Annotated[
    int | None, typer.Option(min=1, help="Slots for async handlers, and as many threads for the others.")
]
Grace = Annotated[float, typer.Option(min=0, help="Seconds for the worker to end what it runs, before it is killed.")]
Interval = Annotated[float, typer.Option(min=0.05, max=60, help="Seconds between two checks of the files.")]


@spoken
def dev(
    target: Target,
    port: Port = 8077,
    store: Store = "memory:",
    concurrency: Concurrency = None,
    grace: Grace = 30.0,
    interval: Interval = 0.5,
) -> None:
    """Run a server and a worker that restarts when code changes.

    All processes are in one tree, until Ctrl-C. Watched are the .py files below the working directory, without hidden
    directories and virtual environments.
    """
    parts(target)  # a wrong target is refused before anything is started, because no change of the code would mend it
    command = ["work", target, "--concurrency", str(concurrency)] if concurrency else ["work", target]
    with _Signals() as signals, Child("serve", "--port", str(port), "--store", store, grace=_SERVER_GRACE) as server:
        url = server.address()
        if url is None:
            fail("dev", "the server did not start: its message is above")
        kept = " (tasks are in memory; --store sqlite:///dev.db keeps them)" if store.startswith("memory:") else ""
        say(f"the server is at {url}{kept}")
        if "LEASEKIT_URL" in os.environ:
            say(f"LEASEKIT_URL is not used here: other commands reach this server with --backend {url}")
        watched = _Dev([*command, "--backend", url], server, Sources(Path.cwd()), signals, grace=grace)
        code = watched.run(interval)
    raise typer.Exit(code)


class _Signals:
    """Handle SIGINT and SIGTERM: the first asks for the end, the second for the end at once."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.at_once = threading.Event()

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._heard) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        (self.at_once if self.stop.is_set() else self.stop).set()


class _Dev:
    """Restart the worker whenever files change."""

    def __init__(self, command: list[str], server: Child, sources: Sources, signals: _Signals, *, grace: float) -> None:
        self._command = command
        self._server = server
        self._sources = sources
        self._signals = signals
        self._grace = grace

    def run(self, interval: float) -> int:
        while True:
            with Child(*self._command, grace=self._grace, at_once=self._signals.at_once) as worker:
                say(f"the worker is process {worker.pid}; {len(self._sources)} files are watched")
                if (code := self._until_next(worker, interval)) is not None:
                    return code

    def _until_next(self, worker: Child, interval: float) -> int | None:
        """Wait until the worker must be restarted (returns None), or until all ends (returns an exit code)."""
        told = False
        while not self._signals.stop.wait(interval):
            if self._server.code is not None:
                say("the server has ended: ending the worker too")
                return FAILED
            if changed := self._sources.changed():
                say(
                    f"{changed[0]} changed"
                    if len(changed) == 1
                    else f"{changed[0]} and {len(changed) - 1} more changed"
                )
                return None
            if worker.code == LOST_EXIT_CODE:  # as after a suspend of the machine: no change of the code is needed
                return None
            if worker.code is not None and not told:
                say(f"the worker has ended with exit code {worker.code}: it starts anew when a file changes")
                told = True
        return 0
