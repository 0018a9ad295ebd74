"""The frontend: schedule and cancel tasks, for the producers of tasks; what it tells of them is in `task_infos`."""

from collections import Counter
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from leasekit._lifecycle.sameness import payload_digest
from leasekit._lifecycle.states import LEASED, WAITING
from leasekit._lifecycle.transitions import cancelled, has_lapsed, rescheduled
from leasekit.errors import Refused
from leasekit.ids import uuid7s
from leasekit.named import PREFIXES
from leasekit.server.access import KindPatterns
from leasekit.server.roles import chains, circles, following, start_deadlines
from leasekit.server.roles.audit import Counted
from leasekit.server.roles.consumer import lapse
from leasekit.server.store import Deadline, Dedupe, Entity, Trigger
from leasekit.server.store.gates import PARKED_AT
from leasekit.server.store.kind_rules import NO_RULES
from leasekit.server.store.routes import MOST, kind_of, route_of
from leasekit.server.unit_of_work import UnitOfWork, to_bytes
from leasekit.task import (
    DEFAULTS,
    CompleteSettings,
    NewTask,
    Scheduled,
    Status,
    Verdict,
    effective,
)
from leasekit.task.words import NAME_PREFIX
from leasekit.wire import LAST_INSTANT, RescheduleRequest, traceparent

LAST_MOMENT = LAST_INSTANT.timestamp()
NAME_UNUSED = 3600.0  # seconds after which the use of a free name is noted


def schedule(turn: UnitOfWork, tasks: Sequence[NewTask]) -> list[Scheduled]:
    """Accept tasks; an id, or a live dedupe key, makes one task only."""
    intake = _Intake(turn, tasks)
    answers = [intake.take(task) for task in tasks]
    if intake.after:
        circles.refuse(turn.tx, tasks, intake.after)
    intake.save()
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
        self._turn.tx.save(self._used)
        self._replaced.save()
        if self._new:
            self._save_new()

    def _save_new(self) -> None:
        turn = self._turn
        seq = turn.tx.allocate_seqs(len(self._new))
        entities: list[Entity] = []
        rows: list[Trigger] = []
        keys: dict[int, str] = {}
        deadlines: dict[int, Deadline] = {}
        routes: dict[int, str] = {}
        tags: list[tuple[str, int]] = []
        for task_id, payload, digest, task, settings in self._new:
            at = _first_due_at(task, turn.now)
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
            seq += 1
        _check_routes(turn, set(routes.values()))
        turn.tx.add(entities, self._announced(rows), keys, routes)
        self._write_more(deadlines, tags)

    def _announced(self, rows: list[Trigger]) -> list[Trigger]:
        """Tell of new tasks, and have those start that may; return them as they are to be written."""
        for row in rows:
            self._turn.tell("scheduled", row)
        rows = self._begun(rows) if self.after or self._parents else rows
        for row in rows:
            if row.next_trigger_at is not None:
                self._turn.ready(row.kind, row.next_trigger_at)
        return rows

    def _write_more(self, deadlines: dict[int, Deadline], tags: list[tuple[str, int]]) -> None:
        if deadlines:
            start_deadlines.add(self._turn, deadlines)
        if tags:
            self._turn.tx.add_tags(tags)
        if self._new_firsts:
            self._turn.tx.set_dedupes(list(self._new_firsts.values()))

    def _begun(self, rows: list[Trigger]) -> list[Trigger]:
        """Return the states of new tasks of which some run after others, or come from them."""
        if self._parents and self._turn.tx.has_chains():
            rows = chains.add(self._turn, rows, self._parents)
        if self.after:
            rows = following.begin(self._turn, rows, self.after)
        return rows

    def _key_of(self, task: NewTask) -> str | None:
        """Return the key of a task; a task that stands for a name has none."""
        if task.key is not None:
            return None if task.kind.startswith(PREFIXES) else task.key
        return task.collection if task.kind in self._turn.kinds.fair else None

    def _route_of(self, task: NewTask) -> str | None:
        """Return the route of a task that requires or prefers labels; a task that stands for a name has none."""
        return None if task.kind.startswith(PREFIXES) else route_of(task)

    def _check_labels(self, task: NewTask) -> None:
        """Raise `Refused` for a task with a key that prefers labels, or requires some and the keys are in order."""
        if task.prefers and self._key_of(task) is not None:
            raise Refused(
                f"kind {task.kind!r} is `fair`, so the collection of a task is its key, and a task with a key cannot "
                "prefer workers: leave out `prefers` or `collection`, or schedule it as another kind"
            )
        if task.requires and self._turn.rules.get(task.kind, NO_RULES).ordered and self._key_of(task) is not None:
            raise Refused(
                f"the tasks of one key of kind {task.kind!r} run in order (`ordered`), so they cannot be for some "
                "workers only: leave out `requires` or `key`, or schedule them as another kind"
            )

    def _add(self, task: NewTask) -> Scheduled:
        self._check_labels(task)
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
    """Raise `Refused` if the tasks of a kind would require and prefer too many different sets of labels."""
    if not new:
        return
    kinds = {kind_of(name) for name in new}
    known = {*turn.tx.routes(kinds), *new}
    for kind, count in Counter(map(kind_of, known)).items():
        if count > MOST:
            raise Refused(
                f"the waiting tasks of kind {kind!r} would have more than {MOST} different sets of labels "
                "(`requires`, and `prefers` with its `prefer_for`): use fewer, or more kinds"
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


def _first_due_at(task: NewTask, now: float) -> float:
    """Return when a new task is due: with `debounce`, so many seconds after this submission at the latest."""
    at = due_at(task, now)
    return at if task.debounce is None else min(at, now + task.debounce)


def moment(at: float) -> datetime:
    """Return a moment of the store's time as clients see it."""
    return datetime.fromtimestamp(at, UTC)


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


class Cancel(NamedTuple):
    """A request to cancel one task."""

    id: str
    kinds: KindPatterns | None = None
    """The kinds of the caller's tasks (None: of all): to others, a task of another kind is unknown."""


def cancel(turn: UnitOfWork, requests: Sequence[Cancel]) -> list[Counted[tuple[Verdict, str | None]]]:
    """Cancel tasks: end waiting tasks at once, and request the cancel of running ones from their holders.

    Each verdict comes with the worker that holds the task, if its cancel was requested now.
    """
    rows = turn.tx.triggers({request.id for request in requests})
    changed: dict[str, Trigger] = {}
    # A lease that has ended has no holder to request the cancel from.
    over = [row for row in rows.values() if has_lapsed(row, turn.instant)]
    for row in lapse(turn, over):
        rows[row.id] = changed[row.id] = row
    verdicts: list[Counted[tuple[Verdict, str | None]]] = []
    for task_id, kinds in requests:
        if task_id not in rows or not (kinds is None or kinds.match(rows[task_id].kind)):
            verdicts.append(Counted((Verdict(id=task_id, verdict="gone", reason="unknown"), None), 0))
            continue
        before = rows[task_id]
        after = cancelled(before, now=turn.now)
        if after is not before:
            rows[task_id] = changed[task_id] = after
            turn.tell("cancelled" if after.status is Status.CANCELLED else "cancel_requested", after)
        told = _cancel_verdict(after), after.owner if after.cancel_requested else None
        verdicts.append(Counted(told, int(after is not before)))
    turn.tx.save(list(changed.values()))
    return verdicts


def _cancel_verdict(row: Trigger) -> Verdict:
    is_free_name = row.status in WAITING and row.kind.startswith(NAME_PREFIX)
    if is_free_name or row.status is Status.CANCELLED:  # also for a repeat: the second answer equals the first
        return Verdict(id=row.id, verdict="cancelled")
    if row.status in LEASED:
        return Verdict(id=row.id, verdict="cancel_requested")
    return Verdict(id=row.id, verdict="gone", reason="settled")
