"""A bound that callers share."""

import math

from leasekit.server.fair_bound import FairBound, FairNames, caller_of


def test_one_caller_alone_gets_all_and_no_more() -> None:
    bound = FairBound()
    for _ in range(3):
        assert not bound.is_reached("a", 3)
        bound.add("a", 1)
    assert bound.is_reached("a", 3)
    assert bound.total == 3


def test_a_caller_with_less_than_its_share_is_kept_out_by_no_other() -> None:
    bound = FairBound()
    bound.add("a", 10)
    for _ in range(5):  # half of ten
        assert not bound.is_reached("b", 10)
        bound.add("b", 1)
    assert bound.is_reached("a", 10)
    assert bound.is_reached("b", 10)
    assert not bound.is_reached("c", 10)


def test_what_was_given_back_is_there_for_all() -> None:
    bound = FairBound()
    bound.add("a", 3)
    bound.add("b", 1)
    bound.add("b", -1)
    assert bound.is_reached("a", 3)  # of which b has no share any longer
    bound.add("a", -1)
    assert not bound.is_reached("a", 3)


def test_who_has_nothing_has_room_for_any_amount_and_others_for_the_rest_of_their_share() -> None:
    bound = FairBound()
    bound.add("a", 8)
    assert bound.room("a", 10) == 2
    assert bound.room("b", 10) == math.inf
    bound.add("b", 3)
    assert bound.room("a", 10) < 0
    assert bound.room("b", 10) == 2  # half of ten is its share


def test_a_name_counts_once_for_each_caller_that_has_it_until_it_has_given_it_back_as_often() -> None:
    names = FairNames()
    for _ in range(5):
        names.add("a", ["x", "y"])
    assert names.is_reached("a", 2, ["x", "z"])
    assert not names.is_reached("a", 2, ["y", "x"]), "none of these is new"
    assert not names.is_reached("a", 3, ["z"])
    names.add("b", ["x"])
    assert names.is_reached("a", 3, ["z"])
    assert not names.is_reached("b", 3, ["z"]), "half of three is its share"
    for _ in range(4):
        names.remove("a", ["x", "y"])
    assert names.is_reached("a", 3, ["z"])
    names.remove("b", ["x"])
    names.remove("a", ["y", "x"])
    assert not names.is_reached("a", 1, ["z"])


def test_the_caller_of_a_claim_stands_before_its_id() -> None:
    assert caller_of("0197f3a2/host-1-000001") == "0197f3a2"
    assert caller_of("host-1-000001") == ""
