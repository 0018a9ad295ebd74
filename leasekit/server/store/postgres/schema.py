"""The schema `leasekit` of a database: its version, and the migrations that bring it up to date.

Rule 1: a database is changed only where somebody asked for it (`leasekit migrate`, `leasekit serve --migrate`): it is
shared, and perhaps not the one that was meant.
Rule 2: a node serves a database of its own version, and of the version before it, so that nodes can be replaced one by
one: a migration first adds what the next version needs, and a later one removes what nobody uses.
Rule 3: migrations of several nodes go one after another, and give up where a lock cannot be had.
"""

from importlib import resources
from importlib.metadata import version as version_of

import psycopg

from leasekit.errors import BackendError, ConfigError
from leasekit.server.store.postgres.session import Connection

HEAD = 2
"""The version of the tables that this leasekit makes."""

_LOCK = 0x6C656173656B6974  # "leasekit", a number that no other program should use
_WAIT = "3s"  # for a lock that a migration needs: all requests would wait behind it


def tables_version(connection: Connection) -> int:
    """Return the version of the tables in a database; 0: there are none."""
    with connection.transaction():
        if connection.execute("SELECT pg_catalog.to_regclass('leasekit.version')").fetchone() == (None,):
            return 0
        row = connection.execute("SELECT max(number) FROM leasekit.version").fetchone()
    return int(row[0] or 0) if row else 0


def check(connection: Connection, *, where: str) -> int:
    """Return the version of the tables. Raises `ConfigError` if this leasekit cannot use them."""
    check_encoding(connection, where=where)
    number = tables_version(connection)
    if (why := fault(number, where=where)) is not None:
        raise ConfigError(why)
    return number


def check_encoding(connection: Connection, *, where: str) -> None:
    """Raise `ConfigError` if a database cannot keep every text."""
    encoding = connection.info.parameter_status("server_encoding")
    if encoding not in (None, "UTF8"):
        raise ConfigError(
            f"{where} has the encoding {encoding}: make one with CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
        )


def fault(number: int, *, where: str) -> str | None:
    """Return why this leasekit cannot use tables of this version; None: it can. `where` names the database."""
    if number == 0:
        return f"{where} has no tables of leasekit: create them with `leasekit migrate --store URL`"
    if number < HEAD - 1:
        return (
            f"the tables of {where} have version {number}, and leasekit {version_of('leasekit')} needs {HEAD - 1} or "
            f"{HEAD}: run `leasekit migrate --store URL`"
        )
    if number > HEAD + 1:
        return f"the tables of {where} have version {number}: they need a newer leasekit"
    return None


def migrate(connection: Connection) -> list[int]:
    """Create the tables, or bring them up to date; return the versions that were made. Raises `BackendError`."""
    made: list[int] = []
    try:
        while (number := _step(connection)) is not None:
            made.append(number)
    except psycopg.errors.LockNotAvailable as error:
        raise BackendError(
            f"a migration could not lock a table for {_WAIT}, and changed nothing since version "
            f"{tables_version(connection)}: "
            "end long transactions, and run it again"
        ) from error
    except psycopg.errors.InsufficientPrivilege as error:
        raise BackendError(
            f"this user may not create the tables ({str(error).splitlines()[0]}): run the migration as the owner of "
            "the database, or have them run CREATE SCHEMA leasekit AUTHORIZATION this_user"
        ) from error
    except psycopg.errors.DuplicateTable as error:
        raise BackendError(
            f"the schema leasekit has tables, and not their version: restore both from one backup "
            f"({str(error).splitlines()[0]})"
        ) from error
    return made


def _step(connection: Connection) -> int | None:
    with connection.transaction():
        # Each statement sees what the migration before has made, also where another isolation is the default.
        connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        connection.execute("SET LOCAL search_path = pg_catalog")
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        connection.execute(f"SET LOCAL lock_timeout = '{_WAIT}'")
        if connection.execute("SELECT to_regnamespace('leasekit')").fetchone() == (None,):
            connection.execute("CREATE SCHEMA leasekit")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS leasekit.version"
            " (number int NOT NULL PRIMARY KEY, made_at timestamptz NOT NULL)"
        )
        row = connection.execute("SELECT coalesce(max(number), 0) FROM leasekit.version").fetchone()
        number = int(row[0]) + 1 if row else 1
        if number > HEAD:
            return None
        script = (
            resources.files("leasekit.server.store.postgres").joinpath("migrations", f"{number:04}.sql").read_text()
        )
        connection.execute(script.encode())
        connection.execute("INSERT INTO leasekit.version VALUES (%s, clock_timestamp())", (number,))
    return number
