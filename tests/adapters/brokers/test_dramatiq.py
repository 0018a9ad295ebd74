"""Dramatiq over a real Redis: what is delivered again runs once."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.redis import RedisBroker
from dramatiq.worker import Worker

import leasekit
from leasekit_dramatiq import Leases
from tests.adapters.brokers.conftest import SERVICES_WITHOUT_NAMES
from tests.waiting import eventually


def connected(redis_url: str) -> RedisBroker:
    url = redis_url.replace("redis+socket", "unix")
    return RedisBroker(url=url, namespace=f"d{time.monotonic_ns()}")  # type: ignore[no-untyped-call]


@pytest.fixture
def broker(redis_url: str, leases_url: str) -> Iterator[RedisBroker]:
    broker = connected(redis_url)
    broker.add_middleware(Leases(leases_url, ttl=6, again_in=0.5))
    worker = Worker(broker, worker_timeout=50, worker_threads=4)
    worker.start()
    yield broker
    worker.stop()
    broker.close()
    broker.client.close()


class Runs:
    """What an actor did, and when it may go on."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended = 0
        self.go = threading.Event()

    def __call__(self, name: str) -> None:
        self.begun.append(name)
        assert self.go.wait(60)
        self.ended += 1


@pytest.fixture
def runs(broker: RedisBroker) -> Runs:
    runs = Runs()
    dramatiq.actor(broker=broker, actor_name="runs", max_retries=3)(runs.__call__)
    return runs


def deliver(broker: RedisBroker, message: Any = None) -> Any:
    """One message, or the same once more, as a broker does that believes its worker to be dead."""
    return broker.enqueue(message or broker.get_actor("runs").message("a"))


def skipped(caplog: pytest.LogCaptureFixture, word: str) -> Callable[[], bool]:
    return lambda: any(word in record.getMessage() for record in caplog.records)


def test_a_message_whose_first_run_is_alive_does_not_run_again(
    broker: RedisBroker, runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    message = deliver(broker)
    eventually(lambda: runs.begun)
    deliver(broker, message)
    eventually(skipped(caplog, "while it runs"))
    runs.go.set()
    eventually(skipped(caplog, "had ended well"))
    assert (runs.begun, runs.ended) == (["a"], 1)


def test_a_message_that_has_ended_well_is_acknowledged_without_running(
    broker: RedisBroker, runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    runs.go.set()
    message = deliver(broker)
    eventually(lambda: runs.ended)
    deliver(broker, message)
    eventually(skipped(caplog, "had ended well"))
    assert runs.begun == ["a"]
    broker.join("default", timeout=20_000)


def test_a_message_whose_run_failed_is_tried_again(broker: RedisBroker) -> None:
    tries: list[int] = []

    def fails_twice() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise ValueError("oops")

    dramatiq.actor(broker=broker, max_retries=5, min_backoff=10, max_backoff=20)(fails_twice)
    broker.enqueue(broker.get_actor("fails_twice").message())
    eventually(lambda: len(tries) == 3)


@pytest.mark.slow
def test_a_message_whose_holder_died_runs_when_the_lease_has_run_out(
    broker: RedisBroker, runs: Runs, leases_url: str
) -> None:
    runs.go.set()
    message = broker.get_actor("runs").message("a")
    with leasekit.connect(leases_url, heartbeats=leasekit.Heartbeats().for_ttl(6)) as dead:
        held = leasekit.lease(dead.once(f"dramatiq:{message.message_id}")).__enter__()
        connection = dead.__connection__()
        connection.driver.call_soon(connection.keeper.drop, held._run.held)  # it beats no more
        deliver(broker, message)
        eventually(lambda: runs.ended)
        with pytest.raises(leasekit.LeaseLost):
            held.__exit__(None, None, None)


@pytest.mark.parametrize("again_in", [0, -1, float("nan"), float("inf"), "15"])
def test_a_wait_that_no_message_can_be_put_off_by_is_refused(again_in: Any) -> None:
    """Otherwise each message that is delivered again while it runs would be a dead letter, or come again at once."""
    with pytest.raises(leasekit.ConfigError, match="again_in"):
        Leases("memory://", again_in=again_in)


@pytest.mark.parametrize("url", SERVICES_WITHOUT_NAMES)
def test_a_service_that_keeps_no_names_is_refused_at_once(url: str) -> None:
    with pytest.raises(
        leasekit.ConfigError, match=r"cannot hold leases of names, because it .*: keep names in another"
    ):
        Leases(url)


def test_without_the_service_a_message_is_put_off_and_not_run(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    runs = Runs()
    leases = Leases("http://127.0.0.1:9", ttl=6, again_in=60)
    leases._client._retry_for = 0.1
    broker = connected(redis_url)
    broker.add_middleware(leases)
    dramatiq.actor(broker=broker, actor_name="runs")(runs.__call__)
    worker = Worker(broker, worker_timeout=50, worker_threads=1)
    worker.start()
    deliver(broker)
    eventually(skipped(caplog, "cannot be obtained"))
    eventually(lambda: broker.do_qsize("default.DQ"))
    worker.stop()
    broker.close()
    broker.client.close()
    assert runs.begun == []
