"""Bodies that have arrived are decoded in turns."""

import asyncio
import weakref
from collections.abc import Sequence

import pytest

from leasekit.server.daemon_threads import DaemonThreads
from leasekit.server.fair_bound import CALLER
from leasekit.server.http import bodies
from leasekit.server.http.bodies import Bodies
from tests.waiting import eventually

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


async def test_callers_take_turns_with_long_bodies_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_REST", 0)
    arriving, decoded = Bodies(60), list[str]()

    async def arrive(caller: str) -> None:
        CALLER.set(caller)
        await arriving.decoded(bodies._LONG + 1, lambda: decoded.append(caller))

    await asyncio.wait_for(asyncio.gather(*map(arrive, ["flood"] * 20 + ["other"])), 60)
    assert decoded.index("other") <= 2
    assert len(decoded) == 21


async def test_heartbeats_of_a_thousand_leases_wait_for_no_larger_bodies_of_their_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "_REST", 0)
    arriving, decoded = Bodies(60), list[int]()

    async def arrive(size: int) -> None:
        await arriving.decoded(size, lambda: decoded.append(size))

    await asyncio.wait_for(asyncio.gather(*map(arrive, [bodies._SMALL + 1] * 9 + [bodies._SMALL])), 60)
    assert decoded.index(bodies._SMALL) <= 1


async def test_after_a_long_body_the_thread_rests_for_as_long_as_it_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_timed", lambda decode, taken: (taken.append(1000.0), decode())[1])
    arriving, long = Bodies(60), bodies._LONG + 1
    assert await asyncio.wait_for(arriving.decoded(long, lambda: 1), 60) == 1
    waiting = asyncio.create_task(arriving.decoded(long, lambda: 2))
    assert await asyncio.wait_for(arriving.decoded(bodies._LONG, lambda: 3), 60) == 3
    (resting,) = [handle for handle in asyncio.get_running_loop()._scheduled if handle._callback == arriving._go_on]  # type: ignore[attr-defined]
    assert not waiting.done()
    resting._run()
    assert await asyncio.wait_for(waiting, 60) == 2


async def test_a_long_body_that_does_not_fit_or_whose_request_ends_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "_REST", 0)
    arriving, long = Bodies(60), bodies._LONG + 1

    def misfit() -> None:
        raise ValueError("misfit")

    bad, leaving, queued = (asyncio.create_task(arriving.decoded(long, misfit)) for _ in range(3))
    await asyncio.sleep(0)
    leaving.cancel()
    queued.cancel()
    assert await asyncio.wait_for(arriving.decoded(long, lambda: 1), 60) == 1
    (error,) = await asyncio.gather(bad, return_exceptions=True)
    assert repr(error) == repr(ValueError("misfit"))


def test_a_thread_keeps_nothing_of_its_last_call() -> None:
    body = type("Body", (), {})()
    is_there = weakref.ref(body)
    assert DaemonThreads(1, name="t").submit(lambda it: type(it).__name__, body).result(60) == "Body"
    del body
    eventually(lambda: is_there() is None)
