"""`leasekit stats`: count tasks, for scripts and for people."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from leasekit.cli import options, output
from leasekit.cli.errors import spoken
from leasekit.cli.gates import closed, spoken_of
from leasekit.cli.service import connected
from leasekit.cli.workers import no_worker
from leasekit.task import Status

if TYPE_CHECKING:
    from rich.table import Table

_MOST_LINES = 10
EXAMPLES = """\b
In a pipe, a line for each kind and status: kind, status, count. What is
paused or dropped, and for which due tasks no worker is known, is said on
stderr.
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
    for line in unmet_lines(found.unmet):
        typer.echo(f"leasekit stats: {line}", err=True)
    for gate in gates:
        typer.echo(f"leasekit stats: {spoken_of(gate)}", err=True)


def unmet_lines(unmet: Mapping[str, Sequence[Mapping[str, str]]]) -> list[str]:
    """Return a sentence for each set of labels that due tasks require and no known worker has, for some of many."""
    sets = [(kind, requires) for kind, each in sorted(unmet.items()) for requires in each]
    lines = [f"due tasks wait: {no_worker(kind, requires)}" for kind, requires in sets[:_MOST_LINES]]
    left = len(sets) - _MOST_LINES
    return [*lines, f"and {left:,} more: see --json"] if left > 0 else lines


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
