"""Enqueueing: a part of the consumer that moves due tasks to queues of messages, one queue for each kind and priority.

Rule 1: a task is moved in a transaction, and its message is sent after the commit: no message is ahead of its task.
Rule 2: a moved task is due again after its enqueue timeout. So a message that is lost costs time, and of several nodes
        one moves a task in one period.
Rule 3: a task whose message the queue has not taken is put back, unless something has happened to it meanwhile.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from leasekit._lifecycle.transitions import enqueue, unqueue
from leasekit.named import PREFIXES
from leasekit.server.due_tasks import DueTasks
from leasekit.server.roles import gates, start_deadlines
from leasekit.server.store import Trigger
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import Status

MOST = 1000  # tasks that one transaction moves, about


class Due(NamedTuple):
    """An order to move up to `most` due tasks of each lane of these kinds, but for some lanes."""

    kinds: Collection[str]
    most: int
    without: Collection[tuple[str, int]] = ()  # kind and priority


class Moved(NamedTuple):
    """A task that was moved, as far as its message and a queue that fails need it."""

    id: str
    kind: str
    priority: int
    fence: int
    due_at: float  # before it was moved
    status: Status  # before it was moved
    until: float  # when it is due again


def move(turn: UnitOfWork, due: Due) -> list[Moved]:
    """Note due tasks as enqueued, as far as gates and limits let them start; the caller sends their messages."""
    kinds = [kind for kind in due.kinds if not kind.startswith(PREFIXES)]
    due_tasks = DueTasks(turn, kinds, wanted=due.most, without=due.without)
    rows = due_tasks.take_of_each(due.most, together=MOST)
    gates.shut_out(turn, due_tasks.sieve.shut_out)
    start_deadlines.drop(turn, due_tasks.sieve.late)
    limits = turn.tx.limits([row.seq for row in rows]) if rows else {}
    timeouts = {seq: of_task.enqueue_timeout for seq, of_task in limits.items()}
    after = [enqueue(row, timeout=timeouts[row.seq], now=turn.now) for row in rows]
    turn.tx.save(after)
    due_tasks.close()
    for row in after:
        turn.tell("enqueued", row)
        turn.ready(row.kind, row.next_trigger_at or turn.now)
    return [_moved(before, row) for before, row in zip(rows, after, strict=True)]


def put_back(turn: UnitOfWork, tasks: Sequence[Moved]) -> int:
    """Make tasks due again whose messages no queue has taken; return how many of them still wait as they were moved."""
    rows = turn.tx.triggers([task.id for task in tasks])
    pairs = [(rows[task.id], task) for task in tasks if task.id in rows]
    still = [(row, task) for row, task in pairs if _waits_as_moved(row, task)]
    turn.tx.save([unqueue(row, due_at=task.due_at, before=task.status) for row, task in still])
    for row, task in still:
        turn.ready(row.kind, task.due_at)
    for task in tasks:
        turn.counted[task.kind, "unsent", ""] += 1
    return len(still)


def _waits_as_moved(row: Trigger, task: Moved) -> bool:
    return row.status is Status.ENQUEUED and (row.fence, row.next_trigger_at) == (task.fence, task.until)


def _moved(before: Trigger, after: Trigger) -> Moved:
    due_at, until = before.next_trigger_at or 0.0, after.next_trigger_at or 0.0
    return Moved(after.id, after.kind, after.priority, after.fence, due_at, before.status, until)
