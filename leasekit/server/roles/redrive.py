"""Redrive: begin a new life of tasks that are dead, have failed for good, or were dropped; an operator asks for it.

A redrive is made in steps. `search` finds the tasks in snapshots, and `plan` reads what never changes of them:
heartbeats wait for transactions, and not for that. `redrive`, in a transaction, decides again on each task, and begins
the new lives.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from leasekit._lifecycle.states import REDRIVEN
from leasekit._lifecycle.transitions import redriven
from leasekit.server.access import KindPatterns
from leasekit.server.roles import following
from leasekit.server.roles.audit import Counted
from leasekit.server.roles.selection import Found, Search, of_kinds, seq_of_cursor, split
from leasekit.server.store import Dedupe, Run, Trigger, View
from leasekit.server.store.damage import json_fault
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import Redriven, Status, Verdict
from leasekit.task.words import REDRIVABLE
from leasekit.wire import RedriveRequest, selected

_STEP = 10  # tasks whose payloads are read at once
_DAMAGE = "the store is damaged"  # how the reason of a task begins that was set aside


class _Definition(NamedTuple):
    """The part of a task that a redrive needs, and that never changes."""

    dedupe_key: str | None
    fault: str | None  # why the task could not run


class Plan(NamedTuple):
    """The tasks of one redrive."""

    ids: Sequence[str]
    cursor: str | None
    definitions: dict[int, _Definition]  # by `seq`
    request: RedriveRequest
    kinds: KindPatterns | None = None  # of the caller's tasks; None: of all


def search(request: RedriveRequest, kinds: KindPatterns | None = None) -> Search | None:
    """Begin to look for the tasks of a redrive, the oldest first; None: it names them. Raises `Refused`."""
    seq_of_cursor(request.cursor)  # a made-up cursor is refused also where none is used
    if request.ids:
        return None
    wanted, selection = split({**selected(request), "status": Status(request.status or Status.DEAD)})
    return Search(wanted, selection, cursor=request.cursor, limit=request.limit, accept=of_kinds(kinds))


def plan(view: View, request: RedriveRequest, found: Found | None, kinds: KindPatterns | None = None) -> Plan:
    """Read the parts of a redrive's tasks that never change: of the tasks in `found`, or (None) of its `ids`."""
    if found is None:
        rows = list(view.triggers(set(request.ids)).values())
        return Plan(request.ids, None, _definitions(view, [row.seq for row in rows]), request, kinds)
    ids = [row.id for row in found.rows]
    return Plan(ids, found.cursor, _definitions(view, [row.seq for row in found.rows]), request, kinds)


def _definitions(view: View, seqs: Sequence[int]) -> dict[int, _Definition]:
    found: dict[int, _Definition] = {}
    for start in range(0, len(seqs), _STEP):
        step = seqs[start : start + _STEP]
        for seq, entity in view.entities(step).items():
            fault = json_fault(entity.payload)
            key = entity.dedupe_key if isinstance(entity.dedupe_key, str) else None
            found[seq] = _Definition(key, None if fault is None else f"{_DAMAGE}: its payload is not JSON: {fault}")
    return found


def look(view: View, plan: Plan, *, now: float) -> Redriven:
    """Say what `redrive` would do with these tasks now, and change nothing."""
    desk = _Desk(view, plan, now=now)
    for row in desk.rows.values():
        desk.verdict(row, "redrivable")
    return desk.answer()


def redrive(turn: UnitOfWork, plan: Plan) -> Counted[Redriven]:
    """Begin a new life of each of these tasks that can have one; a repeat under the same `redrive_id` does nothing."""
    tx, request = turn.tx, plan.request
    desk = _Desk(tx, plan, now=turn.now)
    token = request.redrive_id or f"{turn.random.getrandbits(128):032x}"
    before = {(run.seq, run.token) for run in tx.runs([row.seq for row in desk.rows.values()])}
    saved: list[Trigger] = []
    runs: list[Run] = []
    for row in desk.rows.values():
        if (row.seq, token) in before:
            desk.verdicts[row.id] = Verdict(id=row.id, verdict="redriven")
        elif desk.verdict(row, "redriven"):
            after = redriven(row, now=turn.now)
            saved.append(after)
            runs.append(_entry(after, at=turn.now, by=request.worker, token=token))
            turn.tell("redriven", after)
            if after.status is not Status.NEW:
                turn.ready(row.kind, turn.now)
    tx.save(saved)
    following.begin_again(turn, [row for row in saved if row.status is Status.NEW])
    tx.add_runs(runs)
    tx.set_dedupes(desk.taken_over)
    return Counted(desk.answer(), len(saved))


def _entry(row: Trigger, *, at: float, by: str | None, token: str) -> Run:
    return Run(row.seq, row.fence, row.attempt, REDRIVEN, at, by, None, None, None, token, None, None, None)


class _Desk:
    """The tasks of one redrive, and the verdict on each."""

    def __init__(self, view: View, plan: Plan, *, now: float) -> None:
        found, is_own = view.triggers(set(plan.ids)), of_kinds(plan.kinds)
        self.rows = {task_id: found[task_id] for task_id in plan.ids if task_id in found and is_own(found[task_id])}
        self.verdicts: dict[str, Verdict] = {}
        self._plan = plan
        keys = {key for row in self.rows.values() if (key := self._key(row)) is not None}
        firsts = view.dedupes(keys) if keys else {}
        self._firsts = {key: first for key, first in firsts.items() if first.until is None or first.until > now}
        owners = view.triggers({first.id for first in self._firsts.values()}) if self._firsts else {}
        self._live = {row.id: row.status for row in owners.values() if not row.status.ended}
        self._taken_over: set[tuple[str, str]] = set()

    def verdict(self, row: Trigger, word: Literal["redriven", "redrivable"]) -> bool:
        """Decide on a task: `word`, or *failed*; return whether the task gets a new life."""
        fault = self._fault(row)
        if fault is not None:
            self.verdicts[row.id] = Verdict(id=row.id, verdict="failed", reason=fault)
            return False
        key = self._key(row)
        if key is not None and key in self._firsts:  # a second task with this key is refused from here on
            if self._firsts[key].id != row.id:
                self._firsts[key] = self._firsts[key]._replace(id=row.id)
                self._taken_over.add(key)
            self._live[row.id] = Status.ENQUEUED
        self.verdicts[row.id] = Verdict(id=row.id, verdict=word)
        return True

    def answer(self) -> Redriven:
        unknown = {task_id: Verdict(id=task_id, verdict="gone", reason="unknown") for task_id in self._plan.ids}
        verdicts = unknown | self.verdicts
        return Redriven(tasks=[verdicts[task_id] for task_id in self._plan.ids], cursor=self._plan.cursor)

    @property
    def taken_over(self) -> list[Dedupe]:
        """The dedupe keys that belong to a redriven task from now on."""
        return [self._firsts[key] for key in self._taken_over]

    def _key(self, row: Trigger) -> tuple[str, str] | None:
        definition = self._plan.definitions.get(row.seq)
        return None if definition is None or definition.dedupe_key is None else (row.kind, definition.dedupe_key)

    def _fault(self, row: Trigger) -> str | None:
        if row.status is Status.CANCELLED:
            return "it is cancelled: schedule it anew under another id"
        if row.status not in REDRIVABLE:
            return f"it is {row.status}: only a task that is {', '.join(sorted(REDRIVABLE))} can be redriven"
        if row.reason is not None and row.reason.startswith(_DAMAGE):
            return row.reason
        definition = self._plan.definitions.get(row.seq)
        if definition is None:
            return f"{_DAMAGE}: its row of `task` is missing"
        key = self._key(row)
        first = None if key is None else self._firsts.get(key)
        if definition.fault is None and first is not None and first.id != row.id and first.id in self._live:
            status = self._live[first.id]
            return f"its dedupe key {first.key!r} belongs to task {first.id!r} by now, which is {status}"
        return definition.fault
