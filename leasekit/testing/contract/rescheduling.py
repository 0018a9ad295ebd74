"""Tests of reschedules: another due time or priority for a task that waits."""

from typing import Any, Protocol

import pytest

from leasekit.backend import Rescheduler
from leasekit.errors import Refused
from leasekit.task import NewTask, Status
from leasekit.testing.contract.base import SchedulerBase, Service


class ReschedulingService(Service, Rescheduler, Protocol):
    """A connection to a service that can also change tasks that wait."""


class Rescheduling(SchedulerBase):
    """The promises of `Rescheduler`, for a service that is one."""

    @pytest.fixture
    def rescheduling(self, backend: Any) -> ReschedulingService:
        if not isinstance(backend, Rescheduler):
            pytest.skip(f"{type(backend).__name__} is no Rescheduler")
        return backend  # type: ignore[return-value]  # it is a `Service` too

    async def test_a_task_of_later_can_be_due_now_and_the_most_urgent(
        self, rescheduling: ReschedulingService, kind: str
    ) -> None:
        await rescheduling.schedule([NewTask(kind=kind, id=f"{kind}-a"), NewTask(kind=kind, id=kind, delay=3600)])
        answer = await rescheduling.reschedule(kind, delay=0, priority=0)
        info = await self.info(rescheduling, kind)
        assert (answer.id, answer.status, answer.priority, answer.at) == (kind, Status.NEW, 0, info.at)
        assert (await self.claim_one(rescheduling, kind)).id == kind

    async def test_a_task_that_is_due_can_be_put_off(self, rescheduling: ReschedulingService, kind: str) -> None:
        await rescheduling.schedule([NewTask(kind=kind, id=kind)])
        first = await rescheduling.reschedule(kind, delay=3600, request_id=f"{kind}-r")
        assert await rescheduling.reschedule(kind, delay=3600, request_id=f"{kind}-r") == first
        assert await self.nothing_left(rescheduling, kind)

    async def test_what_runs_has_ended_or_is_unknown_is_refused(
        self, rescheduling: ReschedulingService, kind: str
    ) -> None:
        task = await self.held(rescheduling, kind)
        with pytest.raises(Refused, match="only a task that waits"):
            await rescheduling.reschedule(task.id, delay=0)
        await self.settle(rescheduling, task)
        with pytest.raises(Refused, match="has ended"):
            await rescheduling.reschedule(task.id, delay=0)
        with pytest.raises(Refused, match="there is no task"):
            await rescheduling.reschedule(f"{kind}-nobody", delay=0)
        with pytest.raises(Refused, match="give one"):
            await rescheduling.reschedule(task.id)
