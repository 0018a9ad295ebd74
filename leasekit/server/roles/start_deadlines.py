"""Start deadlines: drop the tasks that have not begun in time, whatever they wait for.

Rule 1: a task with a start deadline has a row until its handler has begun. Other tasks have none, and cost nothing:
        nothing is read as long as the first deadline of the store, which each node looks up once a second, is to come.
Rule 2: a claim looks at the rows of the tasks that it would grant, so none is granted too late. A task that was granted
        in time may begin later, from its worker's buffer: it keeps its row, for the case that it is given back.
Rule 3: a task that waits for something else than a claim is dropped by the next regular look, in batches.
"""

from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from leasekit._lifecycle.states import LEASED, Event
from leasekit._lifecycle.transitions import NO_LIMITS, end_run
from leasekit.server.store import Deadline, Trigger
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import Status

_STEP = 500  # tasks that one transaction drops
_DROPPABLE = frozenset({Status.NEW, Status.ENQUEUED})


def add(turn: UnitOfWork, deadlines: Mapping[int, Deadline]) -> None:
    """Note by when these tasks must have begun."""
    turn.tx.set_deadlines(deadlines)
    _expect(turn, min(deadline.at for deadline in deadlines.values()))


def move(turn: UnitOfWork, due_at: Mapping[int, float]) -> None:
    """Move the start deadlines of tasks with their due times; `due_at` has the new due time of each task, by `seq`."""
    if not due_at or turn.kinds.start_by is None:
        return
    known = turn.tx.deadlines(due_at)
    if moved := {seq: Deadline(of.allowed, due_at[seq] + of.allowed) for seq, of in known.items()}:
        add(turn, moved)


def begun(turn: UnitOfWork, rows: Collection[Trigger]) -> None:
    """Forget the deadlines of tasks whose handlers have begun."""
    if rows and turn.kinds.start_by is not None:
        turn.tx.drop_deadlines([row.seq for row in rows])


def tend(turn: UnitOfWork) -> bool:
    """Drop tasks whose deadlines have passed, a batch at most; return whether there may be more."""
    turn.kinds.start_by = first = turn.tx.next_deadline()
    if first is None or first > turn.now:
        return False
    seqs = turn.tx.passed_deadlines(now=turn.now, limit=_STEP)
    rows = turn.tx.triggers_of(seqs).values()
    late = [row for row in rows if _can_be_late(row)]
    granted = {row.seq for row in rows if row.status in LEASED and row.started_at is None}  # just now, by another node
    drop(turn, late)
    turn.tx.drop_deadlines(set(seqs) - granted - {row.seq for row in late})
    turn.kinds.start_by = turn.tx.next_deadline()
    return len(seqs) == _STEP


def is_watched(turn: UnitOfWork) -> bool:
    """Return whether some deadline of the store has passed, or may have."""
    return turn.kinds.start_by is not None and turn.kinds.start_by <= turn.now


def late_ones(turn: UnitOfWork, rows: Sequence[Trigger]) -> list[Trigger]:
    """Return those of these waiting tasks that must not begin any more."""
    passed = turn.tx.deadlines([row.seq for row in rows if _can_be_late(row)])
    return [row for row in rows if row.seq in passed and passed[row.seq].at <= turn.now]


def _can_be_late(row: Trigger) -> bool:
    """Return whether a task waits for its first run; one that has failed has begun, however short its run was."""
    return row.status in _DROPPABLE and row.started_at is None and not row.failures


def drop(turn: UnitOfWork, rows: Sequence[Trigger]) -> None:
    """End these tasks, which have not begun in time."""
    if not rows:
        return
    deadlines = turn.tx.deadlines([row.seq for row in rows])
    ended = [
        replace(end_run(row, Event.DROP, limits=NO_LIMITS, now=turn.now), reason=_why(deadlines.get(row.seq)))
        for row in rows
    ]
    turn.tx.save(ended)
    turn.tx.unpark([row.seq for row in rows])
    turn.tx.drop_deadlines([row.seq for row in rows])
    for row in ended:
        turn.tell("dropped", row)
        turn.counted[row.kind, "late", ""] += 1


def _why(deadline: Deadline | None) -> str:
    allowed = "" if deadline is None else f": start_deadline is {deadline.allowed:g} s"
    return f"it had not begun in time{allowed}"


def _expect(turn: UnitOfWork, at: float) -> None:
    first = turn.kinds.start_by
    turn.kinds.start_by = at if first is None else min(first, at)
