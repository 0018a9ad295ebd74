"""Rows on PostgreSQL: two servers over one database, workers that know both, and workers that open it themselves."""

import time
from collections.abc import Callable
from functools import partial
from random import Random

from harness.chaos.processes import Process, wait_for
from harness.chaos.scenarios import scenario
from harness.chaos.world import World
from harness.history import Acknowledged, Lost, boottime


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

    def stop_node() -> None:
        node = world.nodes[dice.randrange(2)]
        node.pause()
        time.sleep(dice.uniform(0, 8))
        node.resume()

    def lock() -> None:
        with world.database.connect() as connection:
            connection.execute(
                "SELECT FROM leasekit.trigger WHERE owner IS NOT NULL ORDER BY random() LIMIT 3 FOR UPDATE SKIP LOCKED"
            )
            world.fault("lock", lasts=4)
            time.sleep(dice.uniform(0, 4))
            connection.rollback()

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
