"""Information on tasks: what a store has of them, as clients see it; what is damaged is left out, and said."""

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import Any

from msgspec import Raw
from msgspec.structs import replace

from leasekit._lifecycle.states import LEASED, REDRIVEN, WAITING
from leasekit.server.roles import following
from leasekit.server.roles.frontend import moment
from leasekit.server.roles.selection import last_run
from leasekit.server.store import Checkpoint, Entity, GateRow, Run, Trigger, View
from leasekit.server.store.damage import is_number, json_fault
from leasekit.server.store.gates import DROP, KIND, PARKED_AT, Gates
from leasekit.server.store.routes import preference_of, requirements_of
from leasekit.task import GateInfo, HistoryEntry, TaskInfo

_HISTORY = 100  # the latest runs, which are shown
_STEP = 10  # tasks whose values are loaded at once
_NULL = Raw(b"null")


def infos(view: View, ids: Collection[str], *, now: float, gained: float = 0.0) -> dict[str, TaskInfo]:
    """Return everything about those of these tasks that exist.

    `now` is the store's time; `gained` is the seconds by which the clock of this store is ahead of the clock by which
    leases end.
    """
    rows = list(view.triggers(ids).values())
    return {info.id: info for info in infos_of(view, rows, history=True, now=now, gained=gained)}


def over_of(view: View, ids: Collection[str]) -> list[str]:
    """Return those of these tasks that have ended for good, or do not exist."""
    rows = view.triggers(ids)
    return [task_id for task_id in ids if task_id not in rows or rows[task_id].status.ended]


def infos_of(view: View, rows: Sequence[Trigger], *, history: bool, now: float, gained: float) -> Iterable[TaskInfo]:
    """Yield everything about the tasks of these rows; `history`: with their runs."""
    gates = Gates(view.gates()) if any(row.status in WAITING for row in rows) else Gates()
    seqs = [row.seq for row in rows]
    keys, of_chains, tags, routes = view.keys(seqs), view.chains_of(seqs), view.tags(seqs), view.routes_of(seqs)
    deadlines = view.deadlines([row.seq for row in rows if row.started_at is None and not row.status.ended])
    for start in range(0, len(rows), _STEP):
        step = rows[start : start + _STEP]
        seqs = [row.seq for row in step]
        entities, progress = view.entities(seqs), view.progress(seqs)
        runs = {} if history else view.last_runs(seqs, limit=2)  # one may be a reschedule
        for row in step:
            own = view.last_runs([row.seq], limit=_HISTORY) if history else runs
            info = _info(row, entities.get(row.seq), progress.get(row.seq), own.get(row.seq, ()), history=history)
            if row.seq in keys:
                info = replace(info, key=keys[row.seq])
            if row.seq in tags:
                info = replace(info, tags=tags[row.seq])
            if row.seq in routes:
                info = _with_labels(info, routes[row.seq])
            if row.seq in of_chains:
                info = replace(info, parent=of_chains[row.seq][0], root=of_chains[row.seq][1])
            if row.seq in deadlines:
                info = replace(info, start_by=moment(deadlines[row.seq].at))
            if following.is_awaiting(row) or row.next_trigger_at == PARKED_AT:
                info = _with_due_time(view, info, row, entities[row.seq])
            if row.status in WAITING and (gate := gates.of(row.kind, info.collection, now)) is not None:
                info = replace(info, gate=gate_info(gate))
            ends_at = row.next_trigger_at if row.status in LEASED else None
            yield info if ends_at is None else replace(info, lease_until=moment(ends_at + gained))


def _with_labels(info: TaskInfo, route: str) -> TaskInfo:
    prefers, prefer_for = preference_of(route) or ({}, None)
    return replace(info, requires=requirements_of(route), prefers=prefers, prefer_for=prefer_for)


def _with_due_time(view: View, info: TaskInfo, row: Trigger, entity: Entity) -> TaskInfo:
    """Return the information on a task that nothing starts at its due time: it runs after others, or is parked."""
    if following.is_awaiting(row):
        return replace(info, at=moment(entity.at), reason=_wait_of(view, row.id))
    return replace(info, at=moment(view.parked_tasks([row.seq]).get(row.seq, entity.at)))


def _wait_of(view: View, task_id: str) -> str | None:
    names = [name for name, _ in view.waits_of([task_id])]
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f'waits for "{names[0]}"{others} to succeed' if names else None


def _info(
    row: Trigger, entity: Entity | None, checkpoint: Checkpoint | None, runs: Sequence[Run], *, history: bool
) -> TaskInfo:
    last = last_run(runs)
    waits_until = row.next_trigger_at if row.status in WAITING else None
    at: float = waits_until or (0.0 if entity is None else entity.at)
    damage: list[str] = [] if entity is not None else ["its row of `task`"]
    info = TaskInfo(
        id=row.id,
        kind=row.kind,
        status=row.status,
        priority=row.priority,
        attempt=row.attempt,
        crashes=row.crashes,
        fence=row.fence,
        at=moment(at if is_number(at) else 0.0),
        collection=entity.collection if entity is not None and isinstance(entity.collection, str) else None,
        payload=_raw(entity.payload if entity is not None else None, "payload", damage),
        progress=_raw(checkpoint.value if checkpoint is not None else None, "progress", damage),
        result=_raw(last.result if last else None, "result", damage),
        error=_raw(last.error if last else None, "error", damage),
        worker=row.owner or (last.worker if last and last.outcome != REDRIVEN else None),
        cancel_requested=row.cancel_requested,
        scheduled_at=_told_moment(entity.created_at if entity is not None else None),
        claimed_at=_told_moment(row.claimed_at),
        started_at=_told_moment(row.started_at),
        heartbeat_at=_told_moment(row.heartbeat_at),
        progress_at=_told_moment(checkpoint.at if checkpoint is not None else None),
        ended_at=_told_moment(row.ended_at),
        history=[_history_entry(run, damage) for run in runs] if history else [],
        reason=row.reason,
        root=row.id,
    )
    if not damage or info.reason is not None:
        return info
    return replace(info, reason=f"the store is damaged, and these are left out: {', '.join(dict.fromkeys(damage))}")


def _history_entry(run: Run, damage: list[str]) -> HistoryEntry:
    return HistoryEntry(
        fence=run.fence,
        attempt=run.attempt,
        outcome=run.outcome,
        at=moment(run.at),
        worker=run.worker,
        claimed_at=_told_moment(run.claimed_at),
        started_at=_told_moment(run.started_at),
        heartbeat_at=_told_moment(run.heartbeat_at),
        result=_raw(run.result, "result", damage),
        error=_raw(run.error, "error", damage),
    )


def gate_info(row: GateRow) -> GateInfo:
    of_kind = row.scope == KIND
    return GateInfo(
        kind=row.name if of_kind else None,
        collection=None if of_kind else row.name,
        mode="drop" if row.mode == DROP else "pause",
        until=None if row.until is None else moment(row.until),
        reason=row.reason,
        changed_at=moment(row.changed_at),
        changed_by=row.changed_by,
    )


def _told_moment(at: Any) -> datetime | None:
    """Return a moment that the store may not know, or whose column may be damaged: then None."""
    return moment(at) if is_number(at) else None


def _raw(value: bytes | None, name: str, damage: list[str]) -> Raw:
    if value is None:
        return _NULL
    if json_fault(value) is not None:
        damage.append(name)
        return _NULL
    return Raw(value)
