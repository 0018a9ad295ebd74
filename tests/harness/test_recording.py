"""A recorded backend is the backend, and its log is what a checker wants of a worker and a scheduler."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from harness.checker import Rules, check
from harness.history import (
    Acknowledged,
    Asked,
    CancelAnswered,
    CancelAsked,
    Event,
    Granted,
    Log,
    Refused,
    Renewed,
    SettleAnswered,
    SettleAsked,
    read,
)
from harness.recording import Recorded
from leasekit.backend import Capabilities, Scheduler
from leasekit.errors import Unavailable
from leasekit.task import Beat, NewTask, Settlement, Task, Verdict
from leasekit.testing import faults
from leasekit.testing.clock import FakeClock
from leasekit.testing.contract import DeadLettersContract
from leasekit.testing.faults import Faulty
from leasekit.testing.memory import MemoryBackend, MemoryService

pytestmark = pytest.mark.anyio


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


@pytest.fixture
def log(path: Path, clock: FakeClock) -> Iterator[Log]:
    with Log(path, who="w1", now=clock) as log:
        yield log


@pytest.fixture
def faulty(memory: MemoryBackend, clock: FakeClock) -> Faulty:
    return Faulty(memory, sleep=clock.sleep)


@pytest.fixture
def recorded(faulty: Faulty, log: Log, clock: FakeClock) -> Recorded:
    return Recorded(faulty, log, now=clock)


class TestRecorded(DeadLettersContract):
    @pytest.fixture(autouse=True)
    def _turn(self, clock: FakeClock) -> None:
        self.clock = clock

    @pytest.fixture
    async def backend(self, memory: MemoryBackend, log: Log) -> Recorded:
        return Recorded(memory, log, now=self.clock)

    @pytest.fixture
    async def other(self, service: MemoryService, log: Log) -> Recorded:
        return Recorded(MemoryBackend(service, worker="w2"), log, now=self.clock)

    async def sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def now(self) -> datetime:
        return self.clock.later(0)


async def claimed(recorded: Recorded, count: int = 1) -> list[Task]:
    await recorded.schedule([NewTask(kind="k", id=f"t{number}") for number in range(count)])
    return (await recorded.claim(["k"], limit=count, wait=0, claim_id="c1")).tasks


def beat(task: Task) -> Beat:
    return Beat(id=task.id, token=task.token)


def result(task: Task, value: object = None) -> Settlement:
    return Settlement(id=task.id, token=task.token, outcome="success", result=value)


def content(path: Path) -> str:
    return path.read_text()


def logged(path: Path, *kinds: type[Event]) -> list[Event]:
    return [event for event in read(path) if isinstance(event, kinds)]


async def test_a_whole_life_is_a_history_without_a_fault(recorded: Recorded, path: Path) -> None:
    for task in await claimed(recorded, 2):
        await recorded.beat([beat(task)])
        await recorded.settle([result(task)])
    kinds = [type(event).__name__ for event in read(path)]
    assert kinds == [
        *["Asked", "Asked", "Acknowledged", "Acknowledged", "Granted", "Granted"],
        *["Renewed", "SettleAsked", "SettleAnswered"] * 2,
    ]
    assert check(read(path), Rules(least_settled=2)) == []


async def test_a_repeated_claim_counts_from_its_first_request(
    recorded: Recorded, faulty: Faulty, clock: FakeClock, path: Path
) -> None:
    await recorded.schedule([NewTask(kind="k", id="t")])
    faulty.script("claim", faults.lose_answer)
    with pytest.raises(Unavailable):
        await recorded.claim(["k"], limit=1, wait=0, claim_id="c")
    clock.advance(7)
    await recorded.claim(["k"], limit=1, wait=0, claim_id="c")
    (granted,) = logged(path, Granted)
    assert isinstance(granted, Granted)
    assert (granted.at - granted.asked_at, granted.fence, granted.claim) == (7, 1, "c")


async def test_of_a_token_only_the_beginning_is_written(recorded: Recorded, path: Path) -> None:
    (task,) = await claimed(recorded)
    await recorded.beat([beat(task)])
    await recorded.settle([result(task, "a secret")])
    text = content(path)
    assert task.token not in text
    assert task.token[:6] in text
    assert "secret" not in text


async def test_a_beat_counts_from_when_it_left(
    recorded: Recorded, faulty: Faulty, clock: FakeClock, path: Path
) -> None:
    (task,) = await claimed(recorded)

    async def advance(seconds: float) -> None:
        clock.advance(seconds)

    faulty.sleep = advance
    faulty.script("beat", faults.delay_answer(5))
    await recorded.beat([beat(task)])
    (renewed,) = logged(path, Renewed)
    assert isinstance(renewed, Renewed)
    assert (renewed.at - renewed.asked_at, renewed.ttl) == (5, 300)


async def test_of_an_answer_that_lacks_a_verdict_its_reader_believes_none(
    recorded: Recorded, memory: MemoryBackend, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await claimed(recorded, 2)
    beaten, settled = memory.beat, memory.settle

    async def all_but_the_last_beat(beats: Sequence[Beat]) -> list[Verdict]:
        return (await beaten(beats))[:-1]

    async def all_but_the_last_settlement(settlements: Sequence[Settlement]) -> list[Verdict]:
        return (await settled(settlements))[:-1]

    monkeypatch.setattr(memory, "beat", all_but_the_last_beat)
    monkeypatch.setattr(memory, "settle", all_but_the_last_settlement)
    assert len(await recorded.beat([beat(first), beat(second)])) == 1
    assert len(await recorded.settle([result(first), result(second)])) == 1
    assert logged(path, Renewed, SettleAnswered) == []


async def test_a_refused_beat_says_why(recorded: Recorded, faulty: Faulty, path: Path) -> None:
    (task,) = await claimed(recorded)
    faulty.script("beat", faults.steal)
    await recorded.beat([beat(task)])
    (refused,) = logged(path, Refused)
    assert isinstance(refused, Refused)
    assert (refused.fence, refused.reason) == (1, "taken")


async def test_a_settlement_is_asked_each_time_and_its_repeat_has_the_same_digest(
    recorded: Recorded, faulty: Faulty, path: Path
) -> None:
    (task,) = await claimed(recorded)
    faulty.script("settle", faults.lose_answer)
    with pytest.raises(Unavailable):
        await recorded.settle([result(task, 1)])
    await recorded.settle([result(task, 1)])
    await recorded.settle([result(task, 2)])
    asked = [event.digest for event in logged(path, SettleAsked) if isinstance(event, SettleAsked)]
    answered = [event.verdict for event in logged(path, SettleAnswered) if isinstance(event, SettleAnswered)]
    assert asked[0] == asked[1] != asked[2]
    assert answered == ["settled", "gone"]


async def test_a_lease_of_which_nobody_here_saw_the_grant_is_left_out(
    recorded: Recorded, memory: MemoryBackend, path: Path
) -> None:
    await memory.schedule([NewTask(kind="k")])
    (task,) = (await memory.claim(["k"], limit=1, wait=0, claim_id="elsewhere")).tasks
    await recorded.beat([beat(task)])
    await recorded.settle([result(task)])
    assert content(path) == ""


async def test_schedules_and_cancels_are_asked_and_answered(
    recorded: Recorded, faulty: Faulty, clock: FakeClock, path: Path
) -> None:
    due = datetime.fromtimestamp(datetime.now(UTC).timestamp() + 100, UTC)
    faulty.script("schedule", faults.lose_answer)
    with pytest.raises(Unavailable):
        await recorded.schedule([NewTask(kind="k", id="t", at=due, max_crashes=1)])
    await recorded.schedule([NewTask(kind="k", id="t", at=due, max_crashes=1)])
    await recorded.cancel(["t"])
    kinds = [type(event) for event in read(path)]
    assert kinds == [Asked, Asked, Acknowledged, CancelAsked, CancelAnswered]
    first = read(path)[0]
    assert isinstance(first, Asked)
    assert first.max_crashes == 1
    assert first.due_at is not None
    assert 90 < first.due_at - clock.now() <= 101  # by the clock of the log


def test_it_is_a_scheduler_where_the_wrapped_one_is(recorded: Recorded, log: Log) -> None:
    bare: Any = object.__new__(type("Bare", (), {"capabilities": Capabilities()}))
    assert isinstance(recorded, Scheduler)
    assert not isinstance(Recorded(bare, log), Scheduler)
