"""Whole lives a second: scheduled, claimed, run, settled, with a durable store.

Over HTTP there are three processes: a server, a worker, and a client that schedules; embedded there is one. The handler
does nothing, so all of the time is leasekit's. Beside it, in the same run: the server's own statements on bare sqlite3
(schedule, claim, beat, settle; batches of 500), the time that would be left if all else cost nothing.
"""

import itertools
import multiprocessing
import sqlite3
import statistics
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sqlalchemy import Column

import leasekit
from _common import Bench, Server, cpu_seconds, stored_in
from leasekit.server.store.schema import run, task, trigger
from leasekit.server.store.sql import lanes, leases, tasks
from leasekit.server.store.sqlite.session import SqliteSession
from leasekit.server.store.sqlite.store import SqliteStore
from leasekit.task import NewTask

BATCH = 500
_spawn = multiprocessing.get_context("spawn")


def main() -> None:
    bench = Bench("lives")
    count = 400 if bench.quick else 20_000
    rates: dict[str, list[dict[str, float]]] = {}
    for _ in range(bench.repeat):  # in turns, so that a noisy minute does not hit a single case
        for case in ("bare sqlite3", "embedded async", "embedded thread", "http async", "http thread"):
            if bench.wants(case):
                rates.setdefault(case, []).append(_measured(case, count))
    bare = statistics.median(run["rate"] for run in rates.get("bare sqlite3", [{"rate": float("nan")}]))
    for case, runs in rates.items():
        rate = statistics.median(run["rate"] for run in runs)
        cpu = {name: round(statistics.median(run[name] for run in runs), 1) for name in runs[0] if name != "rate"}
        rest = {"tasks": count, "all": [round(run["rate"]) for run in runs], "of_bare": round(rate / bare, 3)}
        bench.note(case, lives_per_second=round(rate), cpu_us_per_life=cpu, **rest)
    bench.close()


def _measured(case: str, count: int) -> dict[str, float]:
    where, _, run = case.partition(" ")
    if where == "bare":
        return _bare(count)
    return _embedded(run, count) if where == "embedded" else _http(run, count)


# One process --------------------------------------------------------------------------------------------------


def _embedded(run: str, count: int) -> dict[str, float]:
    with stored_in() as url, leasekit.connect(url) as client:
        client.schedule("warm-up")
        cpu = cpu_seconds()
        scheduling = threading.Thread(target=_schedule, args=(client, count))
        worker = _worker(client, run, count)
        began = time.monotonic()
        scheduling.start()
        worker.run()
        passed, cpu = time.monotonic() - began, cpu_seconds() - cpu
        scheduling.join()
        _check(client, count)
    return {"rate": count / passed, "process": 1e6 * cpu / count}


def _schedule(client: leasekit.Client, count: int) -> None:
    for _ in range(count // BATCH or 1):
        client.schedule_all([NewTask(kind="nothing") for _ in range(min(BATCH, count))])


def _worker(client: leasekit.Client, run: str, count: int) -> leasekit.Worker:
    """A worker that stops after `count` handlers; its `run` returns when all results are reported."""
    worker = leasekit.Worker(client, concurrency=64 if run == "async" else 8)
    ended = itertools.count(1)

    def nothing(payload: None) -> None:
        if next(ended) == count:
            worker.stop()

    async def nothing_async(payload: None) -> None:
        nothing(payload)

    worker.handler("nothing")(nothing_async if run == "async" else nothing)
    return worker


def _check(client: leasekit.Client, count: int) -> None:
    counts = client.stats().kinds["nothing"]
    assert counts == {"success": count}, counts


# Three processes ----------------------------------------------------------------------------------------------


def _http(run: str, count: int) -> dict[str, float]:
    with Server.running() as server:
        ours, theirs = _spawn.Pipe()
        working = _spawn.Process(target=_work, args=(theirs, server.url, run, count))
        scheduling = _spawn.Process(target=_submit, args=(theirs, server.url, count))
        working.start()
        assert ours.recv() == "ready"
        scheduling.start()
        assert ours.recv() == "ready"
        cpu = server.cpu
        began = time.monotonic()
        ours.send("go")
        reports = dict([ours.recv(), ours.recv()])
        cpu = server.cpu - cpu
        working.join()
        scheduling.join()
        with leasekit.connect(server.url) as client:
            _check(client, count)
    ended, worker_cpu = reports["worker"]
    client_cpu = reports["client"][1]
    seconds = {"server": cpu, "worker": worker_cpu, "client": client_cpu}
    return {"rate": count / (ended - began), **{name: 1e6 * cpu / count for name, cpu in seconds.items()}}


def _work(pipe: Connection, url: str, run: str, count: int) -> None:
    with leasekit.connect(url) as client:
        client.stats()
        worker = _worker(client, run, count)
        pipe.send("ready")
        cpu = cpu_seconds()
        worker.run()
        pipe.send(("worker", (time.monotonic(), cpu_seconds() - cpu)))


def _submit(pipe: Connection, url: str, count: int) -> None:
    with leasekit.connect(url) as client:
        client.stats()
        pipe.send("ready")
        pipe.recv()
        cpu = cpu_seconds()
        _schedule(client, count)
        pipe.send(("client", (time.monotonic(), cpu_seconds() - cpu)))


# The floor ----------------------------------------------------------------------------------------------------


def _bare(count: int) -> dict[str, float]:
    with stored_in() as url:
        path = Path(url.removeprefix("sqlite:///"))
        store = SqliteStore(path)
        store.open()
        store.close()
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = FULL")
            session = SqliteSession(connection)
            cpu, began = cpu_seconds(), time.monotonic()
            for first in range(1, count + 1, BATCH):
                _lives(session, range(first, min(first + BATCH, count + 1)))
            passed, cpu = time.monotonic() - began, cpu_seconds() - cpu
            done = connection.execute("SELECT count(*) FROM trigger WHERE status = 'success'").fetchone()
    assert done == (count,), done
    return {"rate": count / passed, "process": 1e6 * cpu / count}


def _lives(session: SqliteSession, seqs: range) -> None:
    """Take a batch from its schedule to its settlement, in four transactions."""
    now = time.time()
    ids = [f"{seq:032x}" for seq in seqs]
    pairs = list(zip(seqs, ids, strict=True))
    new = {"kind": "nothing", "priority": 2, "claim_timeout": 300.0, "heartbeat_timeout": 300.0, "next_trigger_at": now}
    counts = dict.fromkeys(("fence", "attempt", "crashes", "failures", "cancel_requested", "was_extended"), 0)
    with _Transaction(session.driver):
        contents = {
            "payload": b"null",
            "digest": bytes(16),
            "created_at": now,
            "at": now,
            "max_crashes": 5,
            "enqueue_timeout": 60.0,
        }
        session.insert(tasks.ADD_TASKS, _rows(task.c, pairs, "id", new | contents))
        session.insert(tasks.ADD_TRIGGERS, _rows(trigger.c, pairs, "id", new | counts | {"status": "new"}))
    with _Transaction(session.driver):
        due = {"kind": "nothing", "priority": 2, "now": now, "after_due": -1.0, "after_seq": -1, "most": len(seqs)}
        ready = [(row[0], row[1]) for row in session.rows(lanes.READY, **due)]
        held = counts | {
            "status": "claimed",
            "fence": 1,
            "attempt": 1,
            "owner": "worker",
            "next_trigger_at": now + 300,
            "lease_until": now + 300,
            "claimed_at": now,
        }
        session.update(tasks.SAVE, _rows([*tasks.SAVE.columns, tasks.SAVE.key], ready, "token", held))
        session.rows(tasks.CONTENTS, seqs=seqs)
    with _Transaction(session.driver):
        session.rows(tasks.BY_ID_LOCKED, ids=ids)
        session.run(leases.RENEW, seqs=seqs, to_status="processing", now=now, begun_at=now, at=now)
    with _Transaction(session.driver):
        session.rows(tasks.BY_ID_LOCKED, ids=ids)
        session.run(tasks.END, seqs=seqs, to_status="success", now=now)
        ended = {"fence": 1, "attempt": 1, "outcome": "success", "at": now, "worker": "worker", "digest": bytes(16)} | {
            "claimed_at": now,
            "started_at": now,
            "heartbeat_at": now,
        }
        session.insert(leases.ADD_RUNS, _rows(run.c, pairs, "token", ended))


def _rows(
    columns: Iterable[Column[Any]], pairs: Sequence[tuple[int, str]], name: str, values: Mapping[str, object]
) -> list[tuple[object, ...]]:
    """Return a row for each pair, which is its `seq` and the value of the column `name`; all else is in `values`."""
    names = [column.name for column in columns]
    common = [values.get(name) for name in names]
    at, and_at = names.index("seq"), names.index(name)
    rows: list[tuple[object, ...]] = []
    for common[at], common[and_at] in pairs:
        rows.append(tuple(common))
    return rows


class _Transaction:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, *error: object) -> None:
        self._connection.execute("COMMIT")


if __name__ == "__main__":
    main()
