"""What the end of a run does to counts, limits and the next run."""

from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from leasekit.server.states import Event
from leasekit.server.store import Limits, Trigger
from leasekit.server.transitions import NO_LIMITS, end_run, retry_wait, silence
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
    ],
)
def test_what_an_end_counts(event: Event, attempt: int, crashes: int, failures: int) -> None:
    after = ended(event)
    assert (after.attempt, after.crashes, after.failures, after.fence) == (attempt, crashes, failures, 7)
    assert after.owner is None


@pytest.mark.parametrize("event", list(Event))
def test_only_a_lease_that_ran_out_keeps_its_token(event: Event) -> None:
    if event in (Event.ENQUEUE, Event.CLAIM):
        return
    assert ended(event).token == ("token" if event is Event.EXPIRE else None)


@pytest.mark.parametrize("event", [Event.RETRY, Event.RELEASE])
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
            "3 runs ended because their holder vanished: max_crashes is 2; of the last, nothing was heard",
        ),
    ],
)
def test_past_a_limit_it_is_dead_and_says_why(event: Event, row: Trigger, reason: str) -> None:
    after = ended(event, row, why="nothing was heard" if event is Event.EXPIRE else "")
    assert (after.status, after.reason, after.token, after.next_trigger_at) == (Status.DEAD, reason, None, None)


@pytest.mark.parametrize("event", [Event.RETRY, Event.RELEASE, Event.CRASH, Event.EXPIRE, Event.CANCEL])
@pytest.mark.parametrize("crashes", [0, 9])
def test_what_was_ordered_to_be_cancelled_is_cancelled_whatever_its_limits(event: Event, crashes: int) -> None:
    after = ended(event, replace(HELD, ordered=True, crashes=crashes))
    assert (after.status, after.reason, after.token, after.ordered) == (Status.CANCELLED, None, None, False)


@pytest.mark.parametrize(("event", "status"), [(Event.SUCCEED, Status.SUCCESS), (Event.FAIL, Status.FATAL_FAILURE)])
def test_an_order_does_not_undo_an_end(event: Event, status: Status) -> None:
    assert ended(event, replace(HELD, ordered=True)).status is status


def test_the_policy_counts_the_try_that_ends_now() -> None:
    limits = Limits(None, 5, b'{"policy": "list", "waits": [1, 2, 3]}')
    assert retry_wait(replace(HELD, failures=0), limits, Random(1)) == 1
    assert retry_wait(replace(HELD, failures=1), limits, Random(1)) == 2


def test_without_a_policy_the_default_one_waits() -> None:
    assert 0.5 <= retry_wait(replace(HELD, failures=0), NO_LIMITS, Random(1)) <= 1


# What is known of who vanished


def test_a_lease_that_ran_out_says_since_when_nothing_was_heard_and_from_whom() -> None:
    held = replace(HELD, next_trigger_at=500.0)
    said = "nothing was heard from worker 'w' since 1970-01-01 00:08:00 UTC, 21 s ago (its ttl is 20 s)"
    assert silence(held, now=501.0, instant=501.0) == said


def test_of_a_buffered_task_it_claims_no_more_than_it_knows() -> None:
    """It may have been beaten for either of the two ttls: since the later of the two moments nothing was heard."""
    held = replace(HELD, status=Status.CLAIMED, next_trigger_at=500.0)
    assert "since 1970-01-01 00:08:10 UTC, 11 s ago (its ttl is 10 s); its body had not begun" in silence(
        held, now=501.0, instant=501.0
    )


def test_a_body_that_ran_too_long_is_no_silent_worker() -> None:
    held = replace(HELD, next_trigger_at=500.0, max_runtime=60.0, run_until=490.0)
    said = silence(held, now=501.0, instant=501.0)
    assert said.startswith("no beat was accepted from worker 'w' since")
    assert said.endswith(": its max_runtime of 60 s was over")


def test_a_body_that_may_still_run_is_not_said_to_run_too_long() -> None:
    held = replace(HELD, next_trigger_at=500.0, max_runtime=60.0, run_until=510.0)
    assert "max_runtime" not in silence(held, now=501.0, instant=501.0)
