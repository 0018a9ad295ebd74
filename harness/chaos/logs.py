"""The log of the current process; a forked child writes its own."""

import os
from pathlib import Path

from harness.history import Log

# Environment variables that the harness sets for its processes.
FOLDER = "CHAOS_LOGS"
NAME = "CHAOS_NAME"
SLOTS = "CHAOS_SLOTS"
WHO = "CHAOS_WHO"  # set by a worker for its executors, which log in its name

_logs: dict[int, Log] = {}


def current() -> Log:
    pid = os.getpid()
    if pid not in _logs:
        own = f"{os.environ[NAME]}.{pid}"
        _logs[pid] = Log(Path(os.environ[FOLDER]) / f"{own}.jsonl", who=os.environ.get(WHO, own))
    return _logs[pid]
