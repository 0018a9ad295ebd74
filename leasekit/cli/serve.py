"""`leasekit serve`: run the companion server."""

import gc
import importlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from leasekit._worker.json_log import TEXT
from leasekit.cli.errors import DAMAGED, fail, sentence
from leasekit.cli.options import with_options
from leasekit.errors import ConfigError, LeasekitError, StoreDamaged

if TYPE_CHECKING:
    from leasekit.server.http.app import Security
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


Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any that is free.")]
Store = Annotated[
    str,
    typer.Option(
        envvar="LEASEKIT_STORE",
        show_envvar=False,
        help="Where tasks are kept: sqlite:///file.db, sqlite:////path/file.db, postgresql://host/database, or "
        "memory:. Ended ones for 30 days, or as long as ?retention=90d behind it says. [LEASEKIT_STORE]",
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The server's certificate (PEM); it is read again when it changes."),
]
TlsKey = Annotated[Path | None, typer.Option(metavar="FILE", help="Its key. Default: in the file of the certificate.")]
TlsClientCa = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Take only clients whose certificates are of these authorities.")
]
BehindProxy = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ADDRESS",
        help="The address or network of the proxy that has TLS in front of this server; several times.",
    ),
]
ServerName = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A name by which clients know this server; several times."),
]
RequireTokens = Annotated[
    bool,
    typer.Option("--require-tokens", help="Need an access token also on loopback, and while the store has none."),
]
Migrate = Annotated[
    bool, typer.Option("--migrate", help="Create or upgrade the tables of a PostgreSQL database first.")
]
Queue = Annotated[
    str | None,
    typer.Option(
        envvar="LEASEKIT_QUEUE",
        show_envvar=False,
        help="Queues to which due tasks are moved, one for each kind and priority: redis://host:6379/0, or "
        "sqs://jobs-{kind}-{priority}?region=eu-west-1. Workers have the same option. [LEASEKIT_QUEUE]",
    ),
]
Console = Annotated[
    Literal["on", "read-only", "off"],
    typer.Option(help="The web console at /console: whether it acts on tasks, or is only looked at, or is not there."),
]
Roles = Annotated[
    str,
    typer.Option(
        help="What this server does, where several share a PostgreSQL database: one or more of frontend (clients "
        "that schedule and ask), hsc (workers) and consumer (leases that end, queues, periodic tasks)."
    ),
]
Check = Annotated[float, typer.Option(min=0, help="Seconds to check that the store is whole; 0: no check.")]


class Protection(NamedTuple):
    """The protection of the server: a command with a parameter of this type has the options for it."""

    tls_cert: Path | None
    tls_key: Path | None
    tls_client_ca: Path | None
    behind_proxy: list[str] | None
    server_name: list[str] | None
    require_tokens: bool

    @staticmethod
    def named_by(
        *,
        tls_cert: TlsCert = None,
        tls_key: TlsKey = None,
        tls_client_ca: TlsClientCa = None,
        behind_proxy: BehindProxy = None,
        server_name: ServerName = None,
        require_tokens: RequireTokens = False,
    ) -> "Protection":
        return Protection(tls_cert, tls_key, tls_client_ca, behind_proxy, server_name, require_tokens)

    def security(self) -> "Security":
        """Return the settings of the server. Raises `ConfigError` for files without a certificate."""
        from leasekit.server.http.app import Security

        return Security(
            tls=_tls_files(self.tls_cert, self.tls_key, self.tls_client_ca),
            require_tokens=self.require_tokens,
            server_names=self.server_name or (),
            behind_proxy=self.behind_proxy or (),
        )


@with_options
def serve(
    host: Host = "127.0.0.1",
    port: Port = 8077,
    store: Store = "sqlite:///leasekit.db",
    *,
    protection: Protection,
    migrate: Migrate = False,
    queue: Queue = None,
    console: Console = "on",
    role: Roles = "frontend,hsc,consumer",
    check: Check = 10,
) -> None:
    """Serve tasks over HTTP until SIGTERM or Ctrl-C."""
    _load_server()
    from leasekit.server.http import process
    from leasekit.server.node_roles import parsed_roles

    logging.basicConfig(level=logging.WARNING, format=TEXT)
    try:
        security, roles = protection.security(), parsed_roles(role)
        process.serve(
            host, port, store, security, migrate=migrate, check=check, queue=queue, console=console, roles=roles
        )
    except StoreDamaged as error:
        fail("serve", sentence(error), DAMAGED)
    except LeasekitError as error:
        fail("serve", sentence(error))


def _load_server() -> None:
    """Import the server: the other commands need neither it nor its libraries. Fails if they are not installed."""
    try:
        gc.disable()  # looking for garbage would take a seventh of this import
        importlib.import_module("leasekit.server.http.process")
    except ModuleNotFoundError as error:
        fail("serve", f"the server needs {error.name!r}: pip install '/path/to/leasekit[server]'")
    finally:
        gc.enable()


def _tls_files(cert: Path | None, key: Path | None, client_ca: Path | None) -> "TlsFiles | None":
    """Return the files for TLS; None: there is none. Raises `ConfigError` for files without a certificate."""
    from leasekit.server.http.reach import TlsFiles

    if cert is not None:
        return TlsFiles(cert=cert, key=key, client_ca=client_ca)
    if key is not None or client_ca is not None:
        raise ConfigError("TLS needs the certificate of the server: give --tls-cert too")
    return None
