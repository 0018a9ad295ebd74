"""Circles of tasks: what is refused, beside a search by hand; and circles of two writers, looked for in steps."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from leasekit.errors import Refused
from leasekit.server.roles import circles, frontend
from leasekit.server.store.memory import MemoryStore
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import NewTask
from tests.server.conftest import Bench

pytestmark = pytest.mark.anyio


def is_circle(after: Mapping[str, Sequence[str]]) -> bool:
    """Whether any task waits for itself: what waits for none of the others is taken out, one by one."""
    left = dict(after)
    while ready := [name for name, others in left.items() if not left.keys() & set(others)]:
        for name in ready:
            del left[name]
    return bool(left)


@pytest.mark.parametrize("seed", range(60))
def test_what_closes_a_circle_is_refused_and_nothing_else_is(seed: int) -> None:
    random = Random(seed)
    names = [f"t{n}" for n in range(random.choice([4, 8, 20]))]
    store, known = MemoryStore(), dict[str, list[str]]()
    store.open()
    while len(known) < len(names):
        new = random.sample(sorted(set(names) - known.keys()), k=min(random.randint(1, 4), len(names) - len(known)))
        after = {name: random.sample(names, k=random.choice([0, 1, 1, 2])) for name in new}
        error = refusal(store, after)
        assert is_circle(known | after) == (error is not None), f"seed {seed}: {after}"
        if error is not None:
            way = [word.strip('"') for word in error["detail"].partition(": ")[2].split(" after ")]
            assert way[0] == way[-1] == new[error["item"]]
            assert all(one in (known | after)[name] for name, one in pairwise(way) if "…" not in (name, one))
        known |= after if error is None else {name: [] for name in new}  # so that the history ends


def refusal(store: MemoryStore, after: Mapping[str, Sequence[str]]) -> Any:
    """Schedule tasks; return the error, if they are refused."""
    tasks = [NewTask(kind="k", id=name, after=list(others)) for name, others in after.items()]
    try:
        with store.transaction() as tx:
            frontend.schedule(UnitOfWork(tx, now=1.0, instant=1.0, random=Random(1)), tasks)
    except Refused as error:
        return error.errors[0]
    return None


class Counted:
    """A transaction that counts the waits that are read in it."""

    def __init__(self, tx: Any) -> None:
        self._tx = tx
        self.read = 0

    def waits_of(self, *args: Any, **options: Any) -> Any:
        waits = self._tx.waits_of(*args, **options)
        self.read += len(waits)
        return waits


async def test_circles_of_two_writers_are_looked_for_in_steps_that_read_so_many_waits(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, steps, find = 100, list[int](), circles.find
    monkeypatch.setattr(circles, "_MOST", most)
    monkeypatch.setattr(circles, "refuse", lambda *_: None)  # no writer sees what the other adds

    def counted(tx: Any, names: Sequence[str]) -> Any:
        found = find(counting := Counted(tx), names)  # type: ignore[arg-type]
        steps.append(counting.read)
        return found

    monkeypatch.setattr(circles, "find", counted)
    wide = {"wide0": 6, "wide1": 6, "wide2": 6, "too wide": 12}
    for name, width in wide.items():
        await bench.put(*(f"{name} below {n}" for n in range(width)), after=[f"{name} never"])
        await bench.put(*(f"{name} {n}" for n in range(width)), after=[f"{name} below {n}" for n in range(width)])
    await bench.engine.tick()
    for name, width in wide.items():
        await bench.put(f"after {name}", after=[name])
        await bench.put(name, after=[f"{name} {n}" for n in range(width)])
    await bench.put("x", after=["y", "wide0 0"])
    await bench.put("y", after=["x"])
    steps.clear()
    await bench.engine.tick()
    assert '"y" after "x" after "y"' in ((await bench.info("y")).reason or "")
    assert await bench.status("x") == "dropped"
    assert {await bench.status(name) for name in [*wide, "after too wide"]} == {"new"}
    assert len(steps) > 1
    assert max(steps) <= 2 * (most + 1)
    steps.clear()
    await bench.engine.tick()
    assert steps == []
