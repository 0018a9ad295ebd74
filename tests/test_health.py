"""Health says whether a process can keep its leases, and is judged while the thread that keeps them is stuck."""

import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

import leasekit
from leasekit import Client, Worker
from leasekit._driver import connection
from leasekit.hooks import Claimed, Event
from leasekit.testing import faults
from leasekit.testing.clock import FakeClock
from leasekit.testing.faults import Faulty
from leasekit.testing.memory import MemoryBackend, MemoryService
from tests.waiting import eventually

HEARTBEATS = leasekit.Heartbeats()


@pytest.fixture
def client(faulty: Faulty, clock: FakeClock) -> Iterator[Client]:
    with Client(faulty, clock=clock) as client:
        client.schedule("k")
        yield client


def test_a_client_that_is_not_in_use_is_healthy(faulty: Faulty) -> None:
    client = Client(faulty)
    assert client.health() == leasekit.Health(ok=True)
    client.close()
    assert client.health() == leasekit.Health(ok=True)


def test_health_says_how_long_the_first_lease_is_trusted_and_when_the_service_answered(
    client: Client, faulty: Faulty, clock: FakeClock
) -> None:
    assert client.health().trust_left is None
    with leasekit.lease(next(client.tasks("k"))):
        eventually(lambda: faulty.calls["beat"] == 1)
        faulty.always("beat", faults.hang)
        eventually(lambda: client.health().answered_ago == 0)
        clock.advance(7)
        health = client.health()
        assert (health.ok, health.detail, health.answered_ago) == (True, None, 7)
        assert health.trust_left == pytest.approx(HEARTBEATS.slack - 7)
        assert 0 <= (health.turn_age or 0) < 5
    faulty.clear()
    faulty.release()


def test_a_service_that_is_away_is_no_reason_until_the_trust_in_a_lease_runs_out(
    client: Client, faulty: Faulty, clock: FakeClock
) -> None:
    task = next(client.tasks("k"))
    with suppress(leasekit.LeaseLost), leasekit.lease(task) as held:
        eventually(lambda: faulty.calls["beat"] == 1)
        faulty.always("beat", faults.refuse)
        clock.advance(HEARTBEATS.slack - HEARTBEATS.call_timeout - 1)
        assert client.health().ok
        clock.advance(2)
        health = client.health()
        assert (health.ok, task.id in (health.detail or "")) == (False, True)
        clock.advance(HEARTBEATS.call_timeout)
        eventually(lambda: held.lost)
        clock.advance(HEARTBEATS.grace + HEARTBEATS.margin)
        eventually(lambda: "its handler goes on" in (client.health().detail or ""))
    eventually(lambda: client.health().ok)


def test_a_driver_that_is_held_up_is_seen_from_other_threads(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_STALLED", 1.5)  # an idle driver has a turn each second
    go, stuck = threading.Event(), threading.Event()

    def hook(event: Event) -> None:
        if isinstance(event, Claimed):
            stuck.set()
            go.wait(60)

    with Client(faulty, hooks=[hook]) as client:
        client.schedule("k")
        tasks = client.tasks("k")
        claiming = threading.Thread(target=next, args=[tasks])
        claiming.start()
        assert stuck.wait(30)
        eventually(lambda: not client.health().ok)
        assert "the driver's thread has had no turn for" in (client.health().detail or "")
        go.set()
        eventually(lambda: client.health().ok)
        claiming.join()


def test_a_worker_is_healthy_at_work_and_while_it_drains(faulty: Faulty, service: MemoryService) -> None:
    client, running, go = Client(faulty), threading.Event(), threading.Event()
    worker = Worker(client)

    @worker.handler("k")
    def waits(payload: None) -> None:
        running.set()
        go.wait(60)

    assert worker.health() == leasekit.Health(ok=False, detail="the worker is not at work")
    with Client(MemoryBackend(service, worker="submitter")) as submitter:
        submitter.schedule("k")
    working = threading.Thread(target=worker.run)
    working.start()
    assert running.wait(30)
    assert worker.health().ok
    faulty.always("beat", faults.hang)
    worker.stop()
    health = worker.health()
    assert (health.ok, health.detail) == (True, "the worker drains")
    assert health.trust_left is not None
    go.set()
    working.join(30)
    assert not worker.health().ok
    client.close()
