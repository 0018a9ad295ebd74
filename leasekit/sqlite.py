"""Schedule tasks in a transaction of your own, in an SQLite file of your application, for any service.

The task is written into a table of your file, `leasekit_outbox`, in your transaction. A `Relay` hands what has been
committed on to a service, under ids that were chosen when it was written: so the task is scheduled once if, and only
if, your transaction commits, whichever process dies when.

The store of `sqlite://` is a file of leasekit's alone, because a long transaction of another program in it would hold
up heartbeats. This is why tasks go into your file first.
"""

import logging
import os
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, Self, overload

import msgspec
from msgspec.structs import replace

from leasekit._transactions import Statement, execute, run, written
from leasekit.client import Client
from leasekit.codecs import Codecs
from leasekit.errors import AccessDenied, ConfigError, LeasekitError, Refused
from leasekit.task import NewTask

__all__ = ["Relay", "schedule"]

logger = logging.getLogger("leasekit.relay")

_TABLE = """
CREATE TABLE IF NOT EXISTS leasekit_outbox (number INTEGER PRIMARY KEY AUTOINCREMENT, task TEXT NOT NULL, refused TEXT)
"""
_PUT = Statement("INSERT INTO leasekit_outbox (task) VALUES ({task})")
# As bytes: a text that is no UTF-8 is set aside as any other bad row.
_FIRST = """
SELECT number, CASE WHEN length(CAST(task AS BLOB)) <= ? THEN CAST(task AS BLOB) END FROM leasekit_outbox
WHERE refused IS NULL ORDER BY number LIMIT ?
"""
# The task is compared: a restored or mended file may have another one under the same number by now.
_SAME = "number = ? AND (? IS NULL OR CAST(task AS BLOB) = ?)"
_REMOVE = f"DELETE FROM leasekit_outbox WHERE {_SAME}"  # noqa: S608 - a constant
_SET_ASIDE = f"UPDATE leasekit_outbox SET refused = ? WHERE {_SAME}"  # noqa: S608 - a constant
_BATCH = 100
_BYTES = 4 * 2**20  # of the tasks of a batch, about
_LARGEST = 4 * 2**20  # bytes of a row that is read: no service takes so large a task
_BUSY = 10.0  # seconds that a transaction of the application may take while the relay waits to write
_PATIENCE = 2.0  # seconds for which a call is repeated; then the rows are read again
_LATEST = datetime.max.replace(tzinfo=UTC) - timedelta(days=1)


class _Row(NamedTuple):
    number: int
    task: bytes | None  # None: it is too large to be read


@overload
def schedule(connection: Any, tasks: NewTask, *, codec: Codecs = None) -> str: ...
@overload
def schedule(connection: Any, tasks: Sequence[NewTask], *, codec: Codecs = None) -> list[str]: ...
def schedule(connection: Any, tasks: NewTask | Sequence[NewTask], *, codec: Codecs = None) -> str | list[str]:
    """Schedule a task, or several, in the transaction of `connection`; return the id of each.

    `connection` is one of the module sqlite3, or a connection or session of SQLAlchemy (of an async one, within its
    `run_sync`). Nothing is committed here. The first call makes the table. A `delay` counts from the call.

    `codec` encodes payloads as that of `connect` does. Raises `Refused`, with the field, for what no service would
    take.
    """
    many, rows = written(_with_instants(tasks), codec)
    run(connection, _TABLE)
    execute(connection, _PUT, [task for _, task in rows])
    return [task_id for task_id, _ in rows] if many else rows[0][0]


def _with_instants(tasks: NewTask | Sequence[NewTask]) -> NewTask | list[NewTask]:
    """Return the tasks with an `at` in place of a `delay`: a delay counts from now, not from when a relay reads it."""
    if not isinstance(tasks, NewTask):
        return [_with_instant(task) for task in tasks]
    return _with_instant(tasks)


def _with_instant(task: NewTask) -> NewTask:
    if not isinstance(task.delay, int | float) or not 0 < task.delay < 1e9:
        return task  # a bad value is refused with the others
    return replace(task, at=min(datetime.now(UTC) + timedelta(seconds=task.delay), _LATEST), delay=None)


class Relay:
    """Hands tasks from the outbox in an SQLite file on to a service, in a thread, inside `with`.

    Any number of relays may serve one file, in any processes. `path` is the file of the application; `interval` is the
    seconds between two looks at an empty outbox. A row that the service refuses is set aside, with the reason
    (`leasekit_outbox.refused`), and an error in the log; all others go on.
    """

    def __init__(self, path: str | os.PathLike[str], client: Client, *, interval: float = 0.1) -> None:
        if not interval > 0:
            raise ConfigError(f"interval must be more than 0 s, got {interval}: raise interval")
        self._path = os.fspath(path)
        self._client = client
        self._interval = interval
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._fault: str | None = None

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise ConfigError("a relay is entered once: make another")
        self._thread = threading.Thread(target=self._run, name="leasekit-relay", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop; what is left in the outbox waits for the next relay."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                handed_on = self.deliver()
                self._note(None)
            except (LeasekitError, sqlite3.Error, OSError) as error:
                handed_on = 0
                self._note(f"{type(error).__name__}: {error}")
            if not handed_on:
                self._is_over.wait(self._interval if self._fault is None else max(self._interval, 1.0))

    def _note(self, fault: str | None) -> None:
        """Log the begin and the end of a failure once."""
        was, self._fault = self._fault, fault
        if fault is not None and was is None:
            logger.warning("the outbox in %s is not handed on at the moment, and tried again: %s", self._path, fault)
        elif fault is None and was is not None:
            logger.info("the outbox in %s is handed on again", self._path)

    def deliver(self) -> int:
        """Hand on the first tasks of the outbox, up to 100, and return the number of rows that were looked at.

        Raises what `Client.schedule` raises for an outage, and `sqlite3.Error`. A file without an outbox has none to
        hand on; a file that does not exist is not made.
        """
        if not os.path.exists(self._path):  # noqa: PTH110 - the path may be of any type
            return 0
        with closing(sqlite3.connect(self._path, timeout=_BUSY, isolation_level=None)) as connection:
            try:
                rows = _first_rows(connection)
            except sqlite3.OperationalError as error:
                if "no such table" in str(error):
                    return 0
                raise
            if rows:
                refused = self._schedule(rows)
                connection.execute("BEGIN IMMEDIATE")
                for number, task in rows:
                    if (why := refused.get(number)) is None:
                        connection.execute(_REMOVE, (number, task, task))
                    else:
                        connection.execute(_SET_ASIDE, (why, number, task, task))
                connection.execute("COMMIT")
            return len(rows)

    def _schedule(self, rows: Sequence[_Row]) -> dict[int, str]:
        """Schedule these rows; return why those that were refused cannot become tasks."""
        tasks: dict[int, NewTask] = {}
        refused: dict[int, str] = {}
        for row in rows:
            try:
                tasks[row.number] = _task_of(row)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                refused[row.number] = str(error)
        try:
            refused |= self._send(tasks)
        except (Refused, AccessDenied) as error:
            if not _is_of_rows(error):
                raise
            for number, task in tasks.items():
                refused |= self._send_one(number, task)
        for number, why in refused.items():
            logger.error("the row %d of leasekit_outbox in %s is set aside: %s", number, self._path, why[:500])
        return refused

    def _send_one(self, number: int, task: NewTask) -> dict[int, str]:
        try:
            return self._send({number: task})
        except (Refused, AccessDenied) as error:
            if not _is_of_rows(error):
                raise
            return {number: str(error)}

    def _send(self, tasks: dict[int, NewTask]) -> dict[int, str]:
        answers = self._client.__deliver__(list(tasks.values()), at_most=_PATIENCE) if tasks else []
        return {
            number: f'the id "{answer.id}" stands for another task already, with another kind or payload'
            for number, answer in zip(tasks, answers, strict=True)
            if answer.conflict
        }


class _Written(NewTask, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """A task in the form of an outbox row: its payload is bytes, which a codec may have encoded."""

    payload: msgspec.Raw = msgspec.Raw(b"null")


def _first_rows(connection: sqlite3.Connection) -> list[_Row]:
    rows, room = list[_Row](), _BYTES
    with closing(connection.execute(_FIRST, [_LARGEST, _BATCH])) as found:
        for row in map(_Row._make, found):
            rows.append(row)
            room -= len(row.task or b"")
            if room < 0:
                break
    return rows


def _is_of_rows(error: Refused | AccessDenied) -> bool:
    """Return whether single tasks were refused, and not the relay, whose access token may be made valid again."""
    return isinstance(error, Refused) or bool(error.errors)


def _task_of(row: _Row) -> NewTask:
    if row.task is None:
        raise ValueError(f"a task has at most {_LARGEST:,} bytes of JSON")
    task = msgspec.json.decode(row.task, type=_Written)
    if task.id is None:  # another program wrote it; the same id whenever the row is read
        raise ValueError("a row needs an id, so that it makes one task however often it is read")
    return NewTask(**{name: getattr(task, name) for name in NewTask.__struct_fields__})
