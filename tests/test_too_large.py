"""What is larger than a service takes ends as what it is: for good, with a sentence that says so; nothing waits."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import leasekit
from leasekit import Client, Fatal, TooLarge, Worker
from leasekit.backend import Capabilities
from leasekit.task import Settlement, Status, TaskInfo, Verdict
from leasekit.testing.memory import MemoryBackend, MemoryService

SERVE = [sys.executable, "-c", "import typer; from leasekit.cli.serve import serve; typer.run(serve)"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    store: Path = tmp_path_factory.mktemp("server") / "tasks.db"
    with subprocess.Popen(
        [*SERVE, "--port", "0", "--store", f"sqlite:///{store}"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


@pytest.fixture(params=["memory", "sqlite", "http"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    urls = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/tasks.db"}
    url = urls[request.param] if request.param in urls else str(request.getfixturevalue("server"))
    with leasekit.connect(url) as client:
        yield client


def count(client: Client, kind: str) -> int:
    return sum(client.stats().kinds.get(kind, {}).values())


def announce(held: leasekit.Lease, kind: str, size: int) -> None:
    while True:
        held.then(kind, "x" * size)


def returns_much(_: Any) -> str:
    return "x" * 9_000_000


def announces_much(_: Any, held: leasekit.Lease) -> None:
    for _ in range(10):
        held.then("large-next", "x" * 900_000)


def fails_at_length(_: Any, held: leasekit.Lease) -> None:
    held.fail("x" * 9_000_000)


BODIES: dict[str, tuple[Callable[..., Any], str]] = {
    "result": (returns_much, "this result has 9,000,002 bytes as JSON, the service takes 1,048,576"),
    "then": (announces_much, "the successors of a task have 6,"),
    "error": (fails_at_length, "this error has 9,000,002 bytes as JSON, the service takes 65,536"),
}


@pytest.mark.parametrize("what", BODIES)
def test_it_is_a_fatal_failure_that_says_so_and_the_worker_ends(client: Client, what: str) -> None:
    body, sentence = BODIES[what]
    worker = Worker(client)
    worker.handler(f"large-{what}", run="thread")(body)
    task_id = client.schedule(f"large-{what}").id
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    (info,) = client.wait_tasks(task_id, timeout=60)
    worker.stop()
    thread.join(60)
    assert not thread.is_alive()
    assert (info.status, info.attempt, info.error["type"]) == (Status.FATAL_FAILURE, 1, "TooLarge")
    assert sentence in info.error["message"]
    assert count(client, "large-next") == 0


def test_a_body_that_hears_of_it_may_say_something_else(client: Client) -> None:
    client.schedule("large-caught")
    task = next(client.tasks("large-caught"))
    with leasekit.lease(task) as held:
        held.then("large-caught-next", "x" * 1_000_000)
        with pytest.raises(ValueError, match="9,000,002 bytes"):
            held.complete("x" * 9_000_000)
        with pytest.raises(TooLarge, match="successors"):
            announce(held, "large-caught-next", 1_000_000)
        held.complete("it is in the other store")
    info = client.get(task.id)
    assert info is not None
    assert (info.status, info.result) == (Status.SUCCESS, "it is in the other store")
    assert count(client, "large-caught-next") == 6


def test_all_that_may_be_said_of_one_task_gets_there(client: Client) -> None:
    client.schedule("large-most")
    task = next(client.tasks("large-most"))
    with leasekit.lease(task) as held:
        for size in (1_000_000, 1_000):
            with pytest.raises(TooLarge):
                announce(held, "large-most-next", size)
        held.progress("x" * (64 * 1024 - 2))
        held.complete("x" * (1024 * 1024 - 2))
    assert [len(found.result) for found in [client.get(task.id)] if isinstance(found, TaskInfo)] == [1024 * 1024 - 2]
    assert count(client, "large-most-next") > 200


class Narrow(MemoryBackend):
    """A service that keeps results of ten bytes."""

    capabilities = Capabilities(max_result=10)


def test_the_bound_is_that_of_the_service() -> None:
    with leasekit.connect(Narrow(MemoryService(), worker="w")) as client:
        client.schedule("k")
        with pytest.raises(Fatal), leasekit.lease(next(client.tasks("k"))) as held:
            held.complete("x" * 9)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_settlement_that_fits_into_no_request_is_refused_with_its_largest_field(server: str) -> None:
    """Also of whoever speaks to the backend alone: the server breaks off, and its answer is never read."""
    backend = leasekit.connect(server)._session._open()
    small = Settlement(id="small", token="t", outcome="success")
    with pytest.raises(leasekit.Refused, match="item 1: result has 9,000,002 bytes as JSON") as refused:
        await backend.settle([small, Settlement(id="large", token="t", outcome="success", result="x" * 9_000_000)])
    assert [(error["item"], error["field"]) for error in refused.value.errors] == [(1, "result")]
    assert await backend.settle([small]) == [Verdict(id="small", verdict="gone", reason="unknown")]
    await backend.aclose()
