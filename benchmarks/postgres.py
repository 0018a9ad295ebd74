"""The store on PostgreSQL beside the same statements by hand, with psycopg, in batches of the same size.

Lives: schedule, claim, beat, settle, through an engine in this process (one process, and two at once). Schedules: over
HTTP. Renewals: through an engine. Start latency: a client at one node, a worker at another. Claims: of a backlog of
5 million tasks and of 5 thousand, in turns. A commit is answered when it is on the disk.
"""

import asyncio
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import psycopg

from _common import Bench, Caller, Server, cpu_seconds, percentile
from _postgres import PostgresServer, cpu_of_server, database, running
from latency import over_http
from leasekit.ids import uuid7s
from leasekit.server.engine import Engine
from leasekit.server.store.postgres.store import PostgresStore
from leasekit.task import Beat, NewTask, Settlement
from server import CONNECTIONS

BATCH = 500
_STREAMS = 4  # batches that are under way at once in one process
_spawn = multiprocessing.get_context("spawn")
_encode = msgspec.json.encode

Figures = dict[str, float]


def main() -> None:
    bench = Bench("postgres")
    with running(bench.folder) as server:
        count = 1_000 if bench.quick else 20_000
        lives = {"lives, by hand": _lives_by_hand, "lives, library": _lives_in_library}
        _compared(bench, count, {
            f"{case}, {of} process{'es' * (of - 1)}": partial(_measured, server, of, run)
            for of in (1, 2)
            for case, run in lives.items()
        })  # fmt: skip
        _compared(bench, count, {
            "schedules, by hand": partial(_measured, server, 1, _schedules_by_hand),
            "schedules, HTTP": partial(_schedules_over_http, server),
        })  # fmt: skip
        _compared(bench, 2 * count, {
            "renewals, by hand": partial(_measured, server, 1, _renewals_by_hand),
            "renewals, library": partial(_measured, server, 1, _renewals_in_library),
        })  # fmt: skip
        for rate in (50,) if bench.quick else (100, 1_000):
            if bench.wants(case := f"latency through another node, {rate}/s"):
                runs = [_latency(server, rate, 0.5 if bench.quick else 10.0) for _ in range(bench.repeat)]
                middle = {name: round(statistics.median(run[name] for run in runs), 1) for name in runs[0]}
                bench.note(case, **middle, all_p95=[round(run["p95_ms"], 1) for run in runs])
        if bench.wants(case := "latency between two engines, 1,000/s"):
            figures = [asyncio.run(_granted(database(server), count // 4)) for _ in range(bench.repeat)]
            middle = {name: round(statistics.median(run[name] for run in figures), 1) for name in figures[0]}
            bench.note(case, **middle, all_p95=[round(run["p95_ms"], 1) for run in figures])
        if bench.wants("claims"):
            _claims(bench, server)
    bench.close()


def _compared(bench: Bench, count: int, cases: dict[str, Callable[[int], Figures]]) -> None:
    """Measure the cases in turns; the first is what the others are compared with."""
    runs: dict[str, list[Figures]] = {}
    for _ in range(bench.repeat):
        for case, measure in cases.items():
            if bench.wants(case):
                runs.setdefault(case, []).append(measure(count))
    floor = None
    for case, of_case in runs.items():
        middle = {key: statistics.median(run[key] for run in of_case) for key in of_case[0]}
        cpu = sum(value for key, value in middle.items() if key != "rate")
        floor = cpu if floor is None else floor
        bench.note(
            case,
            per_second=round(middle.pop("rate")),
            cpu_us={key: round(value, 1) for key, value in middle.items()},
            cpu_of_first=round(cpu / floor, 2),
            all=[round(run["rate"]) for run in of_case],
            counted=count,
        )


# Processes beside a database -----------------------------------------------------------------------------------

Run = Callable[[str, int, Callable[[], None]], None]
"""What is measured, for a URL and a count: it calls the function when it is ready."""


def _measured(server: PostgresServer, processes: int, run: Run, count: int) -> Figures:
    url = database(server)
    pipes: list[Connection] = []
    with ExitStack() as stack:
        for _ in range(processes):
            ours, theirs = _spawn.Pipe()
            process = _spawn.Process(target=_in_process, args=(theirs, run, url, count // processes))
            process.start()
            stack.callback(process.join)
            pipes.append(ours)
        for pipe in pipes:
            assert pipe.recv() == "ready"
        cpu, began = cpu_of_server(server), time.monotonic()
        for pipe in pipes:
            pipe.send("go")
        python = sum(pipe.recv() for pipe in pipes)
        passed, cpu = time.monotonic() - began, cpu_of_server(server) - cpu
    return {"rate": count / passed, "python": 1e6 * python / count, "postgres": 1e6 * cpu / count}


def _in_process(pipe: Connection, run: Run, url: str, count: int) -> None:
    cpu = 0.0

    def ready() -> None:
        nonlocal cpu
        pipe.send("ready")
        pipe.recv()
        cpu = cpu_seconds()

    run(url, count, ready)
    pipe.send(cpu_seconds() - cpu)


# Through an engine ---------------------------------------------------------------------------------------------


def _lives_in_library(url: str, count: int, ready: Callable[[], None]) -> None:
    async def stream(engine: Engine, number: int, batches: int) -> None:
        for batch in range(batches):
            await engine.schedule([NewTask(kind="nothing")] * BATCH)
            claim = {"worker": f"w{number}", "kinds": ["nothing"], "limit": BATCH, "claim_id": f"{number}-{batch}"}
            tasks = (await engine.claim(wait=60, **claim)).tasks  # type: ignore[arg-type]
            await engine.heartbeat("w", [Beat(id=task.id, token=task.token, started=True) for task in tasks])
            ends = [Settlement(id=task.id, token=task.token, outcome="success") for task in tasks]
            verdicts = await engine.results("w", ends)
            assert {verdict.verdict for verdict in verdicts} == {"settled"}

    async def run() -> None:
        async with Engine(PostgresStore(url)) as engine:
            await engine.schedule([NewTask(kind="warm-up")])
            ready()
            batches = max(1, count // BATCH)
            streams = min(_STREAMS, batches)
            shares = [batches // streams + (number < batches % streams) for number in range(streams)]
            pid = random.random()
            await asyncio.gather(*(stream(engine, hash((pid, number)), share) for number, share in enumerate(shares)))

    asyncio.run(run())


def _renewals_in_library(url: str, count: int, ready: Callable[[], None]) -> None:
    async def run() -> None:
        async with Engine(PostgresStore(url)) as engine:
            held: list[list[Beat]] = []
            for number in range(10):
                await engine.schedule([NewTask(kind="held")] * BATCH)
                claimed = await engine.claim(worker="w", kinds=["held"], limit=BATCH, wait=60, claim_id=str(number))
                held.append([Beat(id=task.id, token=task.token, started=True) for task in claimed.tasks])
            ready()
            rounds = iter(range(count // BATCH))

            async def stream() -> None:
                for turn in rounds:
                    verdicts = await engine.heartbeat("w", held[turn % len(held)])
                    assert {verdict.verdict for verdict in verdicts} == {"renewed"}

            await asyncio.gather(*(stream() for _ in range(_STREAMS)))

    asyncio.run(run())


# By hand -------------------------------------------------------------------------------------------------------

_TASKS = """
INSERT INTO leasekit.task (seq, id, kind, priority, created_at, at, max_crashes, enqueue_timeout, digest, payload)
SELECT seq, id, 'nothing', 2, %(now)s, %(now)s, 5, 60, '\\x00112233445566778899aabbccddeeff', 'null'
FROM unnest(%(seqs)s::bigint[], %(ids)s::text[]) AS new(seq, id)
"""
_TRIGGERS = """
INSERT INTO leasekit.trigger (seq, id, kind, priority, claim_timeout, heartbeat_timeout, status, fence, attempt,
    crashes, failures, cancel_requested, next_trigger_at, was_extended)
SELECT seq, id, 'nothing', 2, 300, 300, 'new', 0, 0, 0, 0, false, %(now)s, false
FROM unnest(%(seqs)s::bigint[], %(ids)s::text[]) AS new(seq, id)
"""
_READY = """
SELECT * FROM leasekit.trigger WHERE owner IS NULL AND next_trigger_at IS NOT NULL AND kind = 'nothing' AND priority = 2
    AND next_trigger_at <= %(now)s ORDER BY next_trigger_at, seq LIMIT %(most)s FOR NO KEY UPDATE SKIP LOCKED
"""
_GRANT = """
UPDATE leasekit.trigger AS old SET status = 'claimed', fence = 1, attempt = 1, owner = 'w', token = new.id,
    next_trigger_at = %(until)s, lease_until = %(until)s, claimed_at = %(now)s
FROM unnest(%(seqs)s::bigint[], %(ids)s::text[]) AS new(seq, id) WHERE old.seq = new.seq
"""
_CONTENTS = "SELECT seq, payload, collection, traceparent FROM leasekit.task WHERE seq = ANY (%(seqs)s)"
_LOCK = """
SELECT trigger.* FROM leasekit.trigger JOIN leasekit.task USING (seq) WHERE task.id = ANY (%(ids)s)
    ORDER BY trigger.seq FOR NO KEY UPDATE OF trigger
"""
_RENEW = """
UPDATE leasekit.trigger SET status = 'processing', lease_until = %(until)s, heartbeat_at = %(now)s,
    started_at = coalesce(started_at, %(now)s) WHERE seq = ANY (%(seqs)s)
"""
_END = """
UPDATE leasekit.trigger SET status = 'success', owner = NULL, token = NULL, next_trigger_at = NULL, lease_until = NULL,
    ended_at = %(now)s WHERE seq = ANY (%(seqs)s)
"""
_RUNS = """
INSERT INTO leasekit.run (seq, fence, attempt, outcome, at, worker, claimed_at, started_at, heartbeat_at, token, digest)
SELECT seq, 1, 1, 'success', %(now)s, 'w', %(now)s, %(now)s, %(now)s, id, '\\x00112233445566778899aabbccddeeff'
FROM unnest(%(seqs)s::bigint[], %(ids)s::text[]) AS new(seq, id)
"""


class _Hand:
    """Run batches on one connection, a transaction for each request."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)
        row = self._connection.execute("SELECT nextval('leasekit.task_seq')").fetchone()
        self._next = row[0] if row else 0
        self.values: dict[str, Any] = {}

    def schedule(self) -> None:
        now = time.time()
        seqs = list(range(self._next, self._next + BATCH))
        self._next += BATCH
        if self._next % 10_000 == 1:
            row = self._connection.execute("SELECT nextval('leasekit.task_seq')").fetchone()
            self._next = row[0] if row else 0
        ids = uuid7s(BATCH, now)
        self.values = {"now": now, "until": now + 300, "seqs": seqs, "ids": ids, "most": BATCH}
        self._transact(_TASKS, _TRIGGERS)

    def claim(self) -> None:
        with self._connection.transaction():
            rows = self._connection.execute(_READY, self.values).fetchall()
            self.values |= {"seqs": [row[0] for row in rows], "ids": [row[1] for row in rows]}
            self._connection.execute(_GRANT, self.values)
            self._connection.execute(_CONTENTS, self.values).fetchall()

    def renew(self) -> None:
        self.values["until"] += 0.001
        self._transact(_LOCK, _RENEW)

    def settle(self) -> None:
        self._transact(_LOCK, _END, _RUNS)

    def _transact(self, *statements: str) -> None:
        with self._connection.transaction():
            for statement in statements:
                cursor = self._connection.execute(statement.encode(), self.values)
                if cursor.description is not None:
                    cursor.fetchall()


def _lives_by_hand(url: str, count: int, ready: Callable[[], None]) -> None:
    hand = _Hand(url)
    ready()
    for _ in range(count // BATCH):
        hand.schedule()
        hand.claim()
        hand.renew()
        hand.settle()


def _schedules_by_hand(url: str, count: int, ready: Callable[[], None]) -> None:
    hand = _Hand(url)
    ready()
    for _ in range(count // BATCH):
        hand.schedule()


def _renewals_by_hand(url: str, count: int, ready: Callable[[], None]) -> None:
    hand = _Hand(url)
    held = []
    for _ in range(10):
        hand.schedule()
        hand.claim()
        held.append(hand.values)
    ready()
    for turn in range(count // BATCH):
        hand.values = held[turn % len(held)]
        hand.renew()


# Over HTTP -----------------------------------------------------------------------------------------------------


def _schedules_over_http(server: PostgresServer, count: int) -> Figures:
    with Server.running(database(server)) as http:
        body = _encode({"tasks": [{"kind": "nothing"}] * BATCH})
        return asyncio.run(_posted(server, http, [body] * (count // BATCH), count))


async def _posted(server: PostgresServer, http: Server, bodies: Sequence[bytes], count: int) -> Figures:
    pool = [await Caller.connected(http.url) for _ in range(CONNECTIONS)]
    waiting = iter(bodies)
    cpu, python, began = cpu_of_server(server), http.cpu, time.monotonic()
    await asyncio.gather(*(caller.post_all("/v1/tasks", waiting) for caller in pool))
    passed = time.monotonic() - began
    python, cpu = http.cpu - python, cpu_of_server(server) - cpu
    for caller in pool:
        caller.close()
    return {"rate": count / passed, "python": 1e6 * python / count, "postgres": 1e6 * cpu / count}


def _latency(server: PostgresServer, rate: int, seconds: float) -> Figures:
    url = database(server)
    with Server.running(url) as first, Server.running(url) as second:
        return over_http(rate, seconds, schedule_at=first.url, work_at=second.url)


async def _granted(url: str, count: int) -> Figures:
    """Schedule at one engine and claim at another: the milliseconds from the call to the grant."""
    took: list[float] = []

    async def claim(engine: Engine, worker: str) -> None:
        while len(took) < count:
            claimed = await engine.claim(
                worker=worker, kinds=["k"], limit=100, wait=1, claim_id=f"{worker} {time.monotonic()}"
            )
            now = time.monotonic()
            took.extend(1e3 * (now - msgspec.json.decode(task.payload)) for task in claimed.tasks)

    async with Engine(PostgresStore(url)) as first, Engine(PostgresStore(url)) as second, asyncio.TaskGroup() as group:
        await asyncio.sleep(2.5)  # until each has seen the other
        for worker in ("a", "b"):
            group.create_task(claim(second, worker))
        began = time.monotonic()
        for number in range(0, count, 10):
            await asyncio.sleep(began + number / 1_000 - time.monotonic())
            group.create_task(first.schedule([NewTask(kind="k", payload=time.monotonic())] * 10))
    return {f"p{percent}_ms": percentile(took, percent) for percent in (50, 95, 99)}


# Claims of a backlog -------------------------------------------------------------------------------------------


def _claims(bench: Bench, server: PostgresServer) -> None:
    """Claim from a small and a big backlog in turns."""
    sizes = (1_000, 10_000) if bench.quick else (5_000, 5_000_000)
    turns = 3 if bench.quick else 20
    urls = {size: database(server) for size in sizes}
    for size, url in urls.items():
        _fill(url, size)
    took = asyncio.run(_claimed(urls, turns))
    for size, of_size in took.items():
        bench.note(
            f"claims of 100 from {size:,}",
            p50_ms=round(statistics.median(of_size), 2),
            p95_ms=round(percentile(of_size, 95), 2),
            of_first=round(statistics.median(of_size) / statistics.median(took[sizes[0]]), 2),
            claims=turns,
        )


async def _claimed(urls: dict[int, str], turns: int) -> dict[int, list[float]]:
    took: dict[int, list[float]] = {size: [] for size in urls}
    engines = {size: Engine(PostgresStore(url)) for size, url in urls.items()}
    async with engines[min(urls)], engines[max(urls)]:
        for turn in range(turns):
            for size, engine in engines.items():
                began = time.monotonic()
                claimed = await engine.claim(worker="w", kinds=["k"], limit=100, wait=0, claim_id=str(turn))
                took[size].append(1e3 * (time.monotonic() - began))
                assert len(claimed.tasks) == 100
    return took


def _fill(url: str, size: int) -> None:
    """Copy due tasks into the tables."""
    now = time.time()
    task = "seq, id, kind, priority, created_at, at, max_crashes, enqueue_timeout, digest, payload"
    trigger = (
        "seq, id, kind, priority, claim_timeout, heartbeat_timeout, status, fence, attempt, crashes, failures,"
        " cancel_requested, next_trigger_at, was_extended"
    )
    with psycopg.connect(url, autocommit=True) as connection:
        for table, columns, line in (
            ("task", task, f"{{0}}\tt{{0}}\tk\t2\t{now}\t{now}\t5\t60\t\\\\x00\tnull\n"),
            ("trigger", trigger, "{0}\tt{0}\tk\t2\t300\t300\tnew\t0\t0\t0\t0\tf\t{1}\tf\n"),
        ):
            with connection.cursor().copy(f"COPY leasekit.{table} ({columns}) FROM STDIN".encode()) as copy:
                for first in range(1, size + 1, 10_000):
                    numbers = range(first, min(first + 10_000, size + 1))
                    copy.write("".join(line.format(seq, now - 1 - 1e-4 * seq) for seq in numbers))
        connection.execute(f"SELECT setval('leasekit.task_seq', {size + 10_001})".encode())
        connection.execute("ANALYZE leasekit.task, leasekit.trigger")


if __name__ == "__main__":
    main()
