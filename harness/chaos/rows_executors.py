"""Rows about executors: handlers in processes of their own, each with a guard above it."""

import os
import re
import signal

from harness.chaos.processes import children, state, wait_for
from harness.chaos.scenarios import scenario
from harness.chaos.world import World
from harness.history import Effect, Fault, read
from leasekit import Status


@scenario(1, "executor-killed", faults=("kill",), ttl=20, start_within=30)
def executor_killed(world: World) -> None:
    """kill -9 of one executor: its task alone counts a crash and runs again at once, other tasks go on."""
    worker = world.work(slots=3, processes=True)
    (victim,) = world.schedule("deaf", seconds=60)
    others = world.schedule("steady", 2, until="finish")
    world.until_running([victim, *others])
    pid = _executor(world, victim)
    os.kill(pid, signal.SIGKILL)
    world.fault("kill", target=str(pid))
    wait_for(lambda: world.info(victim).status.ended, what="the second run", within=15)
    assert (world.info(victim).status, world.info(victim).crashes) == (Status.SUCCESS, 1)
    world.finish()
    world.until_ended(others)
    assert [(info.status, info.crashes) for info in world.infos(others)] == [(Status.SUCCESS, 0)] * 2
    assert worker.is_alive


@scenario(4, "gil-held-in-executor", faults=("gil",), ttl=4, cycle=1)
def gil_held_in_executor(world: World) -> None:
    """An executor holds its GIL for two ttls: other processes renew its lease, and nothing is lost."""
    world.work(slots=1, processes=True)
    (task,) = world.running("gil", 1, seconds=2 * world.ttl)
    world.fault("gil", lasts=2 * world.ttl)
    world.finish_unharmed([task])


@scenario(2, "all-stopped", faults=("pause",), start_within=30)
def all_stopped(world: World) -> None:
    """Worker, guard and executor are stopped for longer than the ttl: the handler never acts again."""
    first = world.work("first", slots=1, processes=True)
    ids = world.running("deaf", 1, seconds=60, effects=20)
    tree = [first.pid, *_descendants(first.pid)]
    for pid in tree:
        os.kill(pid, signal.SIGSTOP)
    executor = _executor(world, ids[0])
    world.fault("pause", target=first.who)
    wait_for(lambda: not _runs(executor), what="the end of the executor")
    world.work("second", processes=True)
    world.until_ended(ids)
    first.popen.kill()


@scenario(2, "worker-stopped-over-another-user", faults=("pause",), start_within=30)
def worker_stopped_over_another_user(world: World) -> None:
    """The worker is stopped, the handler is another user's and has children: none acts beside the next run."""
    first = world.work("first", slots=1, processes=True, masked=True)
    ids = world.schedule("family", seconds=60)
    wait_for(lambda: len(_acting(world, ids[0])) == 3, what="a family")
    world.until_running(ids, effects=20)
    family = _acting(world, ids[0])
    first.pause()
    wait_for(lambda: not any(map(_runs, family)), what="the end of the family")
    world.work("second", processes=True)
    world.until_ended(ids)
    first.popen.kill()


@scenario(8, "memory-full-in-executor", faults=("memory",), start_within=30)
def memory_full_in_executor(world: World) -> None:
    """A handler takes all the memory of its executor: it fails or dies alone, and is retried."""
    world.work(slots=2, processes=True)
    (hungry,) = world.schedule("hungry", seconds=1)
    others = world.schedule("steady", 8, seconds=0.2)
    wait_for(lambda: any(fault.name == "memory" for fault in world.of(Fault)), what="full memory")
    world.until_ended([hungry, *others])
    assert [info.attempt for info in world.infos(others)] == [1] * 8


@scenario(33, "poison-in-executor", faults=("kill",), ttl=20, start_within=30)
def poison_in_executor(world: World) -> None:
    """A task kills every executor that runs it: the task is dead within seconds, and the worker lives."""
    worker = world.work(slots=2, processes=True)
    (pill,) = world.schedule("poison", always=True, max_crashes=2)
    others = world.schedule("steady", 8, seconds=0.1)
    world.until_ended([pill, *others])
    world.fault("kill")
    assert (world.info(pill).status, world.info(pill).crashes) == (Status.DEAD, 3)
    assert [info.crashes for info in world.infos(others)] == [0] * 8
    assert worker.is_alive


@scenario(36, "worker-killed-over-executors", faults=("kill",), start_within=30)
def worker_killed_over_executors(world: World) -> None:
    """kill -9 of the worker alone: its executors end with it, and their handlers act no longer."""
    first = world.work("first", slots=2, processes=True)
    world.running("deaf", 2, seconds=60, effects=20)
    tree = _descendants(first.pid)
    first.kill()
    wait_for(lambda: not any(map(_runs, tree)), what="the end of its executors", within=world.ttl + 10)
    world.work("second", processes=True)


def _executor(world: World, task: str) -> int:
    (pid,) = _acting(world, task)
    return pid


def _acting(world: World, task: str) -> list[int]:
    paths = [path for path in (world.home / "logs").glob("*.jsonl") if path.stem != "harness"]
    return [
        int(re.findall(r"\d+", path.stem)[-1])
        for path in paths
        if any(isinstance(event, Effect) and event.task == task for event in read(path))
    ]


def _descendants(pid: int) -> list[int]:
    return [pid for child in children(pid) for pid in (child, *_descendants(child))]


def _runs(pid: int) -> bool:
    return state(pid) not in "XZ"
