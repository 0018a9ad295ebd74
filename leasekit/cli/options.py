"""Options that several commands share, and their meaning."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from leasekit.client import ServiceOptions
from leasekit.config import Heartbeats, duration
from leasekit.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8077"

Backend = Annotated[
    str, typer.Option("--backend", "-b", envvar="LEASEKIT_URL", help="URL of the service that has the tasks.")
]
Header = Annotated[
    list[str] | None,
    typer.Option(
        metavar="'NAME: VALUE'", help="Send this header with each request. Secret ones: see LEASEKIT_HEADERS."
    ),
]
Ca = Annotated[
    str | None, typer.Option(metavar="FILE", help="Certificates to trust in place of the public authorities.")
]
Proxy = Annotated[str | None, typer.Option(metavar="URL", help="The proxy that leads to the service.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Check again and again, and show what changes.")]
Interval = Annotated[float, typer.Option(min=0.05, max=3600, help="Seconds between two checks.")]
Ttl = Annotated[
    float | None,
    typer.Option(
        help="Seconds for which a lease is expected to be granted: cycle and margins fit them. Timeouts of a task win."
    ),
]
Cycle = Annotated[float | None, typer.Option(help="Seconds in which every lease is renewed once.")]
Rate = Annotated[float | None, typer.Option(help="Heartbeat calls a second, at most.")]
Batch = Annotated[int | None, typer.Option(help="Leases in one such call, at most.")]


def age(text: str) -> float:
    """Return the seconds that an age such as 12h means, for an option's `parser`."""
    try:
        return duration("the age", text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def service(header: Sequence[str] | None, ca: str | None, proxy: str | None) -> ServiceOptions:
    """Return the options of the service's backend that are given. Raises `ConfigError` for a header without a name."""
    headers: dict[str, str] = {}
    for line in header or ():
        name, colon, value = line.partition(":")
        if not colon:
            raise ConfigError("--header must have the form 'Name: value'")
        headers[name.strip()] = value.strip()
    return {"headers": headers or None, "ca": ca, "proxy": proxy}


def heartbeats(*, ttl: float | None, cycle: float | None, rate: float | None, batch: int | None) -> Heartbeats:
    """Return the heartbeat settings of these options. Raises `ConfigError` if they contradict one another."""
    asked = {name: value for name, value in (("cycle", cycle), ("rate", rate), ("batch", batch)) if value is not None}
    return replace(Heartbeats() if ttl is None else Heartbeats().for_ttl(ttl), **asked)  # type: ignore[arg-type]


def rhythm(*, ttl: float | None, cycle: float | None, rate: float | None, batch: int | None) -> Heartbeats | None:
    """Return what `heartbeats` returns, or None if none of the options is given."""
    if ttl is cycle is rate is batch is None:
        return None
    return heartbeats(ttl=ttl, cycle=cycle, rate=rate, batch=batch)
