"""Random histories of tasks that require labels of their worker, or prefer some for a while."""

from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from leasekit.server.store.postgres import wakes
from leasekit.task import NewTask
from tests.model.rigs import EngineRig, HttpRig, MemoryRig, NodesRig, PostgresRig, Rig, SqliteRig
from tests.model.test_model import TTLS, Asked, Histories, Model, check
from tests.postgres_server import PostgresServer

pytestmark = pytest.mark.soak

LABELS: tuple[dict[str, str], ...] = ({}, {"gpu": "t4"}, {"zone": "eu"}, {"gpu": "t4", "zone": "eu"}, {"zone": "us"})


@dataclass
class Labelled(Model):
    """A task that requires or prefers labels."""

    requires: dict[str, str] = field(default_factory=dict[str, str])
    prefers: dict[str, str] = field(default_factory=dict[str, str])
    prefer_for: float = 0.0

    def is_open_to(self, labels: dict[str, str], now: float) -> bool:
        """Whether a worker with these labels gets the task by now, if it is due."""
        is_preferred = self.prefers.items() <= labels.items() or self.due_at + self.prefer_for <= now
        return self.requires.items() <= labels.items() and is_preferred


class Labelling(Histories):
    """Histories of tasks with labels, at workers with some of these, and with others."""

    made_of = Labelled
    tasks: dict[str, Any]
    close = open = open_all = schedule = schedule_once = step = None  # type: ignore[assignment]

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        self.labels: dict[str, str] = {}  # of the worker that claims next

    @rule(
        requires=st.sampled_from(LABELS[:4]),
        prefers=st.sampled_from([*LABELS[1:], {"zone": "us", "gpu": "h100"}]),
        prefer_for=st.sampled_from([0.1, 4.0, 7.5, 30.0]),
        later=st.sampled_from([0.0, 0.0, 8.0]),
        priority=st.sampled_from([2, 2, 0]),
        ttls=TTLS,
        lost=st.booleans(),
    )
    def schedule_with_labels(
        self, requires: dict[str, str], prefers: dict[str, str], prefer_for: float, lost: bool, **options: Any
    ) -> None:
        """A label that is required is not preferred too; some tasks prefer nothing."""
        task_id = next(self.ids)
        prefers = {name: value for name, value in prefers.items() if name not in requires}
        labels: dict[str, Any] = {"requires": requires}
        labels |= {"prefers": prefers, "prefer_for": prefer_for} if prefers else {}
        self.ask("schedule", [self.task(task_id, **options, **labels)], lost=lost)
        self.added(task_id, **options, **labels)

    @rule(labels=st.sampled_from(LABELS), limit=st.integers(1, 4), lost=st.booleans())
    def claim_with_labels(self, labels: dict[str, str], limit: int, lost: bool) -> None:
        self.labels = labels
        self.look_around()
        ready = [(m.priority, m.due_at, m.number, name) for name, m in self.tasks.items() if self.is_ready(m)]
        claim_id = f"c{len(self.claims)}"
        answer = self.ask("claim", ["k"], limit=limit, wait=0, claim_id=claim_id, labels=labels, lost=lost)
        assert [task.id for task in answer.tasks] == [name for *_, name in sorted(ready)][:limit], "A11, S11"
        self.claims.append(Asked(claim_id, answer.tasks, answer.waited, self.rig.instant))
        for task in answer.tasks:
            self.granted(task)
        self.labels = {}

    def is_ready(self, model: Any) -> bool:
        return super().is_ready(model) and model.is_open_to(self.labels, self.rig.now)

    def task(self, task_id: str, *, requires: Any = None, prefers: Any = None, **options: Any) -> NewTask:
        return super().task(task_id, requires=requires or {}, prefers=prefers or {}, **options)


def test_memory() -> None:
    check(MemoryRig, examples=20, of=Labelling)


def test_the_engine() -> None:
    check(EngineRig, examples=20, of=Labelling)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "examples"), [(SqliteRig, 6), (HttpRig, 4)])
def test_the_server(make: type[SqliteRig], examples: int, tmp_path: Path) -> None:
    check(lambda: make(Path(mkdtemp(dir=tmp_path))), examples=examples, of=Labelling)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "examples"), [(PostgresRig, 4), (NodesRig, 4)])
def test_postgresql(
    make: type[PostgresRig], examples: int, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakes, "_LOOK", 0.02)  # a node that stops waits for its listener
    check(lambda: make(postgres.emptied()), examples=examples, of=Labelling)
