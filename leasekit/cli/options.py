"""Options that several commands share, and their meaning."""

from dataclasses import replace
from typing import Annotated

import typer

from leasekit.config import Heartbeats

DEFAULT_URL = "http://127.0.0.1:8077"

Backend = Annotated[
    str, typer.Option("--backend", "-b", envvar="LEASEKIT_URL", help="URL of the service that has the tasks.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Check again and again, and show what changes.")]
Interval = Annotated[float, typer.Option(min=0.05, max=3600, help="Seconds between two checks.")]
Ttl = Annotated[float | None, typer.Option(help="Seconds for which the service grants a lease.")]
Cycle = Annotated[float | None, typer.Option(help="Seconds in which every lease is renewed once.")]
Rate = Annotated[float | None, typer.Option(help="Heartbeat calls a second, at most.")]
Batch = Annotated[int | None, typer.Option(help="Leases in one such call, at most.")]


def heartbeats(*, ttl: float | None, cycle: float | None, rate: float | None, batch: int | None) -> Heartbeats:
    """Return the heartbeat settings of these options. Raises `ConfigError` if they contradict one another."""
    asked = {name: value for name, value in (("cycle", cycle), ("rate", rate), ("batch", batch)) if value is not None}
    return replace(Heartbeats() if ttl is None else Heartbeats().for_ttl(ttl), **asked)  # type: ignore[arg-type]


def rhythm(*, ttl: float | None, cycle: float | None, rate: float | None, batch: int | None) -> Heartbeats | None:
    """Return what `heartbeats` returns, or None if none of the options is given."""
    if ttl is cycle is rate is batch is None:
        return None
    return heartbeats(ttl=ttl, cycle=cycle, rate=rate, batch=batch)
