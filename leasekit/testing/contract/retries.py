"""Tests of the life of a task, as it can be read."""

import json
from typing import Any

import anyio
import pytest

from leasekit.errors import Refused
from leasekit.task import Beat, FixedDelays, NewTask, Outcome, Settlement, Status
from leasekit.testing.contract.base import WAIT, SchedulerBase, Service, is_gone
from leasekit.wire import MAX_KINDS, MAX_NODES

_GIVEN_BACK: tuple[Outcome, ...] = ("retry", "release", "crash")


class Retries(SchedulerBase):
    """The promises on what can be read of every run, and on requests that are `Refused`: nothing is applied."""

    async def test_a_status_follows_the_life_of_a_task(self, backend: Service, kind: str) -> None:
        await backend.schedule([NewTask(kind=kind, id=kind)])
        seen = [(await self.info(backend, kind)).status]
        task = await self.claim_one(backend, kind)
        seen.append((await self.info(backend, kind)).status)
        await self.beat(backend, task, started=False)
        seen.append((await self.info(backend, kind)).status)
        await self.beat(backend, task)
        seen.append((await self.info(backend, kind)).status)
        await self.settle(backend, task, result={"n": 1})
        info = await self.info(backend, kind)
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
    async def test_each_outcome_leads_to_its_status(
        self, backend: Service, kind: str, outcome: Outcome, status: Status
    ) -> None:
        task = await self.held(backend, kind, retry=FixedDelays(waits=[3600]))
        await self.settle(backend, task, outcome)
        assert (await self.info(backend, task.id)).status is status

    async def test_history_has_every_run_with_its_error(self, backend: Service, kind: str) -> None:
        task = await self.held(backend, kind)
        await self.settle(backend, task, "retry", retry_after=0.0, error={"type": "ValueError"})
        again = await self.claim_one(backend, kind)
        await self.settle(backend, again, result="done")
        info = await self.info(backend, task.id)
        assert [(run.attempt, run.outcome) for run in info.history] == [(1, "retry"), (2, "success")]
        assert info.history[0].error == {"type": "ValueError"}
        assert info.history[1].result == "done"
        assert [run.fence for run in info.history] == [task.fence, again.fence]

    async def test_the_error_of_a_task_is_that_of_its_last_run(self, backend: Service, kind: str) -> None:
        first = await self.held(backend, kind)
        await self.settle(backend, first, "retry", retry_after=0.0, error={"type": "E"})
        await self.settle(backend, await self.claim_one(backend, kind), "crash")
        assert (await self.info(backend, first.id)).error is None

    async def test_a_crash_ignores_retry_after(self, backend: Service, kind: str) -> None:
        task = await self.held(backend, kind)
        await self.settle(backend, task, "crash", retry_after=3600.0)
        assert (await self.claim_one(backend, kind)).id == task.id

    async def test_a_result_that_comes_late_does_not_revive_a_dead_task(self, backend: Service, kind: str) -> None:
        task = await self.briefly_held(backend, kind, max_crashes=0)
        await self.expire(task)
        with anyio.fail_after(WAIT):
            while (await self.info(backend, task.id)).status is not Status.DEAD:
                assert await self.nothing_left(backend, kind)
                await anyio.sleep(0.02)
        assert is_gone(await self.settle(backend, task, result="late"), "expired")
        assert (await self.info(backend, task.id)).status is Status.DEAD

    async def test_a_token_that_was_never_granted_writes_nothing(self, backend: Service, kind: str) -> None:
        task = await self.held(backend, kind)
        made_up = f"x{task.token}"
        (beat,) = await backend.beat([Beat(id=task.id, token=made_up)])
        (result,) = await backend.settle([Settlement(id=task.id, token=made_up, outcome="success")])
        assert is_gone(beat, "taken")
        assert is_gone(result, "taken")
        assert (await self.beat(backend, task)).verdict == "renewed"

    @pytest.mark.parametrize("outcome", ["success", "cancelled"])
    async def test_how_a_task_ended_is_why_any_token_of_it_is_gone(
        self, backend: Service, kind: str, outcome: Outcome
    ) -> None:
        task = await self.held(backend, kind)
        await self.settle(backend, task, outcome)
        verdicts = await backend.beat([Beat(id=task.id, token=token) for token in (task.token, f"x{task.token}")])
        reason = "cancelled" if outcome == "cancelled" else "settled"
        assert all(is_gone(verdict, reason) for verdict in verdicts)

    async def test_a_repeated_result_is_settled_though_a_later_run_is_under_way(
        self, backend: Service, other: Service, kind: str
    ) -> None:
        for outcome in _GIVEN_BACK:
            first = await self.held(backend, kind)
            for _ in range(2):  # once more while the task waits for its next holder
                verdict = await self.settle(backend, first, outcome, retry_after=0.0, error=[1])
                assert verdict.verdict == "settled"
            second = await self.claim_one(other, kind)
            assert second.attempt == (1 if outcome == "release" else 2), f"a repeated {outcome} counts once"
            verdict = await self.settle(backend, first, outcome, retry_after=0.0, error=[1])
            assert verdict.verdict == "settled"
            assert (await self.beat(other, second)).verdict == "renewed", f"a repeated {outcome} ended the next run"
        assert await self.nothing_left(backend, kind)

    async def test_each_result_of_a_batch_counts_for_its_own_task(self, backend: Service, kind: str) -> None:
        outcomes: list[Outcome] = ["success", "fatal", "success", "release"]
        tasks = [await self.held(backend, kind) for _ in outcomes]
        results = [
            Settlement(
                id=task.id,
                token=task.token,
                outcome=outcome,
                result=n,
                error={"n": n},
                progress=[n],
                then=[] if outcome == "release" else [NewTask(kind=kind, id=f"{kind}-{n}", payload=n)],
            )
            for n, (task, outcome) in enumerate(zip(tasks, outcomes, strict=True))
        ]
        assert [verdict.verdict for verdict in await backend.settle(results)] == ["settled"] * 4
        infos = [await self.info(backend, task.id) for task in tasks]
        ended = [Status.SUCCESS, Status.FATAL_FAILURE, Status.SUCCESS, Status.ENQUEUED]
        assert [info.status for info in infos] == ended
        assert [(info.result, info.error, info.progress) for info in infos] == [(n, {"n": n}, [n]) for n in range(4)]
        assert [(await self.info(backend, f"{kind}-{n}")).payload for n in range(3)] == [0, 1, 2]

    @pytest.mark.parametrize("fits", [True, False])
    async def test_the_successors_of_a_task_have_six_mebibytes_together_at_most(
        self, backend: Service, kind: str, *, fits: bool
    ) -> None:
        task = await self.held(backend, kind)
        then = [NewTask(kind=kind + "-next", payload="x" * 1_000_000) for _ in range(6 if fits else 7)]
        if fits:  # with all else that a settlement may hold
            result, progress = "x" * 1_000_000, "x" * 60_000
            verdict = await self.settle(backend, task, result=result, progress=progress, then=then)
            assert verdict.verdict == "settled"
            assert sum((await backend.stats()).kinds[kind + "-next"].values()) == 6
            return
        with pytest.raises(Refused) as refusal:
            await self.settle(backend, task, then=then)
        assert [(error["item"], error["field"]) for error in refusal.value.errors] == [(0, "then")]
        assert (await self.beat(backend, task)).verdict == "renewed"  # nothing was applied
        assert (await backend.list_tasks(kind=kind + "-next")).tasks == []

    async def test_successors_are_scheduled_once(self, backend: Service, kind: str) -> None:
        task = await self.held(backend, kind)
        then = [NewTask(kind=kind + "-next", payload=n) for n in range(2)]
        for _ in range(2):
            assert (await self.settle(backend, task, then=then)).verdict == "settled"
        got = (await self.claim(backend, kind + "-next", limit=5)).tasks
        while more := (await self.claim(backend, kind + "-next", limit=5, wait=0)).tasks:
            got += more
        assert sorted(task.payload for task in got) == [0, 1]

    async def test_successors_are_bounded_over_all_results_of_a_request(self, backend: Service, kind: str) -> None:
        tasks = [await self.held(backend, kind) for _ in range(3)]
        results = [
            Settlement(id=task.id, token=task.token, outcome="success", then=[NewTask(kind=kind + "-next")] * 400)
            for task in tasks
        ]
        with pytest.raises(Refused, match="1,200 successors"):
            await backend.settle(results)
        assert (await self.info(backend, tasks[0].id)).status is Status.CLAIMED, "nothing of it was applied"
        assert [verdict.verdict for verdict in await backend.settle(results[:2])] == ["settled"] * 2

    async def test_the_kinds_of_a_claim_are_bounded(self, backend: Service, kind: str) -> None:
        await backend.schedule([NewTask(kind=f"{kind}-{n}") for n in (0, MAX_KINDS)])
        kinds = [f"{kind}-{n}" for n in range(MAX_KINDS + 1)]
        with pytest.raises(Refused):
            await backend.claim(kinds, limit=2, wait=0, claim_id=f"{kind}-many")
        claimed = await backend.claim(kinds[:MAX_KINDS], limit=2, wait=0, claim_id=f"{kind}-fewer")
        assert [task.kind for task in claimed.tasks] == [f"{kind}-0"]

    @pytest.mark.parametrize("text", ["[" + "[]," * (MAX_NODES - 1) + "[]]", "[" * 65 + "]" * 65], ids=["many", "deep"])
    async def test_arrays_and_objects_of_a_value_are_bounded(self, backend: Service, kind: str, text: str) -> None:
        value: Any = json.loads(text)
        with pytest.raises(Refused) as refused:
            await backend.schedule([NewTask(kind=kind), NewTask(kind=kind, payload=value)])
        assert [(error["item"], error["field"]) for error in refused.value.errors] == [(1, "payload")]
        task = await self.held(backend, kind, payload=value[1:] if len(value) > 1 else value[0])
        with pytest.raises(Refused):
            await self.settle(backend, task, result=value)
