"""Admission: whether a file may be opened as a store. Each check comes before the first write.

Rule 1: a database of another program is refused, and stays as it is.
Rule 2: a store of a newer leasekit is refused, with the version that it needs. So the name of a migration after 0001
ends with that version: `0002_leasekit_0.2.0`.
Rule 3: a store that all users of the machine can open is closed to them. A mode that only its group shares was set by
a person, and stays.
"""

import contextlib
import re
import sqlite3
import stat
from importlib.metadata import version
from pathlib import Path

from leasekit.errors import ConfigError
from leasekit.server.store.schema import HEAD

_OURS = {"task", "trigger", "alembic_version"}
_NEWER = re.compile(r"\d{4}_leasekit_(\d+(?:\.\d+)*)")
_OTHERS = stat.S_IRWXO
_OWNER = stat.S_IRUSR | stat.S_IWUSR


def refuse_foreign(path: Path) -> None:
    """Raise `ConfigError` if the file has tables of another program. This leaves no trace, not even a log beside it."""
    with (
        contextlib.suppress(sqlite3.Error),  # there is no file, or it is damaged: said when it is opened
        contextlib.closing(read_only(path, immutable=True)) as connection,
    ):
        check_tables(path, connection)


def read_only(path: Path, *, immutable: bool = False) -> sqlite3.Connection:
    """Connect without ever writing to the file or to its log. An immutable file is read without its log."""
    log = Path(f"{path}-wal")
    # Without a log nothing is left out, and a connection that looks for a log would create one.
    immutable = immutable or not (log.exists() and log.stat().st_size)
    return sqlite3.connect(f"{path.as_uri()}?mode=ro{'&immutable=1' * immutable}", uri=True)


def check_tables(path: Path, connection: sqlite3.Connection) -> bool:
    """Return whether there are tables. Raises `ConfigError` if they are another program's, or of a newer leasekit."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        return False
    if not tables >= _OURS:
        raise ConfigError(f"{str(path)!r} is the database of another program: name a new file for the store")
    for (revision,) in connection.execute("SELECT version_num FROM alembic_version"):
        if str(revision) > HEAD:
            needed = _NEWER.fullmatch(str(revision))
            needs = f"leasekit {needed[1]} or newer" if needed else "a newer leasekit"
            raise ConfigError(f"the store {str(path)!r} needs {needs}, and this is {version('leasekit')}: upgrade it")
    return True


def close_to_others(path: Path) -> None:
    """Take the rights of other users off a store and the files beside it. Raises `ConfigError` if that fails."""
    try:
        if not path.stat().st_mode & _OTHERS:
            return
        for suffix in ("", "-wal", "-shm", ".id"):
            with contextlib.suppress(FileNotFoundError):
                path.with_name(path.name + suffix).chmod(_OWNER)
    except PermissionError as error:
        raise ConfigError(
            f"every user of this machine can open the store {str(path)!r}, and it belongs to another user than this "
            f"process: chmod it to 0600, or to 0660 for its group"
        ) from error
