"""Tests of the limits and shares of kinds: how many tasks are granted, and from when on."""

import asyncio
from typing import Any

import pytest

from leasekit.backend import KindDirectory
from leasekit.errors import Refused
from leasekit.task import KindSettings, NewTask, Status
from leasekit.testing.contract.base import SchedulerBase, Service
from leasekit.testing.contract.kinds import KindService


class Quotas(SchedulerBase):
    """The promises of `KindDirectory` about kinds as a whole, for a service that is one."""

    @pytest.fixture
    def limiting(self, backend: Any) -> KindService:
        if not isinstance(backend, KindDirectory):
            pytest.skip(f"{type(backend).__name__} is no KindDirectory")
        return backend  # type: ignore[return-value]  # it is a `Service` too

    async def put_many(self, service: Service, kind: str, count: int) -> None:
        await service.schedule([NewTask(kind=kind, id=f"{kind}-{number}") for number in range(count)])

    async def granted_of(self, service: Service, *kinds: str, limit: int = 10) -> list[str]:
        first, *also = kinds
        return [task.id for task in (await self.claim(service, first, also=also, limit=limit, wait=0)).tasks]

    async def test_no_more_tasks_are_leased_than_the_concurrency_through_all_connections(
        self, limiting: KindService, other: Service, kind: str
    ) -> None:
        await limiting.set_kind(kind, KindSettings(concurrency=2))
        await self.put_many(other, kind, 4)
        task = await self.claim_one(limiting, kind)
        assert await self.granted_of(other, kind) == [f"{kind}-1"]
        for service in (limiting, other):
            assert await self.granted_of(service, kind) == []
        info = await self.info(limiting, f"{kind}-2")
        assert (info.status, info.attempt) == (Status.NEW, 0)
        await self.settle(limiting, task)
        assert await self.granted_of(other, kind) == [f"{kind}-2"]

    async def test_a_claim_that_waits_is_granted_a_task_once_a_place_is_free(
        self, limiting: KindService, other: Service, kind: str
    ) -> None:
        await limiting.set_kind(kind, KindSettings(concurrency=1))
        await self.put_many(limiting, kind, 2)
        task = await self.claim_one(limiting, kind)
        waiting = asyncio.create_task(self.claim(other, kind))
        await self.sleep(0.1)
        assert not waiting.done()
        await self.settle(limiting, task)
        assert [task.id for task in (await waiting).tasks] == [f"{kind}-1"]

    async def test_no_more_tasks_of_a_key_are_leased_than_the_key_concurrency_through_all_connections(
        self, limiting: KindService, other: Service, kind: str
    ) -> None:
        await limiting.set_kind(kind, KindSettings(key_concurrency=1))
        tasks = [NewTask(kind=kind, id=f"{kind}-{name}", key=name[0]) for name in ("a1", "a2", "b1")]
        await other.schedule([*tasks, NewTask(kind=kind, id=f"{kind}-1"), NewTask(kind=kind, id=f"{kind}-2")])
        held = (await self.claim(limiting, kind, limit=10, wait=0)).tasks
        assert sorted(task.id for task in held) == sorted(f"{kind}-{name}" for name in ("1", "2", "a1", "b1"))
        for service in (limiting, other):
            assert await self.granted_of(service, kind) == []
        info = await self.info(limiting, f"{kind}-a2")
        assert (info.status, info.attempt) == (Status.NEW, 0)
        async with self.waiting(other, kind) as answers:
            await self.sleep(0.1)
            await self.settle(limiting, next(task for task in held if task.id == f"{kind}-a1"))
        assert [task.id for answer in answers for task in answer.tasks] == [f"{kind}-a2"]

    async def test_the_next_task_of_an_ordered_key_waits_for_the_end_of_one_that_runs_again(
        self, limiting: KindService, other: Service, kind: str
    ) -> None:
        await limiting.set_kind(kind, KindSettings(ordered=True))
        tasks = [NewTask(kind=kind, id=f"{kind}-{name}", key=name[0]) for name in ("a1", "a2", "b1", "b2")]
        await other.schedule(tasks)
        first, second = await self.claim_one(limiting, kind), await self.claim_one(limiting, kind)
        assert [first.id, second.id] == [f"{kind}-a1", f"{kind}-b1"]
        await self.settle(limiting, first, "retry", retry_after=1.5)
        await self.settle(limiting, second)
        assert await self.granted_of(other, kind) == [f"{kind}-b2"]
        async with self.waiting(other, kind) as answers:
            await self.sleep(1.6)
        assert [task.id for answer in answers for task in answer.tasks] == [f"{kind}-a1"]
        assert await self.granted_of(limiting, kind) == []

    async def test_no_more_tasks_start_than_the_burst_until_a_token_comes(
        self, limiting: KindService, other: Service, kind: str
    ) -> None:
        await limiting.set_kind(kind, KindSettings(rate=0.5, burst=2))
        await self.put_many(limiting, kind, 4)
        assert await self.granted_of(limiting, kind) == [f"{kind}-0", f"{kind}-1"]
        assert await self.granted_of(other, kind) == []
        async with self.waiting(other, kind, limit=2) as answers:
            await self.sleep(2.1)
        assert [task.id for answer in answers for task in answer.tasks] == [f"{kind}-2"]

    async def test_kinds_share_claims_by_their_weights(self, limiting: KindService, kind: str) -> None:
        heavy, light = f"{kind}-heavy", f"{kind}-light"
        await limiting.set_kind(heavy, KindSettings(weight=3))
        for name in (heavy, light):
            await self.put_many(limiting, name, 20)
        granted = [task_id for _ in range(8) for task_id in await self.granted_of(limiting, heavy, light, limit=1)]
        assert sum(task_id.startswith(heavy) for task_id in granted) == 6

    @pytest.mark.parametrize(
        "settings",
        [
            {"concurrency": 0},
            {"key_concurrency": 0},
            {"rate": 0.0},
            {"rate": 1.0, "burst": 0},
            {"key_rate": 0.0},
            {"key_rate": 1.0, "key_burst": 0},
            {"weight": 0.0},
            {"aging": 0.5},
        ],
        ids=str,
    )
    async def test_limits_out_of_bounds_are_refused(
        self, limiting: KindService, kind: str, settings: dict[str, Any]
    ) -> None:
        with pytest.raises(Refused) as refused:
            await limiting.set_kind(kind, KindSettings(**settings))
        assert [error["field"] for error in refused.value.errors] == [[*settings][-1]]
