"""The options in the URLs of the AWS adapters: `?region=…&endpoint=…&ttl=…`, and those of one adapter alone."""

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

from leasekit.errors import ConfigError

_SHARED = ("region", "endpoint", "ttl")
SHORTEST_TTL, LONGEST_TTL = 2.0, 365 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The place of a service and the ttl of its leases. None: boto3 finds the value (environment, `~/.aws/config`)."""

    region: str | None = None
    endpoint: str | None = None
    ttl: float = 300.0
    more: dict[str, str] = field(default_factory=dict[str, str])  # the options of one adapter alone


def options(query: str, *more: str, has_ttl: bool = True) -> Options:
    """Parse a URL's options; `more` are those of one adapter. Raises `ConfigError`, which never contains a value."""
    known = (*(name for name in _SHARED if has_ttl or name != "ttl"), *more)
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=20)
    except ValueError:
        raise ConfigError(f"the query of the URL must be name=value&…, with {', '.join(known)}") from None
    found = dict(pairs)
    if unknown := sorted(set(found) - set(known)):
        raise ConfigError(f"unknown option {unknown[0]!r} in the URL: known are {', '.join(known)}")
    for name, value in pairs:
        if [other for other, _ in pairs].count(name) > 1:
            raise ConfigError(f"the option {name!r} of the URL is given twice: give it once")
        if not value:
            raise ConfigError(f"the option {name!r} of the URL is empty: leave it out, or give it a value")
    return Options(
        region=found.pop("region", None),
        endpoint=_endpoint(found.pop("endpoint", None)),
        ttl=_ttl(found.pop("ttl", None)),
        more=found,
    )


def _endpoint(url: str | None) -> str | None:
    if url is None:
        return None
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError("endpoint must be an address: endpoint=http://host:port or endpoint=https://host")
    return url


def _ttl(text: str | None) -> float:
    if text is None:
        return 300.0
    if not re.fullmatch(r"\d{1,8}(\.\d{1,6})?", text, re.ASCII) or not SHORTEST_TTL <= float(text) <= LONGEST_TTL:
        bounds = f"from {SHORTEST_TTL:g} to {LONGEST_TTL:,.0f}"
        raise ConfigError(f"ttl in the URL must be a number of seconds {bounds}: the heartbeat timeout of the tasks")
    return float(text)
