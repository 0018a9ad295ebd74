"""Gates: change and list them, put tasks off or end them behind a closed gate, and put them back.

Rule 1: a closed kind has its lanes left out of claims; nothing is written for its tasks, however many wait.
Rule 2: due tasks of a closed collection are parked when a claim, or the move into a queue, reads them, so that each
        is read once only. They are put back once the gate is open, the longest due first, in batches.
Rule 3: each step is a part of one transaction, and leaves the rest to a later step of any node.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from msgspec.structs import replace

from leasekit._lifecycle.states import WAITING, Event
from leasekit._lifecycle.transitions import NO_LIMITS, end_run
from leasekit._lifecycle.validation import checked
from leasekit.errors import Refused
from leasekit.named import PREFIXES
from leasekit.server.fair_lane import FairLane
from leasekit.server.key_rooms import release_kinds
from leasekit.server.roles.audit import Counted
from leasekit.server.roles.frontend import LAST_MOMENT
from leasekit.server.roles.task_infos import gate_info
from leasekit.server.store import GateRow, Lane, Trigger, View
from leasekit.server.store.gates import COLLECTION, DROP, KIND, OPEN, PARKED_AT
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import GateInfo
from leasekit.wire import ChangedCollection, GateRequest, OneKind

STEP = 500  # tasks that one transaction puts back or ends
_MOST = 1000  # gates, which are all in the memory of each node
_MOST_OF_SOME = 500  # that operators of some kinds may make: they leave the others room to pause what must not go on
_FIRST = (-1.0, -1)  # before every task of a lane


class GateChange(NamedTuple):
    """A gate as it is to be."""

    scope: str
    name: str
    mode: str
    until: datetime | None
    duration: float | None
    reason: str | None
    by: str | None  # who asked
    has_all_kinds: bool = True  # whether they may close all gates


class Gated(NamedTuple):
    """A kind or a collection, which a gate stops."""

    scope: str
    name: str

    @classmethod
    def kind(cls, kind: str) -> "Gated":
        """Return a kind. Raises `Refused` if its tasks stand for names."""
        if kind.startswith(PREFIXES):
            detail = "stands for the lease of a name, which has no gate: cancel takes a name from its holder"
            raise Refused(f"the kind {kind!r} {detail}", errors=[{"field": "kind", "detail": detail}])
        return cls(KIND, kind)

    @classmethod
    def collection(cls, collection: str) -> "Gated":
        return cls(COLLECTION, collection)

    @classmethod
    def one_of(cls, kind: str | None, collection: str | None) -> "Gated":
        """Return a kind or a collection. Raises `Refused` unless one of them is given."""
        if kind is not None and collection is None:
            return cls.kind(checked(OneKind, {"kind": kind}).kind)
        if collection is not None and kind is None:
            return cls.collection(checked(ChangedCollection, {"collection": collection}).collection)
        detail = "a gate is that of a kind or of a collection: give one of them"
        raise Refused(detail, errors=[{"field": "kind", "detail": detail}])

    def closed(self, wanted: GateRequest, by: str | None) -> GateChange:
        return GateChange(*self, wanted.mode, wanted.until, wanted.duration, wanted.reason, by)

    def opened(self, by: str | None) -> GateChange:
        return GateChange(*self, OPEN, None, None, None, by)


def change(turn: UnitOfWork, changes: Sequence[GateChange]) -> list[Counted[GateInfo | None]]:
    """Close or open gates. A gate that is the same already is left as it is."""
    rows = {row[:2]: row for row in turn.tx.gates()}
    answers: list[Counted[GateInfo | None]] = []
    for wanted in changes:
        key, old = (wanted.scope, wanted.name), rows.get((wanted.scope, wanted.name))
        is_closed = old is not None and old.holds(turn.now)
        new = GateRow(*key, wanted.mode, _until(turn, wanted), wanted.reason, turn.now, wanted.by)
        if old is not None and is_closed and old[:5] == new[:5]:
            new = old
        elif new.mode != OPEN:
            if old is None and len(rows) >= (most := _MOST if wanted.has_all_kinds else _MOST_OF_SOME):
                raise Refused(f"there are {most} gates already: open one first")
            turn.tx.set_gate(new)
            turn.tell_of_gate(new)
            if new.mode == DROP and new.scope == KIND:
                release_kinds(turn, [new.name])
        elif old is not None and old.mode != OPEN:
            _begin_to_open(turn, old, by=wanted.by, most=STEP)
        rows[key] = new
        count = int(is_closed if new.mode == OPEN else new is not old)
        answers.append(Counted(None if new.mode == OPEN else gate_info(new), count))
    return answers


def listed(view: View, *, now: float) -> list[GateInfo]:
    """Return the gates that hold, kinds first, sorted by name."""
    rows = sorted(view.gates(), key=lambda row: (row.scope != KIND, row.name))
    return [gate_info(row) for row in rows if row.holds(now)]


def described(wanted: GateChange) -> str:
    """Return what was done with a gate, for logs."""
    what = f"the {wanted.scope} {wanted.name!r}"
    if wanted.mode == OPEN:
        return f"opened {what}"
    done = f"paused {what}" if wanted.mode != DROP else f"closed {what}: its due tasks are dropped"
    until = f" until {wanted.until:%Y-%m-%d %H:%M:%S %Z}" if wanted.until is not None else ""
    span = f" for {wanted.duration:g} s" if wanted.duration is not None else ""
    return f"{done}{until}{span}{f' ({wanted.reason})' if wanted.reason else ''}"


def _until(turn: UnitOfWork, wanted: GateChange) -> float | None:
    """Return when the gate opens by itself. If that has passed, the next step of `keep` opens it."""
    if wanted.until is not None:
        return min(max(wanted.until.timestamp(), 0.0), LAST_MOMENT)
    return None if wanted.duration is None else turn.now + wanted.duration


def keep(turn: UnitOfWork, *, most: int) -> bool:
    """Do a step of the regular work: open gates whose time is over, end due tasks, put others back.

    Return whether there may be more to do at once.
    """
    left = most
    for row in turn.gates.rows:
        if left <= 0:
            break
        if not row.holds(turn.now):
            left -= _open(turn, row, most=left) if row.mode == OPEN else _begin_to_open(turn, row, most=left)
        elif row.mode == DROP:
            left -= _drop_lanes(turn, row, left) if row.scope == KIND else _drop_parked(turn, row, left)
    return left <= 0


def _begin_to_open(turn: UnitOfWork, row: GateRow, *, most: int, by: str | None = None) -> int:
    """Open a gate; return how many tasks this transaction has put back."""
    row = row._replace(mode=OPEN, until=None, reason=None, changed_at=turn.now, changed_by=by)
    turn.tell_of_gate(row)
    if row.scope == KIND:
        turn.tx.remove_gate(*row[:2])
        turn.opened(row.name)
        return 0
    turn.tx.set_gate(row)
    return _open(turn, row, most=most)


def _open(turn: UnitOfWork, row: GateRow, *, most: int) -> int:
    """Put parked tasks of a collection back, and remove its gate once none is left.

    No claim parks more of them: those that were judged before the gate was open have ended (`Tx.begin_change`).
    """
    rows, found = _parked(turn, row, most)
    turn.tx.save([replace(task, next_trigger_at=due_at) for task, due_at in rows])
    for task, due_at in rows:
        turn.ready(task.kind, due_at)
    if found < most:
        turn.tx.remove_gate(*row[:2])
    return found


def _parked(turn: UnitOfWork, row: GateRow, most: int) -> tuple[list[tuple[Trigger, float]], int]:
    """Unpark the first `most` tasks of a collection, and return those that still wait, each with when it was due.

    Also return how many tasks were unparked: fewer than `most` were the last ones.
    """
    due = {seq: due_at for due_at, seq in turn.tx.parked(row.name, limit=most)}
    if not due:
        return [], 0
    turn.tx.unpark(due)
    rows = turn.tx.triggers_of(due).values()
    return [
        (task, due[task.seq]) for task in rows if task.status in WAITING and task.next_trigger_at == PARKED_AT
    ], len(due)


def _drop_lanes(turn: UnitOfWork, row: GateRow, most: int) -> int:
    ended = 0
    for lane in turn.tx.lanes([row.name, *turn.tx.routes([row.name])]):
        if lane.due_at <= turn.now and ended < most:
            rows = _first(turn, lane, most - ended)
            _drop(turn, [(task, row) for task in rows])
            ended += len(rows)
    return ended


def _first(turn: UnitOfWork, lane: Lane, most: int) -> list[Trigger]:
    """Return up to `most` of the first due tasks of a lane, which the caller ends."""
    if lane.has_keys:
        return FairLane(turn, lane, wanted=most).take(most)
    return turn.tx.ready(lane, now=turn.now, after=_FIRST, limit=most)


def _drop_parked(turn: UnitOfWork, row: GateRow, most: int) -> int:
    rows, found = _parked(turn, row, most)
    _drop(turn, [(task, row) for task, _ in rows])
    return found


def shut_out(turn: UnitOfWork, tasks: Sequence[tuple[Trigger, GateRow]]) -> None:
    """Park due tasks of closed collections, or end them, as their gates say."""
    _drop(turn, [(task, row) for task, row in tasks if row.mode == DROP])
    parked = [(task, row) for task, row in tasks if row.mode != DROP]
    if parked:
        turn.tx.park([(row.name, task.next_trigger_at or 0.0, task.seq) for task, row in parked])
        turn.tx.save([replace(task, next_trigger_at=PARKED_AT) for task, _ in parked])


def _drop(turn: UnitOfWork, tasks: Sequence[tuple[Trigger, GateRow]]) -> None:
    """End tasks as cancelled, with the reason of the gate."""
    ended = [
        replace(end_run(task, Event.CANCEL, limits=NO_LIMITS, now=turn.now), reason=_why(row)) for task, row in tasks
    ]
    turn.tx.save(ended)
    for task in ended:
        turn.tell("cancelled", task)
        turn.counted[task.kind, "dropped", ""] += 1


def _why(row: GateRow) -> str:
    reason = f": {row.reason}" if row.reason else ""
    return (
        f"dropped{reason} (the {row.scope} {row.name!r} is closed{f' by {row.changed_by}' if row.changed_by else ''})"
    )
