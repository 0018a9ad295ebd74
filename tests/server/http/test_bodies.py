"""Bodies that have arrived are decoded in turns."""

import asyncio
from collections.abc import Sequence

import pytest

from leasekit.server.fair_bound import CALLER
from leasekit.server.http import bodies
from leasekit.server.http.bodies import Bodies

LONG = bodies._TURN  # a turn has room for one of these
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Arrivals:
    """Notes in which order bodies have their turn, and in which turn of the event loop."""

    def __init__(self) -> None:
        self.bodies, self.turn = Bodies(60), 0
        self.had: list[tuple[str, int]] = []

    async def arrive(self, caller: str, size: int = LONG) -> None:
        CALLER.set(caller)
        await self.bodies.turn(size)
        self.had.append((caller, self.turn))

    async def run(self, *arriving: Sequence[asyncio.Task[None]]) -> None:
        """Count the turns of the event loop until all have had their turn."""
        tasks = [task for some in arriving for task in some]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            self.turn += 1

    def begin(self, caller: str, count: int, size: int = LONG) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self.arrive(caller, size)) for _ in range(count)]


async def test_the_event_loop_sees_to_everything_else_between_bodies() -> None:
    arrivals = Arrivals()
    await arrivals.run(arrivals.begin("a", 10))
    turns = [turn for _, turn in arrivals.had]
    assert len(set(turns)) == 10


async def test_smaller_bodies_share_a_turn() -> None:
    arrivals = Arrivals()
    await arrivals.run(arrivals.begin("a", 8, LONG // 4))
    assert len({turn for _, turn in arrivals.had}) == 2


async def test_callers_take_turns() -> None:
    arrivals = Arrivals()
    await arrivals.run(arrivals.begin("flood", 20), arrivals.begin("other", 1))
    assert [caller for caller, _ in arrivals.had].index("other") <= 1


async def test_tiny_bodies_wait_for_none() -> None:
    arrivals = Arrivals()
    await arrivals.run(arrivals.begin("flood", 20), arrivals.begin("flood", 1, bodies._TINY))
    assert arrivals.had[0] == ("flood", 0)


async def test_whoever_leaves_holds_up_nobody() -> None:
    arrivals = Arrivals()
    leaving, staying = arrivals.begin("a", 3), arrivals.begin("a", 1)
    await asyncio.sleep(0)
    for task in leaving:
        task.cancel()
    await asyncio.wait_for(asyncio.gather(*staying), 10)
    assert [task.cancelled() for task in leaving] == [True] * 3
    await asyncio.wait_for(asyncio.gather(*arrivals.begin("b", 1)), 10)
