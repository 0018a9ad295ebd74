"""Fair shares: how long a backlog of one key delays the single task of another, and what a task with a key costs.

On an SQLite file, in this process. Delays are counted in tasks that were started before; the file of the last case has
a million tasks.
"""

import asyncio
import statistics
import time
from typing import Any

from _common import Bench, cpu_seconds, stored_in
from leasekit.registry import open_backend
from leasekit.task import NewTask, Settlement

_BATCH = 1000


def main() -> None:
    bench = Bench("shares")
    count = 1_000 if bench.quick else 20_000
    for keys in (0, 1, 100) if bench.quick else (0, 1, 100, 10_000):
        case = f"{keys:,} keys" if keys else "without keys"
        if bench.wants(case):
            runs = [asyncio.run(_costs(keys, count)) for _ in range(bench.repeat)]
            costs = {name: round(statistics.median(run[name] for run in runs), 1) for name in runs[0]}
            bench.note(case, **costs)
    for backlog in (2_000,) if bench.quick else (100_000, 1_000_000):
        for has_keys in (True, False):
            case = f"behind {backlog:,} tasks, {'with' if has_keys else 'without'} keys"
            if bench.wants(case):
                bench.note(case, **asyncio.run(_delay(backlog, has_keys=has_keys)))
    bench.close()


async def _schedule(backend: Any, count: int, key: str | int | None) -> None:
    """Schedule tasks of one key, or of so many keys in turn."""
    for start in range(0, count, _BATCH):
        numbers = range(start, min(start + _BATCH, count))
        keys = [f"t{number % key}" if isinstance(key, int) else key for number in numbers]
        await backend.schedule([NewTask(kind="k", key=each) for each in keys])


async def _costs(keys: int, count: int) -> dict[str, float]:
    """Return the CPU in µs for each task."""
    costs: dict[str, float] = {}
    with stored_in() as url:
        backend: Any = open_backend(url, worker="w")
        try:
            await backend.schedule([NewTask(kind="other")])  # opens the file
            began = cpu_seconds()
            await _schedule(backend, count, keys or None)
            costs["schedule_cpu_us"] = 1e6 * (cpu_seconds() - began) / count
            for limit, most in ((1, count // 20), (100, count // 2)):
                began, tasks = cpu_seconds(), list[Any]()
                while len(tasks) < most:
                    claimed = await backend.claim(["k"], limit=limit, wait=0, claim_id=f"{limit}-{len(tasks)}")
                    tasks += claimed.tasks
                costs[f"claim_by_{limit}_cpu_us"] = 1e6 * (cpu_seconds() - began) / most
            began = cpu_seconds()
            for start in range(0, len(tasks), 100):
                batch = tasks[start : start + 100]
                await backend.settle([Settlement(id=task.id, token=task.token, outcome="success") for task in batch])
            costs["settle_by_100_cpu_us"] = 1e6 * (cpu_seconds() - began) / len(tasks)
        finally:
            await backend.aclose()
    return costs


async def _delay(backlog: int, *, has_keys: bool) -> dict[str, Any]:
    """Return how many tasks of a backlog are started before a single task that comes behind it, and the seconds."""
    with stored_in() as url:
        backend: Any = open_backend(url, worker="w")
        try:
            await _schedule(backend, backlog, "giant" if has_keys else None)
            await backend.schedule([NewTask(kind="k", id="single", key="small" if has_keys else None)])
            began, before = time.monotonic(), 0
            while True:
                claimed = await backend.claim(["k"], limit=1 if has_keys else 1000, wait=0, claim_id=str(before))
                ids = [task.id for task in claimed.tasks]
                if "single" in ids:
                    return {"before": before + ids.index("single"), "seconds": round(time.monotonic() - began, 3)}
                before += len(ids)
        finally:
            await backend.aclose()


if __name__ == "__main__":
    main()
