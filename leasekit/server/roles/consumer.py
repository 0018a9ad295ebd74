"""The store consumer: takes back leases that have ended, and keeps the rest through a restart.

The store is the queue, so nothing is carried from one to the other: what is due is claimed where it lies.
"""

import time
from collections.abc import Sequence

from leasekit._lifecycle.states import WAITING, Event
from leasekit._lifecycle.transitions import NO_LIMITS, end_run
from leasekit.server.store import Run, Trigger
from leasekit.server.unit_of_work import UnitOfWork, to_bytes
from leasekit.task import Status

__all__ = ["REAP_BATCH", "forget", "lapse", "reap", "rebase", "silence"]

REAP_BATCH = 200
"""Leases that are taken back in one transaction, at most: reaping must not hold up heartbeats."""

_CLAIM_MEMORY = 86_400.0  # seconds; who repeats a claim later than that cannot trust its leases any more


def reap(turn: UnitOfWork, *, limit: int = REAP_BATCH) -> int:
    """Take back leases that have ended, the oldest first; how many there were.

    Whether they have ended is read inside the transaction: a beat that came before is never overruled.
    """
    expired = turn.tx.expired(now=turn.instant, limit=limit)
    if expired:
        turn.tx.save(lapse(turn, expired))
    return len(expired)


def lapse(turn: UnitOfWork, rows: Sequence[Trigger]) -> list[Trigger]:
    """Where these tasks stand once their leases have run out; the crash goes into their history. Saves no task."""
    limits = turn.tx.limits([row.seq for row in rows])
    ended: list[Trigger] = []
    runs: list[Run] = []
    for row in rows:
        why = silence(row, now=turn.now, instant=turn.instant)
        after = end_run(row, Event.EXPIRE, limits=limits.get(row.seq, NO_LIMITS), now=turn.now, why=why)
        runs.append(_expired(row, at=turn.now, why=why))
        if after.status in WAITING:
            turn.ready(row.kind, turn.now)
        ended.append(after)
        turn.tell("expired", after, worker=row.owner)
    turn.tx.add_runs(runs)
    turn.lapsed += len(rows)
    return ended


def silence(row: Trigger, *, now: float, instant: float) -> str:
    """What is known of a lease that ran out: since when nothing was heard, and from whom.

    `now` and `instant` are one moment, by the clock that people read and by the one that leases end by.
    """
    ended_at = instant if row.next_trigger_at is None else row.next_trigger_at
    # A restart may have moved the end, and a beat does not shorten what the claim granted: nothing was heard since then
    # all the more. A buffered task may have been beaten for the shorter of the two.
    ttl = row.heartbeat_timeout
    if row.status is Status.CLAIMED:
        ttl = min(ttl, row.claim_timeout)
    silent = instant - ended_at + ttl
    what, more = "nothing was heard from", ""
    if row.status is Status.CLAIMED:
        more = "; its body had not begun"
    elif row.run_until is not None and row.run_until <= ended_at:
        what, more = "no beat was accepted from", f": its max_runtime of {row.max_runtime:g} s was over"
    return f"{what} worker {row.owner!r} since {_clock(now - silent)}, {silent:.0f} s ago (its ttl is {ttl:g} s){more}"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def rebase(turn: UnitOfWork, shift: float | None) -> None:
    """Give every live lease its whole ttl from now: no holder could renew it while the server was away or stood still.

    After a start, ends that an earlier process wrote mean nothing: its clock was another one. Runs that are bounded are
    not given their time anew: their ends move by `shift`, what this clock shows more than that one; None: unknown.
    """
    turn.tx.rebase(now=turn.instant, shift=shift)


def forget(turn: UnitOfWork) -> None:
    """Drop what claims were answered so long ago that nobody can repeat them in earnest."""
    # By the clock without steps: it is never ahead of the one that they were noted by.
    turn.tx.forget_claims(before=turn.instant - _CLAIM_MEMORY)


def _expired(row: Trigger, *, at: float, why: str) -> Run:
    return Run(
        seq=row.seq,
        fence=row.fence,
        attempt=row.attempt,
        outcome="expired",
        at=at,
        worker=row.owner,
        token=row.token or "",
        digest=None,
        result=None,
        error=to_bytes({"type": "LeaseExpired", "message": why}),
    )
