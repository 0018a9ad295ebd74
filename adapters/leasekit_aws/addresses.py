"""The options that the URLs of the AWS adapters share: `?region=…&endpoint=…&ttl=…`."""

import math
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from leasekit.errors import ConfigError

__all__ = ["Options", "options"]

_KNOWN = ("region", "endpoint", "ttl")
_SHORTEST, _LONGEST = 2.0, 365 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The place of a service and the ttl of its leases. None: boto3 finds the value (environment, `~/.aws/config`)."""

    region: str | None = None
    endpoint: str | None = None
    ttl: float = 300.0


def options(query: str) -> Options:
    """Parse the options in the query of a URL.

    Raises `ConfigError` for an option that is unknown, given twice or invalid; the message never contains its value.
    """
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=10)
    except ValueError:
        raise ConfigError(f"the query of the URL must be name=value&…, with {', '.join(_KNOWN)}") from None
    found = dict(pairs)
    if unknown := sorted(set(found) - set(_KNOWN)):
        raise ConfigError(f"unknown option {unknown[0]!r} in the URL: known are {', '.join(_KNOWN)}")
    if len(found) != len(pairs):
        raise ConfigError("an option of the URL is given twice: give each option once")
    if not all(found.values()):
        raise ConfigError("an option of the URL is empty: leave it out, or give it a value")
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
        raise ConfigError("endpoint must be an address: endpoint=http://host:port or endpoint=https://host")
    return url


def _ttl(text: str | None) -> float:
    try:
        ttl = 300.0 if text is None else float(text)
    except ValueError:
        ttl = math.nan
    if not _SHORTEST <= ttl <= _LONGEST:
        raise ConfigError(f"ttl must be the heartbeat timeout of the task: seconds, {_SHORTEST:g} or more")
    return ttl
