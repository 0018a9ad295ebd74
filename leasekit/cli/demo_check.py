"""Checks of `leasekit demo`: from the files, the histories of the tasks, and the log of their runs."""

import hashlib
import math
import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from leasekit.task import TaskInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A check and its outcome: how many passed, and what was wrong."""

    what: str
    count: int
    wrong: Sequence[str] = ()


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the log: a run began, made a step or ended, at this time of CLOCK_MONOTONIC."""

    task: str
    fence: int
    event: str
    at: float
    pid: int


def measured(content: bytes) -> dict[str, object]:
    return {"sha256": hashlib.sha256(content).hexdigest(), "compressed": len(zlib.compress(content))}


def read_log(path: Path) -> list[Entry]:
    """Return every start, step and end of a run, in the order in which they were written."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Entry) for line in lines]


def under_way(log: Sequence[Entry]) -> dict[int, list[Entry]]:
    """Return the starts of runs that have not ended, by process."""
    ended = {(entry.task, entry.fence) for entry in log if entry.event == "end"}
    starts: dict[int, list[Entry]] = defaultdict(list)
    for entry in log:
        if entry.event == "start" and (entry.task, entry.fence) not in ended:
            starts[entry.pid].append(entry)
    return starts


def check(
    tasks: Sequence[TaskInfo], log: Sequence[Entry], *, killed_at: Mapping[int, float], ended: Collection[int] = ()
) -> list[Finding]:
    """Return all findings. `killed_at`: when each killed process was gone; processes in `ended` are gone too.

    A busy machine may give a worker no processor time for as long as a lease lasts: then its own guard ends it.
    """
    wrong = [task.payload["path"] for task in tasks if task.result != measured(Path(task.payload["path"]).read_bytes())]
    settled = {task.id: sum(run.outcome == "success" for run in task.history) for task in tasks}
    runs = _runs(log, killed_at, ended)
    killed = [entry for pid, starts in under_way(log).items() if pid in killed_at for entry in starts]
    left = [entry.task for entry in killed if max(fence for fence, _, _ in runs[entry.task]) == entry.fence]
    count = sum(len(intervals) for intervals in runs.values())
    return [
        Finding(what="digests equal to those computed directly", count=len(tasks) - len(wrong), wrong=wrong),
        Finding(
            what="tasks settled exactly once",
            count=sum(times == 1 for times in settled.values()),
            wrong=[f"{task}: {times} times" for task, times in settled.items() if times != 1],
        ),
        Finding(
            what="runs taken over from a killed worker",
            count=len(killed) - len(left),
            wrong=[f"{task}: its run was killed, and none followed" for task in left] if killed else ["none was"],
        ),
        Finding(what="runs in all, none of them beside another of its task", count=count, wrong=_overlaps(runs)),
    ]


Interval = tuple[int, float, float]
"""Fence, start and end of a run."""


def _runs(log: Sequence[Entry], killed_at: Mapping[int, float], ended: Collection[int]) -> dict[str, list[Interval]]:
    lines: dict[tuple[str, int], list[Entry]] = defaultdict(list)
    for entry in log:
        lines[entry.task, entry.fence].append(entry)
    runs: dict[str, list[Interval]] = defaultdict(list)
    for (task, fence), (first, *others) in lines.items():
        last = others[-1] if others else first
        if last.event == "end" or (last.pid in ended and last.pid not in killed_at):
            until = last.at  # of a process that ended by itself, the last line is the last known sign of its run
        else:
            until = killed_at.get(last.pid, math.inf)
        runs[task].append((fence, first.at, until))
    return runs


def _overlaps(runs: Mapping[str, Sequence[Interval]]) -> list[str]:
    return [
        f"{task}: fence {later[0]} began before fence {earlier[0]} had ended"
        for task, intervals in runs.items()
        for earlier, later in zip(sorted(intervals), sorted(intervals)[1:], strict=False)
        if later[1] < earlier[2]
    ]
