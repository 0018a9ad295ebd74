"""Fair shares: how long a backlog of one key delays the single task of another, and what a task with a key costs,
also beside keys at their limit.

On an SQLite file, in this process. Delays are counted in tasks that were started before; the file of the last case has
a million tasks.
"""

import asyncio
import statistics
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _common import Bench, cpu_seconds, stored_in
from leasekit.registry import open_backend
from leasekit.task import KindSettings, NewTask, Settlement

sys.path.insert(0, str(Path(__file__).parent.parent))
from harness.fair_queueing import FairQueueing

_BATCH = 1000
_LIMITS = {
    "no limit": None,
    "all full": KindSettings(key_concurrency=1),
    "none with a token": KindSettings(key_rate=1e-4),
}


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
    for keys in (3, 100) if bench.quick else (3, 100, 10_000):
        backlog = 2_000 if bench.quick else 1_000_000
        case = f"{keys:,} keys, 1:{backlog:,}, beside the ideal"
        if bench.wants(case):
            bench.note(case, **asyncio.run(_beside_ideal(keys, backlog)))
    for keys in (100,) if bench.quick else (10, 1_000, 10_000):
        for how, limits in _LIMITS.items():
            case = f"{keys:,} running keys, {how}"
            if bench.wants(case):
                spent = [asyncio.run(_beside_full(keys, count // 20, limits)) for _ in range(bench.repeat)]
                bench.note(case, cpu_us=round(statistics.median(spent), 1))
    bench.close()


async def _schedule(backend: Any, count: int, key: str | int | None) -> None:
    """Schedule tasks of one key, or of so many keys in turn."""
    for start in range(0, count, _BATCH):
        numbers = range(start, min(start + _BATCH, count))
        keys = [f"t{number % key}" if isinstance(key, int) else key for number in numbers]
        await backend.schedule([NewTask(kind="k", key=each) for each in keys])


class _Beside:
    """A store and the ideal, with the same tasks: `off` is by how many starts of one key they differed at most."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._ideal = FairQueueing()
        self.started = Counter[str]()
        self.off = 0

    async def put(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), _BATCH):
            batch = keys[start : start + _BATCH]
            await self._backend.schedule([NewTask(kind="k", key=key, payload=key) for key in batch])
        for key in keys:
            self._ideal.put(key)

    async def take(self, limit: int) -> None:
        claimed = await self._backend.claim(["k"], limit=limit, wait=0, claim_id=uuid.uuid4().hex)
        for task in claimed.tasks:
            theirs = self._ideal.take()
            self.started[task.payload] += 1
            self.off = max(
                self.off, *(abs(self.started[key] - self._ideal.started[key]) for key in {task.payload, theirs})
            )


async def _beside_ideal(keys: int, backlog: int) -> dict[str, float]:
    """Return how far the starts of single tasks behind a backlog were from the ideal, and the CPU in µs of each."""
    with stored_in() as url:
        backend: Any = open_backend(url, worker="w")
        try:
            beside = _Beside(backend)
            await beside.put(["giant"] * backlog)
            await beside.take(1)
            await beside.put([f"single-{number}" for number in range(1, keys)])
            began = cpu_seconds()
            while len(beside.started) < keys:
                await beside.take(min(100, keys))
            count = beside.started.total()
            cpu_us = round(1e6 * (cpu_seconds() - began) / count, 1)
            return {"off": beside.off, "started": count, "cpu_us": cpu_us}
        finally:
            await backend.aclose()


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


async def _beside_full(keys: int, count: int, limits: KindSettings | None) -> float:
    """Return the CPU in µs of a claim of one task and its end, beside keys that each have a running task.

    If the kind has limits, each also has one that waits for its end, or for a token.
    """
    with stored_in() as url:
        backend: Any = open_backend(url, worker="w")
        try:
            if limits is not None:
                await backend.set_kind("k", limits)
            await _schedule(backend, keys, keys)
            for start in range(0, keys, _BATCH):
                await backend.claim(["k"], limit=_BATCH, wait=0, claim_id=f"held-{start}")
            if limits is not None:
                await _schedule(backend, keys, keys)
                await backend.claim(["k"], limit=1, wait=0, claim_id="none")
            await backend.schedule([NewTask(kind="k", key=f"free-{number}") for number in range(count)])
            began = cpu_seconds()
            for number in range(count):
                (task,) = (await backend.claim(["k"], limit=1, wait=0, claim_id=f"{number}")).tasks
                await backend.settle([Settlement(id=task.id, token=task.token, outcome="success")])
            return 1e6 * (cpu_seconds() - began) / count
        finally:
            await backend.aclose()


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
