"""Tests of claims: a task goes to one claimer, under a new token, and again to a repeat of the same claim."""

import itertools
import uuid
from typing import Any, Literal

import anyio
import pytest

from leasekit.backend import Backend
from leasekit.task import Claimed, NewTask
from leasekit.testing.contract.base import WAIT, ContractBase

_ENDS: tuple[Literal["release", "expired", "crash"], ...] = ("release", "expired", "crash")

PAYLOADS = [
    pytest.param(None, id="null"),
    pytest.param(False, id="false"),
    pytest.param("", id="empty"),
    pytest.param("Grüße, 世界 🎈 \u2028 \x00 \\ \"quoted\" </script>", id="unicode"),
    pytest.param({"": [], "a": {}, "é": {"b": [None, True, 0, -1, "1"]}}, id="nested"),
    pytest.param([2**53 - 1, -(2**53) + 1, 2**63 - 1, -(2**63)], id="big-integers"),
    pytest.param([0.1, 1e300, -1e-300, 1.5], id="floats"),
    pytest.param("x" * 50_000, id="long"),
]  # fmt: skip


class Claiming(ContractBase):
    """The promises of `Backend.claim`."""

    async def test_a_claim_gets_what_was_put(self, backend: Backend, kind: str) -> None:
        task_id = await self.put(backend, NewTask(kind=kind, payload={"n": 1}))
        task = await self.claim_one(backend, kind)
        assert (task.id, task.kind, task.payload, task.attempt) == (task_id, kind, {"n": 1}, 1)
        assert task.ttl > 0
        assert task.progress is None

    @pytest.mark.parametrize("payload", PAYLOADS)
    async def test_a_payload_comes_as_it_was_put(self, backend: Backend, kind: str, payload: Any) -> None:
        if isinstance(payload, str):
            payload = payload[: self.max_payload - 2]
        task = await self.held(backend, kind, payload)
        assert task.payload == payload
        assert type(task.payload) is type(payload)

    async def test_a_task_goes_to_one_claimer(self, backend: Backend, other: Backend, kind: str) -> None:
        put = {await self.put(backend, NewTask(kind=kind)) for _ in range(6)}
        got: list[str] = []

        async def take(connection: Backend) -> None:
            # More claims than there are tasks, so that a task that is handed out twice shows.
            for round_ in itertools.count():
                if round_ >= len(put) and len(got) >= len(put):
                    break
                got.extend(task.id for task in (await self.claim(connection, kind, limit=2, wait=0)).tasks)

        with anyio.fail_after(WAIT):
            async with anyio.create_task_group() as group:
                for connection in (backend, other, backend, other):
                    group.start_soon(take, connection)
        assert sorted(got) == sorted(put)

    async def test_a_claim_gets_no_more_than_its_limit(self, backend: Backend, kind: str) -> None:
        for _ in range(3):
            await self.put(backend, NewTask(kind=kind))
        assert len((await self.claim(backend, kind, limit=2)).tasks) <= 2

    async def test_a_claim_gets_its_kinds_only(self, backend: Backend, kind: str) -> None:
        await self.put(backend, NewTask(kind=kind))
        assert await self.nothing_left(backend, kind + "-other")

    async def test_a_claim_takes_several_kinds(self, backend: Backend, kind: str) -> None:
        await self.put(backend, NewTask(kind=kind + "-b"))
        kinds = [kind + "-a", kind + "-b"]
        with anyio.fail_after(WAIT + 10):
            claimed = await backend.claim(kinds, limit=5, wait=WAIT, claim_id=uuid.uuid4().hex)
        assert [task.kind for task in claimed.tasks] == [kind + "-b"]

    async def test_a_claim_gets_no_more_than_its_limit_of_all_its_kinds(self, backend: Backend, kind: str) -> None:
        kinds = [kind + "-a", kind + "-b"]
        for name in kinds:
            await self.put(backend, NewTask(kind=name))
        claims = [await self.claim(backend, kinds[0], also=kinds[1:]) for _ in kinds]
        assert [len(claimed.tasks) for claimed in claims] == [1, 1]
        assert sorted(claimed.tasks[0].kind for claimed in claims) == kinds

    async def test_a_claim_without_wait_answers_at_once(self, backend: Backend, kind: str) -> None:
        assert (await self.claim(backend, kind, wait=0)).tasks == []

    async def test_a_wait_that_runs_out_gets_nothing(self, backend: Backend, kind: str) -> None:
        async with self.waiting(backend, kind, wait=1) as answers:
            await self.sleep(1)
        assert [answer.tasks for answer in answers] == [[]]

    async def test_a_waiting_claim_is_woken(self, backend: Backend, other: Backend, kind: str) -> None:
        async with self.waiting(other, kind) as answers:
            await self.put(backend, NewTask(kind=kind, payload="woken"))
        assert [task.payload for task in answers[0].tasks] == ["woken"]

    async def test_a_claim_that_waits_is_woken_by_any_of_its_kinds(
        self, backend: Backend, other: Backend, kind: str
    ) -> None:
        kinds = [kind + "-a", kind + "-b"]
        for name in kinds:
            async with self.waiting(other, kinds[0], also=kinds[1:]) as answers:
                await self.put(backend, NewTask(kind=name))
            assert [task.kind for task in answers[0].tasks] == [name]

    async def test_waited_is_told_where_the_capability_says_so(self, backend: Backend, kind: str) -> None:
        await self.put(backend, NewTask(kind=kind))
        waited = (await self.claim(backend, kind)).waited
        if backend.capabilities.tells_waited:
            assert waited is not None
            assert 0 <= waited < WAIT
        else:
            assert waited is None

    async def test_a_token_is_new_for_every_claim(self, backend: Backend, kind: str) -> None:
        first = await self.held(backend, kind)
        await self.settle(backend, first, "retry", retry_after=0.0)
        if second := await self.claim_again(backend, first):
            assert second.token != first.token

    async def test_tokens_of_two_tasks_differ(self, backend: Backend, kind: str) -> None:
        assert (await self.held(backend, kind)).token != (await self.held(backend, kind)).token

    async def test_a_fence_grows_with_every_claim(self, backend: Backend, kind: str) -> None:
        runs = [await self.briefly_held(backend, kind)]
        for way in _ENDS if backend.capabilities.retries else ():
            if way == "expired":
                await self.expire(runs[-1])
            else:
                await self.settle(backend, runs[-1], way)
            runs.append(await self.claim_one(backend, kind))
        fences = [run.fence for run in runs]
        if backend.capabilities.fences:
            assert fences[0] > 0
            assert fences == sorted(set(fences))
        else:
            assert not any(fences)

    async def test_a_repeated_claim_gets_the_same_again(self, backend: Backend, kind: str) -> None:
        for n in range(3):
            await self.put(backend, NewTask(kind=kind, payload=n))
        first = await self.claim(backend, kind, limit=2, claim_id=kind)
        await self.sleep(0.2)
        second = await self.claim(backend, kind, limit=2, wait=0, claim_id=kind)
        if backend.capabilities.remembers_claims:
            assert second.tasks == first.tasks
            assert second.waited == pytest.approx(first.waited, abs=0.001)
        else:
            assert not {task.id for task in first.tasks} & {task.id for task in second.tasks}

    async def test_a_repeated_claim_gets_only_what_is_still_live(self, backend: Backend, kind: str) -> None:
        for _ in range(3):  # one more than the claim asks for: a repeat is not topped up
            await self.put(backend, NewTask(kind=kind))
        first = await self.claim(backend, kind, limit=2, claim_id=kind)
        await self.settle(backend, first.tasks[0])
        second = await self.claim(backend, kind, limit=2, wait=0, claim_id=kind)
        assert second.tasks == (first.tasks[1:] if backend.capabilities.remembers_claims else second.tasks)
        assert first.tasks[0].id not in {task.id for task in second.tasks}

    async def test_a_repeated_claim_of_which_nothing_is_live_gets_nothing(self, backend: Backend, kind: str) -> None:
        for _ in range(2):  # the second task is for a claim with an id of its own
            await self.put(backend, NewTask(kind=kind))
        first = await self.claim_one(backend, kind, claim_id=kind)
        await self.settle(backend, first)
        again = await self.claim(backend, kind, wait=0, claim_id=kind)
        if backend.capabilities.remembers_claims:
            assert again.tasks == []
        else:
            assert first.id not in {task.id for task in again.tasks}

    async def test_a_repeated_claim_gets_what_a_beat_would_renew(self, backend: Backend, kind: str) -> None:
        if not backend.capabilities.remembers_claims:
            return
        await self.put(backend, NewTask(kind=kind, claim_timeout=self.short_ttl, heartbeat_timeout=self.short_ttl))
        task = await self.claim_one(backend, kind, claim_id=kind)
        await self.expire(task)
        await self.interrupt(task)
        again = await self.claim(backend, kind, wait=0, claim_id=kind)
        is_renewed = (await self.beat(backend, task)).verdict == "renewed"
        assert [repeated.token for repeated in again.tasks] == [task.token] * is_renewed

    async def test_a_repeat_joins_the_claim_that_waits(self, backend: Backend, kind: str) -> None:
        claims = 2 if backend.capabilities.remembers_claims else 1
        async with self.waiting(backend, kind, claims=claims, limit=2, claim_id=kind) as answers:
            await self.put(backend, NewTask(kind=kind))
        assert all(answer.tasks == answers[0].tasks for answer in answers)
        assert len(answers[0].tasks) == 1

    async def test_an_empty_answer_is_not_remembered(self, backend: Backend, kind: str) -> None:
        assert (await self.claim(backend, kind, wait=0, claim_id=kind)).tasks == []
        task_id = await self.put(backend, NewTask(kind=kind))
        assert [task.id for task in (await self.claim(backend, kind, claim_id=kind)).tasks] == [task_id]

    async def test_a_claim_that_was_ended_is_granted_nothing_however_late_it_arrives(
        self, backend: Backend, kind: str
    ) -> None:
        """A proxy may deliver a request after its sender is dead: then the lease would have no holder."""
        if not backend.capabilities.remembers_claims:
            return
        also = [kind + "-b"]
        ended = await self.claim(backend, kind, also=also, limit=0, claim_id=kind)  # nor does it wait
        assert ended.tasks == []
        task_id = await self.put(backend, NewTask(kind=kind))
        assert (await self.claim(backend, kind, limit=0, claim_id=kind)).tasks == []
        assert (await self.claim(backend, kind, also=also, wait=0, claim_id=kind)).tasks == []
        assert (await self.claim(backend, kind, claim_id=kind)).tasks == []  # nor does this one
        assert [task.id for task in (await self.claim(backend, kind)).tasks] == [task_id]

    async def test_a_claim_that_is_ended_is_told_again_what_it_was_granted(self, backend: Backend, kind: str) -> None:
        if not backend.capabilities.remembers_claims:
            return
        for _ in range(3):
            await self.put(backend, NewTask(kind=kind))
        first = await self.claim(backend, kind, limit=2, claim_id=kind)
        for _ in range(2):
            assert _grants(await self.claim(backend, kind, limit=0, claim_id=kind)) == _grants(first)
        await self.settle(backend, first.tasks[0], "release")
        assert _grants(await self.claim(backend, kind, limit=0, claim_id=kind)) == _grants(first)[1:]
        assert (await self.claim(backend, kind, limit=2, wait=0, claim_id=kind)).tasks == first.tasks[1:]

    async def test_a_claim_that_is_ended_is_told_no_values(self, backend: Backend, other: Backend, kind: str) -> None:
        """The tasks of an ended claim are only to be released: payloads would hold that up on a slow line."""
        if not (backend.capabilities.remembers_claims and backend.capabilities.retries):
            return
        task = await self.held(other, kind, "x" * 1000)
        await self.beat(other, task, progress={"page": 7})
        await self.settle(other, task, "release")
        first = await self.claim(backend, kind, claim_id=kind)
        ended = await self.claim(backend, kind, limit=0, claim_id=kind)
        assert _grants(ended) == _grants(first)
        assert [(task.payload, task.progress) for task in ended.tasks] == [(None, None)]
        late = await self.claim(backend, kind, wait=0, claim_id=kind)
        assert [task.payload for task in late.tasks] == ["x" * 1000], "all other answers have payloads"

    async def test_a_claim_that_waits_is_granted_nothing_once_it_was_ended(self, backend: Backend, kind: str) -> None:
        if not backend.capabilities.remembers_claims:
            return
        async with self.waiting(backend, kind, claim_id=kind) as answers:
            assert (await self.claim(backend, kind, limit=0, claim_id=kind)).tasks == []
            await self.put(backend, NewTask(kind=kind))
        assert answers[0].tasks == []


def _grants(claimed: Claimed) -> list[tuple[str, str, str, int, int, float]]:
    """Return the fields that are needed to release these tasks."""
    return [(task.id, task.kind, task.token, task.fence, task.attempt, task.ttl) for task in claimed.tasks]
