"""Rows that kill the workers of a flow at each boundary of its steps, against a cloud that throttles."""

import time

import leasekit
from harness.chaos.flows import vms
from harness.chaos.processes import PATIENCE, Process
from harness.chaos.scenarios import scenario
from harness.chaos.world import World
from leasekit import Client, FlowInfo, KindSettings

WHEN = ("before", "after", "settled")
PLACES = {
    "web": [(step, when) for step in ("create", "verify", "record") for when in WHEN],
    "broken": [("verify", "settled"), *(("roll_back", when) for when in WHEN)],
}
"""The boundaries at which the worker is killed: of a machine that starts, and of one that never does."""
WITHIN = 3 * PATIENCE  # seconds for all: each kill costs the start of a worker


@scenario(1, "killed-at-each-step", faults=("kill",), ttl=30, claims_once=False)
def killed_at_each_step(world: World) -> None:
    """kill -9 of a supervised worker at each boundary of a flow's steps: all is recorded, or rolled back."""
    _kill_at_each_step(world, supervised=True)


@scenario(1, "killed-at-each-step-of-a-file", faults=("kill",), ttl=3, service="sqlite", serve=False)
def killed_at_each_step_of_a_file(world: World) -> None:
    """kill -9 at each boundary, with two workers on an SQLite file: without supervisors, leases end and free steps."""
    _kill_at_each_step(world, supervised=False)


def _kill_at_each_step(world: World, *, supervised: bool) -> None:
    cloud = vms.Cloud()
    records = world.home / "records"
    records.mkdir()
    with vms.serving(cloud) as url, leasekit.connect(world.through_proxy) as client:
        environment = {"CLOUD": url, "RECORDS": str(records)}
        client.set_kind(vms.flow.kind, KindSettings(heartbeat_timeout=world.ttl))
        names = [f"{step}:{when}#{name}" for name, places in PLACES.items() for step, when in places]
        for name in names:
            vm = vms.Vm(name.partition("#")[2] + "-" + name.partition("#")[0].replace(":", "-"))
            world.ids.append(vms.flow.start(world.client, vm, id=name).id)
        _work_until_ended(world, client, names, environment, supervised=supervised)
        world.fault("kill")
        infos = [_info(client, name) for name in names]
    for info in infos:
        world.ids += [step.task_id for step in info.history[1:]]
        _check(world, info)
    killed = sum(1 for _ in world.home.glob("killed-*"))
    assert killed >= len(names) - 3, f"only {killed} of {len(names)} were killed: others' kills came first too often"
    recorded = {path.name for path in records.iterdir()}
    assert recorded == cloud.machines.keys(), f"left over, or not recorded: {recorded ^ cloud.machines.keys()}"
    assert len(recorded) > len(names) / 3, f"too many machines that start were rolled back: {recorded}"
    assert cloud.refuses, "the cloud has refused nothing"
    world.figures.append(
        f"{len(names)} flows, {killed} killed, each at another boundary: {len(recorded)} recorded, none left over"
    )


def _work_until_ended(
    world: World, client: Client, names: list[str], environment: dict[str, str], *, supervised: bool
) -> None:
    """Keep two workers at work until all flows have ended: one that has died and has no supervisor is replaced."""
    workers = [_start(world, environment, supervised=supervised) for _ in range(2)]
    until = time.monotonic() + WITHIN
    while left := [name for name in names if _info(client, name).status == "running"]:
        assert time.monotonic() < until, f"these flows have not ended after {WITHIN:g} s: {left}"
        for place, process in enumerate(workers):
            if not process.is_alive:
                workers[place] = _start(world, environment, supervised=supervised)
        time.sleep(0.2)


def _start(world: World, environment: dict[str, str], *, supervised: bool) -> Process:
    number = len(world.processes)
    return world.work(f"worker-{number}", slots=2, module="flows", supervised=supervised, environment=environment)


def _info(client: Client, name: str) -> FlowInfo:
    info = client.flow(name)
    assert info is not None, f"{name} is lost"
    return info


def _check(world: World, info: FlowInfo) -> None:
    """Check that a flow has ended, went on from where its worker was killed, and came to no step twice."""
    assert info.status in ("succeeded", "rolled_back"), info
    steps = [step.step for step in info.history]
    assert len(set(steps)) == len(steps), f"a step was scheduled twice: {steps}"
    assert [step.to for step in info.history] == [*steps[1:], None], info.history
    killed, _, when = info.id.partition("#")[0].partition(":")
    again = {step.step: step.executions for step in info.history}
    is_killed = (world.home / f"killed-{info.id}").exists()
    assert again.get(killed, 0) > 1 or when == "settled" or not is_killed, f"{info.id}: {again}"
