"""Rescheduling: give a task that waits another due time, or another priority, at an operator's request.

Rule 1: only the due time and the lane change. What the task waits for beside its time (other tasks, a gate, a limit,
        the turn of its key) is judged by claims as before.
Rule 2: a task that a gate has parked leaves its place there: the next claim that finds it due judges it anew.
Rule 3: the history has one entry for all reschedules between two runs, the last one: a task that is put off again and
        again does not grow.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from leasekit._lifecycle.states import LEASED, RESCHEDULED
from leasekit._lifecycle.transitions import has_lapsed, rescheduled
from leasekit.errors import Refused
from leasekit.named import PREFIXES
from leasekit.server.access import KindPatterns
from leasekit.server.roles import start_deadlines
from leasekit.server.roles.audit import Counted
from leasekit.server.roles.consumer import lapse
from leasekit.server.roles.following import AWAITING_AT, is_awaiting
from leasekit.server.roles.frontend import due_at, moment
from leasekit.server.store import Run, Trigger
from leasekit.server.store.gates import PARKED_AT
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import Rescheduled
from leasekit.task.words import REDRIVABLE
from leasekit.wire import RescheduleRequest

_encode = msgspec.json.encode


class Reschedule(NamedTuple):
    """A request to change one waiting task."""

    id: str
    wanted: RescheduleRequest
    by: str | None  # the client that asks
    kinds: KindPatterns | None = None  # of the caller's tasks; None: of all


Answer = Rescheduled | str | None
"""The task as it waits now; or why it cannot be rescheduled; or None: it is unknown."""


def reschedule(turn: UnitOfWork, requests: Sequence[Reschedule]) -> list[Counted[Answer]]:
    """Reschedule tasks. A repeat of a task's last request, by its `request_id`, changes nothing: it tells the task."""
    desk = _Desk(turn, [request.id for request in requests])
    answers = [desk.reschedule(request) for request in requests]
    desk.save()
    return answers


def told(answer: Answer) -> Rescheduled | None:
    """Return the task as it waits now; None: it is unknown. Raises `Refused` if it cannot be rescheduled."""
    if isinstance(answer, str):
        raise Refused(answer)
    return answer


class _Desk:
    """A batch of reschedules: `reschedule` decides on each, and `save` writes the changes of all."""

    def __init__(self, turn: UnitOfWork, ids: Iterable[str]) -> None:
        self._turn, tx = turn, turn.tx
        self._rows = tx.triggers(set(ids))
        self._changed = {
            row.id: row for row in lapse(turn, [r for r in self._rows.values() if has_lapsed(r, turn.instant)])
        }
        self._rows |= self._changed
        seqs = [row.seq for row in self._rows.values()]
        self._entries = _entries(tx.runs(seqs))
        self._due = dict(tx.due_times(seqs))
        self._parked = tx.parked_tasks([row.seq for row in self._rows.values() if row.next_trigger_at == PARKED_AT])
        self._new_due: dict[int, float] = {}
        self._lanes: dict[int, set[int]] = {}
        self._over: list[tuple[int, int]] = []
        self._runs: dict[int, Run] = {}

    def reschedule(self, request: Reschedule) -> Counted[Answer]:
        row = self._rows.get(request.id)
        if row is None or not (request.kinds is None or request.kinds.match(row.kind)):
            return Counted(None, 0)
        entry = self._entries.get(row.seq)
        if entry is not None and entry.token == request.wanted.request_id:
            return Counted(self._answer(row), 0)
        if (fault := _fault(row)) is not None:
            return Counted(fault, 0)
        return Counted(self._answer(self._change(row, request, entry)), 1)

    def save(self) -> None:
        tx = self._turn.tx
        tx.unpark(self._parked.keys() & {row.seq for row in self._changed.values()})
        tx.set_due_times(self._new_due)
        start_deadlines.move(self._turn, self._new_due)
        for priority, seqs in self._lanes.items():
            tx.move(seqs, priority=priority)
        tx.save(list(self._changed.values()))
        tx.forget_runs(self._over)
        tx.add_runs(list(self._runs.values()))

    def _change(self, row: Trigger, request: Reschedule, entry: Run | None) -> Trigger:
        turn, wanted = self._turn, request.wanted
        at = self._parked.get(row.seq, row.next_trigger_at or turn.now)
        if wanted.at is not None or wanted.delay is not None:
            self._due[row.seq] = self._new_due[row.seq] = at = due_at(wanted, turn.now)
        if is_awaiting(row):
            at = AWAITING_AT
        after = rescheduled(row, at=at, priority=wanted.priority)
        if after.priority != row.priority:
            for seqs in self._lanes.values():
                seqs.discard(row.seq)
            self._lanes.setdefault(after.priority, set()).add(row.seq)
        self._rows[row.id] = self._changed[row.id] = after
        self._note(after, request, entry)
        turn.tell("rescheduled", after)
        if at != AWAITING_AT:
            turn.ready(after.kind, at)
        return after

    def _note(self, row: Trigger, request: Reschedule, entry: Run | None) -> None:
        """Note the reschedule in the history, in place of the one before if no run came between."""
        turn = self._turn
        if entry is not None and entry.fence == row.fence - 1 and row.seq not in self._runs:
            self._over.append((row.seq, entry.fence))
        token = request.wanted.request_id or f"{turn.random.getrandbits(128):032x}"
        told = _encode({"at": moment(self._at(row)), "priority": row.priority})
        run = Run(
            row.seq,
            row.fence,
            row.attempt,
            RESCHEDULED,
            turn.now,
            request.by,
            None,
            None,
            None,
            token,
            None,
            told,
            None,
        )
        self._runs[row.seq] = self._entries[row.seq] = run

    def _at(self, row: Trigger) -> float:
        """Return when a waiting task is due, or was to be due at first."""
        if row.next_trigger_at is None or row.status in LEASED or is_awaiting(row):
            return self._due.get(row.seq, 0.0)
        return row.next_trigger_at

    def _answer(self, row: Trigger) -> Rescheduled:
        return Rescheduled(id=row.id, status=row.status, at=moment(self._at(row)), priority=row.priority)


def _entries(runs: Iterable[Run]) -> dict[int, Run]:
    """Return the last reschedule of each task."""
    last: dict[int, Run] = {}
    for run in runs:
        if run.outcome == RESCHEDULED and (run.seq not in last or last[run.seq].fence < run.fence):
            last[run.seq] = run
    return last


def _fault(row: Trigger) -> str | None:
    """Return why a task cannot be rescheduled; None: it waits."""
    if row.kind.startswith(PREFIXES):
        return f"{row.kind!r} stands for the lease of a name, which has no due time: name a task"
    if row.status in LEASED:
        return (
            f"task {row.id!r} is {row.status}, held by worker {row.owner!r}, and only a task that waits can be "
            "rescheduled: cancel it, or ask again once it waits"
        )
    if row.status.ended:
        what = "redrive it" if row.status in REDRIVABLE else "schedule another under a new id"
        return f"task {row.id!r} has ended ({row.status}), and only a task that waits can be rescheduled: {what}"
    return None
