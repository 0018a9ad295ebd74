"""Schedule tasks in a transaction of your own, in a PostgreSQL database that has leasekit's tables.

The task exists if, and only if, your transaction commits. The nodes of the database take it from their inbox, the table
`leasekit.inbox`, within milliseconds of the commit; if none is running, the first that starts does.

`connection` is a connection of psycopg 3, or a connection or session of SQLAlchemy with any driver of PostgreSQL.
Nothing is committed here. The user of the connection needs the right to insert into its
column `task`.
"""

from collections.abc import Sequence
from typing import Any, overload

from leasekit._transactions import Statement, aexecute, execute, written
from leasekit.codecs import Codecs
from leasekit.task import NewTask

__all__ = ["aschedule", "schedule"]

_PUT = "INSERT INTO leasekit.inbox (task) VALUES ({task})"
_PUT_AND_RING = (
    f"WITH put AS ({_PUT} RETURNING 1) "  # noqa: S608 - a column would need the right to read it
    """SELECT pg_catalog.pg_notify('leasekit', 'application [["inbox"]]') FROM put"""
)


@overload
def schedule(connection: Any, tasks: NewTask, *, wake: bool = True, codec: Codecs = None) -> str: ...
@overload
def schedule(connection: Any, tasks: Sequence[NewTask], *, wake: bool = True, codec: Codecs = None) -> list[str]: ...
def schedule(
    connection: Any, tasks: NewTask | Sequence[NewTask], *, wake: bool = True, codec: Codecs = None
) -> str | list[str]:
    """Schedule a task, or several, in the transaction of `connection`; return the id of each.

    `wake=False` sends no NOTIFY: then the task is seen within a second, and not at once. Commits that notify wait for
    each other, so leave it out in transactions by the thousand a second, and in those of PREPARE TRANSACTION.

    `codec` encodes payloads as that of `connect` does.

    Raises `Refused`, with the field, for what no service would take. A task whose `id` stands for another one already
    is seen only later: it is set aside in `leasekit.inbox`, with the reason.
    """
    many, rows = written(tasks, codec)
    execute(connection, _statement(wake=wake), [task for _, task in rows])
    return [task_id for task_id, _ in rows] if many else rows[0][0]


@overload
async def aschedule(connection: Any, tasks: NewTask, *, wake: bool = True, codec: Codecs = None) -> str: ...
@overload
async def aschedule(
    connection: Any, tasks: Sequence[NewTask], *, wake: bool = True, codec: Codecs = None
) -> list[str]: ...
async def aschedule(
    connection: Any, tasks: NewTask | Sequence[NewTask], *, wake: bool = True, codec: Codecs = None
) -> str | list[str]:
    """Do what `schedule` does, with an async connection or session of psycopg 3 or SQLAlchemy."""
    many, rows = written(tasks, codec)
    await aexecute(connection, _statement(wake=wake), [task for _, task in rows])
    return [task_id for task_id, _ in rows] if many else rows[0][0]


def _statement(*, wake: bool) -> Statement:
    return Statement(_PUT_AND_RING if wake else _PUT)
