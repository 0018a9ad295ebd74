"""The flight recorder: what is kept of beats, for how long, and what a lost lease is told of them."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from leasekit import Heartbeats
from leasekit._core.cycle import Lost, Send
from leasekit._core.term import Term
from leasekit._driver.explaining import recorder as module
from leasekit._driver.explaining.recorder import HeldUp, Reading, Recorder
from leasekit.errors import LeaseEvent
from leasekit.task import Verdict

START = 1000.0
FAILED = Verdict(id="", verdict="failed", reason="Unavailable: connection refused")


def reading(at: float, *, awake: float | None = None, wall: float | None = None, by: HeldUp | None = None) -> Reading:
    return Reading(at, at if awake is None else awake, at if wall is None else wall, by)


def term(granted_at: float = START) -> Term:
    return Term(None, Heartbeats(), granted_at=granted_at)


def lost(term: Term, reason: str = "expired") -> Lost:
    return Lost(term, reason)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(reading(START))


def beaten(
    recorder: Recorder,
    terms: Sequence[Term],
    at: float,
    *,
    odd: dict[int, Verdict] | None = None,
    error: Verdict | None = None,
    took: float = 0.1,
    late: float = 0.0,
) -> None:
    """A batch that was sent and answered: *renewed* for all but those at these positions."""
    call = recorder.sent(Send(list(terms), late), at, held=len(terms))
    verdicts = [(odd or {}).get(n, error or Verdict(id="", verdict="renewed")) for n in range(len(terms))]
    recorder.answered(call, verdicts, at + took, error=error)
    if error is None:
        for n, one in enumerate(terms):
            if verdicts[n].verdict == "renewed":
                one.renewed(at)


def why(recorder: Recorder, effect: Lost, now: float) -> str:
    (story,) = recorder.explain([effect], now)
    return story.why


# The story of one


def test_it_tells_when_a_beat_left_how_late_what_was_answered_and_after_how_long(recorder: Recorder) -> None:
    one, other = term(), term()
    beaten(recorder, [other, one], START + 120, late=0.5, took=0.25)
    beaten(recorder, [one], START + 240, error=FAILED, took=0.5)
    (story,) = recorder.explain([lost(one)], START + 300)
    assert story.events == (
        LeaseEvent(START + 120, "sent", 0.5),
        LeaseEvent(START + 120.25, "renewed", 0.25),
        LeaseEvent(START + 240, "sent", 0.0),
        LeaseEvent(START + 240.5, "failed", 0.5, "Unavailable: connection refused"),
    )


def test_the_verdict_of_one_is_not_told_of_his_neighbour(recorder: Recorder) -> None:
    one, other = term(), term()
    beaten(recorder, [one, other], START + 120, odd={1: Verdict(id="", verdict="gone", reason="taken")})
    stories = recorder.explain([lost(one), lost(other, "taken")], START + 121)
    assert [story.events[-1].what for story in stories] == ["renewed", "gone"]


def test_a_beat_that_was_not_answered_has_left_all_the_same(recorder: Recorder) -> None:
    one = term()
    recorder.sent(Send([one], 0.0), START + 100, held=1)
    (story,) = recorder.explain([lost(one)], START + 275)
    assert [event.what for event in story.events] == ["sent"]
    assert story.why.startswith("1 beat was not answered, it was granted 275 s ago")


def test_what_befell_the_process_is_part_of_it_in_its_place(recorder: Recorder) -> None:
    one = term()
    beaten(recorder, [one], START + 10)
    recorder.waits(START + 130)
    recorder.woke(reading(START + 200))
    beaten(recorder, [one], START + 201, error=FAILED)
    (story,) = recorder.explain([lost(one)], START + 290)
    assert [event.what for event in story.events] == ["sent", "renewed", "stopped", "sent", "failed"]


def test_what_befell_the_process_before_the_last_grant_is_not_its_story(recorder: Recorder) -> None:
    one = term(START + 100)
    recorder.waits(START + 1)
    recorder.woke(reading(START + 90))
    (story,) = recorder.explain([lost(one)], START + 400)
    assert story.events == ()
    assert "stopped" not in story.why


def test_those_who_share_a_story_share_its_events(recorder: Recorder) -> None:
    terms = [term() for _ in range(3)]
    beaten(recorder, terms, START + 120, error=FAILED)
    first, *others = recorder.explain([lost(one) for one in terms], START + 300)
    assert all(other is first for other in others)


def test_those_who_beat_apart_have_stories_of_their_own(recorder: Recorder) -> None:
    one, other = term(), term()
    beaten(recorder, [one], START + 120, error=FAILED)
    beaten(recorder, [other], START + 130, error=FAILED)
    stories = recorder.explain([lost(one), lost(other)], START + 300)
    assert [story.events[0].at for story in stories] == [START + 120, START + 130]


def test_a_lease_of_which_nothing_is_known_says_at_least_for_how_long(recorder: Recorder) -> None:
    assert why(recorder, lost(term()), START + 274.4).startswith("no beat was acknowledged for 274.4 s")


def test_an_overload_is_the_reason_of_those_that_were_held_during_it_and_of_no_later_one(recorder: Recorder) -> None:
    one, later = term(), term(START + 200)
    recorder.crowded(13, 12, START + 10)
    assert "13 leases were held" in why(recorder, lost(one), START + 100)
    recorder.crowded(12, 12, START + 150)
    assert "13 leases were held" in why(recorder, lost(one), START + 300)
    assert "leases were held" not in why(recorder, lost(later), START + 500)


# What befell the process


def noticed(recorder: Recorder, then: Reading, *, due_at: float = START + 10) -> list[tuple[str, float]]:
    recorder.waits(due_at)
    recorder.woke(then)
    return [(note.what, round(note.seconds, 3)) for note in recorder._notes]


def test_a_keeper_that_is_on_time_was_not_held_up(recorder: Recorder) -> None:
    assert noticed(recorder, reading(START + 10.4)) == []


def test_a_keeper_that_is_woken_early_was_not_held_up(recorder: Recorder) -> None:
    assert noticed(recorder, reading(START + 9), due_at=float("inf")) == []


def test_a_keeper_that_comes_back_late_was_stopped_where_nothing_else_is_known(recorder: Recorder) -> None:
    assert noticed(recorder, reading(START + 51)) == [("stopped", 41)]


@pytest.mark.parametrize("what", ["starved", "blocked"])
def test_who_held_up_the_loop_meanwhile_is_named(recorder: Recorder, what: "object") -> None:
    by = HeldUp(what, START + 11, START + 51)  # type: ignore[arg-type]
    assert noticed(recorder, reading(START + 51, by=by)) == [(what, 41)]


def test_who_held_up_the_loop_at_another_time_is_not_blamed(recorder: Recorder) -> None:
    by = HeldUp("blocked", START, START + 12)
    assert noticed(recorder, reading(START + 51, by=by)) == [("stopped", 41)]


def test_suspended_time_is_no_stall(recorder: Recorder) -> None:
    assert noticed(recorder, reading(START + 51, awake=START + 10)) == [("suspended", 41)]


def test_a_step_of_the_wall_clock_is_noted_and_no_stall(recorder: Recorder) -> None:
    assert noticed(recorder, reading(START + 10, wall=START - 3590)) == [("jumped", -3600)]


def test_a_stall_is_noted_once(recorder: Recorder) -> None:
    noticed(recorder, reading(START + 51))
    recorder.woke(reading(START + 60))
    assert len(recorder._notes) == 1


def test_who_asks_before_the_keeper_is_back_hears_of_the_stall_too(recorder: Recorder) -> None:
    one = term()
    recorder.waits(START + 120)
    story = recorder.expired(one, reading(START + 275))
    assert "the process was stopped for 155 s" in story.why
    assert not recorder._notes, "another thread writes nothing"


class WrittenMeanwhile(deque[Any]):
    """Of a Python without a GIL: another thread writes to it in the middle of the first copies."""

    left = 3

    def __iter__(self) -> Iterator[Any]:
        if self.left:
            self.left -= 1
            raise RuntimeError("deque mutated during iteration")
        return super().__iter__()


def test_what_is_written_in_the_middle_of_a_copy_costs_no_story(recorder: Recorder) -> None:
    one = term()
    beaten(recorder, [one], START + 120, error=FAILED)
    noticed(recorder, reading(START + 175))
    told = recorder.expired(one, reading(START + 300))
    recorder._calls, recorder._notes = WrittenMeanwhile(recorder._calls), WrittenMeanwhile(recorder._notes)
    assert recorder.expired(one, reading(START + 300)) == told
    recorder._calls.left = recorder._notes.left = 3
    assert recorder.explain([lost(one)], START + 300)[0].events == told.events


# Bounds


def test_what_is_older_than_two_ttls_is_forgotten(recorder: Recorder) -> None:
    one = term()
    for n in range(20):
        beaten(recorder, [one], START + 100 * n)
    oldest = recorder._calls[0].asked_at
    assert START + 1900 - 2 * Heartbeats().ttl <= oldest < START + 1900 - Heartbeats().ttl


def test_it_refers_to_a_few_beats_of_each_lease_that_is_held(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ROOM", 100)
    terms = [term() for _ in range(50)]
    for n in range(100):
        beaten(recorder, terms, START + n)
        assert sum(len(call.send.terms) for call in recorder._calls) == min(50 * (n + 1), 150)


def test_a_call_that_was_forgotten_may_still_be_answered(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROOM", 1)
    slow = recorder.sent(Send([term()], 0.0), START, held=0)
    recorder.sent(Send([term()], 0.0), START + 1, held=0)
    recorder.answered(slow, [Verdict(id="", verdict="gone")], START + 2)
    assert slow not in recorder._calls
