"""The embedded door: the same contract as any other, and the same refusals as the wire."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from leasekit.backend import Backend, Scheduler
from leasekit.errors import ConfigError, Refused, Unavailable
from leasekit.registry import open_backend
from leasekit.server.embedded import EmbeddedBackend
from leasekit.server.engine import Engine
from leasekit.server.shared import SharedBackend, connect
from leasekit.server.store.urls import open_store
from leasekit.task import Beat, NewTask, Settlement, Stats, Status, Task
from leasekit.testing.contract import DeadLettersContract
from tests.postgres_server import PostgresServer
from tests.waiting import until

pytestmark = pytest.mark.anyio


class Shared:
    """One engine behind several doors, with a clock that the tests turn."""

    def __init__(self, url: str) -> None:
        self.now = datetime.now(UTC).timestamp()
        self.engine = Engine(open_store(url), clock=lambda: self.now, boot=lambda: self.now, random=Random(3))

    def door(self, worker: str) -> EmbeddedBackend:
        return EmbeddedBackend(lambda: _Lent(self.engine), worker=worker)


class _Lent:
    """The engine belongs to the fixture: a door neither opens nor closes it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __aenter__(self) -> Engine:
        return self._engine

    async def __aexit__(self, *_: object) -> None:
        pass


class Contract(DeadLettersContract):
    """One engine, two workers, and its own time."""

    @pytest.fixture
    async def shared(self, tmp_path: Path) -> AsyncIterator[Shared]:
        shared = Shared(self.url(tmp_path))
        async with shared.engine:
            self._shared = shared
            yield shared

    def url(self, tmp_path: Path) -> str:
        raise NotImplementedError

    @pytest.fixture
    async def backend(self, shared: Shared) -> Backend:
        return shared.door("one")

    @pytest.fixture
    async def other(self, shared: Shared) -> Backend:
        return shared.door("two")

    async def sleep(self, seconds: float) -> None:
        # A claim that waits does so in real time; what is due is judged by the engine's.
        await asyncio.sleep(min(seconds, 0.05))
        self._shared.now += seconds
        await self._shared.engine.tick()

    async def interrupt(self, *tasks: Task) -> None:
        """As after a time in which the server did not run."""
        self._shared.engine.clock._is_after_gap = True  # type: ignore[attr-defined]

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._shared.now, UTC)


class TestOnSqlite(Contract):
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/tasks.db"


@pytest.mark.slow
class TestInMemory(Contract):
    def url(self, tmp_path: Path) -> str:
        return "memory:"


@pytest.mark.slow
class TestOnPostgres(Contract):
    @pytest.fixture(autouse=True)
    def database(self, postgres: PostgresServer) -> None:
        self._url = postgres.emptied()

    def url(self, tmp_path: Path) -> str:
        return self._url

    async def interrupt(self, *tasks: Task) -> None:
        """As after a time in which no node was alive."""
        self._shared.engine.clock._has_begun = False  # type: ignore[attr-defined]
        self._shared.now += 11


# The door itself


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[SharedBackend]:
    one = connect(f"sqlite:///{tmp_path}/tasks.db", worker="w")
    yield one
    await one.aclose()


async def test_the_scheme_is_registered(tmp_path: Path) -> None:
    backend = open_backend(f"sqlite:///{tmp_path}/tasks.db", worker="w")
    assert isinstance(backend, SharedBackend)
    assert isinstance(backend, Scheduler)
    await backend.aclose()


def test_connecting_opens_nothing_but_refuses_a_bad_url(tmp_path: Path) -> None:
    connect(f"sqlite:///{tmp_path}/tasks.db", worker="w")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError):
        connect(f"sqlite:///{tmp_path}/missing/tasks.db", worker="w")


async def test_the_first_calls_open_one_engine(door: SharedBackend) -> None:
    answers = await asyncio.gather(*(door.schedule([NewTask(kind="k")]) for _ in range(5)))
    assert all(answer[0].created for answer in answers)


async def test_a_closed_door_stays_closed(door: SharedBackend) -> None:
    await door.aclose()
    with pytest.raises(Unavailable, match="closed"):
        await door.stats()


class _Slow:
    """An engine that is opened and closed when the test says so."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.go_on = asyncio.Event()

    async def __aenter__(self) -> Engine:
        await self._step("open")
        return cast("Engine", self)

    async def __aexit__(self, *_: object) -> None:
        await self._step("close")

    async def _step(self, name: str) -> None:
        self.steps.append(name)
        await self.go_on.wait()
        self.steps.append(f"{name} done")


@pytest.mark.parametrize("step", ["open", "close"])
async def test_an_engine_is_opened_and_closed_to_the_end_though_the_caller_is_cancelled(step: str) -> None:
    slow = _Slow()
    door = EmbeddedBackend(lambda: slow, worker="w")
    if step == "close":
        slow.go_on.set()
        await door.open()
        slow.go_on.clear()
    calls = [asyncio.create_task(door.open() if step == "open" else door.release()) for _ in range(2)]
    await until(lambda: slow.steps[-1:] == [step])
    for call in calls:
        call.cancel()
        call.cancel()
    await asyncio.wait(calls)
    slow.go_on.set()
    await door.open()  # finds that engine open, or opens one once that is closed
    opened = ["open", "open done"]
    assert slow.steps == (opened if step == "open" else [*opened, "close", "close done", *opened])


async def test_tasks_outlive_the_door(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/tasks.db"
    for created in (True, False):
        door = connect(url, worker="w")
        assert (await door.schedule([NewTask(kind="k", id="a")]))[0].created is created
        await door.aclose()


async def test_values_leave_as_plain_values(door: SharedBackend) -> None:
    await door.schedule([NewTask(kind="k", id="a", payload={"n": [1, None]})])
    (task,) = (await door.claim(["k"], limit=1, wait=0, claim_id="c")).tasks
    assert (task.payload, task.progress) == ({"n": [1, None]}, None)
    await door.settle([Settlement(id="a", token=task.token, outcome="success", result=(1, 2), progress=[3])])
    info = await door.get("a")
    assert info is not None
    assert (info.payload, info.result, info.error, info.progress) == ({"n": [1, None]}, [1, 2], None, [3])
    assert info.history[0].result == [1, 2]
    assert (await door.list_tasks(kind="k")).tasks[0].result == [1, 2]


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("task", "field"),
    [
        (NewTask(kind=""), "kind"),
        (NewTask(kind="a/b"), "kind"),
        (NewTask(kind="k\n"), "kind"),
        (NewTask(kind="k", id="x" * 129), "id"),
        (NewTask(kind="k", priority=5), "priority"),
        (NewTask(kind="k", priority=True), "priority"),
        (NewTask(kind="k", at=datetime(2026, 1, 1)), "at"),  # noqa: DTZ001
        (NewTask(kind="k", max_attempts=0), "max_attempts"),
        (NewTask(kind="k", claim_timeout=1.0), "claim_timeout"),
        (NewTask(kind="k", heartbeat_timeout=float("nan")), "heartbeat_timeout"),
        (NewTask(kind="k", payload="x" * 2**20), "payload"),
        (NewTask(kind="k", payload=object()), "payload"),
        (NewTask(kind="k", payload="\ud800"), "payload"),
        (NewTask(kind="k", payload=LOOP), "payload"),
    ],
)
async def test_what_the_wire_would_refuse_is_refused_whole(door: SharedBackend, task: NewTask, field: str) -> None:
    with pytest.raises(Refused) as refused:
        await door.schedule([NewTask(kind="k"), task])
    (error,) = refused.value.errors
    assert (error["item"], error["field"]) == (1, field)
    assert error["detail"]
    assert await door.stats() == Stats(kinds={})


async def test_too_many_at_once_are_refused(door: SharedBackend) -> None:
    with pytest.raises(Refused):
        await door.schedule([NewTask(kind="k")] * 1001)
    with pytest.raises(Refused):
        await door.beat([Beat(id="a", token="t")] * 1001)


@pytest.mark.parametrize(
    "asked",
    [
        {"kinds": []},
        {"kinds": ["a/b"]},
        {"limit": -1},
        {"limit": 1001},
        {"wait": -1},
        {"claim_id": ""},
        {"claim_id": "x/y"},
    ],
)
async def test_a_claim_that_the_wire_would_refuse_is_refused(door: SharedBackend, asked: Any) -> None:
    asked = {"kinds": ["k"], "limit": 1, "wait": 0.0, "claim_id": uuid.uuid4().hex} | asked
    with pytest.raises(Refused):
        await door.claim(asked.pop("kinds"), **asked)


async def test_results_and_beats_that_the_wire_would_refuse_are_refused(door: SharedBackend) -> None:
    with pytest.raises(Refused):
        await door.beat([Beat(id="a", token="t", progress="x" * 70_000)])
    with pytest.raises(Refused):
        await door.settle([Settlement(id="a", token="t", outcome="retry", then=[NewTask(kind="k")])])
    with pytest.raises(Refused):
        await door.settle([Settlement(id="a", token="t", outcome="done")])  # type: ignore[arg-type]
    with pytest.raises(Refused):
        await door.cancel(["a/b"])
    with pytest.raises(Refused):
        await door.list_tasks(limit=0)


async def test_of_an_unknown_task_there_is_nothing(door: SharedBackend) -> None:
    assert await door.get("nobody") is None
    assert (await door.list_tasks(status=Status.DEAD)).tasks == []
