"""`leasekit budget`: how the seconds of a lease add up."""

import typer

from leasekit.cli import options

__all__ = ["budget"]


def budget(
    ttl: options.Ttl = None, cycle: options.Cycle = None, rate: options.Rate = None, batch: options.Batch = None
) -> None:
    """Print how long a lease may be believed in, how many can be held, and which outage they survive.

    Numbers that contradict one another are refused, with the one to change.
    """
    typer.echo(options.beats(ttl=ttl, cycle=cycle, rate=rate, batch=batch).budget())
