"""Labels of a worker: it also runs tasks that require some of them."""

import dataclasses
import threading
from collections.abc import Mapping

import pytest

import leasekit
from leasekit import ConfigError, Status
from leasekit.testing.memory import MemoryBackend, MemoryService
from tests.waiting import eventually

GPU = {"gpu": "a100"}


def worker_of(client: leasekit.Client, labels: Mapping[str, str]) -> leasekit.Worker:
    worker = leasekit.Worker(client, labels=labels)

    @worker.handler("k", requires=GPU)
    def run(payload: int) -> int:
        return payload

    run.options(client=client).schedule(1)
    return worker


def test_a_handler_declares_what_its_tasks_require() -> None:
    with leasekit.connect("memory://") as client:
        assert worker_of(client, {}).drain() == 0
        assert client.list_tasks().tasks[0].requires == GPU
        assert worker_of(client, GPU | {"zone": "eu"}).drain() == 2


def test_a_running_worker_claims_with_its_labels() -> None:
    with leasekit.connect("memory://") as client:
        worker = worker_of(client, GPU)
        running = threading.Thread(target=worker.run)
        running.start()
        eventually(lambda: client.list_tasks().tasks[0].status is Status.SUCCESS)
        assert client.workers()[0].labels == GPU
        worker.stop()
        running.join()


def test_labels_are_refused_where_they_are_given() -> None:
    with pytest.raises(ConfigError, match="labels do not fit"):
        leasekit.Worker("memory://", labels={"a b": "c"})
    backend = MemoryBackend(MemoryService(), worker="w")
    backend.capabilities = dataclasses.replace(backend.capabilities, labels=False)
    with leasekit.Client(backend) as client, pytest.raises(ConfigError, match="takes no labels"):
        next(client.tasks("k", labels=GPU, until_idle=0))
