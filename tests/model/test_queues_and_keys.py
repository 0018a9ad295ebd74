"""Random histories with queues, and with limits of keys: messages that are lost, late, repeated and out of order; keys
that are full, and come back.
"""

from collections import Counter
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from msgspec import UNSET, structs

from leasekit.server.enqueuer import MOVE, PUT_BACK
from leasekit.server.roles.enqueueing import Due, Moved
from leasekit.server.store.postgres import wakes
from leasekit.task import KindSettings, NewTask, Task, Ticket
from tests.model.rigs import EngineRig, PostgresRig, Rig, SqliteRig
from tests.model.test_model import TTLS, WAITING, Asked, Histories, Model, check
from tests.postgres_server import PostgresServer

pytestmark = pytest.mark.soak

ENQUEUE_TIMEOUT = 15.0
KEYS = st.sampled_from([None, "ada", "bob", "eve"])


class Queued(Histories):
    """Histories in which due tasks are moved to queues, and claimed by messages."""

    close = open = open_all = reschedule = step = None  # type: ignore[assignment]

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        self.messages: list[Ticket] = []
        self.moved: list[tuple[Moved, str]] = []  # with the status before, of the last move

    def task(self, task_id: str, **options: Any) -> NewTask:
        return structs.replace(super().task(task_id, **options), enqueue_timeout=ENQUEUE_TIMEOUT)

    def commit(self, rank: Any, request: Any) -> Any:
        engine = self.rig.engine  # type: ignore[attr-defined]
        return self.run(engine.commit.ask(rank, request, size=1))

    @rule(most=st.integers(1, 4), copies=st.sampled_from([0, 1, 1, 1, 2]))
    def move(self, most: int, copies: int) -> None:
        """Move due tasks of each priority; their messages are lost, or come once or twice."""
        self.look_around()
        due = sorted((m.priority, m.due_at, m.number, name) for name, m in self.tasks.items() if self.is_ready(m))
        first = [name for lane in {entry[0] for entry in due} for *_, name in [e for e in due if e[0] == lane][:most]]
        moved: list[Moved] = self.commit(MOVE, Due(["k"], most))
        assert sorted(task.id for task in moved) == sorted(first), "queues: what is due is moved"
        self.moved = []
        for task in moved:
            model = self.tasks[task.id]
            assert (task.fence, task.status.value, task.due_at) == (model.fence, model.status, model.due_at)
            self.moved.append((task, model.status))
            model.status, model.due_at = "enqueued", self.rig.now + ENQUEUE_TIMEOUT
            self.messages += [Ticket(id=task.id, fence=task.fence)] * copies

    @precondition(lambda self: self.moved)
    @rule()
    def the_queue_fails(self) -> None:
        """Put back the tasks of the last move, as far as they still wait as they were moved."""
        self.commit(PUT_BACK, [task for task, _ in self.moved])
        for task, before in self.moved:
            model = self.tasks[task.id]
            if (model.status, model.fence, model.due_at) == ("enqueued", task.fence, task.until):
                waits_as = "enqueued" if task.fence else "new"
                model.status = before if before == "retriable_failure" else waits_as
                model.due_at = task.due_at
        self.moved = []

    @precondition(lambda self: self.messages)
    @rule(data=st.data(), limit=st.integers(1, 4), keeps=st.booleans(), again=st.booleans())
    def claim_by_messages(self, data: Any, limit: int, keeps: bool, again: bool) -> None:
        """Claim by messages in any order; those that are kept come again, and so does the claim itself."""
        tickets = data.draw(
            st.lists(st.sampled_from(self.messages), min_size=1, max_size=4, unique_by=lambda ticket: ticket.id)
        )
        self.look_around()
        good = [ticket.id for ticket in tickets if self.is_good(ticket)]
        claim_id = f"c{len(self.claims)}"
        service: Any = self.rig.service
        answer = self.run(service.claim_tickets(["k"], tickets, limit=limit, claim_id=claim_id))
        assert [task.id for task in answer.tasks] == good[:limit], "queues: a good message entitles to its task"
        assert sorted(answer.refused) == sorted({ticket.id for ticket in tickets} - set(good)), "queues: and no other"
        self.claims.append(Asked(claim_id, answer.tasks, answer.waited, self.rig.instant))
        for task in answer.tasks:
            self.granted(task)
        if again and answer.tasks:
            repeated = self.run(service.claim_tickets(["k"], tickets, limit=limit, claim_id=claim_id))
            assert [task.token for task in repeated.tasks] == [task.token for task in answer.tasks], "S7"
        if not keeps:
            for ticket in tickets:
                self.messages.remove(ticket)

    def is_good(self, ticket: Ticket) -> bool:
        model = self.tasks[ticket.id]
        is_moved = model.status == "enqueued" and model.fence == ticket.fence
        return model.status in WAITING and (model.due_at <= self.rig.now or is_moved)


class Keyed(Histories):
    """Histories of tasks with keys, whose kind has limits that change."""

    close = open = open_all = reschedule = step = redrive = schedule = schedule_once = None  # type: ignore[assignment]

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        self.keys: dict[str, str | None] = {}
        self.most: int | None = None  # tasks of the kind that may have leases
        self.most_of_key: int | None = None

    @rule(
        count=st.integers(1, 4),
        key=KEYS,
        ttls=TTLS,
        priority=st.sampled_from([2, 2, 0]),
        later=st.sampled_from([0.0, 0.0, 8.0]),
    )
    def schedule_with_keys(self, count: int, key: str | None, later: float, **options: Any) -> None:
        ids = [next(self.ids) for _ in range(count)]
        self.ask("schedule", [structs.replace(self.task(name, later=later, **options), key=key) for name in ids])
        for name in ids:
            self.added(name, later=later, **options)
            self.keys[name] = key

    @rule(most=st.sampled_from([None, None, 1, 3]), most_of_key=st.sampled_from([None, 1, 1, 2]))
    def limit(self, most: int | None, most_of_key: int | None) -> None:
        service: Any = self.rig.service
        settings = KindSettings(
            concurrency=UNSET if most is None else most, key_concurrency=UNSET if most_of_key is None else most_of_key
        )
        self.run(service.set_kind("k", settings))
        self.most, self.most_of_key = most, most_of_key

    @rule(limit=st.integers(1, 4), turns=st.just(1), lost=st.booleans())
    def claim(self, limit: int, turns: int, lost: bool) -> None:
        self.look_around()
        running = Counter(self.keys[name] for name, model in self.tasks.items() if model.is_leased)
        ready = {name: model for name, model in self.tasks.items() if self.is_ready(model)}
        claim_id = f"c{len(self.claims)}"
        answer = self.ask("claim", ["k"], limit=limit, wait=0, claim_id=claim_id, lost=lost)
        self.judge(answer.tasks, ready, running, limit)
        self.claims.append(Asked(claim_id, answer.tasks, answer.waited, self.rig.instant))
        for task in answer.tasks:
            self.granted(task)

    def judge(self, tasks: list[Task], ready: dict[str, Model], running: Counter[str | None], limit: int) -> None:
        """As many start as may, the most urgent first, and of each key the longest due first."""
        rooms = {key: self.room_of(key, running[key]) for key in (None, "ada", "bob", "eve")}
        left = limit if self.most is None else min(limit, max(0, self.most - running.total()))
        for priority in (0, 2):
            lane = {key: self.first(ready, key, priority) for key in rooms}
            granted = [task.id for task in tasks if ready[task.id].priority == priority]
            of_key = Counter(self.keys[name] for name in granted)
            may_start = {key: min(len(names), rooms[key]) for key, names in lane.items()}
            assert len(granted) == min(left, sum(may_start.values())), "limits: no place is left unused, none exceeded"
            for key, names in lane.items():
                assert of_key[key] <= may_start[key], "limits of keys"
                assert [name for name in granted if self.keys[name] == key] == names[: of_key[key]], "order of a key"
                rooms[key] -= of_key[key]
            left -= len(granted)

    def room_of(self, key: str | None, running: int) -> int:
        """Tasks without a key have no limit."""
        return 1000 if key is None or self.most_of_key is None else max(0, self.most_of_key - running)

    def first(self, ready: dict[str, Model], key: str | None, priority: int) -> list[str]:
        names = [name for name, model in ready.items() if self.keys[name] == key and model.priority == priority]
        return sorted(names, key=lambda name: (ready[name].due_at, ready[name].number))


def test_queues() -> None:
    check(EngineRig, examples=20, of=Queued)


def test_keys() -> None:
    check(EngineRig, examples=20, of=Keyed)


@pytest.mark.slow
@pytest.mark.parametrize("of", [Queued, Keyed])
def test_the_server(of: type[Histories], tmp_path: Path) -> None:
    check(lambda: SqliteRig(Path(mkdtemp(dir=tmp_path))), examples=6, of=of)


@pytest.mark.slow
@pytest.mark.parametrize("of", [Queued, Keyed])
def test_postgresql(of: type[Histories], postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakes, "_LOOK", 0.02)  # a node that stops waits for its listener
    check(lambda: PostgresRig(postgres.emptied()), examples=4, of=of)


@pytest.mark.slow
@pytest.mark.parametrize("of", [Queued, Keyed])
def test_the_same_histories_each_time(of: type[Histories]) -> None:
    """Each mutant of the life with queues or keys fails in one of them."""
    check(EngineRig, examples=10, of=of, derandomize=True, phases=[Phase.generate])
