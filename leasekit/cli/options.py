"""Options that several commands share, and what they mean."""

from dataclasses import replace
from typing import Annotated

import typer

from leasekit.config import Beats

__all__ = ["DEFAULT_URL", "Backend", "Batch", "Cycle", "Interval", "Json", "Rate", "Ttl", "Watch", "beats", "rhythm"]

DEFAULT_URL = "http://127.0.0.1:8077"

Backend = Annotated[
    str, typer.Option("--backend", "-b", envvar="LEASEKIT_URL", help="URL of the service that has the tasks.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Look again and again, and show what changes.")]
Interval = Annotated[float, typer.Option(min=0.05, max=3600, help="Seconds between two looks.")]
Ttl = Annotated[float | None, typer.Option(help="Seconds for which the service grants a lease.")]
Cycle = Annotated[float | None, typer.Option(help="Seconds in which every lease beats once.")]
Rate = Annotated[float | None, typer.Option(help="Calls for heartbeats a second, at most.")]
Batch = Annotated[int | None, typer.Option(help="Leases in one such call, at most.")]


def beats(*, ttl: float | None, cycle: float | None, rate: float | None, batch: int | None) -> Beats:
    """The rhythm that these options ask for. Raises `ConfigError` where they contradict one another."""
    asked = {name: value for name, value in (("cycle", cycle), ("rate", rate), ("batch", batch)) if value is not None}
    return replace(Beats() if ttl is None else Beats().for_ttl(ttl), **asked)  # type: ignore[arg-type]


def rhythm(*, ttl: float | None, cycle: float | None, rate: float | None, batch: int | None) -> Beats | None:
    """`beats`, or None where none of the options is given."""
    if ttl is cycle is rate is batch is None:
        return None
    return beats(ttl=ttl, cycle=cycle, rate=rate, batch=batch)
