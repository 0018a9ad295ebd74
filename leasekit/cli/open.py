"""`leasekit open`: start the tasks of a kind or a collection again."""

import typer

from leasekit.cli import options, output
from leasekit.cli.errors import spoken
from leasekit.cli.gates import Collection, Kind, gated
from leasekit.cli.service import connected

EXAMPLES = """\b
Prints a sentence to stderr. What is open already stays so.

\b
Examples:
  leasekit open report
  leasekit open --collection tenant-7
"""


@spoken
def open(  # noqa: A001 - the name of the command
    kind: Kind = None,
    *,
    collection: Collection = None,
    service: options.Service,
) -> None:
    """Start the tasks of a paused kind or collection again."""
    what = gated(kind, collection)
    with connected(service) as client:
        client.open(kind=what.kind, collection=what.collection)
    typer.echo(output.plain(f"leasekit open: {what} is open"), err=True)
