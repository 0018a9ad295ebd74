"""Where a flow goes after each run of a step, as arithmetic: no clock, no worker, no service."""

from typing import Any

import pytest

from leasekit._flows.graph import Graph, Node
from leasekit._flows.moves import Move, fail, fan_out, has_crashed_too_often, is_last, join, succeed, wait
from leasekit._flows.records import Call, Failure, Mark, Record
from leasekit.errors import Fatal

GRAPH = Graph(
    "f",
    {
        "create": Node(name="create", on_success="convert", on_failure="back", choices=("skip",)),
        "convert": Node(name="convert", on_success="join", on_failure="back", is_mapped=True),
        "join": Node(name="join"),
        "skip": Node(name="skip", on_success="create", choices=("join",)),
        "back": Node(name="back", on_success="skip", on_failure="give_up"),
        "give_up": Node(name="give_up"),
    },
)
FAILED = Failure(step="create", error="why")


def at(step: str, **more: Any) -> Call:
    return Call(step=step, state="now", flow="f1", options={"key": "acme"}, **more)


def test_a_success_leads_to_the_next_step_with_the_new_state_and_the_options_of_the_flow() -> None:
    move = succeed(GRAPH, at("create"), "next")
    assert move.record == Record(edge="success", to="convert")
    assert move.call == Call(step="convert", state="next", flow="f1", options={"key": "acme"})


def test_a_choice_wins_over_on_success() -> None:
    move = succeed(GRAPH, at("create"), "next", choice="skip")
    assert move.record == Record(edge="choice", to="skip")
    assert move.call is not None
    assert move.call.step == "skip"


def test_a_success_without_on_success_ends_the_flow_with_its_state() -> None:
    assert succeed(GRAPH, at("join"), "end") == Move(Record(edge="success", state="end"))


def test_a_failure_leads_back_with_the_state_that_the_step_got() -> None:
    move = fail(GRAPH, at("create"), "why")
    assert move.record == Record(edge="failure", to="back", failure=FAILED)
    assert move.call == Call(step="back", state="now", flow="f1", failure=FAILED, options={"key": "acme"})


def test_a_failure_without_on_failure_has_no_record() -> None:
    assert fail(GRAPH, at("join"), "why") == Move(None)


def test_a_flow_keeps_its_first_failure_on_the_way_back() -> None:
    move = fail(GRAPH, at("back", failure=FAILED), "another")
    assert move.call is not None
    assert (move.call.step, move.call.failure) == ("give_up", FAILED)
    onward = succeed(GRAPH, at("back", failure=FAILED), "next").call
    assert onward is not None
    assert onward.failure == FAILED


def test_a_failure_is_made_good_when_the_step_that_failed_succeeds() -> None:
    onward = succeed(GRAPH, at("create", failure=FAILED), "next").call
    assert onward is not None
    assert onward.failure is None


def test_a_branch_ends_with_what_it_returned_or_why_it_failed() -> None:
    assert succeed(GRAPH, at("convert", item=3), "A") == Move(Record(edge="success", state="A"))
    failure = Failure(step="convert", error="why")
    assert fail(GRAPH, at("convert", item=3), "why") == Move(Record(edge="failure", failure=failure))


def test_branches_have_an_item_each_and_the_join_runs_after_all() -> None:
    planned = fan_out(GRAPH, at("convert"), ["a", "b"], ["1", "2", "3"])
    assert [(plan.id, plan.call.state, plan.call.item, plan.after) for plan in planned[:-1]] == [
        ("1", "a", 0, ()),
        ("2", "b", 1, ()),
    ]
    last = planned[-1]
    assert (last.id, list(last.after)) == (None, ["1", "2"])
    assert last.call == at("join", joins="convert", branches=["1", "2"])


def test_a_failure_of_branches_is_made_good_when_they_are_run_again() -> None:
    call = at("convert", failure=Failure(step="convert", error="why"))
    assert fan_out(GRAPH, call, ["a"], ["1"])[-1].call.failure is None
    assert fan_out(GRAPH, at("convert", failure=FAILED), ["a"], ["1"])[-1].call.failure == FAILED


def test_many_branches_meet_in_groups_of_a_hundred() -> None:
    names = [str(number) for number in range(205)]
    planned = fan_out(GRAPH, at("convert"), list(range(201)), names)
    meetings = planned[201:-1]
    assert all(plan.call.is_meeting for plan in meetings)
    assert [(plan.id, len(plan.after)) for plan in meetings] == [("201", 100), ("202", 100), ("203", 1)]
    assert list(planned[-1].after) == ["201", "202", "203"]


def test_a_join_gets_what_the_branches_returned() -> None:
    records = [Record(edge="success", state=number) for number in (1, 2)]
    assert join(GRAPH, at("join", joins="convert"), records) == [1, 2]
    assert join(GRAPH, at("join", joins="convert"), []) == []


def test_a_join_takes_the_edge_of_failure_if_a_branch_has_failed() -> None:
    failed = Record(edge="failure", failure=Failure(step="convert", error="why"))
    move = join(GRAPH, at("join", joins="convert"), [Record(edge="success", state=1), failed, failed])
    assert isinstance(move, Move)
    assert move.record is not None
    assert move.call is not None
    assert (move.record.to, move.record.is_skipped, move.call.step) == ("back", True, "back")
    message = "2 of 3 branches failed; the first of them is that of item 1"
    assert move.call.failure == Failure(
        step="convert", error={"type": "BranchFailed", "message": message, "first": "why"}
    )


@pytest.mark.parametrize("joins", ["gone", "join"])
def test_a_failed_branch_is_no_success_if_the_edge_of_its_failure_is_gone(joins: str) -> None:
    failed = Record(edge="failure", failure=Failure(step=joins, error="why"))
    with pytest.raises(Fatal, match=r"1 of 1 branches failed; .* no on_failure"):
        join(GRAPH, at("join", joins=joins), [failed])


@pytest.mark.parametrize(
    ("now", "asked", "seconds"),
    [(104, None, 3), (109, None, None), (106.5, 3, 3), (107.5, 3, None), (107.5, 1, 1)],
)
def test_a_step_is_called_again_until_retry_until_is_over(
    now: float, asked: float | None, seconds: float | None
) -> None:
    node = Node(name="verify", retry_every=3, retry_until=10)
    mark, after = wait(node, Mark(waits=4, since=100, value="x"), asked=asked, began_at=now - 1, now=now)
    assert (mark, after) == (Mark(waits=5, since=100, value="x"), seconds)


def test_the_time_of_a_step_counts_from_its_first_call() -> None:
    mark, after = wait(Node(name="v", retry_every=3), Mark(), asked=None, began_at=100, now=102)
    assert (mark, after) == (Mark(waits=1, since=100), 3)


@pytest.mark.parametrize(
    ("attempt", "spent", "last", "crashed"),
    [(1, 0, False, False), (2, 0, True, False), (3, 0, True, True), (3, 2, False, False), (4, 2, True, False)],
)
def test_attempts_count_from_the_last_resume(attempt: int, spent: int, *, last: bool, crashed: bool) -> None:
    node, mark = Node(name="create", max_attempts=2), Mark(spent=spent)
    assert (is_last(node, mark, attempt), has_crashed_too_often(node, mark, attempt)) == (last, crashed)
    endless = Node(name="create", max_attempts=None)
    assert not is_last(endless, mark, 10**6)
    assert not has_crashed_too_often(endless, mark, 10**6)
