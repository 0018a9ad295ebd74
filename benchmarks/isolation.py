"""How much a kind that is scheduled at ten times its quota delays another kind, over HTTP.

The kind `loud` may start 50 tasks a second (`rate`). It is scheduled at none, at its quota, and at ten times its quota.
The kind `timed` is scheduled at 20/s. One worker runs both; the start latency is that of `timed` alone, from its
schedule to the first line of its handler. The goal: ten times the quota at most doubles the p99 of the quota itself.
"""

import asyncio
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import leasekit
from _common import Bench, Server, percentile
from leasekit.task import KindSettings, NewTask

QUOTA = 50
_RATE = 20
_CALLS = 100  # a second, at most
_WARM = 20  # tasks that do not count
_spawn = multiprocessing.get_context("spawn")


def main() -> None:
    bench = Bench("isolation")
    times = {"alone": 0, "beside its quota": 1, "beside ten times its quota": 10}
    runs: dict[str, list[dict[str, float]]] = {case: [] for case in times if bench.wants(case)}
    for _ in range(bench.repeat):
        for case, measured in runs.items():  # in turns: what else the machine does is the same for all
            measured.append(_measured(times[case] * QUOTA, 1.0 if bench.quick else bench.seconds or 20.0))
    for case, measured in runs.items():
        middle = {name: round(statistics.median(run[name] for run in measured), 2) for name in measured[0]}
        bench.note(case, **middle, all_p99=[round(run["p99_ms"], 1) for run in measured])
    bench.close()


def _measured(loud: int, seconds: float) -> dict[str, float]:
    with Server.running() as server, leasekit.connect(server.url) as client:
        client.set_kind("loud", KindSettings(rate=float(QUOTA), burst=QUOTA // 10))
        count = _WARM + int(_RATE * seconds)
        ours, theirs = _spawn.Pipe()
        working = _spawn.Process(target=_work, args=(theirs, server.url, count))
        working.start()
        ours.recv()
        noise = _spawn.Process(target=_submit, args=(server.url, "loud", loud, int(loud * count / _RATE)))
        quiet = _spawn.Process(target=_submit, args=(server.url, "timed", _RATE, count))
        noise.start()
        quiet.start()
        took, ran = ours.recv()
        for process in (quiet, noise, working):
            process.join()
    latencies = [1e3 * second for second in took[_WARM:]]
    figures = {f"p{percent}_ms": percentile(latencies, percent) for percent in (50, 95, 99)}
    return {**figures, "loud_started_per_s": ran / seconds}


def _work(pipe: Connection, url: str, count: int) -> None:
    took: list[float] = []
    ran = 0
    with leasekit.connect(url) as client:
        worker = leasekit.Worker(client, concurrency=64)

        @worker.handler("timed")
        async def timed(sent_at: float) -> None:
            took.append(time.monotonic() - sent_at)  # one clock for all processes of a machine
            if len(took) == count:
                worker.stop()

        @worker.handler("loud")
        async def loud(_: float) -> None:
            nonlocal ran
            ran += 1

        client.stats()
        pipe.send("ready")
        worker.run()
    pipe.send((took, ran))


def _submit(url: str, kind: str, rate: int, count: int) -> None:
    with leasekit.connect(url) as client:
        asyncio.run(_schedule(client, kind, rate, count))


async def _schedule(client: leasekit.Client, kind: str, rate: int, count: int) -> None:
    """Schedule at an even rate by absolute time: a late call does not delay the calls after it."""
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(0, count, batch := max(1, rate // _CALLS)):
            await asyncio.sleep(began + number / rate - time.monotonic())
            tasks = [NewTask(kind=kind, payload=time.monotonic())] * min(batch, count - number)
            group.create_task(client.aschedule_all(tasks))


if __name__ == "__main__":
    main()
