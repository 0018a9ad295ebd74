"""Tasks that poll: how long do they take in one process, and in two of which one comes later?

The experiments are those that Tencent Cloud's engineers have published of their framework for tasks and steps over a
cloud's API: 8 threads, a step that costs 0.5 s and is tried 11 times, 3 s apart, so that a task alone takes 35.5 s.
Here are the published times, or a fifth of them (`scale`); all figures are ratios to the ideal. Beside them: ideal
scheduling of the same arrivals, in simulated time (`harness/polling.py`).

- `N at once`: N tasks are scheduled together, for one worker that may hold all of them, 56, or as many as it measures.
- `N spread`: they come evenly over one interval.
- `skew`: 50 tasks for one worker; then a second one starts, and 50 more come. By consumers of whole tasks and of
  steps.
"""

import json
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import Bench, Server
from leasekit import Client, connect
from leasekit.task import NewTask

sys.path.insert(0, str(Path(__file__).parent.parent))
from harness.polling import Polling, simulate

_SCALE = 0.2
_SLOTS = 8
_WORK = Polling(cost=0.5 * _SCALE, interval=3.0 * _SCALE, calls=11)
_PUBLISHED = Polling(cost=0.5, interval=3.0, calls=11)
_QUICK = Polling(cost=0.02, interval=0.1, calls=3)
_COUNTS = (10, 30, 50, 56, 60, 80, 100, 120)
_WINDOWS: dict[int, tuple[int | str, ...]] = {50: ("auto",), 56: ("auto",), 100: (56, "auto"), 120: (56, "auto")}
_AT_FULL_SCALE = (50, 56)
_SECOND_AFTER = 1.0  # seconds
_PATIENCE = 300.0


@dataclass(frozen=True, slots=True)
class Ran:
    """A task, as its consumer has told of it."""

    number: int
    arrived_at: float
    began_at: float
    ended_at: float
    consumer: str

    @property
    def took(self) -> float:
        return self.ended_at - self.arrived_at

    @property
    def ran(self) -> float:
        return self.ended_at - self.began_at


class Consumers:
    """A server, workers as processes, and what they tell of the tasks that have ended."""

    def __init__(self, url: str, client: Client, work: Polling) -> None:
        self.client = client
        self._work = work
        self._url = url
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._ended: queue.SimpleQueue[Ran] = queue.SimpleQueue()

    @classmethod
    @contextmanager
    def running(cls, work: Polling) -> Iterator["Consumers"]:
        with Server.running() as server, connect(server.url) as client:
            consumers = cls(server.url, client, work)
            try:
                yield consumers
            finally:
                for name in list(consumers._processes):
                    consumers.stop(name)

    def start(self, name: str, window: int | str) -> None:
        """Start a consumer, and wait until it claims."""
        arguments = [self._url, name, window, _SLOTS, self._work.cost, self._work.interval, self._work.calls]
        command = [sys.executable, str(Path(__file__).with_name("_poller.py")), *map(str, arguments)]
        process = self._processes[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, args=[process.stdout], daemon=True).start()
        until = time.monotonic() + _PATIENCE
        while not any(worker.name == name and worker.kinds for worker in self.client.workers()):
            assert time.monotonic() < until, f"consumer {name} does not claim"
            time.sleep(0.02)

    def stop(self, name: str) -> None:
        process = self._processes.pop(name)
        process.terminate()
        process.wait()

    def _read(self, lines: Any) -> None:
        for line in lines:
            self._ended.put(Ran(**json.loads(line)))

    def schedule(self, kind: str, numbers: Sequence[int]) -> None:
        now = time.time()
        tasks = [NewTask(kind=kind, payload={"number": number, "arrived_at": now}) for number in numbers]
        self.client.schedule_all(tasks)

    def take(self, count: int) -> list[Ran]:
        """Return the tasks that have ended, once there are so many."""
        return [self._ended.get(timeout=_PATIENCE) for _ in range(count)]


def _at_once(count: int, window: int | str, work: Polling, repeat: int) -> list[list[Ran]]:
    runs: list[list[Ran]] = []
    with Consumers.running(work) as consumers:
        consumers.start("first", window)
        for _ in range(repeat):
            consumers.schedule("whole", range(count))
            runs.append(consumers.take(count))
    return runs


def _spread(count: int, work: Polling, repeat: int) -> list[list[Ran]]:
    runs: list[list[Ran]] = []
    with Consumers.running(work) as consumers:
        consumers.start("first", "auto")
        for _ in range(repeat):
            began_at = time.monotonic()
            for number in range(count):
                time.sleep(max(0.0, began_at + number * (work.interval + work.cost) / count - time.monotonic()))
                consumers.schedule("whole", [number])
            runs.append(consumers.take(count))
    return runs


def _skewed(kind: str, count: int, work: Polling, repeat: int) -> list[list[Ran]]:
    runs: list[list[Ran]] = []
    for _ in range(repeat):
        with Consumers.running(work) as consumers:
            consumers.start("first", "auto")
            consumers.schedule(kind, range(count))
            time.sleep(_SECOND_AFTER)
            consumers.start("second", "auto")
            consumers.schedule(kind, range(count, 2 * count))
            runs.append(consumers.take(2 * count))
    return runs


def _figures(runs: Sequence[Sequence[Ran]], work: Polling) -> dict[str, Any]:
    """Return the medians of several runs, with the lowest and highest mean, as ratios to the ideal."""
    means = [statistics.mean(task.took for task in run) / work.ideal for run in runs]
    ends = [max(task.ended_at for task in run) - min(task.arrived_at for task in run) for run in runs]
    busy = len(runs[0]) * work.calls * work.cost / _SLOTS
    return {
        "scale": round(work.cost / _PUBLISHED.cost, 2),
        "ideal_s": round(work.ideal, 2),
        "mean": round(statistics.median(means), 3),
        "means": [round(min(means), 3), round(max(means), 3)],
        "ran": round(statistics.median(statistics.mean(task.ran for task in run) for run in runs) / work.ideal, 3),
        "slots_busy": round(statistics.median(busy / end for end in ends), 3),
    }


def _ideal(arrivals: Sequence[float], work: Polling) -> dict[str, Any]:
    lives = simulate(arrivals, work, slots=_SLOTS)
    end = max(life.ended_at for life in lives)
    return {
        "ideal_mean": round(statistics.mean(life.took for life in lives) / work.ideal, 3),
        "ideal_slots_busy": round(len(lives) * work.calls * work.cost / _SLOTS / end, 3),
    }


def _of_each(runs: Sequence[Sequence[Ran]], work: Polling) -> dict[str, Any]:
    """Return the median number of each consumer's tasks, and the median of their means."""
    figures: dict[str, Any] = {}
    for name in ("first", "second"):
        its = [[task.took / work.ideal for task in run if task.consumer == name] for run in runs]
        figures[f"{name}_tasks"] = round(statistics.median(map(len, its)))
        figures[f"{name}_mean"] = round(statistics.median([statistics.mean(took) for took in its if took] or [0.0]), 3)
    return figures


def main() -> None:
    bench = Bench("polling")
    for count in (10,) if bench.quick else _COUNTS:
        work = _PUBLISHED if count in _AT_FULL_SCALE else _QUICK if bench.quick else _WORK
        for window in (count, *_WINDOWS.get(count, ())):
            case = f"{count} at once, window {'for all' if window == count else window}"
            if bench.wants(case):
                figures = _figures(_at_once(count, window, work, bench.repeat), work)
                bench.note(case, **figures, **_ideal([0.0] * count, work))
    work = _QUICK if bench.quick else _PUBLISHED
    for count in (10,) if bench.quick else (50, 56):
        arrivals = [number * (work.interval + work.cost) / count for number in range(count)]
        case = f"{count} spread over an interval, window auto"
        if bench.wants(case):
            bench.note(case, **_figures(_spread(count, work, bench.repeat), work), **_ideal(arrivals, work))
    for kind, of in (("whole", "whole tasks"), ("create", "steps")):
        case = f"skew, by consumers of {of}"
        if bench.wants(case):
            runs = _skewed(kind, 5 if bench.quick else 50, work, bench.repeat)
            bench.note(case, **_figures(runs, work), **_of_each(runs, work))
    bench.close()


if __name__ == "__main__":
    main()
