"""Time, processes and the timer of the simulated world."""

import asyncio
import math

import pytest

from harness.simulation.scenario import Scenario
from harness.simulation.worker import KernelTimer
from harness.simulation.world import Process, World


@pytest.fixture
def world() -> World:
    return World(Scenario(seed=1))


def test_things_happen_by_time_and_at_one_moment_in_order(world: World) -> None:
    happened: list[str] = []
    for when, what in [(2.0, "c"), (1.0, "a"), (1.0, "b")]:
        world.at(when, happened.append, what)
    world.run(5.0)
    assert (happened, world.now) == (["a", "b", "c"], 5.0)


def test_a_sleeper_wakes_by_the_clock_of_its_process(world: World) -> None:
    fast = Process(world, "fast", rate=2.0)
    woke: list[float] = []

    async def sleep() -> None:
        await asyncio.sleep(10)
        woke.append(world.now)

    fast.start(sleep())
    world.run(100.0)
    assert woke == [pytest.approx(5.0, abs=0.001)]


def test_a_paused_process_wakes_when_it_goes_on(world: World) -> None:
    process = Process(world, "p")
    woke: list[tuple[float, float]] = []

    async def sleep() -> None:
        await asyncio.sleep(10)
        woke.append((world.now, process.boot()))

    process.start(sleep())
    world.at(5.0, process.hold, "paused")
    world.at(50.0, process.let_go, "paused")
    world.run(100.0)
    assert woke == [(50.0, 1050.0)]


def test_the_clock_of_a_frozen_machine_stands_still(world: World) -> None:
    process = Process(world, "p")
    world.at(5.0, process.hold, "frozen")
    world.run(20.0)
    assert process.boot() == 1005.0
    assert process.true(1010.0) == math.inf
    process.let_go("frozen")
    world.run(25.0)
    assert process.boot() == 1010.0


def test_a_machine_that_was_frozen_twice_is_said_to_go_on_once(world: World) -> None:
    """The checker counts the time between the two events: the clock stood still until the second fault ended."""
    process = Process(world, "p")
    for at, happen in [(1.0, process.hold), (2.0, process.hold), (3.0, process.let_go), (4.0, process.let_go)]:
        world.at(at, happen, "frozen")
    world.run(5.0)
    assert [(type(event).__name__, event.at) for event in world.events] == [("Frozen", 1.0), ("Thawed", 4.0)]


def test_a_dead_process_does_nothing_more(world: World) -> None:
    process = Process(world, "p")
    woke: list[int] = []
    world.at(1.0, process.die)
    process.call(lambda: process.loop.call_later(5, woke.append, 1))
    world.run(100.0)
    assert woke == []


class Victim:
    """What a timer kills."""

    def __init__(self, world: World) -> None:
        self.process = Process(world, "victim")
        self.died_at: list[float] = []

    def die(self, why: str) -> None:
        self.died_at.append(self.process.world.now)


@pytest.mark.parametrize(
    ("why", "dies_at"),
    [(None, 10.0), ("paused", 10.0), ("gil", 10.0), ("suspended", 40.0), ("frozen", 45.0)],
)
def test_the_timer_kills_whatever_runs_and_what_stands_still(world: World, why: str | None, dies_at: float) -> None:
    victim = Victim(world)
    timer = KernelTimer(victim)  # type: ignore[arg-type]
    timer.arm(1010.0)

    def go_on() -> None:
        victim.process.let_go(why or "")
        timer.look()

    if why is not None:
        world.at(5.0, victim.process.hold, why)
        if why in ("suspended", "frozen"):
            world.at(40.0, go_on)
    world.run(100.0)
    assert victim.died_at == [pytest.approx(dies_at, abs=0.001)]


def test_the_timer_kills_at_the_last_moment_that_was_said(world: World) -> None:
    victim = Victim(world)
    timer = KernelTimer(victim)  # type: ignore[arg-type]
    timer.arm(1010.0)
    timer.arm(1020.0)
    world.run(15.0)
    assert victim.died_at == []
    timer.disarm()
    world.run(100.0)
    assert victim.died_at == []


def test_chance_is_the_same_for_the_same_name_and_seed(world: World) -> None:
    assert world.chance("a").random() == World(Scenario(seed=1)).chance("a").random()
    assert world.chance("a").random() != world.chance("b").random()
    assert world.chance("a").random() != World(Scenario(seed=2)).chance("a").random()
