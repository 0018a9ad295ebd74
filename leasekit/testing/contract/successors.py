"""Tests of tasks after other tasks. Kinds differ, so that a service that spreads kinds does so here."""

from datetime import timedelta
from typing import Any

import pytest

from leasekit.errors import Refused
from leasekit.task import FixedDelays, NewTask, Outcome, Status
from leasekit.testing.contract.base import SchedulerBase, Service, ids_of


class Successors(SchedulerBase):
    """The promises of `NewTask.after`, where a service has dependencies."""

    async def scheduled_after(self, backend: Service, kind: str, name: str, *others: str, **options: Any) -> str:
        """Schedule a task that waits for others; return its id, which is its kind too. Skip where none can wait."""
        if not backend.capabilities.dependencies:
            pytest.skip("the service has no dependencies")
        after = [f"{kind}-{other}" for other in others]
        await backend.schedule([NewTask(kind=f"{kind}-{name}", id=f"{kind}-{name}", after=after, **options)])
        return f"{kind}-{name}"

    async def run(self, backend: Service, task_id: str, outcome: Outcome = "success") -> None:
        """Claim the task, whose kind is its id, and settle it with `outcome`."""
        assert (await self.settle(backend, await self.claim_one(backend, task_id), outcome)).verdict == "settled"

    async def test_a_task_after_others_is_refused_where_there_are_no_dependencies(
        self, backend: Service, kind: str
    ) -> None:
        if backend.capabilities.dependencies:
            await self.scheduled_after(backend, kind, "b", "a")
            return
        with pytest.raises(Refused) as refusal:
            await backend.schedule([NewTask(kind=kind), NewTask(kind=kind, after=["a-1"])])
        (error,) = refusal.value.errors
        assert (error["item"], error["field"]) == (1, "after")
        assert error["detail"]
        assert await self.nothing_left(backend, kind)

    @pytest.mark.parametrize("order", ["before", "after", "together", "ended"])
    async def test_a_task_runs_after_another_in_whatever_order_they_come(
        self, backend: Service, other: Service, kind: str, order: str
    ) -> None:
        if not backend.capabilities.dependencies:
            pytest.skip("the service has no dependencies")
        first, second = NewTask(kind=f"{kind}-a", id="a" + kind), NewTask(kind=kind, id="b" + kind, after=["a" + kind])
        orders = {"before": [[first], [second]], "after": [[second], [first]], "together": [[second, first]]}
        for batch in orders.get(order, [[first]]):
            assert all(answer.created for answer in await backend.schedule(batch))
        if order != "ended":
            assert await self.nothing_left(backend, kind)
        await self.run(other, first.kind)
        if order == "ended":
            await backend.schedule([second])
        assert (await self.claim_one(backend, kind)).id == second.id

    async def test_a_task_that_waits_for_another_says_so_and_is_counted(self, backend: Service, kind: str) -> None:
        waiting = await self.scheduled_after(backend, kind, "b", "a", "c")
        info = await self.info(backend, waiting)
        assert info.status is Status.NEW
        assert f"{kind}-a" in (info.reason or "")
        assert ids_of((await backend.list_tasks(kind=waiting, status=Status.NEW)).tasks) == [waiting]
        assert (await backend.stats()).kinds[waiting] == {"new": 1}

    async def test_a_chain_runs_in_its_order(self, backend: Service, kind: str) -> None:
        third = await self.scheduled_after(backend, kind, "c", "b")
        second = await self.scheduled_after(backend, kind, "b", "a")
        first = await self.scheduled_after(backend, kind, "a")
        for task_id, later in ((first, [second, third]), (second, [third]), (third, [])):
            for waiting in later:
                assert await self.nothing_left(backend, waiting)
            await self.run(backend, task_id)
        assert (await self.info(backend, third)).reason is None

    async def test_of_a_diamond_the_last_waits_for_both(self, backend: Service, kind: str) -> None:
        last = await self.scheduled_after(backend, kind, "d", "b", "c")
        left = await self.scheduled_after(backend, kind, "b", "a")
        right = await self.scheduled_after(backend, kind, "c", "a")
        await self.run(backend, await self.scheduled_after(backend, kind, "a"))
        await self.run(backend, right)
        assert await self.nothing_left(backend, last)
        await self.run(backend, left)
        await self.run(backend, last)

    @pytest.mark.parametrize("outcome", ["fatal", "dead", "cancelled"])
    async def test_what_was_to_run_after_a_failure_is_dropped_and_so_is_what_comes_after_that(
        self, backend: Service, kind: str, outcome: str
    ) -> None:
        third = await self.scheduled_after(backend, kind, "c", "b")
        second = await self.scheduled_after(backend, kind, "b", "a")
        first = await self.scheduled_after(backend, kind, "a", max_attempts=1)
        if outcome == "cancelled":
            await backend.cancel([first])
        else:
            await self.run(backend, first, "fatal" if outcome == "fatal" else "retry")
        late = await self.scheduled_after(backend, kind, "late", "a")
        for task_id, before in ((second, first), (third, second), (late, first)):
            info = await self.info(backend, task_id)
            assert info.status is Status.DROPPED
            assert before in (info.reason or "")
            assert await self.nothing_left(backend, task_id)

    async def test_a_retry_of_what_others_wait_for_is_no_end(self, backend: Service, kind: str) -> None:
        second = await self.scheduled_after(backend, kind, "b", "a")
        first = await self.scheduled_after(backend, kind, "a", retry=FixedDelays(waits=[0]))
        await self.run(backend, first, "retry")
        assert await self.nothing_left(backend, second)
        assert (await self.info(backend, second)).status is Status.NEW
        await self.run(backend, first)
        await self.run(backend, second)

    async def test_a_task_after_others_is_scheduled_once(self, backend: Service, kind: str) -> None:
        if not backend.capabilities.dependencies:
            pytest.skip("the service has no dependencies")
        second = NewTask(kind=kind, id=kind, after=[f"{kind}-a"])
        answers = [(await backend.schedule([second]))[0] for _ in range(2)]
        assert [(answer.created, answer.conflict) for answer in answers] == [(True, False), (False, False)]
        await self.run(backend, await self.scheduled_after(backend, kind, "a"))
        await self.run(backend, kind)
        (again,) = await backend.schedule([second])
        assert (again.created, again.status) == (False, Status.SUCCESS)
        assert await self.nothing_left(backend, kind)

    async def test_a_task_that_waits_for_another_is_cancelled_at_once(self, backend: Service, kind: str) -> None:
        second = await self.scheduled_after(backend, kind, "b", "a")
        (verdict,) = await backend.cancel([second])
        assert verdict.verdict == "cancelled"
        await self.run(backend, await self.scheduled_after(backend, kind, "a"))
        assert await self.nothing_left(backend, second)
        info = await self.info(backend, second)
        assert (info.status, info.reason) == (Status.CANCELLED, None)

    async def test_a_task_after_others_is_not_ready_before_its_time_either(self, backend: Service, kind: str) -> None:
        second = await self.scheduled_after(backend, kind, "b", "a", at=self.now() + timedelta(hours=1))
        await self.run(backend, await self.scheduled_after(backend, kind, "a"))
        assert await self.nothing_left(backend, second)
        assert (await self.info(backend, second)).status is Status.NEW
