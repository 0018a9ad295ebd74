"""The life of a task as a table: (status, event) → status, and when the store looks at it next.

              claim                  beat
   NEW ─────────────────▶ CLAIMED ─────────▶ PROCESSING ──┬─ succeed ─▶ SUCCESS
    │      ┌────────────▶    │                   │        ├─ fail ────▶ FATAL_FAILURE
    │      │ claim           │ release, crash,   │        ├─ retry ───▶ RETRIABLE_FAILURE ── claim ─▶ CLAIMED
    │      │                 │ expire            │        └─ exhaust ─▶ DEAD
    └▶ ENQUEUED ◀────────────┴───────────────────┘
       enqueue                                       cancel, from everywhere that has not ended ─▶ CANCELLED

Rule 1: what is not in the table cannot happen.
Rule 2: no clock, no store, no chance in here (sans-IO); callers say what time it is.
Rule 3: every change writes the next trigger time, so that a task is picked up again if nothing more happens to it.
        The store is the queue: a claim takes due tasks directly, and what is put back is due at once.
"""

import enum
from typing import Literal

from leasekit.task import Outcome, Status

__all__ = ["ENDING", "LEASED", "NEXT", "WAITING", "WOUND_DOWN", "Event", "asked_to_cancel", "next_trigger", "step"]


class Event(enum.StrEnum):
    """What can happen to a task."""

    ENQUEUE = "enqueue"  # the consumer hands it to a queue, once more where the queue lost it
    CLAIM = "claim"
    HOLD = "hold"  # a beat from a buffer: its body has not begun
    BEAT = "beat"
    ORDER = "order"  # someone wants a running task cancelled
    SUCCEED = "succeed"
    FAIL = "fail"
    RETRY = "retry"
    RELEASE = "release"
    CRASH = "crash"
    EXPIRE = "expire"
    EXHAUST = "exhaust"  # a retry, a crash or an expiry past the task's own limit
    CANCEL = "cancel"


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
        Event.CANCEL: Status.CANCELLED,
    },
    # Its last lease may have expired and its holder may yet report: finished work is not thrown away.
    Status.ENQUEUED: {
        Event.ENQUEUE: Status.ENQUEUED,
        Event.CLAIM: Status.CLAIMED,
        **_WHEN_RUN_ENDS,
    },
    Status.CLAIMED: {
        Event.HOLD: Status.CLAIMED,
        Event.BEAT: Status.PROCESSING,
        Event.ORDER: Status.CLAIMED,
        Event.EXPIRE: Status.ENQUEUED,
        **_WHEN_RUN_ENDS,
    },
    Status.PROCESSING: {
        Event.HOLD: Status.PROCESSING,
        Event.BEAT: Status.PROCESSING,
        Event.ORDER: Status.PROCESSING,
        Event.EXPIRE: Status.ENQUEUED,
        **_WHEN_RUN_ENDS,
    },
    Status.RETRIABLE_FAILURE: {
        Event.ENQUEUE: Status.ENQUEUED,
        Event.CLAIM: Status.CLAIMED,
        Event.CANCEL: Status.CANCELLED,
    },
}

LEASED = frozenset({Status.CLAIMED, Status.PROCESSING})
"""Somebody holds the task; its next trigger time is when the lease ends."""

WAITING = frozenset({Status.NEW, Status.ENQUEUED, Status.RETRIABLE_FAILURE})
"""Nobody holds the task; its next trigger time is when it may be claimed."""

ENDING: dict[Outcome | Literal["expired"], Event] = {
    "success": Event.SUCCEED,
    "fatal": Event.FAIL,
    "retry": Event.RETRY,
    "release": Event.RELEASE,
    "crash": Event.CRASH,
    "cancelled": Event.CANCEL,
    "expired": Event.EXPIRE,
}
"""What the end of a run does to its task: outcomes that holders report, and the lease that ran out."""

WOUND_DOWN = frozenset({Event.RETRY, Event.RELEASE, Event.CRASH, Event.EXPIRE})
"""Ends after which a task would run again: where its cancel is requested, it is cancelled instead."""


def step(status: Status, event: Event) -> Status:
    """The status that follows. Raises `ValueError` where this cannot happen."""
    try:
        return NEXT[status][event]
    except KeyError:
        raise ValueError(f"a task that is {status} cannot {event}") from None


def asked_to_cancel(status: Status) -> Event | None:
    """What a cancel does: waiting tasks end at once, running ones are asked to, ended ones stay (None)."""
    if status in WAITING:
        return Event.CANCEL
    return Event.ORDER if status in LEASED else None


def next_trigger(status: Status, *, now: float, after: float) -> float | None:
    """When the store looks at a task again that comes to `status` now; None: never.

    `after` is, for what waits, the time until it may run: nothing, its retry policy's wait, or what its holder asked
    for; for what is leased, the ttl that was granted: *claimed* the claim timeout, and with every beat the heartbeat
    timeout.
    """
    return now + after if status in NEXT else None
