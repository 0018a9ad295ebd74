"""Statements on a connection to PostgreSQL: each takes all its rows at once, as one array for each column.

In a transaction, a statement that only writes is sent without waiting for its result: an error comes up with a later
statement, or before the commit.
"""

import math
import re
import secrets
import time
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, TypeVar, cast

import msgspec
import psycopg
import sqlalchemy as sa
from psycopg.waiting import Ready, Wait
from sqlalchemy.dialects.postgresql import psycopg as dialects

from leasekit.server.store import Contended
from leasekit.server.store.sql.statements import Insert, Statement, Update

SCHEMA = "leasekit"

_T = TypeVar("_T")

_DIALECT = dialects.dialect()  # type: ignore[no-untyped-call]


class Connection(psycopg.Connection[tuple[Any, ...]]):
    """A connection that is closed if an answer does not come for `patience` seconds.

    The other side may be a proxy or a firewall that still acknowledges what is sent, and has lost the database.
    """

    patience = math.inf

    def name_statements(self) -> None:
        """Give the prepared statements of this connection names that no other connection uses.

        A pooler may give a transaction the session in which another client has prepared statements. By the names that
        psycopg gives, this client would run one of those in place of its own; by unknown ones it fails.
        """
        self._prepared._prepared_idx = secrets.randbits(60)  # pyright: ignore[reportPrivateUsage]

    def drop_messages(self) -> None:
        """Forget messages that come: psycopg would keep them, and a pooler sends those of a session that listened."""
        self.add_notify_handler(lambda _: None)

    def wait(self, gen: Generator[Any, Any, _T], *args: Any, **options: Any) -> _T:
        try:
            return super().wait(_bounded(gen, self.patience, self._flush), *args, **options)
        except _NoAnswer:
            self.close()  # else every later step of the same transaction would wait as long
            raise

    def _flush(self) -> bool:
        """Send what libpq still holds; return whether the socket has not taken all of it."""
        try:
            return self.pgconn.flush() == 1
        except psycopg.Error:
            return False  # the next read says more of a broken connection


class _NoAnswer(psycopg.OperationalError):
    """The patience of a connection is over."""


def _bounded(waiting: Generator[Any, Any, _T], patience: float, flush: Callable[[], bool]) -> Generator[Any, Any, _T]:
    """Do what `waiting` does, but raise `_NoAnswer` when it has nothing to read or write for so long.

    It is asked several times a second, also if nothing has come. While it waits for an answer, `flush` sends the rest
    of a pipeline: psycopg stops sending when the socket is full, and the server would wait for that rest for ever.
    """
    until = time.monotonic() + patience
    try:
        state = next(waiting)
        while True:
            has_rest = state == Wait.R and flush()
            ready = yield Wait.RW if has_rest else state
            if ready:
                until = time.monotonic() + patience
            elif time.monotonic() > until:
                raise _NoAnswer(f"no answer for {patience:g} s")
            if not (has_rest and ready == Ready.W):
                state = waiting.send(ready)
    except StopIteration as end:
        return cast("_T", end.value)


class PostgresSession:
    """A connection with a transaction in progress. `Session` describes the methods."""

    def __init__(self, connection: Connection, results: Callable[[], None] = lambda: None) -> None:
        self.connection = connection
        self._results = results  # waits for those of all statements
        self._inserts: list[tuple[psycopg.Cursor[Any], str, int]] = []  # with the number of rows that each must add

    def rows(self, statement: Statement, **values: Any) -> list[tuple[Any, ...]]:
        return self._fetched(self._run(statement, values))

    def query(self, query: str, values: Any = ()) -> list[tuple[Any, ...]]:
        return self._fetched(self.execute(query, values))

    def _fetched(self, cursor: psycopg.Cursor[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        # The end of a pipeline, not only its results: before that, a session is never idle for PostgreSQL, and would
        # keep its locks for as long as this process stands still.
        self._results()
        return cursor.fetchall()

    def run(self, statement: Statement, **values: Any) -> None:
        self._run(statement, values)

    def count(self, statement: Statement, **values: Any) -> int:
        cursor = self._run(statement, values)
        self._results()
        return cursor.rowcount

    def _run(self, statement: Statement, values: dict[str, Any]) -> psycopg.Cursor[tuple[Any, ...]]:
        compiled = statement.compiled(_DIALECT, schema=SCHEMA)
        given = compiled.bound(values)
        for name in compiled.lists:
            given[name] = array(given[name])
        return self.execute(compiled.sql, given)

    def insert(self, into: Insert, rows: Sequence[tuple[Any, ...]]) -> None:
        if rows:
            cursor = self.execute(_insert(into.table), _columns(rows, list(into.table.c)))
            self._inserts.append((cursor, into.table.name, len(rows)))

    def update(self, update: Update, rows: Sequence[tuple[Any, ...]]) -> None:
        if rows:
            self.execute(_update(update), _columns(rows, [*update.columns, update.key]))

    def execute(self, query: str, values: Any = ()) -> psycopg.Cursor[tuple[Any, ...]]:
        return self.connection.execute(query.encode(), values, prepare=True, binary=True)

    def check(self) -> None:
        """Raise `Contended` if an insert has found a row in its place. All results must have arrived."""
        for cursor, table, expected in self._inserts:
            if cursor.rowcount != expected:
                raise Contended(f"another writer has taken the keys of rows of {table!r} meanwhile")


def _columns(rows: Sequence[tuple[Any, ...]], columns: Sequence[sa.Column[Any]]) -> list[Any]:
    return [_column(column, values) for column, values in zip(columns, zip(*rows, strict=True), strict=True)]


def _column(column: sa.Column[Any], values: Sequence[Any]) -> Any:
    if values.count(None) == len(values):
        return "{}"  # `unnest` fills it up to the longest column
    if isinstance(column.type, sa.LargeBinary):
        return _literal([None if value is None else f"\\x{value.hex()}" for value in values])
    return array(values)


def array(values: Collection[Any]) -> Any:
    """Return values as a parameter that is an array."""
    listed = list(values)
    if listed and isinstance(listed[0], tuple):
        return [list(pair) for pair in listed]
    literal = _literal(listed)
    return listed if "\\" in literal and _ESCAPED.search(literal) else literal


def _literal(values: list[Any]) -> str:
    """Return values as PostgreSQL writes an array: it is JSON in other brackets, which costs much less to make."""
    return f"{{{msgspec.json.encode(values).decode()[1:-1]}}}"


# A character that only JSON writes in this way, like a line's end; both write quotes and backslashes alike.
_ESCAPED = re.compile(r'(?<!\\)(?:\\\\)*\\[^"\\]')

_known: dict[object, str] = {}


def _insert(table: sa.Table) -> str:
    if table not in _known:
        names = ", ".join(f'"{column.name}"' for column in table.c)
        into = f'INSERT INTO {SCHEMA}."{table.name}" ({names})'
        # Sorted by their key: two writers that add the same rows wait for each other, but not in a circle.
        key = ", ".join(f'"{name}"' for name in _key(table))
        _known[table] = f"{into} SELECT * FROM {_unnested(list(table.c))} ORDER BY {key} ON CONFLICT DO NOTHING"  # noqa: S608
    return _known[table]


def _key(table: sa.Table) -> list[str]:
    return ["id"] if "id" in table.c and table.c.id.unique else [column.name for column in table.primary_key]


def _update(update: Update) -> str:
    if update not in _known:
        changes = ", ".join(f'"{column.name}" = new."{column.name}"' for column in update.columns)
        table, key = update.table.name, update.key.name
        rows = _unnested([*update.columns, update.key])
        _known[update] = f'UPDATE {SCHEMA}."{table}" AS old SET {changes} FROM {rows} WHERE old."{key}" = new."{key}"'  # noqa: S608
    return _known[update]


def _unnested(columns: Sequence[sa.Column[Any]]) -> str:
    arrays = ", ".join(f"%s::{column.type.compile(dialect=_DIALECT)}[]" for column in columns)
    names = ", ".join(f'"{column.name}"' for column in columns)
    return f"unnest({arrays}) AS new({names})"
