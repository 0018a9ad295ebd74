"""Tests of limits: how often and for how long a task runs at most."""

from datetime import timedelta
from typing import Any, Literal

import pytest

from leasekit.task import Exponential, FixedDelays, Outcome, Status, Task
from leasekit.testing.contract.base import SchedulerBase, Service, is_gone


class Limits(SchedulerBase):
    """The promises on attempts, crashes and run time, and on tasks that exceed a limit."""

    async def test_a_retry_waits_by_its_policy(self, backend: Service, kind: str) -> None:
        task = await self.held(backend, kind, retry=FixedDelays(waits=[0, 3600]))
        await self.settle(backend, task, "retry")
        await self.settle(backend, await self.claim_one(backend, kind), "retry")
        assert await self.nothing_left(backend, kind)

    async def test_a_release_counts_as_no_attempt(self, backend: Service, kind: str) -> None:
        await self.settle(backend, await self.held(backend, kind), "release")
        assert (await self.claim_one(backend, kind)).attempt == 1

    @pytest.mark.parametrize("outcome", ["retry", "crash"])
    async def test_failures_and_crashes_count_as_attempts(self, backend: Service, kind: str, outcome: Outcome) -> None:
        task = await self.held(backend, kind, retry=FixedDelays(waits=[0]))
        await self.settle(backend, task, outcome)
        assert (await self.claim_one(backend, kind)).attempt == 2

    async def test_max_attempts_bounds_retries(self, backend: Service, kind: str) -> None:
        task = await self.held(backend, kind, max_attempts=2, max_crashes=5, retry=FixedDelays(waits=[0]))
        for outcome in ("retry", "crash", "retry"):
            assert (await self.info(backend, task.id)).status is not Status.DEAD
            await self.settle(backend, task, outcome)
            if outcome != "retry" or task.attempt == 1:
                task = await self.claim_one(backend, kind)
        assert (await self.info(backend, task.id)).status is Status.DEAD
        assert await self.nothing_left(backend, kind)

    async def test_without_max_attempts_25_attempts_may_fail(self, backend: Service, kind: str) -> None:
        task = await self.failed_24_times(backend, kind)
        await self.settle(backend, task, "retry")
        info = await self.info(backend, task.id)
        assert info.status is Status.DEAD
        assert "25 attempts ended in retry: max_attempts is 25" in (info.reason or "")

    async def test_max_attempts_none_is_no_limit(self, backend: Service, kind: str) -> None:
        await self.settle(backend, await self.failed_24_times(backend, kind, max_attempts=None), "retry")
        assert (await self.claim_one(backend, kind)).attempt == 26

    async def failed_24_times(self, backend: Service, kind: str, **options: Any) -> Task:
        """Schedule a task, and return it in its 25th attempt."""
        task = await self.held(backend, kind, retry=FixedDelays(waits=[0]), **options)
        while task.attempt < 25:
            await self.settle(backend, task, "retry")
            task = await self.claim_one(backend, kind)
        return task

    @pytest.mark.parametrize("way", ["crash", "expiry"])
    async def test_max_crashes_bounds_holders_that_vanish(
        self, backend: Service, kind: str, way: Literal["crash", "expiry"]
    ) -> None:
        task = await self.briefly_held(backend, kind, max_crashes=0)
        if way == "crash":
            await self.settle(backend, task, "crash")
        else:
            await self.expire(task)
            assert await self.nothing_left(backend, kind)  # a claim expires leases, a read need not
        info = await self.info(backend, task.id)
        assert (info.status, info.crashes) == (Status.DEAD, 1)

    @pytest.mark.parametrize(("outcome", "limit"), [("retry", "max_attempts"), ("crash", "max_crashes")])
    async def test_a_dead_task_says_which_limit_it_reached(
        self, backend: Service, kind: str, outcome: Outcome, limit: str
    ) -> None:
        task = await self.held(backend, kind, max_attempts=1, max_crashes=0)
        assert (await self.info(backend, task.id)).reason is None
        await self.settle(backend, task, outcome, error={"type": "E"})
        info = await self.info(backend, task.id)
        assert info.status is Status.DEAD
        assert limit in (info.reason or "")
        assert info.error == {"type": "E"}

    async def test_crashes_do_not_lengthen_the_wait_for_a_retry(self, backend: Service, kind: str) -> None:
        first = await self.held(backend, kind, retry=FixedDelays(waits=[0, 3600]))
        await self.settle(backend, first, "crash")
        await self.settle(backend, await self.claim_one(backend, kind), "retry")
        assert (await self.claim_one(backend, kind)).attempt == 3

    async def test_a_task_survives_max_crashes_and_no_more(self, backend: Service, kind: str) -> None:
        task = await self.held(backend, kind, max_crashes=2)
        await self.settle(backend, task, "crash")
        await self.settle(backend, await self.claim_one(backend, kind), "crash")
        await self.settle(backend, await self.claim_one(backend, kind), "crash")
        assert await self.nothing_left(backend, kind)

    async def test_an_expiry_waits_as_an_attempt_if_the_task_says_so(self, backend: Service, kind: str) -> None:
        waits = FixedDelays(waits=[3600])
        task = await self.briefly_held(backend, kind, expiry="retry", max_crashes=0, max_attempts=2, retry=waits)
        await self.expire(task)
        assert await self.nothing_left(backend, kind)
        info = await self.info(backend, task.id)
        assert (info.status, info.crashes) == (Status.RETRIABLE_FAILURE, 0)
        assert info.at > self.now() + timedelta(seconds=1800)
        assert [run.outcome for run in info.history] == ["expired"]

    async def test_tasks_that_time_out_together_do_not_come_back_together(self, backend: Service, kind: str) -> None:
        waits = Exponential(first=1000.0, jitter=0.5)
        tasks = [await self.briefly_held(backend, kind, expiry="retry", retry=waits) for _ in range(3)]
        await self.expire(*tasks)
        assert await self.nothing_left(backend, kind)
        moments = {(await self.info(backend, task.id)).at for task in tasks}
        assert len(moments) == 3
        assert all(timedelta(seconds=400) < at - self.now() <= timedelta(seconds=1000) for at in moments)

    async def test_max_attempts_bounds_expiries_that_count_as_attempts(self, backend: Service, kind: str) -> None:
        waits = FixedDelays(waits=[0])
        task = await self.briefly_held(backend, kind, expiry="retry", max_crashes=0, max_attempts=2, retry=waits)
        await self.expire(task)
        await self.expire(await self.claim_one(backend, kind))
        assert await self.nothing_left(backend, kind)
        info = await self.info(backend, task.id)
        assert (info.status, info.crashes, len(info.history)) == (Status.DEAD, 0, 2)
        assert "2 attempts ended in retry or timed out: max_attempts is 2" in (info.reason or "")

    async def test_a_late_report_takes_the_place_of_an_expiry_that_counted_as_an_attempt(
        self, backend: Service, kind: str
    ) -> None:
        if not self.late_results:
            pytest.skip("the service takes no late results")
        waits = FixedDelays(waits=[3600])
        task = await self.briefly_held(backend, kind, expiry="retry", max_attempts=2, retry=waits)
        await self.expire(task)
        assert await self.nothing_left(backend, kind)
        assert (await self.settle(backend, task, "retry", retry_after=0.0)).verdict == "settled"
        again = await self.claim_one(backend, kind)  # one attempt has ended, not two
        await self.expire(again)
        assert await self.nothing_left(backend, kind)
        assert (await self.info(backend, task.id)).status is Status.DEAD

    async def test_a_crash_is_no_time_out(self, backend: Service, kind: str) -> None:
        task = await self.held(backend, kind, expiry="retry", max_attempts=1, retry=FixedDelays(waits=[3600]))
        await self.settle(backend, task, "crash")
        assert (await self.claim_one(backend, kind)).attempt == 2
        assert (await self.info(backend, task.id)).crashes == 1

    @pytest.mark.parametrize("limit", [1, 2])
    async def test_a_crash_of_an_overdue_run_counts_as_an_attempt_if_the_task_says_so(
        self, backend: Service, kind: str, limit: int
    ) -> None:
        limits: dict[str, Any] = {"max_runtime": 2.0, "max_attempts": limit, "retry": FixedDelays(waits=[3600])}
        task = await self.held(backend, kind, expiry="retry", **limits)
        await self.beat(backend, task)
        await self.sleep(2.1)
        assert is_gone(await self.beat(backend, task), "overdue")
        for _ in range(2):  # a repeat counts once
            assert (await self.settle(backend, task, "crash", retry_after=0.0)).verdict == "settled"
        assert await self.nothing_left(backend, kind)
        info = await self.info(backend, task.id)
        assert (info.status, info.crashes) == (Status.DEAD if limit == 1 else Status.RETRIABLE_FAILURE, 0)
        assert ("max_runtime was over" in (info.reason or "")) is (limit == 1)
        assert [run.outcome for run in info.history] == ["crash"]

    async def test_a_run_that_lasts_too_long_is_no_longer_renewed_and_says_so(
        self, backend: Service, kind: str
    ) -> None:
        limits: dict[str, float] = {"max_runtime": 2.0, "max_crashes": 0}
        task = await self.held(backend, kind, claim_timeout=5.0, heartbeat_timeout=5.0, **limits)
        assert (await self.beat(backend, task)).verdict == "renewed"
        await self.sleep(2.1)
        assert is_gone(await self.beat(backend, task), "overdue")
        assert await self.nothing_left(backend, kind)  # the granted lease is not taken back
        assert (await self.info(backend, task.id)).crashes == 0
        await self.expire(task)
        assert await self.nothing_left(backend, kind)  # a claim expires leases, a read need not
        info = await self.info(backend, task.id)
        assert (info.status, [run.outcome for run in info.history]) == (Status.DEAD, ["expired"])
        assert "max_runtime" in (info.reason or "")
        assert "max_runtime" in info.history[0].error["message"]

    async def test_the_holder_learns_of_the_limit_without_waiting_for_its_next_regular_heartbeat(
        self, backend: Service, kind: str
    ) -> None:
        task = await self.held(backend, kind, max_runtime=2.0)
        assert task.max_runtime == 2.0
        assert (await self.beat(backend, task, started=False)).remaining_runtime is None
        assert (await self.beat(backend, task)).remaining_runtime == 2.0
        await self.sleep(0.5)
        left = (await self.beat(backend, task)).remaining_runtime
        assert left is not None
        assert 0 < left <= 1.5
        await self.sleep(left + 0.01)
        assert is_gone(await self.beat(backend, task), "overdue")

    async def test_a_run_without_a_limit_is_told_of_none(self, backend: Service, kind: str) -> None:
        task = await self.held(backend, kind)
        assert (task.max_runtime, (await self.beat(backend, task)).remaining_runtime) == (None, None)

    async def test_the_holder_of_an_overdue_run_can_end_it_before_its_lease(self, backend: Service, kind: str) -> None:
        task = await self.held(backend, kind, max_runtime=2.0)
        await self.beat(backend, task)
        await self.sleep(2.1)
        assert is_gone(await self.beat(backend, task), "overdue")
        await self.settle(backend, task, "crash")
        assert (await self.claim_one(backend, kind)).attempt == 2
        assert (await self.info(backend, task.id)).crashes == 1
