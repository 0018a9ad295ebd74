"""The heartbeat and status controller (HSC): renew leases and settle runs. Claims, its third part, are in `claims`.

Every write carries the token of its claim. Only the token of the last grant is accepted, until the run is settled; an
older or settled token writes nothing.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeVar

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from leasekit._lifecycle.states import ENDING, LEASED, WOUND_DOWN, Event, step
from leasekit._lifecycle.transitions import (
    NO_LIMITS,
    OVER,
    counted_as,
    end_run,
    has_lapsed,
    is_held,
    is_latest,
    is_overdue,
    is_token_of,
    retry_wait,
    unexpired,
)
from leasekit.server.ids import successor_id
from leasekit.server.key_rooms import release
from leasekit.server.log_limit import LogLimit
from leasekit.server.progress import Progress
from leasekit.server.roles import start_deadlines
from leasekit.server.roles.consumer import lapse
from leasekit.server.roles.frontend import schedule
from leasekit.server.store import Limits, Run, Trigger
from leasekit.server.unit_of_work import UnitOfWork, to_bytes
from leasekit.task import Beat, NewTask, Settlement, Status, Verdict

logger = logging.getLogger("leasekit.server.successors")
logger.addFilter(LogLimit())

_NULL = b"null"
_BOUNDED = frozenset({"retry", "crash"})  # outcomes that count against a limit
_FAILED = frozenset({"retry", "fatal", "crash"})  # outcomes of a handler that was called
_DELAYED = frozenset({"retry", "release"})  # outcomes with which a holder may ask for a wait


def heartbeat(turn: UnitOfWork, beats: Sequence[Beat]) -> list[Verdict]:
    """Renew leases that are still held; the verdict *gone* of any other lease says why it ended.

    A lease that has ended is never revived, even if no other worker has the task yet. A task that another writer has
    locked is *throttled*.
    """
    rows, locked = turn.tx.unlocked_triggers({beat.id for beat in beats})
    return _unless_locked(turn, beats, locked, lambda free: _renew(turn, rows, free))


_Item = TypeVar("_Item", Beat, Settlement)


def _unless_locked(
    turn: UnitOfWork, items: Sequence[_Item], locked: Collection[str], apply: Callable[[Sequence[_Item]], list[Verdict]]
) -> list[Verdict]:
    """Return the verdicts of `apply`; an item whose task another writer has locked is *throttled*."""
    if not locked:
        return apply(items)
    verdicts = iter(apply([item for item in items if item.id not in locked]))
    wait = 0.5 + turn.random.random()
    return [
        Verdict(id=item.id, verdict="throttled", retry_after=wait) if item.id in locked else next(verdicts)
        for item in items
    ]


def _renew(turn: UnitOfWork, rows: Mapping[str, Trigger], beats: Sequence[Beat]) -> list[Verdict]:
    batch = _judged(rows, beats, turn.instant)
    _save_beats(turn, batch)
    if batch.ended:
        rows = {**rows, **_keep_ended(turn, list(batch.ended.values()))}
    if batch.refused:  # by what is true now: whoever asks again is told the same
        past = _Past(turn, [rows[beats[at].id].seq for at in batch.refused if beats[at].id in rows])
        for at in batch.refused:
            batch.verdicts[at] = past.gone(beats[at].id, rows.get(beats[at].id), beats[at].token)
    return batch.verdicts


@dataclass(slots=True)
class _Batch:
    """The effects of a batch of beats, before anything is written."""

    verdicts: list[Verdict] = field(default_factory=list[Verdict])
    renewed: dict[int, Status] = field(default_factory=dict[int, Status])  # by seq
    begun: list[Trigger] = field(default_factory=list[Trigger])  # tasks whose handler has begun
    bounded: list[Trigger] = field(default_factory=list[Trigger])  # tasks whose `max_runtime` counts from now
    progress: Progress = field(default_factory=Progress)
    refused: list[int] = field(default_factory=list[int])  # positions of beats whose verdicts still lack a reason
    ended: dict[int, Trigger] = field(default_factory=dict[int, Trigger])  # *gone* is final for their latest holders


def _judged(rows: Mapping[str, Trigger], beats: Sequence[Beat], now: float) -> _Batch:
    """Decide which beats renew their leases; the others get the verdict *gone*. Writes nothing."""
    batch = _Batch()
    renewed, verdicts, progress = batch.renewed, batch.verdicts, batch.progress
    for position, beat in enumerate(beats):
        row = rows.get(beat.id)
        if row is None or not is_held(row, beat.token, now) or is_overdue(row, now):
            if row is not None and is_latest(row, beat.token):
                batch.ended[row.seq] = row
            batch.refused.append(position)
            verdicts.append(Verdict(id=beat.id, verdict="gone"))
            continue
        before = renewed.get(row.seq, row.status)
        renewed[row.seq] = after = step(before, Event.BEAT if beat.started else Event.HOLD)
        if before is not after:
            batch.begun.append(row)
        left = None if row.run_until is None else row.run_until - now
        if beat.started and row.run_until is None and row.max_runtime is not None:
            batch.bounded.append(row)
            left = row.max_runtime
        progress.report(row, beat)
        ttl, cancel_requested = row.heartbeat_timeout, row.cancel_requested
        verdicts.append(
            Verdict(id=beat.id, verdict="renewed", ttl=ttl, cancel_requested=cancel_requested, remaining_runtime=left)
        )
    return batch


def _save_beats(turn: UnitOfWork, batch: _Batch) -> None:
    for status in LEASED:
        seqs = [seq for seq, now_is in batch.renewed.items() if now_is is status]
        turn.tx.renew(seqs, status, now=turn.instant, at=turn.now)
    if batch.bounded:
        rows = turn.tx.triggers_of({row.seq for row in batch.bounded})
        turn.tx.save([replace(row, run_until=turn.instant + (row.max_runtime or 0.0)) for row in rows.values()])
    batch.progress.save(turn.tx, now=turn.now)
    turn.started += batch.begun
    start_deadlines.begun(turn, batch.begun)
    for row in batch.begun if turn.happened is not None else ():
        turn.tell("started", replace(row, status=Status.PROCESSING))


def _keep_ended(turn: UnitOfWork, rows: Sequence[Trigger]) -> dict[str, Trigger]:
    """Make *gone* final for these leases; return their tasks as they are then, by id.

    A restart gives all leases more time, maybe before the consumer expires them, and its clock may be behind this one.
    """
    lapsed = [row for row in rows if has_lapsed(row, turn.instant)]
    expired = lapse(turn, lapsed)
    ended = [*expired, *(replace(row, run_until=OVER) for row in rows if row not in lapsed)]
    turn.tx.save(ended)
    release(turn, expired)
    return {row.id: row for row in ended}


class _Past:
    """The ended runs of some tasks by token: they say why a token is *gone*, or that its run was settled before."""

    def __init__(self, turn: UnitOfWork, seqs: Sequence[int]) -> None:
        runs = turn.tx.runs(set(seqs)) if seqs else []
        self._instant = turn.instant
        self._runs = {(run.seq, run.token): run for run in runs}

    def add(self, run: Run) -> None:
        self._runs[run.seq, run.token] = run

    def find(self, row: Trigger, token: str) -> Run | None:
        return self._runs.get((row.seq, token))

    def gone(self, task_id: str, row: Trigger | None, token: str) -> Verdict:
        return Verdict(id=task_id, verdict="gone", reason=self._reason(row, token))

    def _reason(self, row: Trigger | None, token: str) -> str:
        if row is None:
            return "unknown"
        if row.status is Status.CANCELLED:
            return "cancelled"
        run = self.find(row, token)
        is_dead_of_it = row.status.ended and run is not None and run.digest is None and run.fence == row.fence
        if is_token_of(row, token) or is_dead_of_it:
            return "overdue" if is_overdue(row, self._instant) else "expired"
        is_settled = row.status.ended if run is None else run.digest is not None
        return "settled" if is_settled else "taken"


def results(turn: UnitOfWork, settlements: Sequence[Settlement]) -> list[Verdict]:
    """End runs: the first result of a token counts, its repeat gets the same verdict, any other result is gone.

    A lease that has ended may still be settled if no other worker got the task: finished work outranks a late beat.
    """
    rows, locked = turn.tx.unlocked_triggers({settlement.id for settlement in settlements})
    return _unless_locked(turn, settlements, locked, lambda free: _settle(turn, rows, free))


def _settle(turn: UnitOfWork, rows: dict[str, Trigger], settlements: Sequence[Settlement]) -> list[Verdict]:
    desk = _Desk(turn, rows, settlements)
    verdicts = [desk.settle(settlement) for settlement in settlements]
    desk.save()
    return verdicts


class _Desk:
    """A batch of results: `settle` decides on each, and `save` writes the changes of all."""

    def __init__(self, turn: UnitOfWork, rows: dict[str, Trigger], settlements: Sequence[Settlement]) -> None:
        self._turn = turn
        self._rows = rows
        bounded: list[int] = []
        # Earlier runs of these tasks matter if a token is stale, or a lease has expired meanwhile.
        past: list[int] = []
        for settlement in settlements:
            row = rows.get(settlement.id)
            if row is None:
                continue
            if not is_latest(row, settlement.token):
                past.append(row.seq)
            if settlement.outcome in _BOUNDED:
                bounded.append(row.seq)
        self._past = _Past(turn, past)
        self._limits: dict[int, Limits] = turn.tx.limits(bounded) if bounded else {}
        self._changed: list[Trigger] = []
        self._ended: dict[Status, list[int]] = {}
        self._runs: list[Run] = []
        self._revised: list[tuple[int, int]] = []
        self._progress = Progress()
        self._successors: list[NewTask] = []
        self._over: list[Trigger] = []  # runs have ended of these tasks
        self._failed: list[Trigger] = []  # those of them that have begun for sure, whatever beats have said

    def settle(self, settlement: Settlement) -> Verdict:
        row = self._rows.get(settlement.id)
        digest = _digest(settlement)
        if row is None or not is_token_of(row, settlement.token):
            run = None if row is None else self._past.find(row, settlement.token)
            if run is not None and run.digest == digest:
                return self._settled(settlement)
            return self._past.gone(settlement.id, row, settlement.token)
        self._accept(row, settlement, digest)
        return self._settled(settlement)

    def _settled(self, settlement: Settlement) -> Verdict:
        """Return the verdict on a settlement that counts: its reason is *dead* if its failure was the last one."""
        is_dead = settlement.outcome in _BOUNDED and self._rows[settlement.id].status is Status.DEAD
        return Verdict(id=settlement.id, verdict="settled", reason="dead" if is_dead else None)

    def save(self) -> None:
        tx = self._turn.tx
        if self._revised:
            tx.forget_runs(self._revised)
        tx.save(self._changed)
        for status, seqs in self._ended.items():
            tx.end(seqs, status, now=self._turn.now)
        tx.add_runs(self._runs)
        self._progress.save(tx, now=self._turn.now)
        start_deadlines.begun(self._turn, self._failed)
        release(self._turn, self._over)
        if self._successors:
            for task, answer in zip(self._successors, schedule(self._turn, self._successors), strict=True):
                if answer.conflict:
                    logger.warning(
                        "the id %r of a successor of task %r stands for another task, so there is no successor",
                        answer.id,
                        task.parent,
                    )

    def _accept(self, row: Trigger, settlement: Settlement, digest: bytes) -> None:
        event = ENDING[settlement.outcome]
        worker, fence = row.owner, row.fence
        is_late = row.status not in LEASED
        if is_late:
            row, worker, fence = self._revise(row, settlement.token)
        self._rows[row.id] = after = self._after(row, event, settlement)
        if is_late or event in WOUND_DOWN:
            self._changed.append(after)
        else:
            self._ended.setdefault(after.status, []).append(row.seq)
        self._over.append(after)
        if settlement.outcome in _FAILED:
            self._failed.append(after)
        self._turn.tell("settled", after, worker=worker, outcome=settlement.outcome)
        if after.next_trigger_at is not None:
            self._turn.ready(after.kind, after.next_trigger_at)
        self._end_run(row, fence, worker, settlement, digest)

    def _end_run(self, row: Trigger, fence: int, worker: str | None, settlement: Settlement, digest: bytes) -> None:
        """Add the run to the history, with the digest that tells its repeats, its last progress and its successors."""
        run = Run(
            row.seq,
            fence,
            row.attempt,
            settlement.outcome,
            self._turn.now,
            worker,
            row.claimed_at,
            row.started_at,
            row.heartbeat_at,
            settlement.token,
            digest,
            _stored_value(settlement.result),
            _stored_value(settlement.error),
        )
        self._runs.append(run)
        self._past.add(run)
        self._progress.report(row, settlement)
        for position, task in enumerate(settlement.then):
            task_id = task.id or successor_id(row.id, settlement.token, position)
            self._successors.append(replace(task, id=task_id, parent=row.id))

    def _revise(self, row: Trigger, token: str) -> tuple[Trigger, str | None, int]:
        """Undo an expiry: return the row without what it counted, and the worker and the fence of the lease.

        A task that was rescheduled since then has a higher fence.
        """
        run = self._past.find(row, token)
        fence = row.fence if run is None else run.fence
        self._revised.append((row.seq, fence))
        return unexpired(row), run.worker if run else None, fence

    def _after(self, row: Trigger, event: Event, settlement: Settlement) -> Trigger:
        if event not in WOUND_DOWN:
            return end_run(row, event, limits=NO_LIMITS, now=self._turn.now)
        limits = self._limits.get(row.seq, NO_LIMITS)
        overdue = event is Event.CRASH and is_overdue(row, self._turn.instant)
        event, wait = counted_as(event, limits, is_overdue=overdue), 0.0
        if settlement.retry_after is not None and settlement.outcome in _DELAYED:
            wait = settlement.retry_after
        elif event is Event.RETRY:
            wait = retry_wait(row, limits, self._turn.random)
        why = "its max_runtime was over" if overdue else ""
        return end_run(row, event, limits=limits, now=self._turn.now, wait=wait, why=why)


def _digest(settlement: Settlement) -> bytes:
    progress = None if settlement.progress is UNSET else [settlement.progress]
    parts = [settlement.outcome, settlement.result, settlement.error, settlement.retry_after, progress, settlement.then]
    return blake2b(msgspec.json.encode(parts), digest_size=16).digest()


def _stored_value(value: object) -> bytes | None:
    data = to_bytes(value)
    return None if data == _NULL else data
