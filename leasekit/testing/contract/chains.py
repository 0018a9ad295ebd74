"""Tests of chains: what a task came from, and the cancel of all that came from one."""

from typing import Any, Protocol

import pytest

from leasekit.backend import ChainDirectory
from leasekit.task import NewTask, Settlement, Status
from leasekit.testing.contract.base import SchedulerBase, Service, ids_of


class ChainedService(Service, ChainDirectory, Protocol):
    """A connection to a service that also has chains."""


class Chains(SchedulerBase):
    """The promises of `ChainDirectory`, for a service that is one."""

    @pytest.fixture
    def chained(self, backend: Any) -> ChainedService:
        if not isinstance(backend, ChainDirectory):
            pytest.skip(f"{type(backend).__name__} is no ChainDirectory")
        return backend  # type: ignore[return-value]  # it is a `Service` too

    async def settle_then(self, service: Service, kind: str, *then: NewTask) -> None:
        task = await self.claim_one(service, kind)
        settlement = Settlement(id=task.id, token=task.token, outcome="success", then=list(then))
        assert (await service.settle([settlement]))[0].verdict == "settled"

    async def test_a_task_comes_from_a_run_or_from_what_it_runs_after(self, chained: ChainedService, kind: str) -> None:
        first, then, after, inside = (f"{kind}-{name}" for name in ("first", "then", "after", "inside"))
        await chained.schedule([NewTask(kind=first, id=first)])
        await chained.schedule([NewTask(kind=after, id=after, after=[first])])
        await self.settle_then(chained, first, NewTask(kind=then, id=then))
        await chained.schedule([NewTask(kind=inside, id=inside, parent=then)])
        infos = [await self.info(chained, name) for name in (first, after, then, inside)]
        assert [info.parent for info in infos] == [None, first, first, then]
        assert {info.root for info in infos} == {first}
        assert ids_of((await chained.list_tasks(root=first)).tasks) == [first, after, then, inside]  # type: ignore[call-arg]

    async def test_a_cancelled_chain_gets_no_more_tasks(self, chained: ChainedService, kind: str) -> None:
        first, waits, then = (f"{kind}-{name}" for name in ("first", "waits", "then"))
        await chained.schedule([NewTask(kind=first, id=first), NewTask(kind=waits, id=waits, parent=first)])
        task = await self.claim_one(chained, first)
        answer = await chained.cancel_chain(waits)
        assert answer.root == first
        assert {verdict.id: verdict.verdict for verdict in answer.tasks} == {
            first: "cancel_requested",
            waits: "cancelled",
        }
        settlement = Settlement(id=first, token=task.token, outcome="success", then=[NewTask(kind=then, id=then)])
        assert (await chained.settle([settlement]))[0].verdict == "settled"
        late = f"{kind}-late"
        await chained.schedule([NewTask(kind=late, id=late, after=[then])])
        for task_id in (then, late):
            assert (await self.info(chained, task_id)).status is Status.CANCELLED
            assert await self.nothing_left(chained, task_id)
