"""Rows on Redis: the same workers and the same checker, and a redis-server instead of a leasekit server."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

import leasekit
from harness.chaos.processes import Process, wait_for
from harness.chaos.scenarios import scenario
from harness.chaos.world import PRIMARY, World
from harness.history import Acknowledged, Lost, boottime


@scenario(24, "redis-killed", faults=("kill",), ttl=4, service="redis")
def redis_killed(world: World) -> None:
    """kill -9 of Redis, five times, in the middle of writes: no acknowledged write is lost."""
    world.kill_while_scheduling(500)


@scenario(26, "redis-full", faults=("memory",), ttl=60, cycle=1, service="redis")
def redis_full(world: World) -> None:
    """Redis has no memory left for two seconds: new tasks wait, running ones end, no lease is lost."""
    world.work()
    ids = world.running()
    world.ask("CONFIG", "SET", "maxmemory", 1)
    world.fault("memory", lasts=2)
    scheduler = world.submit("steady", 20)
    world.until_beaten(ids)
    world.finish(ids)
    assert scheduler.is_alive, "a task was accepted without memory for it"
    world.ask("CONFIG", "SET", "maxmemory", 0)
    assert scheduler.popen.wait(120) == 0
    world.finish_unharmed(ids)
    assert not world.of(Lost)


@scenario(23, "redis-stalls", faults=("stall", "kill"), ttl=10, cycle=1, service="redis")
def redis_stalls(world: World) -> None:
    """Redis stands still again and again, so requests are late: the leases of a dead worker expire all the same."""
    victim = world.work("victim")
    ids = world.running(by=victim)
    other = world.work("other", slots=8)
    mine = world.running(count=2, by=other)
    victim.kill()
    until = time.monotonic() + 8 * world.ttl
    while not all(world.acting(other)[task_id] for task_id in ids):
        assert time.monotonic() < until, "the leases of a dead worker did not expire"
        world.fault("stall", lasts=3)
        world.ask("DEBUG", "SLEEP", 2.6)
        time.sleep(1)
    world.finish_unharmed(mine)
    world.until_ended(ids)


@scenario(22, "redis-foreign-key", faults=("foreign", "memory"), ttl=20, service="redis")
def redis_foreign_key(world: World) -> None:
    """A foreign key blocks the kind of most waiting successors: those of other kinds are scheduled, and run."""
    world.ask("SET", "leasekit:{patient}:state", "another program's")
    world.fault("foreign")
    world.schedule("steady")
    with leasekit.lease(next(iter(world.client.tasks("steady")))) as held:
        for _ in range(25):
            held.then("patient", {})
        for _ in range(5):
            held.then("steady", {"seconds": 0.01})
        world.ask("CONFIG", "SET", "maxmemory", 1)
        world.fault("memory")
    wait_for(lambda: world.ask("LLEN", "leasekit:{steady}:outbox") == 30, what="waiting successors")
    world.ask("CONFIG", "SET", "maxmemory", 0)
    world.work()
    _until_succeeded(world, "steady", 6)
    world.ask("DEL", "leasekit:{patient}:state")
    _until_succeeded(world, "patient", 25)


def _until_succeeded(world: World, kind: str, count: int) -> None:
    wait_for(lambda: world.client.stats().kinds.get(kind, {}).get("success") == count, what=f"the end of {kind}")


@scenario(24, "redis-failover", faults=("failover",), ttl=60, cycle=1, service="redis")
def redis_failover(world: World) -> None:
    """The address leads to a replica that has caught up; the old primary still answers: no lease is lost."""
    pair = Pair(world)
    ids = world.held("worker")
    pair.fail_over()
    world.until_beaten(ids)
    world.finish_unharmed(ids)


@scenario(24, "redis-stale-failover", faults=("failover", "rollback"), ttl=4, service="redis")
def redis_stale_failover(world: World) -> None:
    """A replica that is a second behind takes over: only the writes of that second are lost."""
    pair = Pair(world)
    world.work("first")
    world.work("second")
    world.schedule("steady", 200, seconds=0.02)
    world.until_ended(world.ids[:20])
    since = pair.go_stale()
    world.schedule("steady", 20)
    time.sleep(1)
    pair.fail_over(stale_since=since)
    world.schedule("steady", 20)


@scenario(24, "redis-failback", faults=("failover", "rollback"), ttl=6, cycle=1, service="redis")
def redis_failback(world: World) -> None:
    """A former primary takes over again, without news for longer than a ttl: no lease is lost."""
    pair = Pair(world)
    ids = world.held("first", "second")
    pair.fail_over()
    world.until_beaten(ids)
    since = pair.go_stale()
    time.sleep(world.ttl + 1)
    world.until_beaten(ids)
    pair.fail_over(stale_since=since)
    world.until_beaten(ids)
    world.finish_unharmed(ids)
    world.schedule("steady", 20)
    world.until_ended()
    assert not world.of(Lost)


@scenario(24, "redis-forgets", faults=("kill", "rollback"), ttl=4, service="redis", serve=False)
def redis_forgets(world: World) -> None:
    """kill -9 of a Redis that keeps nothing on the disk: all is lost, and later writes are kept."""
    forgetful = ("--appendonly", "no")
    redis = world.redis("redis", *forgetful)
    world.work("first")
    second = world.work("second")
    since = boottime()
    world.schedule("steady", 100, seconds=0.05)
    world.until_ended(world.ids[:10])
    redis.kill()
    world.redis("redis", *forgetful)
    world.roll_back(since)
    assert not world.ids, "Redis has kept writes without persistence"
    world.schedule("steady", 40, seconds=0.02)
    held = world.schedule("patient", 8, until="finish")
    world.until_acting(second)
    world.until_running(held[:4])
    second.kill()
    world.finish()


@scenario(24, "redis-sentinels", faults=("pause",), ttl=20, cycle=1, service="redis+sentinel")
def redis_sentinels(world: World) -> None:
    """The primary stands still until a Sentinel has replaced it, and goes on then: what it answers counts for nothing.

    It takes itself for the primary for some seconds more. No acknowledged write and no lease is lost.
    """
    watched = _Watched(world)
    ids = world.held("first", "second")
    for _ in range(3):
        scheduler = world.submit("steady", 100, seconds=0.01, rate=20)
        known = len(world.of(Acknowledged))
        wait_for(lambda: len(world.of(Acknowledged)) > known, what="accepted tasks")  # noqa: B023
        watched.replace_primary()
        world.until_beaten(ids)
        assert scheduler.popen.wait(120) == 0
    world.finish_unharmed(ids)
    world.until_ended()
    assert not world.of(Lost)


HOUR = 3600.0


@scenario(11, "redis-clock-jumps", faults=("clock", "cut"), ttl=20, cycle=1, service="redis")
def redis_clock_jumps(world: World) -> None:
    """Redis's clock goes an hour ahead while a holder is cut off: its task is not granted early, no lease is lost."""
    first, ids = _cut_off(world)
    mine = world.running(count=2, by=first)
    world.set_redis_clock(HOUR)
    world.until_beaten(mine)
    world.until_running(ids, by=first)
    world.finish_unharmed(mine)
    world.until_ended(ids)
    assert all(info.history[-1].at.timestamp() - time.time() > HOUR / 2 for info in world.infos(mine))


@scenario(11, "redis-clock-creeps", faults=("clock", "cut"), ttl=20, cycle=1, service="redis")
def redis_clock_creeps(world: World) -> None:
    """Redis's clock goes ahead in small steps while a holder is cut off: its task is not granted early."""
    second, ids = _cut_off(world)
    for step in range(1, 40):
        world.set_redis_clock(0.3 * step)
        time.sleep(0.4)
    world.until_running(ids, by=second)
    world.finish(ids)


@scenario(11, "redis-clock-set-back", faults=("clock",), ttl=6, cycle=1, service="redis")
def redis_clock_set_back(world: World) -> None:
    """Redis's clock goes an hour ahead and back again: no lease is lost."""
    ids = world.held("worker")
    for shift in (HOUR, 0.0):
        world.set_redis_clock(shift)
        world.until_beaten(ids)
        world.until_beaten(ids)
    world.finish_unharmed(ids)


def _cut_off(world: World) -> tuple[Process, list[str]]:
    """Cut one worker off; return another one, which has seen the service's clock, and the tasks of the first."""
    world.work("cut-off")
    ids = world.schedule("steady", 2, until="finish")
    world.until_beaten(ids)
    world.proxy.cut()
    world.fault("cut", lasts=world.ttl)
    world.client.close()
    world.client = world.connect(world.past_proxy)
    other = world.work("other", past_proxy=True)
    told = world.running("steady", 1, seconds=0.1, by=other)
    world.until_ended(told)
    return other, ids


class Pair:
    """A primary and its replica, behind one address; each failover swaps the two."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._primary, self._primary_port = world.server, world.port
        self._replica_port = world.spare_port()
        self._replica = world.redis(
            "replica", "--replicaof", "127.0.0.1", str(self._primary_port), port=self._replica_port
        )
        wait_for(self._has_caught_up, what="a replica that follows")

    def _has_caught_up(self) -> bool:
        return _has_caught_up(self._world, self._primary_port, self._replica_port)

    def go_stale(self) -> float:
        since = boottime()
        self._world.ask("REPLICAOF", "127.0.0.1", 1, port=self._replica_port)
        return since

    def kill(self) -> None:
        self._primary.kill()
        self._primary = self._world.redis(self._primary.name, port=self._primary_port)
        self._world.server = self._primary

    def fail_over(self, *, stale_since: float | None = None) -> None:
        """Swap primary and replica; connections to the old primary stay open."""
        world = self._world
        if stale_since is None:
            # Without the pause the last writes would be lost.
            world.ask("CLIENT", "PAUSE", 600_000, "WRITE", port=self._primary_port)
            wait_for(self._has_caught_up, what="a replica that has caught up")
        world.ask("REPLICAOF", "NO", "ONE", port=self._replica_port)
        world.ask("REPLICAOF", "127.0.0.1", self._replica_port, port=self._primary_port)
        world.proxy.move(f"tcp://127.0.0.1:{self._replica_port}")
        world.ask("CLIENT", "UNPAUSE", port=self._primary_port)
        world.fault("failover")
        if stale_since is not None:
            world.roll_back(stale_since)
        self._primary, self._replica = self._replica, self._primary
        self._primary_port, self._replica_port = self._replica_port, self._primary_port
        world.server, world.port = self._primary, self._primary_port
        wait_for(self._has_caught_up, what="a replica that follows")


def _has_caught_up(world: World, primary_port: int, replica_port: int) -> bool:
    offset = world.ask("ROLE", port=primary_port)[1]
    role = world.ask("ROLE", port=replica_port)
    return bool(role[0] == b"slave" and role[3] == b"connected" and role[4] >= offset)


_HEARD = 3.0  # seconds after which no client believes what a replaced primary answers


class _Watched:
    """A primary and its replica, which a Sentinel watches."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._primary, self._replica_port = world.server, world.spare_port()
        self._replica = world.redis("replica", "--replicaof", "127.0.0.1", str(world.port), port=self._replica_port)
        world.sentinel()
        self._until_followed()

    def _until_followed(self) -> None:
        wait_for(self._is_followed, what="a replica that follows, and that the Sentinel knows")

    def _is_followed(self) -> bool:
        role, sentinel = self._world.ask("ROLE", port=self._replica_port), self._world.sentinel_port
        replicas = self._world.ask("SENTINEL", "REPLICAS", PRIMARY, port=sentinel)
        return role[0] == b"slave" and role[3] == b"connected" and any(map(self._is_ready, replicas))

    def _is_ready(self, replica: Sequence[bytes]) -> bool:
        told = dict(zip(replica[::2], replica[1::2], strict=True))
        return int(told[b"port"]) == self._replica_port and told[b"flags"] == b"slave"

    def _is_replaced(self) -> bool:
        named = self._world.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", PRIMARY, port=self._world.sentinel_port)
        return int(named[1]) == self._replica_port

    def replace_primary(self) -> None:
        """Stop the primary until each client knows that the Sentinel names another one, and let it continue."""
        world = self._world
        # Redis may answer a client before it sends a write to its replicas: a stop in between would lose the write.
        world.ask("CLIENT", "PAUSE", 600_000, "WRITE", port=world.port)
        wait_for(lambda: _has_caught_up(world, world.port, self._replica_port), what="a replica that has caught up")
        self._primary.pause()
        wait_for(self._is_replaced, what="a new primary")
        time.sleep(_HEARD)
        self._primary.resume()
        world.ask("CLIENT", "UNPAUSE", port=world.port)
        self._primary, self._replica = self._replica, self._primary
        world.port, self._replica_port = self._replica_port, world.port
        world.server = self._primary
        self._until_followed()


def _lose_answers(world: World, dice: Random) -> None:
    world.proxy.hang("answers")
    world.fault("hang", lasts=1)
    time.sleep(dice.uniform(0, 0.5))
    world.proxy.reset()
    world.proxy.mend()


def _cut(world: World, dice: Random) -> None:
    world.proxy.cut()
    world.fault("cut", lasts=1)
    time.sleep(dice.uniform(0, 0.5))
    world.proxy.mend()


def _fill(world: World, dice: Random) -> None:
    world.ask("CONFIG", "SET", "maxmemory", 1)
    world.fault("memory", lasts=1)
    time.sleep(dice.uniform(0, 0.5))
    world.ask("CONFIG", "SET", "maxmemory", 0)


def _step(world: World, dice: Random) -> None:
    # A step within the margin of a lease: a client that has just started cannot notice it.
    world.set_redis_clock(dice.uniform(-0.2, 0.2))


def _storm(seed: int, world: World) -> None:
    dice = Random(seed)
    pair = Pair(world)
    world.work("first")
    world.work("second")
    victim = world.work("third")
    kinds = ("steady", "patient")

    def kill_worker() -> None:
        nonlocal victim
        victim.kill()
        victim = world.work(f"third-{boottime():.0f}")

    lose_answers, cut, fill, step = (partial(fault, world, dice) for fault in (_lose_answers, _cut, _fill, _step))
    faults: list[Callable[[], object]]
    faults = [lose_answers, lose_answers, cut, fill, pair.fail_over, kill_worker, pair.kill, step]
    for number in range(14):
        scheduler = world.submit(dice.choice(kinds), 20, seconds=dice.uniform(0, 0.1), batch=5)
        time.sleep(dice.uniform(0, 0.3))
        # Each fault once, then random ones.
        (faults[number % len(faults)] if number < len(faults) else dice.choice(faults))()
        assert scheduler.popen.wait(120) == 0


_FAULTS = ("hang", "cut", "memory", "failover", "clock", "kill")
_WHAT = "Answers lost, lines cut, memory full, failovers, clock steps, dead workers and Redis: by chance, seed"
for _seed in (1, 2, 3):
    scenario(21, f"redis-storm-{_seed}", what=f"{_WHAT} {_seed}.", faults=_FAULTS, ttl=6, service="redis")(
        partial(_storm, _seed)
    )
