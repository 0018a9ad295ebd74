"""Build, run, drain and check one history."""

import contextlib
import gc
import hashlib
import logging
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from harness.checker import Rules, Violation, check
from harness.history import Event, encode
from harness.simulation.cluster import Cluster
from harness.simulation.faults import Faults, planned
from harness.simulation.net import Net
from harness.simulation.scenario import Scenario
from harness.simulation.scheduler import Scheduler
from harness.simulation.server import Server
from harness.simulation.worker import Worker
from harness.simulation.world import World
from leasekit.config import DRIFT

_HOUR = 3600.0
QUIET = 0.25  # the part of a history that is without faults
# A task that hangs kills its process with all other handlers, up to twenty times, and each time a ttl passes.
_LONGEST_DRAIN = 12 * _HOUR
_LOOK = 60.0
_SHORT_POLL = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one scenario."""

    scenario: Scenario
    violations: Sequence[Violation]
    fired: Counter[str]  # effects of each fault
    faults: int  # planned ones
    hours: float
    seconds: float  # of the processor
    events: Sequence[Event]

    @property
    def digest(self) -> str:
        whole = hashlib.blake2s()
        for event in self.events:
            whole.update(encode(event))
        return whole.hexdigest()


def simulate(scenario: Scenario) -> Outcome:
    """Run one history to its end. A scenario gives the same history in every process."""
    world, began_at = World(scenario), time.process_time()
    with _alone(world):
        server = Server(world) if scenario.nodes == 1 else Cluster(world)
        try:
            faults = _run(world, server)
        finally:
            for process in world.processes:
                if process.is_alive:
                    process.die()
            world.is_over = True
            server.close()
            del server
    violations = check(world.events, rules_of(scenario))
    violations += [Violation(rule="errors", why=error) for error in world.errors]
    return Outcome(
        scenario=scenario,
        violations=violations,
        fired=world.fired,
        faults=faults,
        hours=world.now / _HOUR,
        seconds=time.process_time() - began_at,
        events=world.events,
    )


def rules_of(scenario: Scenario) -> Rules:
    steps = any(scenario.rates.get(name) for name in ("wall_forward", "wall_back", "wall_creep"))
    of_ttls = [scenario.heartbeats.for_ttl(ttl) for ttl in scenario.ttls]
    return Rules(
        heartbeats=scenario.heartbeats,
        bridge=max(heartbeats.call_timeout + heartbeats.retry_wait + 1.0 for heartbeats in of_ttls),
        drift=max(DRIFT, scenario.drift),
        sweep=scenario.period + 1.0,
        # Of messages: a lost one comes again after its enqueue timeout, and one that nobody deletes after 30 s.
        start_within=scenario.poll + scenario.look + 40.0 + (150.0 if scenario.has_queues else 0.0),
        ordered=not scenario.has_queues,  # queues do not keep the order
        fresh=10.0,
        # A long claim is given up after few tries: leases that the last try was granted then have no holder.
        lost_claim=scenario.heartbeats.cycle / 2 if scenario.poll <= _SHORT_POLL else None,
        due_slack=None if steps else 1.0 + 2 * scenario.drift * (scenario.hours * _HOUR + _LONGEST_DRAIN),
        restarts_extend=scenario.nodes == 1,  # a node that joins others extends no lease
        least_settled=int(scenario.hours * scenario.tasks_per_hour / 10),
    )


def _run(world: World, server: Server | Cluster) -> int:
    scenario = world.scenario
    ends_at = scenario.hours * _HOUR
    over_at = ends_at * (1 - QUIET)
    server.start()
    net = Net(world, server)
    fleet = _Fleet(world, net)
    Scheduler(world, net, until=(over_at + ends_at) / 2)
    faults = Faults(world, net, server, lambda: fleet.alive)
    plan = planned(world, until=over_at)
    faults.plan(plan)
    world.run(over_at)
    faults.end()
    world.run(ends_at)
    while server.unfinished and world.now < ends_at + _LONGEST_DRAIN:
        world.run(world.now + _LOOK)
    server.finals()
    return len(plan)


class _Fleet:
    """The workers; each that ends is followed by another incarnation."""

    def __init__(self, world: World, net: Net) -> None:
        self._world = world
        self._net = net
        self._chance = world.chance("fleet")
        self._workers: dict[str, Worker] = {}
        for number in range(world.scenario.workers):
            self._start(f"worker-{number}", 1)

    def _start(self, name: str, number: int) -> None:
        def on_end(worker: Worker) -> None:
            self._world.after(self._chance.uniform(1.0, 90.0), self._start, worker.name, number + 1)

        self._workers[name] = Worker(self._world, self._net, name, number, on_end=on_end)

    @property
    def alive(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.process.is_alive]


_EXPECTED = "writes fail, and no restart is needed"  # of a store whose writes a fault lets fail


class _Errors(logging.Handler):
    """Collect the errors that the code under test logs."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if self._world.is_over or record.msg.startswith(_EXPECTED) or "still runs, here" in record.msg:
            return
        error: Any = record.exc_info[1] if record.exc_info else None
        self._world.errors.append(f"{self._world.now:.3f}: {record.getMessage()}" + (f" {error!r}" if error else ""))


@contextlib.contextmanager
def _alone(world: World) -> Iterator[None]:
    """Seed the global random generator, which repeated calls use, and collect errors instead of printing them."""
    state = random.getstate()
    loggers = [(logging.getLogger(name), logging.getLogger(name).level) for name in ("leasekit", "asyncio")]
    handler = _Errors(world)
    random.seed(world.scenario.seed)
    unraisable, sys.unraisablehook = sys.unraisablehook, lambda _: None
    for logger, _ in loggers:
        logger.setLevel(logging.ERROR)
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        world.processes.clear()
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # tasks of killed processes never began
            gc.collect()
        sys.unraisablehook = unraisable
        for logger, level in loggers:
            logger.setLevel(level)
            logger.removeHandler(handler)
            logger.propagate = True
        random.setstate(state)
