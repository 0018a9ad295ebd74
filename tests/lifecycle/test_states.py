"""The table of a task's life, and the next trigger time that goes with every change."""

import pytest

from leasekit._lifecycle.states import ENDING, LEASED, NEXT, WAITING, Event, event_of_cancel, next_trigger, step
from leasekit.task import Status
from leasekit.task.words import REDRIVABLE

S, E = Status, Event
BOTH = [S.CLAIMED, S.PROCESSING]
REPORTABLE = [*BOTH, S.ENQUEUED, S.RETRIABLE_FAILURE]  # the last two by a late report, after an expiry


@pytest.mark.parametrize(
    ("status", "event", "after"),
    [
        (S.NEW, E.CLAIM, S.CLAIMED),
        (S.NEW, E.ENQUEUE, S.ENQUEUED),
        (S.ENQUEUED, E.CLAIM, S.CLAIMED),
        (S.RETRIABLE_FAILURE, E.CLAIM, S.CLAIMED),
        (S.CLAIMED, E.HOLD, S.CLAIMED),
        (S.CLAIMED, E.BEAT, S.PROCESSING),
        (S.PROCESSING, E.HOLD, S.PROCESSING),
        *((status, E.EXPIRE, S.ENQUEUED) for status in BOTH),
        *((status, E.TIME_OUT, S.RETRIABLE_FAILURE) for status in BOTH),
        *((status, E.SUCCEED, S.SUCCESS) for status in REPORTABLE),
        *((status, E.FAIL, S.FATAL_FAILURE) for status in REPORTABLE),
        *((status, E.RETRY, S.RETRIABLE_FAILURE) for status in REPORTABLE),
        *((status, E.RELEASE, S.ENQUEUED) for status in REPORTABLE),
        *((status, E.CRASH, S.ENQUEUED) for status in REPORTABLE),
        *((status, E.EXHAUST, S.DEAD) for status in REPORTABLE),
        *((status, E.CANCEL, S.CANCELLED) for status in sorted(WAITING | LEASED)),
        *((status, E.REQUEST_CANCEL, status) for status in BOTH),
        (S.DEAD, E.REDRIVE, S.ENQUEUED),
        (S.FATAL_FAILURE, E.REDRIVE, S.ENQUEUED),
        (S.DROPPED, E.REDRIVE, S.NEW),
    ],
)
def test_what_follows(status: Status, event: Event, after: Status) -> None:
    assert step(status, event) is after


@pytest.mark.parametrize(
    ("status", "event"),
    [
        (S.CLAIMED, E.CLAIM),
        (S.PROCESSING, E.CLAIM),
        (S.NEW, E.BEAT),
        (S.ENQUEUED, E.BEAT),
        (S.RETRIABLE_FAILURE, E.BEAT),
        (S.NEW, E.SUCCEED),
        (S.NEW, E.REQUEST_CANCEL),
        (S.SUCCESS, E.REDRIVE),
        (S.CANCELLED, E.REDRIVE),
        (S.DEAD, E.CLAIM),
    ],
)
def test_what_cannot_happen(status: Status, event: Event) -> None:
    with pytest.raises(ValueError, match=f"{status} cannot {event}"):
        step(status, event)


@pytest.mark.parametrize("status", [status for status in Status if status.ended])
def test_nothing_follows_an_end_but_a_redrive(status: Status) -> None:
    assert NEXT.get(status, {}).keys() == ({E.REDRIVE} if status in REDRIVABLE else set())


def test_every_status_but_the_ends_waits_or_is_leased() -> None:
    assert WAITING | LEASED == {status for status in Status if not status.ended} == NEXT.keys() - REDRIVABLE
    assert not WAITING & LEASED


def test_every_outcome_can_end_a_lease() -> None:
    for event in ENDING.values():
        assert all(step(status, event) not in LEASED for status in LEASED)


@pytest.mark.parametrize(
    ("status", "does"),
    [(S.NEW, E.CANCEL), (S.ENQUEUED, E.CANCEL), (S.RETRIABLE_FAILURE, E.CANCEL)]
    + [(status, E.REQUEST_CANCEL) for status in BOTH]
    + [(status, None) for status in Status if status.ended],
)
def test_who_runs_is_ordered_and_who_waits_is_cancelled(status: Status, does: Event | None) -> None:
    assert event_of_cancel(status) is does


@pytest.mark.parametrize("status", [status for status in Status if not status.ended])
def test_every_status_but_the_ends_has_a_next_trigger_time(status: Status) -> None:
    assert next_trigger(status, now=100, after=7) == 107


@pytest.mark.parametrize("status", [status for status in Status if status.ended])
def test_what_has_ended_is_never_looked_at_again(status: Status) -> None:
    assert next_trigger(status, now=100, after=7) is None
