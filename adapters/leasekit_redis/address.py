"""The URL of a Redis: which server or cluster, and how tasks are kept there.

`redis://user:password@host:6379/0`, `rediss://…` (TLS), `redis+cluster://host:7000,host:7001`. Options: `prefix` (of
all keys; default `leasekit`), `retention` (how long ended tasks are kept: seconds, or `180d`, `12h`, `30m`; default
`180d`), and, for a cluster, `tls=true`. With TLS, by the names that redis-py and Celery give them: `ssl_ca_certs`,
`ssl_certfile`, `ssl_keyfile` (paths of files), `ssl_cert_reqs` (`required`, or `none`: any server is accepted).
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from leasekit.errors import ConfigError

_PORT = 6379
_RETENTION = 180 * 86400.0  # 180 days, for which ended tasks are kept
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)([smhd]?)", re.ASCII)
_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_TLS_OPTIONS = (*_TLS_FILES, "ssl_cert_reqs")
_AFTER_AUTHORITY = re.compile(r"[/?#]")
_FORM = "the URL of a Redis must be redis://host:6379/0, rediss://… (TLS), or redis+cluster://host:7000,host:7001"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of one Redis, or of one cluster by some of its nodes."""

    hosts: tuple[tuple[str, int], ...]
    is_cluster: bool
    tls: bool
    tls_options: dict[str, str] = field(default_factory=dict[str, str])  # as redis-py takes them
    username: str | None = None
    password: str | None = None
    db: int = 0
    prefix: str = "leasekit"
    retention: float = _RETENTION  # seconds

    def __str__(self) -> str:
        """Return the hosts for messages, without user and password."""
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"Redis at {hosts}"

    def __repr__(self) -> str:
        return f"<{self}>"


def parse(url: str) -> Address:
    """Parse the URL of a Redis. Raises `ConfigError`; its message never contains the URL, which may hold a password."""
    scheme, _, rest = url.partition("://")
    if scheme not in {"redis", "rediss", "redis+cluster"}:
        raise ConfigError(_FORM)
    # Split by hand, because not every version of Python splits an authority of several hosts.
    netloc = _AFTER_AUTHORITY.split(rest, maxsplit=1)[0]
    parts = urlsplit(rest.removeprefix(netloc))
    if parts.fragment:
        raise ConfigError("the URL of a Redis has no fragment: write # in a password as %23")
    user, _, authority = netloc.rpartition("@")
    username, has_password, password = user.partition(":")
    hosts = tuple(_host(part) for part in authority.split(","))
    is_cluster = scheme == "redis+cluster"
    if len(hosts) > 1 and not is_cluster:
        raise ConfigError("only a cluster has several hosts: write redis+cluster://…, or give one host")
    options = _options(parts.query)
    tls = scheme == "rediss" or (is_cluster and _take_tls(options))
    address = Address(
        hosts=hosts,
        is_cluster=is_cluster,
        tls=tls,
        tls_options=_take_tls_options(options, tls=tls),
        username=unquote(username) or None,
        password=unquote(password) if has_password else None,
        db=_db(parts.path, is_cluster=is_cluster),
        prefix=_prefix(options.pop("prefix", "leasekit")),
        retention=_retention_seconds(options.pop("retention", "180d")),
    )
    if options:
        # Only the names of options, because their values may be secrets.
        raise ConfigError(
            f"unknown options {', '.join(sorted(options))}: known are prefix, retention, tls (cluster), and with TLS "
            f"{', '.join(_TLS_OPTIONS)}"
        )
    return address


def _host(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ConfigError(_FORM) from None
    if not host:
        raise ConfigError(_FORM)
    return host, _PORT if port is None else port


def _options(query: str) -> dict[str, str]:
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    if len(options) < len(pairs):
        raise ConfigError("an option of the URL is given twice: give each option once")
    return options


def _take_tls(options: dict[str, str]) -> bool:
    value = options.pop("tls", "false")
    if value not in {"true", "false"}:
        raise ConfigError("tls must be true or false")
    return value == "true"


def _take_tls_options(options: dict[str, str], *, tls: bool) -> dict[str, str]:
    given = {name: options.pop(name) for name in _TLS_OPTIONS if name in options}
    if given and not tls:
        raise ConfigError(f"{', '.join(given)}: only for TLS: write rediss://…, or for a cluster tls=true")
    if given.get("ssl_cert_reqs", "required") not in {"required", "none"}:
        raise ConfigError("ssl_cert_reqs must be required (the default) or none")
    for name in _TLS_FILES:
        if name in given and not Path(given[name]).is_file():
            raise ConfigError(f"{name}: the file does not exist")
    if "ssl_keyfile" in given and "ssl_certfile" not in given:
        raise ConfigError("ssl_keyfile is the key of a certificate: give ssl_certfile too")
    return given


def _db(path: str, *, is_cluster: bool) -> int:
    name = path.strip("/")
    if not name:
        return 0
    if is_cluster:
        raise ConfigError("a cluster has no databases: leave the path of the URL empty")
    if not (name.isascii() and name.isdigit() and len(name) < 6):
        raise ConfigError("the path of the URL must be the number of a database, or empty")
    return int(name)


def _prefix(prefix: str) -> str:
    # Braces would be a hash tag, and put everything into one slot.
    if not re.fullmatch(r"[!-z|~]{1,64}", prefix, re.ASCII):
        raise ConfigError("prefix must be 1 to 64 printable characters without spaces and braces")
    return prefix


def _retention_seconds(duration: str) -> float:
    match = _DURATION.fullmatch(duration)
    if match is None or not 60.0 <= float(match[1]) * _UNITS[match[2]] <= 100 * 365 * 86400:
        raise ConfigError(
            "retention must be at least a minute: a number of seconds, or a number with s, m, h or d after it (180d)"
        )
    return float(match[1]) * _UNITS[match[2]]
