"""`leasekit purge`: remove tasks that have ended, before their retention is over."""

from collections import Counter
from typing import Annotated

import typer

from leasekit.cli import options, output
from leasekit.cli.errors import spoken
from leasekit.cli.service import connected
from leasekit.named import PREFIXES
from leasekit.task import Purged, Status, Vacuumed

EXAMPLES = """\b
Without --yes nothing is removed: the command prints what would be. A line for
each kind and status: kind, status, count; a sentence goes to stderr. All
names of `once` are one line. With --json, one document:
{"kinds": {"thumbnail": {"success": 40}}}

\b
Examples:
  leasekit purge --kind thumbnail --older-than 7d
  leasekit purge --status dead --older-than 90d --yes
  leasekit purge --yes --vacuum
"""


Kind = Annotated[str | None, typer.Option("--kind", "-k", help="Only tasks of this kind.")]
EndedAs = Annotated[Status | None, typer.Option("--status", "-s", help="Only tasks that ended like this.")]
OlderThan = Annotated[
    float,
    typer.Option(parser=options.age, metavar="AGE", help="Only tasks that ended so long ago: seconds, 12h or 7d."),
]
Yes = Annotated[bool, typer.Option("--yes", help="Remove them. Without it they are only counted.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only count them, which is the default.")]
Vacuum = Annotated[
    bool, typer.Option("--vacuum", help="Then give free space of the file back to the disk (not on Redis).")
]


@spoken
def purge(
    *,
    kind: Kind = None,
    status: EndedAs = None,
    older_than: OlderThan = "0",  # type: ignore[assignment]  # typer parses it
    yes: Yes = False,
    dry_run: DryRun = False,
    vacuum: Vacuum = False,
    service: options.Service,
    as_json: options.Json = False,
) -> None:
    """Remove tasks that have ended, with their results and history.

    Tasks that wait or run are never removed. Age counts from a task's end. The service removes a few tasks at a time,
    so heartbeats and claims go on meanwhile. Ids, dedupe keys and `once` names of removed tasks are free again.
    """
    if status is not None and not status.ended:
        raise typer.BadParameter(f"a task that is {status} has not ended: it cannot be purged", param_hint="--status")
    if dry_run and yes:
        raise typer.BadParameter("it contradicts --yes", param_hint="--dry-run")
    if vacuum and not yes:
        raise typer.BadParameter("it goes with --yes", param_hint="--vacuum")
    with connected(service) as client:
        purged = client.purge(kind=kind, status=status, older_than=older_than, dry_run=not yes)
        print_purged(purged, as_json=as_json, removed=yes)
        if vacuum:
            _print_space(client.vacuum())


def _print_space(space: Vacuumed) -> None:
    """Print how much smaller the file of a store has become."""
    left = f"; {space.left:,} bytes are still free in it" if space.left else ""
    now = f"is {space.freed:,} bytes smaller" if space.freed else "keeps its size: no space was given back"
    typer.echo(f"leasekit purge: the file {now}{left}", err=True)


def print_purged(purged: Purged, *, as_json: bool, removed: bool, command: str = "purge") -> None:
    """Print how many tasks of each kind and status were removed, or would be."""
    if as_json:
        output.print_json(purged)
    else:
        for (kind, status), count in sorted(_lines(purged).items()):
            output.print_line([kind, status, count])
    total = sum(sum(counts.values()) for counts in purged.kinds.values())
    tasks = f"{total:,} task{'s' * (total != 1)}"
    said = f"{tasks} removed" if removed else f"{tasks} would be removed" + ": --yes removes them" * bool(total)
    typer.echo(f"leasekit {command}: {said}", err=True)


def _lines(purged: Purged) -> Counter[tuple[str, str]]:
    """Sum up the counts of each kind and status; every name of a `once` is a kind, and they are summed up together."""
    lines = Counter[tuple[str, str]]()
    for kind, counts in purged.kinds.items():
        prefix = next((prefix for prefix in PREFIXES if kind.startswith(prefix)), None)
        for status, count in counts.items():
            lines[kind if prefix is None else f"{prefix}*", status] += count
    return lines
