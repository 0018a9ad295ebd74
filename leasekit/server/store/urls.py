"""Stores by URL. SQLAlchemy is loaded only for a store that needs it."""

import re
from pathlib import Path
from urllib.parse import parse_qs, quote, urlencode

from leasekit.config import duration
from leasekit.errors import ConfigError
from leasekit.registry import needs_extra
from leasekit.server.store import Store
from leasekit.server.store.memory import MemoryStore

_OPTION = re.compile(r"\?(\w+)=([^/]*)\Z")


def _split(url: str) -> tuple[str, str | None]:
    """Return the URL without its option, and the value of `retention`. Raises `ConfigError` for any other option."""
    if (found := _OPTION.search(url)) is None:
        return url, None
    if found[1] != "retention":
        raise ConfigError(f"a sqlite URL has one option, `retention`, but this one has {found[1]!r}: leave it out")
    return url[: found.start()], found[2]


def open_store(url: str, *, check: float | None = None) -> Store:
    """Return the store that a URL names. Opening it checks a file for up to `check` seconds (None: the default).

    `sqlite:///tasks.db` is a relative path, `sqlite:////var/lib/tasks.db` an absolute one; `memory:` ends with the
    process; `postgresql://` is a URI of libpq, the library of PostgreSQL. Its option `prepare=off` is for poolers that
    lose prepared statements.

    The option `?retention=90d` says how long ended tasks are kept, in place of 30 days. Raises `ConfigError` for any
    other URL, and if the directory of the file does not exist, and `MissingDependency`.
    """
    if url.partition(":")[0] in ("postgresql", "postgres"):
        return _open_database(url)
    url, retention = _split(url)
    if url.rstrip("/") == "memory:":
        return _with_retention(MemoryStore(), retention)
    path = url.removeprefix("sqlite:///")
    if path == url or path.endswith("/") or path in ("", ":memory:") or "\0" in path:
        # The URL may contain a password: the message repeats only its scheme.
        scheme = repr(url.partition(":")[0] + ":") if ":" in url else "a URL without a scheme"
        raise ConfigError(
            f"{scheme} names no store: use sqlite:///file.db, sqlite:////path/file.db, postgresql://host/database or "
            "memory:"
        )
    with needs_extra("server"):
        from leasekit.server.store.sqlite.store import SqliteStore

    store = SqliteStore(Path(path)) if check is None else SqliteStore(Path(path), check=check)
    return _with_retention(store, retention)


def _open_database(url: str) -> Store:
    address, _, query = url.partition("?")  # as libpq reads it: without a host, `urlunsplit` would drop the slashes
    options = parse_qs(query, keep_blank_values=True)
    retention, prepare = (options.pop(name, [None])[-1] for name in ("retention", "prepare"))
    if prepare not in (None, "on", "off"):
        raise ConfigError(f"the option `prepare` is {prepare!r}: use on or off")
    dsn = f"{address}?{urlencode(options, doseq=True, quote_via=quote)}" if options else address
    with needs_extra("postgres"):
        from leasekit.server.store.postgres.store import PostgresStore

    return _with_retention(PostgresStore(dsn, prepare=prepare != "off"), retention)


def _with_retention(store: Store, retention: str | None) -> Store:
    if retention is not None:
        store.retention = duration("retention", retention, least=60)
    return store
