"""The inbox: tasks that applications have put into the database in transactions of their own.

Rule 1: a row of the inbox becomes a task, and goes, in one transaction: so there is one task for each row, whichever
        node dies when.
Rule 2: a row that cannot become a task is set aside with the reason. It holds up no other.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import cast

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from leasekit._lifecycle.validation import read
from leasekit.errors import Refused
from leasekit.server.log_limit import LogLimit
from leasekit.server.roles.frontend import LAST_MOMENT, schedule
from leasekit.server.store import InboxRow, SharedTx
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import NewTask
from leasekit.wire import ScheduleRequest

logger = logging.getLogger("leasekit.server.inbox")
logger.addFilter(LogLimit())

STEP = 200  # rows that one transaction takes in, at most
_BYTES = 2**20  # of their tasks, about
_LARGEST = 4 * 2**20  # bytes of a row that is read: no service takes so large a task
_LONGEST = 500  # characters of a reason


class NotTaken(Refused):
    """The refusal of rows of the inbox that were to be taken in together."""

    def __init__(self, numbers: Sequence[int], why: str) -> None:
        super().__init__(why)
        self.numbers = numbers


def take_in(turn: UnitOfWork, numbers: Sequence[int] | None = None) -> int:
    """Schedule what is in the inbox, or these rows of it, and return the number of rows that have left it.

    Raises `NotTaken` if tasks are refused only when they are noted, as those that would wait for themselves.
    """
    rows = _tx(turn).inbox(limit=STEP, most_bytes=_BYTES, largest=_LARGEST, numbers=numbers)
    tasks: dict[int, NewTask] = {}
    refused: dict[int, str] = {}
    for row in rows:
        try:
            tasks[row.number] = _decoded(row)
        except (Refused, msgspec.DecodeError, RecursionError, ValueError) as error:
            refused[row.number] = re.sub(r"^item 0:? ?", "", str(error))
    try:
        answers = schedule(turn, list(tasks.values()))
    except Refused as error:
        raise NotTaken(list(tasks), str(error)) from error
    for number, answer in zip(tasks, answers, strict=True):
        if answer.conflict:
            refused[number] = f'the id "{answer.id}" stands for another task already, with another kind or payload'
    _tx(turn).leave_inbox([row.number for row in rows if row.number not in refused])
    set_aside(turn, refused)
    return len(rows)


def set_aside(turn: UnitOfWork, refused: Mapping[int, str]) -> None:
    """Note why these rows cannot become tasks; they stay in the inbox, and are not tried again."""
    if not refused:
        return
    reasons = {number: _told(why) for number, why in refused.items()}
    _tx(turn).set_aside(reasons)
    for number, why in reasons.items():
        logger.error("the row %d of leasekit.inbox cannot become a task, and is set aside: %s", number, why)


def _told(why: str) -> str:
    """Return a reason as the database can keep it, and a terminal can show it: it may quote what the row has."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in why[:_LONGEST])


def _tx(turn: UnitOfWork) -> SharedTx:
    return cast("SharedTx", turn.tx)  # only a shared store has an inbox


def _decoded(row: InboxRow) -> NewTask:
    if row.task is None:
        raise ValueError(f"a task has at most {_LARGEST:,} bytes of JSON")
    one = msgspec.json.decode(row.task, type=Raw)  # so that the text of a row cannot end the list, and begin another
    request: ScheduleRequest = read(b'{"tasks":[%b]}' % bytes(one), ScheduleRequest)
    task: NewTask = request.tasks[0]
    if task.delay is None:
        return task
    # Counted from when it was written, and not from when a node has time to look.
    at = datetime.fromtimestamp(min(max(row.at + task.delay, 0.0), LAST_MOMENT), UTC)
    return replace(task, at=at, delay=None)
