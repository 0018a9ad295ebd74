"""Statements in SQLAlchemy Core, compiled once for the dialect that runs them, and what they are made of.

Statements run on the driver's own cursor, and rows are plain tuples, so that both cost no more than the driver does.
Only `_Listed`, `_OneOf` and `_PairOf`, which pass a list of values as one parameter, are written anew for each dialect.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import sqlalchemy as sa
from sqlalchemy import bindparam
from sqlalchemy.engine.interfaces import Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.selectable import TableValuedAlias


class Compiled(NamedTuple):
    """A statement as text in one dialect."""

    sql: str
    names: tuple[str, ...]  # the parameters in their order, for a dialect that numbers them
    values: Mapping[str, Any]  # those written in the statement itself; None for the others
    lists: frozenset[str]  # the parameters that are lists

    def bound(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.values, **values}


class Statement:
    """A statement, which each dialect compiles once."""

    def __init__(self, expression: sa.ClauseElement) -> None:
        self.expression = expression
        self._compiled: dict[tuple[str, str | None], Compiled] = {}

    def compiled(self, dialect: Dialect, *, schema: str | None = None) -> Compiled:
        known = self._compiled.get((dialect.name, schema))
        if known is None:
            self._compiled[dialect.name, schema] = known = _compiled(self.expression, dialect, schema)
        return known


class Insert:
    """An insert of many rows into a table; the values are in the order of its columns."""

    def __init__(self, table: sa.Table) -> None:
        self.table = table


class Update:
    """An update of many rows of a table. The values are those of its columns from `first` to `last`, then the key."""

    def __init__(self, key: sa.Column[Any], *, first: int, last: int | None = None) -> None:
        self.table = key.table
        self.key = key
        self.columns = list(key.table.c)[first : None if last is None else last + 1]


def _compiled(expression: sa.ClauseElement, dialect: Dialect, schema: str | None) -> Compiled:
    places: dict[str, Any] = {"schema_translate_map": {None: schema}, "render_schema_translate": True} if schema else {}
    compiled = cast("SQLCompiler", expression.compile(dialect=dialect, **places))
    lists = frozenset(name for name, bind in compiled.binds.items() if isinstance(bind.type, sa.ARRAY))
    return Compiled(str(compiled), tuple(compiled.positiontup or ()), compiled.params, lists)


class _Listed(FunctionElement[Any]):
    """The values of a list as rows of one column, `value`."""

    inherit_cache = True


class _Condition(FunctionElement[bool]):
    type = sa.Boolean()
    inherit_cache = True

    def self_group(self, against: object = None) -> "_Condition":
        return self  # in a WHERE for SQLite, SQLAlchemy would compare it with 1: no index is used for that


class _OneOf(_Condition):
    """Whether a value is in a list."""


class _PairOf(_Condition):
    """Whether two values are a pair in a list of pairs."""


@compiles(_Listed, "sqlite")
def _(element: _Listed, compiler: SQLCompiler, **options: Any) -> str:
    return f"(SELECT value FROM json_each({compiler.process(element.clauses, **options)}))"


@compiles(_Listed, "postgresql")
def _(element: _Listed, compiler: SQLCompiler, **options: Any) -> str:
    return f"(SELECT unnest({compiler.process(element.clauses, **options)}) AS value)"


@compiles(_OneOf, "sqlite")
def _(element: _OneOf, compiler: SQLCompiler, **options: Any) -> str:
    value, listed = (compiler.process(part, **options) for part in element.clauses)
    return f"{value} IN (SELECT value FROM json_each({listed}))"


@compiles(_OneOf, "postgresql")
def _(element: _OneOf, compiler: SQLCompiler, **options: Any) -> str:
    value, listed = (compiler.process(part, **options) for part in element.clauses)
    return f"{value} = ANY ({listed})"


@compiles(_PairOf, "sqlite")
def _(element: _PairOf, compiler: SQLCompiler, **options: Any) -> str:
    first, second, pairs = (compiler.process(part, **options) for part in element.clauses)
    values = "json_extract(value, '$[0]'), json_extract(value, '$[1]')"
    return f"({first}, {second}) IN (SELECT {values} FROM json_each({pairs}))"


@compiles(_PairOf, "postgresql")
def _(element: _PairOf, compiler: SQLCompiler, **options: Any) -> str:
    first, second, pairs = element.clauses
    types = [part.type.compile(dialect=compiler.dialect) for part in (first, second)]
    values = ", ".join(f"CAST(pair ->> {at} AS {of})" for at, of in enumerate(types))
    names = ", ".join(compiler.process(part, **options) for part in (first, second))
    listed = compiler.process(pairs, **options)
    return f"({names}) IN (SELECT {values} FROM jsonb_array_elements(to_jsonb({listed})) AS pair)"


def listed(parameter: str, of: Any) -> TableValuedAlias:
    return _Listed(bindparam(parameter, type_=sa.ARRAY(of))).table_valued(sa.column("value"), name=parameter)


def is_one_of(value: sa.ColumnElement[Any], parameter: str) -> sa.ColumnElement[bool]:
    return _OneOf(value, bindparam(parameter, type_=sa.ARRAY(_type(value))))


def is_among(value: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """Return whether a value is in the parameter `among`, a list."""
    return is_one_of(value, "among")


def is_one_pair_of(
    first: sa.ColumnElement[Any], second: sa.ColumnElement[Any], parameter: str
) -> sa.ColumnElement[bool]:
    return _PairOf(first, second, bindparam(parameter, type_=sa.ARRAY(_type(first), dimensions=2)))


def _type(value: sa.ColumnElement[Any]) -> Any:
    return sa.BigInteger() if isinstance(value.type, sa.Integer) else sa.Text()


NOW = bindparam("now", type_=sa.Double)
MOMENT = bindparam("at", type_=sa.Double)
MOST = bindparam("most", type_=sa.Integer)


def greater(first: sa.ColumnElement[float], second: sa.ColumnElement[float]) -> sa.ColumnElement[float]:
    return sa.case((first > second, first), else_=second)


class Session(Protocol):
    """A connection with a transaction in progress, and the dialect in which it runs statements."""

    def rows(self, statement: Statement, **values: Any) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows. A parameter that is a list takes any collection."""
        ...

    def run(self, statement: Statement, **values: Any) -> None:
        """Run a statement that only writes."""
        ...

    def count(self, statement: Statement, **values: Any) -> int:
        """Run a statement and return the number of rows that it changed."""
        ...

    def insert(self, into: Insert, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert these rows. Raises an error if one is there already."""
        ...

    def update(self, update: Update, rows: Sequence[tuple[Any, ...]]) -> None:
        """Update the rows with these keys."""
        ...
