"""A store in an SQL database, through SQLAlchemy Core. Here: opening, connections, transactions; for SQLite.

One connection does all writes and all checkpoints: SQLite before 3.51.3 can corrupt its write-ahead log otherwise.
Readers have connections of their own, which never write and are closed first, so that none of them is the last one
and checkpoints.
"""

import os
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import URL, Connection, Engine, NullPool, QueuePool, create_engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, ProgrammingError

from leasekit.errors import ConfigError, Unavailable
from leasekit.server.store import Store, Tx, View
from leasekit.server.store.lock import FileLock
from leasekit.server.store.tx import Counter, SqlTx, SqlView

__all__ = ["SqlStore"]

_BUSY = 5000  # milliseconds; only a stranger with a shell on the file could make anyone wait
_WRITER = (
    "page_size = 8192",  # counts for a new file only: rows come in batches, and fill pages
    "journal_mode = WAL",
    "synchronous = FULL",  # an acknowledged write is on the disk (RELIABILITY S5)
    "foreign_keys = ON",
    f"busy_timeout = {_BUSY}",
    "cache_size = -65536",  # KiB: the hot tables stay in memory
)
_READER = ("query_only = ON", f"busy_timeout = {_BUSY}")


class SqlStore(Store):
    """Tasks in one SQLite file.

    Raises `ConfigError` where its directory does not exist.
    """

    def __init__(self, path: Path) -> None:
        if not path.parent.is_dir():
            raise ConfigError(f"the directory of the store {str(path)!r} does not exist: make it, or give another")
        self._path = path
        self._lock = FileLock(path.with_name(path.name + ".lock"))
        self._writing = _engine(path, _WRITER, "BEGIN IMMEDIATE", pool=NullPool)
        self._reading = _engine(path, _READER, "BEGIN", pool=QueuePool)
        self._connection: Connection | None = None
        self._counter = Counter()

    def open(self) -> None:
        """Take the lock, then the missing steps of the schema, in the thread that will write."""
        try:
            self._lock.acquire()
            # Made here, so that nobody else can read it (SECURITY 20); the -wal and -shm files take after it.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            with self._connected() as connection, connection.begin():
                _migrate(connection)
        except OSError as error:
            self.close()
            raise ConfigError(f"the store {str(self._path)!r} cannot be opened: {error.strerror}") from error
        except CommandError as error:
            self.close()
            raise ConfigError(f"the store {str(self._path)!r} is of another version of leasekit: {error}") from error
        except BaseException:
            self.close()
            raise

    @contextmanager
    def transaction(self) -> Generator[Tx]:
        """A transaction that is on the disk when the block ends."""
        with self._connected() as connection, connection.begin():
            yield SqlTx(connection, self._counter)

    @contextmanager
    def view(self) -> Generator[View]:
        """A look at the store, on a connection of its own."""
        try:
            with self._reading.connect() as connection, connection.begin():
                yield SqlView(connection)
        except (DBAPIError, sqlite3.Error) as error:
            raise Unavailable(f"the store could not be read: {_cause(error)}") from error

    def close(self) -> None:
        """Close the readers, then the writer, then give up the lock."""
        self._reading.dispose()
        self._disconnect()
        self._writing.dispose()
        self._counter = Counter()
        self._lock.release()

    @contextmanager
    def _connected(self) -> Generator[Connection]:
        try:
            if self._connection is None:
                self._connection = self._writing.connect()
            yield self._connection
        except (IntegrityError, DataError, ProgrammingError):
            raise  # somebody's values, or a mistake of ours; the store is well
        except (DBAPIError, sqlite3.Error) as error:  # what goes wrong while rows are fetched comes as it is
            # After a failed write nothing is known about this connection: the next transaction opens a new one.
            self._disconnect()
            raise Unavailable(f"the store did not take it: {_cause(error)}") from error

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.invalidate()
            connection.close()


def _engine(path: Path, pragmas: tuple[str, ...], begin: str, *, pool: type[NullPool] | type[QueuePool]) -> Engine:
    url = URL.create("sqlite", database=str(path))
    # Its errors are logged, and must not tell what tasks hold.
    engine = create_engine(url, poolclass=pool, connect_args={"check_same_thread": False}, hide_parameters=True)

    def connected(connection: DBAPIConnection, _record: object) -> None:
        # The driver's own idea of transactions begins them too late, and never IMMEDIATE.
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in pragmas:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    def begun(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", begun)
    return engine


def _cause(error: Exception) -> object:
    return error.orig if isinstance(error, DBAPIError) else error


def _migrate(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", "leasekit.server.store:migrations")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
