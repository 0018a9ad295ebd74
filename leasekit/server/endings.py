"""What the end of a run does to its task: counts, limits, and when it runs again (DESIGN §6, Counts). Sans-IO."""

import random as _random
import time

import msgspec
from msgspec.structs import replace

from leasekit.server.states import WOUND_DOWN, Event, next_trigger, step
from leasekit.server.store import Limits, Trigger
from leasekit.task import Exponential, RetryPolicy, Status

__all__ = ["NO_LIMITS", "end_run", "retry_wait", "silence"]

NO_LIMITS = Limits(None, 0, None)
"""For ends that look at no limit."""

_DEFAULT_POLICY = Exponential()
_decode_policy = msgspec.json.Decoder(RetryPolicy).decode


def retry_wait(row: Trigger, limits: Limits, random: _random.Random) -> float:
    """Seconds until the next attempt, after the one that now ends in *retry*."""
    policy: RetryPolicy = _DEFAULT_POLICY if limits.retry is None else _decode_policy(limits.retry)
    return policy.wait(row.failures + 1, random)


def end_run(row: Trigger, event: Event, *, limits: Limits, now: float, wait: float = 0.0) -> Trigger:
    """Where a task stands after its run has ended by `event`; `wait` is the time until it may run again.

    A lease that ran out keeps its token: its holder may yet report, as long as nobody else got the task.
    """
    token = row.token if event is Event.EXPIRE else None
    reason = None
    if event in WOUND_DOWN:
        row, reason = _counted(row, event, limits, now)
        if row.ordered:
            event, token, reason = Event.CANCEL, None, None
        elif reason is not None:
            event, token = Event.EXHAUST, None
    status = step(row.status, event)
    return replace(
        row,
        status=status,
        ordered=False,
        owner=None,
        token=token,
        next_trigger_at=next_trigger(status, now=now, after=wait),
        reason=reason,
    )


def silence(row: Trigger, now: float) -> str:
    """What is known of a lease that ran out: since when nothing was heard, and from whom."""
    ended_at = now if row.next_trigger_at is None else row.next_trigger_at
    # A restart may have moved the end: nothing was heard since then all the more. A buffered task may have been beaten
    # for the shorter of the two.
    ttl = row.heartbeat_timeout
    if row.status is Status.CLAIMED:
        ttl = min(ttl, row.claim_timeout)
    since = ended_at - ttl
    what, more = "nothing was heard from", ""
    if row.status is Status.CLAIMED:
        more = "; its body had not begun"
    elif row.run_until is not None and row.run_until <= ended_at:
        what, more = "no beat was accepted from", f": its max_runtime was over at {_clock(row.run_until)}"
    return f"{what} worker {row.owner!r} since {_clock(since)}, {now - since:.0f} s ago (its ttl is {ttl:g} s){more}"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def _counted(row: Trigger, event: Event, limits: Limits, now: float) -> tuple[Trigger, str | None]:
    """The task with this end counted, and why it may not run again (None: it may)."""
    if event is Event.RELEASE:
        return replace(row, attempt=row.attempt - 1), None
    if event is Event.RETRY:
        failures = row.failures + 1
        return replace(row, failures=failures), _too_many_failures(failures, limits)
    crashes = row.crashes + 1
    reason = _too_many_crashes(crashes, limits)
    if reason is not None and event is Event.EXPIRE:
        reason = f"{reason}; of the last, {silence(row, now)}"
    return replace(row, crashes=crashes), reason


def _too_many_failures(failures: int, limits: Limits) -> str | None:
    if limits.max_attempts is None or failures < limits.max_attempts:
        return None
    return f"{failures} attempts ended in retry: max_attempts is {limits.max_attempts}"


def _too_many_crashes(crashes: int, limits: Limits) -> str | None:
    if crashes <= limits.max_crashes:
        return None
    return f"{crashes} runs ended because their holder vanished: max_crashes is {limits.max_crashes}"
