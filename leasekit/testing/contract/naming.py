"""Tests of services that make and claim the task of a name (`named`, `once`) in one call."""

import uuid
from datetime import UTC, datetime, timedelta

import pytest

from leasekit.backend import NameSource
from leasekit.task import Claimed, NewTask, Status
from leasekit.testing.contract.base import SchedulerBase, Service


class Naming(SchedulerBase):
    """The promises of `NameSource`. Skipped for services that do not implement it."""

    async def claim_name(self, backend: Service, kind: str, *, claim_id: str | None = None) -> Claimed:
        if not isinstance(backend, NameSource):
            pytest.skip("the service makes and claims names in two calls")
        name = f"once:{kind}"
        return await backend.claim_name(NewTask(kind=name, id=name), claim_id=claim_id or uuid.uuid4().hex)

    async def test_a_name_is_made_and_claimed_in_one_call(self, backend: Service, other: Service, kind: str) -> None:
        claimed = await self.claim_name(backend, kind)
        (task,) = claimed.tasks
        assert (task.id, task.kind, task.attempt, claimed.status) == (task.kind, f"once:{kind}", 1, Status.NEW)
        later = await self.claim_name(other, kind)
        assert (later.tasks, later.status) == ([], Status.CLAIMED)
        assert (await self.beat(backend, task)).verdict == "renewed"
        assert (await self.settle(backend, task, "release")).verdict == "settled"
        again = await self.claim_name(other, kind)
        assert again.tasks[0].fence > task.fence
        assert again.status == Status.ENQUEUED
        assert (await self.settle(other, again.tasks[0])).verdict == "settled"
        ended = await self.claim_name(backend, kind)
        assert (ended.tasks, ended.status) == ([], Status.SUCCESS)
        assert (await self.info(backend, task.id)).status is Status.SUCCESS

    async def test_a_repeated_claim_of_a_name_gets_the_same_lease(self, backend: Service, kind: str) -> None:
        claim_id = uuid.uuid4().hex
        first = await self.claim_name(backend, kind, claim_id=claim_id)
        assert len(first.tasks) == 1
        assert (await self.claim_name(backend, kind, claim_id=claim_id)).tasks == first.tasks

    async def test_an_ended_claim_of_a_name_is_granted_nothing(self, backend: Service, kind: str) -> None:
        claim_id = uuid.uuid4().hex
        if backend.capabilities.remembers_claims:
            await backend.claim([f"once:{kind}"], limit=0, wait=0, claim_id=claim_id)
            assert (await self.claim_name(backend, kind, claim_id=claim_id)).tasks == []
            assert len((await self.claim_name(backend, kind)).tasks) == 1

    async def test_a_name_that_is_not_due_is_not_granted(self, backend: Service, kind: str) -> None:
        name, at = f"once:{kind}", datetime.now(UTC) + timedelta(hours=1)
        await backend.schedule([NewTask(kind=name, id=name, at=at)])
        claimed = await self.claim_name(backend, kind)
        assert (claimed.tasks, claimed.status) == ([], Status.NEW)

    async def test_a_name_is_found_where_all_tasks_are_found(self, backend: Service, kind: str) -> None:
        (task,) = (await self.claim_name(backend, kind)).tasks
        assert (await self.info(backend, task.id)).fence == task.fence
        assert [info.id for info in (await backend.list_tasks(kind=task.kind)).tasks] == [task.id]
        assert (await backend.stats()).kinds[task.kind] == {Status.CLAIMED: 1}
        (verdict,) = await backend.cancel([task.id])
        assert verdict.verdict == "cancel_requested" or not backend.capabilities.cancel_requests
