"""Random histories against the rules: one live lease, a fence that grows, one outcome, nothing lost.

The reference knows nothing of tables and transactions; it is the rules of docs/protocol.md, one task at a time.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from leasekit.server import engine as module
from leasekit.server.engine import Engine
from leasekit.server.store import Store
from leasekit.server.store.memory import MemoryStore
from leasekit.server.store.sql import SqlStore
from leasekit.task import Beat, NewTask, Settlement, Task, TaskInfo, Waits

WAIT = 5.0
TTLS = st.sampled_from([(10.0, 20.0), (20.0, 10.0), (30.0, 4.0), (10.0, 10.0)])  # of a claim, and of a beat
MAX_ATTEMPTS, MAX_CRASHES = 3, 2
ENDED = {"success", "fatal_failure", "cancelled", "dead"}
OUTCOMES = ["success", "fatal", "retry", "release", "crash", "cancelled"]


@dataclass
class Grant:
    """One claim of a task."""

    token: str
    fence: int
    report: tuple[str, int] | None = None  # the first that was accepted


@dataclass
class Model:
    """What one task should be."""

    ttls: tuple[float, float]
    status: str = "new"
    due_at: float = 0.0  # waiting: when it is ready; leased: when the lease ends
    attempt: int = 0
    failures: int = 0
    crashes: int = 0
    ordered: bool = False
    grants: list[Grant] = field(default_factory=list)

    @property
    def is_leased(self) -> bool:
        return self.status in ("claimed", "processing")

    def settle_time(self, now: float) -> None:
        """Time has passed, and somebody looked."""
        if self.is_leased and self.due_at <= now:
            self.crashes += 1
            self.give_back(now, dead=self.crashes > MAX_CRASHES)

    def give_back(self, due_at: float, *, dead: bool, status: str = "enqueued") -> None:
        self.status = "cancelled" if self.ordered else "dead" if dead else status
        self.ordered = False
        self.due_at = due_at

    def end(self, outcome: str, now: float) -> None:
        if not self.is_leased:
            self.crashes -= 1  # it was taken for dead, and reports after all
        match outcome:
            case "retry":
                self.failures += 1
                self.give_back(now + WAIT, dead=self.failures >= MAX_ATTEMPTS, status="retriable_failure")
            case "release":
                self.attempt -= 1
                self.give_back(now, dead=False)
            case "crash":
                self.crashes += 1
                self.give_back(now, dead=self.crashes > MAX_CRASHES)
            case _:
                self.status = {"success": "success", "fatal": "fatal_failure", "cancelled": "cancelled"}[outcome]


class Histories(RuleBasedStateMachine):
    """Everything that can be asked for, in any order, with restarts and time between."""

    def make_store(self, directory: Path) -> Store:
        raise NotImplementedError

    @initialize()
    def start(self) -> None:
        self.directory = TemporaryDirectory()
        self.store = self.make_store(Path(self.directory.name))
        self.loop = asyncio.new_event_loop()
        self.now = 1000.0
        self.tasks: dict[str, Model] = {}
        self.held: list[Task] = []
        self.claims: list[tuple[str, list[Task]]] = []
        self.random = Random(5)  # one for all starts: what makes tokens never begins again
        self.open()

    def open(self) -> None:
        self.engine = Engine(self.store, clock=lambda: self.now, random=self.random)
        self.run(self.engine.__aenter__())

    def run(self, what: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(what, 30))

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.run(self.engine.__aexit__(None, None, None))
            self.loop.close()
            self.directory.cleanup()

    # What is done

    @rule(count=st.integers(1, 3), again=st.booleans(), ttls=TTLS)
    def schedule(self, count: int, again: bool, ttls: tuple[float, float]) -> None:  # noqa: FBT001
        ids = [f"t{len(self.tasks) + n}" for n in range(count)] + (["t0"] if again and self.tasks else [])
        new = [
            NewTask(
                kind="k",
                id=task_id,
                claim_timeout=ttls[0],
                heartbeat_timeout=ttls[1],
                max_attempts=MAX_ATTEMPTS,
                max_crashes=MAX_CRASHES,
                retry=Waits(waits=[WAIT]),
            )
            for task_id in ids
        ]
        for answer in self.run(self.engine.schedule(new)):
            known = self.tasks.setdefault(answer.id, Model(ttls, due_at=self.now))
            assert answer.created == (answer.id not in ids[count:])
            assert answer.status == known.status or (known.is_leased and answer.status in ("claimed", "processing"))

    @rule(limit=st.integers(1, 4), turns=st.integers(1, 2))
    def claim(self, limit: int, turns: int) -> None:
        """Also two at once, which share a transaction."""
        ids = [f"c{len(self.claims) + n}" for n in range(turns)]
        asking = [
            self.engine.claim(worker="w", kinds=["k"], limit=limit, wait=0, claim_id=claim_id) for claim_id in ids
        ]

        async def together() -> list[Any]:
            return await asyncio.gather(*asking)

        answers = self.run(together())
        self.look()
        due = [(m.due_at, int(name[1:]), name) for name, m in self.tasks.items() if self.is_ready(m)]
        expected = [name for _, _, name in sorted(due)][: limit * turns]
        assert [task.id for answer in answers for task in answer.tasks] == expected
        for claim_id, answer in zip(ids, answers, strict=True):
            self.claims.append((claim_id, answer.tasks))
            for task in answer.tasks:
                self.granted(task)

    def is_ready(self, model: Model) -> bool:
        return model.status in ("new", "enqueued", "retriable_failure") and model.due_at <= self.now

    def granted(self, task: Task) -> None:
        model = self.tasks[task.id]
        assert not model.is_leased, "S1: one live lease"
        assert model.status not in ENDED, "S4: an end is an end"
        assert all(task.fence > grant.fence for grant in model.grants), "S1: the fence grows"
        assert all(task.token != grant.token for grant in model.grants)
        model.attempt += 1
        assert task.attempt == model.attempt
        model.status, model.due_at = "claimed", self.now + model.ttls[0]
        model.grants.append(Grant(task.token, task.fence))
        self.held.append(task)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def claim_again(self, data: Any) -> None:
        claim_id, tasks = data.draw(st.sampled_from(self.claims))
        if not tasks:
            return
        answer = self.run(self.engine.claim(worker="w", kinds=["k"], limit=9, wait=0, claim_id=claim_id))
        live = [task for task in tasks if self.is_live(task)]
        assert [(task.id, task.token, task.fence) for task in answer.tasks] == [
            (task.id, task.token, task.fence) for task in live
        ]

    def is_live(self, task: Task) -> bool:
        model = self.tasks[task.id]
        return model.is_leased and model.grants[-1].token == task.token and model.due_at > self.now

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def beat(self, data: Any) -> None:
        chosen = data.draw(st.lists(st.tuples(st.sampled_from(self.held), st.booleans()), min_size=1, max_size=4))
        beats = [Beat(id=task.id, token=task.token, started=started) for task, started in chosen]
        verdicts = self.run(self.engine.heartbeat("w", beats))
        for (task, started), verdict in zip(chosen, verdicts, strict=True):
            model = self.tasks[task.id]
            assert (verdict.verdict == "renewed") == self.is_live(task), "S3, S8"
            if verdict.verdict == "renewed":
                assert verdict.ttl == model.ttls[1]
                assert verdict.order == ("cancel" if model.ordered else None)
                model.due_at = max(model.due_at, self.now + verdict.ttl)
                model.status = "processing" if started else model.status
            elif model.grants[-1].token == task.token:
                model.settle_time(self.now)  # who is told that it is gone is told for good

    @precondition(lambda self: self.held)
    @rule(data=st.data(), outcome=st.sampled_from(OUTCOMES), result=st.integers(0, 1))
    def settle(self, data: Any, outcome: str, result: int) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.held), min_size=1, max_size=3))
        results = [
            Settlement(id=task.id, token=task.token, outcome=outcome, result=result)  # type: ignore[arg-type]
            for task in chosen
        ]
        verdicts = self.run(self.engine.results("w", results))
        for task, verdict in zip(chosen, verdicts, strict=True):
            assert verdict.verdict == self.reported(task, outcome, result)

    def reported(self, task: Task, outcome: str, result: int) -> str:
        model = self.tasks[task.id]
        grant = next(grant for grant in model.grants if grant.token == task.token)
        if grant.report is not None:
            return "settled" if grant.report == (outcome, result) else "gone"
        if grant is not model.grants[-1] or model.status in ENDED:
            return "gone"
        grant.report = (outcome, result)
        model.end(outcome, self.now)
        return "settled"

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.tasks)))
        (verdict,) = self.run(self.engine.cancel([task_id]))
        model = self.tasks[task_id]
        model.settle_time(self.now)
        if model.is_leased:
            model.ordered = True
            assert verdict.verdict == "ordered"
        elif model.status in ENDED:
            assert verdict.verdict == ("cancelled" if model.status == "cancelled" else "gone")
        else:
            model.status = "cancelled"
            assert verdict.verdict == "cancelled"

    @rule(seconds=st.sampled_from([0.5, 4.0, 5.0, 10.0, 20.0]), looked=st.booleans())
    def wait(self, seconds: float, looked: bool) -> None:  # noqa: FBT001
        self.now += seconds
        if looked:
            self.run(self.engine.tick())
            self.look()

    def look(self) -> None:
        for model in self.tasks.values():
            model.settle_time(self.now)

    @rule()
    def restart(self) -> None:
        """Leases get their whole ttl again, a little more each, and nothing else changes."""
        self.run(self.engine.__aexit__(None, None, None))
        self.open()
        for seq, model in enumerate(self.tasks.values(), start=1):
            if model.is_leased:
                model.due_at = self.now + max(model.ttls) * (1 + (seq % 100) / 1000)

    # What holds

    @invariant()
    def every_task_is_what_it_should_be(self) -> None:
        if not hasattr(self, "engine"):
            return
        infos: list[TaskInfo] = self.run(self.engine.list(limit=1000)).tasks
        assert [info.id for info in infos] == list(self.tasks), "S5: nothing is lost"
        for info in infos:
            model = self.tasks[info.id]
            found = (info.status.value, info.attempt, info.crashes, info.fence)
            assert found == (model.status, model.attempt, model.crashes, len(model.grants)), info.id


class InMemory(Histories):
    def make_store(self, directory: Path) -> Store:
        return MemoryStore()


class OnSqlite(Histories):
    def make_store(self, directory: Path) -> Store:
        return SqlStore(directory / "tasks.db")


@pytest.fixture(autouse=True)
def consumer_looks_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PERIOD", 3600.0)


_few = settings(max_examples=20, stateful_step_count=40, deadline=None)
TestInMemory = InMemory.TestCase
TestInMemory.settings = settings(_few, max_examples=40)
TestOnSqlite = OnSqlite.TestCase
TestOnSqlite.settings = _few
