"""Clients that wait for ends of tasks on a service that tells of them: in this process, and through another client."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import leasekit
from leasekit import Client, Status
from leasekit._driver.reporting import completion
from leasekit.errors import Closed
from leasekit.server.engine import Engine
from leasekit.server.shared import SharedBackend
from tests.waiting import eventually

LONG = 3600.0


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Client, Client]]:
    """One that serves a store, and one that it serves. Neither would see an end by a second poll."""
    monkeypatch.setattr(completion, "_FIRST_WAIT", LONG)
    monkeypatch.setattr(completion, "_LONGEST_WAIT", LONG)
    url = f"sqlite:///{tmp_path}/tasks.db"
    with leasekit.connect(url) as first, leasekit.connect(url) as second:
        first.stats()
        second.stats()
        yield first, second


def engine_of(client: Client) -> Engine:
    backend = client.__connection__().backend
    assert isinstance(backend, SharedBackend)
    assert backend._own._opened is not None
    return backend._own._opened[1]


@pytest.mark.parametrize("number", [0, 1])
def test_a_client_is_told_of_an_end(clients: tuple[Client, Client], number: int) -> None:
    task = clients[0].schedule("k").id
    with ThreadPoolExecutor(1) as others:
        waiting = others.submit(clients[number].wait_tasks, task, timeout=LONG)
        eventually(lambda: engine_of(clients[0]).ends_awaited)
        clients[0].cancel(task)
        (info,) = waiting.result(60)
    assert info.status is Status.CANCELLED


@pytest.mark.parametrize("number", [0, 1])
def test_a_client_that_is_closed_waits_no_longer(clients: tuple[Client, Client], number: int) -> None:
    task = clients[0].schedule("k").id
    with ThreadPoolExecutor(1) as others:
        waiting = others.submit(clients[number].wait_tasks, task, timeout=LONG)
        eventually(lambda: engine_of(clients[0]).ends_awaited)
        clients[number].close()
        with pytest.raises(Closed):
            waiting.result(60)
