"""A server that moves tasks to a real Redis, and workers that claim by it, as processes that are killed."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import leasekit
from tests import redis_server
from tests.cli.conftest import LEASEKIT
from tests.ports import free_port
from tests.waiting import eventually

pytestmark = pytest.mark.slow

HANDLERS = """
from pathlib import Path

import leasekit

worker = leasekit.Worker()


@worker.handler("note")
def note(name: str, held: leasekit.Lease) -> None:
    Path("runs", f"{name}-{held.attempt}").touch()
    while Path("hold").exists():
        held.check()
"""


class Processes:
    """A server and workers, each in a session of its own, so that a kill leaves nothing of them."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder, self.url = folder, f"http://127.0.0.1:{free_port()}"
        self.environment = os.environ | {"LEASEKIT_QUEUE": redis_url, "LEASEKIT_URL": self.url}
        self.alive: list[subprocess.Popen[str]] = []

    def start(self, *command: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.alive.append(process)
        return process

    def serve(self) -> "subprocess.Popen[str]":
        port = self.url.rpartition(":")[2]
        server = self.start(*LEASEKIT, "serve", "--port", port, "--store", "sqlite:///tasks.db")
        assert server.stdout is not None
        assert re.search(r"http://\S+", server.stdout.readline())
        return server

    def work(self) -> "subprocess.Popen[str]":
        return self.start(*LEASEKIT, "work", "handlers:worker")

    def kill(self, process: "subprocess.Popen[str]") -> None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        self.alive.remove(process)

    def kill_all(self) -> None:
        for process in list(self.alive):
            self.kill(process)

    def runs(self) -> set[str]:
        return {file.name for file in (self.folder / "runs").iterdir()}


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    (tmp_path / "runs").mkdir()
    (tmp_path / "handlers.py").write_text(HANDLERS)
    redis = redis_server.Server(tmp_path / "redis")
    with ExitStack() as at_end:
        at_end.callback(redis.kill)
        redis.start()
        running = Processes(tmp_path, redis.url)
        at_end.callback(running.kill_all)
        yield running


def test_tasks_run_by_way_of_queues_though_the_server_and_a_worker_are_killed(processes: Processes) -> None:
    """The first of two tasks loses its worker, the second is scheduled after the server was killed."""
    hold = processes.folder / "hold"
    hold.touch()
    server = processes.serve()
    worker = processes.work()
    with leasekit.connect(processes.url) as client:
        client.schedule("note", "first", id="first", claim_timeout=10, heartbeat_timeout=10, enqueue_timeout=2)
        eventually(lambda: processes.runs() == {"first-1"})
        processes.kill(worker)
        processes.kill(server)
        hold.unlink()

        processes.serve()
        processes.work()
        client.schedule("note", "second", id="second", enqueue_timeout=2)
        ended = client.wait_tasks("first", "second", timeout=120)
    assert [info.status for info in ended] == ["success", "success"]
    assert processes.runs() == {"first-1", "first-2", "second-1"}


def test_messages_that_a_killed_worker_has_received_cost_time_and_nothing_else(processes: Processes) -> None:
    """Messages that no worker deletes, for tasks that are enqueued again."""
    processes.serve()
    take = f"""
import asyncio
from leasekit.registry import open_queues
async def main():
    queues, taken = open_queues({processes.environment["LEASEKIT_QUEUE"]!r}), 0
    while taken < 5:
        taken += len(await queues.receive(["note"], limit=5, wait=60))
    print("taken", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    thief = processes.start(sys.executable, "-c", take)
    with leasekit.connect(processes.url) as client:
        for number in range(5):
            client.schedule("note", str(number), id=str(number), enqueue_timeout=2)
        assert thief.stdout is not None
        assert thief.stdout.readline() == "taken\n"
        processes.kill(thief)
        processes.work()
        ended = client.wait_tasks(*map(str, range(5)), timeout=120)
    assert {info.status for info in ended} == {"success"}
    assert processes.runs() == {f"{number}-1" for number in range(5)}
