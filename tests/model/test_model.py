"""Random histories against the rules, on every service that knows its tasks: one live lease, a fence that grows, one
outcome, nothing lost.

The reference knows nothing of tables and transactions; it is the rules of docs/protocol.md, one task at a time.
"""

import asyncio
import itertools
import uuid
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec import UNSET

from leasekit.errors import Refused, Unavailable
from leasekit.server import due_tasks
from leasekit.server.roles import gates
from leasekit.server.store.postgres import wakes
from leasekit.task import Beat, FixedDelays, NewTask, Settlement, Status, Task
from leasekit.testing import faults
from leasekit.testing.faults import Faulty
from tests.model.rigs import EngineRig, HttpRig, MemoryRig, NodesRig, PostgresRig, RedisRig, Rig, SqliteRig
from tests.postgres_server import PostgresServer
from tests.redis_server import Server
from tests.sampling import in_soak

WAIT = 5.0
TTLS = st.sampled_from([(10.0, 20.0), (20.0, 10.0), (30.0, 4.0), (10.0, 10.0)])  # of a claim, and of a beat
MAX_ATTEMPTS, MAX_CRASHES = 3, 2
ENDED = {"success", "fatal_failure", "cancelled", "dead", "dropped"}
REDRIVABLE = {"dead", "fatal_failure", "dropped"}
WAITING = {"new", "enqueued", "retriable_failure"}
OUTCOMES = ["success", "fatal", "retry", "release", "crash", "cancelled"]
GATED = st.sampled_from([("kind", "k"), ("collection", "c"), ("collection", "c"), ("collection", "d")])
PROGRESS = st.one_of(st.none(), st.tuples(st.integers(1, 9), st.one_of(st.none(), st.integers(0, 2))))  # value, number


@dataclass
class Grant:
    """One claim of a task."""

    token: str
    fence: int
    report: tuple[Any, ...] | None = None  # the first that was accepted
    mark: int = 0  # the number of the checkpoint that is kept of it
    end: tuple[str, int] | None = None  # how it ended, as which attempt


@dataclass
class Model:
    """What one task should be."""

    ttls: tuple[float, float]
    priority: int
    number: int
    max_runtime: float | None
    expiry: str
    due_at: float
    ends_at: float = 0.0
    was_extended: bool = False
    overdue_at: float | None = None
    key: str | None = None
    collection: str | None = None
    status: str = "new"
    fence: int = 0
    attempt: int = 0
    failures: int = 0
    crashes: int = 0
    cancel_requested: bool = False
    progress: int | None = None
    reason: str | None = None
    grants: list[Grant] = field(default_factory=list)
    redrives: list[tuple[int, str, int]] = field(default_factory=list)  # fence, *redriven*, attempt
    reschedules: list[tuple[int, str, int]] = field(default_factory=list)  # the same; one between two runs

    @property
    def is_leased(self) -> bool:
        return self.status in ("claimed", "processing")

    @property
    def is_overdue(self) -> bool:
        """Whether its `max_runtime` was over before its lease ended."""
        return self.overdue_at is not None and self.overdue_at <= self.ends_at

    def is_of_last_run(self, grant: Grant) -> bool:
        """Whether no later run has begun, and no later life: a reschedule has a fence too, and ends neither."""
        return grant is self.grants[-1] and not any(fence > grant.fence for fence, *_ in self.redrives)

    def expire(self, now: float) -> None:
        self.grants[-1].end = ("expired", self.attempt)
        self.time_out(now)

    def time_out(self, now: float) -> None:
        if self.expiry == "retry":
            self.fail(now + WAIT)
        else:
            self.crash(now)

    def fail(self, due_at: float) -> None:
        self.failures += 1
        how = "ended in retry or timed out" if self.expiry == "retry" else "ended in retry"
        many = f"{self.failures} attempts {how}: max_attempts is {MAX_ATTEMPTS}"
        self.give_back(due_at, why=many if self.failures >= MAX_ATTEMPTS else None, status="retriable_failure")

    def crash(self, now: float) -> None:
        self.crashes += 1
        many = f"{self.crashes} runs ended because their holder vanished: max_crashes is {MAX_CRASHES}"
        self.give_back(now, why=many if self.crashes > MAX_CRASHES else None)

    def give_back(self, due_at: float, *, why: str | None = None, status: str = "enqueued") -> None:
        self.reason = None if self.cancel_requested else why
        self.status = "cancelled" if self.cancel_requested else "dead" if why else status
        self.cancel_requested = False
        self.due_at = due_at

    def end(self, outcome: str, now: float, wait: float | None, *, is_overdue: bool) -> None:
        if self.status == "retriable_failure":
            self.failures -= 1  # it was taken for dead, and reports after all
        elif not self.is_leased:
            self.crashes -= 1
        self.grants[-1].end = (outcome, self.attempt)
        match outcome:
            case "retry":
                self.fail(now + (WAIT if wait is None else wait))
            case "release":
                self.attempt -= 1
                self.give_back(now + (wait or 0.0))
            case "crash" if is_overdue:
                self.time_out(now)
            case "crash":
                self.crash(now)
            case _:
                self.status = {"success": "success", "fatal": "fatal_failure", "cancelled": "cancelled"}[outcome]

    def redrive(self, now: float) -> None:
        """Begin a new life."""
        self.fence += 1
        self.redrives.append((self.fence, "redriven", self.attempt))
        self.status, self.due_at, self.reason, self.cancel_requested = "enqueued", now, None, False
        self.failures = self.crashes = 0

    def reschedule(self, due_at: float | None, priority: int | None) -> None:
        if self.reschedules and self.reschedules[-1][0] == self.fence:
            self.reschedules.pop()
        self.fence += 1
        self.reschedules.append((self.fence, "rescheduled", self.attempt))
        self.due_at = self.due_at if due_at is None else due_at
        self.priority = self.priority if priority is None else priority

    def report(self, grant: Grant, progress: tuple[int, int | None] | None) -> None:
        if progress is not None and (progress[1] is None or progress[1] >= grant.mark):
            self.progress = progress[0]
            grant.mark = grant.mark if progress[1] is None else progress[1]


@dataclass
class Closed:
    """A gate that was closed."""

    mode: str
    until: float | None

    def holds(self, now: float) -> bool:
        return self.until is None or now < self.until


@dataclass
class Asked:
    """A claim that was answered."""

    claim_id: str
    tasks: list[Task]
    waited: float | None
    at: float
    is_over: bool = False


def carried(progress: tuple[int, int | None] | None) -> dict[str, Any]:
    """The progress as a beat or a settlement has it."""
    return {"progress": UNSET} if progress is None else {"progress": progress[0], "progress_seq": progress[1]}


class Histories(RuleBasedStateMachine):
    """Everything that can be asked for, in any order, with lost answers, repeats, restarts, steps and time between."""

    made_of = Model

    def __init__(self, rig: Rig) -> None:
        super().__init__()
        self.rig = rig
        self.loop = asyncio.new_event_loop()
        self.tasks: dict[str, Model] = {}
        self.firsts: dict[str, tuple[str, float | None]] = {}  # dedupe key → the first task, until when
        self.held: list[Task] = []
        self.claims: list[Asked] = []
        self.redrives = 0
        self.gates: dict[tuple[str, str], Closed] = {}
        self.opened: set[tuple[str, str]] = set()  # gates that were opened since the service looked last
        self.ids = (f"t{number}" for number in itertools.count())
        self.run(rig.open())

    def run(self, what: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(what, 30))

    def ask(self, kind: str, *args: Any, lost: bool = False, **options: Any) -> Any:
        """What the service answers; where the answer is `lost`, the same is asked again."""
        self.look_if_it_looks()
        faulty: Any = Faulty(self.rig.service)  # type: ignore[arg-type]
        if lost:
            faulty.script(kind, faults.lose_answer)
            with suppress(Unavailable):
                self.run(getattr(faulty, kind)(*args, **options))
        return self.run(getattr(faulty, kind)(*args, **options))

    def look_if_it_looks(self) -> None:
        if self.rig.looks_always:
            self.look()
            self.see_what_is_dropped()

    def teardown(self) -> None:
        self.run(self.rig.close())
        self.loop.close()

    # What is done

    @rule(
        count=st.integers(1, 3),
        again=st.booleans(),
        ttls=TTLS,
        priority=st.sampled_from([2, 2, 0]),
        max_runtime=st.sampled_from([None, None, 15.0]),
        expiry=st.sampled_from(["crash", "retry"]),
        later=st.sampled_from([0.0, 0.0, 8.0]),
        collection=st.sampled_from([None, None, "c", "d"]),
        lost=st.booleans(),
    )
    def schedule(self, count: int, later: float, again: bool, lost: bool, **options: Any) -> None:
        ids = [next(self.ids) for _ in range(count)]
        new = [self.task(task_id, later=later, **options) for task_id in ids]
        repeated = [self.task("t0", later=0.0, **options)] if again and "t0" in self.tasks else []
        answers = self.ask("schedule", new + repeated, lost=lost)
        for task_id in ids:
            self.added(task_id, later=later, **options)
        for answer in answers:
            known = self.tasks[answer.id]
            assert answer.created == (answer.id in ids and not lost), "S7"
            is_dropped = answer.status == "cancelled" and self.may_be_dropped(known)
            is_running = known.is_leased and answer.status in ("claimed", "processing")
            assert answer.status == known.status or is_running or is_dropped
            assert not answer.conflict

    def task(self, task_id: str, *, ttls: Any, later: float, priority: int = 2, **options: Any) -> NewTask:
        return NewTask(
            kind="k",
            id=task_id,
            priority=priority,
            # `at` and `delay` come to the same, by the one clock of a rig.
            at=datetime.fromtimestamp(self.rig.now + later, UTC) if later and priority else None,
            delay=later if later and not priority else None,
            claim_timeout=ttls[0],
            heartbeat_timeout=ttls[1],
            max_attempts=MAX_ATTEMPTS,
            max_crashes=MAX_CRASHES,
            retry=FixedDelays(waits=[WAIT]),
            **options,
        )

    def added(self, task_id: str, *, ttls: Any, later: float, priority: int = 2, **options: Any) -> None:
        options = {"max_runtime": None, "expiry": "crash"} | options
        number = self.run(self.rig.number(task_id, already=len(self.tasks)))
        self.tasks[task_id] = self.made_of(ttls, priority, number, due_at=self.rig.now + later, **options)

    @rule(key=st.sampled_from("ab"), window=st.sampled_from([None, 10.0]), ttls=TTLS, lost=st.booleans())
    def schedule_once(self, key: str, window: float | None, ttls: Any, lost: bool) -> None:
        task_id = next(self.ids)
        task = self.task(task_id, ttls=ttls, later=0.0, dedupe_key=key, dedupe_window=window)
        (answer,) = self.ask("schedule", [task], lost=lost)
        first, until = self.firsts.get(key, (None, 0.0))
        if first is not None and (until is None or until > self.rig.now):
            assert (answer.id, answer.created) == (first, False)
            return
        self.firsts[key] = task_id, None if window is None else self.rig.now + window
        self.added(task_id, ttls=ttls, later=0.0)
        self.tasks[task_id].key = key
        assert (answer.id, answer.created) == (task_id, not lost)

    @rule(limit=st.integers(1, 4), turns=st.integers(1, 2), lost=st.booleans())
    def claim(self, limit: int, turns: int, lost: bool) -> None:
        """Also two at once: where the service gathers, they share a transaction."""
        ids = [f"c{len(self.claims) + n}" for n in range(turns)]
        if self.rig.gathers and not lost:
            self.run(self.rig.service.stats())
            answers = self.run(self.together(ids, limit))
        else:
            answers = [self.ask("claim", ["k"], limit=limit, wait=0, claim_id=one, lost=lost) for one in ids]
        self.look()
        due = [(m.priority, m.due_at, m.number, name) for name, m in self.tasks.items() if self.is_ready(m)]
        granted = [task.id for answer in answers for task in answer.tasks]
        expected = [name for *_, name in sorted(due) if name in granted or not self.may_come_later(self.tasks[name])]
        count = limit * turns
        if granted and any(scope == "collection" for scope, _ in self.gates):  # a claim parks a bounded number at once
            count = len(granted)
        assert granted == expected[:count], "S11"
        for claim_id, answer in zip(ids, answers, strict=True):
            self.claims.append(Asked(claim_id, answer.tasks, answer.waited, self.rig.instant))
            for task in answer.tasks:
                self.granted(task)
        if not granted and ("kind", "k") not in self.gates:
            self.look_around()
            assert not self.left_to_drop("collection"), "gates: claims end what is dropped"

    async def together(self, ids: list[str], limit: int) -> list[Any]:
        service: Any = self.rig.service
        return await asyncio.gather(*(service.claim(["k"], limit=limit, wait=0, claim_id=one) for one in ids))

    def is_ready(self, model: Model) -> bool:
        return model.status in WAITING and model.due_at <= self.rig.now and self.gate_of(model) is None

    def gate_of(self, model: Model) -> Closed | None:
        """The gate behind which a task waits: that of its kind rather than that of its collection."""
        gates = (self.gates.get(key) for key in (("kind", "k"), ("collection", model.collection or "")))
        return next((gate for gate in gates if gate is not None and gate.holds(self.rig.now)), None)

    def may_come_later(self, model: Model) -> bool:
        """Whether its collection is open, but the service has not looked since: it may be parked still."""
        key = ("collection", model.collection or "")
        return key in self.opened or (key in self.gates and not self.gates[key].holds(self.rig.now))

    def may_be_dropped(self, model: Model) -> bool:
        gates = (self.gates.get(key) for key in (("kind", "k"), ("collection", model.collection or "")))
        drops = any(gate is not None and gate.mode == "drop" and gate.holds(self.rig.now) for gate in gates)
        return drops and model.status in WAITING and model.due_at <= self.rig.now

    def left_to_drop(self, scope: str) -> list[str]:
        """The due tasks behind a gate that drops them, which have not ended."""
        self.see_what_is_dropped()
        drops = {name for (of, name), gate in self.gates.items() if of == scope and gate.mode == "drop"}
        return [
            name
            for name, model in self.tasks.items()
            if model.status in WAITING and model.due_at <= self.rig.now and self.gate_of(model) is not None
            if ("k" if scope == "kind" else model.collection) in drops
        ]

    def see_what_is_dropped(self) -> None:
        """Behind a gate that drops them, due tasks end at some time."""
        if not any(gate.mode == "drop" for gate in self.gates.values()):
            return
        for info in self.run(self.rig.service.list_tasks(status=Status.CANCELLED, limit=1000)).tasks:
            model = self.tasks[info.id]
            if model.status in WAITING:
                assert self.may_be_dropped(model), "gates: only what is due, behind a gate that drops"
                assert info.reason.startswith("dropped: why"), info.reason
                model.status, model.reason, model.cancel_requested = "cancelled", info.reason, False

    @precondition(lambda self: self.rig.has_gates)
    @rule(
        key=GATED,
        mode=st.sampled_from(["pause", "pause", "drop"]),
        span=st.sampled_from([None, None, 6.0, 15.0, -5.0]),
        times=st.integers(1, 2),
    )
    def close(self, key: tuple[str, str], mode: str, span: float | None, times: int) -> None:
        """Close a gate, in place of what it was; the same once more changes nothing."""
        self.look_if_it_looks()
        until = None if span is None else self.rig.now + span
        moment = None if until is None else datetime.fromtimestamp(until, UTC)
        service: Any = self.rig.service
        for _ in range(times):
            info = self.run(service.set_gate(**{key[0]: key[1]}, mode=mode, until=moment, reason="why"))
            assert (info.kind or info.collection, info.mode) == (key[1], mode)
        self.gates[key] = Closed(mode, until)
        self.opened.discard(key)

    @precondition(lambda self: self.rig.has_gates)
    @rule(key=GATED, times=st.integers(1, 2))
    def open(self, key: tuple[str, str], times: int) -> None:
        self.look_if_it_looks()
        service: Any = self.rig.service
        for _ in range(times):
            self.run(service.open_gate(**{key[0]: key[1]}))
        if self.gates.pop(key, None) is not None:
            self.opened.add(key)

    @precondition(lambda self: self.rig.has_gates)
    @rule(restarts=st.booleans())
    def open_all(self, restarts: bool) -> None:
        """After all gates are open, every task that is due is granted, in order."""
        self.look_around()
        assert not self.left_to_drop("kind"), "gates: due tasks of a dropped kind end"
        for key in list(self.gates):
            self.open(key, times=1)
        if restarts and self.rig.restarts:
            self.restart()
        self.look_around()
        self.claim(limit=100, turns=1, lost=False)

    def granted(self, task: Task) -> None:
        model = self.tasks[task.id]
        assert not model.is_leased, "S1: one live lease"
        assert model.status not in ENDED, "S4: an end is an end"
        assert task.fence > model.fence, "S1: the fence grows"
        model.fence = task.fence
        assert all(task.token != grant.token for grant in model.grants)
        model.attempt += 1
        assert (task.attempt, task.progress, task.ttl) == (model.attempt, model.progress, model.ttls[0])
        model.status, model.ends_at, model.overdue_at = "claimed", self.rig.instant + model.ttls[0], None
        model.was_extended = False
        model.grants.append(Grant(task.token, task.fence))
        self.held.append(task)

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), ends=st.booleans())
    def claim_again(self, data: Any, ends: bool) -> None:
        """The request comes once more; or the one that ends the claim does."""
        asked = data.draw(st.sampled_from(self.claims))
        longest = max((task.ttl for task in asked.tasks), default=0.0)
        if not (asked.tasks or asked.is_over or ends):
            return  # an empty answer is not remembered
        if asked.tasks and self.rig.instant - asked.at >= self.rig.remembers * longest:
            return
        limit = 0 if ends else 9
        answer = self.ask("claim", ["k"], limit=limit, wait=0, claim_id=asked.claim_id)
        live = [(task.id, task.token, task.fence) for task in asked.tasks if self.is_live(task)]
        assert [(task.id, task.token, task.fence) for task in answer.tasks] == live, "S7"
        assert not live or answer.waited == asked.waited, "S7"
        assert not ends or all(task.payload is None and task.progress is None for task in answer.tasks)
        asked.is_over |= ends

    @rule()
    def end_a_claim_that_never_came(self) -> None:
        claim_id = f"c{len(self.claims)}"
        assert self.ask("claim", ["k"], limit=0, wait=0, claim_id=claim_id).tasks == []
        self.claims.append(Asked(claim_id, [], None, self.rig.instant, is_over=True))

    def is_live(self, task: Task) -> bool:
        model = self.tasks[task.id]
        return model.is_leased and model.grants[-1].token == task.token and not self.rig.has_ended(model)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), lost=st.booleans())
    def beat(self, data: Any, lost: bool) -> None:
        chosen = data.draw(
            st.lists(st.tuples(st.sampled_from(self.held), st.booleans(), PROGRESS), min_size=1, max_size=4)
        )
        beats = [Beat(id=task.id, token=task.token, started=started, **carried(p)) for task, started, p in chosen]
        verdicts = self.ask("beat", beats, lost=lost)
        for _ in range(1 + lost):
            for (task, started, progress), verdict in zip(chosen, verdicts, strict=True):
                self.beaten(task, started, progress, verdict)

    def beaten(self, task: Task, started: bool, progress: Any, verdict: Any) -> None:
        model, now = self.tasks[task.id], self.rig.instant
        is_overdue = model.overdue_at is not None and model.overdue_at <= now
        is_renewed = self.is_live(task) and not is_overdue
        assert (verdict.verdict == "renewed") == is_renewed, "S3, S8"
        if is_renewed:
            assert verdict.ttl == model.ttls[1]
            assert verdict.cancel_requested == model.cancel_requested
            model.ends_at, model.was_extended = max(model.ends_at, now + verdict.ttl), False
            if started and model.overdue_at is None and model.max_runtime is not None:
                model.overdue_at = now + model.max_runtime
            model.status = "processing" if started else model.status
            model.report(model.grants[-1], progress)
            return
        if model.is_leased and model.grants[-1].token == task.token:  # who is told that it is gone is told for good
            if self.rig.has_ended(model):
                model.expire(self.rig.now)
            else:
                model.overdue_at = 0.0
        assert verdict.reason == self.why_gone(model, task)

    def why_gone(self, model: Model, task: Task) -> str:
        grant = next(grant for grant in model.grants if grant.token == task.token)
        if model.status == "cancelled":
            return "cancelled"
        if grant.report is not None:
            return "settled"
        if not model.is_of_last_run(grant) or (model.status in ENDED and grant.fence != model.fence):
            return "taken"
        return "overdue" if self.is_overdue(model) else "expired"

    def is_overdue(self, model: Model) -> bool:
        return model.is_overdue and self.rig.instant >= (model.overdue_at or 0.0)

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(OUTCOMES),
        result=st.integers(0, 1),
        wait=st.sampled_from([None, None, 0.0, 7.0]),
        progress=PROGRESS,
        lost=st.booleans(),
    )
    def settle(self, data: Any, outcome: Any, result: int, wait: Any, progress: Any, lost: bool) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.held), min_size=1, max_size=3))
        results = [
            Settlement(
                id=task.id, token=task.token, outcome=outcome, result=result, retry_after=wait, **carried(progress)
            )
            for task in chosen
        ]
        verdicts = self.ask("settle", results, lost=lost)
        if lost:
            for task in chosen:
                self.reported(task, outcome, result, wait, progress)
        for task, verdict in zip(chosen, verdicts, strict=True):
            assert verdict.verdict == self.reported(task, outcome, result, wait, progress), "S3, S7"
            if verdict.verdict == "gone":
                assert verdict.reason == self.why_gone(self.tasks[task.id], task)

    def reported(self, task: Task, outcome: str, result: int, wait: float | None, progress: Any) -> str:
        model = self.tasks[task.id]
        grant = next(grant for grant in model.grants if grant.token == task.token)
        said = (outcome, result, wait, None if progress is None else progress[0])
        if grant.report is not None:
            return "settled" if grant.report == said else "gone"
        if not model.is_of_last_run(grant) or model.status in ENDED:
            return "gone"
        grant.report = said
        model.report(grant, progress)
        model.end(outcome, self.rig.now, wait, is_overdue=self.is_overdue(model))
        return "settled"

    @precondition(lambda self: self.tasks)
    @rule(data=st.data(), lost=st.booleans())
    def cancel(self, data: Any, lost: bool) -> None:
        self.cancel_task(data.draw(st.sampled_from(sorted(self.tasks))), lost=lost)

    def cancel_task(self, task_id: str, *, lost: bool = False) -> None:
        (verdict,) = self.ask("cancel", [task_id], lost=lost)
        model = self.tasks[task_id]
        self.settle_time(model)
        if model.is_leased:
            model.cancel_requested = True
            assert verdict.verdict == "cancel_requested"
        elif model.status in ENDED:
            assert verdict.verdict == ("cancelled" if model.status == "cancelled" else "gone")
        else:
            model.status = "cancelled"
            assert verdict.verdict == "cancelled"

    @precondition(lambda self: self.tasks)
    @rule(data=st.data(), is_dry_run=st.booleans(), lost=st.booleans())
    def redrive(self, data: Any, is_dry_run: bool, lost: bool) -> None:
        self.redrive_some(data, is_dry_run=is_dry_run, lost=lost)

    def redrive_some(self, data: Any, *, is_dry_run: bool, lost: bool) -> None:
        """Begin new lives of tasks that are dead or have failed for good; the others stay as they are."""
        ended = [name for name, model in self.tasks.items() if model.status in REDRIVABLE]
        ids = data.draw(st.lists(st.sampled_from(ended or sorted(self.tasks)), min_size=1, max_size=3, unique=True))
        ids = list(dict.fromkeys([*ids, *data.draw(st.lists(st.sampled_from(sorted(self.tasks)), max_size=1))]))
        self.redrives += 1
        answer = self.ask("redrive", ids, redrive_id=f"r{self.redrives}", dry_run=is_dry_run, lost=lost)
        assert [verdict.id for verdict in answer.tasks] == ids
        would: set[str] = set()
        for task_id, verdict in zip(ids, answer.tasks, strict=True):
            model = self.tasks[task_id]
            if model.status in REDRIVABLE and not self.rival(task_id, would):
                assert verdict.verdict == ("redrivable" if is_dry_run else "redriven"), "S4"
                would.add(task_id)
                if not is_dry_run:
                    model.redrive(self.rig.now)
                    self.take_key(task_id)
            else:
                assert verdict.verdict == "failed", "S4: only an end may be followed by a new life"

    @precondition(lambda self: self.tasks and self.rig.reschedules)
    @rule(
        data=st.data(),
        later=st.sampled_from([0.0, 8.0, None]),
        priority=st.sampled_from([None, 0, 4]),
        lost=st.booleans(),
    )
    def reschedule(self, data: Any, later: float | None, priority: int | None, lost: bool) -> None:
        """Change when a waiting task is due, and its lane; what runs or has ended is refused, and stays as it is."""
        if later is priority is None:
            return
        task_id = data.draw(st.sampled_from(sorted(self.tasks)))
        self.look_if_it_looks()
        self.see_what_is_dropped()
        model = self.tasks[task_id]
        service: Any = self.rig.service
        self.redrives += 1
        wanted = {"delay": later, "priority": priority, "request_id": f"r{self.redrives}"}
        try:
            answers = [self.run(service.reschedule(task_id, **wanted)) for _ in range(2 if lost else 1)]
        except Refused:
            self.see_what_is_dropped()
            self.settle_time(model)
            assert model.is_leased or model.status in ENDED, "only what waits is rescheduled"
            return
        self.settle_time(model)
        assert model.status in WAITING, "only what waits is rescheduled"
        model.reschedule(None if later is None else self.rig.now + later, priority)
        for answer in answers:
            told = (answer.status.value, answer.priority, answer.at.timestamp())
            assert told == (model.status, model.priority, pytest.approx(model.due_at, abs=1e-3))

    def rival(self, task_id: str, would: set[str]) -> bool:
        """Whether the dedupe key of the task belongs to another live task by now."""
        key = self.tasks[task_id].key
        first, until = self.firsts.get(key or "", (task_id, None))
        if until is not None and until <= self.rig.now:
            return False
        # In a dry run no key is taken over: an earlier task of the same request has it all the same.
        mates = {mate for mate in would if key is not None and self.tasks[mate].key == key}
        return bool(mates) or (first != task_id and self.tasks[first].status not in ENDED)

    def take_key(self, task_id: str) -> None:
        key = self.tasks[task_id].key
        if key is not None and (self.firsts[key][1] is None or self.firsts[key][1] > self.rig.now):  # type: ignore[operator]
            self.firsts[key] = task_id, self.firsts[key][1]

    @rule(seconds=st.sampled_from([0.5, 4.0, 5.0, 10.0, 20.0]), looked=st.booleans())
    def wait(self, seconds: float, looked: bool) -> None:
        self.run(self.rig.advance(seconds))
        if looked:
            self.look_around()

    def look(self) -> None:
        for model in self.tasks.values():
            self.settle_time(model)
        if self.rig.looks_always:
            self.note_what_has_opened()

    def note_what_has_opened(self) -> None:
        self.opened.clear()
        self.gates = {key: gate for key, gate in self.gates.items() if gate.holds(self.rig.now)}

    def settle_time(self, model: Model) -> None:
        """Time has passed, and somebody looked."""
        if model.is_leased and self.rig.has_ended(model):
            model.expire(self.rig.now)

    @precondition(lambda self: self.rig.restarts)
    @rule()
    def restart(self) -> None:
        """Leases get their whole ttl again, those that were heard since the last restart; nothing else changes."""
        self.run(self.rig.restart(list(self.tasks.values())))
        self.look()

    @precondition(lambda self: self.rig.steps)
    @rule(seconds=st.sampled_from([3.0, 40.0]))
    def step(self, seconds: float) -> None:
        """The wall clock is set ahead: no lease ends by it."""
        self.look_around()
        self.run(self.rig.step(seconds))
        self.look_around()

    def look_around(self) -> None:
        self.run(self.rig.look())
        self.look()
        self.see_what_is_dropped()  # now: its gate may open by time before anybody asks
        self.note_what_has_opened()

    # What holds

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def history_is_told(self, data: Any) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.tasks)))
        info = self.ask("get", task_id)
        model = self.tasks[task_id]
        ends = [(grant.fence, *grant.end) for grant in model.grants if grant.end]
        assert [(run.fence, run.outcome, run.attempt) for run in info.history] == sorted(
            ends + model.redrives + model.reschedules
        )

    @invariant()
    def every_task_is_what_it_should_be(self) -> None:
        self.see_what_is_dropped()
        infos = self.ask("list_tasks", limit=1000).tasks
        expected_ids = sorted(self.tasks, key=lambda task_id: self.tasks[task_id].number)
        assert [info.id for info in infos] == expected_ids, "S5: nothing is lost"
        for info in infos:
            model = self.tasks[info.id]
            found = (info.status.value, info.attempt, info.crashes, info.fence, info.progress)
            expected = (model.status, model.attempt, model.crashes, model.fence, model.progress)
            assert found == expected, (info.id, found, expected)
            self.check_reason(info.reason or "", model)
            gate = self.gate_of(model) if model.status in WAITING else None
            assert (info.gate and info.gate.mode) == (gate and gate.mode)

    def check_reason(self, reason: str, model: Any) -> None:
        assert reason.partition(";")[0] == (model.reason or "")


class Gated(Histories):
    """Histories that are mostly about gates."""

    end_a_claim_that_never_came = redrive = history_is_told = step = schedule_once = claim_again = beat = None  # type: ignore[assignment]

    @rule(
        key=GATED,
        modes=st.sampled_from([("pause",), ("drop",), ("pause", "drop")]),
        span=st.sampled_from([None, None, 4.0]),
        later=st.sampled_from([0.0, 0.0, 8.0]),
        ends=st.sampled_from(["cancel", "no"]),
    )
    def close_for_a_while(self, key: tuple[str, str], modes: Any, span: float | None, later: float, ends: str) -> None:
        """Tasks come to a closed gate, and claims; then the gate opens, by itself or by hand."""
        self.open_all(restarts=False)
        for count, collection in ((9, "c"), (2, "d"), (2, None)):
            self.schedule(count, later=0.0, again=False, lost=False, ttls=(10.0, 10.0), collection=collection)
        self.schedule(1, later=later, again=False, lost=False, ttls=(10.0, 10.0), collection="c")
        for mode in modes:
            self.close(key, mode, span, times=1)
            self.claim(limit=3, turns=1, lost=False)
            self.every_task_is_what_it_should_be()
        if ends == "cancel":
            self.cancel_task(max(self.tasks, key=lambda name: self.tasks[name].number))
        self.wait(4.0, looked=span is not None)
        self.every_task_is_what_it_should_be()
        self.open_all(restarts=True)


def check(make: Callable[[], Rig], *, examples: int, of: type[Histories] = Histories, **more: Any) -> None:
    examples *= in_soak(20, by_default=1)  # Sample: a twentieth of the histories.
    few = settings(max_examples=examples, stateful_step_count=40, deadline=None, **more)
    machine: Any = lambda: of(make())  # noqa: E731 - the type says a class, and any factory will do
    run_state_machine_as_test(machine, settings=few)


pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("small_steps")]


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tasks are many steps for gates."""
    monkeypatch.setattr(gates, "STEP", 2)
    monkeypatch.setattr(due_tasks, "_SHUT_OUT", 8)


def test_memory() -> None:
    check(MemoryRig, examples=25)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "examples"), [(SqliteRig, 8), (HttpRig, 4)])
def test_the_server(make: type[SqliteRig], examples: int, tmp_path: Path) -> None:
    check(lambda: make(Path(mkdtemp(dir=tmp_path))), examples=examples)


@pytest.mark.slow
def test_gates() -> None:
    """The same histories each time: each mutant of gates fails in one of them."""
    check(EngineRig, examples=10, of=Gated, derandomize=True, phases=[Phase.generate])


@pytest.mark.slow
@pytest.mark.parametrize(("make", "examples"), [(PostgresRig, 4), (NodesRig, 5)])
def test_postgresql(
    make: type[PostgresRig], examples: int, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakes, "_LOOK", 0.02)  # a node that stops waits for its listener
    check(lambda: make(postgres.emptied()), examples=examples)


@pytest.mark.usefixtures("settable_scripts")
def test_redis(redis_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    check(lambda: RedisRig(redis_server, f"p{uuid.uuid4().hex}", monkeypatch), examples=12)
