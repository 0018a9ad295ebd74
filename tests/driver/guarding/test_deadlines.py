"""Who ends first, under any history: a model that looks at all of them each time has to agree."""

# How much is kept of what has left can be seen from inside only.
# pyright: reportPrivateUsage=false

import functools
import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from leasekit._driver.guarding.deadlines import DeadlineSet

KEYS = range(12)
keys = st.sampled_from(KEYS)
moments = st.one_of(st.integers(0, 6).map(float), st.floats(0, 1e9))  # few: cohorts meet


class EndsMachine(RuleBasedStateMachine):
    """The model is two dictionaries, and `min`."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: DeadlineSet[int] = DeadlineSet()
        self.model: dict[int, float] = {}
        self.fixed: dict[int, float] = {}

    @rule(key=keys, at=moments)
    def add(self, key: int, at: float) -> None:
        self.ends.add(key, at)
        self.fixed.pop(key, None)
        self.model[key] = at

    @rule(some=st.lists(keys), at=moments)
    def move(self, some: list[int], at: float) -> None:
        self.ends.move(some, at)
        self.model |= {key: at for key in some if key in self.model}

    @rule(key=keys, at=moments)
    def fix(self, key: int, at: float) -> None:
        self.ends.fix(key, at)
        if key in self.model:
            self.fixed[key] = min(at, self.model.pop(key))

    @rule(key=keys)
    def remove(self, key: int) -> None:
        self.ends.remove(key)
        self.model.pop(key, None)
        self.fixed.pop(key, None)

    @rule()
    def look(self) -> None:
        everyone = [*self.model.values(), *self.fixed.values()]
        assert self.ends.earliest == min(everyone, default=None)

    @invariant()
    def counts(self) -> None:
        assert len(self.ends) == len(self.model) + len(self.fixed)

    def teardown(self) -> None:
        self.look()


TestEnds = EndsMachine.TestCase


def test_who_has_left_leaves_nothing_behind_while_another_ends_before() -> None:
    ends: DeadlineSet[object] = DeadlineSet()
    ends.add("long", 10.0)
    for n in range(10_000):
        key = object()
        ends.add(key, 20.0 + n)
        ends.remove(key)
        assert ends.earliest == 10.0
    assert len(ends._heap) + len(ends._cohorts) < 200


CALLS: dict[str, Callable[[DeadlineSet[str], float], object]] = {
    "add": lambda ends, at: ends.add("one", at),
    "remove": lambda ends, at: ends.remove("one"),
    "earliest": lambda ends, at: ends.earliest,
}


@pytest.mark.parametrize("at", [5.0, 10.0, 20.0])  # before, with and after another
@pytest.mark.parametrize("name", CALLS)
def test_an_interruption_anywhere_leaves_all_others_guarded_to_the_moment(name: str, at: float) -> None:
    for steps in itertools.count(1):
        ends: DeadlineSet[str] = DeadlineSet()
        ends.add("other", 10.0)
        if name != "add":
            ends.add("one", at)
        if name == "earliest":  # what an interrupted `remove` leaves
            ends._cohorts[at].remove("one")
        interrupted = not _completes(functools.partial(CALLS[name], ends, at), steps)
        assert ends.earliest in (10.0, min(at, 10.0))
        ends.remove("one")
        assert ends.earliest == 10.0
        ends.add("newcomer", at)
        assert ends.earliest == min(at, 10.0)
        ends.move(["one", "newcomer"], 7.0)
        assert ends.earliest == 7.0
        ends.remove("newcomer")
        assert ends.earliest == 10.0
        if not interrupted:
            assert steps > 10
            break


def _completes(call: Callable[[], object], steps: int) -> bool:
    """Call it, and raise after so many bytecodes of `deadlines.py`, as a signal handler may in the main thread."""
    left = steps

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith("deadlines.py"):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(before)
    return True
