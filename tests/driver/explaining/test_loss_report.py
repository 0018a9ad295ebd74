"""Why a lease was lost: what is known, and the sentence for it."""

from dataclasses import replace

import pytest

from leasekit._driver.explaining.loss_report import LossFacts, Note, Try, explain

NOON = 1_767_268_800.0  # 12:00:00 UTC
FACTS = LossFacts(
    reason="expired",
    is_gone=False,
    now=400.0,
    granted_at=115.0,
    lost_at=389.0,
    wall=NOON - 386,
    strikes=0,
    has_beaten=True,
    tries=[],
    others=None,
    notes=[],
    crowd=None,
)
REFUSED = [Try(at, "unanswered", "Unavailable: connection refused") for at in (235.0, 240.0, 360.0)]
LATER = [Try(float(at), "throttled") for at in range(240, 252)]


def test_beats_that_were_not_answered() -> None:
    assert explain(replace(FACTS, tries=REFUSED, strikes=3, reason="strikes")) == (
        "3 beats in a row were not answered (Unavailable: connection refused), the last acknowledged one left 285 s "
        "ago; trust ended at 12:00:03 UTC"
    )


def test_no_end_of_trust_is_said_of_a_lease_that_was_never_trusted() -> None:
    said = explain(replace(FACTS, tries=REFUSED, strikes=3, reason="strikes", may_begin=False))
    assert said.endswith("left 285 s ago")


def test_a_lease_that_was_over_before_its_first_heartbeat() -> None:
    said = explain(replace(FACTS, is_gone=True, may_begin=False, notes=[Note("suspended", 399.0, 200.0)]))
    assert said.startswith("its time, counted from the request that received it, was over before its block began; no b")


@pytest.mark.parametrize(
    ("what", "because"),
    [
        ("stopped", "the process was stopped for 200 s (by a signal, or for want of a processor)"),
        ("starved", "other code of this process held the interpreter (the GIL) for 200 s"),
        ("blocked", "a hook or the adapter blocked the driver's event loop for 200 s"),
        ("suspended", "the machine was suspended for 200 s"),
    ],
)
def test_a_process_that_could_not_beat(what: "object", because: str) -> None:
    notes = [Note(what, 399.0, 200.0)]  # type: ignore[arg-type]
    said = f"no beat was sent for 285 s because {because}; trust ended at 12:00:03 UTC"
    assert explain(replace(FACTS, notes=notes)) == said


def test_several_stalls_of_a_kind_add_up() -> None:
    notes = [Note("stopped", 300.0, 90.0), Note("blocked", 310.0, 95.0), Note("stopped", 399.0, 80.0)]
    assert "the process was stopped for 170 s" in explain(replace(FACTS, notes=notes))


def test_a_short_stall_beside_beats_that_failed_is_said_after_them() -> None:
    said = explain(replace(FACTS, tries=REFUSED, notes=[Note("stopped", 300.0, 30.0)]))
    assert said.startswith("3 beats in a row were not answered (Unavailable: connection refused), the last")
    assert "; besides, the process was stopped for 30 s" in said


def test_a_stall_that_took_most_of_the_time_outweighs_a_beat_that_failed() -> None:
    said = explain(replace(FACTS, tries=REFUSED[:1], notes=[Note("stopped", 399.0, 155.0)]))
    assert said.startswith("no beat was sent for 165 s because the process was stopped for 155 s")


def test_a_beat_after_a_stall_does_not_shorten_what_is_said_of_it() -> None:
    late = Try(asked_at=FACTS.now - 1, verdict="unanswered")
    said = explain(replace(FACTS, tries=[late], notes=[Note("stopped", late.asked_at, 155.0)]))
    assert said.startswith("no beat was sent for 284 s because the process was stopped for 155 s")


def test_a_step_of_the_wall_clock_is_nobodys_fault() -> None:
    assert "no beat was acknowledged for 285.0 s" in explain(replace(FACTS, notes=[Note("jumped", 300.0, 3600.0)]))


def test_beats_that_were_throttled_are_no_strikes() -> None:
    said = "12 beats in a row were throttled, the last acknowledged one left 285 s ago; trust ended at 12:00:03 UTC"
    assert explain(replace(FACTS, tries=LATER, strikes=1)) == said


def test_all_that_became_of_its_beats_is_told() -> None:
    tries = [*LATER, Try(300.0, "failed", "odd"), REFUSED[2]]
    assert explain(replace(FACTS, tries=tries, strikes=2)).startswith(
        "1 beat was not answered (Unavailable: connection refused), 1 beat failed (odd), "
        "12 beats in a row were throttled, the last"
    )


def test_a_lease_that_never_beat_counts_from_its_grant() -> None:
    assert ", it was granted 285 s ago;" in explain(replace(FACTS, tries=REFUSED, has_beaten=False))


def test_more_leases_than_can_beat() -> None:
    assert explain(replace(FACTS, crowd=(100_000, 12_000))) == (
        "no beat was sent for 285 s because 100,000 leases were held and 12,000 can beat in a cycle: "
        "raise rate, batch or cycle, or hold fewer; trust ended at 12:00:03 UTC"
    )


def test_a_lease_whose_turn_never_came_because_the_calls_of_others_hung() -> None:
    said = explain(replace(FACTS, others="Unavailable: no answer within 10 s"))
    assert said.startswith("no beat was sent for 285 s while those of other leases failed (Unavailable: no answer")


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("taken", "the service said that it was taken: another worker claimed it after this lease had expired"),
        ("expired", "the service said that it had expired: no beat came within its ttl"),
        ("overdue", "the service said that its max_runtime is over: give such tasks more, or less to do"),
        ("settled", "the service said that it was settled: its end has been reported before"),
        ("cancelled", "the service said that it was cancelled"),
        ("unknown", "the service said that the task is unknown: it was deleted, or is in another store"),
    ],
)
def test_what_the_service_said(reason: str, said: str) -> None:
    gone = replace(FACTS, reason=reason, is_gone=True, tries=[Try(399.0, "gone", reason)])
    assert explain(gone) == said


def test_what_the_service_said_comes_with_what_is_known_of_the_cause() -> None:
    gone = replace(FACTS, reason="taken", is_gone=True, notes=[Note("suspended", 399.0, 200.0)])
    assert explain(gone).endswith("; no beat was sent for 285 s because the machine was suspended for 200 s")


def test_other_reasons_are_told_as_they_came() -> None:
    assert explain(replace(FACTS, reason="odd")) == "the service answered that the lease is gone: odd"
