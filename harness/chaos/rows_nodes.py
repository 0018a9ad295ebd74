"""Rows on PostgreSQL: two servers over one database, workers that know both, and workers that open it themselves."""

import os
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, pairwise
from random import Random
from statistics import quantiles

from harness.chaos.processes import Process, wait_for
from harness.chaos.scenarios import scenario
from harness.chaos.world import World
from harness.checker.index import Lives
from harness.history import Acknowledged, Asked, Lost, boottime

LONG = 300.0  # seconds that the rows `…-for-minutes` take at least
EVERY = 10.0  # seconds from fault to fault in these
RATE = 500  # schedules a second in these
BATCH = 10  # of them in each call: the client is a process of the same two cores
ACCEPTED = 0.999  # the share of calls that some node must accept without a repeat, while nodes are killed
STOPPED = 60.0  # seconds that a node stands still
_QUIET = ["--log-level", "warning"]
SLACK = 5.0  # seconds after the end of a dead worker's lease until the task is granted again, at most


@scenario(24, "nodes-killed", faults=("kill",), ttl=60, cycle=1, service="postgresql")
def nodes_killed(world: World) -> None:
    """kill -9 of one node or the other, eight times, under load: nothing is lost, and no lease."""
    ids = world.held("first", "second")
    scheduler = world.submit("steady", 400, seconds=0.01, batch=5)
    for number in range(8):
        _until_more_is_acknowledged(world, scheduler)
        _kill_node(world, number % 2)
        world.until_beaten(ids)
    assert scheduler.popen.wait(120) == 0
    world.finish_unharmed(ids)


@scenario(24, "postgres-immediate", faults=("immediate",), ttl=60, cycle=1, service="postgresql")
def postgres_immediate(world: World) -> None:
    """PostgreSQL is restarted without a checkpoint, five times, under load: nothing is lost, and no lease."""
    ids = world.held("first", "second")
    scheduler = world.submit("steady", 300, seconds=0.01, batch=5)
    for _ in range(5):
        _until_more_is_acknowledged(world, scheduler)
        world.stop_postgres()
        world.start_postgres()
        world.until_beaten(ids)
    assert scheduler.popen.wait(120) == 0
    world.finish_unharmed(ids)


@scenario(34, "node-stopped", faults=("pause",), ttl=60, cycle=1, service="postgresql")
def node_stopped(world: World) -> None:
    """A node stands still under load: clients use the other; once it goes on, it harms no lease."""
    ids = world.held("first", "second")
    scheduler = world.submit("steady", 200, seconds=0.01, batch=5)
    for node in world.nodes:
        _until_more_is_acknowledged(world, scheduler)
        node.pause()
        world.until_beaten(ids)
        time.sleep(15)
        node.resume()
        world.until_beaten(ids)
    assert scheduler.popen.wait(120) == 0
    world.finish_unharmed(ids)


@scenario(
    24, "nodes-killed-for-minutes", faults=("kill",), ttl=20, service="postgresql", alone=True, long=True, ordered=False
)  # fmt: skip
def nodes_killed_for_minutes(world: World) -> None:
    """kill -9 of a node every 10 s, and of workers, under 500 schedules a second: calls go through."""
    ids = world.held("first", "second", each=2)
    scheduler, other = _load(world)
    for number in _faults(scheduler):
        _kill_node(world, number % 2)
        if number % 3 == 2:
            other.kill()
            other = world.work("other", slots=8, options=_QUIET)
    _until_drained(world, scheduler, held=len(ids))
    _dead_workers_leases(world)
    world.finish_unharmed(ids)
    share = _calls(world)
    assert share >= ACCEPTED, f"{share:.3%} were accepted at the first call"


@scenario(
    24, "postgres-immediate-for-minutes", faults=("immediate",), ttl=60, service="postgresql", alone=True, long=True,
    ordered=False,
)  # fmt: skip
def postgres_immediate_for_minutes(world: World) -> None:
    """PostgreSQL is restarted without a checkpoint every 10 s under 500 schedules a second: nothing is lost."""
    ids = world.held("first", "second", each=2)
    scheduler, _ = _load(world)
    for _ in _faults(scheduler):
        world.stop_postgres()
        world.start_postgres()
    _until_drained(world, scheduler, held=len(ids))
    _calls(world)
    world.finish_unharmed(ids)


@scenario(
    34, "node-stopped-for-a-minute", faults=("pause",), ttl=60, service="postgresql", alone=True, long=True,
    ordered=False,
)  # fmt: skip
def node_stopped_for_a_minute(world: World) -> None:
    """Each node stands still for a minute under 500 schedules a second, and goes on: no lease and no task is lost."""
    ids = world.held("first", "second", each=2)
    scheduler, _ = _load(world, lasts=len(world.nodes) * (STOPPED + 2 * EVERY))
    for node in world.nodes:
        time.sleep(EVERY)
        node.pause()
        time.sleep(STOPPED)
        node.resume()
    _until_drained(world, scheduler, held=len(ids))
    _calls(world)
    world.finish_unharmed(ids)


def _load(world: World, *, lasts: float = LONG) -> tuple[Process, Process]:
    """Start a client that schedules, and two workers; return the client and one of them."""
    world.work("third", slots=8, options=_QUIET)
    other = world.work("other", slots=8, options=_QUIET)
    return world.submit("steady", round(lasts * RATE), batch=BATCH, rate=RATE), other


def _faults(scheduler: Process) -> Iterator[int]:
    """Yield a number whenever it is time for the next fault, until all tasks are scheduled."""
    began_at = time.monotonic()
    for number in count():
        time.sleep(max(0.0, began_at + (number + 1) * EVERY - time.monotonic()))
        if not scheduler.is_alive or time.monotonic() - began_at > LONG:
            return
        yield number


def _until_drained(world: World, scheduler: Process, *, held: int) -> None:
    """Return once all tasks but those that are held have ended."""
    load = " ".join(f"{load:.1f}" for load in os.getloadavg())
    assert scheduler.popen.wait(300) == 0
    began_at = time.monotonic()
    wait_for(lambda: world.unfinished <= held, what="the end of all tasks", within=600)
    world.figures.append(f"load {load}, drained {time.monotonic() - began_at:.0f} s after the last schedule")


def _calls(world: World) -> float:
    """Report how long calls took; return the share of those that were accepted without a repeat."""
    asked, tries, waits = dict[str, float](), Counter[str](), dict[str, float]()
    for event in world.events():
        if isinstance(event, Asked):
            asked.setdefault(event.task, event.at)
            tries[event.task] += 1
        elif isinstance(event, Acknowledged):
            waits[event.asked] = event.at - asked[event.asked]
    share = sum(number == 1 for number in tries.values()) / len(tries)
    cuts = quantiles(waits.values(), n=1000)
    world.figures.append(
        f"{len(waits):,} of {len(tries):,} acknowledged, {share:.3%} at the first call; after {cuts[499]:.3f} s in the "
        f"median, {cuts[989]:.2f} s at p99, {max(waits.values()):.1f} s at most"
    )
    return share


def _dead_workers_leases(world: World) -> None:
    """Check that the tasks of killed workers were granted again soon after the ends of their leases, and report it.

    A task that is ready again waits for as long as those that were scheduled meanwhile: that is no delay.
    """
    lives = Lives(world.events())
    waits = sorted(
        (life.acknowledged[0].at, life.known[0].grant.at - life.acknowledged[0].at)
        for life in lives.tasks.values()
        if life.acknowledged and life.known
    )

    def delay(over_at: float, granted_at: float) -> float:
        beside = waits[bisect(waits, (over_at - 1, 0.0)) : bisect(waits, (over_at + 1, 0.0))]
        return granted_at - over_at - max([wait for _, wait in beside], default=0.0)

    delays = [
        delay(lease.surely_until(0), after.grant.at)
        for life in lives.tasks.values()
        for lease, after in pairwise(life.known)
        if lives.has_ended(lease.holder, after.grant.at)
    ]
    assert delays, "no killed worker held a lease"
    world.figures.append(
        f"{len(delays)} leases of dead workers: granted again at most {max(delays):.1f} s later than tasks that were "
        "scheduled at the ends of these leases"
    )
    assert max(delays) < SLACK


@scenario(23, "connections-cut", faults=("cut",), ttl=60, cycle=1, service="postgresql")
def connections_cut(world: World) -> None:
    """The connections to PostgreSQL that listen are cut, then all: tasks of one node reach a worker of another."""
    ids = world.held("first")
    world.work("other", embedded=True)
    for last_statement in ("LISTEN%", "%"):
        _cut(world, last_statement)
        world.until_ended(world.schedule("patient", 20, seconds=0.01))
        world.until_beaten(ids)
    world.finish_unharmed(ids)


@scenario(22, "row-locked", faults=("lock",), ttl=60, cycle=1, service="postgresql")
def row_locked(world: World) -> None:
    """The row of one lease is kept locked for ten seconds: all others are renewed, and no lease is lost."""
    ids = world.held("first", "second")
    with world.database.connect() as connection:
        connection.execute("SELECT FROM leasekit.trigger WHERE id = %s FOR UPDATE", (ids[0],))
        world.fault("lock", lasts=10)
        until = time.monotonic() + 10
        while time.monotonic() < until:
            began_at = time.monotonic()
            world.until_beaten(ids[1:])
            assert time.monotonic() - began_at < 5, "a locked row delays the heartbeats of others"
        connection.rollback()
    world.until_beaten(ids)
    world.finish_unharmed(ids)


@scenario(24, "embedded-nodes-killed", faults=("kill",), ttl=6, cycle=1, service="postgresql")
def embedded_nodes_killed(world: World) -> None:
    """kill -9, five times, of workers that open the database themselves: their tasks run again, no others do."""
    workers = [world.work(f"embedded-{number}", embedded=True) for number in range(3)]
    ids: list[str] = []
    for number in range(5):
        ids += world.schedule("steady", 24, seconds=1)
        wait_for(lambda: all(world.acting(worker) for worker in workers), what="handlers")
        workers.pop(0).kill()
        workers.append(world.work(f"later-{number}", embedded=True))
    world.until_ended(ids)


@scenario(24, "all-nodes-away", faults=("kill",), ttl=8, cycle=1, service="postgresql", restarts_extend=False)
def all_nodes_away(world: World) -> None:
    """The nodes are killed, and come back together after more than a ttl: leases are restarted once."""
    ids = world.held("first")
    for node in world.nodes:
        node.kill()
    wait_for(lambda: len(world.of(Lost)) >= len(ids), what="the loss of all leases")
    time.sleep(10)
    world.nodes = [world.serve_node(number, wait=False) for number in range(2)]
    world.finish(ids)


def _cut(world: World, last_statement: str = "%") -> None:
    """End the connections to PostgreSQL whose last statement was like this."""
    with world.database.connect() as connection:
        cut = connection.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
            " WHERE application_name = 'leasekit' AND query LIKE %s",
            (last_statement,),
        )
        assert cut.fetchone() != (0,), "there was no such connection"
    world.fault("cut", lasts=1)


def _until_more_is_acknowledged(world: World, scheduler: Process) -> None:
    known = len(world.of(Acknowledged))
    wait_for(lambda: not scheduler.is_alive or len(world.of(Acknowledged)) > known, what="commits")


def _kill_node(world: World, number: int) -> None:
    world.nodes[number].kill()
    world.nodes[number] = world.serve_node(number)


def _stop_node(world: World, dice: Random) -> None:
    node = world.nodes[dice.randrange(2)]
    node.pause()
    time.sleep(dice.uniform(0, 8))
    node.resume()


def _lock(world: World, dice: Random) -> None:
    """Lock rows of leases for a few seconds, as a user's own transaction may."""
    with world.database.connect() as connection:
        connection.execute(
            "SELECT FROM leasekit.trigger WHERE owner IS NOT NULL ORDER BY random() LIMIT 3 FOR UPDATE SKIP LOCKED"
        )
        world.fault("lock", lasts=4)
        time.sleep(dice.uniform(0, 4))
        connection.rollback()


def _storm(seed: int, world: World) -> None:
    dice = Random(seed)
    world.work("first")
    world.work("second", embedded=True)
    victim = world.work("third")

    def kill_node() -> None:
        _kill_node(world, dice.randrange(2))

    def kill_worker() -> None:
        nonlocal victim
        victim.kill()
        victim = world.work(f"third-{boottime():.0f}", embedded=dice.random() < 0.5)

    def restart_postgres() -> None:
        world.stop_postgres()
        world.start_postgres()

    stop_node, lock = partial(_stop_node, world, dice), partial(_lock, world, dice)
    faults: list[Callable[[], None]] = [kill_node, restart_postgres, stop_node, lock, partial(_cut, world), kill_worker]
    for number in range(12):
        scheduler = world.submit(dice.choice(("steady", "patient")), 20, seconds=dice.uniform(0, 0.1), batch=5)
        time.sleep(dice.uniform(0, 0.3))
        # Each fault once, then random ones.
        (faults[number] if number < len(faults) else dice.choice(faults))()
        assert scheduler.popen.wait(120) == 0


_FAULTS = ("kill", "immediate", "pause", "lock", "cut")
_WHAT = "Nodes killed and stopped, PostgreSQL restarted, rows locked, connections cut, dead workers: by chance, seed"
for _seed in (1, 2, 3):
    scenario(21, f"nodes-storm-{_seed}", what=f"{_WHAT} {_seed}.", faults=_FAULTS, ttl=8, service="postgresql")(
        partial(_storm, _seed)
    )
