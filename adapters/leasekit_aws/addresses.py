"""What the URLs of the adapters have in common: `?region=…&endpoint=…&ttl=…`."""

import math
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from leasekit.errors import ConfigError

__all__ = ["Options", "options"]

_KNOWN = ("region", "endpoint", "ttl")
_SHORTEST, _LONGEST = 2.0, 365 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Where a service is, and what its leases last. None: as boto3 finds out (environment, `~/.aws/config`)."""

    region: str | None = None
    endpoint: str | None = None
    ttl: float = 300.0


def options(query: str) -> Options:
    """The options in the query of a URL.

    Raises `ConfigError` for one that is unknown, said twice or makes no sense; the message does not repeat its value.
    """
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=10)
    except ValueError:
        raise ConfigError(f"the query of this URL is not name=value&…: it may have {', '.join(_KNOWN)}") from None
    found = dict(pairs)
    if unknown := sorted(set(found) - set(_KNOWN)):
        raise ConfigError(f"this URL has no option {unknown[0]!r}: there are {', '.join(_KNOWN)}")
    if len(found) != len(pairs):
        raise ConfigError("an option is in this URL twice")
    if not all(found.values()):
        raise ConfigError("an option of this URL is empty: leave it out")
    return Options(region=found.get("region"), endpoint=_endpoint(found.get("endpoint")), ttl=_ttl(found.get("ttl")))


def _endpoint(url: str | None) -> str | None:
    if url is None:
        return None
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError("the endpoint is an address of its own: endpoint=http://host:port or https://host")
    return url


def _ttl(text: str | None) -> float:
    try:
        ttl = 300.0 if text is None else float(text)
    except ValueError:
        ttl = math.nan
    if not _SHORTEST <= ttl <= _LONGEST:
        raise ConfigError(f"ttl is the heartbeat timeout that the task has: seconds, {_SHORTEST:g} or more")
    return ttl
