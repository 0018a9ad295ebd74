"""The log of this process, wherever its code runs: a forked child writes one of its own."""

import os
from pathlib import Path

from harness.history import Log

__all__ = ["FOLDER", "NAME", "SLOTS", "WHO", "current", "path_of"]

# What the harness tells its processes.
FOLDER = "CHAOS_LOGS"
NAME = "CHAOS_NAME"
SLOTS = "CHAOS_SLOTS"
WHO = "CHAOS_WHO"  # what a worker tells its executors: they act for it

_logs: dict[int, Log] = {}


def path_of(folder: Path, who: str) -> Path:
    """Where an incarnation `name.pid` writes."""
    return folder / f"{who}.jsonl"


def current() -> Log:
    """The log of the process that asks."""
    pid = os.getpid()
    if pid not in _logs:
        own = f"{os.environ[NAME]}.{pid}"
        _logs[pid] = Log(path_of(Path(os.environ[FOLDER]), own), who=os.environ.get(WHO, own))
    return _logs[pid]
