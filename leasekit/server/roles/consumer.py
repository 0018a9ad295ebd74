"""The store consumer: expires leases that have ended, and keeps the others through a restart.

Claims read due tasks from the store. Where a server has queues of messages, `enqueueing` moves due tasks to these.
"""

import time
from collections.abc import Sequence

from msgspec.structs import replace

from leasekit._lifecycle.states import Event
from leasekit._lifecycle.transitions import NO_LIMITS, OVER, counted_as, end_run, is_overdue, retry_wait
from leasekit.server import key_rooms
from leasekit.server.key_rooms import release
from leasekit.server.roles import start_deadlines
from leasekit.server.store import Run, Trigger
from leasekit.server.store.damage import is_number
from leasekit.server.unit_of_work import UnitOfWork, to_bytes
from leasekit.task import Status

REAP_BATCH = 200  # leases that are expired in one transaction, at most: reaping must not delay heartbeats


_FOLLOW_BATCH = 5000  # renewed leases that are sorted again in one transaction, at most


_SHARE_BATCH = 1000  # keys that one transaction forgets, and tasks with keys that it checks, at most


def look(turn: UnitOfWork) -> int:
    """Do a step of the consumer's regular work; return how many ended leases were expired.

    The step also sorts renewed leases by their new ends, and tends start deadlines, shares and the limits of keys.
    """
    turn.kinds.read(turn.tx)  # so that this node knows of gates within a period, also if it does nothing else
    start_deadlines.tend(turn)
    turn.kinds.has_waits = turn.tx.has_waits()
    turn.kinds.fires_at = turn.tx.next_firing()
    turn.kinds.has_inbox = turn.tx.has_inbox()
    turn.tx.follow_leases(now=turn.instant, limit=_FOLLOW_BATCH)
    turn.tx.tend_shares(limit=_SHARE_BATCH)
    key_rooms.tend(turn)
    return reap(turn)


def reap(turn: UnitOfWork, *, limit: int = REAP_BATCH) -> int:
    """Expire ended leases, the oldest first; return their number. Ends are read here, so no beat is overruled."""
    expired = turn.tx.expired(now=turn.instant, limit=limit)
    if expired:
        turn.tx.save(ended := lapse(turn, expired))
        release(turn, ended)
    return len(expired)


def lapse(turn: UnitOfWork, rows: Sequence[Trigger]) -> list[Trigger]:
    """Return the rows of these tasks after their leases expired, and add the runs; the caller saves the rows."""
    limits = turn.tx.limits([row.seq for row in rows])
    ended: list[Trigger] = []
    runs: list[Run] = []
    for row in rows:
        why = silence(row, now=turn.now, instant=turn.instant)
        of_task = limits.get(row.seq, NO_LIMITS)
        event = counted_as(Event.EXPIRE, of_task)
        wait = retry_wait(row, of_task, turn.random) if event is Event.TIME_OUT else 0.0
        after = end_run(row, event, limits=of_task, now=turn.now, wait=wait, why=why)
        # What its holder is told, however late it asks.
        after = replace(after, run_until=OVER if is_overdue(row, turn.instant) else None)
        runs.append(_expired_run(row, at=turn.now, why=why))
        if after.next_trigger_at is not None:
            turn.ready(row.kind, after.next_trigger_at)
        ended.append(after)
        turn.tell("expired", after, worker=row.owner)
    turn.tx.add_runs(runs)
    return ended


def silence(row: Trigger, *, now: float, instant: float) -> str:
    """Describe since when the server heard nothing of which worker; `now` and `instant` are one moment."""
    ended_at = instant if row.next_trigger_at is None else row.next_trigger_at
    # The silence is at least this long: a beat does not shorten what the claim granted. A claimed task that has not
    # begun may have been renewed for the shorter of the two ttls.
    ttl = row.heartbeat_timeout
    if row.status is Status.CLAIMED:
        ttl = min(ttl, row.claim_timeout)
    silent, extended = instant - ended_at + ttl, ""
    heard_at = row.claimed_at if row.heartbeat_at is None else row.heartbeat_at
    if row.was_extended and heard_at is not None and is_number(heard_at):  # the lease's end does not tell
        silent = max(now - heard_at, 0.0)
        extended = ", counted anew when the process that serves the store had changed or stalled"
    event, detail = "nothing was heard", ""
    if row.status is Status.CLAIMED:
        detail = "; its handler had not begun"
    elif is_overdue(row, instant):
        event, detail = "no beat was accepted", f": its max_runtime of {row.max_runtime:g} s was over"
    since = f"since {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(now - silent))}, {silent:.0f} s ago"
    return f"{event} from worker {row.owner!r} {since} (its ttl is {ttl:g} s{extended}){detail}"


def restart_leases(turn: UnitOfWork, shift: float | None) -> None:
    """Give every leased task its whole ttl from now: no holder could renew it while the server was away or stalled.

    Rule: a lease gets that once, until its holder is heard again. Otherwise the task of a dead holder would never be
    ready where each process opens the store for less than a ttl.

    All other ends that an earlier process wrote move by `shift`, the seconds by which this clock is ahead of the
    earlier one; None: unknown.
    """
    turn.tx.restart_leases(now=turn.instant, shift=shift)


def _expired_run(row: Trigger, *, at: float, why: str) -> Run:
    return Run(
        seq=row.seq,
        fence=row.fence,
        attempt=row.attempt,
        outcome="expired",
        at=at,
        worker=row.owner,
        claimed_at=row.claimed_at,
        started_at=row.started_at,
        heartbeat_at=row.heartbeat_at,
        token=row.token or "",
        digest=None,
        result=None,
        error=to_bytes({"type": "LeaseExpired", "message": why}),
    )
