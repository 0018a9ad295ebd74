"""Costs of a flow: each execution of a step beside a plain task; and how many flows one worker can poll for at once.

The second question is that of a published framework over a cloud's API (Tencent Cloud), whose test has three steps: the
middle one sleeps for 0.5 s and is tried 11 times, 3 s apart, by 8 threads. All times are a tenth of those here, so the
figures are ratios to the time that a flow takes alone. Beside each: perfect scheduling of the same work, simulated.
"""

import heapq
import statistics
import threading
import time
from collections.abc import Callable, Sequence

import leasekit
from _common import Bench, cpu_seconds, stored_in
from leasekit import NewTask

_STEPS = 12
_THREADS = 8
_COST, _INTERVAL, _TRIES = 0.05, 0.3, 11


def main() -> None:
    bench = Bench("flows")
    if bench.wants("a step beside a task"):
        flows = 20 if bench.quick else 1_000
        runs = [(_tasks(flows * _STEPS), _flows(flows)) for _ in range(bench.repeat)]
        tasks, steps = ([pair[place] for pair in runs] for place in (0, 1))
        _note(bench, "a plain task", tasks, flows * _STEPS)
        ratios = [round(step[0] / task[0], 2) for task, step in runs]
        cpu_ratios = [round(step[1] / task[1], 2) for task, step in runs]
        more = {"ratio": statistics.median(ratios), "cpu_ratio": statistics.median(cpu_ratios)}
        _note(bench, "an execution of a step", steps, flows * _STEPS, **more)
    for count in (4,) if bench.quick else (10, 30, 50, 56, 80, 120):
        if bench.wants(case := f"{count} flows that poll"):
            tries = 3 if bench.quick else _TRIES
            alone = tries * _COST + (tries - 1) * _INTERVAL
            means = [statistics.fmean(_polls(count, tries)) / alone for _ in range(bench.repeat)]
            ideal = statistics.fmean(_ideal(count, tries)) / alone
            bench.note(case, mean=round(statistics.median(means), 3), ideal=round(ideal, 3))
    bench.close()


def _note(bench: Bench, case: str, runs: Sequence[tuple[float, float]], count: int, **more: float) -> None:
    seconds, cpu = (statistics.median(run[place] for run in runs) for place in (0, 1))
    bench.note(case, per_s=round(count / seconds), cpu_ms=round(1e3 * cpu / count, 3), **more)


def _tasks(count: int) -> tuple[float, float]:
    """Return the seconds, and those of CPU, that it takes to schedule and run tasks that do nothing."""
    with stored_in() as url, leasekit.connect(url) as client:
        worker = leasekit.Worker(client, concurrency=_THREADS)
        left = _Left(count, worker.stop)

        @worker.handler("nothing")
        def nothing(payload: dict[str, int]) -> dict[str, int]:
            left.one_less()
            return payload

        return _timed(
            worker, lambda: client.schedule_all([NewTask(kind="nothing", payload={"n": n}) for n in range(count)])
        )


def _flows(count: int) -> tuple[float, float]:
    """Return the seconds, and those of CPU, that it takes to start and run flows of steps that do nothing."""
    with stored_in() as url, leasekit.connect(url) as client:
        worker = leasekit.Worker(client, concurrency=_THREADS)
        left = _Left(count * _STEPS, worker.stop)
        flow = leasekit.Flow("nothing", state=dict[str, int])
        for number in range(_STEPS):

            @flow.step(name=f"step-{number}", on_success=f"step-{number + 1}" if number < _STEPS - 1 else None)
            def step(state: dict[str, int]) -> dict[str, int]:
                left.one_less()
                return state

        worker.add(flow)
        return _timed(worker, lambda: flow.start_all(client, [{"n": n} for n in range(count)]))


def _polls(count: int, tries: int) -> list[float]:
    """Return how long each of so many flows took that one worker runs, from their start at one time."""
    with stored_in() as url, leasekit.connect(url) as client:
        worker = leasekit.Worker(client, concurrency=_THREADS)
        left = _Left(count, worker.stop)
        flow = leasekit.Flow("polls", state=int)
        tried: dict[int, int] = {}
        took: list[float] = []

        @flow.step(on_success="poll")
        def first(number: int) -> None: ...

        @flow.step(retry_every=_INTERVAL, on_success="last")
        def poll(number: int) -> None:
            time.sleep(_COST)
            tried[number] = tried.get(number, 0) + 1
            if tried[number] < tries:
                raise leasekit.NotYet

        @flow.step()
        def last(number: int) -> None:
            took.append(time.monotonic() - began)
            left.one_less()

        worker.add(flow)
        flow.start_all(client, list(range(count)))
        began = time.monotonic()
        worker.run()
        return took


def _ideal(count: int, tries: int) -> list[float]:
    """Return how long each of these would take if threads took what is due, the oldest first, and nothing else."""
    due = [(0.0, number, tries) for number in range(count)]
    threads = [0.0] * _THREADS
    took: list[float] = []
    while due:
        ready_at, number, left = heapq.heappop(due)
        ends_at = max(ready_at, threads[0]) + _COST
        heapq.heapreplace(threads, ends_at)
        if left == 1:
            took.append(ends_at)
        else:
            heapq.heappush(due, (ends_at + _INTERVAL, number, left - 1))
    return took


class _Left:
    """A count of what is left to do, and what is called at its end."""

    def __init__(self, count: int, at_end: Callable[[], object]) -> None:
        self._count, self._at_end, self._lock = count, at_end, threading.Lock()

    def one_less(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self._at_end()


def _timed(worker: leasekit.Worker, schedule: Callable[[], object]) -> tuple[float, float]:
    began, cpu = time.monotonic(), cpu_seconds()
    schedule()
    worker.run()
    return time.monotonic() - began, cpu_seconds() - cpu


if __name__ == "__main__":
    main()
