"""The life of a task as a table, (status, event) → status, and when the store looks at the task next.

              claim                  beat
   NEW ─────────────────▶ CLAIMED ─────────▶ PROCESSING ──┬─ succeed ─▶ SUCCESS
    │      ┌────────────▶    │                   │        ├─ fail ────▶ FATAL_FAILURE
    │      │ claim           │ release, crash,   │        ├─ retry, time_out ─▶ RETRIABLE_FAILURE ── claim ─▶ CLAIMED
    │      │                 │ expire            │        └─ exhaust ─▶ DEAD
    └▶ ENQUEUED ◀────────────┴───────────────────┘
       enqueue, unqueue                              cancel, from everywhere that has not ended ─▶ CANCELLED
   NEW, ENQUEUED ── drop ─▶ DROPPED: a task that it was to run after has ended, and not in success, or it is too late
   NEW, ENQUEUED, RETRIABLE_FAILURE ── reschedule ─▶ the same: it waits, until another time or in another lane
   DEAD, FATAL_FAILURE ── redrive ─▶ ENQUEUED, and DROPPED ── redrive ─▶ NEW: a new life, at an operator's request

Rule 1: what is not in the table cannot happen.
Rule 2: this module has no clock, no store and no randomness (sans-IO); callers pass `now`.
Rule 3: every change writes the next trigger time, so that a task is picked up again if no other event comes.
        A claim takes due tasks from the store directly, and a task that is put back is due at once. A task in a queue
        of messages is due again after its enqueue timeout: the queue may have lost it.
"""

import enum
from typing import Literal

from leasekit.task import Outcome, Status


class Event(enum.StrEnum):
    """An event in the life of a task."""

    ENQUEUE = "enqueue"  # the consumer moves a due task to a queue of messages, if the service has such queues
    UNQUEUE = "unqueue"  # the queue has not taken it, or a gate or limit stops it at its claim; it has not run yet
    UNQUEUE_RETRY = "unqueue_retry"  # the same for a task whose last run has failed
    CLAIM = "claim"
    HOLD = "hold"  # a heartbeat for a task in a buffer: the handler has not begun
    BEAT = "beat"
    REQUEST_CANCEL = "request_cancel"  # a cancel of a running task is requested
    SUCCEED = "succeed"
    FAIL = "fail"
    RETRY = "retry"
    RELEASE = "release"
    CRASH = "crash"
    EXPIRE = "expire"
    TIME_OUT = "time_out"  # an expiry that counts as an attempt, because its task says so
    EXHAUST = "exhaust"  # a retry, a crash, an expiry or a time-out past the task's own limit
    CANCEL = "cancel"
    DROP = "drop"  # a task that this one was to run after did not succeed, or this one has not begun in time
    RESCHEDULE = "reschedule"  # a task that waits gets another due time or priority
    REDRIVE = "redrive"  # an operator begins a new life of a task that has ended


_WHEN_RUN_ENDS = {
    Event.SUCCEED: Status.SUCCESS,
    Event.FAIL: Status.FATAL_FAILURE,
    Event.RETRY: Status.RETRIABLE_FAILURE,
    Event.RELEASE: Status.ENQUEUED,
    Event.CRASH: Status.ENQUEUED,
    Event.EXHAUST: Status.DEAD,
    Event.CANCEL: Status.CANCELLED,
}

NEXT: dict[Status, dict[Event, Status]] = {
    Status.NEW: {
        Event.ENQUEUE: Status.ENQUEUED,
        Event.CLAIM: Status.CLAIMED,
        Event.RESCHEDULE: Status.NEW,
        Event.CANCEL: Status.CANCELLED,
        Event.DROP: Status.DROPPED,
    },
    # The holder of an expired lease may still report: finished work is not thrown away.
    Status.ENQUEUED: {
        Event.ENQUEUE: Status.ENQUEUED,
        Event.UNQUEUE: Status.NEW,
        Event.UNQUEUE_RETRY: Status.RETRIABLE_FAILURE,
        Event.CLAIM: Status.CLAIMED,
        Event.RESCHEDULE: Status.ENQUEUED,
        Event.DROP: Status.DROPPED,
        **_WHEN_RUN_ENDS,
    },
    Status.CLAIMED: {
        Event.HOLD: Status.CLAIMED,
        Event.BEAT: Status.PROCESSING,
        Event.REQUEST_CANCEL: Status.CLAIMED,
        Event.EXPIRE: Status.ENQUEUED,
        Event.TIME_OUT: Status.RETRIABLE_FAILURE,
        **_WHEN_RUN_ENDS,
    },
    Status.PROCESSING: {
        Event.HOLD: Status.PROCESSING,
        Event.BEAT: Status.PROCESSING,
        Event.REQUEST_CANCEL: Status.PROCESSING,
        Event.EXPIRE: Status.ENQUEUED,
        Event.TIME_OUT: Status.RETRIABLE_FAILURE,
        **_WHEN_RUN_ENDS,
    },
    Status.RETRIABLE_FAILURE: {
        Event.ENQUEUE: Status.ENQUEUED,
        Event.CLAIM: Status.CLAIMED,
        Event.RESCHEDULE: Status.RETRIABLE_FAILURE,
        **_WHEN_RUN_ENDS,
    },
    Status.FATAL_FAILURE: {Event.REDRIVE: Status.ENQUEUED},
    Status.DROPPED: {Event.REDRIVE: Status.NEW},  # a task that waits for others again
    Status.DEAD: {Event.REDRIVE: Status.ENQUEUED},
}

LEASED = frozenset({Status.CLAIMED, Status.PROCESSING})
"""Statuses under a lease: the next trigger time is the end of the lease."""

WAITING = frozenset({Status.NEW, Status.ENQUEUED, Status.RETRIABLE_FAILURE})
"""Statuses without a lease: the next trigger time is when the task may be claimed."""

ENDING: dict[Outcome | Literal["expired"], Event] = {
    "success": Event.SUCCEED,
    "fatal": Event.FAIL,
    "retry": Event.RETRY,
    "release": Event.RELEASE,
    "crash": Event.CRASH,
    "cancelled": Event.CANCEL,
    "expired": Event.EXPIRE,
}  # the event of each end of a run: of the outcomes that holders report, and of an expired lease

REDRIVEN = "redriven"  # the outcome of a redrive's entry in the history of a task
RESCHEDULED = "rescheduled"  # and of a reschedule's

WOUND_DOWN = frozenset({Event.RETRY, Event.RELEASE, Event.CRASH, Event.EXPIRE, Event.TIME_OUT})
"""Ends after which a task runs again, except where a cancel was requested: then the task is cancelled."""


def step(status: Status, event: Event) -> Status:
    """Return the status that follows. Raises `ValueError` if the event cannot happen in this status."""
    try:
        return NEXT[status][event]
    except KeyError:
        raise ValueError(f"a task that is {status} cannot {event}") from None


def event_of_cancel(status: Status) -> Event | None:
    """Return the event of a cancel: it ends a waiting task, or asks a running one to stop; None: the task has ended."""
    if status in WAITING:
        return Event.CANCEL
    return Event.REQUEST_CANCEL if status in LEASED else None


def next_trigger(status: Status, *, now: float, after: float) -> float | None:
    """Return when the store next looks at a task that enters `status` now; None: the status is final.

    For a waiting task, `after` is the wait until it may run: none, that of its retry policy, or as its holder asked;
    for a task that is moved to a queue, the enqueue timeout.
    For a leased task, `after` is the granted ttl: the claim timeout, and with every heartbeat the heartbeat timeout.
    """
    return None if status.ended else now + after
