"""Tests of purges: what has ended goes, step by step, and nothing else."""

from collections import Counter
from contextlib import suppress
from typing import Any, Protocol

import pytest

from leasekit.backend import Purger
from leasekit.errors import Refused
from leasekit.task import NewTask, Purged, Status
from leasekit.testing.contract.base import SchedulerBase, Service, is_gone


class PurgingService(Service, Purger, Protocol):
    """A connection to a service that also purges."""


class Purging(SchedulerBase):
    """The promises of `Purger`, for a service that is one."""

    @pytest.fixture
    def purging(self, backend: Any) -> PurgingService:
        if not isinstance(backend, Purger):
            pytest.skip(f"{type(backend).__name__} is no Purger")
        return backend  # type: ignore[return-value]  # it is a `Service` too

    async def purge(self, service: Purger, kind: str, **options: Any) -> dict[str, int]:
        """Purge this kind, all steps, and return how many tasks of each status were removed."""
        counts, purged = Counter[str](), Purged(kinds={})
        while True:
            purged = await service.purge(kind=kind, cursor=purged.cursor, **options)
            assert purged.kinds.keys() <= {kind}
            counts.update(purged.kinds.get(kind, {}))
            if purged.cursor is None:
                return dict(counts)

    async def ended(self, service: Service, kind: str, *ids: str) -> None:
        await service.schedule([NewTask(kind=kind, id=task_id) for task_id in ids])
        await service.cancel(ids)

    async def test_a_purge_removes_what_has_ended_and_nothing_else(self, purging: PurgingService, kind: str) -> None:
        failed, done, running, retried = [await self.held(purging, kind) for _ in range(4)]
        await self.settle(purging, failed, "fatal")
        await self.settle(purging, done)
        await self.settle(purging, retried, "retry", retry_after=1000)
        await self.beat(purging, running)
        await purging.schedule([NewTask(kind=kind, id=f"{kind}-new"), NewTask(kind=f"{kind}-2", id=f"{kind}-other")])
        await purging.cancel([f"{kind}-other"])

        assert await self.purge(purging, kind) == {"fatal_failure": 1, "success": 1}

        assert [await purging.get(task.id) for task in (failed, done)] == [None, None]
        assert (await self.info(purging, f"{kind}-new")).status is Status.NEW
        assert (await self.info(purging, retried.id)).status is Status.RETRIABLE_FAILURE
        assert (await self.info(purging, f"{kind}-other")).status is Status.CANCELLED
        assert (await self.settle(purging, running)).verdict == "settled"
        assert is_gone(await self.beat(purging, done), "unknown")

    async def test_a_purge_chooses_by_status(self, purging: PurgingService, kind: str) -> None:
        await self.settle(purging, await self.held(purging, kind))
        await self.ended(purging, kind, kind)
        assert await self.purge(purging, kind, status=Status.SUCCESS) == {"success": 1}
        assert (await self.info(purging, kind)).status is Status.CANCELLED
        assert await self.purge(purging, kind, status=Status.DEAD) == {}

    async def test_the_age_of_a_task_counts_from_its_end(self, purging: PurgingService, kind: str) -> None:
        await purging.schedule([NewTask(kind=kind, id=kind)])
        await self.sleep(1.5)
        await self.ended(purging, kind, f"{kind}-old")
        await self.sleep(1.5)
        await purging.cancel([kind])
        assert await self.purge(purging, kind, older_than=1.4) == {"cancelled": 1}
        assert await purging.get(f"{kind}-old") is None
        assert (await self.info(purging, kind)).status is Status.CANCELLED

    async def test_a_dry_run_counts_and_removes_nothing(self, purging: PurgingService, kind: str) -> None:
        await self.ended(purging, kind, *(f"{kind}-{n}" for n in range(3)))
        for _ in range(2):
            assert await self.purge(purging, kind, dry_run=True) == {"cancelled": 3}
        assert await self.purge(purging, kind, dry_run=True, older_than=1000) == {}
        assert (await purging.stats()).kinds[kind]["cancelled"] == 3

    async def test_many_tasks_are_removed_in_many_steps(self, purging: PurgingService, kind: str) -> None:
        ids = [f"{kind}-{n}" for n in range(600)]
        await self.ended(purging, kind, *ids)
        for _ in range(2):
            await self.settle(purging, await self.held(purging, kind))
        await self.ended(purging, kind, *(f"{kind}-late-{n}" for n in range(50)))
        assert await self.purge(purging, kind, dry_run=True) == {"cancelled": 650, "success": 2}
        assert await self.purge(purging, kind, status=Status.CANCELLED) == {"cancelled": 650}
        assert await self.purge(purging, kind) == {"success": 2}
        assert not any((await purging.stats()).kinds.get(kind, {}).values())
        assert (await purging.list_tasks(kind=kind)).tasks == []

    async def test_an_id_and_a_dedupe_key_of_a_removed_task_are_free(self, purging: PurgingService, kind: str) -> None:
        task = NewTask(kind=kind, id=kind, dedupe_key="k")
        await purging.schedule([task])
        await purging.cancel([kind])
        assert await self.purge(purging, kind) == {"cancelled": 1}
        (again,) = await purging.schedule([task])
        assert (again.id, again.created) == (kind, True)
        assert (await self.claim_one(purging, kind)).id == kind

    async def test_a_purge_of_what_has_not_ended_is_refused(self, purging: PurgingService, kind: str) -> None:
        with pytest.raises(Refused, match="new has not ended"):
            await purging.purge(kind=kind, status=Status.NEW)
        with pytest.raises(Refused, match="cursor must be the cursor of an earlier step"):
            await purging.purge(kind=kind, cursor="//")

    async def test_a_vacuum_says_what_it_gave_back_or_why_it_cannot(self, purging: PurgingService) -> None:
        left = 1
        with suppress(Refused):  # there is no file
            vacuumed = await purging.vacuum()
            left = vacuumed.left
            assert vacuumed.freed >= 0
        assert left >= 0
