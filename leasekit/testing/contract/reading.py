"""Tests of reads: single tasks, listings and counts."""

import math
from contextlib import suppress
from datetime import datetime, timedelta

from leasekit.errors import Refused
from leasekit.task import NewTask, Status, TaskInfo
from leasekit.testing.contract.base import SchedulerBase, Service, ids_of


class Reading(SchedulerBase):
    """The promises of `Scheduler.get`, `list_tasks` and `stats`."""

    async def test_of_an_unknown_task_there_is_nothing(self, backend: Service, kind: str) -> None:
        assert await backend.get(f"{kind}-nobody") is None

    async def test_a_name_that_cannot_be_is_refused_or_unknown(self, backend: Service, kind: str) -> None:
        """A read by it fails in no other way: any other error would be repeated as an outage."""
        for name in (f"{kind}-\0", f"{kind}-\ud800"):
            with suppress(Refused):
                assert await backend.get(name) is None
        with suppress(Refused):
            assert (await backend.list_tasks(kind=f"{kind}-\0")).tasks == []

    async def test_the_end_of_a_lease_is_shown_while_there_is_one(self, backend: Service, kind: str) -> None:
        await backend.schedule([NewTask(kind=kind, id=f"{kind}-1", claim_timeout=100)])
        assert (await self.info(backend, f"{kind}-1")).lease_until is None
        task = await self.claim_one(backend, kind)
        info = await self.info(backend, task.id)
        assert info.lease_until is None or info.lease_until - info.at >= timedelta(seconds=99)
        await self.settle(backend, task)
        assert (await self.info(backend, task.id)).lease_until is None

    async def test_a_cancel_is_shown_while_the_holder_is_asked_to_stop(self, backend: Service, kind: str) -> None:
        task = await self.held(backend, kind)
        assert not (await self.info(backend, task.id)).cancel_requested
        await backend.cancel([task.id])
        assert (await self.info(backend, task.id)).cancel_requested
        await self.settle(backend, task)
        assert not (await self.info(backend, task.id)).cancel_requested

    async def test_a_task_tells_when_its_run_was_claimed_began_and_ended(self, backend: Service, kind: str) -> None:
        """The times are in order, and every view of the task has the same; None where the service does not tell."""
        await backend.schedule([NewTask(kind=kind, id=kind)])
        info = await self.info(backend, kind)
        assert (info.claimed_at, info.started_at, info.heartbeat_at, info.ended_at) == (None, None, None, None)
        task = await self.claim_one(backend, kind)
        for options in ({"started": False}, {"progress": 1}, {}):
            await self.sleep(0.01)
            await self.beat(backend, task, **options)
        info = await self.info(backend, kind)
        assert info.ended_at is None
        (listed,) = (await backend.list_tasks(kind=kind)).tasks
        assert _times(listed) == _times(info)
        await self.sleep(0.01)
        await self.settle(backend, task)
        ended = await self.info(backend, kind)
        assert _times(ended)[:5] == _times(info)[:5]
        told = [time for time in _times(ended) if time is not None]
        assert len(told) == 6 or not self.tells_times
        assert told == sorted(told)
        assert all(time.utcoffset() == timedelta(0) for time in told)
        for run in ended.history:
            assert (run.claimed_at, run.started_at, run.heartbeat_at) == _times(ended)[1:3] + _times(ended)[4:5]
            assert ended.ended_at in (None, run.at)

    async def test_a_listing_goes_on_where_it_ended(self, backend: Service, kind: str) -> None:
        ids = [f"{kind}-{n}" for n in range(5)]
        for task_id in ids:
            await backend.schedule([NewTask(kind=kind, id=task_id)])
        listed: list[str] = []
        cursor: str | None = None
        for _ in range(math.ceil(len(ids) / 2)):
            page = await backend.list_tasks(kind=kind, cursor=cursor, limit=2)
            listed += ids_of(page.tasks)
            cursor = page.cursor
        assert listed == ids
        assert cursor is None

    async def test_the_newest_come_first_on_request_and_go_on_where_the_page_ended(
        self, backend: Service, kind: str
    ) -> None:
        for n in range(3):
            await backend.schedule([NewTask(kind=kind, id=f"{kind}-{n}")])
        first = await backend.list_tasks(kind=kind, newest=True, limit=2)
        second = await backend.list_tasks(kind=kind, newest=True, cursor=first.cursor, limit=2)
        assert ids_of([*first.tasks, *second.tasks]) == [f"{kind}-2", f"{kind}-1", f"{kind}-0"]
        assert (first.cursor is None, second.cursor) == (False, None)

    async def test_a_listing_matches_all_that_is_given(self, backend: Service, kind: str) -> None:
        await backend.schedule([NewTask(kind=kind, id=f"{kind}-{c}", collection=c) for c in ("a", "b")])
        blue = await backend.list_tasks(kind=kind, collection="b")
        new = await backend.list_tasks(kind=kind, status=Status.NEW)
        none = await backend.list_tasks(kind=kind, collection="b", status=Status.DEAD)
        assert ids_of(blue.tasks) == [f"{kind}-b"]
        assert ids_of(new.tasks) == [f"{kind}-a", f"{kind}-b"]
        assert none.tasks == []

    async def test_a_listing_finds_what_a_worker_holds(self, backend: Service, kind: str) -> None:
        task = await self.held(backend, kind)
        await backend.schedule([NewTask(kind=kind)])
        worker = (await self.info(backend, task.id)).worker
        assert worker
        assert ids_of((await backend.list_tasks(kind=kind, worker=worker)).tasks) == [task.id]

    async def test_stats_count_by_kind_and_status(self, backend: Service, kind: str) -> None:
        await backend.schedule([NewTask(kind=kind) for _ in range(3)])
        await self.settle(backend, await self.claim_one(backend, kind))
        counts = (await backend.stats()).kinds[kind]
        assert {status: count for status, count in counts.items() if count} == {"new": 2, "success": 1}


def _times(task: TaskInfo) -> tuple[datetime | None, ...]:
    times = (task.scheduled_at, task.claimed_at, task.started_at, task.progress_at)
    return (*times, task.heartbeat_at, task.ended_at)
