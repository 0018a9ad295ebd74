"""Code that closes all descriptors of its process, as some daemons do: one line, and the leases are told lost."""

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, logging, os, sys, time
import leasekit

logging.basicConfig(format="%(levelname)s %(message)s")
url = sys.argv[1]
client = leasekit.connect(url, retry_for=0)
client.schedule_all([leasekit.NewTask(kind="k", id=id) for id in "ab"])
tasks = iter(client.tasks("k"))
held = leasekit.lease(next(tasks))
lost = []
try:
    with leasekit.lease(next(tasks)) as other:
        try:
            with held:
                os.closerange(3, 1000)
                while True:
                    held.check()
                    time.sleep(0.01)
        except leasekit.LeaseLost as error:
            lost.append(error)
        while True:
            other.check()
            time.sleep(0.01)
except leasekit.LeaseLost as error:
    lost.append(error)
assert [(error.task_id, error.reason) for error in lost] == [("a", "closed"), ("b", "closed")]
assert "has closed leasekit's descriptors" in str(lost[0])
try:
    client.stats()
    raise AssertionError("the client goes on")
except leasekit.Closed:
    pass
client.close()
with leasekit.connect("memory://another") as again:  # a new client has a new thread
    again.schedule("k", id="c")
    assert again.get("c").status == "new"
"""


@pytest.mark.parametrize("url", ["memory://", "sqlite:///tasks.db"])
def test_leases_are_lost_with_the_descriptors_of_the_driver(url: str, tmp_path: object) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, url], capture_output=True, text=True, timeout=60, check=False, cwd=str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    levels = [line.split()[0] for line in done.stderr.splitlines()]
    assert levels == ["ERROR", "WARNING", "WARNING"], done.stderr  # the descriptors, and each lease
