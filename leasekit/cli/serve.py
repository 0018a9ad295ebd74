"""`leasekit serve`: run the companion server."""

import gc
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from leasekit._worker.json_log import TEXT
from leasekit.cli.errors import DAMAGED, fail, sentence
from leasekit.errors import ConfigError, LeasekitError, StoreDamaged

if TYPE_CHECKING:
    from leasekit.server.http.reach import TlsFiles

EXAMPLES = """\b
Prints its address when it is ready.
Exit code 1 if the address or the store cannot be opened,
65 if the store is damaged.

\b
Examples:
  leasekit serve
  leasekit serve --host 0.0.0.0 --tls-cert server.pem
  leasekit serve --port 0 --store sqlite:////var/lib/leasekit/tasks.db
  leasekit serve --store postgresql://db/tasks --role frontend,hsc
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
    tls_cert: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The server's certificate (PEM); it is read again when it changes."),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its key. Default: in the file of the certificate.")
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take only clients whose certificates are of these authorities."),
    ] = None,
    behind_proxy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="The address or network of the proxy that has TLS in front of this server; several times.",
        ),
    ] = None,
    server_name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name by which clients know this server; several times."),
    ] = None,
    require_tokens: Annotated[  # noqa: FBT002 - a flag for typer, a keyword for other callers
        bool,
        typer.Option("--require-tokens", help="Need an access token also on loopback, and while the store has none."),
    ] = False,
    migrate: Annotated[  # noqa: FBT002 - as above
        bool, typer.Option("--migrate", help="Create or upgrade the tables of a PostgreSQL database first.")
    ] = False,
    queue: Annotated[
        str | None,
        typer.Option(
            envvar="LEASEKIT_QUEUE",
            show_envvar=False,
            help="Queues to which due tasks are moved, one for each kind and priority: redis://host:6379/0, or "
            "sqs://jobs-{kind}-{priority}?region=eu-west-1. Workers have the same option. [LEASEKIT_QUEUE]",
        ),
    ] = None,
    console: Annotated[
        Literal["on", "read-only", "off"],
        typer.Option(
            help="The web console at /console: whether it acts on tasks, or is only looked at, or is not there."
        ),
    ] = "on",
    role: Annotated[
        str,
        typer.Option(
            help="What this server does, where several share a PostgreSQL database: one or more of frontend (clients "
            "that schedule and ask), hsc (workers) and consumer (leases that end, queues, periodic tasks)."
        ),
    ] = "frontend,hsc,consumer",
    check: Annotated[float, typer.Option(min=0, help="Seconds to check that the store is whole; 0: no check.")] = 10,
) -> None:
    """Serve tasks over HTTP until SIGTERM or Ctrl-C."""
    try:
        gc.disable()  # looking for garbage would take a seventh of this import
        # Imported here, because the other commands need neither the server nor its libraries.
        from leasekit.server.http import app, process
        from leasekit.server.node_roles import parsed_roles
    except ModuleNotFoundError as error:
        fail("serve", f"the server needs {error.name!r}: pip install '/path/to/leasekit[server]'")
    finally:
        gc.enable()
    logging.basicConfig(level=logging.WARNING, format=TEXT)
    try:
        security = app.Security(
            tls=_tls_files(tls_cert, tls_key, tls_client_ca),
            require_tokens=require_tokens,
            server_names=server_name or (),
            behind_proxy=behind_proxy or (),
        )
        process.serve(
            *(host, port, store),
            security=security,
            migrate=migrate,
            check=check,
            queue=queue,
            console=console,
            roles=parsed_roles(role),
        )
    except StoreDamaged as error:
        fail("serve", sentence(error), DAMAGED)
    except LeasekitError as error:
        fail("serve", sentence(error))


def _tls_files(cert: Path | None, key: Path | None, client_ca: Path | None) -> "TlsFiles | None":
    """Return the files for TLS; None: there is none. Raises `ConfigError` for files without a certificate."""
    from leasekit.server.http.reach import TlsFiles

    if cert is not None:
        return TlsFiles(cert=cert, key=key, client_ca=client_ca)
    if key is not None or client_ca is not None:
        raise ConfigError("TLS needs the certificate of the server: give --tls-cert too")
    return None
