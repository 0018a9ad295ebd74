"""One lease's trust: counted from when the request left, moved by acknowledged beats alone."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasekit._core.term import Term, granted_at
from leasekit.config import DRIFT, Heartbeats

seconds = st.floats(0, 1e6)


def term_at(granted: float = 0.0, *, heartbeats: Heartbeats | None = None, confirmed: bool = True) -> Term:
    return Term("a", heartbeats or Heartbeats(), granted_at=granted, confirmed=confirmed)


def fails(term: Term, *asked_at: float) -> list[bool]:
    return [term.failed(at) for at in asked_at]


# Until when -------------------------------------------------------------------------------------------------------


def test_trust_ends_before_the_service_may_grant_the_lease_again() -> None:
    assert term_at(1000.0).trusted_until == pytest.approx(1000 + 300 * (1 - 2 * DRIFT) - 15)


def test_a_body_is_told_to_stop_a_grace_before_the_end() -> None:
    term = term_at(1000.0)
    assert term.trusted_until - term.lost_at == pytest.approx(term.heartbeats.grace)


def test_trust_counts_from_when_the_request_left() -> None:
    term = term_at(0.0)
    term.renewed(100.0)
    assert term.lost_at == pytest.approx(374.4)


def test_trust_never_moves_back_when_answers_overtake_one_another() -> None:
    term = term_at(0.0)
    term.renewed(100.0)
    term.renewed(90.0)
    assert term.granted_at == 100.0


@given(st.lists(seconds, min_size=1))
def test_trust_counts_from_the_latest_acknowledged_request_in_whatever_order(asked: list[float]) -> None:
    term = term_at(0.0)
    for asked_at in asked:
        term.renewed(asked_at)
    assert term.granted_at == max(asked)


def test_a_failed_beat_moves_no_trust() -> None:
    term = term_at(0.0)
    fails(term, 100.0, 200.0)
    assert term.granted_at == 0.0


def test_the_first_acknowledged_beat_confirms() -> None:
    term = term_at(confirmed=False)
    term.renewed(1.0)
    assert term.confirmed


def test_a_failed_beat_confirms_nothing() -> None:
    term = term_at(confirmed=False)
    term.failed(1.0)
    assert not term.confirmed


# Strikes ----------------------------------------------------------------------------------------------------------


def test_strikes_end_nothing_while_a_further_try_could_be_answered_in_time() -> None:
    assert fails(term_at(), *(260.0 + i / 10 for i in range(40))) == [False] * 40


def test_strikes_end_a_lease_when_no_further_try_could_be_answered_in_time() -> None:
    assert fails(term_at(), 250.0, 255.0, 264.4) == [False, False, True]


def test_less_than_max_failures_end_nothing_however_late_they_are() -> None:
    assert fails(term_at(), 270.0, 273.0) == [False, False]


@pytest.mark.parametrize("max_failures", [1, 2, 3, 5])
def test_with_strike_after_zero_the_strikes_alone_decide(max_failures: int) -> None:
    term = term_at(heartbeats=Heartbeats(strike_after=0, max_failures=max_failures))
    assert fails(term, *[0.0] * max_failures) == [False] * (max_failures - 1) + [True]


def test_strike_after_counts_from_the_last_acknowledged_beat() -> None:
    term = term_at(heartbeats=Heartbeats(strike_after=100))
    term.renewed(50.0)
    assert fails(term, 60.0, 70.0, 149.0, 150.0) == [False, False, False, True]


def test_strike_after_is_judged_by_when_the_failed_request_left() -> None:
    term = term_at(heartbeats=Heartbeats(strike_after=100))
    assert fails(term, 97.0, 98.0, 99.9) == [False] * 3


def test_a_success_clears_strikes_and_retries() -> None:
    term = term_at()
    fails(term, 1.0, 2.0)
    term.renewed(3.0)
    assert (term.strikes, term.retries) == (0, 0)


def test_an_unconfirmed_lease_that_may_be_over_survives_the_outage_that_others_survive() -> None:
    """It may have been granted long ago, or just now: a service that is away for a moment costs no task its lease."""
    heartbeats = Heartbeats()
    late = 3 * heartbeats.ttl
    assert fails(term_at(confirmed=False), late, late + 5, late + 10, late + heartbeats.outage_survived) == [False] * 4


def test_an_unconfirmed_lease_is_given_up_once_its_heartbeats_have_failed_for_as_long_as_a_lease_lasts() -> None:
    late = Heartbeats().strikes_from
    assert fails(term_at(confirmed=False), 500.0, 510.0, 500 + late - 1, 500 + late) == [False, False, False, True]


def test_the_strikes_of_a_lease_that_was_confirmed_count_from_its_last_acknowledged_beat() -> None:
    term = term_at(confirmed=False)
    fails(term, 500.0)
    term.renewed(510.0)
    late = 510 + Heartbeats().strikes_from
    assert fails(term, late - 1, late, late + 1) == [False, False, True]


# When a claim was granted -----------------------------------------------------------------------------------------


def test_a_claim_is_granted_no_earlier_than_it_left_and_had_waited() -> None:
    assert granted_at(100.0, 20.0, answered_at=121.0) == pytest.approx(100 + 20 * (1 - 2 * DRIFT))


def test_a_claim_that_waited_by_a_faster_clock_is_not_believed_to_be_granted_later_than_it_was() -> None:
    service_says = 20.0
    by_our_clock = service_says / (1 + 2 * DRIFT)
    assert granted_at(0.0, service_says, answered_at=21.0) <= by_our_clock


@pytest.mark.parametrize("waited", [None, 0.0, -5.0, -math.inf, math.nan])
def test_a_wait_that_is_not_told_or_makes_no_sense_buys_nothing(waited: float | None) -> None:
    assert granted_at(100.0, waited, answered_at=101.0) == 100.0


def test_nothing_was_granted_later_than_it_was_answered_whatever_the_service_says() -> None:
    assert granted_at(0.0, 1e9, answered_at=20.0) == 20.0
