"""The service behind `memory://`: the shortest full account of what a lease service does.

Rule 1: all state is under one lock; any thread and any loop may call.
Rule 2: the time is what the clock says. What is due is judged when somebody asks, and a waiting claim asks when the
        next task is due.
Rule 3: values of users come as checked, encoded JSON and leave decoded anew: nobody shares an object with the service.

A task's life (what is ready to be claimed stays *new*, *enqueued* or *retriable failure* until then):

    new ──claim──> claimed ──beat──> processing ──> success, fatal failure, cancelled, dead
     enqueued <──────┴─── release, crash, expired ───┤
     retriable failure <──────────────────── retry ──┘
"""

import asyncio
import heapq
import math
import threading
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random, SystemRandom
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, structs

from leasekit.task import Claimed, HistoryEntry, Page, Scheduled, Status, Task, TaskInfo, Verdict
from leasekit.testing._bell import Bell
from leasekit.testing.clock import FakeClock
from leasekit.wire import MAX_WAIT, BeatItem, ClaimRequest, NewTaskItem, SettlementItem

__all__ = ["MemoryService"]

_STARTED_AT = time.time() - time.monotonic()
_RUNNING = frozenset({Status.CLAIMED, Status.PROCESSING})
_NULL = Raw(b"null")

Wait = Callable[[asyncio.Event, float], Awaitable[None]]


def _unix_now() -> float:
    """Unix time that does not step: the wall clock is read once, at import."""
    return _STARTED_AT + time.monotonic()


# What the service keeps ---------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True, eq=False)
class _Run:
    """One grant of a task, and how it ended."""

    token: str
    fence: int
    attempt: int
    worker: str
    task: bytes  # as it was granted, so that a repeated claim is answered alike
    started_at: float | None = None
    outcome: str | None = None  # an Outcome, or *expired*; None while it runs
    ended_at: float = 0.0
    settlement: SettlementItem | None = None  # the first result of the token
    progress_seq: int = 0  # the number of the checkpoint that it left


@dataclass(slots=True, kw_only=True, eq=False)
class _Row:
    """One task. Everything about attempts follows from its runs."""

    id: str
    number: int  # grows with every new task
    new: NewTaskItem
    status: Status
    trigger_at: float  # when it is ready, or its lease ends; infinity where nothing follows
    progress: Raw = field(default_factory=lambda: _NULL)
    cancelling: bool = False
    runs: dict[str, _Run] = field(default_factory=dict[str, _Run])  # by token, oldest first

    @property
    def last_run(self) -> _Run | None:
        return next(reversed(self.runs.values()), None)

    @property
    def attempt(self) -> int:
        return len(self.runs) - self.count("release")

    @property
    def crashes(self) -> int:
        return self.count("crash", "expired")

    def count(self, *outcomes: str) -> int:
        return sum(run.outcome in outcomes for run in self.runs.values())


@dataclass(slots=True, kw_only=True, eq=False)
class _Claim:
    """One claim_id of one worker: when it was first asked, who waits for it, and what it got."""

    asked_at: float
    callers: int = 0
    is_over: bool = False  # it was asked for with the limit 0
    waited: float = 0.0
    granted: list[tuple[_Row, _Run]] = field(default_factory=list[tuple[_Row, _Run]])


class MemoryService:
    """A lease service whose time is `now()`, in seconds and taken for Unix time.

    `wait(wake, until)` is how a waiting claim sleeps until `wake` is set or `now()` reaches `until`; where `now` is a
    `FakeClock`, it is that clock's. `random` makes tokens, ids and jitter: seed it, and a history repeats.
    """

    def __init__(
        self, *, now: Callable[[], float] = _unix_now, wait: Wait | None = None, random: Random | None = None
    ) -> None:
        self._clock = now
        self._wait = wait or (now.wait if isinstance(now, FakeClock) else self._wait_really)
        self._random = random or SystemRandom()
        self._lock = threading.Lock()
        self._bell = Bell()  # rung when a task may have become ready, or due earlier
        self._latest = -math.inf
        self._rows: dict[str, _Row] = {}
        self._deduped: dict[tuple[str, str], tuple[_Row, float]] = {}  # (kind, key): the first task, until when
        self._claims: dict[tuple[str, str], _Claim] = {}
        # Heaps of what was true when it was pushed; the row has the truth when it is popped.
        self._due: list[tuple[float, int, str]] = []
        self._ready: dict[str, list[tuple[int, float, int, str]]] = {}

    # Claiming

    async def claim(self, asked: ClaimRequest) -> Claimed:
        key = (asked.worker, asked.claim_id)
        with self._bell.listen() as rung:
            with self._now() as now:
                claim = self._claims.setdefault(key, _Claim(asked_at=now))
                claim.callers += 1
                claim.is_over = claim.is_over or not asked.limit
            if claim.is_over:
                self._bell.ring()  # whoever waits for it is answered
            deadline = now + min(asked.wait, MAX_WAIT)
            try:
                while True:
                    rung.clear()
                    with self._now() as now:
                        if not (claim.granted or claim.is_over):
                            self._grant(claim, asked, now)
                        if claim.granted or claim.is_over or now >= deadline:
                            return _answer(claim, asked)
                        until = min(deadline, self._due[0][0]) if self._due else deadline
                    await self._wait(rung, until)
            finally:
                with self._lock:
                    claim.callers -= 1
                    if not (claim.callers or claim.granted or claim.is_over):  # empty answers are not remembered
                        self._claims.pop(key, None)

    def _grant(self, claim: _Claim, asked: ClaimRequest, now: float) -> None:
        kinds = dict.fromkeys(asked.kinds)
        while len(claim.granted) < asked.limit and (row := self._next_ready(kinds, now)):
            claim.granted.append((row, self._start(row, asked.worker)))
            self._move(row, Status.CLAIMED, now + row.new.claim_ttl)
        claim.waited = now - claim.asked_at

    def _next_ready(self, kinds: dict[str, None], now: float) -> _Row | None:
        """The most urgent task of these kinds, the one that is longest due among equals."""
        while heaps := [heap for kind in kinds if (heap := self._ready.get(kind))]:
            row = self._rows[heapq.heappop(min(heaps, key=lambda heap: heap[0]))[-1]]
            if row.trigger_at <= now and row.status not in _RUNNING:
                return row
        return None

    def _start(self, row: _Row, worker: str) -> _Run:
        new, token = row.new, f"{self._random.getrandbits(128):032x}"
        task = Task(
            id=row.id, kind=new.kind, token=token, ttl=new.claim_ttl, fence=len(row.runs) + 1,
            attempt=row.attempt + 1, payload=new.payload, collection=new.collection, priority=new.priority,
            progress=row.progress, traceparent=new.traceparent,
        )  # fmt: skip
        run = _Run(
            token=token, fence=task.fence, attempt=task.attempt, worker=worker, task=msgspec.json.encode(task)
        )  # fmt: skip
        row.runs[token] = run
        return run

    def steal(self, task_id: str, *, token: str | None = None, thief: str = "thief") -> Task | None:
        """Let the lease of a task run out now, and grant the task to another worker at once: what that one was given.

        None, and nothing is changed, where nobody holds it, or not by this `token`.
        """
        with self._now() as now:
            row = self._rows.get(task_id)
            run = row.last_run if row and row.status in _RUNNING else None
            if row is None or run is None or token not in (None, run.token):
                return None
            self._end(row, run, "expired", now)
            if row.status.ended:  # that was one crash too many
                return None
            stolen = self._start(row, thief)
            self._move(row, Status.CLAIMED, now + row.new.claim_ttl)
        return msgspec.json.decode(stolen.task, type=Task)

    # Beating and settling

    def beat(self, beats: Sequence[BeatItem]) -> list[Verdict]:
        with self._now() as now:
            return [self._beat(beat, now) for beat in beats]

    def _beat(self, beat: BeatItem, now: float) -> Verdict:
        row, run, reason = self._find(beat.id, beat.token)
        if row is None or run is None or reason:
            return Verdict(id=beat.id, verdict="gone", reason=reason)
        if run.started_at is not None and now - run.started_at >= (row.new.max_runtime or math.inf):
            # Renewed no more; what was granted is not taken back.
            return Verdict(id=beat.id, verdict="gone", reason="expired")
        if beat.started and run.started_at is None:
            run.started_at = now
        _keep_progress(row, run, beat)
        ttl = row.new.heartbeat_timeout
        # No nearer than it was: a holder that does not hear the answer goes by what it was granted before.
        until = max(row.trigger_at, now + ttl)
        self._move(row, Status.CLAIMED if run.started_at is None else Status.PROCESSING, until)
        order: Literal["cancel"] | None = "cancel" if row.cancelling else None
        return Verdict(id=beat.id, verdict="renewed", ttl=ttl, order=order)

    def settle(self, settlements: Sequence[SettlementItem]) -> list[Verdict]:
        with self._now() as now:
            verdicts = [self._settle(settlement, now) for settlement in settlements]
        self._bell.ring()
        return verdicts

    def _settle(self, item: SettlementItem, now: float) -> Verdict:
        row, run, reason = self._find(item.id, item.token)
        if row and run and run.settlement and _same(run.settlement, item):
            return Verdict(id=item.id, verdict="settled")
        # An expired lease that was not granted again: finished work is not thrown away.
        if row and run and (reason is None or (reason == "expired" and not row.status.ended)):
            self._end(row, run, item.outcome, now, item)
            return Verdict(id=item.id, verdict="settled")
        return Verdict(id=item.id, verdict="gone", reason=reason)

    def _find(self, task_id: str, token: str) -> tuple[_Row | None, _Run | None, str | None]:
        """The run of this token, and why it may not write any more: None while it may."""
        row = self._rows.get(task_id)
        run = row.runs.get(token) if row else None
        return row, run, _why_gone(row, run)

    def _end(self, row: _Row, run: _Run, outcome: str, now: float, item: SettlementItem | None = None) -> None:
        run.outcome, run.ended_at, run.settlement = outcome, now, item
        if item:
            _keep_progress(row, run, item)
        self._move(row, _status_after(row, outcome), now + self._wait_after(row, item))
        for position, successor in enumerate(item.then if item else ()):
            # Derived, so that a repeat of this result makes no second one; `/` is in no id.
            derived = uuid.uuid5(uuid.NAMESPACE_OID, f"{row.id}/{run.fence}/{position}")
            self._schedule(structs.replace(successor, id=successor.id or str(derived)), now)

    def _wait_after(self, row: _Row, item: SettlementItem | None) -> float:
        if item is None or item.outcome not in ("retry", "release"):
            return 0.0
        if item.retry_after is not None:
            return item.retry_after
        return row.new.retry.wait(row.count("retry"), self._random) if item.outcome == "retry" else 0.0

    # Scheduling and reading

    def schedule(self, tasks: Sequence[NewTaskItem]) -> list[Scheduled]:
        with self._now() as now:
            answers = [self._schedule(task, now) for task in tasks]
        self._bell.ring()
        return answers

    def _schedule(self, new: NewTaskItem, now: float) -> Scheduled:
        if row := self._rows.get(new.id or ""):
            conflict = new.kind != row.new.kind or _canonical(new.payload) != _canonical(row.new.payload)
            return Scheduled(id=row.id, created=False, status=row.status, conflict=conflict)
        first, until = self._deduped.get((new.kind, new.dedupe_key or ""), (None, 0.0))
        if first and now < until:
            return Scheduled(id=first.id, created=False, status=first.status)
        due_at = max(now, new.at.timestamp()) if new.at else now
        row = _Row(
            id=new.id or self._make_id(now), number=len(self._rows), new=new, status=Status.NEW, trigger_at=due_at
        )  # fmt: skip
        self._rows[row.id] = row
        if new.dedupe_key:
            window = math.inf if new.dedupe_window is None else new.dedupe_window
            self._deduped[new.kind, new.dedupe_key] = row, now + window
        self._move(row, Status.NEW, due_at)
        return Scheduled(id=row.id, created=True, status=row.status)

    def cancel(self, task_ids: Sequence[str]) -> list[Verdict]:
        with self._now():
            return [self._cancel(task_id) for task_id in task_ids]

    def _cancel(self, task_id: str) -> Verdict:
        row = self._rows.get(task_id)
        if row is None:
            return Verdict(id=task_id, verdict="gone", reason="unknown")
        if row.status in _RUNNING:
            row.cancelling = True
            return Verdict(id=task_id, verdict="ordered")
        if row.status.ended and row.status is not Status.CANCELLED:
            return Verdict(id=task_id, verdict="gone", reason="settled")
        self._move(row, Status.CANCELLED, math.inf)
        return Verdict(id=task_id, verdict="cancelled")

    def get(self, task_id: str) -> TaskInfo | None:
        with self._now():
            row = self._rows.get(task_id)
            return _info(row) if row else None

    def stats(self) -> dict[str, Any]:
        kinds: dict[str, Counter[str]] = {}
        with self._now():
            for row in self._rows.values():
                kinds.setdefault(row.new.kind, Counter())[row.status.value] += 1
        return {"kinds": {kind: dict(counts) for kind, counts in kinds.items()}}

    def page(self, wanted: Callable[[TaskInfo], bool], *, after: int, limit: int) -> Page:
        with self._now():
            rows = [row for row in self._rows.values() if row.number > after and wanted(_info(row))]
            cursor = str(rows[limit - 1].number) if len(rows) > limit else None
            return Page(tasks=[_info(row) for row in rows[:limit]], cursor=cursor)

    # Time

    @contextmanager
    def _now(self) -> Generator[float]:
        """The lock, and the time, with all that was due by then done. A clock that steps back moves no time back."""
        with self._lock:
            now = self._latest = max(self._latest, self._clock())
            while self._due and self._due[0][0] <= now:
                at, _, task_id = heapq.heappop(self._due)
                row = self._rows[task_id]
                if row.trigger_at == at:
                    self._come_due(row)
            yield now

    def _come_due(self, row: _Row) -> None:
        if row.status in _RUNNING and row.last_run:
            self._end(row, row.last_run, "expired", row.trigger_at)
        else:
            entry = (row.new.priority, row.trigger_at, row.number, row.id)
            heapq.heappush(self._ready.setdefault(row.new.kind, []), entry)

    def _move(self, row: _Row, status: Status, trigger_at: float) -> None:
        row.status, row.trigger_at = status, math.inf if status.ended else trigger_at
        if not status.ended:
            heapq.heappush(self._due, (trigger_at, row.number, row.id))

    async def _wait_really(self, wake: asyncio.Event, until: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(until - self._clock()):
                await wake.wait()

    def _make_id(self, now: float) -> str:
        """A UUIDv7 of the service's own clock and randomness."""
        bits = int(now * 1000) << 80 | 0x7 << 76 | self._random.getrandbits(12) << 64
        return str(uuid.UUID(int=bits | 0b10 << 62 | self._random.getrandbits(62)))


# Rules that need no service -----------------------------------------------------------------------------------


def _keep_progress(row: _Row, run: _Run, item: BeatItem | SettlementItem) -> None:
    """Unless what is kept was reported later in the same run, and only its request was faster."""
    if item.progress is UNSET or (item.progress_seq is not None and item.progress_seq < run.progress_seq):
        return
    row.progress = item.progress
    if item.progress_seq is not None:
        run.progress_seq = item.progress_seq


def _answer(claim: _Claim, asked: ClaimRequest) -> Claimed:
    live = [run.task for row, run in claim.granted if run is row.last_run and run.outcome is None]
    tasks = [msgspec.json.decode(task, type=Task) for task in live]
    return Claimed(tasks=tasks if asked.limit else [_to_release(task) for task in tasks], waited=claim.waited)


def _to_release(task: Task) -> Task:
    """What is needed to release a task, and no value of a user."""
    return Task(
        id=task.id, kind=task.kind, token=task.token, ttl=task.ttl, fence=task.fence, attempt=task.attempt
    )  # fmt: skip


def _why_gone(row: _Row | None, run: _Run | None) -> str | None:
    if row is None:
        return "unknown"
    if row.status is Status.CANCELLED:
        return "cancelled"
    if row.status.ended or (run and run.settlement):
        return "settled"
    if run is None or run is not row.last_run:
        return "taken"
    return run.outcome


def _status_after(row: _Row, outcome: str) -> Status:
    new = row.new
    match outcome:
        case "success":
            return Status.SUCCESS
        case "fatal":
            return Status.FATAL_FAILURE
        case "cancelled":
            return Status.CANCELLED
        case _ if row.cancelling:
            return Status.CANCELLED
        case "retry" if row.count("retry") >= (new.max_attempts or math.inf):
            return Status.DEAD
        case "retry":
            return Status.RETRIABLE_FAILURE
        case "crash" | "expired" if row.crashes > new.max_crashes:
            return Status.DEAD
        case _:
            return Status.ENQUEUED


def _info(row: _Row) -> TaskInfo:
    new, run = row.new, row.last_run
    settled = next((one.settlement for one in reversed(row.runs.values()) if one.outcome), None)
    return TaskInfo(
        id=row.id, kind=new.kind, status=row.status, priority=new.priority, attempt=row.attempt, crashes=row.crashes,
        fence=len(row.runs), at=_moment(row.trigger_at if row.trigger_at < math.inf else run.ended_at if run else 0),
        collection=new.collection, payload=_plain(new.payload), progress=_plain(row.progress),
        result=_plain(settled.result) if settled else None, error=_plain(settled.error) if settled else None,
        worker=run.worker if run and row.status in _RUNNING else None,
        history=[_entry(run) for run in row.runs.values() if run.outcome],
        reason=_why_dead(row) if row.status is Status.DEAD else None,
    )  # fmt: skip


def _why_dead(row: _Row) -> str:
    if row.last_run and row.last_run.outcome == "retry":
        return f"{row.count('retry')} attempts ended in retry: max_attempts is {row.new.max_attempts}"
    return f"{row.crashes} runs ended because their holder vanished: max_crashes is {row.new.max_crashes}"


def _entry(run: _Run) -> HistoryEntry:
    settled = run.settlement
    return HistoryEntry(
        fence=run.fence, attempt=run.attempt, outcome=run.outcome or "", at=_moment(run.ended_at), worker=run.worker,
        result=_plain(settled.result) if settled else None, error=_plain(settled.error) if settled else None,
    )  # fmt: skip


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def _plain(raw: Raw) -> Any:
    return msgspec.json.decode(raw)


def _canonical(raw: Raw | bytes) -> bytes:
    return msgspec.json.encode(msgspec.json.decode(raw), order="sorted")


def _same(one: SettlementItem, other: SettlementItem) -> bool:
    return _canonical(msgspec.json.encode(one)) == _canonical(msgspec.json.encode(other))
