"""The worst requests that are legal, of each operation: what the writer does for one is bounded, in counts.

Figures of time are in the chaos kit (`worst-requests`): what the slowest heartbeat beside each of these took.
"""

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from pathlib import Path
from random import Random
from typing import Any

import anyio
import msgspec
import pytest
from msgspec import Raw
from msgspec.structs import replace

from leasekit import wire
from leasekit._lifecycle import validation
from leasekit.errors import Refused
from leasekit.server.engine import Engine
from leasekit.server.fair_bound import CALLER
from leasekit.server.http import sending
from leasekit.server.http.app import Api
from leasekit.server.http.sending import Sending
from leasekit.server.roles import claims as claiming
from leasekit.server.roles import frontend
from leasekit.server.roles.gates import GateChange
from leasekit.server.store.kind_defaults import KindDefaults
from leasekit.server.store.sql.statements import Statement
from leasekit.server.store.sqlite.session import SqliteSession
from leasekit.server.store.sqlite.store import SqliteStore
from leasekit.server.store.sqlite.tx import SqliteTx
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import KindSettings, NewTask, Task, TaskInfo, Ticket
from leasekit.wire import (
    MAX_BATCH,
    MAX_BODY,
    MAX_KINDS,
    MAX_NODES,
    MAX_PAYLOAD,
    MAX_SUCCESSORS,
    MAX_WAITS,
    BeatsRequest,
    CancelRequest,
    ClaimRequest,
    ResultsRequest,
    ScheduleRequest,
)
from tests.waiting import until

pytestmark = pytest.mark.anyio

BIG = 256 * 1024


@dataclass
class Work:
    """What the writer has done."""

    statements: int = 0
    rows: int = 0
    read: int = 0
    """Bytes of values that came out of the store."""
    decoded: int = 0
    """Bytes of JSON of users."""
    steps: int = 0
    """Instructions of SQLite's virtual machine."""


@dataclass
class Bench:
    engine: Engine
    work: Work

    async def schedule(self, *tasks: dict[str, Any]) -> None:
        await self.engine.schedule(read(ScheduleRequest, {"tasks": tasks}).tasks)

    async def held(self, count: int, **options: Any) -> Sequence[Task]:
        """So many tasks, put and claimed."""
        for at in range(0, count, 20):
            await self.schedule(*({"kind": "held", **options} for _ in range(min(20, count - at))))
        found: list[Task] = []
        while len(found) < count:
            claimed = await self.engine.claim(
                worker="w", kinds=["held"], limit=MAX_BATCH, wait=0, claim_id=f"c-{len(found)}"
            )
            found += claimed.tasks
        return found


def read(kind: type[Any], body: Any) -> Any:
    """The request as it comes out of the wire."""
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    assert len(raw) <= MAX_BODY
    return validation.read(raw, kind)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    work = Work()
    store = SqliteStore(tmp_path / "tasks.db")
    rows = SqliteSession.rows
    decode = msgspec.json.decode

    def counted(self: SqliteSession, statement: Statement, **values: Any) -> list[tuple[Any, ...]]:
        found = rows(self, statement, **values)
        work.statements += 1
        work.rows += len(found)
        work.read += sum(len(value) for row in found for value in row if isinstance(value, bytes | str))
        return found

    def decoded(value: Any, **options: Any) -> Any:
        work.decoded += len(bytes(value))
        return decode(value, **options)

    def step() -> int:
        work.steps += 100
        return 0

    async with Engine(store, period=3600.0) as engine:
        with store._writer_connection() as connection:
            driver = connection.connection.driver_connection
            assert isinstance(driver, sqlite3.Connection)
            driver.set_progress_handler(step, 100)
        monkeypatch.setattr(SqliteSession, "rows", counted)
        monkeypatch.setattr(msgspec.json, "decode", decoded)
        yield Bench(engine, work)
        monkeypatch.undo()


def done(bench: Bench) -> Work:
    """What was done since it was asked last."""
    was = Work(**vars(bench.work))
    bench.work.__init__()  # type: ignore[misc]
    return was


def spelled(text: str, number: int) -> bytes:
    """The same JSON string, another way each time."""
    return b'"' + "".join(f"\\u{ord(c):04x}" if number >> at & 1 else c for at, c in enumerate(text)).encode() + b'"'


async def test_repeats_of_a_known_id_do_not_look_at_what_is_stored(bench: Bench) -> None:
    await bench.schedule({"kind": "k", "id": "known", "payload": "x" * (MAX_PAYLOAD - 2)})
    items = [b'{"kind":"k","id":%s,"payload":%d}' % (spelled("known", n), n) for n in range(MAX_BATCH)]
    request = read(ScheduleRequest, b'{"tasks":[' + b",".join(items) + b"]}")
    done(bench)
    answers = await bench.engine.schedule(request.tasks)
    assert all(answer.conflict for answer in answers)
    work = done(bench)
    assert work.decoded < 10_000
    assert work.read < 10_000


async def test_known_tasks_that_are_big_are_not_read_to_be_compared(bench: Bench) -> None:
    payload = "x" * BIG
    ids = [f"t{n}" for n in range(40)]
    for name in ids:
        await bench.schedule({"kind": "k", "id": name, "payload": payload, "dedupe_key": name})
    done(bench)
    await bench.schedule(*({"kind": "k", "id": name, "payload": 1} for name in ids))
    await bench.schedule(*({"kind": "k", "dedupe_key": name} for name in ids))
    assert done(bench).read < 100 * len(ids) * 10


@pytest.mark.parametrize("outcome", ["retry", "crash", "release", "success"])
async def test_an_end_does_not_read_what_the_task_holds(bench: Bench, outcome: str) -> None:
    tasks = await bench.held(40, payload="x" * BIG)
    done(bench)
    items = [{"id": task.id, "token": task.token, "outcome": outcome} for task in tasks]
    await bench.engine.results("w", read(ResultsRequest, {"worker": "w", "results": items}).results)
    work = done(bench)
    assert work.read < 1000 * len(items)
    assert work.decoded < 1000 * len(items)


def test_big_values_are_the_last_columns_so_that_no_others_are_behind_them() -> None:
    from leasekit.server.store.schema import run, task

    assert task.c.keys()[-1] == "payload"
    assert run.c.keys()[-2:] == ["result", "error"]


Case = Callable[[Bench, Sequence[Task]], Any]


def beats(_: Bench, tasks: Sequence[Task]) -> Any:
    item = {"id": tasks[0].id, "token": tasks[0].token, "progress": "x" * 4096}
    return lambda engine: engine.heartbeat("w", read(BeatsRequest, {"worker": "w", "beats": [item] * MAX_BATCH}).beats)


def late_beats(_: Bench, tasks: Sequence[Task]) -> Any:
    items = [{"id": task.id, "token": f"old-{n}"} for n, task in enumerate(tasks)] * (MAX_BATCH // len(tasks))
    return lambda engine: engine.heartbeat("w", read(BeatsRequest, {"worker": "w", "beats": items}).beats)


def results(_: Bench, tasks: Sequence[Task]) -> Any:
    item = {"id": tasks[0].id, "token": tasks[0].token, "outcome": "retry", "result": "x" * 4096}
    return lambda engine: engine.results("w", read(ResultsRequest, {"worker": "w", "results": [item] * 1000}).results)


def successors(_: Bench, tasks: Sequence[Task]) -> Any:
    then = [{"kind": "k", "payload": n} for n in range(MAX_SUCCESSORS // len(tasks))]
    items = [{"id": task.id, "token": task.token, "outcome": "success", "then": then} for task in tasks]
    return lambda engine: engine.results("w", read(ResultsRequest, {"worker": "w", "results": items}).results)


def followers(_: Bench, tasks: Sequence[Task]) -> Any:
    after = [task.id for task in tasks]
    items = [{"kind": "k", "after": after} for _ in range(MAX_WAITS // len(tasks))]
    return lambda engine: engine.schedule(read(ScheduleRequest, {"tasks": items}).tasks)


def cancels(_: Bench, tasks: Sequence[Task]) -> Any:
    ids = [task.id for task in tasks] * (MAX_BATCH // len(tasks))
    return lambda engine: engine.cancel(read(CancelRequest, {"ids": ids}).ids)


def claims(_: Bench, tasks: Sequence[Task]) -> Any:
    asked = read(
        ClaimRequest,
        {"worker": "w", "claim_id": "all", "limit": MAX_BATCH, "kinds": [f"kind-{n}" for n in range(MAX_KINDS)]},
    )
    return lambda engine: engine.claim(worker="w", kinds=asked.kinds, limit=asked.limit, wait=0, claim_id="all")


@pytest.mark.parametrize("case", [beats, late_beats, results, successors, followers, cancels, claims])
async def test_a_request_of_many_items_costs_the_writer_no_more_than_so_many_rows(bench: Bench, case: Case) -> None:
    tasks = await bench.held(100)
    ask = case(bench, tasks)
    done(bench)
    await ask(bench.engine)
    work = done(bench)
    assert work.steps <= 1_000 * MAX_BATCH
    assert work.rows <= 10 * MAX_BATCH
    assert work.read <= MAX_BODY
    assert work.decoded <= MAX_BODY


async def test_an_answer_to_a_claim_is_bounded_in_bytes(bench: Bench) -> None:
    for _ in range(5):
        await bench.schedule(*({"kind": "k", "payload": "x" * BIG} for _ in range(25)))
    done(bench)
    await bench.engine.claim(worker="w", kinds=["k"], limit=MAX_BATCH, wait=0, claim_id="c")
    assert done(bench).read <= MAX_BODY + BIG


async def test_values_successors_and_kinds_count_as_work_in_a_transaction(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    submit = bench.engine.commit.submit

    def noted(*args: Any, size: int, **more: Any) -> None:
        sizes.append(size)
        submit(*args, size=size, **more)

    monkeypatch.setattr(bench.engine.commit, "submit", noted)
    await bench.schedule({"kind": "held"}, {"kind": "held", "payload": "x" * BIG})
    await bench.schedule({"kind": "k", "after": [f"a{n}" for n in range(100)]})
    (task, _) = (await bench.engine.claim(worker="w", kinds=["held"], limit=2, wait=0, claim_id="c")).tasks
    await bench.engine.claim(worker="w", kinds=[str(n) for n in range(MAX_KINDS)], limit=2, wait=0, claim_id="d")
    tickets = [Ticket(id=str(n), fence=1) for n in range(9)]
    await bench.engine.claim(worker="w", kinds=["k"], limit=2, wait=0, claim_id="e", tickets=tickets)
    item = {"id": task.id, "token": task.token, "outcome": "success", "result": "x" * BIG, "then": [{"kind": "k"}] * 9}
    await bench.engine.results("w", read(ResultsRequest, {"worker": "w", "results": [item]}).results)
    big = "x" * (60 * 1024 - 2)
    beats = [{"id": "a", "token": "t", "progress": big}, {"id": "b", "token": "t"}]
    await bench.engine.heartbeat("w", read(BeatsRequest, {"worker": "w", "beats": beats}).beats)
    error = {"type": "E", "message": "x" * 40 * 1024}
    failed = {"id": "a", "token": "t", "outcome": "retry", "error": error, "progress": big}
    await bench.engine.results("w", read(ResultsRequest, {"worker": "w", "results": [failed]}).results)
    assert sizes == [2 + 256, 1 + 100, 1, 1 + 12, 1 + 9, 1 + 256 + 9, 2 + 60, 1 + 40 + 60]


# Claims that wait


class Tries:
    """How often a claim was tried, by the engine that is patched."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        attempt = engine._long_polls._attempt

        def counted(*args: Any) -> None:
            self.count += 1
            attempt(*args)

        monkeypatch.setattr(engine._long_polls, "_attempt", counted)


async def test_of_many_polls_of_many_kinds_only_one_for_each_kind_that_is_due_is_tried(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bench.engine
    tries = Tries(engine, monkeypatch)
    polls = [
        asyncio.create_task(
            engine.claim(
                worker=f"w{n}", kinds=[f"{n}-{m}" for m in range(MAX_KINDS)], limit=1, wait=60, claim_id=f"c{n}"
            )
        )
        for n in range(30)
    ]
    await until(lambda: len(engine._long_polls._parked) == len(polls) * MAX_KINDS)
    assert tries.count == len(polls)
    done(bench)
    for _ in range(3):
        await engine.tick()
    assert tries.count == len(polls), "nothing was due"
    assert done(bench).steps < 10_000
    await bench.schedule({"kind": "7-7"})
    await polls[7]
    assert tries.count == len(polls) + 1
    engine.end_waits()
    await asyncio.gather(*polls)


# Claims that are repeated


def waiting_claim(number: int, *, is_new: bool = True) -> claiming.WaitingClaim:
    return claiming.WaitingClaim(number, "w", f"c{number}", (f"k{number}",), 9, arrived_at=0.0, is_new=is_new)


async def many_routes(bench: Bench, kinds: int, routes: int) -> Callable[..., Any]:
    """Let tasks of so many kinds require so many labels each; return what claims them, with a worker that has all."""
    labels = {f"label-{n}": "x" for n in range(routes)}
    for kind in range(kinds):
        await bench.schedule(*({"kind": f"k{kind}", "requires": {name: "x"}} for name in labels))
    options: dict[str, Any] = {"kinds": [f"k{kind}" for kind in range(kinds)], "labels": labels, "wait": 0}
    return lambda name: bench.engine.claim(worker=name, claim_id=name, limit=1, **options)


async def test_claims_of_many_routes_share_no_transaction(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = await many_routes(bench, 10, 16)
    monkeypatch.setattr(claiming, "_ROUTES", 400)
    tried: list[int] = []
    due_tasks = claiming._due_tasks

    def noted(turn: UnitOfWork, requests: Sequence[claiming.WaitingClaim]) -> Any:
        tried.append(len(requests))
        return due_tasks(turn, requests)

    monkeypatch.setattr(claiming, "_due_tasks", noted)
    with anyio.fail_after(60):
        answers = await asyncio.gather(*(claim(f"w{n}") for n in range(9)))
    assert [len(answer.tasks) for answer in answers] == [1] * 9
    assert sum(tried) == 9
    assert max(tried) == 2  # 320 routes; each first claim is served whatever it looks at
    monkeypatch.setattr(claiming, "_ROUTES", 1)
    with anyio.fail_after(60):
        assert len((await claim("w9")).tasks) == 1


async def test_claims_of_many_routes_of_one_token_go_before_no_claim_of_another(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await many_routes(bench, 10, 16)
    monkeypatch.setattr(claiming, "_ROUTES", 200)
    kinds = [f"k{kind}" for kind in range(10)]

    def request(number: int, claim_id: str, kinds: Sequence[str]) -> claiming.WaitingClaim:
        return claiming.WaitingClaim(number, "w", claim_id, kinds, 1, 0.0)

    heavy = [request(number, f"one/{number}", kinds) for number in range(5)]
    others = [request(5, "two/5", kinds), request(6, "three/6", ["other"]), request(7, "one/7", ["other"])]
    other = request(8, "four/8", ["k0"])
    with bench.engine._store.transaction() as tx:
        turn = UnitOfWork(tx, now=1.0, instant=1.0, random=Random(1))
        later = claiming._out_of_reach(turn, [*heavy, *others, other])
    assert {one.number for one in later} == {1, 2, 3, 4, 5}


def many_kinds(
    number: int, claim_id: str, kinds: Sequence[str], *, is_new: bool = True, is_gone: bool = False
) -> claiming.WaitingClaim:
    return claiming.WaitingClaim(number, "w", claim_id, kinds, 1, 0.0, is_new=is_new, is_gone=is_gone)


async def test_claims_of_many_kinds_share_no_transaction(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claiming, "_KINDS", 250)
    looked_at: list[int] = []
    lanes = UnitOfWork.lanes

    def noted(turn: UnitOfWork, kinds: Collection[str], *args: Any) -> Any:
        looked_at.append(len(kinds))
        return lanes(turn, kinds, *args)

    monkeypatch.setattr(UnitOfWork, "lanes", noted)
    kinds = [[f"{n}-{m}" for m in range(MAX_KINDS)] for n in range(9)]
    await bench.schedule(*({"kind": of[-1]} for of in kinds))
    with anyio.fail_after(60):
        claims = (
            bench.engine.claim(worker=f"w{n}", claim_id=f"c{n}", limit=1, kinds=of, wait=0)
            for n, of in enumerate(kinds)
        )
        answers = await asyncio.gather(*claims)
    assert [[task.kind for task in answer.tasks] for answer in answers] == [[of[-1]] for of in kinds]
    assert max(looked_at) == 2 * MAX_KINDS
    monkeypatch.setattr(claiming, "_KINDS", 1)
    with anyio.fail_after(60):
        assert (await bench.engine.claim(worker="w", claim_id="c", limit=1, kinds=kinds[0], wait=0)).tasks == []


async def test_claims_of_many_kinds_of_one_token_go_before_no_claim_of_another(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claiming, "_KINDS", 5)
    heavy = [many_kinds(number, f"one/{number}", [f"{number}-a", f"{number}-b"]) for number in range(5)]
    others = [many_kinds(5, "two/5", ["x", "y"]), many_kinds(6, "two/6", ["y", "x"]), many_kinds(7, "one/7", ["0-a"])]
    with bench.engine._store.transaction() as tx:
        turn = UnitOfWork(tx, now=1.0, instant=1.0, random=Random(1))
        answers = claiming.claim(turn, [*heavy, *others])
    assert [number for number, answer in enumerate(answers) if answer.again] == [1, 2, 3, 4]


async def test_claims_for_many_tasks_of_one_token_go_before_no_claim_of_another(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claiming, "_MOST", 5)
    await bench.schedule(*[{"kind": "many"}] * 50, {"kind": "one"})
    heavy = [claiming.WaitingClaim(number, "w", f"one/{number}", ["many"], 3, 0.0) for number in range(5)]
    with bench.engine._store.transaction() as tx:
        now = bench.engine.clock.peek()
        turn = UnitOfWork(tx, now=now, instant=now, random=Random(1))
        answers = claiming.claim(turn, [*heavy, claiming.WaitingClaim(5, "w", "two/5", ["one"], 3, 0.0)])
    granted = [answer.claimed and len(answer.claimed.tasks) for answer in answers]
    assert granted == [3, 3, None, None, None, 1]
    assert [answer.again for answer in answers] == [False, False, True, True, True, False]


async def test_whose_claim_was_served_last_comes_last_in_the_next_transaction(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claiming, "_MOST", 3)
    await bench.schedule(*[{"kind": "many"}] * 50)
    callers = ["one", "one", "one", "two", "three"]
    waiting = [claiming.WaitingClaim(n, "w", f"{caller}/{n}", ["many"], 3, 0.0) for n, caller in enumerate(callers)]
    kinds, served = KindDefaults(), list[int]()
    while waiting:
        with bench.engine._store.transaction() as tx:
            now = bench.engine.clock.peek()
            answers = claiming.claim(UnitOfWork(tx, now=now, instant=now, random=Random(1), kinds=kinds), waiting)
        served += [request.number for request, answer in zip(waiting, answers, strict=True) if not answer.again]
        waiting = [request for request, answer in zip(waiting, answers, strict=True) if answer.again]
    assert served == [0, 3, 4, 1, 2]


async def test_claims_whose_callers_have_left_are_looked_at_in_many_turns_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claiming, "_KINDS", 5)
    kinds = [[f"{number}-a", f"{number}-b"] for number in range(5)]
    gone = [many_kinds(number, f"one/{number}", of, is_gone=True, is_new=False) for number, of in enumerate(kinds)]
    with bench.engine._store.transaction() as tx:
        turn = UnitOfWork(tx, now=1.0, instant=1.0, random=Random(1))
        answers = claiming.claim(turn, gone)
    assert [answer.again for answer in answers] == [False, False, True, True, True]


async def test_claims_whose_callers_have_left_before_they_were_tried_are_not_looked_at(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claiming, "_KINDS", 1)
    gone = [many_kinds(number, f"one/{number}", [f"{number}-a", f"{number}-b"], is_gone=True) for number in range(5)]
    with bench.engine._store.transaction() as tx:
        turn = UnitOfWork(tx, now=1.0, instant=1.0, random=Random(1))
        answers = claiming.claim(turn, [*gone, many_kinds(5, "one/5", ["x"])])
    assert not any(answer.again for answer in answers)


async def test_claims_of_kinds_without_tasks_read_nothing_of_them(bench: Bench) -> None:
    await bench.schedule({"kind": "k", "requires": {"a": "1"}}, {"kind": "k", "key": "x"}, {"kind": "k"})
    kinds = ["k", *(f"k{n}" for n in range(MAX_KINDS - 1))]
    done(bench)
    assert len((await bench.engine.claim(worker="w", claim_id="c", limit=9, kinds=kinds, wait=0)).tasks) == 2
    assert done(bench).rows < 30


async def test_a_claim_reads_no_more_lanes_than_it_takes_tasks_from(bench: Bench) -> None:
    claim = await many_routes(bench, 20, 16)
    done(bench)
    assert len((await claim("w")).tasks) == 1
    assert done(bench).statements < 100  # the lanes of one kind are compared, of 320


async def test_tasks_of_many_keys_are_read_together_also_where_a_collection_is_closed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.schedule(*({"kind": "k", "key": f"key-{n}"} for n in range(300)))
    await bench.engine.operations.set_gate(GateChange("collection", "closed", "pause", None, None, None, None))
    reads: list[str] = []
    for name in ("queued", "collections"):
        monkeypatch.setattr(SqliteTx, name, noted(reads, name, getattr(SqliteTx, name)))
    claimed = await bench.engine.claim(worker="w", claim_id="c", limit=500, kinds=["k"], wait=0)
    assert len(claimed.tasks) == 300
    assert len(reads) < 20


def noted(calls: list[str], name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        calls.append(name)
        return method(*args, **options)

    return call


async def test_keys_that_are_full_are_passed_in_growing_pages(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.schedule(*({"kind": "k", "key": f"key-{n % 300}"} for n in range(600)))
    await bench.engine.claim(worker="w", claim_id="first", limit=300, kinds=["k"], wait=0)
    await bench.engine.operations.set_kind("k", KindSettings(key_concurrency=1), by="ada")
    reads: list[str] = []
    monkeypatch.setattr(SqliteTx, "active_shares", noted(reads, "active_shares", SqliteTx.active_shares))
    assert not (await bench.engine.claim(worker="w", claim_id="second", limit=1, kinds=["k"], wait=0)).tasks
    assert 1 < len(reads) < 10


async def test_kinds_with_many_keys_share_what_a_claim_reads(bench: Bench) -> None:
    for kind in range(10):
        await bench.schedule(*({"kind": f"k{kind}", "key": f"key-{n}"} for n in range(100)))
    done(bench)
    kinds = [f"k{kind}" for kind in range(10)]
    claimed = await bench.engine.claim(worker="w", claim_id="c", limit=100, kinds=kinds, wait=0)
    assert Counter(task.kind for task in claimed.tasks) == dict.fromkeys(kinds, 10)
    assert done(bench).rows < 1500


@pytest.mark.parametrize("by_tickets", [False, True])
async def test_big_answers_to_many_claims_and_to_their_repeats_are_read_in_many_turns(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_tickets: bool
) -> None:
    count, most = 12, 4 * BIG
    monkeypatch.setattr(claiming, "_ANSWER", most)
    monkeypatch.setattr(claiming, "_ALWAYS_FIT", 4)
    store = SqliteStore(tmp_path / "other.db")
    store.open()
    with store.transaction() as tx:
        big = Raw(b'"%s"' % (b"x" * BIG))
        tasks = [NewTask(kind=f"k{n}", id=f"{n}-{m}", payload=big) for n in range(count) for m in range(4)]
        frontend.schedule(UnitOfWork(tx, now=1.0, instant=1.0, random=Random(1)), tasks)
    tokens = [set[str](), set[str]()]
    for found in tokens:
        waiting = [waiting_claim(n) for n in range(count)]
        if by_tickets:
            tickets = [[Ticket(id=f"{n}-{m}", fence=1) for m in range(4)] for n in range(count)]
            waiting = [replace_fields(one, tickets=of) for one, of in zip(waiting, tickets, strict=True)]
        while waiting:
            done(bench)
            with store.transaction() as tx:
                answers = claiming.claim(UnitOfWork(tx, now=2.0, instant=2.0, random=Random(len(waiting))), waiting)
            assert done(bench).read <= 4 * most
            found.update(task.token for answer in answers if answer.claimed for task in answer.claimed.tasks)
            again = [one for one, answer in zip(waiting, answers, strict=True) if answer.again]
            assert len(again) < len(waiting)
            waiting = again
    assert len(tokens[0]) == 4 * count
    assert tokens[0] == tokens[1]
    store.close()


class Connections:
    """Requests of one claim to the application, none of which reads its answer to the end before it may."""

    def __init__(self, engine: Engine) -> None:
        self.app = Api(engine)
        self.sending: Sending = self.app.parts.sending
        self.statuses: list[int] = []
        self.size = 0
        self.may_go = asyncio.Event()

    async def claim(self, claim_id: str = "c", **options: Any) -> None:
        asked = {"worker": "w", "kinds": ["k"], "limit": MAX_BATCH, "claim_id": claim_id} | options
        body = msgspec.json.encode(asked)
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope: Any = {
            "type": "http", "method": "POST", "path": "/v1/claims", "raw_path": b"/v1/claims", "query_string": b"",
            "headers": headers, "scheme": "http", "http_version": "1.1", "root_path": "", "client": None,
            "server": None, "asgi": {"version": "3.0"}, "extensions": {},
        }  # fmt: skip

        arriving = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if not arriving:
                await asyncio.Event().wait()  # the client stays
            return arriving.pop()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.statuses.append(message["status"])
                return
            self.size += len(message["body"])
            assert len(message["body"]) <= BIG
            await self.may_go.wait()

        await self.app(scope, receive, send)


async def test_of_one_claim_that_is_repeated_at_will_two_answers_are_under_way_at_most(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "_PAUSE", 0.01)
    for _ in range(2):
        await bench.schedule(*({"kind": "k", "payload": "x" * (BIG - 2)} for _ in range(16)))
    done(bench)
    connections = Connections(bench.engine)
    # The first of them join one claim, the others come while its answers are under way.
    first = [asyncio.create_task(connections.claim()) for _ in range(50)]
    await until(lambda: len(connections.statuses) == 50)
    more = [asyncio.create_task(connections.claim()) for _ in range(50)]
    await until(lambda: len(connections.statuses) == 100)
    assert connections.statuses.count(200) == 2
    assert connections.statuses.count(429) == 98
    assert connections.sending.size < 3 * MAX_BODY
    assert done(bench).read < 3 * MAX_BODY
    connections.may_go.set()
    await asyncio.gather(*first, *more)
    assert connections.size < 3 * MAX_BODY
    assert connections.sending.size == 0
    await connections.claim()
    assert connections.statuses[-1] == 200


async def test_bytes_of_answers_to_different_claims_are_bounded_together(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "_PAUSE", 0.01)
    little_room(monkeypatch)
    await bench.schedule(*({"kind": "k", "payload": "x" * (BIG - 2000)} for _ in range(5)))
    connections = Connections(bench.engine)
    polls: list[asyncio.Task[None]] = []
    for n in range(5):
        polls.append(asyncio.create_task(connections.claim(f"c{n}")))
        await until(lambda n=n: len(connections.statuses) > n)  # type: ignore[misc]
    assert connections.statuses == [200, 200, 200, 429, 429]
    assert (await bench.engine.queries.stats()).kinds["k"] == {"claimed": 3, "new": 2}, (
        "what is refused was not granted"
    )
    before = connections.sending.size
    polls.append(asyncio.create_task(connections.claim("c0", limit=0)))
    await until(lambda: len(connections.statuses) == 6)
    assert connections.statuses[-1] == 200, "a claim can always be ended"
    assert connections.sending.size == before
    connections.may_go.set()
    await asyncio.gather(*polls)
    for n in range(3, 5):
        await connections.claim(f"c{n}")
    assert connections.statuses[6:] == [200] * 2


async def test_claims_that_wait_are_granted_nothing_while_there_is_no_room_for_the_answers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have passed while there was room: they must not be granted more than fits, or what they are is lost."""
    little_room(monkeypatch)
    count = 20
    connections = Connections(bench.engine)
    polls = [asyncio.create_task(connections.claim(f"c{n}", wait=60)) for n in range(count)]
    await until(lambda: len(bench.engine._long_polls) == count)
    await bench.schedule(*({"kind": "k", "payload": "x" * (BIG - 2000)} for _ in range(count)))
    await until(lambda: connections.sending.size >= 3 * BIG - 10_000)
    await bench.engine.tick()
    with anyio.fail_after(30):  # an answer leaves a moment after its grant
        while (await bench.engine.queries.stats()).kinds["k"]["claimed"] != len(connections.statuses):
            await bench.engine.tick()
    assert len(connections.statuses) < count / 2
    connections.may_go.set()
    while len(connections.statuses) < count:
        await bench.engine.tick()
    await asyncio.gather(*polls)
    assert connections.statuses == [200] * count


def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """For three answers, each with one task of about `BIG` bytes."""
    monkeypatch.setattr(sending, "_TOGETHER", 3 * BIG - 10_000)
    monkeypatch.setattr(claiming, "_ANSWER", BIG)
    monkeypatch.setattr(claiming, "_ALWAYS_FIT", 1)


async def test_an_answer_whose_client_has_gone_takes_up_nothing(bench: Bench) -> None:
    await bench.schedule({"kind": "k", "payload": "x" * (BIG - 2)})
    connections = Connections(bench.engine)
    poll = asyncio.create_task(connections.claim())
    await until(lambda: connections.statuses == [200])
    assert connections.sending.size > BIG
    poll.cancel()
    await asyncio.wait([poll])
    assert connections.sending.size == 0


async def test_big_answers_that_one_token_does_not_read_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "_OF_TASKS", 1)
    big, null = Raw(b'"%b"' % (b"x" * BIG)), Raw(b"null")
    values = {"payload": big, "progress": null, "result": null, "error": null}
    facts = {"id": "a", "kind": "k", "status": "success", "priority": 2, "attempt": 1, "crashes": 0, "fence": 1}
    info = replace(msgspec.convert({**facts, "at": "2026-01-01T00:00:00Z"}, TaskInfo), **values)
    room, has_begun, may_go = Sending(), asyncio.Event(), asyncio.Event()

    async def unread(message: Any) -> None:
        has_begun.set()
        await may_go.wait()

    async def received() -> Any:
        await may_go.wait()

    async def answer(caller: str, send: Callable[[Any], Any]) -> None:
        CALLER.set(caller)
        await room.of_task(info)({}, received, send)

    waiting = [asyncio.create_task(answer("slow", unread)) for _ in range(2)]
    await has_begun.wait()
    read: list[Any] = []

    async def send(message: Any) -> None:
        read.append(message)

    other = asyncio.create_task(answer("other", send))
    await until(other.done)
    assert len(read) > 1
    may_go.set()
    await asyncio.gather(*waiting)


# What is refused before it is decoded


def filled(before: bytes, item: bytes, after: bytes) -> bytes:
    """As many of these items as a body may have."""
    count = (MAX_BODY - len(before) - len(after)) // (len(item) + 1)
    return before + b",".join([item] * count) + after


LONG = [
    (CancelRequest, b'{"ids":[', b'"a"', b"]}"),
    (ClaimRequest, b'{"worker":"w","claim_id":"c","kinds":[', b'"a"', b"]}"),
    (ScheduleRequest, b'{"tasks":[', b'{"kind":"a"}', b"]}"),
    (ScheduleRequest, b'{"tasks":[{"kind":"a","after":[', b'"a"', b"]}]}"),
    (ScheduleRequest, b'{"tasks":[{"kind":"a","retry":{"policy":"list","waits":[', b"1", b"]}}]}"),
    (BeatsRequest, b'{"worker":"w","beats":[', b'{"id":"a","token":"t"}', b"]}"),
    (ResultsRequest, b'{"worker":"w","results":[', b'{"id":"a","token":"t","outcome":"success"}', b"]}"),
    (ResultsRequest, b'{"worker":"w","results":[{"id":"a","token":"t","outcome":"success","then":[',
     b'{"kind":"a"}', b"]}]}"),
    (ResultsRequest,
     b'{"worker":"w","results":[{"id":"a","token":"t","outcome":"success","then":[{"kind":"a","after":[',
     b'"a"', b"]}]}]}"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "before", "item", "after"), LONG)
def test_a_list_that_is_too_long_is_refused_before_its_items_are_decoded(
    kind: type[Any], before: bytes, item: bytes, after: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = filled(before, item, after)

    def decode(_: object) -> None:
        raise AssertionError("its types have seen it")

    monkeypatch.setattr(validation, "_decoder", decode)
    with pytest.raises(Refused, match=r"1,000 at most|more than 262,144 bytes"):
        validation.read(body, kind)


@pytest.mark.parametrize("item", [b"[]", b"{}", b'{"":[]}', b"[" * 60 + b"]" * 60])
@pytest.mark.parametrize(
    "place", [b'{"tasks":[{"kind":"a","payload":[', b'{"tasks":[{"kind":"a"},{"kind":"b","payload":[']
)
def test_a_value_of_too_many_arrays_is_refused_before_it_is_decoded(
    place: bytes, item: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(raw: bytes) -> None:
        assert len(raw) < 10, "it was decoded"

    monkeypatch.setattr(wire, "decode_value", decode)
    body = place + b",".join([item] * ((MAX_PAYLOAD - 10) // (len(item) + 1))) + b"]}]}"
    with pytest.raises(Refused, match=f"arrays and objects: {MAX_NODES:,} at most"):
        validation.read(body, ScheduleRequest)


def test_arrays_of_all_values_together_are_bounded_too() -> None:
    tasks = [{"kind": "a", "payload": [[]] * (MAX_NODES - 1)}] * 2
    read(ScheduleRequest, {"tasks": [*tasks, {"kind": "a", "payload": [[]] * 40_000}]})
    with pytest.raises(Refused, match="more than 250,000 arrays and objects together: send fewer"):
        read(ScheduleRequest, {"tasks": [*tasks, {"kind": "a", "payload": [[]] * 60_000}]})


def test_brackets_in_strings_count_for_nothing() -> None:
    text = '[{"\\' * 100_000
    read(ScheduleRequest, {"tasks": [{"kind": "a", "payload": {"text": text, text[:3]: [text[:7]]}}]})


@pytest.mark.parametrize("depth", [63, 64, 65, 66])
@pytest.mark.parametrize("around", [b"%s", b'["]]\\\\",%s]', b'{"[[\\"":1,"a":%s}'])
def test_nesting_is_counted_as_it_is(depth: int, around: bytes) -> None:
    value = around % (b'[{"a":' * (depth // 2) + b"1" + b"}]" * (depth // 2))
    levels = depth // 2 * 2 + (around != b"%s")
    body = b'{"tasks":[{"kind":"a","payload":%s}]}' % value
    if levels <= 64:
        read(ScheduleRequest, body)
    else:
        with pytest.raises(Refused, match="nested too deep"):
            read(ScheduleRequest, body)


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("place", ["tasks", "then"])
def test_the_tasks_after_which_others_run_are_counted_over_all_of_a_request(place: str, more: int) -> None:
    tasks: list[dict[str, Any]] = [
        {"kind": "k", "after": [f"t-{n}" for n in range(100)]} for _ in range(MAX_WAITS // 100)
    ]
    tasks += [{"kind": "k", "after": ["t-0"]}] * more
    half = len(tasks) // 2
    results = [{"id": "a", "token": "t", "outcome": "success", "then": some} for some in (tasks[:half], tasks[half:])]
    schedule = (ScheduleRequest, {"tasks": tasks})
    type_, fields = schedule if place == "tasks" else (ResultsRequest, {"worker": "w", "results": results})
    if more:
        with pytest.raises(
            Refused, match=r"run after 10,001 others together .`after`., 10,000 at most: send fewer tasks"
        ):
            read(type_, fields)
    else:
        read(type_, fields)


@pytest.mark.parametrize("count", [MAX_SUCCESSORS, MAX_SUCCESSORS + 1])
def test_successors_are_counted_over_all_results_of_a_request(count: int) -> None:
    then = [[{"kind": "k"}] * (count // 2), [{"kind": "k"}] * (count - count // 2)]
    items = [{"id": "a", "token": "t", "outcome": "success", "then": some} for some in then]
    if count <= MAX_SUCCESSORS:
        read(ResultsRequest, {"worker": "w", "results": items})
    else:
        with pytest.raises(Refused, match=r"1,001 successors together .`then`., 1,000 at most: send fewer results"):
            read(ResultsRequest, {"worker": "w", "results": items})


async def test_those_who_ask_for_counts_together_share_them(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be a million kinds: each count takes seconds, and hundreds of megabytes."""
    counted = 0
    queries = bench.engine.queries
    count = queries._count

    async def counting() -> dict[str, dict[str, int]]:
        nonlocal counted
        counted += 1
        return await count()

    monkeypatch.setattr(queries, "_count", counting)
    first = asyncio.create_task(queries.counts())
    await until(lambda: counted > 0)
    await bench.schedule({"kind": "counted"})
    later = await asyncio.gather(*(queries.counts() for _ in range(50)))
    await first
    assert counted == 2
    assert all(found["counted"] == {"new": 1} for found in later), "a count begins after all who share it"
