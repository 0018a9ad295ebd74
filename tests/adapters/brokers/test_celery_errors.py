"""A Celery task that cannot be run now is never lost, and never run without its lease: whatever else fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import celery
import pytest
from celery.canvas import Signature
from celery.exceptions import Ignore, Reject

import leasekit
import leasekit_celery
from leasekit import LeaseLost
from leasekit.testing import faults
from leasekit.testing.faults import Faulty
from leasekit.testing.memory import MemoryBackend, MemoryService


class Shop:
    """An app with one task, and what was sent to its broker meanwhile."""

    def __init__(self) -> None:
        self.faulty = Faulty(MemoryBackend(MemoryService(), worker="celery"))
        self.client = leasekit.Client(self.faulty, patience=0)
        self.app = celery.Celery("shop", broker="memory://", backend=None)
        leasekit_celery.install(self.app, "memory://")
        self.app.Task.leases = self.client
        self.sent = 0
        self.broker_is_away = False
        self.ran = 0

    def task(self, *, acks_late: bool) -> Any:
        @self.app.task(acks_late=acks_late)  # type: ignore[untyped-decorator]
        def count() -> int:
            self.ran += 1
            return self.ran

        return count

    @contextmanager
    def delivered(self, task: Any) -> Iterator[None]:
        """As a worker has it."""
        task.push_request(id="1", called_directly=False, is_eager=False, retries=0, args=(), kwargs={})
        try:
            yield
        finally:
            task.pop_request()

    def send(self) -> None:
        if self.broker_is_away:
            raise ConnectionError("the broker is away")
        self.sent += 1

    @contextmanager
    def held(self) -> Iterator[None]:
        """Its first run is alive."""
        with leasekit.lease(self.client.once("celery:1")) as lease:
            yield
            lease.release()


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    shop = Shop()
    monkeypatch.setattr(Signature, "apply_async", shop.send)
    yield shop
    shop.client.close()


@pytest.mark.parametrize("acks_late", [True, False])
def test_what_is_put_off_is_sent_again_and_acknowledged(shop: Shop, acks_late: Any) -> None:
    task = shop.task(acks_late=acks_late)
    with shop.held(), shop.delivered(task), pytest.raises(Ignore):
        task()
    assert (shop.sent, shop.ran) == (1, 0)


def test_what_the_broker_does_not_take_for_later_is_not_acknowledged(shop: Shop) -> None:
    task = shop.task(acks_late=True)
    shop.broker_is_away = True
    with shop.held(), shop.delivered(task), pytest.raises(Reject) as rejected:
        task()
    assert (rejected.value.requeue, shop.ran) == (True, 0)


def test_without_the_service_a_message_that_is_acknowledged_already_is_sent_again(shop: Shop) -> None:
    task = shop.task(acks_late=False)
    shop.faulty.always("schedule", faults.drop)
    with shop.delivered(task), pytest.raises(Ignore):
        task()
    assert (shop.sent, shop.ran) == (1, 0)


def test_without_the_service_a_message_that_is_not_comes_again_by_itself(shop: Shop) -> None:
    task = shop.task(acks_late=True)
    shop.faulty.always("schedule", faults.drop)
    with shop.delivered(task), pytest.raises(Reject) as rejected:
        task()
    assert (rejected.value.requeue, shop.sent, shop.ran) == (True, 0, 0)


@pytest.mark.parametrize(("acks_late", "raised"), [(True, Reject), (False, LeaseLost)])
def test_a_lost_lease_of_what_does_not_come_again_is_a_failure(
    shop: Shop, acks_late: Any, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = shop.task(acks_late=acks_late)

    def lose(*_: object) -> None:
        raise LeaseLost("lost", task_id="once:celery:1", reason="expired")

    monkeypatch.setattr(leasekit.Lease, "_conclude", lose)
    with shop.delivered(task), pytest.raises(raised):
        task()
    assert shop.ran == 1
