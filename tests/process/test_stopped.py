"""A process that was stopped says so when it goes on: not only that its lease is over."""

import os
import signal
from pathlib import Path

import pytest

import leasekit
from tests.process.conftest import Fleet
from tests.waiting import eventually

TTL = 2.0

HOLDER = f"""
import json, sys, threading, time
import leasekit
from leasekit.hooks import Renewed

def hear(event):
    if isinstance(event, Renewed):
        print("renewed", threading.get_native_id(), flush=True)

with leasekit.connect(sys.argv[1], hooks=[hear], heartbeats=leasekit.Heartbeats().for_ttl({TTL})) as client:
    task = next(client.tasks("k"))
    try:
        with leasekit.lease(task) as held:
            while True:
                held.check()
                time.sleep(0.02)
    except leasekit.LeaseLost as lost:
        print("raised", json.dumps([str(lost), [event.what for event in lost.events]]), flush=True)
"""


def sleeps(pid: int, thread: int) -> bool:
    """Whether a thread waits for something, rather than being at work."""
    stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text(encoding="ascii")
    return stat.rpartition(")")[2].split()[0] == "S"


@pytest.mark.slow
def test_a_stopped_process_says_that_it_was_stopped(fleet: Fleet) -> None:
    fleet.serve()
    with leasekit.connect(fleet.url) as client:
        task = client.schedule("k", claim_timeout=TTL, heartbeat_timeout=TTL)
        holder = fleet.start("holder", "-c", HOLDER, fleet.url)

        def lines(word: str) -> list[str]:
            return [line for line in holder.log.read_text().splitlines() if line.startswith(word)]

        renewed = eventually(lambda: lines("renewed"), what="a beat")
        thread = int(renewed[0].split()[1])
        eventually(lambda: all(sleeps(holder.pid, thread) for _ in range(3)), what="a driver that waits")
        os.kill(holder.pid, signal.SIGSTOP)
        try:
            # By then the lease is over on both sides.
            info = eventually(lambda: info if (info := client.get(task.id)) and info.crashes else None, what="its end")
        finally:
            os.kill(holder.pid, signal.SIGCONT)
    (lost,) = eventually(lambda: lines("raised"), what="the loss")
    assert "because the process was stopped for" in lost, lost
    assert "; trust ended at" in lost
    assert '"stopped"' in lost
    (run,) = info.history
    assert run.outcome == "expired"
    assert "nothing was heard from worker" in run.error["message"]
