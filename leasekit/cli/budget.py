"""`leasekit budget`: how the seconds of a lease add up."""

from dataclasses import asdict

import typer

from leasekit.cli import options, output
from leasekit.cli.errors import spoken

EXAMPLES = """\b
Examples:
  leasekit budget
  leasekit budget --ttl 30 --cycle 5
  leasekit budget --ttl 300 --cycle 180     (refused: says why)
"""


@spoken
def budget(
    *,
    rhythm: options.Rhythm,
    as_json: options.Json = False,
) -> None:
    """Print how the seconds of a lease add up.

    That is: how long it may be relied on, how many can be held, and which outage they survive. Options that are not
    given follow from the others; without any option leasekit's defaults are shown. Numbers that contradict one another
    are refused, with the one to change.
    """
    heartbeats = rhythm.heartbeats()
    if as_json:
        sums = {name: getattr(heartbeats, name) for name in ("trust", "slack", "capacity", "outage_survived")}
        output.print_json(asdict(heartbeats) | sums)
    else:
        typer.echo(heartbeats.budget())
