"""The slowest heartbeat beside the largest legal requests and beside maintenance, over HTTP (SQLite) and on Redis.

A process of its own renews one lease a hundred times a second. Beside it, clients send the largest requests of one
kind, one after the other. On Redis the slowest script is measured, too: Redis serves nobody else meanwhile.
"""

import asyncio
import itertools
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import redis

from _common import Bench, Server, percentile
from leasekit.registry import open_backend
from leasekit.task import Beat, NewTask, Settlement, Task
from on_redis import running

_spawn = multiprocessing.get_context("spawn")
_EVERY = 0.01  # seconds between two heartbeats
_MOST = 1_000  # items of a request
_MEGABYTE = "x" * 1_000_000
_ids = itertools.count()

Work = Callable[[], Awaitable[object]]


def main() -> None:
    bench = Bench("worst")
    for name, service in (("http", _over_http), ("redis", _on_redis)):
        with service() as (url, slowest_script):
            asyncio.run(_Service(bench, name, url, slowest_script).measure())
    bench.close()


@contextmanager
def _over_http() -> Generator[tuple[str, Callable[[], float] | None]]:
    with Server.running() as server:
        yield server.url, None


@contextmanager
def _on_redis() -> Generator[tuple[str, Callable[[], float] | None]]:
    with running() as (url, _), redis.Redis.from_url(url) as connection:
        connection.config_set("slowlog-log-slower-than", 500)

        def slowest_script() -> float:
            took = [entry["duration"] for entry in connection.slowlog_get(128)]
            connection.slowlog_reset()
            return max(took, default=0) / 1e3

        yield url, slowest_script


class _Service:
    """A service under load, and the heartbeats beside the load."""

    def __init__(self, bench: Bench, name: str, url: str, slowest_script: Callable[[], float] | None) -> None:
        self._bench = bench
        self._name = name
        self._url = url
        self._slowest_script = slowest_script
        self._backend: Any = open_backend(url, worker="load")
        self._seconds = 0.5 if bench.quick else 5.0

    async def measure(self) -> None:
        count = 2_000 if self._bench.quick else 100_000
        try:
            await self._beside("idle", lambda: asyncio.sleep(0.1), senders=1)
            await self._beside("schedules of 1,000", self._schedule)
            await self._beside("schedules of 1 MB", self._schedule_big)
            await self._beside("whole lives by 1,000", self._lives)
            await self._beside("unknown ids by 1,000", self._unknown)
            await self._beside("lists and stats", self._look, senders=1)
            await self._expire(count)
            await self._redrive(count)
            await self._purge()
        finally:
            await self._backend.aclose()

    async def _beside(self, case: str, work: Work, *, senders: int = 2) -> None:
        """Do this work again and again for some seconds."""
        if self._bench.wants(f"{self._name} {case}"):

            async def send(until: float) -> int:
                calls = 0
                while time.monotonic() < until:
                    await work()
                    calls += 1
                return calls

            async def load() -> dict[str, Any]:
                until = time.monotonic() + self._seconds
                return {"calls": sum(await asyncio.gather(*(send(until) for _ in range(senders))))}

            await self._beaten(case, load)

    async def _beaten(self, case: str, load: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        """Note how long heartbeats took while `load` ran."""
        if self._slowest_script:
            self._slowest_script()
        ours, theirs = _spawn.Pipe()
        beating = _spawn.Process(target=_beat, args=(theirs, self._url))
        beating.start()
        await asyncio.to_thread(ours.recv)
        values = await load()
        ours.send("end")
        took = await asyncio.to_thread(ours.recv)
        beating.join()
        times = {"p50_ms": percentile(took, 50), "p99_ms": percentile(took, 99), "slowest_ms": max(took)}
        script = {"slowest_script_ms": self._slowest_script()} if self._slowest_script else {}
        rounded = {name: round(value, 1) for name, value in {**times, **script}.items()}
        self._bench.note(f"{self._name} {case}", **rounded, heartbeats=len(took), **values)

    async def _schedule(self) -> None:
        await self._backend.schedule([NewTask(kind="scheduled", payload=number) for number in range(_MOST)])

    async def _schedule_big(self) -> None:
        await self._backend.schedule([NewTask(kind="big", payload=_MEGABYTE) for _ in range(7)])

    async def _lives(self) -> None:
        await self._schedule_as("lives", _MOST)
        tasks: list[Task] = []
        while len(tasks) < _MOST and (claimed := await self._claim("lives", _MOST)):
            tasks += claimed
        await self._backend.beat([Beat(id=task.id, token=task.token) for task in tasks])
        await self._backend.settle([Settlement(id=task.id, token=task.token, outcome="success") for task in tasks])

    async def _unknown(self) -> None:
        ids = [f"unknown-{next(_ids)}" for _ in range(_MOST)]
        await self._backend.cancel(ids)
        await self._backend.beat([Beat(id=task_id, token=task_id) for task_id in ids])

    async def _look(self) -> None:
        await self._backend.list_tasks(limit=_MOST)
        await self._backend.list_tasks(limit=_MOST, kind="scheduled")
        await self._backend.stats()
        await self._backend.workers()

    async def _expire(self, count: int) -> None:
        """Let the leases of so many tasks end, and count how fast they are taken back by claims of one worker."""

        taken: list[Task] = []
        ttl = 3.0 if self._bench.quick else 60.0  # longer than it takes to claim all

        async def claim_all() -> dict[str, Any]:
            began = time.monotonic()
            taken.clear()
            while len(taken) < count:
                taken.extend(await self._claim("expiring", _MOST))
            return {"a_second": round(count / (time.monotonic() - began))}

        if self._bench.wants(f"{self._name} expired leases"):
            for _ in range(count // _MOST):
                await self._schedule_as("expiring", _MOST, claim_timeout=ttl)
            await claim_all()
            await asyncio.sleep(ttl)
            await self._beaten(f"{count:,} expired leases", claim_all)
            for first in range(0, count, _MOST):
                failed = [(task.id, task.token) for task in taken[first : first + _MOST]]
                await self._backend.settle([Settlement(id=i, token=t, outcome="fatal") for i, t in failed])

    async def _redrive(self, count: int) -> None:
        async def load() -> dict[str, Any]:
            began, redriven = time.monotonic(), 0
            where: dict[str, Any] = {"kind": "expiring", "status": "fatal_failure", "limit": _MOST}
            while True:
                answer = await self._backend.redrive(**where)
                redriven += len(answer.tasks)
                if answer.cursor is None:
                    return {"items": redriven, "a_second": round(redriven / (time.monotonic() - began))}
                where["cursor"] = answer.cursor

        if self._bench.wants(f"{self._name} redrive"):
            await self._beaten(f"redrive of {count:,}", load)

    async def _purge(self) -> None:
        async def load() -> dict[str, Any]:
            began, removed = time.monotonic(), 0
            where: dict[str, Any] = {}
            while True:
                answer = await self._backend.purge(**where)
                removed += sum(sum(statuses.values()) for statuses in answer.kinds.values())
                if answer.cursor is None:
                    return {"items": removed, "a_second": round(removed / (time.monotonic() - began))}
                where["cursor"] = answer.cursor

        if self._bench.wants(f"{self._name} purge"):
            await self._beaten("purge", load)

    async def _schedule_as(self, kind: str, count: int, **options: Any) -> None:
        await self._backend.schedule([NewTask(kind=kind, payload=number, **options) for number in range(count)])

    async def _claim(self, kind: str, limit: int) -> list[Task]:
        claimed = await self._backend.claim([kind], limit=limit, wait=1.0, claim_id=f"claim-{next(_ids)}")
        tasks: list[Task] = list(claimed.tasks)
        return tasks


def _beat(pipe: Connection, url: str) -> None:
    asyncio.run(_beating(pipe, url))


async def _beating(pipe: Connection, url: str) -> None:
    """Renew one lease until told to end; then send how many milliseconds each renewal took."""
    backend: Any = open_backend(url, worker="holder")
    took: list[float] = []
    try:
        kind = f"held-{time.time_ns()}"
        await backend.schedule([NewTask(kind=kind)])
        (task,) = (await backend.claim([kind], limit=1, wait=1.0, claim_id=kind)).tasks
        await backend.beat([Beat(id=task.id, token=task.token)])
        pipe.send("ready")
        while not pipe.poll():
            began = time.monotonic()
            (verdict,) = await backend.beat([Beat(id=task.id, token=task.token)])
            assert verdict.verdict == "renewed", verdict
            took.append(1e3 * (time.monotonic() - began))
            await asyncio.sleep(_EVERY)
        await backend.settle([Settlement(id=task.id, token=task.token, outcome="success")])
    finally:
        await backend.aclose()
    pipe.send(took)


if __name__ == "__main__":
    main()
