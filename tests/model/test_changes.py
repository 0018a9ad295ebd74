"""Random histories of what waits for more than a worker, and of what is changed while it waits: tasks after others,
start deadlines, dedupe keys that are debounced or live, bulk acts after dry runs, firings of periodic tasks.
"""

import uuid
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from msgspec import structs

from leasekit.backend import PeriodicDirectory
from leasekit.errors import Refused
from leasekit.periodic import PeriodicTask
from leasekit.server.store.postgres import wakes
from leasekit.task import NewTask, Settlement, Status, Task
from tests.model.rigs import EngineRig, HttpRig, MemoryRig, NodesRig, PostgresRig, RedisRig, Rig, SqliteRig
from tests.model.test_model import ENDED, TTLS, WAITING, Histories, Model, check
from tests.postgres_server import PostgresServer
from tests.redis_server import Server

pytestmark = pytest.mark.soak

PERIODIC = "p"
_MOMENT = 1 / 64  # seconds: whole microseconds, and exact in binary, so that no time is rounded on its way
LACKING: list[dict[str, Any]] = [
    {"start_deadline": 5.0}, {"debounce": 5.0, "dedupe_key": "a"}, {"dedupe_scope": "live", "dedupe_key": "a"},
]  # fmt: skip


@dataclass
class Waiting(Model):
    """A task that may wait for others, and may be late."""

    after: list[str] = field(default_factory=list[str])  # those that have not succeeded, sorted
    is_awaiting: bool = False
    allowed: float | None = None  # seconds after its due time until which it must have begun
    start_by: float | None = None
    has_begun: bool = False
    made_at: float = 0.0

    def reschedule(self, due_at: float | None, priority: int | None) -> None:
        super().reschedule(due_at, priority)
        if due_at is not None and self.start_by is not None and self.allowed is not None:
            self.start_by = due_at + self.allowed

    def replace(self, due_at: float) -> None:
        """Have another payload and due time, which the history does not tell."""
        self.fence += 1
        self.due_at = due_at

    def redrive(self, now: float) -> None:
        was_dropped = self.status == "dropped"
        super().redrive(now)
        self.allowed = self.start_by = None if was_dropped else self.start_by
        if was_dropped:
            self.status, self.is_awaiting = "new", bool(self.after)

    @property
    def may_be_late(self) -> bool:
        return self.allowed is not None and self.status in ("new", "enqueued") and not self.has_begun

    def is_late(self, now: float) -> bool:
        """Whether it must not begin any more; of a task that was claimed the service may look later."""
        is_first = not self.grants and not self.redrives
        return self.may_be_late and is_first and self.start_by is not None and self.start_by <= now


class Changing(Histories):
    """Histories of tasks that wait for others, have deadlines, replace one another, and are changed together."""

    made_of = Waiting
    tasks: dict[str, Any]
    close = open = open_all = schedule_once = None  # type: ignore[assignment]

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        self.every: int | None = None  # of the periodic task
        self.fires_after = 0.0

    # What is done

    @rule(data=st.data(), later=st.sampled_from([0.0, 0.0, 8.0]), ttls=TTLS, lost=st.booleans())
    def schedule_after(self, data: Any, later: float, ttls: Any, lost: bool) -> None:
        """Some of the tasks after which this one runs come later, or never."""
        task_id = next(self.ids)
        names = [*sorted(self.tasks), f"t{int(task_id[1:]) + 1}"]
        after = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
        if self.rig.refuses_circles or not self.waits_for(task_id, after):
            self.put_after(task_id, after, later=later, ttls=ttls, lost=lost)

    def put_after(self, task_id: str, after: list[str], *, later: float, ttls: Any, lost: bool) -> None:
        try:
            self.ask("schedule", [self.task(task_id, ttls=ttls, later=later, after=after)], lost=lost)
        except Refused:
            assert self.waits_for(task_id, after), "after: only a circle is refused"
            return
        self.added(task_id, ttls=ttls, later=later)
        model = self.tasks[task_id]
        model.after = sorted(name for name in after if name not in self.tasks or self.tasks[name].status != "success")
        model.is_awaiting = bool(model.after)
        self.follow()

    @precondition(lambda self: self.rig.reschedules)
    @rule(allowed=st.sampled_from([4.0, 12.0]), later=st.sampled_from([0.0, 8.0]), ttls=TTLS, lost=st.booleans())
    def schedule_with_deadline(self, allowed: float, later: float, ttls: Any, lost: bool) -> None:
        task_id = next(self.ids)
        self.ask("schedule", [self.task(task_id, ttls=ttls, later=later, start_deadline=allowed)], lost=lost)
        self.added(task_id, ttls=ttls, later=later)
        model = self.tasks[task_id]
        model.allowed, model.start_by = allowed, model.due_at + allowed

    @precondition(lambda self: self.rig.reschedules)
    @rule(
        key=st.sampled_from("ab"),
        how=st.sampled_from(["kept", "live", "live", "debounce", "debounce"]),
        later=st.sampled_from([0.0, 8.0, 30.0]),
        lost=st.booleans(),
    )
    def schedule_by_key(self, key: str, how: str, later: float, lost: bool) -> None:
        """Each submission is judged by what it says itself."""
        task_id, debounce = next(self.ids), 20.0 if how == "debounce" else None
        scope: dict[str, Any] = {"dedupe_scope": how} if debounce is None else {"debounce": debounce}
        task = self.task(task_id, ttls=(10.0, 20.0), later=later, dedupe_key=key, **scope)
        (answer,) = self.ask("schedule", [task], lost=lost)
        self.look_if_it_looks()
        self.see_what_is_dropped()
        first = self.tasks.get(self.firsts[key][0]) if key in self.firsts else None
        if first is not None and debounce is not None and first.status in WAITING and not first.grants:
            for _ in range(1 + lost):
                first.replace(min(self.rig.now + later, first.made_at + debounce))
            assert (answer.id, answer.created, answer.replaced) == (self.firsts[key][0], False, True)
        elif first is not None and debounce is None and (how == "kept" or first.status not in ENDED):
            assert (answer.id, answer.created, answer.replaced) == (self.firsts[key][0], False, False)
        else:
            self.added(task_id, ttls=(10.0, 20.0), later=min(later, debounce or later))
            self.tasks[task_id].key = key
            self.firsts[key] = task_id, None
            assert (answer.id, answer.created) == (task_id, not lost)

    @precondition(lambda self: self.rig.reschedules)
    @rule(
        act=st.sampled_from(["cancel", "reschedule", "reschedule"]),
        status=st.sampled_from([None, "new", "enqueued"]),
        later=st.sampled_from([0.0, 8.0]),
        comes_between=st.booleans(),
        lost=st.booleans(),
    )
    def act_on_all(
        self, act: Literal["cancel", "reschedule"], status: Any, later: float, comes_between: bool, lost: bool
    ) -> None:
        """Count the tasks that match, then change them: none that comes in between."""
        service: Any = self.rig.service
        call = getattr(service, f"{act}_matching")
        wanted = {"kind": "k", "status": status and Status(status)} | ({"delay": later} if act == "reschedule" else {})
        self.look_if_it_looks()
        self.see_what_is_dropped()
        names = [name for name, model in self.tasks.items() if self.matches(model, act, status)]
        tried = self.run(call(**wanted, dry_run=True))
        assert tried.kinds.get("k", {}) == self.counted(names), "bulk: a dry run counts"
        with pytest.raises(Refused):
            self.run(call(**{**wanted, "kind": "other"}, token=tried.token))
        if comes_between:
            self.run(self.rig.advance(_MOMENT))  # nodes cannot tell which of one instant came first
            self.schedule(1, later=0.0, again=False, lost=False, ttls=(10.0, 10.0))
        for turn in range(1 + lost):  # an act whose answer was lost is made again
            names = [name for name in names if self.matches(self.tasks[name], act, status)] if turn else names
            counted = self.counted(names)
            assert self.run(call(**wanted, token=tried.token)).kinds.get("k", {}) == counted, "bulk: as it was counted"
            for name in names:
                self.change(self.tasks[name], act, later)
        self.follow()

    def matches(self, model: Model, act: str, status: str | None) -> bool:
        return model.status in (WAITING if act == "reschedule" else WAITING | {"claimed", "processing"}) and (
            status in (None, model.status)
        )

    def counted(self, names: list[str]) -> dict[str, int]:
        statuses = [self.tasks[name].status for name in names]
        return {status: statuses.count(status) for status in statuses}

    def change(self, model: Model, act: str, later: float) -> None:
        if act == "reschedule":
            model.reschedule(self.rig.now + later, None)
            return
        super().settle_time(model)  # what follows comes after all are cancelled
        if model.is_leased:
            model.cancel_requested = True
        elif model.status not in ENDED:
            model.status = "cancelled"

    @precondition(lambda self: not self.rig.reschedules)
    @rule()
    def schedule_what_the_service_lacks(self) -> None:
        """An option that the service does not have is refused, and nothing of the request is done."""
        for lacking in LACKING:
            new = [self.task("refused", ttls=(10.0, 10.0), later=0.0, **options) for options in ({}, lacking)]
            with pytest.raises(Refused) as refusal:
                self.ask("schedule", new)
            assert {error["item"] for error in refusal.value.errors} == {1}

    @precondition(lambda self: self.tasks)
    @rule(data=st.data(), is_dry_run=st.booleans(), lost=st.booleans())
    def redrive(self, data: Any, is_dry_run: bool, lost: bool) -> None:
        self.redrive_some(data, is_dry_run=is_dry_run, lost=lost)
        self.look_if_it_looks()
        self.follow()

    @precondition(lambda self: isinstance(self.rig.service, PeriodicDirectory))
    @rule(every=st.sampled_from([7, 15, None]))
    def set_periodic(self, every: int | None) -> None:
        """Set a periodic task; the same again changes nothing, and another rule makes no firing of the past."""
        self.look_around()
        service: Any = self.rig.service
        if every is None:
            self.run(service.delete_periodic(PERIODIC))
        else:
            task = PeriodicTask(kind="k", every=every, overlap="queue", claim_timeout=10, heartbeat_timeout=20)
            limits = {"max_attempts": 3, "max_crashes": 2, "retry": self.task("", ttls=(1, 1), later=0).retry}
            self.run(service.set_periodic(PERIODIC, structs.replace(task, **limits)))
        if every != self.every:
            self.every, self.fires_after = every, self.rig.now

    # What follows from it

    def look_if_it_looks(self) -> None:
        self.run(self.rig.tell_ends())
        if not self.rig.refuses_circles:  # that has taken back the leases that have ended, too
            self.look()
        super().look_if_it_looks()

    def waits_for(self, task_id: str, names: list[str]) -> bool:
        """Whether one of these tasks waits for this one, or would again after a redrive."""
        known = [self.tasks[name] for name in names if name in self.tasks]
        awaited = [model.after for model in known if model.status in ("new", "dropped")]
        return any(task_id in of or self.waits_for(task_id, of) for of in awaited)

    def task(self, task_id: str, **options: Any) -> NewTask:
        return super().task(task_id or "unused", **options)

    def added(self, task_id: str, **options: Any) -> None:
        self.see_firings()
        super().added(task_id, **options)
        self.tasks[task_id].made_at = self.rig.now

    def see_firings(self) -> None:
        """Note the tasks of firings: each is at a multiple of the interval, and none is missing but what was late."""
        if self.every is None:
            return
        for info in self.run(self.rig.service.list_tasks(limit=1000)).tasks:
            name, _, instant = info.id.partition("@")
            if name == PERIODIC and info.id not in self.tasks:
                at = datetime.fromisoformat(instant).timestamp()
                assert at % self.every == 0, "firings: at their instants"
                assert self.fires_after < at <= self.rig.now, "firings: none of the past, none of the future"
                super().added(info.id, ttls=(10.0, 20.0), later=0.0)
                self.tasks[info.id].made_at = self.rig.now

    def follow(self) -> None:
        """Tasks after others are ready once these have succeeded, and are dropped if one of them has not."""
        is_over = False
        while not is_over:
            is_over = True
            for model in (model for model in self.tasks.values() if model.is_awaiting and model.status == "new"):
                ended = {name: self.tasks[name].status for name in model.after if name in self.tasks}
                failed = next((name for name in model.after if ended.get(name) in ENDED - {"success"}), None)
                model.after = [name for name in model.after if ended.get(name) != "success"]
                if failed is not None:
                    model.status, model.is_awaiting, is_over = "dropped", False, False
                elif not model.after:
                    model.is_awaiting, model.due_at = False, max(model.due_at, self.rig.now)

    def check_reason(self, reason: str, model: Any) -> None:
        if model.status == "dropped":
            assert "which it was to run after, ended as" in reason or reason.startswith("it had not begun in time")
        elif model.is_awaiting and model.status == "new":
            assert reason.startswith(tuple(f'waits for "{name}"' for name in model.after))
        else:
            super().check_reason(reason, model)

    def settle_time(self, model: Model) -> None:
        super().settle_time(model)
        self.follow()

    def is_ready(self, model: Any) -> bool:
        return super().is_ready(model) and not model.is_awaiting and not model.is_late(self.rig.now)

    def may_come_later(self, model: Any) -> bool:
        """Whether the service may have dropped it, or drops it with the next look."""
        return bool(model.may_be_late and model.made_at + model.allowed <= self.rig.now)

    def granted(self, task: Task) -> None:
        assert not self.tasks[task.id].is_late(self.rig.now), "start deadlines: not granted too late"
        assert not self.tasks[task.id].is_awaiting, "after: not granted before the others have succeeded"
        super().granted(task)

    def beaten(self, task: Task, started: bool, progress: Any, verdict: Any) -> None:
        super().beaten(task, started, progress, verdict)
        self.tasks[task.id].has_begun |= started and verdict.verdict == "renewed"

    def see_what_is_dropped(self) -> None:
        """Tasks that are too late are dropped by a claim, or by the next look."""
        self.follow()
        self.see_firings()
        late = [name for name, model in self.tasks.items() if model.may_be_late]
        for info in self.run(self.rig.service.list_tasks(status=Status.DROPPED, limit=1000)).tasks if late else ():
            if info.id in late and self.may_come_later(self.tasks[info.id]):
                self.tasks[info.id].status, self.tasks[info.id].is_awaiting = "dropped", False
        self.follow()

    def look_around(self) -> None:
        super().look_around()
        self.see_what_is_dropped()
        late = [name for name, model in self.tasks.items() if model.is_late(self.rig.now)]
        assert late == [], "start deadlines: dropped in time"
        if self.every is not None and self.rig.now - self.rig.now % self.every > self.fires_after:
            latest = datetime.fromtimestamp(self.rig.now - self.rig.now % self.every).astimezone()
            assert any(
                datetime.fromisoformat(name.partition("@")[2]) == latest for name in self.tasks if "@" in name
            ), "firings: the latest is made"


class Following(Changing):
    """Histories that are mostly about tasks after others."""

    beat = claim_again = end_a_claim_that_never_came = history_is_told = schedule_once = step = None  # type: ignore[assignment]

    @rule(
        comes=st.sampled_from(["first", "last", "when one has ended"]),
        outcomes=st.tuples(*[st.sampled_from(["success", "success", "success", "fatal", "retry"])] * 2),
        lost=st.booleans(),
    )
    def run_two_and_what_comes_after_both(self, comes: str, outcomes: Any, lost: bool) -> None:
        names = [next(self.ids) for _ in range(3)]
        options: Any = {"ttls": (10.0, 10.0), "later": 0.0}
        if comes == "first":
            self.put_after(names[2], names[:2], **options, lost=lost)
        self.ask("schedule", [self.task(name, **options) for name in names[:2]], lost=lost)
        for name in names[:2]:
            self.added(name, **options)
        if comes == "last":
            self.put_after(names[2], names[:2], **options, lost=lost)
        self.claim(limit=100, turns=1, lost=False)
        for task, outcome in zip([task for task in self.held if task.id in names[:2]], outcomes, strict=True):
            self.ask("settle", [Settlement(id=task.id, token=task.token, outcome=outcome, result=0)], lost=lost)
            self.reported(task, outcome, 0, None, None)
            self.every_task_is_what_it_should_be()
            if comes == "when one has ended" and names[2] not in self.tasks:
                self.put_after(names[2], names[:2], **options, lost=lost)
        self.claim(limit=100, turns=1, lost=lost)


def test_memory() -> None:
    check(MemoryRig, examples=20, of=Changing)


def test_the_engine() -> None:
    check(EngineRig, examples=20, of=Changing)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "examples"), [(SqliteRig, 6), (HttpRig, 4)])
def test_the_server(make: type[SqliteRig], examples: int, tmp_path: Path) -> None:
    check(lambda: make(Path(mkdtemp(dir=tmp_path))), examples=examples, of=Changing)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "examples"), [(PostgresRig, 4), (NodesRig, 4)])
def test_postgresql(
    make: type[PostgresRig], examples: int, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakes, "_LOOK", 0.02)  # a node that stops waits for its listener
    check(lambda: make(postgres.emptied()), examples=examples, of=Changing)


@pytest.mark.parametrize(("of", "examples"), [(Changing, 5), (Following, 8)])
@pytest.mark.usefixtures("settable_scripts")
def test_redis(of: type[Changing], examples: int, redis_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks after others; the rest of what changes while it waits is refused."""
    check(lambda: RedisRig(redis_server, f"p{uuid.uuid4().hex}", monkeypatch), examples=examples, of=of)


def test_the_engine_with_many_that_follow() -> None:
    check(EngineRig, examples=8, of=Following)
