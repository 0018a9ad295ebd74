"""Names in Redis: one holder at a time, one run to the end, without a server of leasekit's."""

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress

import pytest

import leasekit
from leasekit import AlreadyDone, Cancelled, Client, NotGranted
from tests.adapters.redis.conftest import Cluster
from tests.redis_server import Server


@pytest.fixture(params=["server", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    where: Server | Cluster = request.getfixturevalue(request.param)
    return where.url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with leasekit.connect(url) as client:
        yield client


def test_a_name_has_one_holder_at_a_time(client: Client, url: str) -> None:
    with leasekit.connect(url) as other, leasekit.lease(client.named("reports/nightly")) as held:
        with pytest.raises(NotGranted), leasekit.lease(other.named("reports/nightly", wait=0)):
            pytest.fail("two held it")
        fence = held.fence
    with leasekit.connect(url) as other, leasekit.lease(other.named("reports/nightly", wait=10)) as held:
        assert held.fence > fence


def test_whoever_waits_is_granted_it_when_it_is_given_back(client: Client, url: str) -> None:
    order: list[str] = []
    waits = threading.Event()

    def second() -> None:
        with leasekit.connect(url) as other:
            waits.set()
            with leasekit.lease(other.named("waited for", wait=60)):
                order.append("second")

    thread = threading.Thread(target=second)
    with leasekit.lease(client.named("waited for")):
        thread.start()
        assert waits.wait(30)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]


def test_what_ended_well_is_not_run_again(client: Client, url: str) -> None:
    with leasekit.lease(client.once(f"message of {url}")):
        pass
    with (
        leasekit.connect(url) as other,
        pytest.raises(AlreadyDone),
        leasekit.lease(other.once(f"message of {url}")),
    ):
        pytest.fail("it ran twice")


def test_a_name_that_is_revoked_is_given_back_and_granted_again(client: Client, url: str) -> None:
    name = f"revoked of {url} {uuid.uuid4().hex}"
    with suppress(Cancelled), client.named(name) as held:
        assert client.revoke(name).verdict == "cancel_requested"
        held.progress(1)  # soon in a heartbeat, whose answer asks for the name
        while True:
            held.check()
            time.sleep(0.01)
    assert client.revoke(name).verdict == "cancelled"
    with client.named(name, wait=0) as again:
        assert again.fence == held.fence + 1
