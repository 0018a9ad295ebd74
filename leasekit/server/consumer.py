"""The store consumer: takes back leases that have ended, and keeps the rest through a restart (SYSTEMS A5).

The store is the queue, so nothing is carried from one to the other: what is due is claimed where it lies.
"""

from collections.abc import Sequence

from leasekit.server.endings import end_run, silence
from leasekit.server.states import WAITING, Event
from leasekit.server.store import Run, Trigger
from leasekit.server.turn import Turn, to_bytes

__all__ = ["REAP_BATCH", "forget", "lapse", "reap", "rebase"]

REAP_BATCH = 200
"""Leases that are taken back in one transaction, at most: reaping must not hold up heartbeats (RELIABILITY §7)."""

_CLAIM_MEMORY = 86_400.0  # seconds; who repeats a claim later than that cannot trust its leases any more


def reap(turn: Turn, *, limit: int = REAP_BATCH) -> int:
    """Take back leases that have ended, the oldest first; how many there were.

    Whether they have ended is read inside the transaction: a beat that came before is never overruled.
    """
    expired = turn.tx.expired(now=turn.now, limit=limit)
    if expired:
        turn.tx.save(lapse(turn, expired))
    return len(expired)


def lapse(turn: Turn, rows: Sequence[Trigger]) -> list[Trigger]:
    """Where these tasks stand once their leases have run out; the crash goes into their history. Saves no task."""
    limits = turn.tx.limits([row.seq for row in rows])
    ended: list[Trigger] = []
    for row in rows:
        after = end_run(row, Event.EXPIRE, limits=limits[row.seq], now=turn.now)
        if after.status in WAITING:
            turn.ready(row.kind, turn.now)
        ended.append(after)
        turn.tell("expired", after, worker=row.owner)
    turn.tx.add_runs([_expired(row, at=turn.now) for row in rows])
    turn.lapsed += len(rows)
    return ended


def rebase(turn: Turn) -> None:
    """Give every live lease its whole ttl from now: nobody could beat while the server was away (RELIABILITY A1, L6).

    The same after the clock has jumped: leases are not to end by a time that never passed.
    """
    turn.tx.rebase(now=turn.now)


def forget(turn: Turn) -> None:
    """Drop what claims were answered so long ago that nobody can repeat them in earnest."""
    turn.tx.forget_claims(before=turn.now - _CLAIM_MEMORY)


def _expired(row: Trigger, *, at: float) -> Run:
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
        error=to_bytes({"type": "LeaseExpired", "message": silence(row, at)}),
    )
