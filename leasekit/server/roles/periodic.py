"""The periodic tasks: change and list them, and let one fire on request.

Rule 1: a change is made in one transaction, for all firings that are judged after its commit.
Rule 2: what is due by then is judged first, by the rule that held until then. So a change makes no firing of the past,
        and forgets none.
Rule 3: a change that changes nothing writes nothing.
Rule 4: what code declares and what operators set is judged by `declarations.py`.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from leasekit._lifecycle.validation import value_fault
from leasekit.errors import Refused
from leasekit.named import PREFIXES
from leasekit.periodic import PeriodicInfo, PeriodicTask, PeriodicTaskItem
from leasekit.server import firings
from leasekit.server.access import KindPatterns
from leasekit.server.declarations import declare, digest_of
from leasekit.server.roles.audit import Counted
from leasekit.server.roles.firing import decoded, fire_one, new_task, note, noted, save, schedule_firings
from leasekit.server.roles.frontend import moment
from leasekit.server.store import Contended, PeriodicRow, View
from leasekit.server.unit_of_work import UnitOfWork, to_bytes
from leasekit.task import Scheduled
from leasekit.wire import MAX_PROGRESS

_encode = msgspec.json.Encoder().encode


class Put(NamedTuple):
    """Add a periodic task, or replace when it fires and what is scheduled."""

    name: str
    task: PeriodicTaskItem
    by: str | None
    is_declared: bool = False
    """Whether the code of a worker says so, and not an operator."""
    kinds: KindPatterns | None = None
    """Of which kinds the one that is replaced may be; None: of any. So in all changes."""


class Pause(NamedTuple):
    """Pause a periodic task, or resume it."""

    name: str
    is_paused: bool
    by: str | None
    kinds: KindPatterns | None = None


class Remove(NamedTuple):
    """Remove a periodic task; the tasks that it has scheduled stay."""

    name: str
    by: str | None
    kinds: KindPatterns | None = None


class Trigger(NamedTuple):
    """Let a periodic task fire once, whatever its overlap policy says, and also if it is paused."""

    name: str
    at: float | None
    """The instant in the id of the task: a repeat of the request makes no second task. None: now."""
    by: str | None
    kinds: KindPatterns | None = None


Change = Put | Pause | Remove | Trigger


def check(name: str, task: PeriodicTask) -> None:
    """Raise `Refused` if a periodic task would never fire, its payload does not fit, or its tasks stand for names."""
    firings.rule_of(task)
    if (fault := value_fault(to_bytes(task.payload), MAX_PROGRESS)) is not None:
        raise Refused(f"payload {fault}", errors=[{"field": "payload", "detail": fault}])
    for field, text in (("kind", task.kind), ("name", name)):  # ids of firings begin with the name
        if text.startswith(PREFIXES):
            detail = "stands for the lease of a name, which nothing schedules"
            raise Refused(f"the {field} {text!r} {detail}", errors=[{"field": field, "detail": detail}])


def change(turn: UnitOfWork, changes: Sequence[Change]) -> list[Counted[PeriodicRow | Scheduled | None]]:
    """Change periodic tasks; the answer is None where there is none of this name and of the given kinds.

    The answer to `Remove` is what was removed.
    """
    return [_counted(turn, wanted) for wanted in changes]


def _counted(turn: UnitOfWork, wanted: Change) -> Counted[PeriodicRow | Scheduled | None]:
    row = turn.tx.periodic(wanted.name)
    answer = _changed(turn, row, wanted)
    if isinstance(answer, Scheduled):
        return Counted(answer, int(answer.created))
    if answer is None or isinstance(wanted, Remove):
        return Counted(answer, int(answer is not None))
    is_change = row is None or (answer.task, answer.is_paused) != (row.task, row.is_paused)
    is_declared = isinstance(wanted, Put) and wanted.is_declared  # as a rule a repeat, which is not to fill the log
    return Counted(answer, None if is_declared and not is_change else int(is_change))


def _changed(turn: UnitOfWork, row: PeriodicRow | None, wanted: Change) -> PeriodicRow | Scheduled | None:
    if row is None:
        return _added(turn, wanted) if isinstance(wanted, Put) else None
    if wanted.kinds is not None and not wanted.kinds.match(decoded(row).kind):
        return None
    match wanted:
        case Put(is_declared=True):
            return _declared(turn, row, wanted)
        case Put(task=task):
            return row if _encode(task) == row.task else _replaced(turn, _judged(turn, row), wanted)
        case Pause(is_paused=is_paused):
            return row if row.is_paused is is_paused else _paused(turn, _judged(turn, row), wanted)
        case Remove():
            turn.tx.remove_periodic(_judged(turn, row).name)
            turn.tell_of_periodic(row.name, wanted.by)
            return row
        case Trigger(at=at):
            return _triggered(turn, row, turn.now if at is None else at)


def _added(turn: UnitOfWork, wanted: Put) -> PeriodicRow:
    data, now = _encode(wanted.task), turn.now
    row = PeriodicRow(wanted.name, data, now, None, False, None, b"[]", None, None, now, wanted.by, 0)  # noqa: FBT003
    if wanted.is_declared:
        row, _ = declare(row, digest_of(data), now)
    return _written(turn, row._replace(next_at=_next_at(row, wanted.task)))


def _declared(turn: UnitOfWork, row: PeriodicRow, wanted: Put) -> PeriodicRow:
    """Note that code declares a periodic task, and replace what it is if that is new."""
    data = _encode(wanted.task)
    noted, is_new = declare(row, digest_of(data), turn.now)
    if is_new and data != row.task:
        return _replaced(turn, _judged(turn, noted), wanted)
    return row if noted is row else save(turn, noted, [], kind=None)


def _judged(turn: UnitOfWork, row: PeriodicRow) -> PeriodicRow:
    """Make the firings that are due (Rule 2)."""
    fired = fire_one(turn, row)
    if fired.is_locked:
        raise Contended(f"another writer has the last task of the periodic task {row.name!r}")
    return fired.row


def _replaced(turn: UnitOfWork, row: PeriodicRow, wanted: Put) -> PeriodicRow:
    """Replace what a periodic task is; only another rule begins anew."""
    since = row.since if _has_same_rule(row, wanted.task) else turn.now
    row = row._replace(task=_encode(wanted.task), since=since)
    return _noted(turn, row._replace(next_at=_next_at(row, wanted.task)), wanted.by)


def _has_same_rule(row: PeriodicRow, task: PeriodicTaskItem) -> bool:
    try:
        return firings.rule_of(decoded(row)) == firings.rule_of(task)
    except Refused:
        return False


def _paused(turn: UnitOfWork, row: PeriodicRow, wanted: Pause) -> PeriodicRow:
    """Pause or resume a periodic task; what falls into the pause is not made up for."""
    row = row._replace(is_paused=wanted.is_paused, since=turn.now)
    return _noted(turn, row._replace(next_at=_next_at(row, decoded(row))), wanted.by)


def _next_at(row: PeriodicRow, task: PeriodicTaskItem) -> float | None:
    times = [] if row.is_paused else firings.next_times(row.name, task, since=row.since, count=1)
    return times[0] if times else None


def _noted(turn: UnitOfWork, row: PeriodicRow, by: str | None) -> PeriodicRow:
    return _written(turn, row._replace(changed_at=turn.now, changed_by=by))


def _written(turn: UnitOfWork, row: PeriodicRow) -> PeriodicRow:
    row = row._replace(version=row.version + 1)
    turn.tx.set_periodic(row)
    turn.tell_of_periodic(row.name, row.changed_by)
    return row


def _triggered(turn: UnitOfWork, row: PeriodicRow, at: float) -> Scheduled:
    task, shown = decoded(row), moment(round(at, 3))
    # A repeat: the firing has an id of its own if the first one stood for a task of another kind.
    made = next((one.id for one in noted(row) if (one.at, one.outcome) == (shown, "triggered")), None)
    if made is not None and (known := turn.tx.triggers({made}).get(made)) is not None:
        return Scheduled(id=made, created=False, status=known.status)
    (answer,) = schedule_firings(turn, [new_task(task, firings.firing_id(row.name, at))])
    if answer.created:
        save(turn, row, [note(round(at, 3), "triggered", id=answer.id)], kind=task.kind)
    return answer


def listed(view: View, *, after: str, limit: int) -> list[PeriodicInfo]:
    """Return the first periodic tasks whose names come after `after`, without those that are damaged.

    Each has its next firing only.
    """
    infos: list[PeriodicInfo] = []
    for row in view.periodics(after=after, limit=limit):
        with suppress(Refused):  # each look at what is due logs that it is damaged
            infos.append(info(row, count=1))
    return infos


def info(row: PeriodicRow, *, count: int) -> PeriodicInfo:
    """Return a periodic task with its next `count` firings. Raises `Refused` if it is damaged."""
    task = decoded(row)
    times = [] if row.next_at is None else [row.next_at]
    if times and count > 1:
        with suppress(Refused):  # this node does not know its time zone
            times = firings.next_times(row.name, task, since=row.since, count=count)
    return PeriodicInfo(
        name=row.name,
        task=task,
        changed_at=moment(row.changed_at),
        changed_by=row.changed_by,
        declared_at=None if row.declared_at is None else moment(row.declared_at),
        is_paused=row.is_paused,
        next_at=[moment(at) for at in times],
        firings=noted(row),
    )


def described(wanted: Change) -> str:
    """Return what was done with a periodic task, for logs."""
    what = f"the periodic task {wanted.name!r}"
    match wanted:
        case Put(task=task):
            size = Raw(b'"<%d bytes>"' % len(bytes(task.payload)))  # a payload is in no log
            return f"set {what}: {_encode(replace(task, payload=size)).decode()}"
        case Pause(is_paused=is_paused):
            return f"{'paused' if is_paused else 'resumed'} {what}"
        case Remove():
            return f"removed {what}"
        case Trigger():
            return f"triggered {what}"
