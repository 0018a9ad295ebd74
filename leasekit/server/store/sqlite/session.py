"""Statements on a connection to an SQLite file, through the driver's own cursor: SQLAlchemy's would cost more."""

import sqlite3
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from leasekit.server.store.sql.statements import Compiled, Insert, Statement, Update

_DIALECT = sqlite.dialect()
_TOGETHER = 41  # rows: every SQLite takes 999 values in one statement, and the widest table has 24 columns
_encode = msgspec.json.encode


class SqliteSession:
    """A connection with a transaction in progress. `Session` describes the methods."""

    def __init__(self, driver: sqlite3.Connection) -> None:
        self.driver = driver

    def rows(self, statement: Statement, **values: Any) -> list[tuple[Any, ...]]:
        try:
            return self._run(statement, values).fetchall()
        except sqlite3.OperationalError as error:
            if "UTF-8" not in str(error) or self.driver.text_factory is text_or_bytes:
                raise
            # A damaged text must not fail the other rows. This factory costs more: it is used once there is damage.
            self.driver.text_factory = text_or_bytes
            return self.rows(statement, **values)

    def run(self, statement: Statement, **values: Any) -> None:
        self._run(statement, values)

    def count(self, statement: Statement, **values: Any) -> int:
        return self._run(statement, values).rowcount

    def _run(self, statement: Statement, values: Mapping[str, Any]) -> sqlite3.Cursor:
        compiled = statement.compiled(_DIALECT)
        return self.driver.execute(compiled.sql, bound(compiled, values))

    def insert(self, into: Insert, rows: Sequence[tuple[Any, ...]]) -> None:
        one, many = _inserts(into.table)
        rest = len(rows) - len(rows) % _TOGETHER
        for at in range(0, rest, _TOGETHER):
            self.driver.execute(many, list(chain.from_iterable(rows[at : at + _TOGETHER])))
        if rest < len(rows):
            self.driver.executemany(one, rows[rest:])

    def update(self, update: Update, rows: Sequence[tuple[Any, ...]]) -> None:
        if rows:
            self.driver.executemany(_update(update), rows)


def bound(compiled: Compiled, values: Mapping[str, Any]) -> list[Any]:
    """Return the values of the parameters in their order; a list is one JSON value."""
    given = compiled.bound(values)
    return [_encode(list(given[name])).decode() if name in compiled.lists else given[name] for name in compiled.names]


_known: dict[object, Any] = {}


def _inserts(table: sa.Table) -> tuple[str, str]:
    """Return the statement that inserts one row, and the one that inserts `_TOGETHER` rows, which costs less."""
    if table not in _known:
        one = str(sa.insert(table).compile(dialect=_DIALECT))
        row = one.partition(" VALUES ")[2]
        _known[table] = one, ", ".join([one] + [row] * (_TOGETHER - 1))
    inserts: tuple[str, str] = _known[table]
    return inserts


def _update(update: Update) -> str:
    if update not in _known:
        changes = ", ".join(f'"{column.name}" = ?' for column in update.columns)
        _known[update] = f'UPDATE "{update.table.name}" SET {changes} WHERE "{update.key.name}" = ?'  # noqa: S608
    return str(_known[update])


def text_or_bytes(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def driver_of(connection: sa.Connection) -> sqlite3.Connection:
    connected = connection.connection.driver_connection
    assert isinstance(connected, sqlite3.Connection)  # noqa: S101 - there is no other
    return connected
