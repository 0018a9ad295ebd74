"""Killed processes: what they held runs elsewhere in time, never too early; nothing acknowledged is lost."""

import random
import time
from collections.abc import Iterator
from functools import partial

import pytest

import leasekit
from tests.process.conftest import Fleet
from tests.waiting import eventually

TTL = 6.0


def succeeded(client: leasekit.Client, task_id: str) -> bool:
    info = client.get(task_id)
    return info is not None and info.status is leasekit.Status.SUCCESS


def listed(client: leasekit.Client) -> Iterator[str]:
    page = client.list_tasks(limit=1000)
    yield from (task.id for task in page.tasks)
    while page.cursor is not None:
        page = client.list_tasks(limit=1000, cursor=page.cursor)
        yield from (task.id for task in page.tasks)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0.3, 1.7, 3.1, 4.4])
def test_the_task_of_a_killed_worker_runs_elsewhere_within_ttl_and_2_s_and_never_before(
    fleet: Fleet, moment: float
) -> None:
    fleet.handlers(
        """
        @worker.handler("long", run="thread")
        def long(payload, held):
            note("start", task=held.task.id, fence=held.fence)
            while held.attempt == 1:
                held.check()
                time.sleep(0.01)
            note("end", task=held.task.id, fence=held.fence)
        """
    )
    fleet.serve()
    first = fleet.work("first", "--ttl", str(TTL))
    with leasekit.connect(fleet.url) as client:
        task = client.schedule("long", claim_timeout=TTL, heartbeat_timeout=TTL)
        started = eventually(lambda: fleet.notes("start"), what="the first run")[0]
        fleet.work("second", "--ttl", str(TTL))
        eventually(lambda: time.monotonic() - started["at"] > moment, what="the moment to kill")
        first.kill()
        left = max(note["left"] for note in fleet.notes("renewed") if task.id in note["tasks"])
        again = eventually(lambda: fleet.notes("start")[1:], what="the second run")[0]
        assert again["fence"] > started["fence"]
        assert left + TTL <= again["at"] <= left + TTL + 2
        eventually(lambda: succeeded(client, task.id), what="success")
        info = client.get(task.id)
        assert info is not None
        assert info.crashes == 1


@pytest.mark.slow
def test_a_server_killed_at_any_moment_loses_nothing_that_it_acknowledged(fleet: Fleet) -> None:
    server = fleet.serve()
    accepted: list[str] = []
    chance = random.Random(20)
    for _ in range(5):
        kill_at = time.monotonic() + chance.uniform(0.05, 0.5)
        with leasekit.connect(fleet.url) as client:
            while time.monotonic() < kill_at:
                accepted += [done.id for done in client.schedule_all([leasekit.NewTask(kind="k")] * 20)]
            server.kill()
            server = fleet.serve(fleet.port)
    with leasekit.connect(fleet.url) as client:
        assert len(accepted) > 100
        assert set(accepted) <= set(listed(client))


@pytest.mark.slow
def test_workers_go_on_through_a_20_s_restart_of_the_server_without_losing_a_lease(fleet: Fleet) -> None:
    fleet.handlers(
        """
        @worker.handler("long", run="thread")
        def long(payload, held):
            note("start", task=held.task.id, fence=held.fence)
            while not os.path.exists("finish"):
                held.check()
                time.sleep(0.01)
            note("end", task=held.task.id, fence=held.fence)
        """
    )
    server = fleet.serve()
    worker = fleet.work("worker", "--ttl", "60")
    with leasekit.connect(fleet.url) as client:
        ids = [client.schedule("long", claim_timeout=60, heartbeat_timeout=60).id for _ in range(4)]
        eventually(lambda: len(fleet.notes("start")) == 4, what="four runs")
        gone = server.kill()
        eventually(lambda: time.monotonic() - gone >= 20, what="20 s without a server")
        fleet.serve(fleet.port)
        before = len(fleet.notes("renewed"))
        eventually(lambda: len(fleet.notes("renewed")) > before, what="beats after the restart")
        (fleet.home / "finish").touch()
        for task_id in ids:
            eventually(partial(succeeded, client, task_id), what="success")
        assert not fleet.notes("lost")
        assert len(fleet.notes("start")) == 4
    assert worker.stop() == 0
