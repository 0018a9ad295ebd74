"""`leasekit stats`: count tasks, for scripts and for people."""

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import typer

from leasekit.cli import options, output
from leasekit.cli.errors import spoken
from leasekit.cli.gates import closed, spoken_of
from leasekit.cli.service import connected
from leasekit.task import Status

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLES = """\b
In a pipe, a line for each kind and status: kind, status, count. What is
paused or dropped is said on stderr.
With --json, one document:
{"kinds": {"thumbnail": {"new": 2, "success": 40}}}

\b
Examples:
  leasekit stats
  leasekit stats --json | jq '.kinds.thumbnail.success'
"""


@spoken
def stats(
    *,
    service: options.Service,
    as_json: options.Json = False,
) -> None:
    """Count the tasks of each kind in each status."""
    with connected(service) as client:
        found, gates = client.stats(), closed(client)
    kinds = found.kinds
    if as_json:
        output.print_json(found)
    elif output.on_terminal():
        output.console().print(counts_table(folded(kinds)) if kinds else "no tasks")
    else:
        for kind, counts in sorted(kinds.items()):
            for status in (name for name in Status if counts.get(name)):
                output.print_line([kind, status, counts[status]])
    for gate in gates:
        typer.echo(f"leasekit stats: {spoken_of(gate)}", err=True)


def folded(kinds: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Return the counts with one kind in place of many that stand for names: `once:celery:*`, or `once:*`."""
    sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for kind, counts in kinds.items():
        sums[re.sub(r"\A(once:(?:[^:]*:)?).*", r"\1*", kind)].update(counts)
    return {kind: dict(counts) for kind, counts in sums.items()}


def counts_table(kinds: dict[str, dict[str, int]]) -> "Table":
    """Return a table with kinds down and statuses across; only those that occur."""
    statuses = [status for status in Status if any(counts.get(status) for counts in kinds.values())]
    shown = output.table("kind")
    for status in statuses:
        shown.add_column(status.replace("_", " "), justify="right", style=output.STYLES.get(status, ""))
    for kind, counts in sorted(kinds.items()):
        cells: list[Any] = [f"{counts.get(status, 0):,}" if counts.get(status) else "·" for status in statuses]
        shown.add_row(output.styled(kind), *cells)
    return shown
