"""A store in an SQLite file, through SQLAlchemy Core: opening, connections and transactions.

One connection does all writes and all checkpoints: SQLite before 3.51.3 can corrupt its write-ahead log otherwise.
Readers have connections of their own, which never write. These are closed first, because the last connection that is
closed checkpoints.
"""

import logging
import os
import sqlite3
import time
import uuid
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, NullPool, QueuePool, create_engine, event, select
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, ProgrammingError

from leasekit.errors import BackendError, ConfigError, StoreDamaged, Unavailable
from leasekit.server.store import Space, Store, Tx, damage
from leasekit.server.store.schema import HEAD, metadata, store, version
from leasekit.server.store.sql.statements import Insert
from leasekit.server.store.sqlite.admission import check_tables, close_to_others, read_only, refuse_foreign
from leasekit.server.store.sqlite.lease_cache import LeaseCache
from leasekit.server.store.sqlite.lock import FileLock, Identity, is_open_here, one_user
from leasekit.server.store.sqlite.session import SqliteSession, driver_of, text_or_bytes
from leasekit.server.store.sqlite.task_counts import TaskCounts
from leasekit.server.store.sqlite.tx import COUNT_COMMIT, INCREMENTAL, Counter, SqliteTx, SqliteView

logger = logging.getLogger("leasekit.server")

_CHECK = 10.0  # seconds for the check of a store; 100,000 tasks take 0.05
_MIGRATIONS = "leasekit.server.store.sqlite:migrations"
_BUSY = 5000  # milliseconds; only another program that has opened the file can cause a wait
_NEW_FILE = (
    "page_size = 8192",  # rows are written in batches, which fill pages
    f"auto_vacuum = {INCREMENTAL}",  # given back step by step: all writes would have to wait for a VACUUM
)
_WRITER = (
    "journal_mode = WAL",
    "synchronous = FULL",  # an acknowledged write is on the disk
    "foreign_keys = ON",
    f"busy_timeout = {_BUSY}",
    "temp_store = MEMORY",  # the triggers of `task_counts`
    "cache_size = -65536",  # KiB (negative: not pages): the tables that change often stay in memory
)
_PARTS = (("trigger", "task"), ("task", "trigger"), ("run", "task"), ("progress", "task"))
"""Tables of which each row has one with the same `seq` in the other."""
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_OURS = (
    *(IntegrityError, DataError, ProgrammingError),
    *(sqlite3.IntegrityError, sqlite3.DataError, sqlite3.ProgrammingError),
)
_LOOK_EVERY = 10_000  # SQLite instructions of the check between two readings of the clock
_RESERVE = 64 * 2**20
"""Free bytes on the disk that are kept for existing tasks: on a full disk not even a beat can be written.

The write-ahead log takes 8 MiB, a checkpoint may make the file grow by as much, and the disk is checked each second.
"""
_READER = ("query_only = ON", f"busy_timeout = {_BUSY}")


class SqliteStore(Store):
    """Tasks in one SQLite file.

    `open` checks the file for damage, for up to `check` seconds; 0: no check. Raises `ConfigError` if the directory of
    the file does not exist.
    """

    def __init__(self, path: Path, *, check: float = _CHECK) -> None:
        # Without symbolic links: then `<store>.id` has one place, and the write-ahead log one name.
        self._path = path = Path(os.path.realpath(path))
        self.url = f"sqlite:///{path}"
        if not path.parent.is_dir():
            raise ConfigError(f"the directory of the store {str(path)!r} does not exist: create it, or use another")
        self._check = check
        self._lock = FileLock(path)
        self._identity = Identity("", 0, None)
        self._start = ""  # the name of this start
        self._writing = _engine(path, _WRITER, "BEGIN IMMEDIATE", pool=NullPool, of_new_file=_NEW_FILE)
        self._reading = _engine(path, _READER, "BEGIN", pool=QueuePool)
        self._connection: Connection | None = None
        self._counter = Counter()
        self._held = LeaseCache()
        self._counts = TaskCounts()

    def open(self) -> None:
        """Lock the file, check that it is whole and the same as before, and bring its schema up to date.

        Call this in the writer's thread. Raises `StoreLocked`, `StoreDamaged`, `BackendError` if this user may not open
        the file, and `ConfigError` if it cannot be opened for another reason, is another program's, or is of a newer
        version.
        """
        self.damage = None
        try:
            if not is_open_here(self._path):
                refuse_foreign(self._path)
            # Also creates the file, readable by its owner only; the -wal and -shm files get the same mode.
            self._lock.acquire()
            close_to_others(self._path)
            identity = self._examine()
            with self._writer_connection() as connection:
                self._begin(connection, identity)
            # A first reader, which stays connected: if the writer's connection were the only one and failed, SQLite
            # would delete the log with it, and on a full disk no new log could be made, not even to read.
            with self.view() as view:
                view.triggers(())
        except Unavailable as error:
            self.close()
            if _is_damage(error.__cause__):
                raise self._damaged(str(_cause(error.__cause__))) from error
            raise
        except OSError as error:
            self.close()
            what = f"the store {str(self._path)!r} cannot be opened: {error.strerror}"
            if isinstance(error, PermissionError):  # no `ConfigError`, which a client would take for an outage
                raise BackendError(f"{what}: {one_user(self._path)}") from error
            raise ConfigError(f"{what}; check its path") from error
        except BaseException:
            self.close()
            raise

    def _examine(self) -> Identity | None:
        """Return the store's identity; raise an error if the store must not be used.

        A refused file and its log stay as they are, so that the right log can still be put beside the file: the last
        connection that is closed would write the log into the file, but not if it is read-only.
        """
        try:
            with closing(read_only(self._path)) as driver:
                self._look_for_damage(driver, is_new=not check_tables(self._path, driver))
                identity = _identity(driver)
        except sqlite3.Error as error:
            raise Unavailable(f"the store failed: {error}") from error
        self._lock.check(identity)
        return identity

    def _begin(self, connection: Connection, identity: Identity | None) -> None:
        with connection.begin():
            self.is_new = self._bring_up_to_date(connection)
        self._identity = identity or _give_identity(connection)
        self.id = self._identity.id
        if self.is_new:
            logger.info("created a new store: %s", self._path)
        self._start = uuid.uuid4().hex
        self._lock.begin(self._identity, self._start)

    def _look_for_damage(self, driver: sqlite3.Connection, *, is_new: bool) -> None:
        """Raise `StoreDamaged` if the file is damaged: further writes would only lose more data."""
        until = time.monotonic() + self._check
        driver.set_progress_handler(lambda: time.monotonic() > until, _LOOK_EVERY)
        try:
            (damage,) = driver.execute("PRAGMA quick_check(1)").fetchone() if self._check else ("ok",)
            if damage == "ok" and self._check and not is_new:
                self._look_for_lost_rows(driver)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
                raise
            logger.warning("the check of the store stopped after %g s, and has found no damage so far", self._check)
            return
        finally:
            driver.set_progress_handler(None, 0)
        if damage != "ok":
            raise self._damaged(damage.splitlines()[-1])

    def _look_for_lost_rows(self, driver: sqlite3.Connection) -> None:
        """Raise `StoreDamaged` if a table has lost rows, as in a file that was saved from a damaged one."""
        for table, other in _PARTS:
            orphans = f'FROM "{table}" WHERE seq NOT IN (SELECT seq FROM "{other}")'  # noqa: S608 - names of tables
            (count,) = driver.execute(f"SELECT count(*) {orphans}").fetchone()
            if count:
                raise StoreDamaged(
                    f"the store {str(self._path)!r} is damaged ({count} rows of {table!r} have none in {other!r}): put "
                    f"a backup in its place, or delete these rows with the sqlite3 shell: DELETE {orphans}"
                )

    def _damaged(self, damage: str) -> StoreDamaged:
        return StoreDamaged(
            f"the store {str(self._path)!r} is damaged ({damage}): put a backup in its place, or save what can be "
            "read of it with the script under 'A damaged store' in leasekit's docs/operations.md; copy its files before"
        )

    def _bring_up_to_date(self, connection: Connection) -> bool:
        """Create the tables in a new file, or migrate those of an earlier version; return whether the file is new."""
        if is_new := not check_tables(self._path, driver_of(connection)):
            metadata.create_all(connection, checkfirst=False)
            SqliteSession(driver_of(connection)).insert(Insert(version), [(HEAD,)])
        elif [tuple(row) for row in connection.execute(select(version))] != [(HEAD,)]:
            self._migrate(connection)
        return is_new

    def _migrate(self, connection: Connection) -> None:
        # Imported here, because Alembic takes as long to import as all the rest, and few starts migrate anything.
        from alembic import command
        from alembic.config import Config
        from alembic.util import CommandError

        config = Config()
        config.set_main_option("script_location", _MIGRATIONS)
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, HEAD)
        except CommandError as error:
            raise ConfigError(
                f"the store {str(self._path)!r} cannot be brought up to date ({error}): put a backup in its place"
            ) from error

    @contextmanager
    def transaction(self) -> Generator[Tx]:
        self._lock.check_place()
        identity: Identity | None = None
        try:
            with self._writer_connection() as connection:
                session = SqliteSession(driver_of(connection))
                self._counts.begin(session.driver)
                with connection.begin():
                    changes = session.driver.total_changes
                    tx = SqliteTx(session, self._counter, self._held, self._counts.changes)
                    yield tx
                    tx.finish()
                    if session.driver.total_changes > changes:
                        identity = Identity(self._identity.id, self._identity.commits + 1, self._start)
                        session.run(
                            COUNT_COMMIT, commits=identity.commits, start=identity.start, new_anchor=tx.new_anchor
                        )
                if identity is not None:
                    self._identity = identity
                    self._counts.commit(identity.commits)
                    self._lock.note(identity)
        except BaseException:
            self._held.clear()  # the writes are undone, or their result is unknown
            if identity is not None:
                self._counts.doubt(identity.commits)
            raise

    @contextmanager
    def view(self) -> Generator[SqliteView]:
        self._lock.check_place()
        try:
            with self._reading.connect() as connection, connection.begin():
                yield SqliteView(SqliteSession(driver_of(connection)))
        except (DBAPIError, sqlite3.Error) as error:
            self._note_damage(error)
            raise Unavailable(f"the store could not be read: {_cause(error)}") from error

    def counts(self) -> dict[str, dict[str, int]]:
        def count() -> tuple[int, Sequence[tuple[Any, Any, int]]]:
            with self.view() as view:
                return view.numbered_counts()

        self._lock.check_place()
        counts = self._counts.read(count)
        return damage.statuses(
            (text_or_bytes(kind), status.decode(errors="replace"), tasks) for (kind, status), tasks in counts.items()
        )

    def cramped(self) -> str | None:
        """Return why the disk has no room for new tasks; None: it has."""
        try:
            disk = os.statvfs(self._path)
        except OSError as error:
            return f"the disk of the store cannot be checked for free space: {error.strerror}"
        free = disk.f_bavail * disk.f_frsize
        if free >= _RESERVE or not disk.f_blocks:  # some file systems do not report their size
            return None
        return (
            f"the disk of the store is almost full ({free / 2**20:.0f} MiB left, {_RESERVE >> 20} are kept for "
            "existing tasks): make room, no restart is needed"
        )

    def space(self) -> Space | None:
        try:
            disk = os.statvfs(self._path)
            file, log = (_size(Path(f"{self._path}{suffix}")) for suffix in ("", "-wal"))
        except OSError:
            return None
        return Space(file, log, disk.f_bavail * disk.f_frsize)

    def close(self) -> None:
        """Close the readers, then the writer, then release the lock."""
        self._reading.dispose()
        self._disconnect()
        self._writing.dispose()
        self._counter = Counter()
        self._held.clear()
        self._counts = TaskCounts()
        self._lock.release()

    @contextmanager
    def _writer_connection(self) -> Generator[Connection]:
        try:
            if self._connection is None:
                self._connection = self._writing.connect()
            yield self._connection
        except _OURS:
            raise  # bad values, or a bug of leasekit; the store itself is fine
        except (DBAPIError, sqlite3.Error) as error:  # from SQLAlchemy, or from the driver itself (`session`)
            # After a failed write the state of this connection is unknown: the next transaction opens a new one.
            self._disconnect()
            self._note_damage(error)
            raise Unavailable(f"the store failed: {_cause(error)}") from error

    def _note_damage(self, error: Exception) -> None:
        """Remember damage, once: other pages may still be read and written, but the damage does not heal."""
        if self.damage is None and _is_damage(error):
            self.damage = str(self._damaged(str(_cause(error))))
            logger.error("%s", self.damage)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.invalidate()
            connection.close()


def _engine(
    path: Path,
    pragmas: tuple[str, ...],
    begin: str,
    *,
    pool: type[NullPool] | type[QueuePool],
    of_new_file: tuple[str, ...] = (),
) -> Engine:
    url = URL.create("sqlite", database=str(path))
    # Errors are logged, and must not contain the values of tasks.
    engine = create_engine(url, poolclass=pool, connect_args={"check_same_thread": False}, hide_parameters=True)

    def connected(connection: DBAPIConnection, _record: object) -> None:
        # The driver itself would begin transactions too late, and never IMMEDIATE.
        connection.isolation_level = None
        cursor = connection.cursor()
        # In a file that is not new, `auto_vacuum` would have no effect, but write a page.
        is_new = of_new_file and cursor.execute("PRAGMA page_count").fetchone() == (0,)
        for pragma in (*of_new_file, *pragmas) if is_new else pragmas:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    def begun(connection: Connection) -> None:
        connection.connection.cursor().execute(begin)

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", begun)
    return engine


def _identity(driver: sqlite3.Connection) -> Identity | None:
    if not driver.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'store'").fetchone():
        return None
    row = driver.execute("SELECT id, commits, start FROM store").fetchone()
    return Identity(*row) if row else None  # the process was killed before it wrote one


def _give_identity(connection: Connection) -> Identity:
    """Give a new store an identity, and sync both the identity and the schema to the file itself."""
    identity = Identity(uuid.uuid4().hex, 0, None)
    with connection.begin():
        SqliteSession(driver_of(connection)).insert(Insert(store), [(*identity, None, 0)])
    driver_of(connection).execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return identity


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _cause(error: BaseException | None) -> object:
    return error.orig if isinstance(error, DBAPIError) else error


def _is_damage(error: BaseException | None) -> bool:
    cause = _cause(error)
    # The lower byte is the kind of the error, the others are details.
    return isinstance(cause, sqlite3.Error) and getattr(cause, "sqlite_errorcode", 0) & 0xFF in _DAMAGE
