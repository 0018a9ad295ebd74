"""Return the new state of a task after a grant, a heartbeat, a cancel or the end of a run. Sans-IO."""

from hmac import compare_digest
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from leasekit._lifecycle.rows import Limits, Trigger
from leasekit._lifecycle.states import LEASED, WAITING, WOUND_DOWN, Event, event_of_cancel, next_trigger, step
from leasekit.task import Exponential, RetryPolicy, Status
from leasekit.task.words import NAME_PREFIX

if TYPE_CHECKING:
    from random import Random

NO_LIMITS = Limits(None, 0, None)
"""For ends that check no limit."""

OVER = 0.0
"""A `run_until` in the past by any clock: no further beat is accepted."""

_DEFAULT_POLICY = Exponential()
_EXPIRIES = frozenset({Event.EXPIRE, Event.TIME_OUT})
_DAMAGED = "the store is damaged, and this task no longer runs"
_decode_policy = msgspec.json.Decoder(RetryPolicy).decode


def grant(row: Trigger, worker: str, token: str, *, now: float, at: float) -> Trigger:
    """Return the task after a grant to a worker: one attempt more, `token`, and a higher fence.

    `now` is the moment by the clock of leases, `at` the same moment by the store's time.
    """
    status = step(row.status, Event.CLAIM)
    return replace(
        row,
        status=status,
        fence=row.fence + 1,
        attempt=row.attempt + 1,
        owner=worker,
        token=token,
        next_trigger_at=next_trigger(status, now=now, after=row.claim_timeout),
        run_until=None,
        was_extended=False,
        claimed_at=at,
        started_at=None,
        heartbeat_at=None,
    )


def enqueue(row: Trigger, *, timeout: float, now: float) -> Trigger:
    """Return the task after it was moved to a queue: it is due again after `timeout`, unless it is claimed by then."""
    status = step(row.status, Event.ENQUEUE)
    return replace(row, status=status, next_trigger_at=next_trigger(status, now=now, after=timeout))


def unqueue(row: Trigger, *, due_at: float, before: Status | None = None) -> Trigger:
    """Return a task after it left its queue unclaimed, due at `due_at`; `before` is its status before it was moved.

    A task that was given back, or whose holder died, is `enqueued` also without queues.
    """
    status = row.status
    if before is Status.RETRIABLE_FAILURE:
        status = step(status, Event.UNQUEUE_RETRY)
    elif status is Status.ENQUEUED and row.fence == 0:
        status = step(status, Event.UNQUEUE)
    return replace(row, status=status, next_trigger_at=due_at)


def is_claimable(row: Trigger, fence: int, *, now: float) -> bool:
    """Whether a message that says `fence` entitles to the task: it is due, or has not run since it was moved.

    A message is sent for a due task only. So one with the task's present fence was sent after its last run, and none
    can bring forward a wait that began with the end of a later run: that run has raised the fence.
    """
    if row.status not in WAITING or row.next_trigger_at is None:
        return False
    return row.next_trigger_at <= now or (row.status is Status.ENQUEUED and row.fence == fence)


def is_token_of(row: Trigger, token: str) -> bool:
    """Whether `token` is that of the task's latest claim; how long the look takes tells nothing of the right one."""
    return row.token is not None and compare_digest(row.token, token)


def is_latest(row: Trigger, token: str) -> bool:
    """Whether `token` is that of the task's current lease, even if the lease has ended and was not expired yet."""
    return is_token_of(row, token) and row.status in LEASED


def is_held(row: Trigger, token: str, now: float) -> bool:
    return is_latest(row, token) and row.next_trigger_at is not None and row.next_trigger_at > now


def has_lapsed(row: Trigger, now: float) -> bool:
    """Whether the task is leased, and its lease has ended: the caller must then end the run by *expire*."""
    return row.status in LEASED and row.next_trigger_at is not None and row.next_trigger_at <= now


def is_overdue(row: Trigger, now: float) -> bool:
    """Whether the run was leased as long as it may last: the lease is not renewed, and the run has timed out."""
    lease_ends_at = row.next_trigger_at if row.status in LEASED else None
    return row.run_until is not None and row.run_until <= (now if lease_ends_at is None else min(now, lease_ends_at))


def renewed(row: Trigger, status: Status, *, now: float, at: float) -> Trigger:
    """Return the task in `status`, with its lease renewed at `now` by its `heartbeat_timeout`.

    `at` is the same moment by the store's time.
    The end of the lease never moves nearer: a holder that did not get the answer relies on the earlier grant.
    """
    until = now + row.heartbeat_timeout
    until = max(until, row.next_trigger_at or until)
    if row.status is status and row.started_at is not None and not row.was_extended:  # most beats: two values cost less
        return replace(row, next_trigger_at=until, heartbeat_at=at)
    return replace(
        row,
        status=status,
        next_trigger_at=until,
        was_extended=False,
        started_at=at if row.started_at is None and status is Status.PROCESSING else row.started_at,
        heartbeat_at=at,
    )


def cancelled(row: Trigger, *, now: float) -> Trigger:
    """Return a waiting task as cancelled, or a running one as asked to stop; an ended task or free name stays as it is.

    The caller must first expire a lease that has ended: it has no holder that could be told.
    """
    event = event_of_cancel(row.status)
    if event is Event.CANCEL:
        if row.kind.startswith(NAME_PREFIX):
            return row
        return end_run(row, event, limits=NO_LIMITS, now=now)
    if event is Event.REQUEST_CANCEL and not row.cancel_requested:
        return replace(row, cancel_requested=True)
    return row


def redriven(row: Trigger, *, now: float) -> Trigger:
    """Return a task that has ended as the first state of its new life: due now, without failures and crashes.

    The redrive takes a fence of its own, for its entry in the history; attempts and fences go on growing.
    """
    status = step(row.status, Event.REDRIVE)
    return replace(
        row,
        status=status,
        fence=row.fence + 1,
        crashes=0,
        failures=0,
        next_trigger_at=next_trigger(status, now=now, after=0.0),
        reason=None,
        run_until=None,
        ended_at=None,
    )


def rescheduled(row: Trigger, *, at: float, priority: int | None) -> Trigger:
    """Return a waiting task as due at `at`, with this priority (None: its own).

    The reschedule takes a fence of its own, for its entry in the history. So a message in a queue that was sent for the
    task before is of no use: it could bring the new time forward.
    """
    status = step(row.status, Event.RESCHEDULE)
    priority = row.priority if priority is None else priority
    return replace(row, status=status, fence=row.fence + 1, priority=priority, next_trigger_at=at)


def unexpired(row: Trigger) -> Trigger:
    """Return a task whose holder reports after its lease has expired, without what the expiry counted."""
    if row.status is Status.RETRIABLE_FAILURE:
        return replace(row, failures=row.failures - 1)
    return replace(row, crashes=row.crashes - 1)


def counted_as(event: Event, limits: Limits, *, is_overdue: bool = False) -> Event:
    """Return the event as which the end of a run counts: a time-out is an attempt if the task says so, else a crash.

    A run has timed out if its lease expired, or if its holder reports a crash and the run `is_overdue`.
    """
    if limits.expiry != "retry":
        return event
    if event is Event.CRASH and is_overdue:
        return Event.RETRY
    return Event.TIME_OUT if event is Event.EXPIRE else event


def retry_wait(row: Trigger, limits: Limits, random: "Random") -> float:
    """Return the wait in seconds after a run that counts as an attempt, by the policy in `limits` (0: not readable)."""
    policy = _policy(limits)
    return 0.0 if policy is None else policy.wait(row.failures + 1, random)


def _policy(limits: Limits) -> RetryPolicy | None:
    """Return the retry policy of the task, or the default; None: the stored policy is damaged."""
    try:
        return _DEFAULT_POLICY if limits.retry is None else _decode_policy(limits.retry)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return None


def end_run(row: Trigger, event: Event, *, limits: Limits, now: float, wait: float = 0.0, why: str = "") -> Trigger:
    """Return the task after its run has ended by `event`; `wait` is the time until the task may run again.

    A task that would run again ends instead if its cancel was requested (but a name is free then), or if it has failed
    or crashed too often.

    `why` is what is known of a run that has timed out, for the `reason` of a task that is dead by it.
    An expired lease keeps its token: its holder may still report, as long as the task is not granted again.
    """
    token = row.token if event in _EXPIRIES else None
    reason = None
    if event in WOUND_DOWN:
        row, reason = _counted(row, event, limits, why)
        if row.cancel_requested and not row.kind.startswith(NAME_PREFIX):
            event, token, reason = Event.CANCEL, None, None
        elif reason is not None:
            event, token = Event.EXHAUST, None
    status = step(row.status, event)
    return replace(
        row,
        status=status,
        cancel_requested=False,
        owner=None,
        token=token,
        next_trigger_at=next_trigger(status, now=now, after=wait),
        reason=reason,
        ended_at=now if status.ended else None,
    )


def _counted(row: Trigger, event: Event, limits: Limits, why: str) -> tuple[Trigger, str | None]:
    """Return the task with this end counted, and why the task must not run again (None: it may)."""
    if event is Event.RELEASE:
        return replace(row, attempt=row.attempt - 1), None
    most: tuple[Any, Any] = (limits.max_attempts, limits.max_crashes)
    if not (isinstance(most[0], int | None) and isinstance(most[1], int)):
        return row, f"{_DAMAGED}: max_attempts or max_crashes is not a number"
    if event is Event.RETRY or event is Event.TIME_OUT:
        row = replace(row, failures=row.failures + 1)
        if _policy(limits) is None:
            return row, f"{_DAMAGED}: its retry policy cannot be read"
        reason = _why_dead_by_failures(row.failures, limits)
    else:
        row = replace(row, crashes=row.crashes + 1)
        reason = _why_dead_by_crashes(row.crashes, limits)
    return row, f"{reason}; in the last run, {why}" if reason is not None and why else reason


def _why_dead_by_failures(failures: int, limits: Limits) -> str | None:
    if limits.max_attempts is None or failures < limits.max_attempts:
        return None
    how = "ended in retry or timed out" if limits.expiry == "retry" else "ended in retry"
    return f"{failures} attempt{'s' * (failures != 1)} {how}: max_attempts is {limits.max_attempts}"


def _why_dead_by_crashes(crashes: int, limits: Limits) -> str | None:
    if crashes <= limits.max_crashes:
        return None
    return f"{crashes} runs ended because their holder vanished: max_crashes is {limits.max_crashes}"
