"""How much of a large test runs: a sample, or with `LEASEKIT_SOAK=1` (`make soak`) all of it.

Tests of a sample have the marker `soak`, and a comment beside each says what its sample is. `slow_after` leaves some
of the variants of a test to `make slow`.
"""

import os
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, TypeVar

import pytest

__all__ = ["IS_SOAK", "combinations", "in_soak", "slow_after"]

T = TypeVar("T")

IS_SOAK = os.environ.get("LEASEKIT_SOAK") == "1"


def in_soak(everything: T, *, by_default: T) -> T:
    """Choose between the size of a whole run and that of a sample."""
    return everything if IS_SOAK else by_default


def combinations(*axes: Sequence[Any], one_in: int) -> list[tuple[Any, ...]]:
    """Combine the values of all axes; by default only one combination in so many, on a diagonal: each value occurs."""
    ranges = [range(len(axis)) for axis in axes]
    chosen = [indices for indices in product(*ranges) if IS_SOAK or sum(indices) % one_in == 0]
    missed = [axis[i] for n, axis in enumerate(axes) for i in ranges[n] if all(indices[n] != i for indices in chosen)]
    assert not missed, f"one combination in {one_in} is too few for {missed}"
    return [tuple(axis[i] for axis, i in zip(axes, indices, strict=True)) for indices in chosen]


def slow_after(first: int, values: Iterable[Any]) -> list[Any]:
    """Mark all values after the first ones as slow. A tuple has a value for each of several parameters."""
    values = list(values)
    variants = [value if isinstance(value, tuple) else (value,) for value in values[first:]]
    return values[:first] + [pytest.param(*variant, marks=pytest.mark.slow) for variant in variants]
