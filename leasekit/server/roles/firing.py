"""Firings: schedule the tasks of periodic tasks whose time has come.

Rule 1: a firing is made in one transaction: its task is scheduled like any other, and its periodic task goes on. Both
        are locked or conditional, and the task's id is that of the firing; so each firing is made once, whoever dies.
Rule 2: a firing that makes no task is noted with its reason.
Rule 3: one periodic task that cannot be judged keeps no other from firing; nor do many of one caller those of another.
"""

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from leasekit._lifecycle.states import WAITING, Event
from leasekit._lifecycle.transitions import NO_LIMITS, end_run
from leasekit.errors import Refused
from leasekit.periodic import Firing, FiringOutcome, PeriodicTaskItem
from leasekit.server import firings
from leasekit.server.firings import Due, delay, firing_id
from leasekit.server.roles.frontend import schedule
from leasekit.server.store import PeriodicRow, Trigger
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import NewTask, Scheduled, TaskSettings

logger = logging.getLogger("leasekit.server")

STEP = 100  # periodic tasks that one transaction judges, at most
_MOST = 500  # tasks that one transaction schedules, about
_KEPT = 20  # firings that are noted of each periodic task
_LEAST_DEADLINE = 1.0  # seconds
_AGAIN = 60.0  # seconds until a periodic task that could not be judged is judged again
_LABELS = ("requires", "prefers", "prefer_for")
_OPTIONS = {*TaskSettings.__struct_fields__, "kind", "payload", "collection", "tags", *_LABELS, "key"} - {
    "start_deadline"
}

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(PeriodicTaskItem).decode
_decode_firings = msgspec.json.Decoder(list[Firing]).decode


def fire(turn: UnitOfWork, names: Sequence[str]) -> int:
    """Make the firings of these periodic tasks that are due; return how many of the tasks were judged, from the first.

    That is at least one.
    """
    rows = {row.name: row for row in turn.tx.due_periodics(names, now=turn.now)}
    made = 0
    for judged, name in enumerate(names):
        if made >= _MOST:
            return judged
        if name in rows:
            made += fire_one(turn, rows[name]).made
    return len(names)


class Fired(NamedTuple):
    """A periodic task whose firings were judged."""

    row: PeriodicRow
    """As it is now."""
    made: int
    """The number of tasks that were scheduled."""
    is_locked: bool = False
    """Whether nothing was judged, because another writer has locked the last task: it is judged later."""


def fire_one(turn: UnitOfWork, row: PeriodicRow) -> Fired:
    """Make the firings of one periodic task that are due."""
    if row.next_at is None or row.next_at > turn.now:
        return Fired(row, 0)
    task: PeriodicTaskItem | None = None
    try:
        task = decoded(row)
        due = firings.due(row.name, task, since=row.since, now=turn.now)
        since = row.since if due.since is None else float(due.since)
        next_at = next(iter(firings.next_times(row.name, task, since=since, count=1)), None)
    except Refused as error:
        return Fired(_put_off(turn, row, str(error), kind=None if task is None else task.kind), 0)
    previous, is_locked = _previous(turn, row, task)
    if is_locked:
        return Fired(row, 0, is_locked=True)
    plan = _planned(row, task, due, previous, now=turn.now)
    try:
        answers = schedule_firings(turn, plan.new) if plan.new else []
    except Refused as error:  # before anything was written
        return Fired(_put_off(turn, row, str(error), kind=task.kind), 0)
    if plan.replaced is not None:
        _cancel(turn, plan.replaced, by=plan.new[-1].id)
    made = [_made(at, answer) for at, answer in zip(plan.instants, answers, strict=True)]
    notes = sorted([*plan.notes, *made], key=lambda note: note.at)
    last_id = answers[-1].id if answers else row.last_id
    row = row._replace(since=since, next_at=next_at, last_id=last_id)
    return Fired(save(turn, row, notes, kind=task.kind), len(made))


def schedule_firings(turn: UnitOfWork, tasks: Sequence[NewTask]) -> list[Scheduled]:
    """Schedule the tasks of firings; one whose id stands for a task of another kind gets an id of its own.

    The id of a firing can be foreseen, and taken in advance by whoever may submit tasks of any kind.
    """
    answers = schedule(turn, tasks)
    if not (conflicts := {answer.id for answer in answers if answer.conflict}):
        return answers
    known = turn.tx.triggers(conflicts)
    taken = [place for place, task in enumerate(tasks) if task.id in known and known[task.id].kind != task.kind]
    others = schedule(turn, [replace(tasks[place], id=None) for place in taken])
    for place, answer in zip(taken, others, strict=True):
        logger.warning("the id %r of a firing stands for another task: the firing is %r", tasks[place].id, answer.id)
        answers[place] = answer
    return answers


def decoded(row: PeriodicRow) -> PeriodicTaskItem:
    """Return when a periodic task fires, and what is scheduled. Raises `Refused` if its row is damaged."""
    try:
        return _decode(row.task)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise Refused(f"the periodic task {row.name!r} is damaged: set it again ({error})") from error


def new_task(task: PeriodicTaskItem, task_id: str, *, late: float | None = None) -> NewTask:
    """Return the task of one firing, which is `late` by so many seconds. None: a firing on request is never late."""
    deadline = task.start_deadline
    if deadline:
        deadline = None if late is None else max(_LEAST_DEADLINE, deadline - late)
    return NewTask(id=task_id, start_deadline=deadline, **{name: getattr(task, name) for name in _OPTIONS})


class _Plan(NamedTuple):
    """The judgement on the firings that are due."""

    new: Sequence[NewTask]
    instants: Sequence[int]
    """Of the new tasks."""
    notes: Sequence[Firing]
    """Of the firings without a task."""
    replaced: Trigger | None
    """The task of the firing before, if the first new one replaces it."""


def _planned(row: PeriodicRow, task: PeriodicTaskItem, due: Due, previous: Trigger | None, *, now: float) -> _Plan:
    """Judge the firings that are due by the overlap policy; `previous` is the last task, if it has not ended."""
    notes, made, replaced = _note_of_missed(due, task), list(due.made), None
    if task.overlap == "skip" and made:
        blocking = firing_id(row.name, made[0]) if previous is None else previous.id
        kept = made[:1] if previous is None else []
        notes += [note(at, "skipped", reason=f'"{blocking}" has not ended') for at in made[len(kept) :]]
        made = kept
    elif task.overlap == "replace" and made:
        newest = firing_id(row.name, made[-1])
        notes += [note(at, "replaced", reason=f'by "{newest}"') for at in made[:-1]]
        made = made[-1:]
        replaced = previous if previous is not None and previous.status in WAITING else None
    tasks = [new_task(task, firing_id(row.name, at), late=now - at - delay(row.name, at, task.jitter)) for at in made]
    return _Plan(tasks, made, notes, replaced)


def _note_of_missed(due: Due, task: PeriodicTaskItem) -> list[Firing]:
    """Return one note for all firings that come too late, with their number and the last one's instant, if any do."""
    if not due.missed:
        return []
    deadline = f", and start_deadline is {task.start_deadline:g} s" if task.start_deadline else ""
    reason = f"too late: catch_up is {task.catch_up}{deadline}"
    return [note(due.missed[-1], "missed", reason=reason, count=len(due.missed))]


def _made(at: float, answer: Scheduled) -> Firing:
    """Return the note of a firing; a task with its id that existed before counts as scheduled, with a reason."""
    return note(at, "scheduled", id=answer.id, reason=None if answer.created else "there was a task with this id")


def _previous(turn: UnitOfWork, row: PeriodicRow, task: PeriodicTaskItem) -> tuple[Trigger | None, bool]:
    """Return the task of the last firing if it has not ended, and whether another writer has locked it."""
    if row.last_id is None or task.overlap == "queue":
        return None, False
    rows, locked = turn.tx.unlocked_triggers([row.last_id])
    last = rows.get(row.last_id)
    if last is not None and (last.status.ended or last.kind != task.kind):  # a purged id may be another task's by now
        last = None
    return last, row.last_id in locked


def _cancel(turn: UnitOfWork, row: Trigger, *, by: str | None) -> None:
    ended = replace(end_run(row, Event.CANCEL, limits=NO_LIMITS, now=turn.now), reason=f'replaced by "{by}"')
    turn.tx.save([ended])
    turn.tell("cancelled", ended)


def _put_off(turn: UnitOfWork, row: PeriodicRow, why: str, *, kind: str | None) -> PeriodicRow:
    """Leave a periodic task that cannot be judged for later: another node perhaps can."""
    logger.error("the periodic task %r cannot be judged, and is judged again in %g s: %s", row.name, _AGAIN, why)
    is_known = any(note.outcome == "failed" for note in noted(row)[:1])
    notes = [] if is_known else [note(turn.now, "failed", reason=why)]
    return save(turn, row._replace(next_at=turn.now + _AGAIN), notes, kind=kind)


def save(turn: UnitOfWork, row: PeriodicRow, notes: Sequence[Firing], *, kind: str | None) -> PeriodicRow:
    """Write the next version of a periodic task, with the notes of its firings since the last; return it."""
    for one in notes:
        turn.tell_of_firing(row.name, kind, one)
    kept = _encode([*reversed(notes), *noted(row)][:_KEPT]) if notes else row.firings
    row = row._replace(firings=kept, version=row.version + 1)
    turn.tx.set_periodic(row)
    return row


def noted(row: PeriodicRow) -> list[Firing]:
    """Return what became of the latest firings, the newest first."""
    try:
        return _decode_firings(row.firings)
    except (msgspec.MsgspecError, ValueError, TypeError):  # damaged: they only tell what was
        return []


def note(
    at: float,
    outcome: FiringOutcome,
    *,
    id: str | None = None,  # noqa: A002 - as the field
    reason: str | None = None,
    count: int = 1,
) -> Firing:
    """Return what became of the firing of this nominal instant."""
    return Firing(at=datetime.fromtimestamp(at, UTC), outcome=outcome, id=id, reason=reason, count=count)
