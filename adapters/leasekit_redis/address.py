"""The URL of a Redis: which server or cluster, and how tasks are kept there.

`redis://user:password@host:6379/0`, `rediss://…` (TLS), `unix:///path?db=0` (a socket of this machine, as in redis-py),
`redis+cluster://host:7000,host:7001`, `redis+sentinel://host:26379,host:26379/primary?db=0`. Options: `prefix` (of all
keys; default `leasekit`), `retention` (how long ended tasks are kept: seconds, or `90d`, `12h`, `30m`; default
`14d`), `sentinel_username` and `sentinel_password` (of the Sentinels themselves), and, for a cluster and with
Sentinels, `tls=true`. With TLS, by the names that redis-py and Celery give them: `ssl_ca_certs`, `ssl_certfile`,
`ssl_keyfile` (paths of files), `ssl_cert_reqs` (`required`, or `none`: any server is accepted).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from leasekit.config import duration
from leasekit.errors import ConfigError

_PORT, _SENTINEL_PORT = 6379, 26379
_RETENTION = 14 * 86400.0  # seconds for which ended tasks are kept: no broker delivers a message again later than that
_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_TLS_OPTIONS = (*_TLS_FILES, "ssl_cert_reqs")
_SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")
_OF_SEVERAL = {"redis+cluster", "redis+sentinel"}  # hosts
_SCHEMES = {"redis", "rediss", "unix", *_OF_SEVERAL}
_AFTER_AUTHORITY = re.compile(r"[/?#]")
_FORM = (
    "the URL of a Redis must be redis://host:6379/0, rediss://… (TLS), unix:///path?db=0, "
    "redis+cluster://host:7000,host:7001, or redis+sentinel://host:26379,host:26379/primary"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of one Redis, of one cluster by some of its nodes, or of the Sentinels that know the primary."""

    hosts: tuple[tuple[str, int], ...] = ()
    is_cluster: bool = False
    socket: str | None = None  # its path
    primary: str | None = None  # its name, if the hosts are Sentinels
    sentinel_username: str | None = None
    sentinel_password: str | None = None
    tls: bool = False
    tls_options: dict[str, str] = field(default_factory=dict[str, str])  # as redis-py takes them
    username: str | None = None
    password: str | None = None
    db: int = 0
    prefix: str = "leasekit"
    retention: float = _RETENTION  # seconds

    def __str__(self) -> str:
        """Return the hosts for messages, without user and password."""
        if self.socket is not None:
            return f"Redis at {self.socket}"
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"Redis at {hosts}" if self.primary is None else f"Redis {self.primary!r} of the Sentinels at {hosts}"

    def __repr__(self) -> str:
        return f"<{self}>"


def parse(url: str) -> Address:
    """Parse the URL of a Redis. Raises `ConfigError`; its message never contains the URL, which may hold a password."""
    scheme, _, rest = url.partition("://")
    if scheme not in _SCHEMES:
        raise ConfigError(_FORM)
    # Split by hand, because not every version of Python splits an authority of several hosts.
    netloc = _AFTER_AUTHORITY.split(rest, maxsplit=1)[0]
    parts = urlsplit(rest.removeprefix(netloc))
    user, _, authority = netloc.rpartition("@")
    username, has_password, password = user.partition(":")
    _check_form(scheme, authority, parts)
    options = _options(parts.query)
    tls = scheme == "rediss" or (scheme in _OF_SEVERAL and _take_tls(options))
    address = Address(
        hosts=_hosts(scheme, authority),
        is_cluster=scheme == "redis+cluster",
        socket=unquote(parts.path) if scheme == "unix" else None,
        tls=tls,
        tls_options=_take_tls_options(options, tls=tls),
        username=unquote(username) or None,
        password=unquote(password) if has_password else None,
        **_take_sentinel(scheme, parts.path, options),
        db=_db(scheme, parts.path, options),
        prefix=_prefix(options.pop("prefix", "leasekit")),
        retention=duration("retention", options.pop("retention", f"{_RETENTION:.0f}"), least=60),
    )
    _refuse_unknown(options)
    return address


def _check_form(scheme: str, authority: str, parts: SplitResult) -> None:
    """Raise `ConfigError` for a URL with a part that it must not have."""
    if parts.fragment:
        raise ConfigError("the URL of a Redis has no fragment: write # in a password as %23")
    if scheme == "unix" and (authority or len(parts.path) < 2):
        raise ConfigError("the URL of a socket has a path alone, as in unix:///run/redis.sock?db=0")


def _refuse_unknown(options: Mapping[str, str]) -> None:
    """Raise `ConfigError` with the names of options that nothing has taken: their values may be secrets."""
    if options:
        raise ConfigError(
            f"unknown options {', '.join(sorted(options))}: known are prefix, retention; for unix "
            f"and Sentinels db; for a cluster and Sentinels tls; for Sentinels {', '.join(_SENTINEL_OPTIONS)}; "
            f"with TLS {', '.join(_TLS_OPTIONS)}"
        )


def _hosts(scheme: str, authority: str) -> tuple[tuple[str, int], ...]:
    if scheme == "unix":
        return ()
    port = _SENTINEL_PORT if scheme == "redis+sentinel" else _PORT
    hosts = tuple(_host(part, port) for part in authority.split(","))
    if len(hosts) > 1 and scheme not in _OF_SEVERAL:
        raise ConfigError(
            "only a cluster and Sentinels have several hosts: write redis+cluster://… or redis+sentinel://…/primary, "
            "or give one host"
        )
    return hosts


def _host(text: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ConfigError(_FORM) from None
    if not host:
        raise ConfigError(_FORM)
    return host, default_port if port is None else port


def _options(query: str) -> dict[str, str]:
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    for name in options:
        if [other for other, _ in pairs].count(name) > 1:
            raise ConfigError(f"the option {name!r} of the URL is given twice: give it once")
    return options


def _take_tls(options: dict[str, str]) -> bool:
    value = options.pop("tls", "false")
    if value not in {"true", "false"}:
        raise ConfigError("tls must be true or false")
    return value == "true"


def _take_tls_options(options: dict[str, str], *, tls: bool) -> dict[str, str]:
    given = {name: options.pop(name) for name in _TLS_OPTIONS if name in options}
    if given and not tls:
        raise ConfigError(f"{', '.join(given)}: only for TLS: write rediss://…, or for a cluster or Sentinels tls=true")
    if given.get("ssl_cert_reqs", "required") not in {"required", "none"}:
        raise ConfigError("ssl_cert_reqs must be required (the default) or none")
    for name in _TLS_FILES:
        if name in given and not Path(given[name]).is_file():
            raise ConfigError(f"{name}: the file does not exist")
    if "ssl_keyfile" in given and "ssl_certfile" not in given:
        raise ConfigError("ssl_keyfile is the key of a certificate: give ssl_certfile too")
    return given


class _OfSentinels(TypedDict, total=False):
    primary: str
    sentinel_username: str | None
    sentinel_password: str | None


def _take_sentinel(scheme: str, path: str, options: dict[str, str]) -> _OfSentinels:
    if scheme != "redis+sentinel":
        return {}
    primary = unquote(path.strip("/"))
    if not primary or "/" in primary:
        raise ConfigError("the path of the URL must be the name under which the Sentinels know the primary")
    username, password = (options.pop(name, None) for name in _SENTINEL_OPTIONS)
    return {"primary": primary, "sentinel_username": username, "sentinel_password": password}


def _db(scheme: str, path: str, options: dict[str, str]) -> int:
    where, name = "path of the URL", path.strip("/")
    if scheme in {"unix", "redis+sentinel"}:
        where, name = "option db", options.pop("db", "")
    if not name:
        return 0
    if scheme == "redis+cluster":
        raise ConfigError("a cluster has no databases: leave the path of the URL empty")
    if not (name.isascii() and name.isdigit() and len(name) < 6):
        raise ConfigError(f"the {where} must be the number of a database, or empty")
    return int(name)


def _prefix(prefix: str) -> str:
    # Braces would be a hash tag, and put everything into one slot.
    if not re.fullmatch(r"[!-z|~]{1,64}", prefix, re.ASCII):
        raise ConfigError("prefix must be 1 to 64 printable characters without spaces and braces")
    return prefix
