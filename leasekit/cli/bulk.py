"""The dry run of a command that changes all tasks that match, and the token that the act takes."""

from typing import Annotated

import typer

from leasekit.cli import output
from leasekit.cli.selection import Wanted
from leasekit.errors import ConfigError
from leasekit.task import Matched

DryRun = Annotated[bool, typer.Option("--dry-run", help="With filters: count the tasks, and print the token.")]
Token = Annotated[str | None, typer.Option(help="With filters: change the tasks that the dry run has counted.")]


def is_bulk(command: str, ids: list[str], wanted: Wanted, *, dry_run: bool, token: str | None) -> bool:
    """Return whether a command is for the tasks that match. Raises for what contradicts itself."""
    if bool(ids) is bool(wanted):
        raise ConfigError("name tasks, or select them by --kind, --status or another filter")
    if ids and (dry_run or token is not None):
        raise typer.BadParameter("it goes with filters", param_hint="--dry-run, --token")
    if wanted and dry_run is (token is not None):
        raise ConfigError(f"count the tasks first: leasekit {command} … --dry-run prints the --token of the act")
    return bool(wanted)


def print_matched(matched: Matched, command: str, wanted: Wanted, *, as_json: bool, is_dry: bool) -> None:
    """Print how many tasks were changed, or would be; without any, say so on standard error."""
    if not matched.kinds:
        typer.echo(f"leasekit {command}: no task that can be changed matches ({wanted})", err=True)
    if as_json:
        output.print_json(matched)
        return
    for kind, statuses in sorted(matched.kinds.items()):
        for status, count in sorted(statuses.items()):
            output.print_line([kind, status, str(count)])
    if is_dry:
        output.print_line(["token", matched.token])
