"""The handlers of the fleet: two kinds, each of which runs in executors of its own."""

import fcntl
import os
import time
from pathlib import Path

import leasekit

worker = leasekit.Worker()


def _work(number: int, held: leasekit.Lease) -> int:
    """Take half a second; return the process that did it. A second run at the same time would fail at the lock."""
    with Path(f"task-{held.task.id}").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Path("executor.pid").write_text(str(os.getpid()))
        for _ in range(10):
            held.check()
            time.sleep(0.05)
    return os.getpid()


@worker.handler("resize", run="process", concurrency=2)
def resize(number: int, held: leasekit.Lease) -> int:
    return _work(number, held)


@worker.handler("mail", run="process", concurrency=2)
def mail(number: int, held: leasekit.Lease) -> int:
    return _work(number, held)
