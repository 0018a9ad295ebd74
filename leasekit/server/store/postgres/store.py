"""A store in a PostgreSQL database: connections, transactions, and what nodes tell each other."""

import contextlib
import logging
import math
import os
import threading
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import conninfo, errors

from leasekit.errors import ConfigError, Unavailable
from leasekit.server.clock import boottime
from leasekit.server.store import Anchor, Company, Contended, Locked, Node, NodeRow, Reading, SharedStore
from leasekit.server.store.postgres import schema
from leasekit.server.store.postgres.session import Connection, PostgresSession
from leasekit.server.store.postgres.tx import JOIN_WRITERS, Block, PostgresTx
from leasekit.server.store.postgres.view import PostgresView
from leasekit.server.store.postgres.wakes import Wakes

logger = logging.getLogger("leasekit.server")

_NODES = 1000  # that are listed, at most
_PATIENCE = 60.0  # seconds that the writer waits for an answer: locks end sooner, and nothing else takes so long
_PATIENCE_OF_READERS = 300.0
_READERS = 4  # idle connections of readers that are kept
_DEFAULTS = {
    "connect_timeout": "5",
    "tcp_user_timeout": "10000",  # milliseconds without an acknowledgement from the other side
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "target_session_attrs": "read-write",  # of several hosts, the primary
    "application_name": "leasekit",
}
_FIXED = {"client_encoding": "UTF8"}  # with another, texts would be read as bytes, or could not be written
# All settings are of the transaction, because a pooler may give each transaction another session.
# Each statement finds its rows by an index. A plan that was made while the tables were small, or that trusts old
# statistics, would scan them. So the plan for any values serves as well as one for these, and is made once. A bitmap
# scan finds all rows before the first, and reads what is dead again each time, where an index scan marks it.
_PLANS = {"enable_seqscan": "off", "enable_bitmapscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off"}
_SETTINGS = {
    # Else a function that another role has made in a schema of the path may be called in place of PostgreSQL's own.
    "search_path": "pg_catalog",
    "array_nulls": "on",  # parameters are arrays in which `null` is no text
    "lock_timeout": "2s",
    "idle_in_transaction_session_timeout": "5s",
    "plan_cache_mode": "force_generic_plan",
    **_PLANS,
}
# What is acknowledged must be on the disk, also if the role or the database says that it need not be.
_DURABLE = (
    "pg_catalog.set_config('synchronous_commit',"
    " coalesce(nullif(pg_catalog.current_setting('synchronous_commit'), 'off'), 'on'), true)"
)
# A node that stops while it is sent rows leaves its session active, not idle. Only servers on Linux can end that.
_READ_BY_THEN = (
    "pg_catalog.set_config('tcp_user_timeout',"
    " CASE WHEN pg_catalog.strpos(pg_catalog.version(), 'linux') > 0 THEN '5s' ELSE '0' END, true)"
)
# The same where it stops between two statements that it does not wait for. Longer than any statement may take.
_OVER_BY_THEN = (
    "CASE WHEN pg_catalog.current_setting('server_version_num')::int >= 170000"
    " THEN pg_catalog.set_config('transaction_timeout', '90s', true) END"
)
_SET = [
    *(f"pg_catalog.set_config('{name}', '{value}', true)" for name, value in _SETTINGS.items()),
    *(_DURABLE, _READ_BY_THEN, _OVER_BY_THEN),
]
_READ = f"""
SELECT {", ".join(_SET)},
    extract(epoch FROM pg_catalog.clock_timestamp())::float8, store.correction, store.gained,
    last.boot_id, last.boot, last.seen,
    (SELECT pg_catalog.max(seen) FROM leasekit.node WHERE id <> %s AND NOT has_left),
    pg_catalog.jsonb_object_field_text(pg_catalog.to_jsonb(store), 'kind_change')::int8,
    coalesce(pg_catalog.jsonb_object_field_text(pg_catalog.to_jsonb(store), 'has_waits')::bool, false),
    coalesce(pg_catalog.jsonb_object_field_text(pg_catalog.to_jsonb(store), 'has_routes')::bool, false)
FROM leasekit.store LEFT JOIN (SELECT * FROM leasekit.node ORDER BY seen DESC LIMIT 1) AS last ON true
"""  # noqa: S608
_VIEW = "; ".join(
    [
        "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
        "SET LOCAL search_path = pg_catalog",
        "SET LOCAL lock_timeout = 0",  # else a message is not sent while another node sends one
        *(f"SET LOCAL {name} = {value}" for name, value in _PLANS.items()),
    ]
)
_CONTENTION = (errors.DeadlockDetected, errors.SerializationFailure, errors.UniqueViolation)
_OURS = (psycopg.DataError, psycopg.IntegrityError, psycopg.ProgrammingError)
_MISSING = (errors.UndefinedTable, errors.InvalidSchemaName)
_UNPREPARED = (errors.DuplicatePreparedStatement, errors.InvalidSqlStatementName)
_DEMOTED = errors.ReadOnlySqlTransaction


class PostgresStore(SharedStore):
    """Tasks in the schema `leasekit` of a PostgreSQL database.

    `dsn` is a libpq URI or connection string. `prepare=False` sends no prepared statements, which poolers may lose.
    """

    tables = schema.HEAD

    def __init__(self, dsn: str, *, prepare: bool = True) -> None:
        try:
            given: dict[str, Any] = conninfo.conninfo_to_dict(dsn)
        except psycopg.Error as error:
            raise ConfigError(f"the URL of the database cannot be read: {str(error).strip()}") from None
        self._options = {**_DEFAULTS, **given, **_FIXED}
        self._prepare = prepare
        self.wall = None
        self.boot = boottime
        self.node = self._new_node()
        self.where = _where(given)
        self.url = None
        self.damage = None
        self._writer: Connection | None = None
        self._idle: list[Connection] = []
        self._lock = threading.Lock()  # for `_idle`
        self._is_open = False
        self._block = Block()

    def open(self) -> None:
        """Connect, and check the version of the tables.

        Raises `ConfigError` if the tables are missing or of another version, and `Unavailable` if the database cannot
        be reached.
        """
        self.node = self._new_node()
        self._is_open = True
        try:
            with self._errors():
                schema.check(self._connection(), where=self.where)
            with self.view() as view:
                ((self.id,),) = view.execute("SELECT id FROM leasekit.store")
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _new_node() -> Node:
        return Node.of_this_process(uuid.uuid4().hex)

    def lacks(self) -> list[int]:
        """Return the versions of the tables that a migration would make."""
        with self._errors(), contextlib.closing(self._connect()) as connection:
            number = schema.tables_version(connection)
            if number > schema.HEAD and (why := schema.fault(number, where=self.where)) is not None:
                raise ConfigError(why)
            return list(range(number + 1, schema.HEAD + 1))

    def migrate(self) -> list[int]:
        """Create the tables, or bring them up to date; return the versions that were made."""
        with self._errors(), contextlib.closing(self._connect()) as connection:
            schema.check_encoding(connection, where=self.where)
            return schema.migrate(connection)

    @contextmanager
    def transaction(self) -> Generator[PostgresTx]:
        with self._errors():
            connection = self._connection()
            try:
                with connection.pipeline() as pipeline:
                    try:
                        session = PostgresSession(connection, pipeline.sync)
                        tx = PostgresTx(session, self.node, self._block, self._begin(session))
                        yield tx
                        tx.finish()
                    except BaseException:
                        with contextlib.suppress(psycopg.Error):
                            pipeline.sync()  # takes the results of what was sent after a statement that failed
                        raise
                session.check()
            except BaseException:
                with contextlib.suppress(psycopg.Error):
                    connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    def _begin(self, session: PostgresSession) -> Reading:
        before = self.boot()
        session.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
        session.execute(JOIN_WRITERS)  # a statement before the one that reads `kind_change`
        rows = session.query(_READ, (self.node.id,))
        after = self.boot()
        if not rows:
            raise Unavailable(f"the table leasekit.store of {self.where} is empty: restore it from a backup")
        wall, correction, gained, boot_id, boot, seen, others_seen, *flags = rows[0][len(_SET) :]
        last = None if boot_id is None else Anchor(boot_id, boot, seen)
        now = wall if self.wall is None else self.wall()
        return Reading(now, correction, gained, last, others_seen, before, after, *flags)

    @contextmanager
    def view(self) -> Generator[PostgresView]:
        connection: Connection | None = None
        is_whole = False
        try:
            with self._errors(of_writer=False):
                connection = self._reader()
                yield PostgresView(PostgresSession(connection))
                connection.execute("COMMIT")
                is_whole = True
        finally:
            if connection is not None and not (is_whole and self._keep(connection)):
                connection.close()

    def _reader(self) -> Connection:
        """Return a connection with a snapshot. One that was kept may have ended meanwhile: then it is a new one."""
        with self._lock:
            kept = self._idle.pop() if self._idle else None
        if kept is not None:
            with contextlib.suppress(psycopg.OperationalError):
                return _with_snapshot(kept)
            self._close_idle()  # they have most likely ended too
        connection = self._connect(_PATIENCE_OF_READERS)
        connection.drop_messages()
        return _with_snapshot(connection)

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _keep(self, connection: Connection) -> bool:
        with self._lock:
            if not self._is_open or len(self._idle) >= _READERS:
                return False
            self._idle.append(connection)
            return True

    def announce(self, messages: Sequence[str]) -> None:
        with self.view() as view:
            Wakes.tell(view, self.node.id, messages)

    def listen(self, heard: Callable[[str], None]) -> Callable[[], None]:
        return Wakes(self._connect, self.node.id, heard).stop

    def company(self) -> Company:
        with self.view() as view:
            ((number, correction),) = view.execute(
                "SELECT (SELECT max(number) FROM leasekit.version), (SELECT correction FROM leasekit.store)"
            )
            rows = view.execute(
                "SELECT id, name, version, address, wants_events, started_at, seen, has_left FROM leasekit.node"
                " ORDER BY seen DESC LIMIT %s",
                _NODES,
            )
        tables = number or 0
        return Company(
            tables, schema.fault(tables, where=self.where), correction or 0.0, [NodeRow(*row) for row in rows]
        )

    def workers(self, since: float) -> list[bytes]:
        with self.view() as view:
            rows = view.execute(
                "SELECT workers FROM leasekit.node"
                " WHERE id <> %s AND NOT has_left AND seen >= %s AND workers IS NOT NULL",
                *(self.node.id, since),
            )
        return [workers for (workers,) in rows]

    def close(self) -> None:
        """Sign out, and close the connections."""
        self._is_open = False
        if self._writer is not None:
            with contextlib.suppress(psycopg.Error):
                self._writer.execute("UPDATE leasekit.node SET has_left = true WHERE id = %s", (self.node.id,))
        self._disconnect()
        self._close_idle()
        self._block = Block()

    def _connection(self) -> Connection:
        if self._writer is None:
            self._writer = self._connect(_PATIENCE)
            self._writer.drop_messages()
        return self._writer

    def _connect(self, patience: float = math.inf) -> Connection:
        dsn = conninfo.make_conninfo(**self._options)
        connection = Connection.connect(dsn, autocommit=True, prepare_threshold=5 if self._prepare else None)
        connection.patience = patience
        connection.name_statements()
        return connection

    @contextmanager
    def _errors(self, *, of_writer: bool = True) -> Generator[None]:
        """Raise what the engine expects: `Locked`, `Contended`, `Unavailable`, or the error of a bad value as it is.

        The writer's connection is given up if it may be broken; that of a reader is closed by `view`.
        """
        try:
            yield
        except errors.LockNotAvailable as error:
            raise Locked(_text(error)) from error
        except _CONTENTION as error:
            raise Contended(_text(error)) from error
        except _DEMOTED as error:  # the connection would stay with the former primary
            if of_writer:
                self._disconnect()
            raise Unavailable(f"{self.where} has become a standby: {_text(error)}") from error
        except _UNPREPARED as error:
            if of_writer:
                self._disconnect()
            raise Unavailable(
                f"{self.where} is behind a pooler that gives each transaction another session: add ?prepare=off to the "
                f"URL ({_text(error)})"
            ) from error
        except errors.InsufficientPrivilege as error:
            raise Unavailable(f"the user of {self.where} lacks rights: {_text(error)}") from error
        except _MISSING as error:
            raise Unavailable(
                f"{self.where} has lost its tables: restore them from a backup ({_text(error)})"
            ) from error
        except _OURS:
            raise  # bad values, or a bug of leasekit; the database itself is fine
        except psycopg.Error as error:
            if of_writer:
                self._disconnect()
            raise Unavailable(f"{self.where} failed: {_text(error)}") from error

    def _disconnect(self) -> None:
        connection, self._writer = self._writer, None
        if connection is not None:
            connection.close()


def _with_snapshot(connection: Connection) -> Connection:
    try:
        connection.execute(_VIEW.encode())
    except BaseException:
        connection.close()
        raise
    return connection


def _where(given: Mapping[str, Any]) -> str:
    """Name a database in a sentence, without its user and password."""
    name = given.get("dbname") or os.environ.get("PGDATABASE") or given.get("service")
    host = given.get("host") or os.environ.get("PGHOST")
    return f"the database{f' {name!r}' if name else ''}{f' on {host}' if host else ''}"


def _text(error: psycopg.Error) -> str:
    return " ".join(str(error).split()) or type(error).__name__
