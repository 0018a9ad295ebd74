"""`leasekit relay`: hand tasks on from the outbox in an application's SQLite file."""

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from leasekit.cli import options
from leasekit.cli.errors import fail, spoken
from leasekit.cli.service import connected
from leasekit.sqlite import Relay

EXAMPLES = """\b
The application puts tasks into its own transactions with
leasekit.sqlite.schedule; this command schedules what has been committed.
Any number of relays may serve one file.

\b
Examples:
  leasekit relay app.db
  leasekit relay /var/lib/app/app.db --backend http://tasks:8077
"""


@spoken
def relay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The SQLite file of the application.")],
    *,
    interval: Annotated[float, typer.Option(min=0.01, max=3600, help="Seconds between two looks.")] = 0.1,
    service: options.Service,
) -> None:
    """Schedule what an application has committed to its file.

    The file is an SQLite database, and the command runs until SIGTERM or Ctrl-C.
    """
    if not file.exists():
        fail("relay", f"there is no file {str(file)!r}: name the one of the application")
    over = threading.Event()

    def stop(_signal: int, _frame: FrameType | None) -> None:
        over.set()

    with connected(service, may_create=True) as client:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        with Relay(file, client, interval=interval):
            typer.echo(f"handing tasks on from {file}")
            while not over.wait(1.0):  # in steps: a signal just before a wait without an end would not end it
                pass
