"""`leasekit pause`: do not start the tasks of a kind or a collection for now."""

import typer

from leasekit.cli import options, output
from leasekit.cli.errors import spoken
from leasekit.cli.gates import Collection, For, Kind, Reason, Until, gated, spoken_of, until_of
from leasekit.cli.service import connected

EXAMPLES = """\b
'leasekit gates' lists what is paused, 'leasekit open' ends it.
Prints a sentence to stderr; with --json, the gate as a JSON line.

\b
Examples:
  leasekit pause report --for 2h --reason "the printer is on fire"
  leasekit pause --collection tenant-7
"""


@spoken
def pause(
    kind: Kind = None,
    *,
    collection: Collection = None,
    after: For = None,
    until: Until = None,
    reason: Reason = None,
    service: options.Service,
    as_json: options.Json = False,
) -> None:
    """Have the tasks of a kind or a collection wait.

    Tasks that run are left alone: 'leasekit cancel' ends them. Others go on being accepted, keep their order, and spend
    no attempt.
    """
    what, opens = gated(kind, collection), until_of(after, until)
    with connected(service) as client:
        gate = client.pause(kind=what.kind, collection=what.collection, until=opens, reason=reason)
    if as_json:
        output.print_json(gate)
    typer.echo(f"leasekit pause: {spoken_of(gate)}", err=True)
