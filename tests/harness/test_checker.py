"""The checker finds what is wrong with a history, and nothing where nothing is.

Each history here is written by hand. The clean ones are the same lives as the broken ones, less what breaks them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
from msgspec import structs

from harness.checker import Rules, Violation, check
from harness.history import (
    Acknowledged,
    Asked,
    Began,
    BulkAnswered,
    BulkAsked,
    CancelAnswered,
    CancelAsked,
    Closed,
    DrainChanged,
    Draining,
    Effect,
    Ended,
    Event,
    Extended,
    Fault,
    FaultsOver,
    Final,
    Frozen,
    GateChanged,
    Granted,
    Issued,
    KindChanged,
    Lost,
    Paused,
    PeriodicSet,
    Redriven,
    Refused,
    Renewed,
    Replaced,
    RescheduleAnswered,
    RescheduleAsked,
    Rescheduled,
    Resumed,
    Served,
    SettleAnswered,
    SettleAsked,
    Started,
    Stopped,
    Thawed,
)
from leasekit.config import Heartbeats

RULES = Rules(least_settled=0)


def asked(task: str = "a", at: float = 1.0, **more: Any) -> list[Event]:
    """Scheduled, and acknowledged a moment later."""
    return [
        Asked(at=at, who="s", task=task, kind="k", **more),
        Acknowledged(at=at + 0.1, who="s", asked=task, task=task),
    ]


def issued(fence: int, at: float, *, task: str = "a", holder: str = "w", **more: Any) -> Issued:
    more = {"token": f"token{fence}", "attempt": fence, "ttl": 300.0, **more}
    return Issued(at=at, who="store", task=task, fence=fence, holder=holder, **more)


def granted(fence: int, at: float, *, task: str = "a", who: str = "w", **more: Any) -> Granted:
    more = {"token": f"token{fence}", "asked_at": at - 0.1, "claim": f"claim{fence}", **more}
    return Granted(at=at, who=who, task=task, fence=fence, attempt=fence, ttl=300.0, kind="k", **more)


def closed(fence: int, at: float, status: str = "enqueued", *, task: str = "a", **more: Any) -> Closed:
    return Closed(at=at, who="store", task=task, fence=fence, status=status, **more)


def body(fence: int, at: float, until: float, *, task: str = "a", who: str = "w", how: str = "finished") -> list[Event]:
    lease: dict[str, Any] = {"who": who, "task": task, "fence": fence}
    return [Started(at=at, **lease), Effect(at=until - 0.1, **lease), Stopped(at=until, how=how, **lease)]


def settled(fence: int, at: float, outcome: str = "success", *, task: str = "a", **more: Any) -> list[Event]:
    said = {"who": "w", "task": task, "fence": fence, "outcome": outcome, "digest": outcome, **more}
    verdict = {"verdict": said.pop("verdict", "settled")}
    return [SettleAsked(at=at, **said), SettleAnswered(at=at + 0.1, asked_at=at, **said, **verdict)]


def served(fence: int, at: float, what: str = "beat", verdict: str = "renewed", **more: Any) -> Served:
    return Served(at=at, who="server", task="a", fence=fence, what=what, verdict=verdict, **more)  # type: ignore[arg-type]


def renewed(fence: int, at: float, **more: Any) -> Renewed:
    return Renewed(at=at, who="w", task="a", fence=fence, asked_at=more.pop("asked_at", at - 0.1), **more)


def final(status: str = "success", *, task: str = "a", at: float = 9000.0, **more: Any) -> Final:
    return Final(at=at, who="store", task=task, status=status, kind="k", **more)


WORKER = Began(at=0.0, who="w", role="worker", slots=2, kinds=("k",))
KILLED = Ended(at=150.0, who="w", how="killed")
OVER = FaultsOver(at=5.0, who="world")

LIFE: list[Event] = [
    WORKER,
    *asked(),
    issued(1, 2.0),
    granted(1, 2.1),
    *body(1, 3.0, 100.0),
    renewed(1, 50.0),
    *settled(1, 101.0),
    closed(1, 101.05, "success", ended=True),
    final(fence=1),
]
"""One task, run once, and well."""

RERUN: list[Event] = [
    WORKER,
    *asked(),
    issued(1, 2.0),
    granted(1, 2.1),
    *body(1, 3.0, 100.0)[:2],
    KILLED,
    closed(1, 303.0, expired=True),
    issued(2, 304.0, holder="v"),
    granted(2, 304.1, who="v"),
    *body(2, 305.0, 350.0, who="v"),
    *settled(2, 351.0),
    closed(2, 351.05, "success", ended=True),
    final(fence=2, crashes=1),
]
"""Its first holder was killed, and the second finished it."""


def found(events: Sequence[Event], rules: Rules = RULES) -> set[str]:
    """Which rules are broken."""
    return {violation.rule for violation in check(sorted(events, key=lambda event: event.at), rules)}


def without(events: Sequence[Event], *kinds: type[Event]) -> list[Event]:
    return [event for event in events if not isinstance(event, kinds)]


NO_END = without(RERUN, Asked, Acknowledged, Final)
TIMED_OUT = [*asked(expiry="retry", max_attempts=2), *NO_END, final(fence=2)]
"""The same, of a task that counts its time-outs as attempts."""


@pytest.mark.parametrize("life", [LIFE, RERUN, TIMED_OUT], ids=["once", "twice", "timed out"])
def test_a_good_life_breaks_nothing(life: list[Event]) -> None:
    assert found(life) == set()
    assert found([*life, OVER], replace(RULES, start_within=10.0, heartbeats=Heartbeats())) == set()


@pytest.mark.parametrize(
    ("again", "broken"),
    [({}, False), ({"asked_at": KILLED.at - 1}, True), ({"claim": "another"}, True)],
    ids=["after its end", "while it lived", "by another claim"],
)
def test_s1_who_asks_for_a_dead_workers_claim_again_is_no_second_holder(again: dict[str, Any], broken: bool) -> None:
    assert ("S1" in found([*RERUN, granted(1, KILLED.at + 1, who="its supervisor", **again)])) == broken


@pytest.mark.parametrize(
    ("also", "broken"),
    [
        ([], True),
        ([renewed(1, 90.0)], False),
        (
            [
                Began(at=0.0, who="server#1", role="server"),
                Frozen(at=50.0, who="server#1"),
                Thawed(at=140.0, who="server#1"),
            ],
            False,
        ),
    ],
    ids=["from its begin", "from the first beat that told of it", "by a clock that stood still"],
)
def test_l5_a_runtime_is_counted(also: list[Event], broken: bool) -> None:
    life = [*asked(max_runtime=2.0), issued(1, 2.0), granted(1, 2.1), *body(1, 3.0, 380.0)]
    assert ("L5" in found([*life, *also])) == broken


@pytest.mark.parametrize(
    "more",
    [
        [served(1, 64.0, verdict="gone")],
        [closed(1, 40.0, "cancelled"), served(1, 50.0, verdict="gone")],
        [served(1, 50.0, "settle", verdict="gone")],
    ],
    ids=["after its time", "after it was taken", "no beat"],
)
def test_l5_a_beat_is_refused_for_a_reason(more: list[Event]) -> None:
    life = [*asked(max_runtime=60.0), issued(1, 2.0), granted(1, 2.1), *body(1, 3.0, 80.0)[:1]]
    assert "L5" not in found([*life, *more])


@pytest.mark.parametrize("life", [LIFE, RERUN], ids=["once", "twice"])
def test_it_breaks_nothing_either_where_nobody_sees_the_store(life: list[Event]) -> None:
    assert found(without(life, Issued, Closed)) == set()


BROKEN: list[tuple[str, str, list[Event]]] = [
    ("S1", "one fence, two tokens", [*LIFE, granted(1, 2.2, token="other")]),
    ("S1", "one fence, two holders", [*without(LIFE, Issued, Closed), granted(1, 2.2, who="v")]),
    ("S1", "granted while it is held", without(RERUN, Closed)),
    ("S1", "a fence that is smaller", [*LIFE, issued(2, 1.5), closed(2, 1.6)]),
    ("S2", "an effect after the next was granted", [*RERUN, Effect(at=305.5, who="w", task="a", fence=1)]),
    (
        "S2",
        "the same, seen by bodies alone",
        [*without(RERUN, Issued, Closed), Effect(at=305.5, who="w", task="a", fence=1)],
    ),
    (
        "S2",
        "an effect after its ttl",
        [*asked(), issued(1, 2.0), granted(1, 2.1), *body(1, 3.0, 303.0), *settled(1, 304.0)],
    ),
    ("S3", "a beat of an older lease", [*RERUN, renewed(1, 306.0)]),
    ("S3", "a beat of an older lease, heard by nobody", [*RERUN, served(1, 306.0)]),
    ("S3", "a result of an older lease", [*RERUN, *settled(1, 306.0, "retry")]),
    ("S3", "a token that nobody has", [*LIFE, served(0, 20.0)]),
    ("S4", "two ends", [*LIFE, *settled(1, 103.0, "fatal")]),
    ("S4", "a grant after the end", [*LIFE, granted(2, 200.0)]),
    ("S4", "a result that was thrown away", [
        *without(LIFE, SettleAnswered, Closed, Final), *settled(1, 103.0, "fatal"), final("fatal_failure"),
    ]),
    ("S4", "another end than was told", [*without(LIFE, Closed, Final), final("fatal_failure")]),
    ("S4", "a new life after a success", [*LIFE, Redriven(at=150.0, who="store", task="a", fence=2)]),
    ("S4", "a new life of a task that runs", [*LIFE[:5], Redriven(at=2.5, who="store", task="a", fence=2)]),
    ("S5", "acknowledged, and not there", [*LIFE, *asked("b")]),
    (
        "S6",
        "granted before the ttl has passed",
        [e for e in without(RERUN, Issued, Closed, Ended) if e.at < 302] + [granted(2, 299.0, who="v")],
    ),
    ("S6", "ran out before the ttl had passed", [*without(RERUN, Closed), closed(1, 299.0, expired=True)]),
    (
        "S6",
        "a beat was acknowledged, and counted for nothing",
        [*RERUN, renewed(1, 100.0)],
    ),
    ("S7", "created twice", [*LIFE, Acknowledged(at=30.0, who="s", asked="a", task="a")]),
    ("S7", "another task's id", [*LIFE, *asked("b")[:1], Acknowledged(at=30.0, who="s", asked="b", task="a")]),
    ("S7", "a claim's repeat got something else", [*LIFE, *asked("b"), granted(1, 40.0, task="b", claim="claim1")]),
    (
        "S7",
        "a claim's repeat was granted something else, of which nobody heard",
        [*asked(), *asked("b"), issued(1, 2.0, claim="one"), issued(1, 40.0, task="b", claim="one")],
    ),
    ("S7", "a repeat was refused", [*LIFE, *settled(1, 110.0, verdict="gone")]),
    (
        "S7",
        "a repeat was refused whose first answer nobody heard",
        [
            *without(LIFE, SettleAnswered),
            *(served(1, at, "settle", verdict, outcome="success", digest="success")
              for at, verdict in ((101.0, "settled"), (120.0, "gone"))),
        ],
    ),
    ("S7", "settled in two ways", [*LIFE, *settled(1, 110.0, digest="other")]),
    (
        "S8",
        "renewed after it was refused",
        [*LIFE, Refused(at=20.0, who="w", task="a", fence=1, asked_at=19.9), renewed(1, 30.0)],
    ),
    (
        "S8",
        "extended after it was over",
        [*RERUN, Extended(at=303.5, who="store", task="a", fence=1, ttl=300.0)],
    ),
    (
        "S9",
        "begun after its ttl",
        [*asked(), issued(1, 2.0), granted(1, 2.1), Started(at=303.0, who="w", task="a", fence=1)],
    ),
    ("S9", "begun without a lease", [*LIFE, Started(at=50.0, who="w", task="a", fence=7)]),
    ("S9", "begun by somebody else", [*LIFE, Started(at=50.0, who="v", task="a", fence=1)]),
    (
        "S10",
        "more retries than it may have",
        [
            *asked(max_attempts=1),
            *(
                event
                for n in (1, 2)
                for event in (issued(n, 10.0 * n), granted(n, 10.0 * n + 0.1), *settled(n, 10.0 * n + 1, "retry"))
            ),
            *(closed(n, 10.0 * n + 1.05) for n in (1, 2)),
        ],
    ),
    ("S10", "more crashes than it may have", [*without(RERUN, Asked, Final), *asked(max_crashes=0), final(crashes=2)]),
    (
        "S10",
        "past its limits, and not dead",
        [
            *asked(max_attempts=1),
            issued(1, 2.0),
            granted(1, 2.1),
            *settled(1, 5.0, "retry"),
            closed(1, 5.05),
            final("enqueued", fence=1),
        ],
    ),
    ("S10", "a time-out that counted as a crash", [*without(TIMED_OUT, Final), final(crashes=1)]),
    (
        "S10",
        "more time-outs than it may have",
        [*asked(expiry="retry", max_attempts=1), *NO_END[:-1], closed(2, 605.0, "dead", expired=True, ended=True)],
    ),
    (
        "S10",
        "past its limits by a time-out, and not dead",
        [*asked(expiry="retry", max_attempts=1), *NO_END[:-6], final("enqueued", fence=1)],
    ),
    ("S10", "dead within its limits", [*without(LIFE, Closed, Final, SettleAnswered), final("dead", fence=1)]),
    (
        "S11",
        "granted after it was cancelled",
        [
            *LIFE,
            CancelAsked(at=1.2, who="s", task="a"),
            CancelAnswered(at=1.3, who="s", task="a", verdict="cancelled"),
        ],
    ),
    (
        "S11",
        "granted after its holder was asked to end it",
        [
            *RERUN,
            CancelAsked(at=10.0, who="s", task="a"),
            CancelAnswered(at=10.1, who="s", task="a", verdict="cancel_requested"),
        ],
    ),
    (
        "S11",
        "said to have ended, and granted after that",
        [*RERUN, CancelAsked(at=10.0, who="s", task="a"), CancelAnswered(at=10.1, who="s", task="a", verdict="gone")],
    ),
    ("S11", "granted before it was due", [*without(LIFE, Asked, Acknowledged), *asked(due_at=20.0)]),
    (
        "S11",
        "the less urgent first",
        [*LIFE, *asked("b", at=0.5, priority=0), issued(1, 4.0, task="b")],
    ),
    (
        "S11",
        "two tasks with one key",
        [*asked("a", dedupe_key="x"), *asked("b", at=3.0, dedupe_key="x")],
    ),
    (
        "L5",
        "it ran for too long",
        [*asked(max_runtime=2.0), issued(1, 2.0), granted(1, 2.1), *body(1, 3.0, 480.0), renewed(1, 90.0)],
    ),
    (
        "L5",
        "its holder was not told at once that it ran for too long",
        [*asked(max_runtime=60.0), issued(1, 2.0), granted(1, 2.1), *body(1, 3.0, 80.0), renewed(1, 4.0)],
    ),
    (
        "L5",
        "a beat was refused before its time was over",
        [*asked(max_runtime=60.0), issued(1, 2.0), *body(1, 3.0, 80.0)[:1], served(1, 50.0, verdict="gone")],
    ),
    (
        "L5",
        "it reported nothing, and went on",
        [
            *asked(), issued(1, 2.0), granted(1, 2.1),
            Started(at=3.0, who="w", task="a", fence=1, idle_timeout=10.0),
            renewed(1, 200.0), renewed(1, 300.0), Effect(at=380.0, who="w", task="a", fence=1),
        ],
    ),
    (
        "L7",
        "progress that was reported long ago is not with the next holder",
        [*RERUN, Effect(at=50.0, who="w", task="a", fence=1, progress=True, reported=50.0)],
    ),
    (
        "L7",
        "the next holder has older progress",
        [
            *without(RERUN, Granted), granted(1, 2.1), granted(2, 304.1, who="v", progress=40.0),
            Effect(at=50.0, who="w", task="a", fence=1, progress=True, reported=50.0),
        ],
    ),
    (
        "L7",
        "40.0 had been acknowledged",
        [
            *without(RERUN, Granted), granted(1, 2.1), granted(2, 304.1, who="v", progress=30.0),
            renewed(1, 30.0, progress=30.0), renewed(1, 40.0, progress=40.0), renewed(1, 50.0),
        ],
    ),
    (
        "L6",
        "a restart took it",
        [
            Began(at=0.0, who="server#1", role="server"),
            Ended(at=110.0, who="server#1", how="killed"),
            Began(at=280.0, who="server#2", role="server"),
            *without(RERUN, Ended),
        ],
    ),
    ("queue", "it came out of nowhere", [*LIFE, issued(1, 50.0, task="b")]),
    ("queue", "a success that nobody reported", [OVER, *asked(), final()]),
    (
        "queue",
        "a successor that is not there",
        [OVER, *without(LIFE, SettleAsked, SettleAnswered), *settled(1, 101.0, then=1)],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "events"), [pytest.param(r, e, id=f"{r} {what}") for r, what, e in BROKEN])
def test_a_history_that_breaks_a_rule_is_found_out(rule: str, events: list[Event]) -> None:
    assert rule in found(events, replace(RULES, due_slack=1.0, fresh=10.0))


def reported(at: float) -> Effect:
    return Effect(at=at, who="w", task="a", fence=1, progress=True, reported=at)


@pytest.mark.parametrize(
    "also",
    [
        [reported(KILLED.at - 9.0)],
        [reported(50.0), Fault(at=40.0, who="h", name="cut", lasts=30.0)],
        [reported(50.0), Lost(at=55.0, who="w", task="a", fence=1, reason="expired")],
    ],
    ids=["in the last moment", "while it was cut off", "of a lease that was lost"],
)
def test_l7_progress_may_be_missing_that_nobody_can_have_heard_of(also: list[Event]) -> None:
    assert "L7" not in found([*RERUN, *also], replace(RULES, fresh=10.0))


def test_l7_newer_progress_than_what_was_surely_heard_is_well() -> None:
    life = [*without(RERUN, Granted), granted(1, 2.1), granted(2, 304.1, who="v", progress=60.0)]
    assert "L7" not in found([*life, reported(50.0), reported(60.0)], replace(RULES, fresh=10.0))


def test_an_effect_late_of_a_machine_that_was_frozen_is_no_one_else_s_fault() -> None:
    frozen = [Frozen(at=50.0, who="w"), Thawed(at=305.4, who="w"), Effect(at=305.5, who="w", task="a", fence=1)]
    assert found([*without(RERUN, Ended), *frozen]) == set()


def test_a_task_that_was_asked_for_with_two_priorities_may_have_either() -> None:
    again = Asked(at=0.9, who="s", task="a", kind="k", priority=0)
    assert found([*LIFE, again, *asked("b", at=0.5, priority=1), issued(1, 4.0, task="b")]) == {"S5"}


def test_the_ttl_of_an_answer_that_makes_no_sense_counts_for_nothing() -> None:
    assert found([*RERUN, renewed(1, 50.0, ttl=float("inf"))]) == set()


def test_a_lease_that_its_holder_ended_may_go_on_at_once() -> None:
    given_back = [*settled(1, 101.0, "release"), closed(1, 101.05), issued(2, 101.06), granted(2, 101.2)]
    assert found([*asked(), issued(1, 2.0), granted(1, 2.1), *body(1, 3.0, 100.0), *given_back]) == set()


def test_a_repeat_of_a_result_may_be_answered_after_the_next_grant() -> None:
    retried = [*settled(1, 101.0, "retry"), closed(1, 101.05), issued(2, 110.0), granted(2, 110.1)]
    repeat = [*settled(1, 120.0, "retry"), served(1, 101.05, "settle", "settled", outcome="retry", digest="retry")]
    repeat += [served(1, 120.05, "settle", "settled", outcome="retry", digest="retry")]
    assert found([*asked(), issued(1, 2.0), granted(1, 2.1), *body(1, 3.0, 100.0), *retried, *repeat]) == set()


def test_a_repeat_is_none_of_a_stale_holder_s_writes_where_nobody_saw_the_first_answer() -> None:
    retried = [SettleAsked(at=101.0, who="w", task="a", fence=1, outcome="retry"), closed(1, 101.05)]
    repeat = served(1, 120.05, "settle", "settled", outcome="retry")
    life = [*asked(), issued(1, 2.0), granted(1, 2.1), *body(1, 3.0, 100.0), *retried, issued(2, 110.0), repeat]
    assert found(life) == set()
    assert found([*without(life, Closed), closed(1, 101.05, expired=True)]) == {"S3", "S6"}


# Liveness -----------------------------------------------------------------------------------------------------------

SOON = replace(RULES, start_within=10.0)


def test_l1_a_ready_task_that_nobody_gets_is_found_out() -> None:
    late = [WORKER, OVER, *asked(), issued(1, 40.0), granted(1, 40.1)]
    assert found(late, SOON) == {"L1"}


def test_l1_a_task_that_a_gate_has_ended_is_not_late() -> None:
    end = Closed(at=1.5, who="store", task="a", fence=0, status="cancelled", ended=True)
    assert (
        found([WORKER, OVER, *asked(), end, final("cancelled", fence=0), Ended(at=99.0, who="w", how="exited")], SOON)
        == set()
    )


@pytest.mark.parametrize(
    "excuse",
    [
        [*(Started(at=0.5, who="w", task=task, fence=1) for task in "bc"), *(granted(1, 0.4, task=t) for t in "bc"),
         *asked("b", 0.1), *asked("c", 0.1), *(issued(1, 0.35, task=t) for t in "bc")],
        [Ended(at=6.0, who="w", how="exited")],
        [Draining(at=6.0, who="w")],
        [Paused(at=6.0, who="w"), Resumed(at=39.0, who="w")],
    ],
    ids=["busy", "gone", "draining", "paused"],
)  # fmt: skip
def test_l1_nobody_is_blamed_who_had_no_room(excuse: list[Event]) -> None:
    assert "L1" not in found([WORKER, OVER, *asked(), issued(1, 40.0), granted(1, 40.1), *excuse], SOON)


SERVER = Began(at=0.0, who="server#1", role="server")
FROZEN = [SERVER, Frozen(at=10.0, who="server#1"), Thawed(at=30.0, who="server#1")]
CAME_IN = [*asked("b", 9.0), issued(1, 9.5, task="b")]
DOWN = [*CAME_IN, Ended(at=12.0, who="server#1", how="killed"), Began(at=29.0, who="server#2", role="server")]
SET_BACK = Fault(at=1.05, who="world", name="wall_back")


def due(at: float, granted_at: float) -> list[Event]:
    return [WORKER, OVER, *asked(due_at=at), issued(1, granted_at), granted(1, granted_at + 0.1)]


def test_l1_a_task_whose_time_has_come_and_that_nobody_gets_is_found_out() -> None:
    assert found([SERVER, *due(20.0, 29.0)], SOON) == set()
    assert found([SERVER, *due(20.0, 31.0)], SOON) == {"L1"}


@pytest.mark.parametrize(
    ("granted_at", "excuse"),
    [(49.0, FROZEN), (49.0, [SERVER, *DOWN]), (900.0, [SERVER, SET_BACK])],
    ids=["frozen", "down", "set back before it was heard"],
)
def test_l1_a_service_whose_clock_may_have_stood_is_not_blamed(granted_at: float, excuse: list[Event]) -> None:
    assert found([*due(20.0, granted_at), *excuse], SOON) == set()


@pytest.mark.parametrize(
    ("granted_at", "excuse"),
    [
        (51.0, FROZEN),
        (51.0, [SERVER, *DOWN]),
        (31.0, [SERVER, Fault(at=1.2, who="world", name="wall_back")]),
        (30.5, [SERVER, Frozen(at=0.2, who="server#1"), Thawed(at=0.9, who="server#1")]),
        (51.0, [SERVER, Frozen(at=21.0, who="server#1"), Thawed(at=51.0, who="server#1")]),
    ],
    ids=["frozen", "down", "set back later", "frozen before it was asked for", "frozen when its time had come"],
)
def test_l1_a_service_whose_clock_has_gone_on_since_is_blamed(granted_at: float, excuse: list[Event]) -> None:
    assert found([*due(20.0, granted_at), *excuse], SOON) == {"L1"}


def test_l2_a_dead_holder_s_task_that_nobody_gets_is_found_out() -> None:
    late = [event for event in RERUN if event.at < 300 or isinstance(event, Final)]
    other = Began(at=0.0, who="v", role="worker", slots=1, kinds=("k",))
    assert found([*late, OVER, other, issued(2, 900.0), closed(1, 890.0, expired=True)], SOON) >= {"L2"}


def test_l2_a_task_that_counts_its_time_outs_as_attempts_may_wait_after_one() -> None:
    before = [event for event in TIMED_OUT if event.at < 304]
    other = Began(at=0.0, who="v", role="worker", slots=1, kinds=("k",))
    end = [closed(2, 901.0, "cancelled", ended=True), final("cancelled", fence=2)]
    assert found([*before, OVER, other, issued(2, 900.0), granted(2, 900.1, who="v"), *end], SOON) == set()


def test_l2_a_holder_that_ends_well_and_gives_nothing_back_is_found_out() -> None:
    exited = [WORKER, *asked(), issued(1, 2.0), granted(1, 2.1), Ended(at=50.0, who="w", how="exited")]
    again = [closed(1, 303.0, expired=True), issued(2, 303.0), final("cancelled", fence=2)]
    other = Began(at=0.0, who="v", role="worker", slots=1, kinds=("k",))
    assert found([*exited, OVER, other, *again], SOON) == {"L2"}


def test_l2_a_task_that_was_lost_before_its_holder_ended_waits_for_its_ttl() -> None:
    lost_first = [WORKER, *asked(), issued(1, 2.0), granted(1, 2.1), *lost(50.0)[-1:]]
    gone = [Ended(at=60.0, who="w", how="exited"), closed(1, 303.0, expired=True), issued(2, 303.0)]
    other = Began(at=0.0, who="v", role="worker", slots=1, kinds=("k",))
    assert (
        found([*lost_first, OVER, other, *gone, final("cancelled", fence=3), granted(3, 700.0, who="v")], SOON) == set()
    )


def test_l2_a_worker_that_was_asked_to_end_and_claims_on_is_found_out() -> None:
    assert found([*LIFE, Draining(at=1.0, who="w")]) == {"L2"}
    assert found([*LIFE, Draining(at=2.05, who="w")]) == set()


def lost(at: float, reason: str = "expired") -> list[Event]:
    loss = Lost(at=at, who="w", task="a", fence=1, reason=reason)
    return [*asked(), issued(1, 2.0), granted(1, 2.1), *body(1, 3.0, at), loss]


def test_l3_a_lease_lost_without_trouble_is_found_out() -> None:
    assert found(lost(250.0), replace(RULES, heartbeats=Heartbeats())) == {"L3"}


def test_l3_a_lease_lost_in_a_short_outage_is_found_out() -> None:
    outage = [Fault(at=100.0, who="world", name="cut", lasts=120.0)]
    assert found([*lost(250.0), *outage], replace(RULES, heartbeats=Heartbeats())) == {"L3"}


@pytest.mark.parametrize("who", ["", "w"])
def test_l3_a_lease_may_be_lost_in_a_long_outage(who: str) -> None:
    outage = [Fault(at=100.0, who="world", name="cut", target=who, lasts=145.0)]
    assert found([*lost(250.0), *outage], replace(RULES, heartbeats=Heartbeats())) == set()


def test_l3_somebody_else_s_trouble_is_no_excuse() -> None:
    outage = [Fault(at=100.0, who="world", name="cut", target="v", lasts=145.0)]
    assert found([*lost(250.0), *outage], replace(RULES, heartbeats=Heartbeats())) == {"L3"}


@pytest.mark.parametrize(("lasts", "broken"), [(30.0, {"L3"}), (80.0, set[str]())])
def test_l3_the_ttl_of_the_last_beat_says_what_a_lease_survives(lasts: float, broken: set[str]) -> None:
    """49 s with 120 s, 139 s with 300 s."""
    events = [*lost(250.0), renewed(1, 50.0, ttl=300.0), renewed(1, 99.0, ttl=120.0)]
    outage = [Fault(at=100.0, who="world", name="cut", lasts=lasts)]
    assert found([*events, *outage], replace(RULES, heartbeats=Heartbeats())) == broken


def test_l3_a_lease_of_a_long_ttl_survives_more_than_one_of_a_short_ttl() -> None:
    events = [*lost(250.0), renewed(1, 50.0, ttl=120.0), renewed(1, 99.0, ttl=300.0)]
    outage = [Fault(at=100.0, who="world", name="cut", lasts=120.0)]
    assert found([*events, *outage], replace(RULES, heartbeats=Heartbeats())) == {"L3"}


@pytest.mark.parametrize(("back_at", "broken"), [(160.0, {"L3"}), (245.0, set[str]())])
def test_l3_the_outage_of_a_server_that_does_not_come_up_lasts_until_it_does(back_at: float, broken: set[str]) -> None:
    """It was killed for 10 s, failed to start again, and was started once more."""
    servers = [
        Began(at=0.0, who="server#1", role="server"),
        Ended(at=100.0, who="server#1", how="killed"),
        Began(at=110.0, who="server#2", role="server"),
        Ended(at=110.0, who="server#2", how="killed"),
        Began(at=back_at, who="server#3", role="server"),
    ]
    outage = [Fault(at=100.0, who="world", name="server_kill", lasts=10.0)]
    assert found([*lost(250.0), *servers, *outage], replace(RULES, heartbeats=Heartbeats())) == broken


def test_l3_the_end_of_one_of_several_servers_is_no_outage() -> None:
    servers = [
        Began(at=0.0, who="node-0#1", role="server"),
        Began(at=0.0, who="node-1#1", role="server"),
        Ended(at=100.0, who="node-0#1", how="killed"),
        Began(at=245.0, who="node-0#2", role="server"),
    ]
    assert found([*lost(250.0), *servers], replace(RULES, heartbeats=Heartbeats())) == {"L3"}


def test_l3_a_lease_that_the_service_took_is_no_loss() -> None:
    gone = Refused(at=249.9, who="w", task="a", fence=1, asked_at=249.8, reason="expired")
    assert found([*lost(250.0), gone], replace(RULES, heartbeats=Heartbeats())) == set()


def test_l4_a_task_that_has_not_ended_after_all_is_found_out() -> None:
    assert found([OVER, *asked(), final("claimed")]) == {"L4"}


UNHEARD: list[Event] = [WORKER, *asked(), issued(1, 200.0), closed(1, 500.0, expired=True)]
HEARING = replace(RULES, lost_claim=60.0)


def test_l4_a_lease_of_which_its_holder_never_heard_is_found_out() -> None:
    moment = [Fault(at=190.0, who="world", name="drop_reply", lasts=20.0)]
    assert found([*UNHEARD, *moment], HEARING) == {"L4"}


@pytest.mark.parametrize(
    "excuse",
    [
        [Fault(at=190.0, who="world", name="drop_reply", lasts=100.0)],
        [Fault(at=at, who="world", name="drop_reply", lasts=5.0) for at in (120.0, 198.0)],
        [Ended(at=250.0, who="w", how="killed")],
        [Draining(at=250.0, who="w")],
        [granted(1, 230.0, asked_at=195.0)],
    ],
    ids=["a long outage", "two of them", "killed", "draining", "it heard"],
)
def test_l4_nobody_is_blamed_who_could_not_hear(excuse: list[Event]) -> None:
    assert "L4" not in found([*UNHEARD, *excuse], HEARING)


@pytest.mark.parametrize(
    ("after", "broken"),
    [
        ([Ended(at=520.0, who="w", how="exited")], {"L4"}),
        ([Ended(at=450.0, who="w", how="killed")], set()),
        ([Fault(at=250.0, who="world", name="cut", lasts=200.0), Ended(at=520.0, who="w", how="exited")], set()),
        ([*settled(1, 240.0)[1:], Ended(at=520.0, who="w", how="exited")], set()),
        ([*settled(1, 240.0, who="other"), Ended(at=520.0, who="w", how="exited")], set()),
        ([*settled(1, 240.0, who="other", digest="of another"), Ended(at=520.0, who="w", how="exited")], {"L4"}),
    ],
    ids=["it lived on", "it was killed", "an outage", "it was answered", "another was answered", "that was another's"],
)
def test_l4_a_settlement_that_is_not_reported_again_is_found_out(after: list[Event], broken: set[str]) -> None:
    history = [WORKER, *asked(), issued(1, 5.0), granted(1, 5.1), *body(1, 6.0, 200.0), settled(1, 200.0)[0], *after]
    assert found(history) & {"L4"} == broken


# What proves something ----------------------------------------------------------------------------------------------


def gate(at: float, mode: str, *, scope: Any = "kind", name: str = "k", until: float | None = None) -> GateChanged:
    return GateChanged(at=at, who="store", scope=scope, name=name, mode=mode, until=until)


@pytest.mark.parametrize("closed", [gate(2.0, "pause"), gate(2.0, "drop", scope="collection", name="c", until=5.0)])
@pytest.mark.parametrize(("opened", "broken"), [([], {"A1"}), ([1.5], {"A1"}), ([2.5], set())])
def test_a1_a_grant_behind_a_gate_is_found_out(closed: GateChanged, opened: list[float], broken: set[str]) -> None:
    others = [gate(at, "open", scope=closed.scope, name=closed.name) for at in opened]
    history = [*asked(collection="c"), closed, *others, issued(1, at=3.0, kind="k", by_store=3.0)]
    assert found(sort(history)) == broken


def test_a1_a_gate_whose_time_is_over_stops_nothing() -> None:
    assert not found([*asked(), gate(2.0, "pause", until=2.5), issued(1, at=3.0, kind="k", by_store=3.0)])


def cancelled(at: float, reason: str) -> Event:
    return Closed(at=at, who="store", task="a", fence=0, status="cancelled", ended=True, reason=reason)


@pytest.mark.parametrize(
    ("history", "broken"),
    [
        ([gate(2.0, "drop"), cancelled(3.0, "dropped: …")], set()),
        ([gate(2.0, "drop"), cancelled(3.0, "")], {"A2"}),
        ([gate(2.0, "pause"), cancelled(3.0, "dropped: …")], {"A2"}),
        ([gate(2.0, "drop"), gate(2.5, "open"), cancelled(3.0, "dropped: …")], {"A2"}),
        ([CancelAsked(at=2.0, who="s", task="a"), cancelled(3.0, "")], set()),
    ],
)
def test_a2_a_task_that_nothing_drops_is_found_out(history: list[Event], broken: set[str]) -> None:
    assert found([*asked(), *history]) == broken


def limits(at: float, **limits: Any) -> Event:
    return KindChanged(at=at, who="store", kind="k", **limits)


def starts(*moments: float) -> list[Event]:
    """Return a history of tasks that are granted at these moments, one at each."""
    names = [f"t{number}" for number in range(len(moments))]
    tasks = [event for name in names for event in asked(name)]
    return [*tasks, *(issued(1, at, task=name, kind="k", by_store=at) for name, at in zip(names, moments, strict=True))]


@pytest.mark.parametrize(("concurrency", "broken"), [(1, {"A3"}), (2, set()), (None, set())])
def test_a3_more_leases_than_the_limit_are_found_out(concurrency: int | None, broken: set[str]) -> None:
    assert found(sort([limits(2.0, concurrency=concurrency), *starts(3.0, 4.0)])) == broken


def test_a3_a_limit_that_is_lowered_ends_no_run() -> None:
    assert not found(sort([limits(2.0, concurrency=2), *starts(3.0, 4.0), limits(5.0, concurrency=1)]))


def test_a3_a_lease_that_is_over_takes_no_place() -> None:
    end = Closed(at=3.5, who="store", task="t0", fence=1, status="success", ended=True)
    assert not found(sort([limits(2.0, concurrency=1), *starts(3.0, 4.0), end]))


@pytest.mark.parametrize(
    ("moments", "broken"),
    [
        ([3.0, 4.0, 13.0], set()),
        ([3.0, 4.0, 5.0], {"A4"}),
        ([3.0, 13.0, 13.1, 13.2], {"A4"}),
        ([3.0, 23.0, 23.1], set()),
    ],
)
def test_a4_more_starts_than_the_rate_and_the_burst_are_found_out(moments: list[float], broken: set[str]) -> None:
    assert found(sort([limits(2.0, rate=0.1, burst=2), *starts(*moments)])) == broken


def of_keys(*keys: str | None) -> list[Event]:
    """Return a history of tasks with these keys, granted a second apart from 3.0 on."""
    names = [f"t{number}" for number in range(len(keys))]
    tasks = [
        structs.replace(event, key=key) if isinstance(event, Asked) else event
        for name, key in zip(names, keys, strict=True)
        for event in asked(name)
    ]
    moments = [3.0 + number for number in range(len(keys))]
    return [*tasks, *(issued(1, at, task=name, kind="k", by_store=at) for name, at in zip(names, moments, strict=True))]


@pytest.mark.parametrize(
    ("keys", "broken"),
    [(("a", "a"), {"A5"}), (("a", "b"), set()), (("a", None), set()), ((None, None), set())],
    ids=str,
)
def test_a5_more_leases_of_a_key_than_its_limit_are_found_out(keys: tuple[str | None, ...], broken: set[str]) -> None:
    assert found(sort([limits(2.0, key_concurrency=1), *of_keys(*keys)])) == broken


@pytest.mark.parametrize(
    ("keys", "broken"), [(("a", "a", "a"), {"A6"}), (("a", "b", "a"), set()), ((None, None, None), set())], ids=str
)
def test_a6_more_starts_of_a_key_than_its_rate_are_found_out(keys: tuple[str | None, ...], broken: set[str]) -> None:
    assert found(sort([limits(2.0, key_rate=0.1, key_burst=2), *of_keys(*keys)])) == broken


@pytest.mark.parametrize(
    ("keys", "ends", "broken"),
    [
        (("a", "a"), {"status": "enqueued"}, {"A14"}),
        (("a", "a"), {"status": "success", "ended": True}, set()),
        (("a", "b"), {"status": "enqueued"}, set()),
        ((None, None), {"status": "enqueued"}, set()),
    ],
    ids=str,
)
def test_a14_a_task_of_a_key_before_one_that_runs_again_is_found_out(
    keys: tuple[str | None, ...], ends: dict[str, Any], broken: set[str]
) -> None:
    first, second = (asked(task, at=0.5, key=key) for task, key in zip("ab", keys, strict=True))
    ran = [issued(1, 2.0, kind="k"), closed(1, 20.0, **ends), issued(1, 30.0, task="b", kind="k")]
    history = [*first, *second, limits(1.0, ordered=True), *ran]
    assert found(sort(history)) & {"A14"} == broken


@pytest.mark.parametrize(("until", "holder", "broken"), [(9.0, "w", {"A15"}), (2.5, "w", set()), (9.0, "v", set())])
def test_a15_a_grant_to_a_worker_that_drains_is_found_out(until: float, holder: str, broken: set[str]) -> None:
    drains = [DrainChanged(at=2.0, who="store", worker="w")]
    drains += [DrainChanged(at=until, who="store", worker="w", is_draining=False)]
    assert found(sort([*asked(), *drains, issued(1, 3.0, holder=holder)])) & {"A15"} == broken


def test_a14_of_tasks_that_have_begun_before_the_order_any_may_be_the_first() -> None:
    first, second = (asked(task, at=0.5, key="a") for task in "ab")
    ran = [issued(1, 1.0, task=task, kind="k") for task in "ab"] + [closed(1, 20.0, task=task) for task in "ab"]
    again = issued(2, 30.0, task="b", kind="k")
    assert "A14" not in found(sort([*first, *second, *ran, limits(2.0, ordered=True), again]))


def test_a14_a_task_that_was_rescheduled_before_any_run_holds_no_other_up() -> None:
    first, second = (asked(task, at=0.5, key="a") for task in "ab")
    ran = [closed(1, 20.0, "new"), issued(1, 30.0, task="b", kind="k")]
    assert "A14" not in found(sort([*first, *second, limits(1.0, ordered=True), *ran]))


def follower(at: float | None, status: str = "success") -> list[Event]:
    """A task `b` that runs after `a`, which ends so at 20; `b` is granted then, or it is dropped."""
    first = [*asked(), issued(1, 2.0), closed(1, 20.0, status, ended=True), final(status)]
    second = asked("b", after=("a",))
    if at is None:
        return [*first, *second, final("dropped", task="b")]
    return [*first, *second, issued(1, at, task="b"), closed(1, at + 1, "success", task="b", ended=True)]


@pytest.mark.parametrize(
    ("history", "broken"),
    [
        (follower(20.5), set()),
        (follower(19.5), {"A7"}),
        (follower(20.5, "fatal_failure"), {"A7"}),
        (follower(None, "fatal_failure"), set()),
        (follower(None), {"A7"}),
    ],
)
def test_a7_a_task_that_does_not_wait_for_another_is_found_out(history: list[Event], broken: set[str]) -> None:
    assert found(sort(history)) & {"A7"} == broken


def replaced(at: float, payload: str, *, put_off: float = 10.0) -> list[Event]:
    """The answer to a submission of `b`, which has replaced the task."""
    return [
        Asked(at=at, who="s", task="b", kind="k", dedupe_key="d", debounce=30.0, payload=payload),
        Replaced(at=at + 0.1, who="store", task="a", payload=payload, due_by_store=50.0, put_off=put_off),
        Acknowledged(at=at + 0.2, who="s", asked="b", task="a", created=False, replaced=True),
    ]


def another(at: float, by_store: float) -> list[Event]:
    """A grant of another task, which tells the store's clock."""
    return [*asked(f"other-{at}", at=1.0), issued(1, at, by_store=by_store, task=f"other-{at}")]


def rescheduled(at: float, due: float, *, answer_at: float | None = None) -> list[Event]:
    """A reschedule, which is written at once, with the end of a lease that never was; and its answer."""
    return [
        RescheduleAsked(at=at, who="s", task="a", request=f"r-{at}", due_by_store=due),
        closed(int(at), at + 0.1, "new"),
        Rescheduled(at=at + 0.1, who="store", task="a", request=f"r-{at}"),
        RescheduleAnswered(at=answer_at or at + 0.2, who="s", task="a", asked_at=at),
    ]


@pytest.mark.parametrize(
    ("history", "broken"),
    [
        ([*rescheduled(5.0, 100.0), issued(2, 101.0, by_store=101.0)], set()),
        ([*rescheduled(5.0, 100.0), issued(2, 99.0, by_store=99.0)], {"A8"}),
        ([*rescheduled(5.0, 100.0), *rescheduled(6.0, 50.0), issued(3, 51.0, by_store=51.0)], set()),
        ([*rescheduled(5.0, 100.0), *replaced(6.0, "new"), issued(2, 51.0, by_store=51.0)], set()),
        ([*replaced(4.0, "new"), *rescheduled(5.0, 100.0), issued(2, 51.0, by_store=51.0)], {"A8"}),
        ([*rescheduled(5.0, 100.0, answer_at=9.0), *replaced(6.0, "new"), issued(7, 51.0, by_store=51.0)], set()),
        ([*rescheduled(5.0, 100.0, answer_at=9.0), issued(6, 8.0, by_store=8.0)], {"A8"}),
        ([*rescheduled(5.0, 50.0), *rescheduled(6.0, 100.0), issued(7, 51.0, by_store=51.0)], {"A8"}),
        ([*without(rescheduled(5.0, 100.0), RescheduleAnswered), issued(6, 51.0, by_store=51.0)], {"A8"}),
        ([*without(rescheduled(5.0, 100.0), Rescheduled), issued(6, 101.0, by_store=101.0)], {"A8"}),
        ([issued(1, 6.0, by_store=6.0), closed(1, 7.0), *rescheduled(7.0, 100.0), issued(9, 101.0)], set()),
        ([*rescheduled(5.0, 8.0), issued(6, 9.0, by_store=9.0), closed(6, 20.0), issued(7, 21.0, by_store=7.5)], set()),
        ([issued(1, 5.05, by_store=5.05), *rescheduled(6.0, 100.0)], set()),  # it was granted before
        # The store's clock was set back: the task had been due by then.
        ([*rescheduled(5.0, 100.0), *another(50.0, 90.0), issued(6, 65.0, by_store=70.0)], set()),
        ([*rescheduled(5.0, 100.0), *another(50.0, 90.0), issued(6, 55.0, by_store=60.0)], {"A8"}),
        ([*rescheduled(5.0, 100.0), *another(2.0, 190.0), *another(4.0, 4.0), issued(6, 9.0, by_store=9.0)], {"A8"}),
    ],
)
def test_a8_a_task_that_does_not_wait_for_its_new_time_is_found_out(history: list[Event], broken: set[str]) -> None:
    assert found(sort([*asked(), *history])) & {"A8"} == broken


@pytest.mark.parametrize(
    ("seconds", "broken"),
    [([0, 10, 20, 30], set()), ([0, 10, 30], {"A9"}), ([10], {"A9"}), ([0, 10, 15, 20, 30], {"A9"})],
)
def test_a9_a_firing_that_is_missing_or_too_many_is_found_out(seconds: list[int], broken: set[str]) -> None:
    begin, end = (PeriodicSet(at=at, who="s", name="p", every=every) for at, every in ((1.0, 10), (41.0, 0)))
    made = [final(task=f"p@2026-01-01T00:00:{second:02}Z") for second in seconds]
    assert found([begin, end, *made], replace(RULES, due_slack=1.0)) & {"A9"} == broken


@pytest.mark.parametrize(("at", "broken"), [(60.0, set()), (63.0, {"A10"})])
def test_a10_a_task_that_begins_too_late_is_found_out(at: float, broken: set[str]) -> None:
    history = [*asked(start_deadline=60.0), issued(1, at)]
    assert found(history, replace(RULES, due_slack=1.0)) & {"A10"} == broken


@pytest.mark.parametrize(("run", "broken"), [([], {"A10"}), (body(1, 51.0, 52.0), set())])
def test_a10_a_task_that_was_given_back_too_late_is_found_out(run: list[Event], broken: set[str]) -> None:
    history = [*asked(start_deadline=60.0), issued(1, 50.0), *run, closed(1, 63.0), issued(2, 64.0)]
    assert found(history, replace(RULES, due_slack=1.0)) & {"A10"} == broken


def bulk(act: Literal["cancel", "reschedule"], *, answered_at: float = 30.0, due: float | None = None) -> list[Event]:
    """A bulk act whose dry run was at 10 to 11, and which came at 20."""
    common: dict[str, Any] = {"who": "o", "act": act, "kind": "k", "counted_from": 10.0}
    return [
        BulkAsked(at=20.0, counted_until=11.0, **common),
        BulkAnswered(at=answered_at, asked_at=20.0, due_by_store=due, **common),
    ]


@pytest.mark.parametrize(
    ("history", "broken"),
    [
        ([*bulk("cancel"), closed(0, 25.0, "cancelled", ended=True)], set()),
        ([*bulk("cancel"), issued(1, 40.0)], {"A12"}),
        ([*bulk("cancel"), issued(1, 15.0)], set()),
        ([*bulk("reschedule", due=100.0), issued(2, 99.0, by_store=99.0)], {"A12"}),
        ([*bulk("reschedule", due=100.0), issued(2, 101.0, by_store=101.0)], set()),
        ([*bulk("cancel"), *asked("b", at=12.0), closed(0, 25.0, "cancelled", task="b", ended=True)], {"A12"}),
        ([*bulk("reschedule", due=100.0), *asked("b", at=12.0), issued(2, 30.0, task="b")], {"A12"}),
        ([*bulk("reschedule", due=100.0), *asked("b", at=12.0), issued(1, 30.0, task="b")], set()),
    ],
)
def test_a12_a_bulk_act_that_changes_too_little_or_too_much_is_found_out(
    history: list[Event], broken: set[str]
) -> None:
    assert found(sort([*asked(), *history])) & {"A12"} == broken


def run_with(payload: str, at: float = 60.0) -> list[Event]:
    return [issued(2, at, by_store=at), Started(at=at + 1, who="w", task="a", fence=2, payload=payload)]


@pytest.mark.parametrize(
    ("history", "broken"),
    [
        ([*replaced(5.0, "new"), *run_with("new")], set()),
        ([*replaced(5.0, "new"), *run_with("old")], {"A13"}),
        ([*run_with("old")], set()),
        ([*replaced(5.0, "new"), *run_with("new", at=49.0)], {"A13"}),
        ([*replaced(5.0, "new", put_off=31.0), *run_with("new")], {"A13"}),
        ([*replaced(70.0, "new"), *run_with("new")], {"A13"}),
        ([*replaced(5.0, "new"), *another(40.0, 45.0), *run_with("new", at=49.0)], set()),  # it was set back since
        ([*without(replaced(5.0, "new"), Replaced), *run_with("new")], {"A13"}),
    ],
)
def test_a13_a_task_that_is_not_what_replaced_it_last_is_found_out(history: list[Event], broken: set[str]) -> None:
    first = asked(dedupe_key="d", debounce=30.0, payload="old")
    assert found(sort([*first, *history])) & {"A13"} == broken


@pytest.mark.parametrize(
    ("end", "scope", "broken"),
    [(None, "live", {"S11"}), (4.0, "live", set()), (4.0, "kept", {"S11"})],
)
def test_s11_a_live_key_that_is_given_away_early_is_found_out(end: float | None, scope: str, broken: set[str]) -> None:
    ends = [] if end is None else [closed(1, end, "success", ended=True)]
    history = [*asked(dedupe_key="d"), issued(1, 2.0), *ends, *asked("b", at=5.0, dedupe_key="d", dedupe_scope=scope)]
    assert found(sort(history)) & {"S11"} == broken


@pytest.mark.parametrize(
    ("labels", "broken"),
    [
        ({}, {"A11"}),
        ({"gpu": "t4"}, {"A11"}),
        ({"gpu": "a100"}, {"A11"}),
        ({"gpu": "a100", "zone": "eu", "x": "y"}, set()),
    ],
    ids=str,
)
def test_a11_a_task_at_a_worker_without_its_labels_is_found_out(labels: dict[str, str], broken: set[str]) -> None:
    history = [
        structs.replace(event, requires={"gpu": "a100", "zone": "eu"})
        if isinstance(event, Asked)
        else structs.replace(event, labels=labels)
        if isinstance(event, Began)
        else event
        for event in LIFE
    ]
    assert found(history) == broken


def preferring(granted_at: float, labels: dict[str, str], *before: Event) -> list[Event]:
    """A task that prefers a zone for 20 s, granted to a worker with these labels, and its lease before, if any."""
    worker, fence = structs.replace(WORKER, labels=labels), 1 + len(before) // 2
    lease = [issued(fence, granted_at), granted(fence, granted_at + 0.1)]
    history = [worker, OVER, *asked(prefers={"zone": "eu"}, prefer_for=20.0), *before, *lease]
    return sorted(history, key=lambda event: event.at)


@pytest.mark.parametrize(
    ("history", "broken"),
    [
        (preferring(2.0, {"zone": "eu", "x": "y"}), set()),
        (preferring(2.0, {}), {"A11"}),
        (preferring(20.5, {"zone": "us"}), {"A11"}),
        (preferring(21.5, {"zone": "us"}), set()),
        (preferring(60.0, {}, issued(1, 30.0), closed(1, 50.0)), {"A11"}),
        (preferring(71.0, {}, issued(1, 30.0), closed(1, 50.0)), set()),
    ],
)
def test_a11_a_task_that_is_granted_too_early_to_a_worker_it_does_not_prefer_is_found_out(
    history: list[Event], broken: set[str]
) -> None:
    assert found(history, replace(RULES, due_slack=0.0)) & {"A11"} == broken
    assert "A11" not in found(history)  # the clocks were stepped: nobody knows when it was due


@pytest.mark.parametrize(
    ("granted_at", "labels", "broken"),
    [
        (14.0, {"zone": "eu"}, set()),
        (16.0, {"zone": "eu"}, {"L1"}),
        (30.0, {}, set()),
        (32.0, {}, {"L1"}),
    ],
)
def test_l1_a_task_that_is_kept_for_others_for_too_long_is_found_out(
    granted_at: float, labels: dict[str, str], broken: set[str]
) -> None:
    assert found(preferring(granted_at, labels), SOON) & {"L1"} == broken


def test_a_history_in_which_little_happened_proves_nothing() -> None:
    assert found(LIFE, replace(RULES, least_settled=2)) == {"traffic"}
    assert found(LIFE, replace(RULES, least_settled=1)) == set()


def test_a_fault_that_did_not_fire_proves_nothing() -> None:
    assert found(LIFE, replace(RULES, faults={"cut"})) == {"faults"}
    assert found([*LIFE, Fault(at=5.0, who="world", name="cut")], replace(RULES, faults={"cut"})) == set()


def test_a_violation_says_rule_task_reason_and_the_events_that_show_it() -> None:
    violation = check([*asked(), final("claimed", at=50.0), FaultsOver(at=60.0, who="world")], RULES)[0]
    assert isinstance(violation, Violation)
    assert str(violation).splitlines()[0] == "L4 a: its final status is claimed after everything was drained"
    assert '"event":"Final"' in str(violation)


def test_what_a_service_says_to_have_lost_is_not_held_against_it_and_the_rest_is() -> None:
    history = [*LIFE, *asked("b", at=5.0), *asked("c", at=9.0)]
    rolled_back = Fault(at=4.9, who="harness", name="rollback", lasts=1.0)
    assert {problem.task for problem in check(sort(history), RULES)} == {"b", "c"}
    assert {problem.task for problem in check(sort([*history, rolled_back]), RULES)} == {"c"}


def sort(history: Sequence[Event]) -> list[Event]:
    return sorted(history, key=lambda event: event.at)
