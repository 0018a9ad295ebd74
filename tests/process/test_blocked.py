"""A handler that blocks its event loop keeps its lease, and holds up nobody else."""

import time
from functools import partial

import pytest

import leasekit
from tests.process.conftest import Fleet
from tests.waiting import eventually

TTL = 3.0


def succeeded(client: leasekit.Client, task_id: str) -> bool:
    info = client.get(task_id)
    return info is not None and info.status is leasekit.Status.SUCCESS


def is_past(moment: float) -> bool:
    return time.monotonic() > moment


@pytest.mark.slow
def test_a_loop_blocked_for_three_ttls_keeps_its_lease_and_thread_handlers_run_meanwhile(fleet: Fleet) -> None:
    fleet.handlers(
        f"""
        @worker.handler("blocks")
        async def blocks(payload, held):
            note("blocked", fence=held.fence)
            time.sleep(3 * {TTL})
            note("unblocked", fence=held.fence)

        @worker.handler("beside", run="thread")
        def beside(payload, held):
            note("beside")
        """
    )
    fleet.serve()
    fleet.work("worker", "--ttl", str(TTL))
    with leasekit.connect(fleet.url) as client:
        task = client.schedule("blocks", claim_timeout=TTL, heartbeat_timeout=TTL)
        eventually(lambda: fleet.notes("blocked"), what="the blocking handler")
        for _ in range(20):
            client.schedule("beside", claim_timeout=TTL, heartbeat_timeout=TTL)
        eventually(lambda: len(fleet.notes("beside")) == 20, what="the thread handlers")
        assert not fleet.notes("unblocked")
        eventually(lambda: succeeded(client, task.id), what="success")
        info = client.get(task.id)
        assert info is not None
        assert (info.attempt, info.crashes, len(info.history)) == (1, 0, 1)
        assert len(fleet.notes("blocked")) == 1
        assert not fleet.notes("lost")


@pytest.mark.slow
def test_a_claim_that_waited_longer_than_the_ttl_still_runs_its_task(fleet: Fleet) -> None:
    fleet.handlers(
        """
        @worker.handler("short", run="thread")
        def short(payload, held):
            held.check()
            note("ran", fence=held.fence)
        """
    )
    fleet.serve()
    worker = fleet.work("worker", "--ttl", "2")
    with leasekit.connect(fleet.url) as client:
        for _ in range(2):
            task = client.schedule("short", claim_timeout=2, heartbeat_timeout=2)
            eventually(partial(succeeded, client, task.id), what="success")
            # From now on the worker waits with one long claim: for more than two ttls.
            eventually(partial(is_past, time.monotonic() + 5), what="5 s of waiting")
    assert [note["fence"] for note in fleet.notes("ran")] == [1, 1]
    assert worker.stop() == 0
