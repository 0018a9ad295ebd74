"""How long a task takes from its schedule to the first line of its handler, through a durable store.

A client schedules tasks at an even rate without waiting for answers: each by a call of its own, at 1,000/s
ten by one call. The time counts from that call and includes what the client, the network, the disk and the
worker's claim take. It cannot be shorter than the commit on the way: the disk's own fsync, measured in the same
run, is beside it.
"""

import asyncio
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import leasekit
from _common import HERE, Bench, Server, percentile, stored_in
from leasekit.task import NewTask

_spawn = multiprocessing.get_context("spawn")
_WARM = 20  # tasks that do not count
_CALLS = 100  # a second, at most


def main() -> None:
    bench = Bench("latency")
    for rate in (50,) if bench.quick else (20, 1_000):
        for where in ("embedded", "http"):
            if bench.wants(case := f"{where} {rate}/s"):
                runs = [_measured(where, rate, 0.5 if bench.quick else 10.0) for _ in range(bench.repeat)]
                names = runs[0].keys()
                middle = {name: round(statistics.median(run[name] for run in runs), 2) for name in names}
                bench.note(case, **middle, all_p95=[round(run["p95_ms"], 1) for run in runs], fsync_ms=_fsync_ms())
    bench.close()


def _measured(where: str, rate: int, seconds: float) -> dict[str, float]:
    count = _WARM + int(rate * seconds)
    if where == "embedded":
        with stored_in() as url, leasekit.connect(url) as client:
            took: list[float] = []
            scheduling = threading.Thread(target=asyncio.run, args=(_schedule(client, rate, count),))
            worker = _worker(client, count, took)
            scheduling.start()
            worker.run()
            scheduling.join()
        return _figures(took)
    with Server.running() as server:
        return over_http(rate, seconds, schedule_at=server.url, work_at=server.url)


def over_http(rate: int, seconds: float, *, schedule_at: str, work_at: str) -> dict[str, float]:
    """Measure with a client and a worker in processes of their own, at the servers with these URLs."""
    count = _WARM + int(rate * seconds)
    ours, theirs = _spawn.Pipe()
    working = _spawn.Process(target=_work, args=(theirs, work_at, count))
    scheduling = _spawn.Process(target=_submit, args=(schedule_at, rate, count))
    working.start()
    ours.recv()
    scheduling.start()
    took = ours.recv()
    working.join()
    scheduling.join()
    return _figures(took)


def _figures(took: Sequence[float]) -> dict[str, float]:
    took = [1e3 * seconds for seconds in took[_WARM:]]
    return {"p50_ms": percentile(took, 50), "p95_ms": percentile(took, 95), "p99_ms": percentile(took, 99)}


def _worker(client: leasekit.Client, count: int, took: list[float]) -> leasekit.Worker:
    worker = leasekit.Worker(client, concurrency=64)

    @worker.handler("timed")
    async def timed(sent_at: float) -> None:
        took.append(time.monotonic() - sent_at)  # one clock for all processes of a machine
        if len(took) == count:
            worker.stop()

    return worker


async def _schedule(client: leasekit.Client, rate: int, count: int) -> None:
    """Schedule at an even rate by absolute time: a late call does not delay the calls after it."""
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(0, count, batch := max(1, rate // _CALLS)):
            await asyncio.sleep(began + number / rate - time.monotonic())
            tasks = [NewTask(kind="timed", payload=time.monotonic())] * min(batch, count - number)
            group.create_task(client.aschedule_all(tasks))


def _work(pipe: Connection, url: str, count: int) -> None:
    took: list[float] = []
    with leasekit.connect(url) as client:
        client.stats()
        pipe.send("ready")
        _worker(client, count, took).run()
    pipe.send(took)


def _submit(url: str, rate: int, count: int) -> None:
    with leasekit.connect(url) as client:
        asyncio.run(_schedule(client, rate, count))


def _fsync_ms() -> float:
    """The median time of an fsync of 4 KiB."""
    took: list[float] = []
    with tempfile.NamedTemporaryFile(dir=HERE) as file:
        for _ in range(100):
            os.write(file.fileno(), bytes(4096))
            began = time.monotonic()
            os.fsync(file.fileno())
            took.append(time.monotonic() - began)
    return round(1e3 * statistics.median(took), 2)


if __name__ == "__main__":
    main()
