"""A Dramatiq message that cannot be run now is never lost, and never run without its lease: whatever else fails."""

from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq import Middleware
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import SkipMessage
from dramatiq.worker import Worker

import leasekit
from leasekit_dramatiq import Leases


class Shop:
    """A broker in memory, one actor, and a worker."""

    def __init__(self) -> None:
        self.broker = StubBroker(middleware=[])
        self.leases = Leases("memory://", ttl=6)
        self.broker.add_middleware(self.leases)
        self.ran: list[str] = []
        dramatiq.actor(broker=self.broker, actor_name="runs", queue_name="q")(self.ran.append)
        self.message: Any = self.broker.get_actor("runs").message("a")
        self.name = self.leases._client.once(f"dramatiq:{self.message.message_id}")
        self.worker = Worker(self.broker, worker_timeout=50, worker_threads=1)
        self.worker.start()

    def deliver(self) -> None:
        """And wait until it was processed."""
        self.broker.enqueue(self.message)
        self.broker.join("q", timeout=30_000, fail_fast=False)


@pytest.fixture
def shop() -> Iterator[Shop]:
    shop = Shop()
    yield shop
    shop.worker.stop()


def test_one_that_runs_already_and_cannot_be_put_off_is_a_dead_letter_and_does_not_run(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def enqueue(message: Any, *, delay: Any = None) -> Any:
        if delay is not None:
            raise ConnectionError("the broker is away")
        return take(message)

    take = shop.broker.enqueue
    monkeypatch.setattr(shop.broker, "enqueue", enqueue)
    with leasekit.lease(shop.name) as held:
        shop.deliver()
        held.release()
    assert shop.ran == []
    assert [message.message_id for message in shop.broker.dead_letters] == [shop.message.message_id]


class Skips(Middleware):
    """Has no message run, in one way or the other."""

    def __init__(self, how: str) -> None:
        self.how = how

    def before_process_message(self, broker: Any, message: Any) -> None:
        if self.how == "fail":
            message.fail()
        else:
            raise SkipMessage("not today")


@pytest.mark.parametrize("how", ["skip", "fail"])
def test_one_that_another_middleware_skips_gives_its_lease_back(shop: Shop, how: str) -> None:
    shop.broker.add_middleware(Skips(how))
    shop.deliver()
    with leasekit.lease(shop.name) as held:  # it is neither held nor has it ended
        held.release()
    assert shop.ran == []
