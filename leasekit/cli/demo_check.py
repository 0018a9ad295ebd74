"""What `leasekit demo` verifies: from the files, from the histories of the tasks, and from the log of their runs."""

import hashlib
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from leasekit.task import TaskInfo

__all__ = ["Entry", "Finding", "check", "measured", "read_log"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was verified: how many, and what was wrong."""

    what: str
    count: int
    wrong: Sequence[str] = ()


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the log: a run began or ended, at this time of CLOCK_MONOTONIC."""

    task: str
    fence: int
    event: str
    at: float
    pid: int


def measured(content: bytes) -> dict[str, object]:
    """What is asked of a file."""
    return {"sha256": hashlib.sha256(content).hexdigest(), "compressed": len(zlib.compress(content))}


def read_log(path: Path) -> list[Entry]:
    """Every start and end of a run, in the order in which they were written."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Entry) for line in lines]


def check(tasks: Sequence[TaskInfo], log: Sequence[Entry], *, killed_at: Mapping[int, float]) -> list[Finding]:
    """All findings. `killed_at` says when which process was seen to be gone."""
    wrong = [task.payload["path"] for task in tasks if task.result != measured(Path(task.payload["path"]).read_bytes())]
    settled = {task.id: sum(run.outcome == "success" for run in task.history) for task in tasks}
    runs = _runs(log, killed_at)
    again = [task for task, intervals in runs.items() if len(intervals) > 1]
    count = sum(len(intervals) for intervals in runs.values())
    return [
        Finding(what="digests equal to those computed directly", count=len(tasks) - len(wrong), wrong=wrong),
        Finding(
            what="tasks settled exactly once",
            count=sum(times == 1 for times in settled.values()),
            wrong=[f"{task}: {times} times" for task, times in settled.items() if times != 1],
        ),
        Finding(what="runs taken over from a killed worker", count=len(again), wrong=[] if again else ["none was"]),
        Finding(what="runs in all, none of them beside another of its task", count=count, wrong=_overlaps(runs)),
    ]


Interval = tuple[int, float, float]
"""Fence, start, end."""


def _runs(log: Sequence[Entry], killed_at: Mapping[int, float]) -> dict[str, list[Interval]]:
    started: dict[tuple[str, int], Entry] = {}
    runs: dict[str, list[Interval]] = defaultdict(list)
    for entry in log:
        if entry.event == "start":
            started[entry.task, entry.fence] = entry
        else:
            start = started.pop((entry.task, entry.fence))
            runs[entry.task].append((entry.fence, start.at, entry.at))
    for entry in started.values():  # a run without an end was killed with its process
        runs[entry.task].append((entry.fence, entry.at, killed_at.get(entry.pid, float("inf"))))
    return runs


def _overlaps(runs: Mapping[str, Sequence[Interval]]) -> list[str]:
    return [
        f"{task}: fence {later[0]} began before fence {earlier[0]} had ended"
        for task, intervals in runs.items()
        for earlier, later in zip(sorted(intervals), sorted(intervals)[1:], strict=False)
        if later[1] < earlier[2]
    ]
