"""The parts of Dropbox's ATF, each a process of its own: all are killed in turn, and no task is lost.

`LEASEKIT_STORE=postgresql://… python fleet.py` needs a PostgreSQL; moto plays SQS. Handlers are in app.py.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import leasekit
from leasekit import NewTask

HERE = Path(__file__).parent
RUNNING = Path("executor.pid")  # written by the handlers
LEASEKIT = [sys.executable, "-m", "leasekit"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


FRONTEND, HSC, CONSUMER, SQS = (free_port() for _ in range(4))
QUEUES = f"sqs://jobs-{{kind}}-{{priority}}?region=eu-west-1&wait=1&endpoint=http://127.0.0.1:{SQS}"
PARTS = {
    "queues": [sys.executable, "-m", "moto.server", "-p", str(SQS)],
    "frontend": [*LEASEKIT, "serve", "--role", "frontend", "--port", str(FRONTEND)],
    "hsc": [*LEASEKIT, "serve", "--role", "hsc", "--port", str(HSC)],
    "consumer": [*LEASEKIT, "serve", "--role", "consumer", "--port", str(CONSUMER), "--queue", QUEUES],
    "host": [*LEASEKIT, "work", "app:worker", "--backend", f"http://127.0.0.1:{HSC}", "--queue", QUEUES],
}
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(HERE),
    "AWS_ACCESS_KEY_ID": "made-up",
    "AWS_SECRET_ACCESS_KEY": "made-up",
}


def running_executor() -> int:
    """Return the process of the executor that has begun a task last; wait for the first one."""
    while not (RUNNING.exists() and (pid := RUNNING.read_text())):
        time.sleep(0.02)
    return int(pid)


class Fleet:
    """The processes, each in a session of its own: a kill of a host leaves nothing of it."""

    def __init__(self) -> None:
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, part: str) -> None:
        with Path(f"{part}.log").open("ab") as log:
            self.running[part] = subprocess.Popen(  # noqa: S603 - our own commands
                PARTS[part], env=ENVIRONMENT, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, part: str) -> None:
        process = self.running.pop(part)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def kill_one(self, part: str) -> None:
        """Kill a part; what is started again by the supervisor of its host is not started here."""
        match part:
            case "executor":
                os.kill(running_executor(), signal.SIGKILL)
            case "controller":
                os.kill(child_of(self.running["host"].pid), signal.SIGKILL)
            case _:
                self.kill(part)
                self.start(part)


def schedule(client: leasekit.Client, part: str, count: int) -> Sequence[str]:
    """Schedule tasks of both kinds and several priorities; return their ids."""
    tasks = [
        NewTask(
            kind=("resize", "mail")[number % 2],
            id=f"{part}-{number}",
            payload=number,
            priority=number % 3,
            claim_timeout=10,  # seconds; those of production are longer
            heartbeat_timeout=10,
            enqueue_timeout=3,
        )
        for number in range(count)
    ]
    return [scheduled.id for scheduled in client.schedule_all(tasks)]


def main() -> None:
    fleet = Fleet()
    try:
        for part in PARTS:
            fleet.start(part)
        with leasekit.connect(f"http://127.0.0.1:{FRONTEND}") as client:
            client.wait_tasks(*schedule(client, "first", 2), timeout=120)
            for part in (*PARTS, "controller", "executor"):
                began_at = time.monotonic()
                RUNNING.unlink()
                ids = schedule(client, f"{part}-killed", 6)
                running_executor()  # the kill comes while one of the tasks runs
                fleet.kill_one(part)
                ids = [*ids, *schedule(client, f"{part}-back", 6)]
                ended = client.wait_tasks(*ids, timeout=180)
                runs = sum(info.attempt for info in ended)
                assert all(info.status == "success" for info in ended), ended
                print(f"{part:<10} killed: 12 tasks, {runs} runs, {time.monotonic() - began_at:.1f} s", flush=True)
    finally:
        for part in list(fleet.running):
            fleet.kill(part)


if __name__ == "__main__":
    main()
