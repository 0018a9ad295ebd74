"""Tests of cancels: a waiting task does not run, and the holder of a running task is told."""

import anyio
import pytest

from leasekit.backend import CancelSource
from leasekit.task import Beat, FixedDelays, NewTask, Outcome, Status
from leasekit.testing.contract.base import WAIT, SchedulerBase, Service, is_gone


class Cancelling(SchedulerBase):
    """The promises of `Scheduler.cancel`."""

    async def test_a_waiting_task_is_cancelled_at_once(self, backend: Service, kind: str) -> None:
        await backend.schedule([NewTask(kind=kind, id=kind)])
        (verdict,) = await backend.cancel([kind])
        assert (verdict.id, verdict.verdict) == (kind, "cancelled")
        assert (await self.info(backend, kind)).status is Status.CANCELLED
        assert await self.nothing_left(backend, kind)

    async def test_a_repeated_cancel_is_answered_alike(self, backend: Service, kind: str) -> None:
        running = await self.held(backend, kind)
        await backend.schedule([NewTask(kind=kind, id=kind)])
        ids = [kind, running.id, f"{kind}-nobody"]
        first = await backend.cancel(ids)
        assert await backend.cancel(ids) == first
        assert [(verdict.id, verdict.verdict) for verdict in first[::2]] == [(ids[0], "cancelled"), (ids[2], "gone")]

    async def test_a_running_task_is_asked_to_wind_down(self, backend: Service, kind: str) -> None:
        """Every heartbeat says so, because answers may be lost, also before the start, and to no other task."""
        buffered, spared, task = [await self.held(backend, kind) for _ in range(3)]
        await self.beat(backend, task)
        ids = [buffered.id, task.id]
        verdicts = await backend.cancel(ids)
        beats = [Beat(id=run.id, token=run.token, started=run is not buffered) for run in (buffered, spared, task)]
        for _ in range(2):
            answers = await backend.beat(beats)
            if backend.capabilities.cancel_requests:
                assert [verdict.verdict for verdict in verdicts] == ["cancel_requested", "cancel_requested"]
                assert [answer.verdict for answer in answers] == ["renewed"] * 3
                assert [answer.cancel_requested for answer in answers] == [True, False, True]
            else:
                assert "cancel_requested" not in {verdict.verdict for verdict in verdicts}
                assert not any(answer.cancel_requested for answer in answers)
        for run in (buffered, task) if backend.capabilities.cancel_requests else ():
            assert (await self.settle(backend, run, "cancelled")).verdict == "settled"
            assert (await self.info(backend, run.id)).status is Status.CANCELLED

    async def test_the_holder_hears_of_a_cancel_request_before_its_next_heartbeat(
        self, backend: Service, kind: str
    ) -> None:
        if isinstance(backend, CancelSource):
            task, heard = await self.held(backend, kind), list[str]()
            assert await backend.cancels(wait=0) == []
            async with anyio.create_task_group() as group:

                async def hear() -> None:
                    heard.extend(await backend.cancels(wait=WAIT))

                group.start_soon(hear)
                await anyio.wait_all_tasks_blocked()
                await backend.cancel([task.id])
            assert heard == [task.id]
            other = await self.held(backend, kind)
            await backend.cancel([other.id])  # while nothing waits
            assert await backend.cancels(wait=WAIT) == [other.id]

    @pytest.mark.parametrize("outcome", ["retry", "release", "crash"])
    async def test_a_cancelled_task_does_not_run_again(self, backend: Service, kind: str, outcome: Outcome) -> None:
        task = await self.held(backend, kind, retry=FixedDelays(waits=[0]))
        await backend.cancel([task.id])
        await self.settle(backend, task, outcome)
        assert (await self.info(backend, task.id)).status is Status.CANCELLED
        assert await self.nothing_left(backend, kind)

    async def test_a_cancelled_task_that_finishes_has_finished(self, backend: Service, kind: str) -> None:
        task = await self.held(backend, kind)
        if backend.capabilities.cancel_requests:
            await backend.cancel([task.id])
        assert (await self.settle(backend, task)).verdict == "settled"
        assert (await self.info(backend, task.id)).status is Status.SUCCESS

    async def test_a_cancelled_task_whose_holder_vanishes_is_cancelled(self, backend: Service, kind: str) -> None:
        task = await self.briefly_held(backend, kind)
        await backend.cancel([task.id])
        await self.expire(task)
        assert await self.nothing_left(backend, kind)
        assert (await self.info(backend, task.id)).status is Status.CANCELLED

    async def test_what_has_ended_or_is_unknown_cannot_be_cancelled(self, backend: Service, kind: str) -> None:
        task = await self.held(backend, kind)
        await self.settle(backend, task)
        verdicts = await backend.cancel([task.id, f"{kind}-nobody"])
        assert [verdict.id for verdict in verdicts] == [task.id, f"{kind}-nobody"]
        assert all(is_gone(verdict) for verdict in verdicts)
