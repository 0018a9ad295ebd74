"""`leasekit serve`: the companion server as a process."""

from typing import Annotated, NoReturn

import typer

from leasekit.errors import LeasekitError

__all__ = ["serve"]


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any that is free.")] = 8077,
    store: Annotated[str, typer.Option(help="Where tasks are kept.")] = "sqlite:///leasekit.db",
    insecure: Annotated[  # noqa: FBT002 - a flag to typer, a keyword to others
        bool, typer.Option("--insecure", help="Serve other machines too, without authentication or TLS.")
    ] = False,
) -> None:
    """Serve tasks over HTTP until SIGTERM or Ctrl-C."""
    try:
        # Here, not above: the other commands need neither the server nor its libraries.
        from leasekit.server import app
    except ModuleNotFoundError as error:
        _refuse(f"the server needs {error.name!r}: pip install 'leasekit[server]'", error)
    try:
        app.serve(host, port, store, insecure=insecure)
    except LeasekitError as error:
        _refuse(str(error), error)


def _refuse(sentence: str, cause: Exception) -> NoReturn:
    typer.echo(f"leasekit serve: {sentence}", err=True)
    raise typer.Exit(1) from cause
