"""Tests of fair shares: due tasks are granted one of each key in turn."""

from typing import Any

import pytest

from leasekit.backend import KindDirectory
from leasekit.errors import Refused
from leasekit.task import FixedDelays, KindSettings, NewTask, Outcome
from leasekit.testing.contract.base import SchedulerBase, Service


class Shares(SchedulerBase):
    """The promises of `NewTask.key`, for a service that has keys; the others refuse it."""

    @pytest.fixture
    def sharing(self, backend: Any) -> Service:
        if not backend.capabilities.keys:
            pytest.skip("the service has no keys")
        return backend  # type: ignore[no-any-return]

    async def put_all(self, service: Service, kind: str, *ids: str, **options: Any) -> None:
        """Schedule tasks whose key is the first letter of the id; `-` is none."""
        key = {task_id: None if task_id.startswith("-") else task_id[0] for task_id in ids}
        await service.schedule([NewTask(kind=kind, id=f"{kind}{i}", key=key[i], **options) for i in ids])

    async def granted_names(self, service: Service, kind: str, limit: int = 100) -> list[str]:
        return [task.id.removeprefix(kind) for task in (await self.claim(service, kind, limit=limit, wait=0)).tasks]

    async def test_a_task_with_a_key_is_refused_where_there_are_none(self, backend: Service, kind: str) -> None:
        if backend.capabilities.keys:
            pytest.skip("the service has keys")
        with pytest.raises(Refused, match="key") as refused:
            await backend.schedule([NewTask(kind=kind), NewTask(kind=kind, key="a")])
        assert [(error["item"], error["field"]) for error in refused.value.errors] == [(1, "key")]

    @pytest.mark.parametrize("limit", [1, 2, 100])
    async def test_tasks_are_granted_one_of_each_key_in_turn(self, sharing: Service, kind: str, limit: int) -> None:
        await self.put_all(sharing, kind, "a1", "a2", "a3", "a4", "b1", "b2", "-1", "-2", "c1")
        granted: list[str] = []
        while more := await self.granted_names(sharing, kind, limit):
            granted += more
        rounds = [sorted(granted[:4]), sorted(granted[4:7]), granted[7:]]
        assert rounds == [["-1", "a1", "b1", "c1"], ["-2", "a2", "b2"], ["a3", "a4"]]

    async def test_a_newcomer_does_not_wait_for_the_backlog_of_another(self, sharing: Service, kind: str) -> None:
        await self.put_all(sharing, kind, *(f"a{n:02}" for n in range(50)))
        await self.granted_names(sharing, kind, 20)
        await self.put_all(sharing, kind, "b1")
        assert "b1" in await self.granted_names(sharing, kind, 2)

    async def test_a_task_tells_its_key(self, sharing: Service, kind: str) -> None:
        await self.put_all(sharing, kind, "a1", "-1")
        assert (await self.info(sharing, f"{kind}a1")).key == "a"
        assert (await self.info(sharing, f"{kind}-1")).key is None
        (task,) = (await self.claim(sharing, kind, limit=1, wait=0)).tasks[:1]
        await self.settle(sharing, task)
        assert (await self.info(sharing, f"{kind}a1")).key == "a"

    async def test_priorities_stay_strict(self, sharing: Service, kind: str) -> None:
        await self.put_all(sharing, kind, "a1", "a2", "b1")
        await self.put_all(sharing, kind, "a3", "a4", priority=1)
        assert await self.granted_names(sharing, kind, 2) == ["a3", "a4"]

    async def test_a_retry_waits_in_the_queue_of_its_key(self, sharing: Service, kind: str) -> None:
        await self.put_all(sharing, kind, "a1", "a2", "b1")
        task = await self.claim_one(sharing, kind)
        await self.settle(sharing, task, "release")
        info = await self.info(sharing, task.id)
        assert (info.key, info.attempt) == (task.id.removeprefix(kind)[0], 0)
        assert sorted(await self.granted_names(sharing, kind)) == ["a1", "a2", "b1"]

    @pytest.mark.parametrize("outcome", ["retry", "release", "crash"])
    async def test_a_task_that_runs_again_is_behind_those_of_its_key_that_were_due_before(
        self, sharing: Service, kind: str, outcome: Outcome
    ) -> None:
        await self.put_all(sharing, kind, "a1", "a2", "a3", retry=FixedDelays(waits=[0]))
        started: list[str] = []
        for _ in range(4):
            task = await self.claim_one(sharing, kind)
            started.append(task.id.removeprefix(kind))
            await self.sleep(0.01)  # or both might be due at one instant
            await self.settle(sharing, task, "success" if len(started) > 1 else outcome)
        assert started == ["a1", "a2", "a3", "a1"]

    async def test_a_task_that_waits_for_its_retry_holds_up_none_of_its_key(self, sharing: Service, kind: str) -> None:
        await self.put_all(sharing, kind, "a1", "a2", retry=FixedDelays(waits=[3600]))
        await self.settle(sharing, await self.claim_one(sharing, kind), "retry")
        assert await self.granted_names(sharing, kind) == ["a2"]

    async def test_a_task_after_another_of_its_key_waits_for_its_retries_too(self, sharing: Service, kind: str) -> None:
        if not sharing.capabilities.dependencies:
            pytest.skip("the service has no tasks after others")
        await self.put_all(sharing, kind, "a1", retry=FixedDelays(waits=[0]))
        await self.put_all(sharing, kind, "a2", after=[f"{kind}a1"])
        started: list[str] = []
        for outcome in ("retry", "release", "crash", "success", "success"):
            task = await self.claim_one(sharing, kind)
            started.append(task.id.removeprefix(kind))
            await self.settle(sharing, task, outcome)
        assert started == ["a1", "a1", "a1", "a1", "a2"]

    async def test_a_task_with_a_key_can_be_cancelled(self, sharing: Service, kind: str) -> None:
        await self.put_all(sharing, kind, "a1", "a2", "b1")
        (verdict,) = await sharing.cancel([f"{kind}a1"])
        assert verdict.verdict == "cancelled"
        assert sorted(await self.granted_names(sharing, kind)) == ["a2", "b1"]

    async def test_a_future_task_of_a_key_delays_nothing(self, sharing: Service, kind: str) -> None:
        await self.put_all(sharing, kind, "a1", delay=3600.0)
        await self.put_all(sharing, kind, "a2", "b1")
        assert sorted(await self.granted_names(sharing, kind)) == ["a2", "b1"]
        assert (await self.info(sharing, f"{kind}a1")).at > self.now()

    async def test_a_claim_that_waits_gets_a_task_with_a_key(self, sharing: Service, kind: str) -> None:
        async with self.waiting(sharing, kind) as answers:
            await self.put_all(sharing, kind, "a1")
        assert [task.id for task in answers[0].tasks] == [f"{kind}a1"]

    async def test_the_collection_is_the_key_of_a_fair_kind(self, sharing: Service, kind: str) -> None:
        if not isinstance(sharing, KindDirectory):
            pytest.skip("the service has no settings of kinds")
        await sharing.set_kind(kind, KindSettings(fair=True))
        tasks = [NewTask(kind=kind, id=f"{kind}{n}", collection="a" if n < 3 else "b") for n in range(4)]
        await sharing.schedule(tasks)
        assert (await self.info(sharing, f"{kind}0")).key == "a"
        assert sorted(await self.granted_names(sharing, kind, 2)) == ["0", "3"]
