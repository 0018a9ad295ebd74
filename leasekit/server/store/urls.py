"""Stores by URL. SQLAlchemy is loaded only for a store that needs it."""

import re
from pathlib import Path

from leasekit.errors import ConfigError
from leasekit.registry import needs_extra
from leasekit.server.store import Store
from leasekit.server.store.memory import MemoryStore


def open_store(url: str, *, check: float | None = None) -> Store:
    """Return the store that a URL names. Opening it checks a file for up to `check` seconds (None: the default).

    `sqlite:///tasks.db` is a relative path, `sqlite:////var/lib/tasks.db` an absolute one; `memory:` ends with the
    process. Raises `ConfigError` for any other URL, and if the directory of the file does not exist, and
    `MissingDependency`.
    """
    if url.rstrip("/") == "memory:":
        return MemoryStore()
    path = url.removeprefix("sqlite:///")
    if path == url or path.endswith("/") or path in ("", ":memory:") or "\0" in path:
        # The URL may contain a password: the message repeats only its scheme.
        scheme = repr(url.partition(":")[0] + ":") if ":" in url else "a URL without a scheme"
        raise ConfigError(f"{scheme} names no store: use sqlite:///file.db, sqlite:////path/file.db or memory:")
    if found := re.search(r"\?(\w+)=[^/]*\Z", path):
        raise ConfigError(f"a sqlite URL has no options, but this one has {found[1]!r}: leave it out")
    with needs_extra("server"):
        from leasekit.server.store.sql import SqlStore

    return SqlStore(Path(path)) if check is None else SqlStore(Path(path), check=check)
