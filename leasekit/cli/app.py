"""All commands, put together."""

from importlib.metadata import version
from typing import Annotated

import typer

from leasekit.cli.budget import budget
from leasekit.cli.demo import demo
from leasekit.cli.schedule import schedule
from leasekit.cli.serve import serve
from leasekit.cli.status import status
from leasekit.cli.work import work

__all__ = ["app"]

app = typer.Typer(
    name="leasekit",
    help="The keeper of leases for long-running work.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:  # noqa: FBT001 - typer calls it so
    if wanted:
        typer.echo(f"leasekit {version('leasekit')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for command in (serve, work, schedule, status, budget, demo):
    app.command()(command)
