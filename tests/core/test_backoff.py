"""How long to wait before the service is asked again."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasekit._core.backoff import Backoff


def waits(backoff: Backoff, count: int) -> list[float]:
    return [backoff.wait() for _ in range(count)]


def test_waits_double_up_to_the_most() -> None:
    assert waits(Backoff(1.0, 5.0, random=lambda: 0.0), 5) == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_chance_shortens_a_wait_by_up_to_a_half() -> None:
    assert waits(Backoff(1.0, 8.0, random=lambda: 0.999_999), 3) == pytest.approx([0.5, 1.0, 2.0], rel=1e-5)


def test_each_wait_has_a_chance_of_its_own() -> None:
    assert len(set(waits(Backoff(1.0, 1.0, random=random.Random(1).random), 10))) == 10


def test_chance_does_not_slow_the_doubling() -> None:
    assert waits(Backoff(1.0, 100.0, random=lambda: 0.5), 4) == [0.75, 1.5, 3.0, 6.0]


def test_after_a_reset_it_begins_with_the_first() -> None:
    backoff = Backoff(1.0, 8.0, random=lambda: 0.0)
    waits(backoff, 3)
    backoff.reset()
    assert waits(backoff, 2) == [1.0, 2.0]


def test_a_first_above_the_most_is_the_most() -> None:
    assert waits(Backoff(10.0, 5.0, random=lambda: 0.0), 3) == [10.0, 10.0, 10.0]


@given(first=st.floats(0.001, 100), most=st.floats(0.001, 1000), count=st.integers(1, 2000), seed=st.integers())
def test_a_wait_is_never_above_the_most_and_never_below_half_the_first(
    first: float, most: float, count: int, seed: int
) -> None:
    backoff = Backoff(first, most, random=random.Random(seed).random)
    assert all(first / 2 <= wait <= max(first, most) for wait in waits(backoff, count))
