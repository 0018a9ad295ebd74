"""Tests of periodic tasks: what is kept of them, and what a trigger schedules."""

from datetime import UTC, datetime
from typing import Any, Protocol

import pytest

from leasekit.backend import PeriodicDirectory
from leasekit.errors import Refused
from leasekit.periodic import PeriodicTask
from leasekit.testing.contract.base import SchedulerBase, Service


class PeriodicService(Service, PeriodicDirectory, Protocol):
    """A connection to a service that also keeps periodic tasks."""


class Periodic(SchedulerBase):
    """The promises of `PeriodicDirectory`, for a service that is one."""

    @pytest.fixture
    def periodic(self, backend: Any) -> PeriodicService:
        if not isinstance(backend, PeriodicDirectory):
            pytest.skip(f"{type(backend).__name__} is no PeriodicDirectory")
        return backend  # type: ignore[return-value]  # it is a `Service` too

    async def test_periodic_tasks_are_listed_by_name_until_they_are_deleted(
        self, periodic: PeriodicService, kind: str
    ) -> None:
        first, second = f"{kind}-a", f"{kind}.b ?"
        task = PeriodicTask(kind=kind, payload={"n": 1}, cron="0 7 * * *", tz="Europe/Berlin", max_attempts=3)
        for name in (second, first):
            info = await periodic.set_periodic(name, task)
            assert (info.name, info.task, len(info.next_at)) == (name, task, 1)
        assert [one.name for one in await periodic.list_periodic() if one.task.kind == kind] == [first, second]
        for _ in range(2):
            await periodic.delete_periodic(first)
        assert await periodic.get_periodic(first) is None
        assert [one.name for one in await periodic.list_periodic() if one.task.kind == kind] == [second]

    async def test_a_periodic_task_that_is_paused_fires_next_once_it_is_resumed(
        self, periodic: PeriodicService, kind: str
    ) -> None:
        await periodic.set_periodic(kind, PeriodicTask(kind=kind, cron="0 7 1 1 *"))
        for is_paused in (True, False):
            info = await periodic.pause_periodic(kind, is_paused=is_paused)
            assert (info.is_paused, bool(info.next_at)) == (is_paused, not is_paused)

    async def test_what_code_declares_again_changes_nothing_that_was_changed_by_hand(
        self, periodic: PeriodicService, kind: str
    ) -> None:
        declared, by_hand, newer = (PeriodicTask(kind=kind, cron=f"{minute} 7 1 1 *") for minute in range(3))
        await periodic.set_periodic(kind, declared, is_declared=True)
        await periodic.set_periodic(kind, by_hand)
        await periodic.pause_periodic(kind)
        for task, kept in ((declared, by_hand), (newer, newer), (declared, newer)):
            info = await periodic.set_periodic(kind, task, is_declared=True)
            assert (info.task, info.is_paused) == (kept, True)
            assert info.declared_at is not None

    async def test_a_trigger_that_is_repeated_makes_one_task(self, periodic: PeriodicService, kind: str) -> None:
        await periodic.set_periodic(kind, PeriodicTask(kind=kind, payload=[1], cron="0 7 1 1 *"))
        at = datetime(2026, 1, 1, tzinfo=UTC)
        answers = [await periodic.trigger_periodic(kind, at=at) for _ in range(2)]
        assert [answer.created for answer in answers] == [True, False]
        assert (await self.info(periodic, answers[0].id)).payload == [1]

    async def test_a_periodic_task_that_is_not_there_is_neither_paused_nor_triggered(
        self, periodic: PeriodicService, kind: str
    ) -> None:
        with pytest.raises(Refused, match="no periodic task"):
            await periodic.pause_periodic(kind)
        with pytest.raises(Refused, match="no periodic task"):
            await periodic.trigger_periodic(kind, at=datetime(2026, 1, 1, tzinfo=UTC))
