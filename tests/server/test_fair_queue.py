"""A queue in which callers take turns."""

from collections import Counter
from itertools import count
from random import Random

import pytest

from leasekit.server.fair_queue import FairQueue


def queue_of(*items: str, urgent: str = "") -> FairQueue[str]:
    """Return a queue of items that begin with the letter of their callers."""
    queue: FairQueue[str] = FairQueue()
    for item in items:
        queue.add(item[0], item, is_urgent=item in urgent.split())
    return queue


def taken(queue: FairQueue[str]) -> list[str]:
    items: list[str] = []
    while queue:
        items.append(queue.take())
    return items


def test_callers_take_turns_however_many_items_one_has() -> None:
    assert taken(queue_of("a1", "a2", "a3", "b1", "c1", "b2")) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_the_first_item_is_the_one_that_is_taken_next() -> None:
    queue = queue_of("a1", "a2", "b1", urgent="a2")
    assert len(queue) == 3
    assert [(queue.first(), queue.take(), len(queue)) for _ in range(3)] == [
        ("a2", "a2", 2), ("b1", "b1", 1), ("a1", "a1", 0),
    ]  # fmt: skip


def test_who_comes_back_comes_after_all_others() -> None:
    queue = queue_of("a1", "b1", "b2")
    assert queue.take() == "a1"
    queue.add("a", "a2")
    assert taken(queue) == ["b1", "a2", "b2"]


def test_urgent_items_come_before_others_of_their_caller_only() -> None:
    queue = queue_of("a1", "b1", "a2", "a3", "b2", urgent="a2 a3")
    assert taken(queue) == ["a2", "b1", "a3", "b2", "a1"]


def test_what_was_removed_is_not_taken_and_takes_no_turn() -> None:
    queue = queue_of("a1", "b1", "b2", "c1", urgent="b1")
    queue.remove("a", "a1")
    queue.remove("b", "b1")
    queue.remove("b", "unknown")
    queue.remove("unknown", "b1")
    assert taken(queue) == ["b2", "c1"]
    queue.remove("c", "c1")
    assert not queue


def test_who_asks_for_much_work_comes_after_all_who_ask_for_little() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(3):
        queue.add("a", f"a{number}", work=1000)
        queue.add("b", f"b{number}")
    assert taken(queue) == ["a0", "b0", "b1", "b2", "a1", "a2"]


def test_who_comes_back_with_much_work_again_and_again_gains_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.add("a", "a", work=1000)
    for number in range(10):
        queue.add("b", f"b{number}", work=10)
    order: list[str] = []
    for _ in range(11):
        order.append(item := queue.take())
        if item == "a":
            queue.add("a", "a", work=1000)
    assert order == ["a", *(f"b{number}" for number in range(10))]


def test_a_turn_that_is_over_is_forgotten() -> None:
    queue = queue_of("z1")
    for number in range(1000):
        queue.add(f"caller-{number}", "item")
        queue.remove(f"caller-{number}", "item")
        queue.add("y", f"y{number}")
        queue.take()
    assert len(queue._turns) < 20
    assert len(queue._ends) < 20


@pytest.mark.parametrize("seed", range(20))
def test_two_who_wait_all_the_time_are_given_the_same_work_but_for_one_item(seed: int) -> None:
    rng, queue, given = Random(seed), FairQueue[tuple[str, int, int]](), Counter[str]()
    numbers = count()
    sizes = {"a": (1,), "b": (1, 7), "c": (50,)}

    def add(caller: str) -> None:
        work = rng.choice(sizes[caller])
        queue.add(caller, (caller, next(numbers), work), work=work)

    for caller in "abc" * 3:
        add(caller)
    for _ in range(1000):
        caller, _, work = queue.take()
        given[caller] += work
        add(caller)
    works = [given[caller] for caller in "abc"]
    assert max(works) - min(works) <= 2 * 50
