"""Random histories: threads and event loops claim, run, cancel and close over a service and a network that misbehave.

Whatever happens: no two bodies of one task believe in their lease at once, a task ends once, nothing is left behind.
A failing seed is in the name of the test; threads make its history only roughly the same again.
"""

import contextlib
import gc
import logging
import random
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import anyio
import pytest

import leasekit
from leasekit import Client, Fatal, LeaseError, NewTask, Task, Throttled, Unavailable
from leasekit._driver import retrying
from leasekit.errors import LeasekitError
from leasekit.task import TaskInfo
from leasekit.testing import faults
from leasekit.testing.clock import FakeClock
from leasekit.testing.faults import Fault, Faulty
from leasekit.testing.memory import MemoryBackend, MemoryService
from tests.sampling import in_soak, slow_after

TASKS = 150
SECONDS = 3.0  # of trouble, then it has to come to an end

TROUBLE: dict[Fault, float] = {
    faults.refuse: 0.03,
    faults.drop: 0.03,
    faults.lose_answer: 0.05,
    faults.garble: 0.02,
    faults.repeat: 0.03,
    faults.replay(): 0.03,
    faults.throttle(3): 0.03,
    faults.delay(20): 0.04,
    faults.delay_answer(20): 0.04,
    faults.late(30): 0.02,
}
OF_VERDICTS: dict[Fault, float] = {
    faults.shorten: 0.02,
    faults.lengthen: 0.01,
    faults.shuffle: 0.02,
    faults.misspell: 0.02,
    faults.throttle_items(0.5): 0.05,
    faults.fail_items(0.5): 0.05,
}


EXPECTED = (LeaseError, ValueError, Fatal, KeyboardInterrupt)


class Storm:
    """What all threads share, and what they must never see."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = FakeClock(1000)
        self.service = MemoryService(now=self.clock, random=random.Random(seed))
        self.stop = threading.Event()
        self.wrong: list[str] = []
        self.unexpected: list[BaseException] = []
        self.time = threading.Lock()  # while it is held no time passes
        self.bodies: dict[str, list[leasekit.Lease]] = defaultdict(list)
        self.fences: dict[str, int] = defaultdict(int)
        self.runs = 0
        self.networks: list[Faulty] = []

    def connect(self, name: str) -> tuple[Client, Faulty]:
        faulty = Faulty(MemoryBackend(self.service, worker=name), random=random.Random(name), sleep=self.clock.sleep)
        faulty.sometimes("claim", TROUBLE)
        self.mend(faulty)
        self.networks.append(faulty)
        return Client(faulty, clock=self.clock, worker=name), faulty

    def mend(self, faulty: Faulty) -> None:
        faulty.sometimes("beat", TROUBLE | OF_VERDICTS)
        faulty.sometimes("settle", TROUBLE | OF_VERDICTS)

    @contextlib.contextmanager
    def body(self, held: leasekit.Lease) -> Iterator[None]:
        with self.time:
            if held.fence <= self.fences[held.task.id]:
                self.wrong.append(f"fence {held.fence} of {held.task.id} after {self.fences[held.task.id]}")
            self.fences[held.task.id] = held.fence
            self.bodies[held.task.id].append(held)
            self.runs += 1
        try:
            self.look(held)
            yield
            self.look(held)
        finally:
            with self.time:
                self.bodies[held.task.id].remove(held)

    def look(self, held: leasekit.Lease) -> None:
        with self.time:
            believers = [body for body in self.bodies[held.task.id] if not body.lost]
            if len(believers) > 1:
                self.wrong.append(f"{held.task.id} is run by {[body.fence for body in believers]} at once")

    def act(self, held: leasekit.Lease, dice: random.Random, client: Client) -> None:
        """One thing that a body does."""
        match dice.randrange(16):
            case 0:
                held.progress(dice.random())
            case 1:
                held.check()
            case 2:
                held.complete(held.fence)
            case 3:
                held.fail("said", retry=dice.choice([0, 5]))
            case 4:
                held.release(after=dice.choice([None, 3]))
            case 5:
                raise ValueError("a body's own")
            case 6 if dice.random() < 0.3:
                raise Fatal("a body's last")
            case 7:
                raise KeyboardInterrupt
            case 8 if dice.random() < 0.3:
                with contextlib.suppress(Unavailable, Throttled):
                    client.cancel(held.task.id)
            case _:
                held.remaining()

    def idle(self, dice: random.Random) -> float | None:
        return dice.choice([None, None, 50])

    # Loops

    def blocking(self, client: Client, dice: random.Random) -> None:
        while not self.stop.is_set():
            for task in client.tasks("k", until_idle=0):
                if dice.random() < 0.1:
                    continue  # given back
                with (
                    contextlib.suppress(*EXPECTED),
                    leasekit.lease(task, idle_timeout=self.idle(dice)) as held,
                    self.body(held),
                ):
                    for _ in range(dice.randrange(12)):
                        self.act(held, dice, client)
                        time.sleep(dice.choice([0, 0.002, 0.02]))
                        self.look(held)
                if self.stop.is_set():
                    break
            time.sleep(0.002)

    async def loop(self, client: Client, dice: random.Random) -> None:
        while not self.stop.is_set():
            with anyio.move_on_after(dice.choice([0.01, 0.1, 1])):  # cancelled anywhere
                async with anyio.create_task_group() as group:
                    async for task in client.tasks("k", until_idle=0):
                        group.start_soon(self.run, leasekit.lease(task, idle_timeout=self.idle(dice)), dice, client)
                        if self.stop.is_set():
                            break
            await anyio.sleep(0.002)

    async def run(self, lease: leasekit.Lease, dice: random.Random, client: Client) -> None:
        with contextlib.suppress(*EXPECTED):
            async with lease as held:
                with self.body(held):
                    for _ in range(dice.randrange(12)):
                        self.act(held, dice, client)
                        await anyio.sleep(dice.choice([0, 0.002, 0.02]))
                        self.look(held)

    def guarded(self, call: Callable[[], Any]) -> threading.Thread:
        def run() -> None:
            while not self.stop.is_set():
                try:
                    call()
                except (Unavailable, Throttled):
                    continue  # a claim that was given up
                except BaseException as error:  # noqa: BLE001 - told in the end
                    self.unexpected.append(error)
                    return

        return threading.Thread(target=run)

    def pace(self) -> None:
        """Time passes, in steps that no keeper may rely on, and now and then one of them is cut off for a while."""
        cut: Faulty | None = None
        while not self.stop.is_set():
            with self.time:
                self.clock.advance(self.random.choice([0.1, 0.5, 1, 1, 2, 5]) if self.random.random() < 0.99 else 200)
            if self.random.random() < 0.02:
                if cut is not None:
                    self.mend(cut)
                cut = self.random.choice(self.networks)
                cut.always("beat", faults.refuse)
                cut.always("settle", faults.refuse)
            time.sleep(0.001)


def infos(storm: Storm, ids: list[str]) -> list[TaskInfo]:
    found = [storm.service.get(task_id) for task_id in ids]
    return [info for info in found if info is not None]


# Sample: two seeds.
@pytest.mark.soak
@pytest.mark.parametrize("seed", slow_after(1, range(in_soak(40, by_default=2))))
def test_whatever_happens(seed: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "_FIRST_WAIT", 0.01)  # these waits are by the real clock
    monkeypatch.setattr(retrying, "_LONGEST_WAIT", 0.01)
    storm = Storm(seed)
    caplog.set_level(logging.CRITICAL, logger="leasekit")
    connections = [storm.connect(f"worker-{seed}-{number}") for number in range(3)]
    clients = [client for client, _ in connections]
    rng = random.Random(seed)
    ttls = [rng.sample([20, 60, 300], 2) for _ in range(TASKS)]
    new = [NewTask(kind="k", max_crashes=1000, claim_timeout=claim, heartbeat_timeout=beat) for claim, beat in ttls]
    ids = [scheduled.id for scheduled in clients[0].schedule_all(new)]
    threads = [threading.Thread(target=storm.pace)]
    for number, client in enumerate(clients):
        dice = [random.Random(f"{seed} {number} {role}") for role in range(3)]
        backend = "trio" if number % 2 else "asyncio"
        threads += [
            storm.guarded(partial(storm.blocking, client, dice[0])),
            storm.guarded(partial(storm.blocking, client, dice[1])),
            storm.guarded(partial(anyio.run, storm.loop, client, dice[2], backend=backend)),
        ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + SECONDS
    while time.monotonic() < until and not all(info.status.ended for info in infos(storm, ids)):
        time.sleep(0.01)
    for _, faulty in connections:
        faulty.clear()
    storm.stop.set()
    for thread in threads:
        while thread.is_alive():  # reports that are put off wait by this clock
            storm.clock.advance(1)
            thread.join(0.005)
            assert time.monotonic() < until + 60, "a thread hangs"
    assert not storm.unexpected, "".join(traceback.format_exception(storm.unexpected[0]))
    assert not storm.wrong
    assert storm.runs > 20, "too little happened to say anything"
    finish(storm, clients, ids)
    for client in clients:
        assert not len(client.__connection__().keeper)
        client.close()
    gc.collect()
    assert not [record.message for record in caplog.records if record.name == "asyncio"]


def finish(storm: Storm, clients: list[Client], ids: list[str]) -> None:
    """In fair weather all come to an end, each to one, and the keepers let go of everything."""
    client = clients[0]
    until = time.monotonic() + 60
    while not all(info.status.ended for info in infos(storm, ids)):
        assert time.monotonic() < until, [info.status for info in infos(storm, ids)]
        for task in client.tasks("k", until_idle=0):
            with contextlib.suppress(LeasekitError), leasekit.lease(task) as held, storm.body(held):
                pass
        storm.clock.advance(10)
    while any(len(client.__connection__().keeper) for client in clients):
        assert time.monotonic() < until, [len(client.__connection__().keeper) for client in clients]
        storm.clock.advance(1)
        time.sleep(0.002)
    assert not storm.wrong
    for info in infos(storm, ids):
        ends = [entry.outcome for entry in info.history if entry.outcome in ("success", "fatal", "cancelled")]
        assert len(ends) <= 1
        if info.status != "cancelled":
            assert ends == [info.history[-1].outcome]


def test_leases_are_lost_in_such_a_storm_and_trust_alone_keeps_bodies_apart() -> None:
    """The storm is one: were trust not judged, its own checks would turn red."""
    storm = Storm(1)
    task = Task(id="t", kind="k", token="x", ttl=300)

    class Believer:
        def __init__(self, fence: int) -> None:
            self.task, self.fence, self.lost = task, fence, False

    with contextlib.ExitStack() as bodies:
        for fence in (1, 2):
            bodies.enter_context(storm.body(Believer(fence)))  # type: ignore[arg-type]
        assert storm.wrong
