"""The big run: 20,000 tasks, with a kill of a worker or the server every few seconds."""

import time
from random import Random

from harness.chaos.processes import Process, wait_for
from harness.chaos.scenarios import scenario
from harness.chaos.world import World

TASKS = 20_000
WORKERS = 3
SLOTS = 8
SECONDS = 0.2  # that a handler runs


@scenario(0, "big", faults=("kill-worker", "kill-server"), ttl=4, alone=True, least_settled=TASKS, ordered=False)
def big(world: World) -> None:
    """20,000 tasks; kill -9 of a worker or the server every 2 to 8 s: none lost, none run twice at once."""
    chance = Random(20_000)
    workers = [world.work(f"worker-{number}", slots=SLOTS, supervised=number > 0) for number in range(WORKERS)]
    scheduler = world.submit("steady", TASKS, seconds=SECONDS, batch=100)
    while scheduler.is_alive or world.unfinished:
        time.sleep(chance.uniform(2, 8))
        if chance.random() < 0.4:
            world.server.kill("kill-server")
            world.serve()
        else:
            _kill_worker(world, workers, chance.randrange(WORKERS))
    assert scheduler.popen.returncode == 0


def _kill_worker(world: World, workers: list[Process], number: int) -> None:
    worker = workers[number]
    if number:
        wait_for(lambda: worker.children, what="a supervised worker")
        worker.kill_child("kill-worker")
    else:
        worker.kill("kill-worker")
        workers[number] = world.work(worker.name, slots=SLOTS)
