"""Tasks after others: note what a task waits for, and make it ready, or drop it, as those tasks end.

Rule 1: a wait is a row, which goes when the awaited task succeeds. A task without such rows is ready: nothing else
        counts them. A waiting task is locked before its rows are read, so one of many ends finds that it is the last.
Rule 2: each end of a task, whatever has ended it, comes to `follow`, in the transaction that ends it.
Rule 3: the work of one transaction is bounded. What is left is noted (`Tx.set_wakes`), and `keep` goes on. So with an
        end that has more followers, with a follower that another writer has locked, and with an id that is unknown
        when a task begins to wait for it: another writer may be about to add and end such a task.
Rule 4: if an awaited task ends other than in success, its followers are dropped. They keep their rows, for a redrive.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from leasekit._lifecycle.states import Event
from leasekit._lifecycle.transitions import NO_LIMITS, end_run
from leasekit.server.key_rooms import let_go
from leasekit.server.roles import circles
from leasekit.server.store import Trigger
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import Status

STEP = 500  # followers that one transaction is about
AWAITING_AT = 253_402_255_000.0
"""The next trigger time of a task that waits for others: later than any task can be scheduled, or is parked."""

_NOTED = 100  # awaited tasks that one step of `keep` looks at

Wait = tuple[str, str]  # the id of an awaited task, and of a task that waits for it


def begin(turn: UnitOfWork, rows: Sequence[Trigger], after: Mapping[str, Sequence[str]]) -> list[Trigger]:
    """Return the states of tasks that must run `after` others, which are not written yet; note what they wait for.

    One that has ended already, because its chain is cancelled, waits for none.
    """
    waits = {row.id: list(dict.fromkeys(after[row.id])) for row in rows if row.id in after and not row.status.ended}
    awaited = turn.tx.triggers({name for names in waits.values() for name in names})
    met = {name for name, row in awaited.items() if _is_met(row)}
    turn.tx.add_waits([(name, task_id) for task_id, names in waits.items() for name in names if name not in met])
    return _begun(turn, rows, waits, awaited)


def begin_again(turn: UnitOfWork, rows: Sequence[Trigger]) -> None:
    """Let tasks that were dropped and redriven wait again for what they waited for, as far as it has not succeeded."""
    waits: dict[str, list[str]] = {}
    found = turn.tx.waits_of([row.id for row in rows])
    for name, task_id in found:
        waits.setdefault(task_id, []).append(name)
    if waits:
        awaited = turn.tx.triggers({name for names in waits.values() for name in names})
        turn.tx.drop_waits([wait for wait in found if wait[0] in awaited and _is_met(awaited[wait[0]])])
        turn.tx.save(rows := _begun(turn, rows, waits, awaited))
    for row in rows:
        if row.status is Status.NEW and not is_awaiting(row):
            turn.ready(row.kind, turn.now)


def _begun(
    turn: UnitOfWork, rows: Sequence[Trigger], waits: Mapping[str, Sequence[str]], awaited: Mapping[str, Trigger]
) -> list[Trigger]:
    """Return the states of tasks that begin to wait; note the ids that are unknown (Rule 3)."""
    known = awaited.keys() | {row.id for row in rows}
    turn.tx.set_wakes({name: "" for names in waits.values() for name in names if name not in known})
    begun: list[Trigger] = []
    for row in rows:
        left = [other for name in waits.get(row.id, ()) if (other := awaited.get(name)) is None or not _is_met(other)]
        failed = next((other for other in left if other is not None and other.status.ended), None)
        if failed is not None:
            begun.append(_dropped(turn, row, _failure(failed)))
        else:
            begun.append(replace(row, next_trigger_at=AWAITING_AT) if left else row)
    return begun


def follow(turn: UnitOfWork, *, most: int = STEP) -> None:
    """Make ready, or drop, what waits for the tasks that this transaction has ended; for `most` followers.

    Tasks of an ordered key wait for the one that keeps its place.
    """
    let_go(turn)
    if not turn.tx.has_waits():
        turn.over.clear()
    while turn.over:
        ended = {row.id: row for row in turn.over}
        turn.over.clear()
        turn.tx.drop_waits_of([row.id for row in ended.values() if row.status is Status.CANCELLED])
        waits = turn.tx.waits(ended, limit=most + 1)
        late = {name for name in ended if name >= waits[most][0]} if len(waits) > most else set[str]()
        waits = waits[:most]
        most -= len(waits)
        late |= {name for name, _ in _told(turn, ended, waits)}
        turn.tx.set_wakes(dict.fromkeys(late, ""))


def keep(turn: UnitOfWork, *, most: int = STEP) -> bool:
    """Do a step of what earlier transactions have left; return whether there may be more to do at once."""
    wakes = turn.tx.wakes(limit=_NOTED) if turn.tx.has_waits() else []
    rows, locked = turn.tx.unlocked_triggers([name for name, _ in wakes]) if wakes else ({}, ())
    changed: dict[str, str | None] = {}
    for name, told in wakes:
        row = rows.get(name)
        if row is not None and row.status.ended:
            waits = turn.tx.waits([name], limit=most, after=told) if most else []
            is_all = len(waits) < most
            if not _told(turn, {name: row}, waits):
                changed[name] = None if is_all else waits[-1][1] if waits else told
            most -= len(waits)
        elif name not in locked:
            changed[name] = None
    for name in (left := _drop_circles(turn, [rows[name] for name in changed if name in rows])):
        del changed[name]
    turn.tx.set_wakes({name: told for name, told in changed.items() if told != dict(wakes)[name]})
    return bool(left) or any(told is not None for told in changed.values()) or len(changed) == _NOTED


def _drop_circles(turn: UnitOfWork, rows: Iterable[Trigger]) -> Sequence[str]:
    """Drop those of these tasks that wait for themselves; return the ids of tasks that were not looked at."""
    waiting = {row.id: row for row in rows if is_awaiting(row)}
    ways, left = circles.find(turn.tx, list(waiting)) if waiting else ({}, ())
    _save_dropped(turn, [(waiting[name], f"it was to run after itself: {way}") for name, way in ways.items()])
    return left


def _told(turn: UnitOfWork, ended: Mapping[str, Trigger], waits: Sequence[Wait]) -> list[Wait]:
    """Resolve these waits for tasks that have ended; return those of tasks that another writer has locked."""
    if not waits:
        return []
    rows, locked = turn.tx.unlocked_triggers({task_id for _, task_id in waits})
    waiting = {row.id: row for row in rows.values() if is_awaiting(row)}
    met = [wait for wait in waits if ended[wait[0]].status is Status.SUCCESS and wait[1] not in locked]
    turn.tx.drop_waits(met)
    unmet = {task_id: ended[name] for name, task_id in waits if ended[name].status is not Status.SUCCESS}
    _save_dropped(turn, [(waiting[task_id], _failure(row)) for task_id, row in unmet.items() if task_id in waiting])
    ready = {task_id for _, task_id in met if task_id in waiting} - unmet.keys()
    ready.difference_update(task_id for _, task_id in turn.tx.waits_of(ready))
    _make_ready(turn, [waiting[task_id] for task_id in sorted(ready)])
    return [wait for wait in waits if wait[1] in locked]


def _is_met(awaited: Trigger) -> bool:
    return awaited.status is Status.SUCCESS


def is_awaiting(row: Trigger) -> bool:
    """Return whether a task waits for others."""
    return row.next_trigger_at == AWAITING_AT and row.status is Status.NEW


def _make_ready(turn: UnitOfWork, rows: Sequence[Trigger]) -> None:
    due = turn.tx.due_times([row.seq for row in rows]) if rows else {}
    ready = [replace(row, next_trigger_at=max(due.get(row.seq, 0.0), turn.now)) for row in rows]
    turn.tx.save(ready)
    for row in ready:
        turn.ready(row.kind, row.next_trigger_at or 0.0)


def _save_dropped(turn: UnitOfWork, rows: Iterable[tuple[Trigger, str]]) -> None:
    turn.tx.save([_dropped(turn, row, why) for row, why in rows])


def _dropped(turn: UnitOfWork, row: Trigger, why: str) -> Trigger:
    dropped = replace(end_run(row, Event.DROP, limits=NO_LIMITS, now=turn.now), reason=why)
    turn.tell("dropped", dropped)
    return dropped


def _failure(row: Trigger) -> str:
    return f'"{row.id}", which it was to run after, ended as {row.status}'
