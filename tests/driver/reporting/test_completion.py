"""Waiting for tasks to end: when they are looked at, and what is said of those that do not end."""

import asyncio
import itertools
from collections.abc import Sequence
from datetime import UTC, datetime

import pytest

from leasekit._driver.reporting.completion import all_ended
from leasekit.errors import LeasekitError
from leasekit.task import Ended, Status, TaskInfo

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


class World:
    """A clock that jumps to whenever somebody waits for, and tasks that end at their times."""

    def __init__(self, **ends_at: float) -> None:
        self.time = 1000.0
        self.looks: list[tuple[float, str]] = []
        self.ends_at = ends_at

    def now(self) -> float:
        return self.time

    async def wait(self, wake: asyncio.Event, until: float) -> None:
        self.time = max(self.time, until)

    async def look(self, task_id: str) -> TaskInfo | None:
        self.looks.append((self.time - 1000, task_id))
        return await self.info(task_id)

    async def info(self, task_id: str) -> TaskInfo | None:
        if task_id not in self.ends_at:
            return None
        status = Status.SUCCESS if self.time - 1000 >= self.ends_at[task_id] else Status.PROCESSING
        return TaskInfo(
            id=task_id,
            kind="k",
            status=status,
            priority=2,
            attempt=1,
            crashes=0,
            fence=1,
            at=datetime.now(UTC),
        )

    async def ended(self, *task_ids: str, timeout: float | None = None) -> list[str]:
        return [info.id for info in await all_ended(self.look, task_ids, clock=self, timeout=timeout)]


async def test_all_are_given_in_the_order_in_which_they_were_named() -> None:
    world = World(a=5, b=0, c=2)
    assert await world.ended("a", "b", "c", "a") == ["a", "b", "c", "a"]
    assert 5 <= world.time - 1000 < 6.1


async def test_none_is_nothing_to_wait_for() -> None:
    assert await World().ended(timeout=0) == []


async def test_looks_become_rarer_up_to_one_a_second() -> None:
    world = World(a=6)
    await world.ended("a")
    at = [when for when, _ in world.looks]
    between = [later - earlier for earlier, later in itertools.pairwise(at)]
    assert between == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1, 1, 1, 1, 1])


async def test_many_tasks_are_looked_at_one_at_a_time() -> None:
    world = World(**{f"t{number}": 10.0 for number in range(100)})
    await world.ended(*(f"t{number}" for number in range(100)))
    assert len(world.looks) < 100 + 15 + 100  # once at first, while waiting for one, once at the end


async def test_a_service_that_tells_of_ends_is_asked_for_all_at_once_and_not_polled() -> None:
    world = World(a=50, b=30, c=30)
    asked: list[tuple[list[str], float]] = []

    async def ask(task_ids: Sequence[str], seconds: float) -> Ended:
        asked.append((list(task_ids), seconds))
        over = [at for name in task_ids if (at := world.ends_at[name] + 1000) <= world.time + seconds]
        world.time = max(world.time, min(over, default=world.time + seconds))
        infos = [await world.info(name) for name in task_ids]
        return Ended(tasks=[info for info in infos if info is not None and info.status.ended])

    infos = await all_ended(world.look, ["a", "b", "c"], clock=world, timeout=55, ask=ask)
    assert [info.id for info in infos] == ["a", "b", "c"]
    assert asked == [(["a", "b", "c"], 20), (["a", "b", "c"], 20), (["a"], 20)]
    assert world.looks == []


async def test_more_tasks_than_one_question_may_name_are_asked_for_in_turn() -> None:
    world = World(**{f"t{number}": 0.0 for number in range(2500)})
    asked: list[int] = []

    async def ask(task_ids: Sequence[str], _: float) -> Ended:
        asked.append(len(task_ids))
        infos = [await world.info(name) for name in task_ids]
        return Ended(tasks=[info for info in infos if info is not None])

    names = [f"t{number}" for number in range(2500)]
    assert [info.id for info in await all_ended(world.look, names, clock=world, timeout=0, ask=ask)] == names
    assert asked == [1000, 1000, 500]


async def test_a_service_that_tells_of_no_end_at_once_is_asked_more_and_more_rarely_until_the_time_is_over() -> None:
    world = World(a=99)
    asked: list[float] = []

    async def ask(_: Sequence[str], __: float) -> Ended:
        asked.append(world.time - 1000)
        return Ended()

    with pytest.raises(TimeoutError, match=r"have not ended: a$"):
        await all_ended(world.look, ["a"], clock=world, timeout=5.5, ask=ask)
    between = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert between == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1, 1, 1, 0.95])


async def test_a_service_that_knows_no_such_task_ends_the_wait() -> None:
    async def ask(_: Sequence[str], __: float) -> Ended:
        return Ended(unknown=["a"])

    world = World()
    with pytest.raises(LeasekitError, match="there is no task 'a'"):
        await all_ended(world.look, ["a"], clock=world, timeout=None, ask=ask)


async def test_the_timeout_names_those_that_have_not_ended() -> None:
    world = World(a=99, b=1, c=99)
    with pytest.raises(TimeoutError, match=r"after 3 s these tasks have not ended: a, c$"):
        await world.ended("a", "b", "c", timeout=3)
    assert world.time == 1003


async def test_of_many_only_some_are_named() -> None:
    world = World(**{f"t{number}": 9.0 for number in range(12)})
    with pytest.raises(TimeoutError, match=r"t9 and 2 more$"):
        await world.ended(*(f"t{number}" for number in range(12)), timeout=0)


async def test_what_ends_just_in_time_is_no_timeout() -> None:
    assert await World(a=3, b=3).ended("a", "b", timeout=3) == ["a", "b"]


async def test_an_unknown_id_is_named_at_once() -> None:
    world = World(a=99)
    with pytest.raises(LeasekitError, match="no task 'typo'"):
        await world.ended("a", "typo")
    assert world.time == 1000


@pytest.mark.parametrize("timeout", [-1, float("nan")])
async def test_a_timeout_that_is_none_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        await World(a=1).ended("a", timeout=timeout)
