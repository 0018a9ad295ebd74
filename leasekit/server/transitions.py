"""What the end of a run does to its task: counts, limits, and when it runs again. Sans-IO."""

import random as _random
import time
from typing import Any

import msgspec
from msgspec.structs import replace

from leasekit.server.states import WOUND_DOWN, Event, next_trigger, step
from leasekit.server.store import Limits, Trigger
from leasekit.task import Exponential, RetryPolicy, Status

__all__ = ["NO_LIMITS", "end_run", "retry_wait", "silence"]

NO_LIMITS = Limits(None, 0, None)
"""For ends that look at no limit."""

_DEFAULT_POLICY = Exponential()
_DAMAGED = "the store is damaged, and this task runs no more"
_decode_policy = msgspec.json.Decoder(RetryPolicy).decode


def retry_wait(row: Trigger, limits: Limits, random: _random.Random) -> float:
    """Seconds until the next attempt, after the one that now ends in *retry*."""
    policy = _policy(limits)
    return 0.0 if policy is None else policy.wait(row.failures + 1, random)


def _policy(limits: Limits) -> RetryPolicy | None:
    """How long to wait for another attempt; None: the store is damaged, and nobody knows."""
    try:
        return _DEFAULT_POLICY if limits.retry is None else _decode_policy(limits.retry)
    except (ValueError, TypeError, RecursionError):
        return None


def end_run(row: Trigger, event: Event, *, limits: Limits, now: float, wait: float = 0.0, why: str = "") -> Trigger:
    """Where a task stands after its run has ended by `event`; `wait` is the time until it may run again.

    `why` is what is known of a lease that ran out, for a task that is dead of it.

    A lease that ran out keeps its token: its holder may yet report, as long as nobody else got the task.
    """
    token = row.token if event is Event.EXPIRE else None
    reason = None
    if event in WOUND_DOWN:
        row, reason = _counted(row, event, limits, why)
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


def _counted(row: Trigger, event: Event, limits: Limits, why: str) -> tuple[Trigger, str | None]:
    """The task with this end counted, and why it may not run again (None: it may)."""
    if event is Event.RELEASE:
        return replace(row, attempt=row.attempt - 1), None
    most: tuple[Any, Any] = (limits.max_attempts, limits.max_crashes)
    if not (isinstance(most[0], int | None) and isinstance(most[1], int)):
        return row, f"{_DAMAGED}: max_attempts or max_crashes is no number"
    if event is Event.RETRY:
        failures = row.failures + 1
        if _policy(limits) is None:
            return replace(row, failures=failures), f"{_DAMAGED}: its retry policy cannot be read"
        return replace(row, failures=failures), _too_many_failures(failures, limits)
    crashes = row.crashes + 1
    reason = _too_many_crashes(crashes, limits)
    if reason is not None and why:
        reason = f"{reason}; of the last, {why}"
    return replace(row, crashes=crashes), reason


def _too_many_failures(failures: int, limits: Limits) -> str | None:
    if limits.max_attempts is None or failures < limits.max_attempts:
        return None
    return f"{failures} attempts ended in retry: max_attempts is {limits.max_attempts}"


def _too_many_crashes(crashes: int, limits: Limits) -> str | None:
    if crashes <= limits.max_crashes:
        return None
    return f"{crashes} runs ended because their holder vanished: max_crashes is {limits.max_crashes}"
