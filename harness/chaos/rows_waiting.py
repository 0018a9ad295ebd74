"""Rows about runs that wait: their handlers have said `NotYet`, and the worker keeps the leases without a thread."""

import signal
import time

from harness.chaos.processes import Process, wait_for
from harness.chaos.scenarios import scenario
from harness.chaos.world import World
from harness.history import Effect

_SLOTS = 2
_RUNS = 12  # at one time, six to a slot
_CALLS = 3  # of each handler before the fault


@scenario(1, "waiting-killed", faults=("kill",), ttl=30, start_within=30)
def waiting_killed(world: World) -> None:
    """kill -9 of a supervised worker with six waiting runs a slot: all go on at once, long before their ttl."""
    first = _holder(world, supervised=True)
    ids = _waiting(world)
    since = time.monotonic()
    first.kill_child()
    _until_called_again(world, ids)
    assert time.monotonic() - since < world.ttl, "the tasks waited for their ttl"
    world.finish(ids)
    assert sum(info.crashes for info in world.infos(ids)) <= _SLOTS, "a run that waited counts as a crash"


@scenario(2, "waiting-stopped", faults=("pause",), start_within=20)
def waiting_stopped(world: World) -> None:
    """SIGSTOP over waiting runs, for longer than their ttl: none is called again by the worker that has lost it."""
    first = _holder(world)
    ids = _waiting(world, by=first)
    first.pause()
    _holder(world, "second")
    _until_called_again(world, ids)
    first.resume()
    world.until_beaten(ids)
    world.finish(ids)


@scenario(14, "waiting-cut-off", faults=("hang",), start_within=20)
def waiting_cut_off(world: World) -> None:
    """No beat is answered while runs wait: they end with the trust in their leases, and go on elsewhere."""
    first = _holder(world)
    ids = _waiting(world, by=first)
    world.proxy.hang()
    _holder(world, "second", past_proxy=True)
    _until_called_again(world, ids)
    world.proxy.mend()
    world.finish(ids)


@scenario(35, "waiting-asked-to-stop", faults=("SIGTERM",), ttl=30, start_within=30)
def waiting_asked_to_stop(world: World) -> None:
    """SIGTERM over waiting runs: all are released, and go on elsewhere at once, without a crash or a failed attempt."""
    first = _holder(world)
    ids = _waiting(world, by=first)
    world.fault("SIGTERM", target=first.who)
    since = time.monotonic()
    assert first.stop(signal.SIGTERM) == 0, first.said[-2000:]
    _holder(world, "second")
    _until_called_again(world, ids)
    assert time.monotonic() - since < world.ttl, "the tasks waited for their ttl"
    world.finish(ids)
    assert [(info.attempt, info.crashes) for info in world.infos(ids)] == [(1, 0)] * _RUNS


def _holder(world: World, name: str = "first", *, supervised: bool = False, past_proxy: bool = False) -> Process:
    options = ["--window", str(2 * _RUNS)]
    return world.work(name, slots=_SLOTS, supervised=supervised, past_proxy=past_proxy, options=options)


def _waiting(world: World, *, by: Process | None = None) -> list[str]:
    """Schedule more tasks than there are slots; return their ids once each handler was called several times."""
    ids = world.running("waits", _RUNS, by=by, effects=_CALLS)
    assert {effect.fence for effect in world.of(Effect)} == {1}, "a call was not under the first lease"
    return ids


def _until_called_again(world: World, ids: list[str]) -> None:
    """Return once each handler was called under another lease."""
    again: set[str] = set()

    def all_were() -> bool:
        again.update(effect.task for effect in world.of(Effect) if effect.fence > 1)
        return again >= set(ids)

    wait_for(all_were, what="calls under other leases")
