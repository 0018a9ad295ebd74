"""Tests of start deadlines: a task that has not begun in time is dropped."""

import pytest

from leasekit.errors import Refused
from leasekit.task import NewTask, Status
from leasekit.testing.contract.base import SchedulerBase, Service


class StartDeadlines(SchedulerBase):
    """The promises of `NewTask.start_deadline`, for a service that has it; the others refuse it."""

    @pytest.fixture
    def dropping(self, backend: Service) -> Service:
        if not backend.capabilities.start_deadlines:
            pytest.skip("the service has no start deadlines")
        return backend

    async def test_a_start_deadline_is_refused_where_there_is_none(self, backend: Service, kind: str) -> None:
        if backend.capabilities.start_deadlines:
            pytest.skip("the service has start deadlines")
        with pytest.raises(Refused, match="start_deadline") as refused:
            await backend.schedule([NewTask(kind=kind), NewTask(kind=kind, start_deadline=60.0)])
        assert [(error["item"], error["field"]) for error in refused.value.errors] == [(1, "start_deadline")]

    async def test_a_task_that_has_not_begun_in_time_is_dropped(self, dropping: Service, kind: str) -> None:
        task_id = await self.put(dropping, NewTask(kind=kind, start_deadline=1.0))
        assert (await self.info(dropping, task_id)).start_by is not None
        await self.sleep(1.1)
        assert await self.nothing_left(dropping, kind)
        info = await self.info(dropping, task_id)
        assert (info.status, info.start_by, info.reason) == (
            Status.DROPPED,
            None,
            "it had not begun in time: start_deadline is 1 s",
        )

    async def test_a_task_that_has_begun_in_time_has_no_deadline_any_more(self, dropping: Service, kind: str) -> None:
        task = await self.held(dropping, kind, start_deadline=1.0)
        await self.beat(dropping, task)
        assert (await self.info(dropping, task.id)).start_by is None
        await self.settle(dropping, task, "release")
        await self.sleep(1.1)
        assert (await self.claim_one(dropping, kind)).id == task.id
