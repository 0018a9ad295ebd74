"""Tasks that applications write into an inbox, and the statements for the library of their connection.

Rule 1: no library is imported here but one whose connection was given.
"""

import inspect
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from leasekit._arguments import check_fields, checked_codecs
from leasekit._batches import parts, placed, with_ids
from leasekit._driver.coding import CLEAR, Coding
from leasekit._driver.reporting.encoding import submitted
from leasekit._lifecycle.validation import checked
from leasekit.codecs import Codecs
from leasekit.errors import Refused
from leasekit.hooks import Hooks
from leasekit.task import NewTask
from leasekit.wire import ScheduleRequest

__all__ = ["Statement", "aexecute", "execute", "run", "written"]


class Statement(NamedTuple):
    """A statement with one parameter, which stands as `{task}` in its text."""

    text: str

    def with_parameter(self, parameter: str) -> str:
        """Return the text with a parameter in the style of a library."""
        return self.text.replace("{task}", parameter)


def written(tasks: NewTask | Sequence[NewTask], codec: Codecs = None) -> tuple[bool, list[tuple[str, str]]]:
    """Return whether several tasks were given, and the id and the JSON of each, its payload encoded by `codec`.

    Raises `Refused`, `ConfigError` for a wrong codec, and ValueError if that cannot encode a payload.
    """
    many = not isinstance(tasks, NewTask)
    batch = list(tasks) if not isinstance(tasks, NewTask) else [tasks]
    check_fields(batch)
    coding = Coding(given) if (given := checked_codecs(codec)) else CLEAR
    encode, rows = msgspec.json.encode, list[tuple[str, str]]()
    with Hooks().scheduling(submitted(with_ids(batch), coding)) as identified:
        for first, part in parts(identified) if identified else ():
            with placed(first):
                request = checked(ScheduleRequest, {"tasks": part})
            rows += [(task.id or "", encode(task).decode()) for task in request.tasks]
    return many, rows


def execute(connection: Any, statement: Statement, values: Sequence[str]) -> None:
    """Run a statement once for each value. Raises TypeError for a connection of another library, and `Refused`."""
    library = library_of(connection, is_async=False)
    if not values:
        return
    with _encoded():
        match library:
            case "sqlalchemy":
                connection.execute(_text(statement), [{"task": value} for value in values])
            case "psycopg":
                with _psycopg().Cursor(connection) as cursor:
                    cursor.executemany(statement.with_parameter("%s"), [(value,) for value in values])
            case _:
                connection.executemany(statement.with_parameter("?"), [(value,) for value in values])


def run(connection: Any, statement: str) -> None:
    """Run a statement without parameters. Raises TypeError for a connection of another library."""
    is_alchemy = library_of(connection, is_async=False) == "sqlalchemy"
    connection.execute(_text(Statement(statement)) if is_alchemy else statement)


async def aexecute(connection: Any, statement: Statement, values: Sequence[str]) -> None:
    """Do what `execute` does, with an async connection."""
    library = library_of(connection, is_async=True)
    if not values:
        return
    with _encoded():
        match library:
            case "sqlalchemy":
                await connection.execute(_text(statement), [{"task": value} for value in values])
            case "psycopg":
                async with _psycopg().AsyncCursor(connection) as cursor:
                    await cursor.executemany(statement.with_parameter("%s"), [(value,) for value in values])
            case _:
                await connection.executemany(statement.with_parameter("?"), [(value,) for value in values])


@contextmanager
def _encoded() -> Generator[None]:
    try:
        yield
    except UnicodeEncodeError as error:
        character = error.object[error.start]
        raise Refused(
            f"the task has the character {character!a}, which a connection with the encoding {error.encoding} cannot "
            "send: give the connection client_encoding=UTF8"
        ) from None


def library_of(connection: object, *, is_async: bool) -> str:
    """Return the name of the library of a connection or session. Raises TypeError for one that the call cannot use."""
    roots = {base.__module__.partition(".")[0] for base in type(connection).__mro__}
    library = next((name for name in ("sqlalchemy", "psycopg", "sqlite3") if name in roots), None)
    if library is None or not hasattr(connection, "commit"):
        what = f"{type(connection).__module__}.{type(connection).__qualname__}"
        raise TypeError(
            f"a connection of psycopg 3, sqlite3 or SQLAlchemy, or a session of SQLAlchemy, is needed, not {what}"
        )
    if inspect.iscoroutinefunction(getattr(connection, "execute", None)) is not is_async:
        raise TypeError(
            f"{type(connection).__qualname__} is "
            + ("for threads: call `schedule`" if is_async else "for event loops: call `await aschedule`")
        )
    return library


def _psycopg() -> Any:
    import psycopg  # its own cursors, whose parameters are known: a connection may make others

    return psycopg


def _text(statement: Statement) -> Any:
    import sqlalchemy  # the connection is of it: so it is there

    return sqlalchemy.text(statement.with_parameter(":task"))
