"""`recorded+http://`, `recorded+redis://` and so on: these backends, with their calls in a log."""

import os
import sys
from pathlib import Path

from harness.chaos import logs, redis_clock
from harness.history import Began, Granted, read
from harness.recording import Recorded
from leasekit.backend import Backend
from leasekit.registry import open_backend


def connect(url: str, *, worker: str) -> Backend:
    """Open the backend: the entry point names this function."""
    if url.startswith("recorded+redis"):
        redis_clock.install()
    log = logs.current()
    if "harness.chaos.handlers" in sys.modules:  # a worker, not its supervisor, which loads no user code
        os.environ[logs.WHO] = log.who
        log.add(Began, role="worker", slots=int(os.environ[logs.SLOTS]))
    return _Recorded(open_backend(url.removeprefix("recorded+"), worker=worker), log)


class _Recorded(Recorded):
    """A log that knows the fences of other processes too, as a supervisor settles the leases of its worker."""

    def fence_of(self, task_id: str, token: str) -> int | None:
        known = super().fence_of(task_id, token)
        if known is not None:
            return known
        for event in read(*Path(os.environ[logs.FOLDER]).glob("*.jsonl")):
            if isinstance(event, Granted) and (event.task, event.token) == (task_id, token[:6]):
                return event.fence
        return None
