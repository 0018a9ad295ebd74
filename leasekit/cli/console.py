"""`leasekit console`: open the web console of a store that has no server."""

import logging
from typing import Annotated

import typer

from leasekit._worker.json_log import TEXT
from leasekit.cli.errors import fail, sentence
from leasekit.errors import LeasekitError

EXAMPLES = """\b
Prints its address when it is ready, and answers this machine only. If
another process has the file open, its console is shown.
A server has its own console: leasekit serve, at /console.

\b
Examples:
  leasekit console sqlite:///tasks.db
  leasekit console postgresql://host/database --read-only
"""


def console(
    store: Annotated[
        str,
        typer.Argument(metavar="STORE", help="sqlite:///file.db, sqlite:////path/file.db, or postgresql://host/db."),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any that is free.")] = 8078,
    read_only: Annotated[  # noqa: FBT002 - a flag for typer
        bool, typer.Option("--read-only", help="Change nothing.")
    ] = False,
) -> None:
    """Open the web console of a store without a server, until Ctrl-C."""
    try:
        from leasekit.server.console.alone import serve
    except ModuleNotFoundError as error:
        fail("console", f"the console needs {error.name!r}: pip install '/path/to/leasekit[server]'")
    logging.basicConfig(level=logging.WARNING, format=TEXT)
    try:
        serve(store, port=port, mode="read-only" if read_only else "on")
    except LeasekitError as error:
        fail("console", sentence(error))
