"""The clock of a database that several nodes share: whatever its steps, leases end by true time or a bit later."""

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from leasekit.config import DRIFT
from leasekit.server.clock import DatabaseClock, Moment
from leasekit.server.store import Anchor, Reading


@dataclass
class World:
    """True time, and a database whose clock is `ahead` of it."""

    now: float = 1_000_000.0
    ahead: float = 0.0
    correction: float = 0.0
    gained: float = 0.0
    signs: dict[int, Anchor] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)


class Node:
    """A node on a machine of its own, whose boot clock has its own start and rate."""

    def __init__(self, world: World, number: int, *, rate: float = 1.0, machine: str | None = None) -> None:
        self.world = world
        self.number = number
        self._rate = rate
        self._start = 0.0 if machine else 5_000.0 * number
        self.clock = DatabaseClock(self.boot, boot_id=machine or f"machine-{number}", stall=10.0)

    def boot(self) -> float:
        return self._start + self._rate * (self.world.now - 1_000_000.0)

    def begin(self, *, there: float = 0.0, back: float = 0.0) -> Moment:
        """Begin and end a transaction whose reading takes so long each way."""
        world = self.world
        moment, before = self.clock.read(), self.boot()
        world.now += there
        wall = world.now + world.ahead
        world.now += back
        others = [sign.instant for number, sign in world.signs.items() if number not in world.left | {self.number}]
        last = max(world.signs.values(), key=lambda sign: sign.instant, default=None)
        reading = Reading(wall, world.correction, world.gained, last, max(others, default=None), before, self.boot())
        begun, _ = self.clock.begin(Tx(self, reading), moment)  # type: ignore[arg-type]
        self.clock.succeeded()
        return begun

    def error(self, **trip: float) -> float:
        """Begin a transaction, and return by how much its clock of leases is ahead of the truth as it was read."""
        at = self.world.now + trip.get("there", 0.0)
        return self.begin(**trip).instant - at


class Tx:
    """What the clock asks of a transaction."""

    def __init__(self, node: Node, reading: Reading) -> None:
        self._node = node
        self.reading = reading

    def correct_clock(self, correction: float, gained: float) -> None:
        self._node.world.correction, self._node.world.gained = correction, gained

    def sign_in(self, sign: Anchor) -> None:
        self._node.world.signs[self._node.number] = sign
        self._node.world.left.discard(self._node.number)

    def forget_nodes(self, before: float) -> None:
        self._node.world.signs = {n: sign for n, sign in self._node.world.signs.items() if sign.instant >= before}


def started(count: int = 2, **options: Any) -> tuple[World, list[Node]]:
    world = World()
    nodes = [Node(world, number, **options) for number in range(count)]
    for node in nodes:
        node.begin()
    return world, nodes


@pytest.mark.parametrize("step", [0.2, 8.0, 3600.0])
def test_a_step_ahead_moves_no_end_of_a_lease_and_what_is_due_follows_it(step: float) -> None:
    world, nodes = started()
    world.now += 1
    world.ahead += step
    assert [node.error() for node in nodes] == pytest.approx([0.0, 0.0], abs=0.01)
    assert nodes[0].begin().now == pytest.approx(world.now + step, abs=0.01)
    assert [node.clock.steps for node in nodes] == [1, 0], "one node corrects it for all"


@pytest.mark.parametrize("step", [5.0, 3600.0])
def test_a_step_back_is_corrected(step: float) -> None:
    world, nodes = started()
    world.now += 1
    world.ahead -= step
    assert [node.error() for node in nodes] == pytest.approx([0.0, 0.0], abs=1.01)
    assert nodes[0].begin().now >= world.now - 1.01, "what is due does not go back"


def test_a_small_step_back_lets_leases_last_longer_by_as_much() -> None:
    world, nodes = started()
    world.now += 1
    world.ahead -= 1.5
    assert nodes[1].error() == pytest.approx(-1.5, abs=0.01)


def test_small_steps_that_a_slow_network_hides_do_not_add_up() -> None:
    world, (node, _) = started()
    for _ in range(100):
        world.now += 1
        world.ahead += 0.3
        assert node.error(there=0.2, back=0.2) < 0.5


@pytest.mark.parametrize("step", [8.0, 3600.0])
@pytest.mark.parametrize("is_corrected", [True, False])
def test_a_node_that_joins_has_the_time_of_the_others_whatever_its_own_clock_shows(
    is_corrected: bool, step: float
) -> None:
    world, nodes = started()
    world.now += 1
    world.ahead += step
    if is_corrected:
        nodes[0].begin()
    joining = Node(world, 7)
    assert joining.error() == pytest.approx(0.0, abs=1.01)


@pytest.mark.parametrize("late", [0.2, 4.0])
def test_a_node_whose_first_answer_is_late_ends_no_leases_early(late: float) -> None:
    world, (beside, other) = started()
    world.now += 1
    beside.begin()
    assert Node(world, 7, machine="machine-0").error(back=late) < 0.01
    assert other.error() < 0.01


def test_a_node_that_joins_others_restarts_no_leases() -> None:
    world, nodes = started()
    world.now += 5
    nodes[0].begin()
    assert not Node(world, 7).begin().after_gap
    assert not Node(world, 8, machine="machine-0").begin().after_gap


@pytest.mark.parametrize("machine", [None, "machine-0"])
def test_the_first_node_after_all_are_gone_restarts_leases(machine: str | None) -> None:
    world, _ = started()
    world.now += 30
    assert Node(world, 7, machine=machine).begin().after_gap


def test_the_first_node_after_all_have_left_restarts_leases_at_once() -> None:
    world, nodes = started()
    world.left |= {node.number for node in nodes}
    assert Node(world, 7).begin().after_gap


def test_a_node_that_stood_still_restarts_no_leases_while_another_was_there() -> None:
    world, (stood, other) = started()
    for _ in range(60):
        world.now += 1
        other.begin()
    assert not stood.begin().after_gap


def test_leases_are_restarted_once_after_nobody_could_write() -> None:
    world, nodes = started()
    world.now += 60
    assert [node.begin().after_gap for node in nodes] == [True, False]


@pytest.mark.parametrize("seed", range(30))
def test_leases_end_by_true_time_whatever_the_clocks_do(seed: int) -> None:
    """Never ahead by more than a reading takes and clocks drift, and behind by no more than steps back."""
    dice = Random(seed)
    world = World()
    nodes = [Node(world, number, rate=1 + dice.uniform(-DRIFT, DRIFT) / 2) for number in range(3)]
    neighbour = Node(world, 999, machine="shared")
    for node in (*nodes, neighbour):
        node.begin()
    began_at, behind = world.now, 0.0
    for turn in range(600):
        world.now += dice.uniform(0, 1)
        if dice.random() < 0.05:
            step = dice.choice([0.01, 0.3, 5.0, 60.0, 3600.0, -0.3, -1.5, -5.0, -3600.0]) * dice.random()
            world.ahead += step
            behind += max(-step, 0.0)
        if dice.random() < 0.02:
            nodes[turn % 3] = Node(world, turn, rate=1 + dice.uniform(-DRIFT, DRIFT) / 2)
            behind += 5  # a node that joins may take a late sign of the others for a step
        if dice.random() < 0.02:
            neighbour.begin()  # its sign is the latest, if it is a second after its last one
            joining = Node(world, 1000 + turn, machine="shared")
            assert joining.error(back=dice.uniform(0, 4)) < 2 + DRIFT * (world.now - began_at), f"seed {seed}"
        there, back = (dice.uniform(0, dice.choice([0.001, 0.05, 1.0])) for _ in range(2))
        error = dice.choice(nodes).error(there=there, back=back)
        drifted = DRIFT * (world.now - began_at)
        assert -2 - behind - drifted < error < 2 + drifted, f"seed {seed}, turn {turn}"


@pytest.mark.parametrize("back", [0.0, 4.0, 40.0])
def test_no_claim_seems_to_have_waited_for_longer_than_it_did(back: float) -> None:
    """Its client counts trust from when it asked, and adds what it has waited."""
    world, (node, _) = started()
    node.begin(there=1.0, back=back)  # a slow answer, or a process that was stopped before it read the answer
    arrived_at, asked_at = node.clock.instant(), world.now
    world.now += 3.0
    granted_at = world.now + 0.1
    assert node.begin(there=0.1).instant - arrived_at <= granted_at - asked_at + 0.001
