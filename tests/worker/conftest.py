"""Workers at work in a thread of the test, on a service in memory."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import anyio
import pytest

from leasekit import Client, Worker
from leasekit.hooks import Event
from leasekit.task import NewTask, Status, TaskInfo
from leasekit.testing.faults import Faulty
from leasekit.testing.memory import MemoryBackend, MemoryService
from tests.waiting import eventually

AtWork = Callable[[Worker], AbstractContextManager[Worker]]


class Submitter:
    """Whoever schedules tasks at the service, and looks how they are."""

    def __init__(self, service: MemoryService) -> None:
        self.client = Client(MemoryBackend(service, worker="submitter"))

    def schedule(self, kind: str, payload: Any = None, **options: Any) -> str:
        return self.client.schedule(kind, payload, **options).id

    def schedule_many(self, kind: str, count: int) -> list[str]:
        return [task.id for task in self.client.schedule_all([NewTask(kind=kind, payload=n) for n in range(count)])]

    def get(self, task_id: str) -> TaskInfo:
        info = self.client.get(task_id)
        assert info is not None
        return info

    def when(self, task_id: str, *statuses: str) -> TaskInfo:
        """The task, as soon as it has one of these statuses."""

        def seen() -> TaskInfo | None:
            info = self.get(task_id)
            return info if info.status in statuses else None

        info: TaskInfo = eventually(seen)
        return info

    def success(self, task_id: str) -> TaskInfo:
        return self.when(task_id, Status.SUCCESS)


@pytest.fixture
def service() -> MemoryService:
    return MemoryService()


@pytest.fixture
def submitter(service: MemoryService) -> Iterator[Submitter]:
    submitter = Submitter(service)
    yield submitter
    submitter.client.close()


@pytest.fixture
def faulty(service: MemoryService) -> Faulty:
    return Faulty(MemoryBackend(service, worker="worker"))


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture(params=["run", "asyncio", "trio"])
def door(request: pytest.FixtureRequest) -> str:
    """Which of the worker's doors is used; a test that does not say so uses `run`."""
    name: str = request.param
    return name


@pytest.fixture
def at_work(request: pytest.FixtureRequest) -> AtWork:
    """A worker at work until the block ends; then it must have stopped gracefully."""
    door = request.getfixturevalue("door") if "door" in request.fixturenames else "run"

    @contextmanager
    def at_work(worker: Worker) -> Iterator[Worker]:
        errors: list[BaseException] = []

        def work() -> None:
            try:
                if door == "run":
                    worker.run()
                else:
                    anyio.run(worker.serve, backend=door)
            except BaseException as error:  # noqa: BLE001 - raised again below
                errors.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield worker
        finally:
            worker.stop()
            thread.join(60)
        assert not thread.is_alive(), "the worker does not stop"
        if errors:
            raise errors[0]

    return at_work


def waits_for_a_task(faulty: Faulty) -> bool:
    """Whether a claim is under way that waits for a task: a stop before it is sent would have no claim to end."""
    claims = [call for call in list(faulty.log) if call.kind == "claim"]
    return bool(claims) and not claims[-1].is_over and claims[-1].options["wait"] > 0


def gives_back(faulty: Faulty) -> bool:
    """Whether the last call for tasks ended the claim before it, to give back what that may have got."""
    claims = [call.options for call in list(faulty.log) if call.kind == "claim"]
    return len(claims) > 1 and claims[-1]["limit"] == 0 and claims[-1]["claim_id"] == claims[-2]["claim_id"]
