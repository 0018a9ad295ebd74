"""Rows that check a promise at the figures in its text: each takes minutes, and little of the machine."""

import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median

import boto3
from moto.server import ThreadedMotoServer

import leasekit
from harness.chaos.processes import Process, wait_for
from harness.chaos.scenarios import scenario
from harness.chaos.world import World
from harness.history import Started
from harness.proxy import Proxy
from leasekit import NewTask, Status, hooks

KILLS = 20
WITHIN = 1.0  # seconds
HELD = 10_000
OUTAGE = 130.0  # seconds; `docs/promises.md` names it for the default settings
GIL = 180.0
STORM = 600.0
MESSAGES = 100
TTL = 300.0  # of the default settings


@scenario(4, "gil-held-for-minutes", faults=("gil",), ttl=30, long=True)
def gil_held_for_minutes(world: World) -> None:
    """An executor holds its GIL for three minutes under a ttl of 30 s: the lease is kept."""
    world.work(slots=1, processes=True)
    (task,) = world.running("gil", 1, seconds=GIL)
    world.fault("gil", lasts=GIL)
    wait_for(lambda: world.info(task).status.ended, what="the end of the C call", within=GIL + 60)
    world.finish_unharmed([task])
    world.figures.append(f"held the GIL for {GIL:g} s under a ttl of {world.ttl:g} s: 1 attempt, 0 crashes")


@scenario(1, "killed-under-a-long-lease", faults=("kill",), ttl=TTL, alone=True, long=True, start_within=30)
def killed_under_a_long_lease(world: World) -> None:
    """kill -9 of a supervised worker whose leases last five minutes: another begins its tasks within a second."""
    first = world.work("first", supervised=True)
    took = [after for number in range(KILLS) for after in _killed(world, first, f"next-{number}")]
    world.figures.append(
        f"{KILLS} kills, ttl {TTL:g} s: begun again after {median(took):.2f} s, at most {max(took):.2f} s"
    )
    assert max(took) < WITHIN, sorted(took)[-5:]


def _killed(world: World, first: Process, name: str) -> list[float]:
    """Kill a supervised worker beside an idle one, and return after how many seconds each task began there."""
    ids = world.schedule("deaf", first.slots, seconds=60)
    world.until_running(ids)
    second = world.work(name, slots=2 * first.slots)
    wait_for(lambda: "at work" in second.said, what="another worker")
    killed_at = first.kill_child()
    world.until_ended(ids)
    second.stop(signal.SIGTERM)
    return [run.at - killed_at for run in world.of(Started) if run.task in ids and run.at > killed_at]


@scenario(14, "outage-of-ten-thousand", faults=("hang",), ttl=TTL, long=True)
def outage_of_ten_thousand(world: World) -> None:
    """10,000 leases of one process at the default settings, on sockets that hang for 130 s: none is lost."""
    for _ in range(HELD // 1000):
        world.schedule("held", 1000)
    with _held(world.connect, world.proxy.url, HELD) as counts:
        wait_for(lambda: counts["renewed"] >= HELD, what="a beat of each", within=200)
        world.proxy.hang()
        time.sleep(OUTAGE)
        world.proxy.mend()
        counts["renewed"] = 0
        wait_for(lambda: counts["renewed"] >= HELD or counts["lost"], what="a beat of each", within=300)
        assert not counts["lost"], f"{counts['lost']} of {HELD} leases were lost"
    world.until_ended()
    assert {(info.status, info.attempt) for info in world.all_tasks()} == {(Status.SUCCESS, 1)}
    world.figures.append(f"{HELD:,} leases, every call hanging for {OUTAGE:g} s: {counts['lost']} lost")


@scenario(21, "throttled-by-sqs", faults=("answer 400",), ttl=TTL, long=True, least_settled=0)
def throttled_by_sqs(world: World) -> None:
    """SQS, simulated by moto, throttles nine in ten calls for ten minutes: no lease is lost."""
    credentials = {"AWS_ACCESS_KEY_ID": "made-up", "AWS_SECRET_ACCESS_KEY": "made-up", "AWS_EC2_METADATA_DISABLED": "1"}
    os.environ.update(credentials)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    try:
        with Proxy("http://{}:{}".format(*moto.get_host_and_port())) as proxy:
            url = f"sqs://held?endpoint={proxy.url}&region=eu-west-1"
            boto3.client("sqs", endpoint_url=proxy.url, region_name="eu-west-1").create_queue(QueueName="held")
            with leasekit.connect(url) as client:
                client.schedule_all([NewTask(kind="held") for _ in range(MESSAGES)])
            with _held(leasekit.connect, url, MESSAGES) as counts:
                body = b'{"__type": "com.amazonaws.sqs#RequestThrottled", "message": "slow down"}'
                proxy.answer(400, "POST", "/", body=body, times=None, chance=0.9)
                time.sleep(STORM)
                throttled = proxy.fired["answer 400"]
                proxy.mend()
                assert not counts["lost"], f"{counts['lost']} of {MESSAGES} leases were lost"
            world.fault("answer 400")
    finally:
        moto.stop()
    world.figures.append(f"{MESSAGES} leases, {throttled} throttled calls in {STORM:g} s: {counts['lost']} lost")
    assert counts["settled"] == MESSAGES, counts


@contextmanager
def _held(connect: Callable[..., leasekit.Client], url: str, count: int) -> Iterator[Counter[str]]:
    """Hold `count` leases at the default settings while the block runs; yield counts of their events."""
    counts: Counter[str] = Counter()

    def hear(event: hooks.Event) -> None:
        match event:
            case hooks.Renewed():
                counts["renewed"] += len(event.task_ids)
            case hooks.Lost():
                counts["lost"] += 1
            case hooks.Settled(verdict="settled"):
                counts["settled"] += 1

    with connect(url, hooks=[hear]) as client, ExitStack() as leases:
        for number, task in enumerate(client.tasks("held"), start=1):
            leases.enter_context(leasekit.lease(task))
            if number == count:
                break
        yield counts
