"""The leases of an SQL database, and what runs leave: progress, runs that have ended, answers of claims."""

from collections.abc import Collection, Mapping, Sequence

import msgspec
import sqlalchemy as sa
from sqlalchemy import bindparam, func, select, tuple_

from leasekit.named import PREFIXES
from leasekit.server.store import Checkpoint, ClaimMemory, Run, Trigger, damage
from leasekit.server.store.schema import claim, is_leased, is_waiting, progress, run, trigger
from leasekit.server.store.sql.session import Reads, Writes
from leasekit.server.store.sql.statements import (
    MOMENT,
    MOST,
    NOW,
    Insert,
    Statement,
    greater,
    is_one_of,
    is_one_pair_of,
)
from leasekit.server.store.sql.tasks import DUE, LEASE_END, STATE
from leasekit.task import Status

_encode = msgspec.json.encode
_decode_grants = msgspec.json.Decoder(list[tuple[int, str]]).decode
_astuple = msgspec.structs.astuple
_SPREAD = 100  # steps over which the new ends of leases are spread
PROGRESS = Statement(select(progress).where(is_one_of(progress.c.seq, "seqs")))
RUNS = Statement(
    select(*(sa.null() if c.name in ("result", "error") else c for c in run.c)).where(is_one_of(run.c.seq, "seqs"))
)
LAST_RUNS = Statement(select(run).where(run.c.seq == bindparam("seq")).order_by(run.c.fence.desc()).limit(MOST))
REMEMBERED = Statement(select(claim).where(is_one_pair_of(claim.c.worker, claim.c.claim_id, "pairs")))
EXPIRED = Statement(
    select(*STATE)
    .where(is_leased(), NOW >= DUE, NOW >= LEASE_END)
    .order_by(DUE, trigger.c.seq)
    .limit(MOST)
    .with_for_update(skip_locked=True, key_share=True)
)
_RENEWED = (
    select(trigger.c.seq)
    .where(is_leased(), NOW >= DUE, trigger.c.lease_until > DUE)
    .limit(MOST)
    .with_for_update(skip_locked=True, key_share=True)
)
FOLLOW = Statement(
    sa.update(trigger)
    .where(trigger.c.seq.in_(_RENEWED.scalar_subquery()))
    .values(next_trigger_at=trigger.c.lease_until)
)
FREE_NAMES = Statement(
    select(trigger.c.seq)
    .where(
        is_waiting(),
        # `;` is the character after the `:` with which a prefix ends.
        sa.or_(*(sa.and_(trigger.c.kind >= prefix, trigger.c.kind < f"{prefix[:-1]};") for prefix in PREFIXES)),
        NOW >= DUE,
    )
    .limit(MOST)
)
_SHIFT = bindparam("shift", type_=sa.Double)
_UNTIL = greater(LEASE_END, NOW + trigger.c.heartbeat_timeout)
_RENEWAL = (
    sa.update(trigger)
    .where(is_one_of(trigger.c.seq, "seqs"))
    .values(
        status=bindparam("to_status"),
        lease_until=_UNTIL,
        was_extended=sa.false(),
        started_at=func.coalesce(trigger.c.started_at, bindparam("begun_at", type_=sa.Double)),
        heartbeat_at=MOMENT,
    )
)
RENEW = Statement(_RENEWAL)
RENEW_SORTED = Statement(_RENEWAL.values(next_trigger_at=_UNTIL))
PROGRESS_MARKS = Statement(
    select(progress.c.seq, progress.c.fence, progress.c.number).where(is_one_of(progress.c.seq, "seqs"))
)
ADD_PROGRESS = Insert(progress)
DROP_PROGRESS = Statement(sa.delete(progress).where(is_one_of(progress.c.seq, "seqs")))
ADD_RUNS = Insert(run)
DROP_RUNS = Statement(sa.delete(run).where(is_one_pair_of(run.c.seq, run.c.fence, "pairs")))
ADD_CLAIMS = Insert(claim)
FORGET_CLAIMS = Statement(
    sa.delete(claim).where(
        tuple_(claim.c.worker, claim.c.claim_id).in_(
            select(claim.c.worker, claim.c.claim_id)
            .where(claim.c.granted_at < bindparam("before", type_=sa.Double))
            .order_by(claim.c.granted_at)
            .limit(MOST)
        )
    )
)


def _restart_leases() -> sa.Update:
    ttl = greater(trigger.c.claim_timeout, trigger.c.heartbeat_timeout)
    anew = NOW + ttl * (1 + (trigger.c.seq % _SPREAD) / (10.0 * _SPREAD))
    kept = LEASE_END + _SHIFT
    # Without a shift (NULL), every lease begins anew. No end is later than `anew`, unless its row is damaged.
    until = sa.case((sa.and_(trigger.c.was_extended, kept < anew), kept), else_=anew)
    # An end that is over stays; without a shift the other ends become NULL.
    run_until = sa.case((trigger.c.run_until <= 0, trigger.c.run_until), else_=trigger.c.run_until + _SHIFT)
    values = {"next_trigger_at": until, "lease_until": until, "run_until": run_until, "was_extended": sa.true()}
    return sa.update(trigger).where(is_leased(), trigger.c.seq.in_(_UNLOCKED.scalar_subquery())).values(values)


_UNLOCKED = select(trigger.c.seq).where(is_leased()).with_for_update(skip_locked=True, key_share=True)
RESTART_LEASES = Statement(_restart_leases())
COUNT_LOCKED = Statement(
    select(
        select(func.count()).select_from(trigger).where(is_leased()).scalar_subquery()
        - select(func.count()).select_from(_UNLOCKED.subquery()).scalar_subquery()
    )
)
"""The leases that another writer has locked; the others are locked by this statement."""


class LeaseView(Reads):
    """Reads of progress and runs."""

    def progress(self, seqs: Collection[int]) -> dict[int, Checkpoint]:
        return {row[0]: Checkpoint(*row[1:]) for row in self._session.rows(PROGRESS, seqs=seqs)}

    def last_runs(self, seqs: Collection[int], *, limit: int) -> dict[int, list[Run]]:
        found = {seq: damage.runs(self._session.rows(LAST_RUNS, seq=seq, most=limit)[::-1]) for seq in seqs}
        return {seq: runs for seq, runs in found.items() if runs}

    def free_names(self, *, until: float, limit: int) -> list[int]:
        return [row[0] for row in self._session.rows(FREE_NAMES, now=until, most=limit)]


class LeaseTx(Writes, LeaseView):
    """Reads and writes of leases and runs."""

    _renewal = RENEW

    def renew(self, seqs: Collection[int], status: Status, *, now: float, at: float) -> None:
        if seqs:
            begun_at = at if status is Status.PROCESSING else None
            of = {"to_status": status.value, "now": now, "at": at, "begun_at": begun_at}
            self._session.run(self._renewal, seqs=seqs, **of)

    def expired(self, *, now: float, limit: int) -> list[Trigger]:
        rows = self._decoded(self._session.rows(EXPIRED, now=now, most=limit))
        return [row for row in rows if row.next_trigger_at is not None]

    def follow_leases(self, *, now: float, limit: int) -> None:
        self._session.run(FOLLOW, now=now, most=limit)

    def restart_leases(self, *, now: float, shift: float | None) -> None:
        self._session.run(RESTART_LEASES, now=now, shift=shift)

    def progress_marks(self, seqs: Collection[int]) -> dict[int, tuple[int, int]]:
        rows = self._session.rows(PROGRESS_MARKS, seqs=seqs)
        return {row[0]: row[1:] for row in rows if isinstance(row[1], int) and isinstance(row[2], int)}

    def set_progress(self, values: Mapping[int, Checkpoint]) -> None:
        self._session.run(DROP_PROGRESS, seqs=values)
        self._session.insert(ADD_PROGRESS, [(seq, *checkpoint) for seq, checkpoint in values.items()])

    def add_runs(self, runs: Sequence[Run]) -> None:
        self._session.insert(ADD_RUNS, [_astuple(run) for run in runs])

    def forget_runs(self, keys: Sequence[tuple[int, int]]) -> None:
        self._session.run(DROP_RUNS, pairs=keys)

    def runs(self, seqs: Collection[int]) -> list[Run]:
        return [Run(*row) for row in self._session.rows(RUNS, seqs=seqs)]

    def claim_memories(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], ClaimMemory]:
        rows = self._session.rows(REMEMBERED, pairs=keys)
        return {(row[0], row[1]): _claim_memory(*row) for row in rows}

    def remember_claims(self, claims: Sequence[ClaimMemory]) -> None:
        self._session.insert(ADD_CLAIMS, [(*memory[:4], _encode(memory.grants)) for memory in claims])

    def forget_claims(self, *, before: float, limit: int) -> int:
        return self._session.count(FORGET_CLAIMS, before=before, most=limit)


def _claim_memory(worker: str, claim_id: str, granted_at: float, waited: float, grants: bytes) -> ClaimMemory:
    try:
        return ClaimMemory(worker, claim_id, granted_at, max(0.0, waited), _decode_grants(grants))
    except (msgspec.MsgspecError, ValueError, TypeError):  # damaged: no answer has these leases, and they expire
        return ClaimMemory(worker, claim_id, granted_at, 0.0, ())
