"""Many leases in one process: the cost of a renewal for its holder, and whether any renewal is late.

Leases of 30 s, renewed every 10 s by `Heartbeats(ttl=30, cycle=10, rate=20, batch=1000)`, so that one connection can
renew 200,000. Handlers do nothing, like those that wait for something outside. Embedded, the holder's CPU is the
server's too.
"""

import math
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import leasekit
from _common import Bench, Server, cpu_seconds, memory_bytes, stored_in
from leasekit import _blocks
from leasekit._binding import bind
from leasekit.hooks import Event, Lost, Renewed, Sent
from leasekit.task import NewTask

BATCH = 1000
_LATE = 1.1  # of a cycle, between two beats of a lease


class Record:
    """Record the keeper's events, for evaluation after the measurement."""

    def __init__(self) -> None:
        self.renewed: list[tuple[float, Sequence[str]]] = []
        self.lateness: list[float] = []
        self.lost = 0

    def __call__(self, event: Event) -> None:
        match event:
            case Renewed():
                self.renewed.append((event.at, event.task_ids))
            case Sent():
                self.lateness.append(event.late)
            case Lost():
                self.lost += 1
            case _:
                pass

    def clear(self) -> None:
        self.renewed, self.lateness = [], []


def main() -> None:
    bench = Bench("held")
    for where in ("embedded", "http"):
        for count in (100,) if bench.quick else (1_000, 10_000, 100_000):
            if not bench.wants(case := f"{where} {count}"):
                continue
            heartbeats = _heartbeats(quick=bench.quick)
            seconds = 1.5 * heartbeats.cycle if bench.quick else bench.seconds or 60.0
            # A new process for each case: memory that an earlier case has freed would be used again.
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
                if where == "embedded":
                    with stored_in() as url:
                        result = fresh.submit(_hold, url, count, heartbeats, seconds).result()
                else:
                    with Server.running() as server:
                        result = fresh.submit(_hold, server.url, count, heartbeats, seconds).result()
            bench.note(case, seconds=seconds, ttl=heartbeats.ttl, cycle=heartbeats.cycle, **result)
    bench.close()


def _heartbeats(*, quick: bool) -> leasekit.Heartbeats:
    if quick:
        return leasekit.Heartbeats(rate=20, batch=BATCH).for_ttl(3)
    return leasekit.Heartbeats(
        rate=20, batch=BATCH, ttl=30, cycle=10, margin=3, grace=1.5, call_timeout=2.5, retry_wait=0.5
    )


def _hold(url: str, count: int, heartbeats: leasekit.Heartbeats, seconds: float) -> dict[str, float]:
    record = Record()
    with leasekit.connect(url, heartbeats=heartbeats, hooks=[record]) as client:
        before = memory_bytes()
        leases = _take(client, count, heartbeats.ttl)
        memory = (memory_bytes() - before) / count
        time.sleep(heartbeats.cycle)  # until beats are spread over the cycle
        record.clear()
        began, cpu = time.clock_gettime(time.CLOCK_BOOTTIME), cpu_seconds()
        time.sleep(seconds)
        cpu, ended = cpu_seconds() - cpu, time.clock_gettime(time.CLOCK_BOOTTIME)
        renewed, lateness = record.renewed[:], record.lateness[:]
        for lease in leases:
            _blocks._report(lease._run, None)
    renewals = sum(len(ids) for _, ids in renewed)
    gaps = _gaps(renewed, began, ended)
    return {
        "cpu_us_per_renewal": round(1e6 * cpu / max(renewals, 1), 2),
        "renewals_per_second": round(renewals / (ended - began), 1),
        "longest_gap": round(max(gaps, default=math.nan), 2),
        "late_beats": sum(gap > _LATE * heartbeats.cycle for gap in gaps),
        "latest_slot_ms": round(1e3 * max(lateness, default=math.nan), 1),
        "lost": record.lost,
        "bytes_per_lease": round(memory),
    }


def _take(client: leasekit.Client, count: int, ttl: float) -> list[leasekit.Lease]:
    """Begin `count` leases, claimed in batches of the keeper: the public interface takes tasks one by one."""
    tasks = [NewTask(kind="held", claim_timeout=ttl, heartbeat_timeout=ttl) for _ in range(count)]
    for first in range(0, count, BATCH):
        client.schedule_all(tasks[first : first + BATCH])
    del tasks
    connection = client.__connection__()
    leases: list[leasekit.Lease] = []
    while len(leases) < count:
        granted = connection.run(connection.keeper.claim(["held"], limit=BATCH, wait=5, started=True))
        leases += [leasekit.lease(bind(held.task, client._session.reserve)).__enter__() for held in granted]
    return leases


def _gaps(renewed: Sequence[tuple[float, Sequence[str]]], began: float, ended: float) -> list[float]:
    """Seconds between acknowledged beats of the same lease, the start and the end of the measurement included."""
    last: dict[str, float] = {}
    gaps: list[float] = []
    for at, ids in renewed:
        for task_id in ids:
            gaps.append(at - last.get(task_id, began))
            last[task_id] = at
    return gaps + [ended - at for at in last.values()]


if __name__ == "__main__":
    main()
