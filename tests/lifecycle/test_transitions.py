"""What the end of a run does to counts, limits and the next run."""

from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from leasekit._lifecycle.rows import Limits, Trigger
from leasekit._lifecycle.states import WOUND_DOWN, Event
from leasekit._lifecycle.transitions import NO_LIMITS, counted_as, end_run, retry_wait, unexpired
from leasekit.task import Status

HELD = Trigger(
    1, "a", "k", 2, 10.0, 20.0, Status.PROCESSING, 7, 3, 1, 1, False, "w", "token", 500.0, None  # noqa: FBT003
)  # fmt: skip
LIMITS = Limits(max_attempts=3, max_crashes=2, retry=None)


def ended(event: Event, row: Trigger = HELD, **more: Any) -> Trigger:
    return end_run(row, event, limits=LIMITS, now=100.0, **more)


@pytest.mark.parametrize(
    ("event", "attempt", "crashes", "failures"),
    [
        (Event.SUCCEED, 3, 1, 1),
        (Event.FAIL, 3, 1, 1),
        (Event.CANCEL, 3, 1, 1),
        (Event.RETRY, 3, 1, 2),
        (Event.RELEASE, 2, 1, 1),
        (Event.CRASH, 3, 2, 1),
        (Event.EXPIRE, 3, 2, 1),
        (Event.TIME_OUT, 3, 1, 2),
    ],
)
def test_what_an_end_counts(event: Event, attempt: int, crashes: int, failures: int) -> None:
    after = ended(event)
    assert (after.attempt, after.crashes, after.failures, after.fence) == (attempt, crashes, failures, 7)
    assert after.owner is None


@pytest.mark.parametrize("event", list(Event))
def test_only_a_lease_that_ran_out_keeps_its_token(event: Event) -> None:
    unended = (Event.ENQUEUE, Event.UNQUEUE, Event.UNQUEUE_RETRY, Event.CLAIM, Event.REDRIVE, Event.DROP)
    if event in (*unended, Event.RESCHEDULE):
        return
    assert ended(event).token == ("token" if event in (Event.EXPIRE, Event.TIME_OUT) else None)


@pytest.mark.parametrize("event", [Event.RETRY, Event.RELEASE, Event.TIME_OUT])
def test_what_runs_again_waits_so_long(event: Event) -> None:
    assert ended(event, wait=5.0).next_trigger_at == 105.0


@pytest.mark.parametrize("event", [Event.SUCCEED, Event.FAIL, Event.CANCEL])
def test_what_has_ended_is_never_due(event: Event) -> None:
    assert ended(event).next_trigger_at is None


@pytest.mark.parametrize(
    ("event", "row", "reason"),
    [
        (Event.RETRY, replace(HELD, failures=2), "3 attempts ended in retry: max_attempts is 3"),
        (Event.CRASH, replace(HELD, crashes=2), "3 runs ended because their holder vanished: max_crashes is 2"),
        (
            Event.EXPIRE,
            replace(HELD, crashes=2),
            "3 runs ended because their holder vanished: max_crashes is 2; in the last run, nothing was heard",
        ),
    ],
)
def test_past_a_limit_it_is_dead_and_says_why(event: Event, row: Trigger, reason: str) -> None:
    after = ended(event, row, why="nothing was heard" if event is Event.EXPIRE else "")
    assert (after.status, after.reason, after.token, after.next_trigger_at) == (Status.DEAD, reason, None, None)


@pytest.mark.parametrize("event", sorted(WOUND_DOWN | {Event.CANCEL}))
@pytest.mark.parametrize("crashes", [0, 9])
def test_what_was_ordered_to_be_cancelled_is_cancelled_whatever_its_limits(event: Event, crashes: int) -> None:
    after = ended(event, replace(HELD, cancel_requested=True, crashes=crashes))
    assert (after.status, after.reason, after.token, after.cancel_requested) == (Status.CANCELLED, None, None, False)


@pytest.mark.parametrize(("event", "status"), [(Event.SUCCEED, Status.SUCCESS), (Event.FAIL, Status.FATAL_FAILURE)])
def test_an_order_does_not_undo_an_end(event: Event, status: Status) -> None:
    assert ended(event, replace(HELD, cancel_requested=True)).status is status


AS_ATTEMPTS = LIMITS._replace(expiry="retry")


@pytest.mark.parametrize(
    ("event", "is_overdue", "counted"),
    [
        (Event.EXPIRE, False, Event.TIME_OUT),
        (Event.EXPIRE, True, Event.TIME_OUT),
        (Event.CRASH, False, Event.CRASH),
        (Event.CRASH, True, Event.RETRY),
        (Event.RETRY, True, Event.RETRY),
        (Event.SUCCEED, True, Event.SUCCEED),
    ],
)
def test_a_time_out_is_an_attempt_only_if_the_task_says_so(event: Event, is_overdue: bool, counted: Event) -> None:
    assert counted_as(event, AS_ATTEMPTS, is_overdue=is_overdue) is counted
    assert counted_as(event, LIMITS, is_overdue=is_overdue) is event


@pytest.mark.parametrize("event", [Event.RETRY, Event.TIME_OUT])
def test_a_task_that_timed_out_too_often_is_dead_and_says_so(event: Event) -> None:
    after = end_run(replace(HELD, failures=2), event, limits=AS_ATTEMPTS, now=100.0, why="nothing was heard")
    reason = "3 attempts ended in retry or timed out: max_attempts is 3; in the last run, nothing was heard"
    assert (after.status, after.reason, after.token) == (Status.DEAD, reason, None)


@pytest.mark.parametrize("event", [Event.EXPIRE, Event.TIME_OUT])
def test_a_late_report_takes_back_what_the_expiry_counted(event: Event) -> None:
    after = unexpired(ended(event))
    assert (after.crashes, after.failures) == (HELD.crashes, HELD.failures)


def test_the_policy_counts_the_try_that_ends_now() -> None:
    limits = Limits(None, 5, b'{"policy": "list", "waits": [1, 2, 3]}')
    assert retry_wait(replace(HELD, failures=0), limits, Random(1)) == 1
    assert retry_wait(replace(HELD, failures=1), limits, Random(1)) == 2


def test_without_a_policy_the_default_one_waits() -> None:
    assert 0.5 <= retry_wait(replace(HELD, failures=0), NO_LIMITS, Random(1)) <= 1
