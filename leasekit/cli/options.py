"""Options that several commands share, and their meaning."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, NamedTuple

import typer

from leasekit.client import ServiceOptions
from leasekit.config import Heartbeats, duration
from leasekit.errors import ConfigError
from leasekit.tokens import read_secret

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
TokenFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="A file with the access token. Or see LEASEKIT_TOKEN. [LEASEKIT_TOKEN_FILE]",
    ),
]
Cert = Annotated[str | None, typer.Option(metavar="FILE", help="A certificate of this client, and its key.")]
PlainHttp = Annotated[
    bool, typer.Option("--plain-http", help="Send the token over http:// to another machine, for all to read.")
]
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


def instant(text: str) -> datetime:
    """Return the instant that a text means, for an option's `parser`."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not an RFC 3339 time: write 2026-12-24T18:00:00Z") from None
    if at.tzinfo is None:
        raise typer.BadParameter(f"{text!r} has no time zone: add Z, or an offset such as +01:00")
    return at


class Service(NamedTuple):
    """The service that a command uses: a command with a parameter `service` has the options that say which, and how."""

    url: str
    options: ServiceOptions

    @staticmethod
    def named_by(
        *,
        backend: Backend = DEFAULT_URL,
        token_file: TokenFile = None,
        header: Header = None,
        ca: Ca = None,
        cert: Cert = None,
        proxy: Proxy = None,
        plain_http: PlainHttp = False,
    ) -> "Service":
        options = service(header, ca, proxy)
        token = None if token_file is None else read_secret(token_file)
        more: ServiceOptions = {"token": token, "cert": cert, "plain_http": plain_http or None}
        return Service(backend, {**options, **more})


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, in the place of a parameter whose type has `named_by`, the options which that takes."""
    taken = inspect.signature(command).parameters
    groups = {name: each.annotation for name, each in taken.items() if hasattr(each.annotation, "named_by")}
    if not groups:
        return command
    options = {name: inspect.signature(group.named_by).parameters for name, group in groups.items()}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group.named_by(**{option: given.pop(option) for option in options[name]})
        command(**given)

    shown = [one for name, each in taken.items() for one in (options[name].values() if name in groups else [each])]
    shown = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in shown]
    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in shown}
    return run


def labels(given: Sequence[str] | None) -> dict[str, str]:
    """Return the labels that NAME=VALUE options give. Raises `BadParameter` for one without a value."""
    for label in given or ():
        if "=" not in label:
            raise typer.BadParameter(f"{label!r} is not NAME=VALUE", param_hint="--label")
    return dict(label.split("=", 1) for label in given or ())


def service(header: Sequence[str] | None, ca: str | None, proxy: str | None) -> ServiceOptions:
    """Return the options of the service's backend that are given. Raises `ConfigError` for a header without a name."""
    headers: dict[str, str] = {}
    for line in header or ():
        name, colon, value = line.partition(":")
        if not colon:
            raise ConfigError("--header must have the form 'Name: value'")
        headers[name.strip()] = value.strip()
    return {"headers": headers or None, "ca": ca, "proxy": proxy}


class Rhythm(NamedTuple):
    """The heartbeat settings of a command: one with a parameter of this type has the options that say them."""

    ttl: float | None
    cycle: float | None
    rate: float | None
    batch: int | None

    @staticmethod
    def named_by(*, ttl: Ttl = None, cycle: Cycle = None, rate: Rate = None, batch: Batch = None) -> "Rhythm":
        return Rhythm(ttl, cycle, rate, batch)

    @property
    def is_given(self) -> bool:
        """Whether any of the options is given."""
        return any(value is not None for value in self)

    def heartbeats(self) -> Heartbeats:
        """Return the settings. Raises `ConfigError` if the options contradict one another."""
        settings = Heartbeats() if self.ttl is None else Heartbeats().for_ttl(self.ttl)
        asked = {name: value for name, value in self._asdict().items() if name != "ttl" and value is not None}
        return replace(settings, **asked)
