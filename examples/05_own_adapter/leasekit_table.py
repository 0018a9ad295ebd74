"""Leases over a table of jobs: `table:///jobs.db`."""

import asyncio
import json
import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from leasekit import ConfigError, Task, Unavailable
from leasekit.backend import Capabilities
from leasekit.task import Beat, Claimed, Settlement, Verdict

T = TypeVar("T")

TABLE = """
CREATE TABLE IF NOT EXISTS job (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, payload TEXT NOT NULL, ttl REAL NOT NULL DEFAULT 300,
    due REAL NOT NULL DEFAULT 0,      -- when it may be claimed; while it is held: when the lease ends
    token TEXT,                       -- of the last claim
    report TEXT,                      -- how its last run ended
    attempt INTEGER NOT NULL DEFAULT 0, fence INTEGER NOT NULL DEFAULT 0, over INTEGER NOT NULL DEFAULT 0
)
"""
CLAIM = """
UPDATE job SET token = hex(randomblob(16)), due = :now + ttl, attempt = attempt + 1, fence = fence + 1, report = NULL
WHERE id IN (SELECT id FROM job WHERE over = 0 AND due <= :now
             AND kind IN (SELECT value FROM json_each(:kinds)) ORDER BY due LIMIT :limit)
RETURNING id, kind, payload, token, ttl, fence, attempt
"""
HELD = "id = ? AND token = ? AND report IS NULL AND over = 0"


def connect(url: str, *, worker: str) -> "TableBackend":
    """Make the backend for a URL, without opening anything: the entry point names this function."""
    parts = urlsplit(url)
    if parts.netloc or len(parts.path) < 2 or parts.query:
        raise ConfigError("a table's URL is table:///file.db")
    return TableBackend(parts.path[1:])


class TableBackend:
    """Jobs of one SQLite file."""

    # What the service cannot do: the keeper makes up for it where possible.
    capabilities = Capabilities(remembers_claims=False, cancel_requests=False, progress=False, max_result=None)

    def __init__(self, path: str) -> None:
        self._path = path
        self._database: sqlite3.Connection | None = None
        self._turn = asyncio.Lock()

    async def claim(self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str) -> Claimed:
        began = time.monotonic()
        values = {"kinds": json.dumps(list(kinds)), "limit": limit}
        while True:
            rows = await self._write(lambda db: db.execute(CLAIM, values | {"now": time.time()}).fetchall())
            waited = time.monotonic() - began
            if rows or waited >= wait:
                names = ("id", "kind", "payload", "token", "ttl", "fence", "attempt")
                tasks = [dict(zip(names, row, strict=True)) for row in rows]
                return Claimed(
                    tasks=[Task(**task | {"payload": json.loads(task["payload"])}) for task in tasks], waited=waited
                )
            await asyncio.sleep(min(0.1, wait - waited))

    async def beat(self, beats: Sequence[Beat]) -> list[Verdict]:
        return await self._write(lambda db: [self._renew(db, beat) for beat in beats])

    def _renew(self, db: sqlite3.Connection, beat: Beat) -> Verdict:
        now = time.time()
        renew = f"UPDATE job SET due = ? + ttl WHERE {HELD} AND due > ? RETURNING ttl"
        renewed = db.execute(renew, (now, beat.id, beat.token, now)).fetchall()
        if renewed:
            return Verdict(id=beat.id, verdict="renewed", ttl=renewed[0][0])
        return self._gone(db, beat.id, beat.token)

    async def settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        return await self._write(lambda db: [self._end(db, settlement) for settlement in settlements])

    def _end(self, db: sqlite3.Connection, end: Settlement) -> Verdict:
        report = json.dumps([end.outcome, end.result, end.error])
        again = end.outcome in {"retry", "release", "crash"}
        wait = end.retry_after if end.retry_after is not None else 60 if end.outcome == "retry" else 0
        update = f"UPDATE job SET report = ?, over = ?, due = ?, attempt = attempt - ? WHERE {HELD}"
        values = (report, not again, time.time() + wait, end.outcome == "release", end.id, end.token)
        repeated = "SELECT 1 FROM job WHERE id = ? AND token = ? AND report = ?"
        if db.execute(update, values).rowcount or db.execute(repeated, (end.id, end.token, report)).fetchone():
            return Verdict(id=end.id, verdict="settled")
        return self._gone(db, end.id, end.token)

    def _gone(self, db: sqlite3.Connection, job: str, token: str) -> Verdict:
        row = db.execute("SELECT token, report FROM job WHERE id = ?", (job,)).fetchone()
        if row is None:
            reason = "unknown"
        elif not secrets.compare_digest(str(row[0]), token):
            reason = "taken"
        else:
            reason = "expired" if row[1] is None else "settled"
        return Verdict(id=job, verdict="gone", reason=reason)

    async def aclose(self) -> None:
        async with self._turn:
            if self._database is not None:
                self._database.close()
                self._database = None

    async def _write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run a transaction in a thread; its changes are durable when this returns."""
        async with self._turn:
            return await asyncio.to_thread(self._transact, work)

    def _transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if self._database is None:
                self._database = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
                self._database.execute(TABLE)
            self._database.execute("BEGIN IMMEDIATE")
            with self._database:
                return work(self._database)
        except sqlite3.Error as error:
            raise Unavailable(f"the table did not answer: {error}") from error


def put(path: str, job: str, kind: str, payload: Any, ttl: float = 300) -> None:
    """Add a job; leasekit itself does not need this function, the tests do."""
    with sqlite3.connect(path) as db:
        db.execute(TABLE)
        db.execute(
            "INSERT INTO job (id, kind, payload, ttl) VALUES (?, ?, ?, ?)", (job, kind, json.dumps(payload), ttl)
        )
    db.close()
