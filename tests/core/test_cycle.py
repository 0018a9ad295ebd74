"""Each row of the cycle's table, and what it leaves to be understood."""

# That a lease is in exactly one place (rule 3 of the cycle) can be seen from inside only.
# pyright: reportPrivateUsage=false

import itertools
import math
from collections.abc import Sequence
from itertools import pairwise

import pytest

from leasekit._core.cycle import Cycle, Early, Lost, Send, in_turn
from leasekit._core.term import Term
from leasekit.config import Heartbeats
from leasekit.task import Verdict

RENEWED = Verdict(id="", verdict="renewed")
FAILED = Verdict(id="", verdict="failed", reason="500")
THROTTLED = Verdict(id="", verdict="throttled")
TAKEN = Verdict(id="", verdict="gone", reason="taken")
ONE_BY_ONE = Heartbeats(rate=1, batch=1)


def cycle_of(heartbeats: Heartbeats = ONE_BY_ONE) -> Cycle:
    """One that begins at 0, and whose backoff is cut by a quarter."""
    return Cycle(heartbeats, now=0.0, random=lambda: 0.5, early=Early())


def add(cycle: Cycle, *keys: object, now: float = 0.0, granted_at: float | None = None) -> list[Term]:
    granted = now if granted_at is None else granted_at
    terms = [Term(key, cycle.heartbeats, granted_at=granted) for key in keys]
    for term in terms:
        cycle.add(term, now)
    return terms


def unconfirmed(cycle: Cycle, *, now: float = 0.0, granted_at: float | None = None) -> Term:
    term = Term("?", cycle.heartbeats, granted_at=now if granted_at is None else granted_at, confirmed=False)
    cycle.add(term, now)
    return term


def send_at(cycle: Cycle, now: float) -> Send:
    """The one call that is due at `now`."""
    [send] = [effect for effect in cycle.step(now) if isinstance(effect, Send)]
    return send


def next_send(cycle: Cycle) -> tuple[Send, float]:
    """Sleep until a call is due."""
    for _ in range(100):
        now = cycle.wake_at
        for effect in cycle.step(now):
            if isinstance(effect, Send):
                return effect, now
    raise AssertionError("no call in 100 steps")


def answer(cycle: Cycle, send: Send, *verdicts: Verdict, asked_at: float, now: float | None = None) -> list[Lost]:
    """What follows from these verdicts, or from the only one for each."""
    each = verdicts if len(verdicts) == len(send.terms) else verdicts * len(send.terms)
    return cycle.answered(send, each, asked_at=asked_at, now=asked_at if now is None else now)


def fail(cycle: Cycle, times: int) -> tuple[list[Lost], float]:
    """That many calls in a row fail as soon as they are made: all effects, and when the last was."""
    effects: list[Lost] = []
    now = 0.0
    for _ in range(times):
        send, now = next_send(cycle)
        effects += answer(cycle, send, FAILED, asked_at=now)
    return effects, now


def keys(terms: Sequence[Term]) -> list[object]:
    return [term.key for term in terms]


def order_of(cycle: Cycle, count: int) -> list[object]:
    """In which order the next calls take them, when none is answered."""
    sent: list[object] = []
    while len(sent) < count:
        sent += keys(next_send(cycle)[0].terms)
    return sent


# A lease is added -------------------------------------------------------------------------------------------------


def test_a_slot_is_due_as_soon_as_a_lease_is_added() -> None:
    cycle = cycle_of()
    add(cycle, "a", now=50.0)
    assert cycle.wake_at == 50.0
    assert keys(send_at(cycle, 50.0).terms) == ["a"]


def test_a_lease_that_is_added_while_others_keep_an_even_pace_does_not_wait_for_it() -> None:
    cycle = cycle_of()
    add(cycle, "a")
    answer(cycle, send_at(cycle, 0.0), RENEWED, asked_at=0.0)
    add(cycle, "b", now=20.0)
    assert cycle.wake_at == 20.0


def test_a_slot_that_an_added_lease_wants_keeps_to_the_pace_of_retries() -> None:
    cycle = cycle_of()
    add(cycle, "a")
    answer(cycle, send_at(cycle, 0.0), RENEWED, asked_at=0.0)
    add(cycle, "b", now=1.0)
    assert cycle.wake_at == cycle.heartbeats.retry_wait


def test_an_added_lease_goes_to_the_back_of_main() -> None:
    cycle = cycle_of()
    add(cycle, "a", now=0.0)
    add(cycle, "b", now=1.0)
    assert order_of(cycle, 2) == ["a", "b"]


def test_leases_of_one_claim_beat_in_the_order_in_which_they_were_added() -> None:
    cycle = cycle_of()
    add(cycle, "a", "b", "c")
    assert order_of(cycle, 3) == ["a", "b", "c"]


def test_a_grant_counts_as_the_last_acknowledged_beat() -> None:
    cycle = cycle_of()
    add(cycle, "a", now=10.0)
    add(cycle, "answered later, granted earlier", now=12.0, granted_at=5.0)
    assert order_of(cycle, 2) == ["answered later, granted earlier", "a"]


def test_nothing_wakes_an_empty_cycle() -> None:
    assert cycle_of().wake_at == math.inf


def test_an_empty_cycle_has_nothing_to_do_however_late_it_is() -> None:
    assert cycle_of().step(1e6) == []


# A slot comes up --------------------------------------------------------------------------------------------------


def test_a_slot_takes_no_more_than_a_batch_from_the_front() -> None:
    cycle = cycle_of(Heartbeats(batch=2))
    add(cycle, "a", "b", "c")
    assert keys(send_at(cycle, 0.0).terms) == ["a", "b"]


def test_a_slot_takes_what_is_there_where_that_is_less_than_a_batch() -> None:
    cycle = cycle_of(Heartbeats(batch=5))
    add(cycle, "a", "b")
    assert keys(send_at(cycle, 0.0).terms) == ["a", "b"]


def test_a_lease_in_flight_is_in_no_deque() -> None:
    cycle = cycle_of()
    [term] = add(cycle, "a")
    send = send_at(cycle, 0.0)
    assert term.place is send
    assert not any((cycle._main, cycle._urgent, cycle._waiting, cycle._backup, cycle._rested))


def test_no_second_slot_takes_a_lease_in_flight() -> None:
    cycle = cycle_of()
    add(cycle, "a", "b")
    send_at(cycle, 0.0)
    assert order_of(cycle, 1) == ["b"]
    assert not any(isinstance(effect, Send) for now in range(2, 250) for effect in cycle.step(float(now)))


def test_no_more_calls_are_under_way_than_in_flight_allows() -> None:
    cycle = cycle_of(Heartbeats(rate=1, batch=1, in_flight=2))
    add(cycle, "a", "b", "c")
    order_of(cycle, 2)
    assert not any(isinstance(effect, Send) for now in range(100) for effect in cycle.step(float(now)))


def test_an_answer_makes_room_for_the_next_call() -> None:
    cycle = cycle_of(Heartbeats(rate=1, batch=1, in_flight=1))
    add(cycle, "a", "b")
    send = send_at(cycle, 0.0)
    answer(cycle, send, RENEWED, asked_at=0.0, now=120.0)
    assert keys(send_at(cycle, cycle.wake_at).terms) == ["b"]


def test_the_slots_of_a_cycle_are_spread_evenly_over_it() -> None:
    cycle = cycle_of(Heartbeats(batch=100))
    for claim in range(8):  # a slot each, of which the first is at once
        add(cycle, *range(100 * claim, 100 * claim + 100))
    slots: list[float] = []
    for _ in range(24):
        send, now = next_send(cycle)
        answer(cycle, send, RENEWED, asked_at=now)
        slots.append(now)
    assert slots == pytest.approx([15.0 * i for i in range(24)])


def test_a_single_lease_beats_once_a_cycle() -> None:
    cycle = cycle_of()
    add(cycle, "a")
    slots: list[float] = []
    for _ in range(4):
        send, now = next_send(cycle)
        answer(cycle, send, RENEWED, asked_at=now, now=now + 1)
        slots.append(now)
    assert slots == [0.0, 120.0, 240.0, 360.0]


@pytest.mark.parametrize("rate", [0.5, 1.0, 8.0])
def test_slots_are_never_closer_than_the_rate_allows(rate: float) -> None:
    cycle = cycle_of(Heartbeats(rate=rate, batch=1, in_flight=1000))
    add(cycle, *range(300), granted_at=-119.0)
    slots = [next_send(cycle)[1] for _ in range(60)]
    assert min(b - a for a, b in itertools.pairwise(slots)) >= 1 / rate - 1e-9


def test_a_slot_says_how_late_it_came_up() -> None:
    cycle = cycle_of()
    add(cycle, "a", now=0.0)
    assert send_at(cycle, 2.5).late == 2.5


def test_a_full_cycle_of_one_by_one_keeps_120_leases() -> None:
    cycle = cycle_of()
    terms = add(cycle, *range(120))
    now = 0.0
    for _ in range(600):
        send, now = next_send(cycle)
        answer(cycle, send, RENEWED, asked_at=now)
    assert len(cycle) == 120
    assert max(now - term.granted_at for term in terms) <= 1.1 * 120


# Renewed ----------------------------------------------------------------------------------------------------------


def test_a_renewed_lease_moves_to_backup() -> None:
    cycle = cycle_of()
    [term] = add(cycle, "a")
    assert answer(cycle, send_at(cycle, 0.0), RENEWED, asked_at=0.0) == []
    assert term.place is cycle._backup


def test_a_renewed_lease_does_not_beat_again_in_its_cycle() -> None:
    cycle = cycle_of()
    add(cycle, "a")
    answer(cycle, send_at(cycle, 0.0), RENEWED, asked_at=0.0)
    assert not any(isinstance(effect, Send) for now in range(1, 120) for effect in cycle.step(float(now)))


def test_a_renewal_moves_trust_to_when_the_request_left() -> None:
    cycle = cycle_of()
    [term] = add(cycle, "a")
    answer(cycle, send_at(cycle, 30.0), RENEWED, asked_at=30.0, now=39.0)
    assert term.granted_at == 30.0


def test_a_renewal_clears_strikes_and_retries() -> None:
    cycle = cycle_of()
    [term] = add(cycle, "a")
    fail(cycle, 2)
    send, now = next_send(cycle)
    answer(cycle, send, RENEWED, asked_at=now)
    assert (term.strikes, term.retries) == (0, 0)


def test_an_answer_so_late_that_its_grant_ends_before_the_turn_is_followed_by_another_beat() -> None:
    cycle = cycle_of()
    [term] = add(cycle, "a")
    send = send_at(cycle, 0.0)
    cycle.step(274.0)  # the process stood still; the next turn is at 360
    answer(cycle, send, RENEWED, asked_at=0.0, now=274.0)
    assert keys(send_at(cycle, 274.0).terms) == ["a"]
    assert term.lost_at < 275.0


def test_an_answer_so_late_that_its_grant_ends_before_the_turn_does_not_hide_that_end() -> None:
    cycle = cycle_of()
    [term] = add(cycle, "a")
    send = send_at(cycle, 0.0)
    cycle.step(274.0)
    answer(cycle, send, RENEWED, asked_at=0.0, now=274.0)
    [lost] = [effect for effect in cycle.step(term.lost_at) if isinstance(effect, Lost)]
    assert lost.term is term


def test_a_lease_renewed_in_another_cycle_beats_within_a_cycle_and_not_at_once() -> None:
    cycle = cycle_of()
    cycle.add(Term("a", cycle.heartbeats, granted_at=49.0), 50.0, renewed=True)
    assert len(cycle) == 1
    _, at = next_send(cycle)
    assert at == pytest.approx(49.0 + cycle.heartbeats.cycle)


def test_leases_that_another_cycle_renewed_in_a_crowd_are_spread_over_the_cycle() -> None:
    cycle = cycle_of(Heartbeats(batch=1))
    for i in range(12):
        cycle.add(Term(i, cycle.heartbeats, granted_at=50.0 + i / 100), 50.0 + i / 100, renewed=True)
    sends: list[float] = []
    for _ in range(12):
        send, at = next_send(cycle)
        answer(cycle, send, RENEWED, asked_at=at)
        sends.append(at)
    assert min(b - a for a, b in itertools.pairwise(sends)) > 9.0
    assert sends[-1] <= 50.0 + cycle.heartbeats.cycle


def test_a_lease_that_another_cycle_renewed_with_little_of_its_grant_left_has_to_beat_again() -> None:
    cycle = cycle_of()
    cycle.add(term := Term("a", cycle.heartbeats, granted_at=-200.0), 50.0, renewed=True)
    assert term.place is cycle._main


def test_a_cycle_is_unused_only_when_no_answer_is_awaited() -> None:
    cycle = cycle_of()
    [term] = add(cycle, "a")
    send = send_at(cycle, 0.0)
    cycle.remove(term)
    assert not cycle.unused
    answer(cycle, send, RENEWED, asked_at=0.0)
    assert cycle.unused


# Gone ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["settled", "taken", "expired", "cancelled", "unknown"])
def test_a_lease_that_is_gone_is_out_for_good_and_its_reason_is_kept(reason: str) -> None:
    cycle = cycle_of()
    [term] = add(cycle, "a")
    [lost] = answer(cycle, send_at(cycle, 0.0), Verdict(id="", verdict="gone", reason=reason), asked_at=0.0)
    assert isinstance(lost, Lost)
    assert (lost.term, lost.reason) == (term, reason)
    assert len(cycle) == 0
    assert cycle.wake_at == math.inf


def test_a_lease_that_is_gone_without_a_reason_is_unknown() -> None:
    cycle = cycle_of()
    add(cycle, "a")
    [lost] = answer(cycle, send_at(cycle, 0.0), Verdict(id="", verdict="gone"), asked_at=0.0)
    assert isinstance(lost, Lost)
    assert lost.reason == "unknown"


# Throttled --------------------------------------------------------------------------------------------------------


def test_throttled_leases_go_back_to_the_front_in_their_order() -> None:
    cycle = cycle_of(Heartbeats(batch=2))
    add(cycle, "a", "b", "c", "d")
    answer(cycle, send_at(cycle, 0.0), THROTTLED, asked_at=0.0)
    assert order_of(cycle, 4) == ["a", "b", "c", "d"]


def test_slots_pause_for_as_long_as_the_service_asks() -> None:
    cycle = cycle_of()
    add(cycle, "a")
    answer(cycle, send_at(cycle, 0.0), Verdict(id="", verdict="throttled", retry_after=9.0), asked_at=0.0)
    assert next_send(cycle)[1] == 9.0


def test_a_throttled_slot_of_one_lease_pauses_all() -> None:
    cycle = cycle_of()
    add(cycle, "a", "b")
    answer(cycle, send_at(cycle, 0.0), Verdict(id="", verdict="throttled", retry_after=9.0), asked_at=0.0)
    add(cycle, "c", now=1.0)
    assert next_send(cycle)[1] == 9.0


@pytest.mark.parametrize("retry_after", [1e9, math.inf])
def test_a_service_cannot_ask_for_a_pause_that_takes_much_of_the_trust(retry_after: float) -> None:
    cycle = cycle_of()
    [term] = add(cycle, "a")
    answer(cycle, send_at(cycle, 0.0), Verdict(id="", verdict="throttled", retry_after=retry_after), asked_at=0.0)
    assert next_send(cycle)[1] == pytest.approx(term.lost_at / 20)


@pytest.mark.parametrize("retry_after", [None, 0.0, -1.0])
def test_without_a_pause_that_makes_sense_the_backoff_decides(retry_after: float | None) -> None:
    cycle = cycle_of(Heartbeats(rate=8, batch=1))
    add(cycle, "a")
    answer(cycle, send_at(cycle, 0.0), Verdict(id="", verdict="throttled", retry_after=retry_after), asked_at=0.0)
    first = next_send(cycle)
    assert first[1] == pytest.approx(0.125)  # a pause below the rate's distance is none
    answer(cycle, first[0], Verdict(id="", verdict="throttled", retry_after=retry_after), asked_at=first[1])
    assert next_send(cycle)[1] == pytest.approx(first[1] + 0.25 * 0.75)


def test_a_renewal_resets_the_backoff() -> None:
    cycle = cycle_of(Heartbeats(rate=8, batch=1))
    add(cycle, "a", "b")
    for _ in range(3):
        send, now = next_send(cycle)
        answer(cycle, send, THROTTLED, asked_at=now)
    send, now = next_send(cycle)
    answer(cycle, send, RENEWED, asked_at=now)
    send, now = next_send(cycle)
    answer(cycle, send, THROTTLED, asked_at=now)
    assert next_send(cycle)[1] - now == pytest.approx(0.125)


def test_throttling_is_no_strike() -> None:
    cycle = cycle_of(Heartbeats(batch=1, strike_after=0, max_failures=1))
    [term] = add(cycle, "a")
    for _ in range(5):
        send, now = next_send(cycle)
        assert answer(cycle, send, THROTTLED, asked_at=now) == []
    assert (term.strikes, term.retries) == (0, 0)


def test_a_throttled_lease_that_nobody_relies_on_yet_pauses_as_asked_too() -> None:
    cycle = cycle_of()
    unconfirmed(cycle, granted_at=-400.0)
    answer(cycle, send_at(cycle, 0.0), Verdict(id="", verdict="throttled", retry_after=30.0), asked_at=0.0)
    assert next_send(cycle)[1] == 30.0


# Failed -----------------------------------------------------------------------------------------------------------


def test_a_failed_lease_is_not_tried_again_before_retry_wait() -> None:
    cycle = cycle_of()
    add(cycle, "a")
    answer(cycle, send_at(cycle, 0.0), FAILED, asked_at=0.0, now=3.0)
    assert next_send(cycle)[1] == 8.0


def test_every_eligible_lease_goes_before_one_that_failed() -> None:
    cycle = cycle_of()
    add(cycle, "a", now=0.0)
    add(cycle, "b", now=1.0)
    answer(cycle, send_at(cycle, 1.0), FAILED, asked_at=1.0)
    cycle.step(2.0)
    assert cycle._main.keys() | set(cycle._in_flight)  # b is on its way or next, a waits
    assert [term.key for term in cycle._waiting] == ["a"]


def test_a_failed_lease_keeps_its_age() -> None:
    cycle = cycle_of(Heartbeats(rate=1, batch=1, in_flight=1))
    [old] = add(cycle, "old", now=0.0)
    answer(cycle, send_at(cycle, 0.0), FAILED, asked_at=0.0, now=3.0)
    add(cycle, "young", "younger", now=3.0)
    send = send_at(cycle, 5.0)
    cycle.step(8.0)  # `old` may be tried again, while a call is on its way
    assert keys(list(cycle._main)) == ["old", "younger"]
    answer(cycle, send, RENEWED, asked_at=5.0, now=8.0)
    assert next_send(cycle)[0].terms == [old]


def test_failed_leases_come_back_in_the_order_of_their_age() -> None:
    cycle = cycle_of(Heartbeats(rate=1, batch=1, in_flight=3))
    add(cycle, "a", now=0.0)
    add(cycle, "b", now=1.0)
    add(cycle, "c", now=2.0)
    sends = [send_at(cycle, 2.0)] + [next_send(cycle)[0] for _ in range(2)]
    now = cycle._now
    for send in reversed(sends):
        answer(cycle, send, FAILED, asked_at=2.0, now=now)
    assert order_of(cycle, 3) == ["a", "b", "c"]


def test_only_the_failed_part_of_a_call_is_tried_again() -> None:
    cycle = cycle_of(Heartbeats(batch=3))
    add(cycle, "a", "b", "c")
    answer(cycle, send_at(cycle, 0.0), RENEWED, FAILED, RENEWED, asked_at=0.0)
    assert keys(next_send(cycle)[0].terms) == ["b"]


def test_a_lease_rests_when_it_was_tried_often_enough_and_its_trust_outlasts_the_next_cycle() -> None:
    cycle = cycle_of()
    [term] = add(cycle, "a")
    fail(cycle, 3)
    assert term.place is cycle._waiting
    fail(cycle, 1)
    assert term.place is cycle._rested
    assert cycle.wake_at == 120.0


def test_a_lease_whose_trust_does_not_outlast_the_next_cycle_is_tried_on() -> None:
    cycle = cycle_of()
    [term] = add(cycle, "a", granted_at=-140.0)  # lost at 134.4; the next turn, a try and its wait end at 135
    fail(cycle, 8)
    assert term.place is cycle._waiting


def test_a_lease_whose_trust_just_outlasts_the_next_cycle_rests() -> None:
    cycle = cycle_of()
    [term] = add(cycle, "a", granted_at=-138.0)
    fail(cycle, 4)
    assert term.place is cycle._rested


def test_retries_are_counted_in_each_cycle_anew() -> None:
    places: list[tuple[str, int]] = []
    for place in ("waiting", "main", "in flight"):
        cycle = cycle_of(Heartbeats(rate=1, batch=1, in_flight=1))
        [term] = add(cycle, "a", now=100.0)
        term.retries = 3
        send = send_at(cycle, 100.0) if place != "main" else None
        if send and place == "waiting":
            answer(cycle, send, FAILED, asked_at=100.0, now=119.0)
        cycle.step(120.0)
        places.append((place, term.retries))
    assert places == [("waiting", 0), ("main", 0), ("in flight", 0)]


# A cycle ends -----------------------------------------------------------------------------------------------------


def test_at_the_turn_everything_in_backup_goes_to_the_back_of_main_in_order() -> None:
    cycle = cycle_of(Heartbeats(batch=3))
    add(cycle, "a", "b", "c")
    answer(cycle, send_at(cycle, 0.0), RENEWED, asked_at=0.0)
    add(cycle, "d", now=50.0)
    answer(cycle, send_at(cycle, 50.0), RENEWED, asked_at=50.0)
    cycle.step(120.0)
    in_flight = [term for send in cycle._in_flight for term in send.terms]
    assert keys([*in_flight, *cycle._main]) == ["a", "b", "c", "d"]


def test_at_the_turn_a_lease_that_has_not_beaten_goes_before_a_younger_one_that_has() -> None:
    cycle = cycle_of(Heartbeats(rate=1, batch=1, in_flight=1))
    [beaten] = add(cycle, "beaten")
    answer(cycle, send_at(cycle, 0.0), RENEWED, asked_at=30.0, now=30.0)
    add(cycle, "first in flight", "main", now=31.0, granted_at=20.0)
    send_at(cycle, 31.0)
    cycle.step(120.0)
    assert keys(list(cycle._main)) == ["main", "beaten"]
    assert beaten.place is cycle._main


def test_a_late_turn_does_not_shift_the_next() -> None:
    cycle = cycle_of()
    [term] = add(cycle, "a")
    answer(cycle, send_at(cycle, 0.0), RENEWED, asked_at=0.0)
    answer(cycle, send_at(cycle, 155.0), RENEWED, asked_at=155.0)
    assert term.place is cycle._backup
    assert cycle.wake_at == 240.0


def test_turns_that_were_slept_through_are_not_made_up() -> None:
    cycle = cycle_of()
    add(cycle, "a")
    cycle.step(1000.0)
    add(cycle, "b", now=1000.0)
    answer(cycle, send_at(cycle, 1000.0), RENEWED, asked_at=1000.0)
    assert cycle.wake_at == 1080.0


def test_the_rested_come_back_at_the_turn_with_their_retries() -> None:
    cycle = cycle_of()
    [term] = add(cycle, "a")
    fail(cycle, 4)
    assert term.place is cycle._rested
    cycle.step(120.0)
    assert term.place is not cycle._rested
    assert term.retries == 0


def test_the_first_renewed_after_failures_brings_the_rested_back() -> None:
    cycle = cycle_of()
    [rested] = add(cycle, "a")
    fail(cycle, 4)
    add(cycle, "b", now=40.0)
    answer(cycle, send_at(cycle, 40.0), RENEWED, asked_at=40.0)
    assert rested.place is cycle._main
    assert rested.retries == 0


def test_a_failed_call_does_not_bring_the_rested_back() -> None:
    cycle = cycle_of()
    [rested] = add(cycle, "a")
    fail(cycle, 4)
    add(cycle, "b", now=40.0)
    answer(cycle, send_at(cycle, 40.0), FAILED, asked_at=40.0)
    assert rested.place is cycle._rested


# After a stall or an outage ---------------------------------------------------------------------------------------


def test_missed_slots_are_made_up_at_no_more_than_burst_times_the_even_pace() -> None:
    cycle = cycle_of(Heartbeats(batch=10, in_flight=100))
    for claim in range(10):  # an even pace of 12 s
        add(cycle, *range(10), granted_at=-float(claim))
    sends = [next_send(cycle) for _ in range(10)]
    for send, now in sends:
        answer(cycle, send, RENEWED, asked_at=now)
    send = send_at(cycle, 248.0)  # a stall: all are overdue
    slots = [248.0]
    for _ in range(9):
        answer(cycle, send, RENEWED, asked_at=slots[-1])
        send, now = next_send(cycle)
        slots.append(now)
    assert min(b - a for a, b in itertools.pairwise(slots)) >= 4.0 - 1e-9


def test_after_a_stall_the_oldest_acknowledged_beats_first() -> None:
    cycle = cycle_of(Heartbeats(rate=1, batch=1, in_flight=9))
    add(cycle, "a", "b", "c")
    sends = [next_send(cycle) for _ in range(3)]
    for (send, _), asked_at in zip(sends, (90.0, 80.0, 100.0), strict=True):
        answer(cycle, send, RENEWED, asked_at=asked_at, now=100.0)
    assert keys(send_at(cycle, 250.0).terms) + order_of(cycle, 2) == ["b", "a", "c"]


# Leaving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verdict", [RENEWED, FAILED, THROTTLED, TAKEN], ids=lambda verdict: verdict.verdict)
def test_the_late_verdict_of_a_lease_that_was_removed_in_flight_is_ignored(verdict: Verdict) -> None:
    cycle = cycle_of()
    [term] = add(cycle, "a")
    send = send_at(cycle, 0.0)
    cycle.remove(term)
    assert answer(cycle, send, verdict, asked_at=0.0, now=1.0) == []
    assert term.place is None
    assert term.granted_at == 0.0
    assert len(cycle) == 0
    assert cycle.step(500.0) == []


def test_a_lease_that_is_removed_is_never_sent() -> None:
    cycle = cycle_of()
    first, *_ = add(cycle, "a", "b")
    cycle.remove(first)
    assert order_of(cycle, 1) == ["b"]


def test_removing_what_is_not_held_is_no_error() -> None:
    cycle = cycle_of()
    [term] = add(cycle, "a")
    cycle.remove(term)
    cycle.remove(term)
    assert len(cycle) == 0


# Trust ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["main", "in flight", "waiting", "rested"])
def test_a_lease_is_lost_when_its_trust_but_for_grace_is_over_wherever_it_is(place: str) -> None:
    cycle = cycle_of(Heartbeats(rate=1, batch=1, in_flight=1))
    if place == "main":
        add(cycle, "blocks the only call", now=0.0)
        send_at(cycle, 0.0)
    [term] = add(cycle, "a", now=1.0)
    send = send_at(cycle, 1.0) if place != "main" else None
    if send and place != "in flight":
        term.retries = 3 if place == "rested" else 0
        answer(cycle, send, FAILED, asked_at=1.0)
        assert term.place is getattr(cycle, f"_{place}")
    lost = [effect for effect in cycle.step(275.4) if isinstance(effect, Lost) and effect.term is term]
    assert [effect.reason for effect in lost] == ["expired"]
    assert term.place is None


def test_a_lease_is_not_lost_before_its_time() -> None:
    cycle = cycle_of()
    add(cycle, "a")
    send_at(cycle, 0.0)
    assert not any(isinstance(effect, Lost) for effect in cycle.step(274.39))


def test_wake_at_is_no_later_than_the_end_of_a_lease_in_flight() -> None:
    cycle = cycle_of()
    [term] = add(cycle, "a", granted_at=-200.0)
    send_at(cycle, 0.0)
    assert cycle.wake_at == term.lost_at


def test_a_lease_that_is_added_when_it_is_over_is_lost_at_once_and_never_sent() -> None:
    cycle = cycle_of()
    add(cycle, "a", now=0.0, granted_at=-300.0)
    [lost] = cycle.step(0.0)
    assert isinstance(lost, Lost)


# Unconfirmed: nobody relies on it before its first acknowledged beat -----------------------------------------------


def test_an_unconfirmed_lease_goes_before_all_others() -> None:
    cycle = cycle_of()
    add(cycle, "a", "b")
    unconfirmed(cycle)
    assert order_of(cycle, 3) == ["?", "a", "b"]


def test_what_runs_and_is_due_goes_before_what_has_not_begun() -> None:
    cycle = cycle_of()
    add(cycle, "a", granted_at=-120.0)
    unconfirmed(cycle)
    assert order_of(cycle, 2) == ["a", "?"]


def test_a_stream_of_unconfirmed_leases_does_not_starve_one_that_runs() -> None:
    cycle = cycle_of()
    [running] = add(cycle, "running")
    for second in range(400):
        unconfirmed(cycle, now=float(second))
        for effect in cycle.step(float(second)):
            assert not isinstance(effect, Lost)
            if isinstance(effect, Send):
                answer(cycle, effect, RENEWED, asked_at=float(second))
    assert 400 - running.granted_at <= 1.1 * 120


def test_the_first_acknowledged_beat_confirms() -> None:
    cycle = cycle_of()
    term = unconfirmed(cycle)
    send = send_at(cycle, 0.0)
    assert not answer(cycle, send, RENEWED, asked_at=0.0)
    assert term.confirmed


def test_a_lease_is_confirmed_once() -> None:
    cycle = cycle_of()
    unconfirmed(cycle)
    answer(cycle, send_at(cycle, 0.0), RENEWED, asked_at=0.0)
    send, now = next_send(cycle)
    assert answer(cycle, send, RENEWED, asked_at=now) == []


def test_a_grant_that_is_over_when_its_answer_arrives_confirms_nothing() -> None:
    cycle = cycle_of()
    term = unconfirmed(cycle)
    send = send_at(cycle, 0.0)
    assert answer(cycle, send, RENEWED, asked_at=0.0, now=300.0) == []
    assert not term.confirmed
    assert send_at(cycle, 300.0).terms == [term]


@pytest.mark.parametrize("place", ["urgent", "in flight", "waiting"])
def test_an_unconfirmed_lease_is_not_lost_by_expiry(place: str) -> None:
    cycle = cycle_of(Heartbeats(rate=1, batch=1, in_flight=1))
    if place == "urgent":
        add(cycle, "blocks the only call", now=0.0)
        send_at(cycle, 0.0)
    term = unconfirmed(cycle, now=1.0, granted_at=-1000.0)
    send = send_at(cycle, 1.0) if place != "urgent" else None
    if send and place == "waiting":
        answer(cycle, send, FAILED, asked_at=1.0)
    assert not any(isinstance(effect, Lost) for effect in cycle.step(5.9))
    assert term.place is not None


def test_an_unconfirmed_lease_outlives_a_confirmed_one_that_waits_beside_it() -> None:
    cycle = cycle_of(Heartbeats(batch=2))
    [confirmed] = add(cycle, "a", granted_at=-270.0)
    waits = unconfirmed(cycle, granted_at=-1000.0)
    answer(cycle, send_at(cycle, 0.0), FAILED, asked_at=0.0)
    assert [effect.term for effect in cycle.step(4.5) if isinstance(effect, Lost)] == [confirmed]
    assert waits.place is cycle._waiting


def test_an_unconfirmed_lease_that_waits_and_may_be_over_wakes_nobody_before_its_retry() -> None:
    cycle = cycle_of()
    unconfirmed(cycle, granted_at=-1000.0)
    answer(cycle, send_at(cycle, 0.0), FAILED, asked_at=0.0)
    assert cycle.wake_at == 5.0


def test_an_unconfirmed_lease_is_tried_as_long_as_there_may_be_time_left() -> None:
    cycle = cycle_of()
    term = unconfirmed(cycle)
    assert fail(cycle, 9)[0] == []
    assert term.place is cycle._waiting


def test_an_unconfirmed_lease_that_may_be_over_outlives_an_outage_and_is_given_up_after_a_longer_one() -> None:
    cycle = cycle_of()
    term = unconfirmed(cycle, granted_at=-1000.0)
    effects, now = fail(cycle, 28)
    assert effects == []
    assert now < cycle.heartbeats.outage_survived
    effects, now = fail(cycle, 26)
    assert [(effect.term, effect.reason) for effect in effects] == [(term, "strikes")]
    assert cycle.heartbeats.strikes_from <= now < cycle.heartbeats.slack


def test_an_unconfirmed_lease_does_not_rest() -> None:
    cycle = cycle_of(Heartbeats(batch=1, retries_per_cycle=0))
    term = unconfirmed(cycle)
    fail(cycle, 2)
    assert term.place is cycle._waiting


# Strikes ----------------------------------------------------------------------------------------------------------


def test_three_strikes_alone_end_nothing() -> None:
    cycle = cycle_of()
    add(cycle, "a")
    assert not any(isinstance(effect, Lost) for effect in fail(cycle, 4)[0])


def test_strikes_end_a_lease_when_no_further_try_could_be_answered_in_time() -> None:
    cycle = cycle_of()
    [term] = add(cycle, "a", granted_at=-260.0)
    term.strikes = 2
    send_late = send_at(cycle, 4.5)
    [lost] = answer(cycle, send_late, FAILED, asked_at=4.5)
    assert isinstance(lost, Lost)
    assert lost.reason == "strikes"


def test_with_strike_after_zero_the_third_failed_beat_in_a_row_ends_a_lease() -> None:
    cycle = cycle_of(Heartbeats(batch=1, strike_after=0))
    add(cycle, "a")
    effects, now = fail(cycle, 3)
    assert isinstance(effects[-1], Lost)
    assert now == pytest.approx(10.0)


def test_a_renewal_between_failures_starts_the_count_again() -> None:
    cycle = cycle_of(Heartbeats(batch=1, strike_after=0))
    add(cycle, "a")
    fail(cycle, 2)
    send, now = next_send(cycle)
    answer(cycle, send, RENEWED, asked_at=now)
    assert not any(isinstance(effect, Lost) for effect in fail(cycle, 2)[0])


def test_an_answer_needs_a_verdict_for_each_lease() -> None:
    cycle = cycle_of(Heartbeats(batch=2))
    add(cycle, "a", "b")
    with pytest.raises(ValueError, match="shorter"):
        cycle.answered(send_at(cycle, 0.0), [RENEWED], asked_at=0.0, now=0.0)


# Early beats ------------------------------------------------------------------------------------------------------


def settled(
    count: int = 1, heartbeats: Heartbeats = ONE_BY_ONE, early: Early | None = None
) -> tuple[Cycle, list[Term], float]:
    """Leases that have all beaten, and the moment when the last had."""
    cycle = Cycle(heartbeats, now=0.0, random=lambda: 0.5, early=early or Early())
    terms, now = add(cycle, *range(count)), 0.0
    while any(term.place is not cycle._backup for term in terms):
        send, now = next_send(cycle)
        answer(cycle, send, RENEWED, asked_at=now)
    return cycle, terms, now


def test_news_brings_a_beat_within_a_second() -> None:
    cycle, [term], now = settled()
    cycle.hasten(term, now + 10.0)
    send, at = next_send(cycle)
    assert (list(send.terms), at) == ([term], now + 10.0)


def test_all_news_of_a_second_goes_in_one_call() -> None:
    cycle, terms, now = settled(40, Heartbeats(batch=30))
    for term in terms[:20]:
        cycle.hasten(term, now + 10.0)
    send, at = next_send(cycle)
    assert set(terms[:20]) <= set(send.terms)
    for term in terms[20:]:
        cycle.hasten(term, at + 0.5)
    send, again = next_send(cycle)
    assert again == pytest.approx(at + 1.0, abs=0.05)
    assert set(send.terms) == set(terms[20:])


def test_who_reports_all_the_time_has_one_beat_a_second() -> None:
    cycle, [term], now = settled(heartbeats=Heartbeats(rate=10))
    sends: list[float] = []
    while now < 60.0:
        cycle.hasten(term, now)
        for effect in cycle.step(now):
            if isinstance(effect, Send):
                sends.append(now)
                answer(cycle, effect, RENEWED, asked_at=now)
        now += 0.1
    assert min(b - a for a, b in itertools.pairwise(sends)) >= 1.0 - 1e-6
    assert len(sends) >= 50


def test_cycles_of_one_keeper_have_one_early_beat_a_second_together() -> None:
    early = Early()
    one, [first], now = settled(early=early)
    other, [second], later = settled(early=early)
    at = max(now, later) + 20.0
    one.hasten(first, at)
    other.hasten(second, at)
    send_at(one, at)
    assert other.step(at) == []
    _, second_at = next_send(other)
    assert second_at == pytest.approx(at + 1.0, abs=0.05)


def test_news_of_one_cycle_do_not_wait_while_another_has_news_all_the_time() -> None:
    early = Early()
    busy, [busy_term], now = settled(early=early)
    quiet, [quiet_term], later = settled(early=early)
    now = max(now, later) + 5.0
    quiet.hasten(quiet_term, now)
    sent: list[float] = []
    for at in (now + 0.25 * n for n in range(1, 41)):
        busy.hasten(busy_term, at)
        for cycle in in_turn([busy, quiet]):
            for effect in cycle.step(at):
                if isinstance(effect, Send):
                    answer(cycle, effect, RENEWED, asked_at=at)
                    sent += [at] if cycle is quiet else []
    assert len(sent) == 1
    assert sent[0] <= now + 2.5


def test_news_that_comes_while_a_beat_is_on_its_way_brings_another() -> None:
    cycle, [term], now = settled()
    cycle.hasten(term, now + 10.0)
    send = send_at(cycle, now + 10.0)
    cycle.hasten(term, now + 10.1)
    answer(cycle, send, RENEWED, asked_at=now + 10.0, now=now + 10.2)
    send, at = next_send(cycle)
    assert list(send.terms) == [term]
    assert at == pytest.approx(now + 11.0, abs=0.05)
    answer(cycle, send, RENEWED, asked_at=at)
    _, at = next_send(cycle)
    assert at > now + 50.0


def test_an_early_beat_that_fails_is_tried_again_like_any_other() -> None:
    cycle, [term], now = settled()
    cycle.hasten(term, now + 10.0)
    answer(cycle, send_at(cycle, now + 10.0), FAILED, asked_at=now + 10.0)
    cycle.hasten(term, now + 11.0)
    _, at = next_send(cycle)
    assert at == now + 10.0 + cycle.heartbeats.retry_wait


@pytest.mark.parametrize("comes", ["before the outage", "in the outage"])
def test_news_in_an_outage_is_tried_until_the_service_hears_it(comes: str) -> None:
    cycle, [term], now = settled()
    heartbeats = cycle.heartbeats
    if comes == "before the outage":
        cycle.hasten(term, now)
    tries: list[float] = []
    while len(tries) < heartbeats.retries_per_cycle + 4:
        send, at = next_send(cycle)
        answer(cycle, send, FAILED, asked_at=at)
        tries.append(at)
        if len(tries) == heartbeats.retries_per_cycle + 1:  # the lease rests now
            cycle.hasten(term, at) if comes == "in the outage" else None
    pauses = [after - before for before, after in pairwise(tries)]
    assert max(pauses) <= heartbeats.retry_wait + 1 < heartbeats.cycle / 2
    assert min(pauses) >= heartbeats.retry_wait - 1e-6
    send, at = next_send(cycle)
    answer(cycle, send, RENEWED, asked_at=at)
    _, after = next_send(cycle)
    assert after > at + heartbeats.cycle / 2


def test_news_of_a_lease_that_ended_brings_nothing() -> None:
    cycle, [term, other], now = settled(2)
    cycle.hasten(term, now + 5.0)
    cycle.remove(term)
    cycle.hasten(term, now + 6.0)
    send, at = next_send(cycle)
    assert list(send.terms) == [other]
    assert at > now + 50.0


def test_early_beats_make_nobody_late_at_full_capacity() -> None:
    heartbeats = Heartbeats(batch=2, cycle=30, ttl=90, margin=5, grace=5)
    cycle = Cycle(heartbeats, now=0.0, random=lambda: 0.5, early=Early())
    terms = add(cycle, *range(heartbeats.capacity))
    chatty, now, longest, sends = terms[:10], 0.0, 0.0, [-1.0]
    while now < 300.0:
        for effect in cycle.step(now):
            if isinstance(effect, Send):
                assert now - sends[-1] >= 1 / heartbeats.rate - 1e-6
                sends.append(now)
                longest = max(longest, *(now - term.granted_at for term in effect.terms))
                answer(cycle, effect, RENEWED, asked_at=now)
        for term in chatty:
            cycle.hasten(term, now)
        now += 0.25
    assert longest <= heartbeats.cycle + 1 / heartbeats.rate
