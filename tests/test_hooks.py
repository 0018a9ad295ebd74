"""What happened, as values: everyone who listens hears it, and nobody who listens can do harm."""

import dataclasses
import logging
import sys

import pytest

from leasekit.hooks import (
    AtRisk,
    CancelRequested,
    CapacityExceeded,
    Claimed,
    Event,
    Hooks,
    Lost,
    Renewed,
    Sent,
    log_events,
)

TOKEN = "secret-of-this-claim"
LOST = Lost(at=1.0, task_id="a", token=TOKEN, reason="taken", why="the service answered that the lease is gone: taken")


def broken(event: Event) -> None:
    raise RuntimeError("a user's hook")


def logged(event: Event, caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    with caplog.at_level(logging.DEBUG, logger="leasekit"):
        log_events(event)
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_a_lost_lease_is_logged_where_nobody_else_listens(caplog: pytest.LogCaptureFixture) -> None:
    Hooks()(LOST)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_hooks_without_a_listener_are_false() -> None:
    assert not Hooks().active


def test_hooks_with_a_listener_are_true() -> None:
    assert Hooks([broken]).active


def test_every_listener_hears_each_event_in_their_order() -> None:
    heard: list[tuple[str, Event]] = []
    hooks = Hooks([lambda event: heard.append(("first", event)), lambda event: heard.append(("second", event))])
    hooks(LOST)
    assert heard == [("first", LOST), ("second", LOST)]


def test_a_listener_that_fails_silences_nobody_else() -> None:
    heard: list[Event] = []
    Hooks([broken, heard.append])(LOST)
    assert heard == [LOST]


def test_what_a_listener_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    Hooks([broken])(LOST)
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage() == "a hook failed on Lost"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], RuntimeError)


def test_a_listener_cannot_end_the_keeper() -> None:
    def leave(event: Event) -> None:
        sys.exit("a user's hook")

    heard: list[Event] = []
    Hooks([leave, heard.append])(LOST)
    assert heard == [LOST]


def test_the_listeners_are_those_that_were_given_at_first() -> None:
    given = [broken]
    hooks = Hooks(given)
    given.clear()
    assert hooks.active


def test_a_lost_lease_is_logged_as_a_warning_that_says_why(caplog: pytest.LogCaptureFixture) -> None:
    [(level, message)] = logged(LOST, caplog)
    assert level == logging.WARNING
    assert message == "lost a (token secret…): the service answered that the lease is gone: taken"


@pytest.mark.parametrize(
    "event",
    [
        LOST,
        AtRisk(at=1.0, task_id="a", token=TOKEN, why="500"),
        CancelRequested(at=1.0, task_id="a", token=TOKEN),
    ],
    ids=lambda event: type(event).__name__,
)
def test_of_a_token_only_six_characters_are_logged(event: Event, caplog: pytest.LogCaptureFixture) -> None:
    [(_, message)] = logged(event, caplog)
    assert TOKEN[:6] in message
    assert TOKEN[:7] not in message


@pytest.mark.parametrize(
    ("event", "level", "said"),
    [
        (AtRisk(at=1.0, task_id="a", token=TOKEN, why="500"), logging.INFO, "500"),
        (CancelRequested(at=1.0, task_id="a", token=TOKEN), logging.INFO, "asked to cancel: a"),
        (CapacityExceeded(at=1.0, held=200, capacity=120), logging.WARNING, "200 leases held, 120 can beat"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Event) else "",
)
def test_what_precedes_a_loss_is_logged(event: Event, level: int, said: str, caplog: pytest.LogCaptureFixture) -> None:
    [(found, message)] = logged(event, caplog)
    assert found == level
    assert said in message


@pytest.mark.parametrize(
    "event",
    [
        Claimed(at=1.0, task_ids=["a"], waited=0.0),
        Sent(at=1.0, task_ids=["a"], late=0.0),
        Renewed(at=1.0, task_ids=["a"], round_trip=0.1),
    ],
    ids=lambda event: type(event).__name__,
)
def test_what_happens_all_the_time_is_not_logged(event: Event, caplog: pytest.LogCaptureFixture) -> None:
    assert logged(event, caplog) == []


def test_an_event_is_a_value_that_nobody_can_change() -> None:
    assert dataclasses.replace(LOST) == LOST
    with pytest.raises(dataclasses.FrozenInstanceError):
        LOST.why = "another"  # type: ignore[misc]
