"""Rows about the server, its store, and clocks."""

import resource
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from harness.chaos.processes import Process, wait_for
from harness.chaos.scenarios import scenario
from harness.chaos.world import Clock, World
from harness.history import Lost
from leasekit import Status

HOUR = 3600.0


@scenario(10, "worker-clock-steps", faults=("clock",), ttl=10, cycle=1)
def worker_clock_steps(world: World) -> None:
    """The wall clock of a worker goes an hour ahead, and two back: no lease is lost."""
    clock = Clock(world.home, "worker")
    world.work(environment=clock.environment)
    _step_clock(world, clock)


@scenario(11, "server-clock-steps", faults=("clock",), ttl=10, cycle=1, serve=False)
def server_clock_steps(world: World) -> None:
    """The wall clock of the server goes an hour ahead, and two back: no lease is lost."""
    clock = Clock(world.home, "server")
    world.serve(clock.environment)
    world.work()
    _step_clock(world, clock)


@scenario(11, "server-clock-creeps", faults=("clock", "cut"), ttl=10, serve=False)
def server_clock_creeps(world: World) -> None:
    """The server's wall clock goes ahead in small steps while a holder is cut off: its task is not granted early."""
    clock = Clock(world.home, "server")
    world.serve(clock.environment)
    world.work("first")
    ids = world.schedule("steady", 2, until="finish")
    world.until_beaten(ids)
    world.proxy.cut()
    world.fault("cut", lasts=world.ttl)
    second = world.work("second", past_proxy=True)
    for step in range(1, 40):
        clock.set(0.3 * step)
        time.sleep(0.4)
    world.fault("clock")
    world.until_running(ids, by=second)
    world.finish(ids)


def _step_clock(world: World, clock: Clock) -> None:
    """Set the clock an hour ahead, then two back, while tasks run; each keeps its lease, and runs once."""
    ids = world.running()
    for shift in (HOUR, -HOUR):
        clock.set(shift)
        world.fault("clock")
        world.until_beaten(ids)
        world.until_beaten(ids)
    world.finish_unharmed(ids)
    info = world.info(ids[0])
    # The server's time never goes back; the worker's handler has returned its wall clock.
    shown = info.history[-1].at.timestamp() if clock.name == "server" else info.result["time"]
    assert abs(shown - time.time()) > HOUR / 2, "the clock was not set"


@scenario(24, "server-killed", faults=("kill",), ttl=4)
def server_killed(world: World) -> None:
    """kill -9 of the server, five times, in the middle of commits: no acknowledged write is lost."""
    world.kill_while_scheduling(1000)
    with sqlite3.connect(world.home / "tasks.db") as connection:
        assert connection.execute("PRAGMA quick_check").fetchone() == ("ok",)
    connection.close()


@scenario(24, "server-away", faults=("kill",), ttl=60, cycle=1)
def server_away(world: World) -> None:
    """The server is gone for two seconds while handlers run: no lease is lost, no task runs twice."""
    ids = world.held("worker")
    world.server.kill()
    world.fault("outage", lasts=3)
    time.sleep(2)
    world.serve()
    world.finish_unharmed(ids)


@scenario(26, "disk-refuses", faults=("file-size",), ttl=60, cycle=1)
def disk_refuses(world: World) -> None:
    """Writes to the store fail for a while: no write is acknowledged without being kept."""
    server = world.server
    ids = world.held("worker")
    unlimited = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1, unlimited[1]))
    world.fault("file-size", lasts=2)
    with world.connect(f"http://127.0.0.1:{world.port}") as client, ThreadPoolExecutor(1) as thread:
        request = thread.submit(client.schedule, "steady", {"seconds": 0.0}, id="refused")
        wait_for(lambda: _ready(world) == 503, what="a server that is not ready")
        time.sleep(2)
        assert not request.done() or request.exception() is not None, "an unwritten task was acknowledged"
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, unlimited)
        request.exception(60)
    world.finish_unharmed(ids)
    assert server.is_alive
    assert _ready(world) == 200
    world.schedule("steady", 4)


def _ready(world: World) -> int:
    return httpx.get(f"http://127.0.0.1:{world.port}/readyz", timeout=60, trust_env=False).status_code


@scenario(28, "store-locked", faults=("lock",), ttl=60, cycle=1)
def store_locked(world: World) -> None:
    """Another program locks the store for two seconds: writes wait or are refused, no lease is lost."""
    ids = world.held("worker")
    other = sqlite3.connect(world.home / "tasks.db", isolation_level=None, timeout=30)
    other.execute("BEGIN IMMEDIATE")
    world.fault("lock", lasts=2)
    time.sleep(2)
    other.execute("ROLLBACK")
    other.close()
    world.finish_unharmed(ids)


@scenario(29, "store-damaged", faults=("damage",))
def store_damaged(world: World) -> None:
    """The store's file is damaged while the server is down: the server refuses to start, and says why."""
    world.schedule("steady", 200)
    assert world.server.stop() == 0
    path = world.home / "tasks.db"
    whole = path.read_bytes()
    path.write_bytes(b"SQLite format 3\0" + b"\xff" * 4096 + whole[4112:])
    world.fault("damage")
    broken = world.intrude("broken")
    assert broken.popen.wait(60) != 0, "it started on a damaged store"
    assert "store" in broken.said, broken.said[-2000:]
    path.write_bytes(whole)
    world.serve()
    world.work()


@scenario(29, "store-lost", faults=("loss",))
def store_lost(world: World) -> None:
    """After kill -9, the log is missing, then the file is empty: the server refuses to start."""
    ids = world.schedule("steady", 200)
    world.server.kill()
    path, log = world.home / "tasks.db", world.home / "tasks.db-wal"
    whole = {file: file.read_bytes() for file in (path, log)}
    for loss, says in ((log.unlink, "lost its last"), (lambda: path.write_bytes(b""), "empty or missing")):
        loss()
        world.fault("loss")
        broken = world.intrude("broken")
        assert broken.popen.wait(60) == 65, broken.said[-2000:]
        assert says in broken.said, broken.said[-2000:]
        for file, data in whole.items():
            file.write_bytes(data)
        path.with_name("tasks.db-shm").unlink(missing_ok=True)
    world.serve()
    assert len(world.infos(ids)) == 200
    world.work()


@scenario(34, "two-servers", faults=("second", "pause"), ttl=4)
def two_servers(world: World) -> None:
    """A second server on the same store, by any of its names, also while the first stands still: it is refused."""
    server = world.server
    world.work()
    world.schedule("steady", 8, seconds=0.5)
    _refused(world, "second")
    (world.home / "link.db").symlink_to("tasks.db")
    _refused(world, "by a symbolic link", store="link.db")
    (world.home / "second.db").hardlink_to(world.home / "tasks.db")
    _refused(world, "by a hard link", store="second.db", says="hard links")
    (world.home / "second.db").unlink()
    (world.home / "tasks.db.id").unlink()
    _refused(world, "without what is beside it")
    server.pause()
    _refused(world, "third")
    server.resume()


def _refused(world: World, name: str, *, store: str = "tasks.db", says: str = "another process") -> None:
    second = world.intrude(name, store=store)
    assert second.popen.wait(60) == 1, second.said[-2000:]
    assert says in second.said, second.said[-2000:]
    world.fault("second")


@scenario(34, "server-stopped", faults=("pause",), ttl=4, start_within=20)
def server_stopped(world: World) -> None:
    """The server stands still for two ttls: workers end their handlers in time, and lost tasks run again."""
    server = world.server
    ids = world.held("first", "second")
    server.pause()
    wait_for(lambda: len(world.of(Lost)) >= len(ids), what="the loss of all leases")
    time.sleep(world.ttl)
    server.resume()
    world.finish(ids)
    assert {info.status for info in world.infos(ids)} == {Status.SUCCESS}


@scenario(32, "herd", faults=("kill",), ttl=6)
def herd(world: World) -> None:
    """Two hundred clients come back at once after a restart of the server: all of them are served."""
    with ThreadPoolExecutor(8) as threads:

        def schedule(number: int) -> None:
            with world.connect(world.proxy.url) as client:
                client.schedule("steady", {"seconds": 0.0}, id=f"herd-{number}", claim_timeout=6, heartbeat_timeout=6)

        futures = [threads.submit(schedule, number) for number in range(200)]
        wait_for(lambda: sum(future.done() for future in futures) > 20, what="the first clients")
        world.server.kill()
        world.serve()
        for future in futures:
            future.result(60)
    world.work()
    wait_for(lambda: world.client.stats().kinds["steady"].get("success") == 200, what="all tasks")


@scenario(24, "shared-file-owner-killed", faults=("kill",), ttl=6, cycle=1, service="sqlite")
def shared_file_owner_killed(world: World) -> None:
    """kill -9, five times, of the worker that serves a file to the others: another one serves, and no lease is lost."""
    workers = [world.work("first")]
    wait_for((world.home / "tasks.db.sock").exists, what="the first to serve")
    workers += [world.work("second"), world.work("third")]
    ids: list[str] = []
    for number in range(5):
        owner = _owner(world, workers)
        ids += world.schedule("steady", 24, seconds=1)
        wait_for(lambda: any(map(world.acting, workers)), what="handlers")
        owner.kill()
        workers.remove(owner)
        workers.append(world.work(f"later-{number}"))
    _owner(world, workers)
    world.until_ended(ids)


def _owner(world: World, workers: list[Process]) -> Process:
    """Return the worker that serves the file, once one does; this process makes no request meanwhile."""
    note = world.home / "tasks.db.id"

    def owner() -> Process | None:
        return next((worker for worker in workers if worker.pid == int(note.read_text().split()[-1])), None)

    wait_for(owner, what="a worker to serve")
    found = owner()
    assert found is not None
    return found
