"""The frontend: schedule, cancel, get and list tasks, for the producers of tasks."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from leasekit._lifecycle.sameness import payload_digest
from leasekit._lifecycle.states import LEASED, REDRIVEN, WAITING
from leasekit._lifecycle.transitions import cancelled, has_lapsed, rescheduled
from leasekit.errors import Refused
from leasekit.ids import uuid7s
from leasekit.named import PREFIXES
from leasekit.server.access import KindPatterns
from leasekit.server.roles import chains, following, start_deadlines
from leasekit.server.roles.consumer import lapse
from leasekit.server.roles.selection import (
    AFTER_ALL,
    Stretch,
    last_run,
    matching,
    number_to_read,
    of_kinds,
    seq_of_cursor,
)
from leasekit.server.store import Checkpoint, Deadline, Dedupe, Entity, Filter, GateRow, Run, Trigger, View
from leasekit.server.store.damage import is_number, json_fault
from leasekit.server.store.gates import DROP, KIND, PARKED_AT, Gates
from leasekit.server.store.routes import MOST, kind_of, requirements_of, route_of
from leasekit.server.unit_of_work import UnitOfWork, to_bytes
from leasekit.task import (
    DEFAULTS,
    CompleteSettings,
    GateInfo,
    HistoryEntry,
    NewTask,
    Page,
    Scheduled,
    Status,
    TaskInfo,
    TaskSelection,
    Verdict,
    effective,
)
from leasekit.task.words import NAME_PREFIX
from leasekit.wire import RescheduleRequest, traceparent

LAST_MOMENT = datetime.max.replace(tzinfo=UTC).timestamp() - 86_400  # can be expressed in every time zone
_HISTORY = 100  # the latest runs, which are shown
_PAGE_BYTES = 4 * 1024 * 1024  # bytes of values in one page of a listing
_PAGE_STEP = 10  # tasks whose values are loaded at once
NAME_UNUSED = 3600.0  # seconds after which the use of a free name is noted
_NULL = Raw(b"null")


def schedule(turn: UnitOfWork, tasks: Sequence[NewTask]) -> list[Scheduled]:
    """Accept tasks; an id, or a live dedupe key, makes one task only."""
    intake = _Intake(turn, tasks)
    answers = [intake.take(task) for task in tasks]
    intake.save()
    if intake.after:
        following.refuse_circle(turn.tx, tasks)
    return answers


class _Known(NamedTuple):
    """The task that an id already stands for."""

    status: Status
    kind: str
    digest: bytes | None  # of the payload; None: the task was looked up by its dedupe key only


class _Intake:
    """A batch of tasks to schedule: `take` says which are new, by id and dedupe key, and `save` writes those."""

    def __init__(self, turn: UnitOfWork, tasks: Sequence[NewTask]) -> None:
        self._turn = turn
        tx = turn.tx
        keys = {(task.kind, task.dedupe_key) for task in tasks if task.dedupe_key is not None}
        self._firsts = tx.dedupes(keys) if keys else {}
        named = {task.id for task in tasks if task.id is not None}
        ids = named | {first.id for first in self._firsts.values()}
        self._rows = rows = tx.triggers(ids) if ids else {}
        self._used: list[Trigger] = []
        digests = tx.digests([row.seq for row in rows.values() if row.id in named]) if rows else {}
        self._known = {row.id: _Known(row.status, row.kind, digests.get(row.seq)) for row in rows.values()}
        self._kinds = turn.kinds.read(tx)
        self._ids = iter(uuid7s(sum(task.id is None for task in tasks), turn.now, turn.random))
        self._new: list[tuple[str, bytes, bytes, NewTask, CompleteSettings]] = []
        self._new_firsts: dict[tuple[str, str], Dedupe] = {}
        self._places: dict[str, int] = {}  # of new tasks with a dedupe key
        self._replaced = Replaced(turn)
        self.after: dict[str, Sequence[str]] = {}  # what new tasks wait for
        self._parents: dict[str, str] = {}  # of new tasks

    def take(self, task: NewTask) -> Scheduled:
        if task.id is not None and task.id in self._known:
            known = self._known[task.id]
            self._note_use(task.id)
            is_same = task.kind == known.kind and payload_digest(to_bytes(task.payload)) == known.digest
            is_other = not is_same and (task.debounce is None or task.kind != known.kind)  # else it was replaced since
            return Scheduled(id=task.id, created=False, status=known.status, conflict=is_other)
        if task.dedupe_key is not None:
            first = self._firsts.get((task.kind, task.dedupe_key))
            if first and first.id in self._known and (first.until is None or first.until > self._turn.now):
                status = self._known[first.id].status
                if task.debounce is not None:
                    return self._replace(task, first.id) or self._add(task)
                if task.dedupe_scope == "kept" or not status.ended:
                    return Scheduled(id=first.id, created=False, status=status)
        return self._add(task)

    def _replace(self, task: NewTask, task_id: str) -> Scheduled | None:
        """Replace the payload and the due time of a task that was never claimed; None: it was, or has ended."""
        payload = to_bytes(task.payload)
        digest = payload_digest(payload)
        if (place := self._places.get(task_id)) is not None:  # it is new, in the same batch
            *_, old, settings = self._new[place]
            self._new[place] = (task_id, payload, digest, replace(old, at=task.at, delay=task.delay), settings)
            return Scheduled(id=task_id, created=False, status=Status.NEW, replaced=True)
        after = self._replaced.take(self._rows[task_id], task, digest, payload)
        if after is None:
            return None
        self._rows[task_id] = after
        return Scheduled(id=task_id, created=False, status=after.status, replaced=True)

    def _note_use(self, name: str) -> None:
        """Count a free name that is asked for after a long time as used: retention must not remove it now."""
        row = self._rows.get(name)
        if row is None or not row.kind.startswith(PREFIXES) or row.status not in WAITING:
            return
        if row.next_trigger_at is not None and row.next_trigger_at < self._turn.now - NAME_UNUSED:
            self._used.append(replace(row, next_trigger_at=self._turn.now))

    def save(self) -> None:
        turn = self._turn
        turn.tx.save(self._used)
        self._replaced.save()
        if not self._new:
            return
        seq = turn.tx.allocate_seqs(len(self._new))
        comes_from_others = bool(self.after or self._parents)
        entities: list[Entity] = []
        rows: list[Trigger] = []
        keys: dict[int, str] = {}
        deadlines: dict[int, Deadline] = {}
        routes: dict[int, str] = {}
        tags: list[tuple[str, int]] = []
        for task_id, payload, digest, task, settings in self._new:
            at = due_at(task, turn.now)
            if task.debounce is not None:
                at = min(at, turn.now + task.debounce)
            entities.append(_entity(seq, task_id, payload, digest, task, settings, at=at, now=turn.now))
            rows.append(_row(seq, task_id, task, settings, at=at, now=turn.now))
            if (key := self._key_of(task)) is not None:
                keys[seq] = key
            if settings.start_deadline is not None and not task.kind.startswith(PREFIXES):
                deadlines[seq] = Deadline(settings.start_deadline, at + settings.start_deadline)
            if (route := self._route_of(task)) is not None:
                routes[seq] = route
            if task.tags:
                tags += [(tag, seq) for tag in sorted(set(task.tags))]
            turn.tell("scheduled", rows[-1])
            seq += 1
            if not comes_from_others:
                turn.ready(task.kind, at)
        if routes:
            _check_routes(turn, set(routes.values()))
        turn.tx.add(entities, self._begun(rows) if comes_from_others else rows, keys, routes)
        if deadlines:
            start_deadlines.add(turn, deadlines)
        if tags:
            turn.tx.add_tags(tags)
        if self._new_firsts:
            turn.tx.set_dedupes(list(self._new_firsts.values()))

    def _begun(self, rows: list[Trigger]) -> list[Trigger]:
        """Return the states of new tasks of which some run after others, or come from them."""
        if self.after:
            rows = following.begin(self._turn, rows, self.after)
        if self._parents and self._turn.tx.has_chains():
            rows = chains.add(self._turn, rows, self._parents)
        for row in rows:
            if row.next_trigger_at is not None:
                self._turn.ready(row.kind, row.next_trigger_at)
        return rows

    def _key_of(self, task: NewTask) -> str | None:
        """Return the key of a task; a task that stands for a name has none."""
        if task.key is not None:
            return None if task.kind.startswith(PREFIXES) else task.key
        return task.collection if task.kind in self._turn.kinds.fair else None

    def _route_of(self, task: NewTask) -> str | None:
        """Return the route of a task that requires labels; a task that stands for a name requires none."""
        return route_of(task.kind, task.requires) if task.requires and not task.kind.startswith(PREFIXES) else None

    def _add(self, task: NewTask) -> Scheduled:
        task_id = task.id or next(self._ids)
        payload = to_bytes(task.payload)
        digest = payload_digest(payload)
        settings = effective(task, self._kinds.get(task.kind, DEFAULTS))
        self._new.append((task_id, payload, digest, task, settings))
        if task.after:
            self.after[task_id] = task.after
        if (task.after or task.parent) and (parent := chains.parent_of(task)) is not None:
            self._parents[task_id] = parent
        if task.id is not None or task.dedupe_key is not None:
            self._known[task_id] = _Known(Status.NEW, task.kind, digest)
        if task.dedupe_key is not None:
            until = None if settings.dedupe_window is None else self._turn.now + settings.dedupe_window
            self._places[task_id] = len(self._new) - 1
            first = Dedupe(task.kind, task.dedupe_key, task_id, until)
            self._firsts[first.kind, first.key] = self._new_firsts[first.kind, first.key] = first
        return Scheduled(id=task_id, created=True, status=Status.NEW)


def _check_routes(turn: UnitOfWork, new: Collection[str]) -> None:
    """Raise `Refused` if the tasks of a kind would require too many different sets of labels."""
    kinds = {kind_of(name) for name in new}
    known = {*turn.tx.routes(kinds), *new}
    for kind, count in Counter(map(kind_of, known)).items():
        if count > MOST:
            raise Refused(
                f"the waiting tasks of kind {kind!r} would require more than {MOST} different sets of labels "
                "(`requires`): use fewer, or more kinds"
            )


class Replaced:
    """Tasks that wait and get another payload and due time: `take` decides on each, and `save` writes those."""

    def __init__(self, turn: UnitOfWork) -> None:
        self._turn = turn
        self._rows: dict[int, Trigger] = {}
        self._due: dict[int, float] = {}
        self._payloads: dict[int, tuple[bytes, bytes]] = {}
        self._parked: set[int] = set()

    def take(self, row: Trigger, task: NewTask, digest: bytes, payload: bytes) -> Trigger | None:
        """Replace what waits by what `task` says; None: it was claimed, or has ended.

        The due time is `debounce` seconds after the first submission at the latest, however often it is put off.
        """
        turn = self._turn
        if row.status not in WAITING or row.claimed_at is not None:
            return None
        entities = turn.tx.entities([row.seq])
        if row.seq not in entities:  # damaged: it will not run
            return None
        at = min(due_at(task, turn.now), entities[row.seq].created_at + (task.debounce or 0.0))
        if row.next_trigger_at == PARKED_AT:
            self._parked.add(row.seq)
        after = rescheduled(row, at=row.next_trigger_at or at if following.is_awaiting(row) else at, priority=None)
        self._rows[row.seq], self._due[row.seq], self._payloads[row.seq] = after, at, (digest, payload)
        turn.tell("replaced", after)
        turn.ready(after.kind, at)
        return after

    def save(self) -> None:
        if not self._rows:
            return
        tx = self._turn.tx
        tx.unpark(self._parked)
        tx.set_due_times(self._due)
        start_deadlines.move(self._turn, self._due)
        tx.replace_payloads(self._payloads)
        tx.save(list(self._rows.values()))


def due_at(task: NewTask | RescheduleRequest, now: float) -> float:
    """Return when a task is due for which `at` or `delay` say it, by the store's time."""
    return now + (task.delay or 0.0) if task.at is None else min(max(task.at.timestamp(), 0.0), LAST_MOMENT)


def _entity(
    seq: int,
    task_id: str,
    payload: bytes,
    digest: bytes,
    task: NewTask,
    settings: CompleteSettings,
    *,
    at: float,
    now: float,
) -> Entity:
    return Entity(
        seq,
        task_id,
        task.kind,
        task.collection,
        settings.priority,
        now,
        at,
        settings.max_attempts,
        settings.max_crashes,
        settings.max_runtime,
        settings.enqueue_timeout,
        None if settings.retry == DEFAULTS.retry else msgspec.json.encode(settings.retry),
        None if settings.expiry == "crash" else settings.expiry,
        task.dedupe_key,
        traceparent(task.traceparent),
        digest,
        payload,
    )


def _row(seq: int, task_id: str, task: NewTask, settings: CompleteSettings, *, at: float, now: float) -> Trigger:
    return Trigger(
        seq,
        task_id,
        task.kind,
        settings.priority,
        settings.claim_ttl,
        settings.heartbeat_timeout,
        next_trigger_at=at,
        max_runtime=settings.max_runtime,
        # Names that nobody uses are forgotten: by this their fences never go back.
        fence=int(1000 * now) if task.kind.startswith(PREFIXES) else 0,
    )


def cancel(turn: UnitOfWork, ids: Sequence[str]) -> list[tuple[Verdict, str | None]]:
    """Cancel tasks: end waiting tasks at once, and request the cancel of running ones from their holders.

    Each verdict comes with the worker that holds the task, if its cancel was requested now.
    """
    rows = turn.tx.triggers(set(ids))
    changed: dict[str, Trigger] = {}
    # A lease that has ended has no holder to request the cancel from.
    over = [row for row in rows.values() if has_lapsed(row, turn.instant)]
    for row in lapse(turn, over):
        rows[row.id] = changed[row.id] = row
    verdicts: list[tuple[Verdict, str | None]] = []
    for task_id in ids:
        if task_id not in rows:
            verdicts.append((Verdict(id=task_id, verdict="gone", reason="unknown"), None))
            continue
        after = cancelled(rows[task_id], now=turn.now)
        if after is not rows[task_id]:
            rows[task_id] = changed[task_id] = after
            turn.tell("cancelled" if after.status is Status.CANCELLED else "cancel_requested", after)
        verdicts.append((_cancel_verdict(after), after.owner if after.cancel_requested else None))
    turn.tx.save(list(changed.values()))
    return verdicts


def _cancel_verdict(row: Trigger) -> Verdict:
    is_free_name = row.status in WAITING and row.kind.startswith(NAME_PREFIX)
    if is_free_name or row.status is Status.CANCELLED:  # also for a repeat: the second answer equals the first
        return Verdict(id=row.id, verdict="cancelled")
    if row.status in LEASED:
        return Verdict(id=row.id, verdict="cancel_requested")
    return Verdict(id=row.id, verdict="gone", reason="settled")


def infos(view: View, ids: Collection[str], *, now: float, gained: float = 0.0) -> dict[str, TaskInfo]:
    """Return everything about those of these tasks that exist.

    `now` is the store's time; `gained` is the seconds by which the clock of this store is ahead of the clock by which
    leases end.
    """
    rows = list(view.triggers(ids).values())
    return {info.id: info for info in _infos(view, rows, history=True, now=now, gained=gained)}


def over_of(view: View, ids: Collection[str]) -> list[str]:
    """Return those of these tasks that have ended for good, or do not exist."""
    rows = view.triggers(ids)
    return [task_id for task_id in ids if task_id not in rows or rows[task_id].status.ended]


class Listing:
    """A page of a listing, found in steps of bounded work: other reads go in between, however few tasks match."""

    def __init__(
        self,
        wanted: Filter,
        selection: TaskSelection,
        *,
        cursor: str | None,
        limit: int,
        kinds: KindPatterns | None = None,
    ) -> None:
        """Begin a page of up to `limit` tasks, fewer if big. Raises `Refused` for a made-up `cursor`.

        Only tasks of these `kinds` (None: of all) are in it.
        """
        self._wanted, self._selection, self._accept = wanted, selection, of_kinds(kinds)
        self._limit = limit
        self._after = AFTER_ALL if wanted.newest and cursor is None else seq_of_cursor(cursor)
        self._tasks: list[TaskInfo] = []
        self._size = 0

    def look(self, view: View, *, now: float, gained: float = 0.0) -> Page | None:
        """Look at the next tasks. Return the page once it is full or no task is left, else None."""
        stretch = Stretch.next(view, self._wanted, after=self._after)
        if stretch is None:
            return Page(tasks=self._tasks, cursor=None)
        room = self._limit - len(self._tasks)
        most = number_to_read(room, self._selection, self._accept)
        rows = view.page(self._wanted, after=self._after, limit=most, **stretch._asdict())
        found = matching(view, [row for row in rows if self._accept(row)], self._selection)
        infos = _infos(view, found[:room], history=False, now=now, gained=gained)
        if self._take(infos, found) < len(found):
            return Page(tasks=self._tasks, cursor=str(self._after))
        self._after = rows[-1].seq if len(rows) == most else stretch.until
        return None

    @property
    def so_far(self) -> Page:
        """The tasks that were found, and where the search goes on."""
        return Page(tasks=self._tasks, cursor=str(self._after))

    def _take(self, infos: Iterable[TaskInfo], rows: Sequence[Trigger]) -> int:
        """Add tasks as long as they have room, and return how many were added."""
        before = len(self._tasks)
        for row, info in zip(rows, infos, strict=False):
            if self._size > _PAGE_BYTES:
                break
            self._tasks.append(info)
            self._size += sum(len(bytes(value)) for value in (info.payload, info.progress, info.result, info.error))
            self._after = row.seq
        return len(self._tasks) - before


def _infos(view: View, rows: Sequence[Trigger], *, history: bool, now: float, gained: float) -> Iterable[TaskInfo]:
    gates = Gates(view.gates()) if any(row.status in WAITING for row in rows) else Gates()
    for start in range(0, len(rows), _PAGE_STEP):
        step = rows[start : start + _PAGE_STEP]
        seqs = [row.seq for row in step]
        entities, progress = view.entities(seqs), view.progress(seqs)
        keys, of_chains, tags = view.keys(seqs), view.chains_of(seqs), view.tags(seqs)
        deadlines = view.deadlines([row.seq for row in step if row.started_at is None and not row.status.ended])
        routes = view.routes_of(seqs)
        for row in step:
            runs = view.last_runs(row.seq, limit=_HISTORY if history else 2)  # one may be a reschedule
            info = _info(row, entities.get(row.seq), progress.get(row.seq), runs, history=history)
            if row.seq in keys:
                info = replace(info, key=keys[row.seq])
            if row.seq in tags:
                info = replace(info, tags=tags[row.seq])
            if row.seq in routes:
                info = replace(info, requires=requirements_of(routes[row.seq]))
            if row.seq in of_chains:
                parent, root = of_chains[row.seq]
                info = replace(info, parent=parent, root=root)
            if row.seq in deadlines:
                info = replace(info, start_by=moment(deadlines[row.seq].at))
            if following.is_awaiting(row):
                info = replace(info, at=moment(entities[row.seq].at), reason=_wait_of(view, row.id))
            elif row.next_trigger_at == PARKED_AT:
                info = replace(info, at=moment(view.parked_tasks([row.seq]).get(row.seq, entities[row.seq].at)))
            if row.status in WAITING and (gate := gates.of(row.kind, info.collection, now)) is not None:
                info = replace(info, gate=gate_info(gate))
            ends_at = row.next_trigger_at if row.status in LEASED else None
            yield info if ends_at is None else replace(info, lease_until=moment(ends_at + gained))


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


def moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


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
