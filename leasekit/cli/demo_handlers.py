"""Handlers of `leasekit demo`: digest files, slowly, with every run in a log."""

import os
import time
from pathlib import Path

import msgspec

import leasekit
from leasekit.cli.demo_check import Entry, measured

_CHUNKS = 8


class File(msgspec.Struct, frozen=True, kw_only=True):
    """The payload of a task: a file, the seconds that its run takes, and the log of all runs."""

    path: str
    seconds: float
    log: str


worker = leasekit.Worker(concurrency=6)


@worker.handler("digest", run="thread")
def digest(file: File, held: leasekit.Lease) -> dict[str, object]:
    """Return the file's digest and compressed size, after as much time as a long activity would take."""
    _log(file, held, "start")
    try:
        for chunk in range(_CHUNKS):
            held.check()
            _log(file, held, "step")
            held.progress({"chunk": chunk})
            time.sleep(file.seconds / _CHUNKS)  # the activity is long: that is what leases are for
        return measured(Path(file.path).read_bytes())
    finally:
        _log(file, held, "end")


def _log(file: File, held: leasekit.Lease, event: str) -> None:
    entry = Entry(task=held.task.id, fence=held.fence, event=event, at=time.monotonic(), pid=os.getpid())
    # One write to a file in append mode: lines of several processes do not mix.
    with Path(file.log).open("ab", buffering=0) as log:
        log.write(msgspec.json.encode(entry) + b"\n")
