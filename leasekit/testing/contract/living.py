"""The life of a task, as it can be read."""

import pytest

from leasekit.backend import Backend, Scheduler
from leasekit.task import Beat, NewTask, Outcome, Settlement, Status, Waits
from leasekit.testing.contract.ground import SchedulerGround, is_gone

__all__ = ["Living"]


class Living(SchedulerGround):
    """What a service that takes work tells of every run, and of why it refuses."""

    async def test_a_status_follows_the_life_of_a_task(self, scheduler: Scheduler, backend: Backend, kind: str) -> None:
        await scheduler.schedule([NewTask(kind=kind, id=kind)])
        seen = [(await self.info(scheduler, kind)).status]
        task = await self.claim_one(backend, kind)
        seen.append((await self.info(scheduler, kind)).status)
        await self.beat(backend, task, started=False)
        seen.append((await self.info(scheduler, kind)).status)
        await self.beat(backend, task)
        seen.append((await self.info(scheduler, kind)).status)
        await self.settle(backend, task, result={"n": 1})
        info = await self.info(scheduler, kind)
        assert seen == [Status.NEW, Status.CLAIMED, Status.CLAIMED, Status.PROCESSING]
        assert (info.status, info.result) == (Status.SUCCESS, {"n": 1})

    @pytest.mark.parametrize(
        ("outcome", "status"),
        [
            ("retry", Status.RETRIABLE_FAILURE),
            ("fatal", Status.FATAL_FAILURE),
            ("release", Status.ENQUEUED),
            ("crash", Status.ENQUEUED),
            ("cancelled", Status.CANCELLED),
        ],
    )
    async def test_an_outcome_says_what_becomes_of_a_task(
        self, scheduler: Scheduler, backend: Backend, kind: str, outcome: Outcome, status: Status
    ) -> None:
        task = await self.held(backend, kind, retry=Waits(waits=[3600]))
        await self.settle(backend, task, outcome)
        assert (await self.info(scheduler, task.id)).status is status

    async def test_history_has_every_run_with_its_error(
        self, scheduler: Scheduler, backend: Backend, kind: str
    ) -> None:
        task = await self.held(backend, kind)
        await self.settle(backend, task, "retry", retry_after=0.0, error={"type": "ValueError"})
        again = await self.claim_one(backend, kind)
        await self.settle(backend, again, result="done")
        info = await self.info(scheduler, task.id)
        assert [(run.attempt, run.outcome) for run in info.history] == [(1, "retry"), (2, "success")]
        assert info.history[0].error == {"type": "ValueError"}
        assert info.history[1].result == "done"
        assert [run.fence for run in info.history] == [task.fence, again.fence]

    async def test_the_error_of_a_task_is_that_of_its_last_run(
        self, scheduler: Scheduler, backend: Backend, kind: str
    ) -> None:
        first = await self.held(backend, kind)
        await self.settle(backend, first, "retry", retry_after=0.0, error={"type": "E"})
        await self.settle(backend, await self.claim_one(backend, kind), "crash")
        assert (await self.info(scheduler, first.id)).error is None

    async def test_a_token_that_was_never_granted_writes_nothing(self, backend: Backend, kind: str) -> None:
        task = await self.held(backend, kind)
        made_up = f"x{task.token}"
        (beat,) = await backend.beat([Beat(id=task.id, token=made_up)])
        (result,) = await backend.settle([Settlement(id=task.id, token=made_up, outcome="success")])
        assert is_gone(beat, "taken")
        assert is_gone(result, "taken")
        assert (await self.beat(backend, task)).verdict == "renewed"

    @pytest.mark.parametrize("outcome", ["success", "cancelled"])
    async def test_how_a_task_ended_is_why_any_token_of_it_is_gone(
        self, backend: Backend, kind: str, outcome: Outcome
    ) -> None:
        task = await self.held(backend, kind)
        await self.settle(backend, task, outcome)
        verdicts = await backend.beat([Beat(id=task.id, token=token) for token in (task.token, f"x{task.token}")])
        reason = "cancelled" if outcome == "cancelled" else "settled"
        assert all(is_gone(verdict, reason) for verdict in verdicts)

    async def test_a_repeated_result_is_settled_though_a_later_run_is_under_way(
        self, backend: Backend, other: Backend, kind: str
    ) -> None:
        first = await self.held(backend, kind)
        await self.settle(backend, first, "retry", retry_after=0.0, error=[1])
        second = await self.claim_one(other, kind)
        assert (await self.settle(backend, first, "retry", retry_after=0.0, error=[1])).verdict == "settled"
        assert (await self.beat(other, second)).verdict == "renewed"

    async def test_successors_are_scheduled_once(self, scheduler: Scheduler, backend: Backend, kind: str) -> None:
        task = await self.held(backend, kind)
        then = [NewTask(kind=kind + "-next", payload=n) for n in range(2)]
        for _ in range(2):
            assert (await self.settle(backend, task, then=then)).verdict == "settled"
        got = (await self.claim(backend, kind + "-next", limit=5)).tasks
        while more := (await self.claim(backend, kind + "-next", limit=5, wait=0)).tasks:
            got += more
        assert sorted(task.payload for task in got) == [0, 1]
