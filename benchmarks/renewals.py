"""Renewals on PostgreSQL for a long time: do dead rows pile up, and does a renewal get slower?

100,000 leases of 300 s are renewed every 100 s, in batches of 500, through an engine in this process. For the middle
half of the time, a transaction with an old snapshot is open beside them: what it could see cannot be removed meanwhile.
Each minute is a line of `renewals-minutes.jsonl`. The soak takes an hour (`--seconds 3600`); with `--folder` it can be
stopped, and goes on where it was.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg

from _common import Bench, percentile
from _postgres import running
from leasekit.server.engine import Engine
from leasekit.server.store.postgres.store import PostgresStore
from leasekit.task import Beat, NewTask

BATCH = 500
TTL = 300.0
CYCLE = 100.0
_DATABASE = "renewals"
_STATE = """
SELECT n_dead_tup, n_tup_upd, n_tup_hot_upd, autovacuum_count, pg_relation_size(relid), pg_indexes_size(relid)
FROM pg_stat_user_tables WHERE schemaname = 'leasekit' AND relname = 'trigger'
"""

Minute = dict[str, Any]


def main() -> None:
    bench = Bench("renewals")
    count, seconds = (2_000, 6.0) if bench.quick else (100_000, bench.seconds or 300.0)
    period = 1.0 if bench.quick else 60.0
    with running(bench.folder) as server:
        with psycopg.connect(server.url("postgres"), autocommit=True) as db, suppress(psycopg.errors.DuplicateDatabase):
            db.execute(f"CREATE DATABASE {_DATABASE}".encode())
        url = server.url(_DATABASE)
        PostgresStore(url).migrate()
        path = bench.results / "renewals-minutes.jsonl"
        bench.results.mkdir(parents=True, exist_ok=True)
        if not (bench.folder and _leases(url)):
            path.write_text("")
        minutes = asyncio.run(_Soak(url, path, count, seconds, period).run())
    for case in ("before", "beside a long transaction", "after"):
        if part := [minute for minute in minutes if minute["part"] == case]:
            bench.note(case, **_summary(part, period))
    bench.close()


class _Soak:
    """Renewals at an even rate; a line of the file for each period."""

    def __init__(self, url: str, path: Path, count: int, seconds: float, period: float) -> None:
        self._url = url
        self._path = path
        self._count = count
        self._seconds = seconds
        self._period = period
        self._cycle = CYCLE if period == 60 else period / 2  # seconds between two renewals of a lease
        self._minutes: list[Minute] = [json.loads(line) for line in path.read_text().splitlines()]
        self._took: list[float] = []
        self._lost = 0

    async def run(self) -> list[Minute]:
        async with Engine(PostgresStore(self._url)) as engine:
            leases = _leases(self._url) or await self._take(engine)
            renewing = asyncio.create_task(self._renew(engine, leases))
            with psycopg.connect(self._url, autocommit=True) as watching, psycopg.connect(self._url) as beside:
                try:
                    while self._part() != "over":
                        if self._part() == "beside a long transaction":
                            beside.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                            while self._part() == "beside a long transaction":
                                beside.execute("SELECT count(*) FROM leasekit.store")
                                await self._watch(watching)
                            beside.rollback()
                        else:
                            await self._watch(watching)
                finally:
                    renewing.cancel()
                    await asyncio.gather(renewing, return_exceptions=True)
        return self._minutes

    def _part(self) -> str:
        passed = len(self._minutes) * self._period / self._seconds
        if passed < 0.25:
            return "before"
        if passed < 0.75:
            return "beside a long transaction"
        return "after" if passed < 1 else "over"

    async def _take(self, engine: Engine) -> list[Beat]:
        leases: list[Beat] = []
        for _ in range(self._count // BATCH):
            await engine.schedule([NewTask(kind="held", claim_timeout=TTL, heartbeat_timeout=TTL)] * BATCH)
            claimed = await engine.claim(worker="w", kinds=["held"], limit=BATCH, wait=60, claim_id=str(len(leases)))
            leases += [Beat(id=task.id, token=task.token, started=True) for task in claimed.tasks]
        return leases

    async def _renew(self, engine: Engine, leases: Sequence[Beat]) -> None:
        pause = self._cycle * BATCH / len(leases)
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(10**9):
                due_at = began + number * pause
                await asyncio.sleep(due_at - time.monotonic())
                first = number * BATCH % len(leases)
                group.create_task(self._beat(engine, leases[first : first + BATCH], due_at))

    async def _beat(self, engine: Engine, beats: Sequence[Beat], due_at: float) -> None:
        verdicts = await engine.heartbeat("w", beats)
        self._took.append(1e3 * (time.monotonic() - due_at))
        self._lost += sum(verdict.verdict != "renewed" for verdict in verdicts)

    async def _watch(self, connection: psycopg.Connection[tuple[int, ...]]) -> None:
        """Renew for a minute, and write what it was like."""
        part, before = self._part(), _state(connection)
        self._took, self._lost = [], 0
        await asyncio.sleep(self._period)
        dead, updates, hot, vacuums, table, indexes = _state(connection)
        minute = {
            "minute": len(self._minutes),
            "part": part,
            "renewals": BATCH * len(self._took),
            "lost": self._lost,
            "p50_ms": round(percentile(self._took, 50), 1),
            "p99_ms": round(percentile(self._took, 99), 1),
            "slowest_ms": round(max(self._took), 1),
            "dead_rows": dead,
            "updates": updates - before[1],
            "hot_updates": hot - before[2],
            "autovacuums": vacuums - before[3],
            "table_mb": round(table / 1e6, 1),
            "indexes_mb": round(indexes / 1e6, 1),
            "on": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        self._minutes.append(minute)
        with self._path.open("a") as file:
            file.write(json.dumps(minute) + "\n")


def _state(connection: psycopg.Connection[tuple[int, ...]]) -> tuple[int, ...]:
    row = connection.execute(_STATE).fetchone()
    assert row is not None
    return row


def _leases(url: str) -> list[Beat]:
    """Return the leases that an earlier run has taken."""
    with psycopg.connect(url) as connection:
        rows = connection.execute("SELECT id, token FROM leasekit.trigger WHERE owner IS NOT NULL ORDER BY seq")
        return [Beat(id=row[0], token=row[1], started=True) for row in rows]


def _summary(minutes: Sequence[Minute], period: float) -> dict[str, Any]:
    return {
        "seconds": period * len(minutes),
        "renewals_per_second": round(sum(minute["renewals"] for minute in minutes) / period / len(minutes)),
        "lost": sum(minute["lost"] for minute in minutes),
        "p50_ms": statistics.median(minute["p50_ms"] for minute in minutes),
        "p99_ms": statistics.median(minute["p99_ms"] for minute in minutes),
        "slowest_ms": max(minute["slowest_ms"] for minute in minutes),
        "hot_share": round(sum(m["hot_updates"] for m in minutes) / max(1, sum(m["updates"] for m in minutes)), 3),
        "most_dead_rows": max(minute["dead_rows"] for minute in minutes),
        "autovacuums": sum(minute["autovacuums"] for minute in minutes),
        "table_mb": minutes[-1]["table_mb"],
        "indexes_mb": minutes[-1]["indexes_mb"],
    }


if __name__ == "__main__":
    main()
