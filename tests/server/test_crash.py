"""A server that is killed while it commits: what it acknowledged is there."""

import itertools
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from leasekit.server.engine import Engine
from leasekit.server.store.urls import open_store
from leasekit.task import Settlement

pytestmark = pytest.mark.anyio

# Schedules, claims and settles without pause, and says in lines what was acknowledged.
SERVER = """
import asyncio, itertools, sys
from leasekit.server.engine import Engine
from leasekit.server.store.urls import open_store
from leasekit.task import Beat, NewTask, Settlement

async def life(engine, name):
    for n in itertools.count():
        task_id = f"{sys.argv[2]}-{name}-{n}"
        await engine.schedule([NewTask(kind=name, id=task_id)])
        print("scheduled", task_id, flush=True)
        (task,) = (await engine.claim(worker="w", kinds=[name], limit=1, wait=0, claim_id=task_id)).tasks
        print("claimed", task.id, task.token, task.fence, flush=True)
        await engine.heartbeat("w", [Beat(id=task.id, token=task.token)])
        await engine.results("w", [Settlement(id=task.id, token=task.token, outcome="success", result=task.id)])
        print("settled", task.id, flush=True)

async def main():
    async with Engine(open_store(sys.argv[1])) as engine:
        print("open", flush=True)
        await asyncio.gather(*(life(engine, f"k{n}") for n in range(4)))

asyncio.run(main())
"""


def run_and_kill(url: str, run: int, after: float) -> list[list[str]]:
    """What a server acknowledged until it was killed, `after` seconds from its start."""
    with subprocess.Popen([sys.executable, "-c", SERVER, url, str(run)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        for _ in range(8):
            process.stdout.readline()
        time.sleep(after)
        process.send_signal(signal.SIGKILL)
        said = process.stdout.read()
    lines = said.splitlines()
    return [line.split() for line in (lines if said.endswith("\n") else lines[:-1])]


@pytest.mark.slow
async def test_a_killed_server_has_lost_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/tasks.db"
    chance = random.Random(11)
    heard = list(itertools.chain.from_iterable(run_and_kill(url, run, chance.uniform(0.0, 0.1)) for run in range(4)))
    assert len(heard) > 20, "it was killed before it did anything: no test"
    settled = {line[1] for line in heard if line[0] == "settled"}
    claimed = {line[1]: (line[2], int(line[3])) for line in heard if line[0] == "claimed"}
    with sqlite3.connect(tmp_path / "tasks.db") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()
    async with Engine(open_store(url)) as engine:
        for task_id in {line[1] for line in heard}:
            info = await engine.queries.get(task_id)
            assert info is not None, f"{task_id} was acknowledged and is lost"
            if task_id in settled:
                assert info.status.value == "success"
            elif task_id in claimed:
                token, fence = claimed[task_id]
                assert info.fence >= fence
                # Its holder may have reported without an answer; if not, the lease is still good for it.
                one = Settlement(id=task_id, token=token, outcome="success", result=task_id)
                (verdict,) = await engine.results("w", [one])
                assert verdict.verdict == "settled"
