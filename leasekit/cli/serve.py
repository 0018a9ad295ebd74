"""`leasekit serve`: run the companion server."""

import gc
import logging
from typing import Annotated

import typer

from leasekit._worker.json_log import TEXT
from leasekit.cli.errors import DAMAGED, fail, sentence
from leasekit.errors import LeasekitError, StoreDamaged

EXAMPLES = """\b
Prints its address when it is ready.
Exit code 1 if the address or the store cannot be opened,
65 if the store is damaged.

\b
Examples:
  leasekit serve
  leasekit serve --port 0 --store sqlite:////var/lib/leasekit/tasks.db
"""


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any that is free.")] = 8077,
    store: Annotated[
        str,
        typer.Option(
            envvar="LEASEKIT_STORE",
            show_envvar=False,
            help="Where tasks are kept: sqlite:///file.db, sqlite:////path/file.db, postgresql://host/database, or "
            "memory:. Ended ones for 30 days, or as long as ?retention=90d behind it says. [LEASEKIT_STORE]",
        ),
    ] = "sqlite:///leasekit.db",
    insecure: Annotated[  # noqa: FBT002 - a flag for typer, a keyword for other callers
        bool, typer.Option("--insecure", help="Serve other machines too, without authentication or TLS.")
    ] = False,
    migrate: Annotated[  # noqa: FBT002 - as above
        bool, typer.Option("--migrate", help="Create or upgrade the tables of a PostgreSQL database first.")
    ] = False,
    check: Annotated[float, typer.Option(min=0, help="Seconds to check that the store is whole; 0: no check.")] = 10,
) -> None:
    """Serve tasks over HTTP until SIGTERM or Ctrl-C."""
    try:
        gc.disable()  # looking for garbage would take a seventh of this import
        # Imported here, because the other commands need neither the server nor its libraries.
        from leasekit.server.http import app
    except ModuleNotFoundError as error:
        fail("serve", f"the server needs {error.name!r}: pip install '/path/to/leasekit[server]'")
    finally:
        gc.enable()
    logging.basicConfig(level=logging.WARNING, format=TEXT)
    try:
        app.serve(host, port, store, insecure=insecure, migrate=migrate, check=check)
    except StoreDamaged as error:
        fail("serve", sentence(error), DAMAGED)
    except LeasekitError as error:
        fail("serve", sentence(error))
