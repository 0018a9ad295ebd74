"""Rows about processes: killed, stopped, blocked, starved; and what handlers do to their processes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from harness.chaos.processes import Process, wait_for
from harness.chaos.scenarios import scenario
from harness.chaos.world import World
from harness.history import Fault, Granted, Renewed, SettleAsked, Stopped
from leasekit import Status
from leasekit._lifecycle.states import LEASED
from leasekit._worker.signals import LOST_EXIT_CODE
from leasekit.config import DRIFT

KILLED = -signal.SIGKILL


@scenario(1, "worker-killed", faults=("kill",), start_within=20)
def worker_killed(world: World) -> None:
    """kill -9 of a worker: its tasks run elsewhere after their ttl, not before."""
    first = world.work("first")
    ids = world.schedule("steady", 8, until="finish")
    wait_for(lambda: len(world.acting(first)) == first.slots, what="handlers in all slots")
    world.until_beaten(list(world.acting(first)))
    world.work("second")
    first.kill()
    world.finish(ids)
    _waited_for_their_ttl(world)


def _waited_for_their_ttl(world: World) -> None:
    """Check that each task of a worker without a supervisor was granted again only after its ttl."""
    held_until = {
        (event.task, event.fence): event.asked_at + world.ttl * (1 - DRIFT)
        for event in world.events()  # by time: the last event counts
        if isinstance(event, Granted | Renewed)
    }
    again = [grant for grant in world.of(Granted) if grant.fence > 1]
    assert again, "no task was granted again"
    early = [grant for grant in again if grant.at < held_until[grant.task, grant.fence - 1]]
    assert not early, f"granted before the ttl had passed: {early[:3]}"


@scenario(1, "supervised-killed", faults=("kill",), ttl=20, start_within=30)
def supervised_killed(world: World) -> None:
    """kill -9 of a supervised worker: its tasks are handed back, and run again long before their ttl."""
    first = world.work("first", supervised=True)
    ids = world.running("deaf", 4, seconds=60, effects=20)
    since = time.monotonic()
    first.kill_child()
    world.until_ended(ids)
    assert time.monotonic() - since < world.ttl, "the tasks waited for their ttl"
    assert [info.crashes for info in world.infos(ids)] == [1] * 4


@scenario(1, "supervisor-killed", faults=("kill",), start_within=20)
def supervisor_killed(world: World) -> None:
    """kill -9 of the supervisor alone: the kernel ends its worker, and the tasks wait for their ttl."""
    first = world.work("first", supervised=True)
    world.running("deaf", 4, seconds=60, effects=20)
    (child,) = first.children
    first.kill()
    wait_for(lambda: not Path(f"/proc/{child}").exists(), what="the end of the worker", within=10)
    world.work("second")


@scenario(1, "spool-shared", faults=("kill", "server-down"), ttl=60, start_within=60)
def spool_shared(world: World) -> None:
    """Two workers share a spool, finish all tasks while the server is away, and are killed: no task runs twice.

    The spool also has a file of a later version, with a damaged line, and a pipe of such a name.
    """
    rng = random.Random(1)
    workers = [world.work(name, supervised=True, options=["--spool", "spool"]) for name in ("first", "second")]
    for number in range(_ROUNDS):
        ids = world.schedule("steady", 2 * workers[0].slots, until=f"finish-{number}")
        world.until_running(ids)
        world.server.kill("server-down")
        world.finish(name=f"finish-{number}")
        _until_kept(world.home / "spool", set(ids))
        if number == 0:
            _add_strange_files(world.home / "spool")
        rng.shuffle(workers)
        for supervisor in workers:
            supervisor.kill_child()
            time.sleep(rng.choice([0.0, 0.0, 0.05, 0.5]))
        time.sleep(rng.choice([0.0, 0.5, 7.0]))  # the last is longer than a supervisor waits for its service
        world.serve()
        world.until_ended(ids)
        assert [(info.attempt, info.crashes) for info in world.infos(ids)] == [(1, 0)] * len(ids), f"round {number}"
        wait_for(lambda: all(supervisor.children for supervisor in workers), what="workers")
    (aside,) = (world.home / "spool").glob("*.strange.jsonl.*.unread")
    assert aside.read_bytes() == _STRANGE


_ROUNDS = 5
_STRANGE = b'{"kept":{"id":"x","token":"t","outcome":"success","mood":"of a later version"}}\n{"kept":{"id"\n'


def _add_strange_files(spool: Path) -> None:
    key = next(spool.glob("*.jsonl")).name.partition(".")[0]
    (spool / f"{key}.strange.jsonl").write_bytes(_STRANGE)
    os.mkfifo(spool / f"{key}.pipe.jsonl")


def _until_kept(spool: Path, ids: set[str]) -> None:
    def kept() -> set[str]:
        lines = [line for path in spool.glob("*-*.jsonl") for line in path.read_bytes().splitlines(keepends=True)]
        entries = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return {entry["kept"]["id"] for entry in entries if "kept" in entry}

    wait_for(lambda: kept() >= ids, what="all results in the spool")


@scenario(2, "worker-stopped", faults=("pause", "death"), start_within=20)
def worker_stopped(world: World) -> None:
    """SIGSTOP for longer than the ttl: the worker is killed before its trust ends, while it is stopped."""
    first = world.work("first", slots=2)
    world.running("deaf", 2, seconds=30, by=first, effects=20)
    first.pause()
    world.work("second")
    assert _died(world, first) == KILLED, "it ended otherwise"


@scenario(4, "gil-held-unguarded", faults=("gil",), ttl=2, breaks="S2")
def gil_held_unguarded(world: World) -> None:
    """C code holds the GIL without a kernel timer: two runs act at once. The checker must report that."""
    first = world.work("first", slots=1, guarded=False)
    ids = world.running("gil", 1, seconds=3 * world.ttl, by=first)
    world.fault("gil", target=first.who)
    world.work("second")
    world.until_ended(ids)
    assert first.is_alive


def _held_up(kind: str, masked: bool, world: World) -> None:  # noqa: FBT001 - a column of the table below
    first = world.work("first", slots=1, masked=masked)
    world.running(kind, 1, seconds=3 * world.ttl, by=first)
    world.fault("gil", target=first.who)
    assert _died(world, first) == KILLED, f"it ended otherwise: {first.said[-2000:]}"
    world.work("second")


for _row, _name, _kind, _masked, _what in (
    (4, "gil-held", "gil", False, "C code holds the GIL for 3 ttls: the kernel ends the process when its trust ends."),
    (4, "regex-backtracks", "regex", False, "A regex backtracks for minutes: the kernel ends the process in time."),
    (6, "signals-masked", "gil", True, "All signals are masked, SIGALRM has a handler: the kernel's timer works."),
):
    scenario(_row, _name, what=_what, faults=("gil", "death"), start_within=20)(partial(_held_up, _kind, _masked))


def _died(world: World, process: Process) -> int:
    wait_for(lambda: not process.is_alive, what=f"{process.name} to end")
    world.fault("death", target=process.who)
    return int(process.popen.returncode)


@scenario(5, "loop-blocked", faults=("block",), ttl=4, cycle=1)
def loop_blocked(world: World) -> None:
    """A handler blocks its event loop for longer than the ttl: beats go on, nothing is lost."""
    world.work()
    (blocked,) = world.running("blocks", 1, seconds=1.5 * world.ttl)
    world.fault("block", lasts=1.5 * world.ttl)
    world.schedule("steady", 4, seconds=0.2)
    wait_for(lambda: world.info(blocked).status.ended, what="the end of the blocked handler")
    assert world.info(blocked).attempt == 1, "it was lost"


@scenario(6, "signals-in-blocks", faults=("interrupt",), ttl=6)
def signals_in_blocks(world: World) -> None:
    """Signal handlers raise while blocks are entered and left: other heartbeats go on, and no lease is left over."""
    kept, brief = world.schedule("kept"), world.schedule("steady", 2 * _BLOCKS)
    process = world.interrupt(_BLOCKS)
    wait_for(lambda: "interrupted " in process.said or not process.is_alive, what="the end of all blocks")
    times = int(process.said.rpartition("interrupted ")[2].split()[0])
    assert times > _BLOCKS / 10, process.said[-2000:]
    world.fault("interrupt", target=process.who)
    world.figures.append(f"{times} of {_BLOCKS} blocks interrupted")
    wait_for(lambda: not _held(world, brief), what="the end of their leases", within=5 * world.ttl)
    world.until_beaten(kept)
    world.work()
    world.finish([*kept, *brief])
    assert [(info.status, info.attempt) for info in world.infos(kept)] == [(Status.SUCCESS, 1)]


_BLOCKS = 500


def _held(world: World, ids: list[str]) -> list[str]:
    return [info.id for info in world.all_tasks() if info.id in ids and info.status in LEASED]


@scenario(7, "cpu-starved", faults=("hogs",), ttl=4, alone=True)
def cpu_starved(world: World) -> None:
    """Eight hogs on the processor for two ttls: beats may be late, no handler runs too long."""
    world.work("first")
    world.work("second")
    world.schedule("steady", 16, seconds=1.0)
    world.schedule("patient", 16, seconds=1.0)
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    try:
        world.fault("hogs", lasts=2 * world.ttl)
        time.sleep(2 * world.ttl)
        assert all(hog.poll() is None for hog in hogs)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


@scenario(8, "memory-full", faults=("memory",), start_within=30)
def memory_full(world: World) -> None:
    """A handler takes all memory that its process may have, and keeps it: no task has two runs at once."""
    first = world.work("first", slots=2)
    world.running("hungry", 1, seconds=world.ttl, max_crashes=10, by=first)
    wait_for(lambda: any(fault.name == "memory" for fault in world.of(Fault)), what="full memory")
    world.schedule("steady", 8, seconds=0.2)
    world.work("second")


@scenario(33, "poison-pill", faults=("death",), start_within=30)
def poison_pill(world: World) -> None:
    """A task kills every worker that runs it: it is dead after its crashes, and other tasks succeed."""
    (pill,) = world.schedule("poison", always=True, max_crashes=2)
    others = world.schedule("steady", 8, seconds=0.1)
    worker = world.work()
    while not world.info(pill).status.ended:
        if not worker.is_alive:
            assert _died(world, worker) == KILLED
            worker = world.work()
        time.sleep(0.05)
    info = world.info(pill)
    assert (info.status, info.crashes) == (Status.DEAD, 3), f"it is {info.status} after {info.crashes} crashes"
    wait_for(lambda: all(info.status is Status.SUCCESS for info in world.infos(others)), what="the other tasks")


@scenario(35, "asked-to-stop", faults=("SIGTERM", "SIGINT"), ttl=6, start_within=20)
def asked_to_stop(world: World) -> None:
    """SIGTERM and SIGINT at any moment: handlers end and are reported, others are released at once, exit code 0."""
    ids = world.schedule("steady", 60, seconds=0.3)
    for number, after in ((signal.SIGTERM, 0.0), (signal.SIGINT, 0.25), (signal.SIGTERM, 0.7)):
        worker = world.work(f"worker-{number.name}-{after}")
        world.until_acting(worker)
        time.sleep(after)
        world.fault(number.name, target=worker.who)
        assert worker.stop(number) == 0, worker.said[-2000:]
    world.work("last")
    world.until_ended(ids)
    assert all((info.crashes, info.attempt) == (0, 1) for info in world.infos(ids)), "a task ran twice"


@scenario(35, "asked-to-stop-twice", faults=("SIGTERM",), start_within=20)
def asked_to_stop_twice(world: World) -> None:
    """A second SIGTERM ends the process at once; what it held runs elsewhere."""
    first = world.work("first")
    world.running("deaf", 4, seconds=30, by=first)
    while first.is_alive:
        first.send(signal.SIGTERM)
        time.sleep(0.2)
    world.fault("SIGTERM", target=first.who)
    assert first.popen.returncode == 128 + signal.SIGTERM, first.popen.returncode
    world.work("second")


@scenario(14, "thread-of-a-lost-lease", faults=("hang", "death"), start_within=20)
def thread_of_a_lost_lease(world: World) -> None:
    """No beat is answered while a coroutine awaits a thread: the process ends before the trust in its lease does."""
    first = world.work("first", slots=1)
    world.running("threads", 1, seconds=10 * world.ttl, by=first)
    world.proxy.hang()
    assert _died(world, first) == LOST_EXIT_CODE, f"it ended otherwise: {first.said[-2000:]}"
    world.proxy.mend()
    world.work("second")


@scenario(35, "stopped-over-a-thread", faults=("SIGTERM",), ttl=20, start_within=30)
def stopped_over_a_thread(world: World) -> None:
    """SIGTERM while a coroutine awaits a thread: its task is released when the thread has ended, not before."""
    first = world.work("first", options=["--drain-grace", "0.2"])
    ids = world.running("threads", 4, seconds=10, by=first)
    world.work("second")
    world.fault("SIGTERM", target=first.who)
    assert first.stop() == 0, first.said[-2000:]
    world.until_ended(ids)
    assert [info.crashes for info in world.infos(ids)] == [0] * 4


@scenario(35, "ended-over-a-thread", faults=("SIGTERM",), ttl=20, start_within=30)
def ended_over_a_thread(world: World) -> None:
    """SIGTERM over a thread that does not end: the process ends, and its supervisor hands the tasks back after that."""
    first = world.work("first", supervised=True, options=["--drain-grace", "0.2", "--drain-timeout", "1"])
    ids = world.running("threads", 4, seconds=60)
    world.work("second")
    world.fault("SIGTERM", target=first.who)
    assert first.stop() == 128 + signal.SIGTERM, first.said[-2000:]
    world.until_ended(ids)
    assert [info.crashes for info in world.infos(ids)] == [0] * 4


@scenario(35, "cancelled-over-a-thread", faults=("cancel",))
def cancelled_over_a_thread(world: World) -> None:
    """A task is cancelled while its coroutine awaits a thread: it is settled when the thread has ended."""
    world.work()
    (task,) = world.running("threads", 1, seconds=2 * world.ttl)
    world.client.cancel(task)
    world.fault("cancel")
    world.until_ended([task])
    wait_for(lambda: world.of(Stopped), what="the end of the thread")
    (settled,) = world.of(SettleAsked)
    (stopped,) = world.of(Stopped)
    assert stopped.at <= settled.at, f"its handler went on for {stopped.at - settled.at:g} s"
    assert world.info(task).status is Status.CANCELLED


@scenario(5, "idle-over-a-thread", faults=("idle", "death"), start_within=20)
def idle_over_a_thread(world: World) -> None:
    """A coroutine is idle for too long over a thread that does not end: the process ends, then the task is retried."""
    first = world.work("first")
    world.running("idles", 1, seconds=60, by=first)
    world.work("second")
    assert _died(world, first) == LOST_EXIT_CODE, f"it ended otherwise: {first.said[-2000:]}"
    world.fault("idle")


@scenario(36, "fork", faults=("fork",), ttl=4)
def forked(world: World) -> None:
    """A handler forks, and the child returns from it: the child settles nothing, and is no second worker."""
    world.work()
    ids = world.schedule("forks", 3)
    wait_for(lambda: all(info.status.ended for info in world.infos(ids)), what="the handlers")
    world.fault("fork")
    assert [(info.status, info.result, info.attempt) for info in world.infos(ids)] == [(Status.SUCCESS, 0, 1)] * 3


@scenario(36, "exec", faults=("exec",), start_within=20)
def execed(world: World) -> None:
    """A handler becomes another program: the lease has no holder any more, and the task runs elsewhere."""
    first = world.work("first", slots=1)
    world.running("execs", 1, seconds=2 * world.ttl, by=first)
    wait_for(lambda: b"leasekit" not in _command(first.pid), what="the other program")
    world.fault("exec", target=first.who)
    world.work("second")


@scenario(36, "child-survives", faults=("kill",), start_within=20)
def child_survives(world: World) -> None:
    """A child in a session of its own survives its worker: it holds no lease, and its task runs elsewhere."""
    first = world.work("first", slots=1)
    world.running("spawns", 1, seconds=1.5 * world.ttl, by=first)
    note = world.home / "child-of-1"
    wait_for(lambda: note.exists() and note.read_text(), what="its child")
    child = int(note.read_text())
    first.kill()
    world.work("second")
    assert b"time.sleep" in _command(child), "it did not survive"


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""
