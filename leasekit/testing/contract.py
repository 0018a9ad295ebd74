"""What every adapter promises, as tests; subclass it and run it against the real thing.

    # conftest.py
    pytest.register_assert_rewrite("leasekit.testing.contract")     # before it is imported: failures show their values

    # test_mine.py
    from leasekit.testing.contract import SchedulerContract

    class TestMine(SchedulerContract):                              # BackendContract where the service takes no work
        @pytest.fixture
        async def backend(self, service_url): ...                   # yield one connection, close it afterwards
        @pytest.fixture
        async def other(self, service_url): ...                     # yield a second one, with another worker's name

The tests run on asyncio through anyio's pytest plugin (`pip install anyio pytest`). They put tasks of fresh kinds, so
that they can share a service. A trait that is declared false is held to that: a service without fences grants 0.

A service that does not take work by itself subclasses `BackendContract` and says in `put` how a task gets into it.
"""

import itertools
import math
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import anyio
import pytest

from leasekit.backend import Backend, Scheduler
from leasekit.errors import Refused
from leasekit.task import (
    Beat,
    Claimed,
    NewTask,
    Outcome,
    Settlement,
    Status,
    Task,
    TaskInfo,
    Verdict,
    Waits,
)

__all__ = ["BackendContract", "SchedulerContract"]

_GONE = {"settled", "taken", "expired", "cancelled", "unknown"}
_WAIT = 20.0  # for a task that is there or is about to be; never waited out where the promise is kept

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


class _Ground:
    """What a subclass says about its service, and the moves that the tests are made of."""

    pytestmark = pytest.mark.anyio

    short_ttl: float = 2.0
    """The shortest lease that the service grants: tests that let one run out put tasks with this `claim_timeout`."""

    late_results: bool = True
    """Whether a result is accepted after its lease ran out, as long as the task was not granted again."""

    max_payload: int = 1024 * 1024
    """Bytes of JSON that a payload may have. The longest that is tried has 50,000."""

    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    @pytest.fixture
    async def backend(self) -> Backend:
        """A connection to the service. Define it."""
        raise NotImplementedError(f"{type(self).__name__} says nothing of its backend: define the fixture `backend`")

    @pytest.fixture
    async def other(self, backend: Backend) -> Backend:
        """A second connection to the same service, of another worker. Define it where there can be one."""
        return backend

    @pytest.fixture
    def kind(self) -> str:
        return f"contract-{uuid.uuid4().hex[:12]}"

    async def put(self, backend: Backend, task: NewTask) -> str:
        """Get a task into the service, and say its id. Redefine it where the backend is no `Scheduler`.

        Kind, payload and the two timeouts count; the rest is given by `SchedulerContract` only.
        """
        assert isinstance(backend, Scheduler), "the service takes no work by itself: define `put`"
        (answer,) = await backend.schedule([task])
        assert answer.created
        return answer.id

    async def sleep(self, seconds: float) -> None:
        """Let time pass for the service. Redefine it where its clock can be turned."""
        await anyio.sleep(seconds)

    def now(self) -> datetime:
        """What time it is for the service, as far as its clock is known here."""
        return datetime.now(UTC)

    async def expire(self, *tasks: Task) -> None:
        """Let these leases run out."""
        await self.sleep(max(task.ttl for task in tasks) + 0.1)

    async def claim(
        self, backend: Backend, kind: str, *, limit: int = 1, wait: float = _WAIT, claim_id: str | None = None
    ) -> Claimed:
        with anyio.fail_after(_WAIT + 10):
            return await backend.claim([kind], limit=limit, wait=wait, claim_id=claim_id or uuid.uuid4().hex)

    async def claim_one(self, backend: Backend, kind: str) -> Task:
        (task,) = (await self.claim(backend, kind)).tasks
        return task

    async def held(self, backend: Backend, kind: str, payload: Any = None, **options: Any) -> Task:
        """A task put and claimed, under a lease that outlasts the test."""
        await self.put(backend, NewTask(kind=kind, payload=payload, **options))
        return await self.claim_one(backend, kind)

    async def briefly_held(self, backend: Backend, kind: str, **options: Any) -> Task:
        """A task put and claimed, under a lease that can be waited out."""
        ttl = self.short_ttl
        return await self.held(backend, kind, claim_timeout=ttl, heartbeat_timeout=ttl, **options)

    async def beat(self, backend: Backend, task: Task, **options: Any) -> Verdict:
        (verdict,) = await backend.beat([Beat(id=task.id, token=task.token, **options)])
        assert verdict.id == task.id
        return verdict

    async def settle(self, backend: Backend, task: Task, outcome: Outcome = "success", **options: Any) -> Verdict:
        settlement = Settlement(id=task.id, token=task.token, outcome=outcome, **options)
        (verdict,) = await backend.settle([settlement])
        assert verdict.id == task.id
        return verdict

    async def nothing_left(self, backend: Backend, kind: str) -> bool:
        return not (await self.claim(backend, kind, wait=0)).tasks

    async def claim_again(self, backend: Backend, task: Task) -> Task | None:
        """The next claim of a task that is to run again; None where the service leaves that to others, and does."""
        if backend.traits.retries:
            again = await self.claim_one(backend, task.kind)
            assert again.id == task.id
            return again
        assert await self.nothing_left(backend, task.kind), "it hands the task out again: declare retries"
        return None


class BackendContract(_Ground):
    """The promises of `leasekit.backend.Backend`."""

    async def test_a_backend_that_takes_work_is_held_to_the_whole_contract(self, backend: Backend) -> None:
        assert not isinstance(backend, Scheduler) or isinstance(self, SchedulerContract), "subclass SchedulerContract"

    async def test_traits_are_bounds_of_one_or_more(self, backend: Backend) -> None:
        assert min(backend.traits.max_batch, backend.traits.max_claim) >= 1

    # Claiming

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
            # More often than there is something to get: a task that is handed out twice would show.
            for round_ in itertools.count():
                if round_ >= len(put) and len(got) >= len(put):
                    break
                got.extend(task.id for task in (await self.claim(connection, kind, limit=2, wait=0)).tasks)

        with anyio.fail_after(_WAIT):
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
        with anyio.fail_after(_WAIT + 10):
            claimed = await backend.claim(kinds, limit=5, wait=_WAIT, claim_id=uuid.uuid4().hex)
        assert [task.kind for task in claimed.tasks] == [kind + "-b"]

    async def test_a_claim_without_wait_answers_at_once(self, backend: Backend, kind: str) -> None:
        assert (await self.claim(backend, kind, wait=0)).tasks == []

    async def test_a_wait_that_runs_out_gets_nothing(self, backend: Backend, kind: str) -> None:
        answers: list[Claimed] = []

        async def ask() -> None:
            answers.append(await self.claim(backend, kind, wait=1))

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            await self.sleep(1)
        assert [answer.tasks for answer in answers] == [[]]

    async def test_a_waiting_claim_is_woken(self, backend: Backend, other: Backend, kind: str) -> None:
        answers: list[Claimed] = []

        async def ask() -> None:
            answers.append(await self.claim(other, kind))

        with anyio.fail_after(_WAIT - 5):
            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                await self.put(backend, NewTask(kind=kind, payload="woken"))
        assert [task.payload for task in answers[0].tasks] == ["woken"]

    async def test_waited_is_told_where_the_trait_says_so(self, backend: Backend, kind: str) -> None:
        await self.put(backend, NewTask(kind=kind))
        waited = (await self.claim(backend, kind)).waited
        if backend.traits.tells_waited:
            assert waited is not None
            assert 0 <= waited < _WAIT
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
        first = await self.held(backend, kind)
        runs = [first]
        for outcome in ("release", "crash") if backend.traits.retries else ():
            await self.settle(backend, runs[-1], outcome)
            runs.append(await self.claim_one(backend, kind))
        fences = [run.fence for run in runs]
        if backend.traits.fences:
            assert fences[0] > 0
            assert fences == sorted(set(fences))
        else:
            assert not any(fences)

    async def test_a_repeated_claim_gets_the_same_again(self, backend: Backend, kind: str) -> None:
        for n in range(3):
            await self.put(backend, NewTask(kind=kind, payload=n))
        first = await self.claim(backend, kind, limit=2, claim_id=kind)
        second = await self.claim(backend, kind, limit=2, wait=0, claim_id=kind)
        if backend.traits.remembers_claims:
            assert second.tasks == first.tasks
            assert second.waited == pytest.approx(first.waited, abs=0.001)
        else:
            assert not {task.id for task in first.tasks} & {task.id for task in second.tasks}

    async def test_a_repeated_claim_gets_only_what_is_still_live(self, backend: Backend, kind: str) -> None:
        for _ in range(2):
            await self.put(backend, NewTask(kind=kind))
        first = await self.claim(backend, kind, limit=2, claim_id=kind)
        await self.settle(backend, first.tasks[0])
        second = await self.claim(backend, kind, limit=2, wait=0, claim_id=kind)
        assert second.tasks == (first.tasks[1:] if backend.traits.remembers_claims else second.tasks)
        assert first.tasks[0].id not in {task.id for task in second.tasks}

    async def test_a_repeat_joins_the_claim_that_waits(self, backend: Backend, kind: str) -> None:
        answers: list[Claimed] = []

        async def ask(wait: float) -> None:
            answers.append(await self.claim(backend, kind, limit=2, wait=wait, claim_id=kind))

        with anyio.fail_after(_WAIT - 5):
            async with anyio.create_task_group() as group:
                group.start_soon(ask, _WAIT)
                if backend.traits.remembers_claims:
                    group.start_soon(ask, _WAIT)
                await anyio.wait_all_tasks_blocked()
                await self.put(backend, NewTask(kind=kind))
        assert all(answer.tasks == answers[0].tasks for answer in answers)
        assert len(answers[0].tasks) == 1

    async def test_an_empty_answer_is_not_remembered(self, backend: Backend, kind: str) -> None:
        assert (await self.claim(backend, kind, wait=0, claim_id=kind)).tasks == []
        task_id = await self.put(backend, NewTask(kind=kind))
        assert [task.id for task in (await self.claim(backend, kind, claim_id=kind)).tasks] == [task_id]

    # Beating

    async def test_a_beat_renews_and_says_for_how_long(self, backend: Backend, kind: str) -> None:
        verdict = await self.beat(backend, await self.held(backend, kind))
        assert verdict.verdict == "renewed"
        assert verdict.ttl
        assert verdict.ttl > 0
        assert verdict.order is None

    async def test_a_beaten_lease_outlives_its_claim(self, backend: Backend, other: Backend, kind: str) -> None:
        task = await self.briefly_held(backend, kind)
        for _ in range(4):
            await self.sleep(task.ttl / 3)
            assert (await self.beat(backend, task)).verdict == "renewed"
        assert await self.nothing_left(other, kind)

    async def test_the_longest_progress_is_taken(self, backend: Backend, kind: str) -> None:
        task = await self.held(backend, kind)
        assert (await self.beat(backend, task, progress="x" * (backend.traits.max_progress - 2))).verdict == "renewed"

    async def test_a_buffered_task_is_beaten_too(self, backend: Backend, kind: str) -> None:
        task = await self.held(backend, kind)
        assert (await self.beat(backend, task, started=False)).verdict == "renewed"

    async def test_a_lease_without_beats_runs_out(self, backend: Backend, other: Backend, kind: str) -> None:
        first = await self.briefly_held(backend, kind)
        await self.expire(first)
        if second := await self.claim_again(other, first):
            assert second.token != first.token

    async def test_a_beat_of_an_expired_lease_is_gone(self, backend: Backend, kind: str) -> None:
        task = await self.briefly_held(backend, kind)
        await self.expire(task)
        assert _is_gone(await self.beat(backend, task), "expired", "taken", "unknown")

    async def test_verdicts_come_in_order_with_one_bad_among_good(self, backend: Backend, kind: str) -> None:
        tasks = [await self.held(backend, kind) for _ in range(5)]
        assert (await self.settle(backend, tasks[2])).verdict == "settled"
        verdicts = await backend.beat([Beat(id=task.id, token=task.token) for task in tasks])
        assert [verdict.id for verdict in verdicts] == [task.id for task in tasks]
        assert [verdict.verdict for verdict in verdicts] == ["renewed", "renewed", "gone", "renewed", "renewed"]

    async def test_results_come_in_order_with_one_bad_among_good(self, backend: Backend, kind: str) -> None:
        tasks = [await self.held(backend, kind) for _ in range(4)]
        assert (await self.settle(backend, tasks[1], "fatal")).verdict == "settled"
        results = [Settlement(id=task.id, token=task.token, outcome="success") for task in tasks]
        verdicts = await backend.settle(results)
        assert [verdict.id for verdict in verdicts] == [task.id for task in tasks]
        assert [verdict.verdict for verdict in verdicts] == ["settled", "gone", "settled", "settled"]

    async def test_empty_batches_answer_empty(self, backend: Backend) -> None:
        assert await backend.beat([]) == []
        assert await backend.settle([]) == []

    async def test_the_largest_batch_is_taken(self, backend: Backend, kind: str) -> None:
        task = await self.held(backend, kind)
        strangers = [Beat(id=f"nobody-{n}", token=task.token) for n in range(backend.traits.max_batch - 1)]
        verdicts = await backend.beat([*strangers, Beat(id=task.id, token=task.token)])
        assert len(verdicts) == backend.traits.max_batch
        assert verdicts[-1].verdict == "renewed"
        assert {verdict.verdict for verdict in verdicts[:-1]} <= {"gone"}

    # Ending

    async def test_a_success_ends_the_task(self, backend: Backend, kind: str) -> None:
        task = await self.held(backend, kind)
        assert (await self.settle(backend, task, result={"ok": True})).verdict == "settled"
        assert await self.nothing_left(backend, kind)

    @pytest.mark.parametrize("outcome", ["fatal", "cancelled"])
    async def test_an_end_without_success_ends_the_task_too(
        self, backend: Backend, kind: str, outcome: Literal["fatal", "cancelled"]
    ) -> None:
        task = await self.held(backend, kind)
        assert (await self.settle(backend, task, outcome, error={"type": "E"})).verdict == "settled"
        assert await self.nothing_left(backend, kind)

    @pytest.mark.parametrize(("outcome", "more"), [("retry", {"retry_after": 0.0}), ("release", {}), ("crash", {})])
    async def test_a_task_that_was_given_back_is_ready_at_once(
        self, backend: Backend, other: Backend, kind: str, outcome: Outcome, more: dict[str, Any]
    ) -> None:
        first = await self.held(backend, kind)
        assert (await self.settle(backend, first, outcome, **more)).verdict == "settled"
        await self.claim_again(other, first)

    async def test_a_retry_waits_as_told(self, backend: Backend, kind: str) -> None:
        task = await self.held(backend, kind)
        await self.settle(backend, task, "retry", retry_after=3600.0)
        assert await self.nothing_left(backend, kind)

    async def test_a_repeated_result_is_settled_again(self, backend: Backend, kind: str) -> None:
        task = await self.held(backend, kind)
        for _ in range(2):
            assert (await self.settle(backend, task, "success", result=[1])).verdict == "settled"

    async def test_another_result_afterwards_is_gone(self, backend: Backend, kind: str) -> None:
        task = await self.held(backend, kind)
        await self.settle(backend, task, "success")
        assert _is_gone(await self.settle(backend, task, "fatal"), "settled", "unknown")

    async def test_a_beat_after_the_end_is_gone(self, backend: Backend, kind: str) -> None:
        task = await self.held(backend, kind)
        await self.settle(backend, task)
        assert _is_gone(await self.beat(backend, task), "settled", "unknown")

    async def test_a_beat_after_giving_back_does_not_take_it_again(
        self, backend: Backend, other: Backend, kind: str
    ) -> None:
        task = await self.held(backend, kind)
        await self.settle(backend, task, "release")
        assert _is_gone(await self.beat(backend, task))
        await self.claim_again(other, task)

    async def test_a_result_that_comes_late_is_not_thrown_away(self, backend: Backend, kind: str) -> None:
        task = await self.briefly_held(backend, kind)
        await self.expire(task)
        verdict = await self.settle(backend, task, result="late")
        if self.late_results:
            assert verdict.verdict == "settled"
            assert await self.nothing_left(backend, kind)
        else:
            assert _is_gone(verdict)

    async def test_stale_writes_are_refused(self, backend: Backend, other: Backend, kind: str) -> None:
        first = await self.briefly_held(backend, kind)
        await self.expire(first)
        second = await self.claim_again(other, first)
        verdicts = [await self.beat(backend, first), await self.settle(backend, first)]
        if backend.traits.refuses_stale:
            assert second is None or all(_is_gone(verdict) for verdict in verdicts)
            assert _is_gone(verdicts[0])
            if second is not None:
                assert (await self.beat(other, second)).verdict == "renewed"
                assert (await self.settle(other, second)).verdict == "settled"
        else:
            assert [verdict.verdict for verdict in verdicts] != ["gone", "gone"], "it does: declare refuses_stale"

    async def test_a_stranger_is_gone(self, backend: Backend, kind: str) -> None:
        task = await self.held(backend, kind)
        await self.settle(backend, task)
        (beat,) = await backend.beat([Beat(id="nobody", token=task.token)])
        (result,) = await backend.settle([Settlement(id="nobody", token=task.token, outcome="success")])
        assert _is_gone(beat)
        assert _is_gone(result)

    @pytest.mark.parametrize("way", ["beat", "settle"])
    async def test_progress_goes_to_the_next_holder(
        self, backend: Backend, other: Backend, kind: str, way: Literal["beat", "settle"]
    ) -> None:
        task = await self.held(backend, kind)
        if way == "beat":
            await self.beat(backend, task, progress={"page": 1})
            await self.beat(backend, task, progress={"page": 7, "né": [None]})
            await self.beat(backend, task)
            await self.settle(backend, task, "release")
        else:
            await self.settle(backend, task, "retry", retry_after=0.0, progress={"page": 7, "né": [None]})
        if again := await self.claim_again(other, task):
            assert again.progress == ({"page": 7, "né": [None]} if backend.traits.progress else None)

    async def test_progress_outlives_a_holder_that_vanished(self, backend: Backend, other: Backend, kind: str) -> None:
        task = await self.briefly_held(backend, kind)
        await self.beat(backend, task, progress=[1])
        await self.expire(task)
        if again := await self.claim_again(other, task):
            assert again.progress == ([1] if backend.traits.progress else None)

    # Closing

    async def test_closing_twice_is_fine(self, backend: Backend) -> None:
        await backend.aclose()
        await backend.aclose()


class SchedulerContract(BackendContract):
    """The promises of `leasekit.backend.Scheduler`, and of `Backend`."""

    @pytest.fixture
    def scheduler(self, backend: Backend) -> Scheduler:
        assert isinstance(backend, Scheduler)
        return backend

    async def info(self, scheduler: Scheduler, task_id: str) -> TaskInfo:
        info = await scheduler.get(task_id)
        assert info is not None
        assert info.id == task_id
        return info

    # Scheduling

    async def test_scheduling_answers_in_order(self, scheduler: Scheduler, kind: str) -> None:
        ids = [f"{kind}-{n}" for n in range(5)]
        answers = await scheduler.schedule([NewTask(kind=kind, id=task_id) for task_id in ids])
        assert [answer.id for answer in answers] == ids
        assert all(answer.created and not answer.conflict and answer.status is Status.NEW for answer in answers)

    async def test_a_task_without_id_gets_one_of_its_own(self, scheduler: Scheduler, kind: str) -> None:
        one, two = await scheduler.schedule([NewTask(kind=kind), NewTask(kind=kind)])
        assert one.id
        assert one.id != two.id

    async def test_the_same_id_makes_no_second_task(self, scheduler: Scheduler, backend: Backend, kind: str) -> None:
        task = NewTask(kind=kind, id=kind, payload={"a": 1, "b": [2]})
        await scheduler.schedule([task])
        again, within = await scheduler.schedule([task, task])
        for answer in (again, within):
            assert (answer.id, answer.created, answer.conflict) == (kind, False, False)
        assert len((await self.claim(backend, kind, limit=5)).tasks) == 1

    async def test_scheduling_again_says_how_far_it_is(self, scheduler: Scheduler, backend: Backend, kind: str) -> None:
        await self.settle(backend, await self.held(backend, kind, id=kind))
        (answer,) = await scheduler.schedule([NewTask(kind=kind, id=kind)])
        assert (answer.created, answer.status) == (False, Status.SUCCESS)

    async def test_the_same_id_with_another_payload_is_a_conflict(self, scheduler: Scheduler, kind: str) -> None:
        await scheduler.schedule([NewTask(kind=kind, id=kind, payload=1)])
        payload, of_kind = await scheduler.schedule(
            [NewTask(kind=kind, id=kind, payload=2), NewTask(kind=kind + "-b", id=kind, payload=1)]
        )
        assert (payload.created, payload.conflict) == (False, True)
        assert (of_kind.created, of_kind.conflict) == (False, True)
        info = await self.info(scheduler, kind)
        assert (info.kind, info.payload) == (kind, 1)

    async def test_a_dedupe_key_makes_one_task_even_when_it_ended(
        self, scheduler: Scheduler, backend: Backend, kind: str
    ) -> None:
        (first,) = await scheduler.schedule([NewTask(kind=kind, dedupe_key="key / ü")])
        (second,) = await scheduler.schedule([NewTask(kind=kind, dedupe_key="key / ü", payload=2)])
        await self.settle(backend, await self.claim_one(backend, kind))
        (third,) = await scheduler.schedule([NewTask(kind=kind, dedupe_key="key / ü")])
        assert (first.created, second.created, third.created) == (True, False, False)
        assert first.id == second.id == third.id
        assert await self.nothing_left(backend, kind)

    async def test_a_dedupe_key_counts_for_its_kind(self, scheduler: Scheduler, kind: str) -> None:
        answers = await scheduler.schedule([NewTask(kind=kind + end, dedupe_key="k") for end in ("-a", "-b")])
        assert [answer.created for answer in answers] == [True, True]

    async def test_a_dedupe_key_counts_for_its_window(self, scheduler: Scheduler, kind: str) -> None:
        task = NewTask(kind=kind, dedupe_key="k", dedupe_window=1.0)
        (first,) = await scheduler.schedule([task])
        await self.sleep(1.1)
        (second,) = await scheduler.schedule([task])
        assert second.created
        assert second.id != first.id

    async def test_a_later_task_is_not_ready_before_its_time(
        self, scheduler: Scheduler, backend: Backend, kind: str
    ) -> None:
        await scheduler.schedule([NewTask(kind=kind, at=self.now() + timedelta(days=1))])
        assert await self.nothing_left(backend, kind)

    async def test_a_waiting_claim_gets_a_task_when_it_is_due(
        self, scheduler: Scheduler, backend: Backend, kind: str
    ) -> None:
        await scheduler.schedule([NewTask(kind=kind, at=self.now() + timedelta(seconds=1), payload="due")])
        answers: list[Claimed] = []

        async def ask() -> None:
            answers.append(await self.claim(backend, kind))

        with anyio.fail_after(_WAIT - 5):
            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                await self.sleep(1)
        assert [task.payload for task in answers[0].tasks] == ["due"]

    async def test_the_most_urgent_goes_first(self, scheduler: Scheduler, backend: Backend, kind: str) -> None:
        await scheduler.schedule([NewTask(kind=kind, priority=p, payload=p) for p in (3, 0, 4, 1, 2)])
        got = [(await self.claim_one(backend, kind)).priority for _ in range(5)]
        assert got == [0, 1, 2, 3, 4]

    async def test_a_task_carries_what_was_given(self, scheduler: Scheduler, backend: Backend, kind: str) -> None:
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        task = await self.held(backend, kind, collection="blue", priority=1, traceparent=trace)
        assert (task.collection, task.priority, task.traceparent) == ("blue", 1, trace)

    async def test_claims_and_beats_grant_what_the_task_says(self, backend: Backend, kind: str) -> None:
        task = await self.held(backend, kind, claim_timeout=120.0, heartbeat_timeout=60.0)
        assert (task.ttl, (await self.beat(backend, task)).ttl) == (120, 60)

    async def test_a_batch_with_one_bad_task_is_refused_whole(
        self, scheduler: Scheduler, backend: Backend, kind: str
    ) -> None:
        with pytest.raises(Refused) as refusal:
            await scheduler.schedule([NewTask(kind=kind), NewTask(kind=kind, priority=9)])
        assert [(error["item"], error["field"]) for error in refusal.value.errors] == [(1, "priority")]
        assert await self.nothing_left(backend, kind)

    async def test_a_payload_out_of_bounds_is_refused(self, scheduler: Scheduler, kind: str) -> None:
        with pytest.raises(Refused):
            await scheduler.schedule([NewTask(kind=kind, payload="x" * (1024 * 1024 + 1))])

    async def test_empty_schedules_and_cancels_answer_empty(self, scheduler: Scheduler) -> None:
        assert await scheduler.schedule([]) == []
        assert await scheduler.cancel([]) == []

    async def test_the_largest_batch_goes_through_a_whole_life(
        self, scheduler: Scheduler, backend: Backend, kind: str
    ) -> None:
        count = backend.traits.max_batch
        answers = await scheduler.schedule([NewTask(kind=kind, payload=n) for n in range(count)])
        tasks: list[Task] = []
        while len(tasks) < count:
            more = (await self.claim(backend, kind, limit=backend.traits.max_claim)).tasks
            assert more
            tasks += more
        assert {task.id for task in tasks} == {answer.id for answer in answers}
        beats = await backend.beat([Beat(id=task.id, token=task.token) for task in tasks])
        assert {verdict.verdict for verdict in beats} == {"renewed"}
        ends = await backend.settle([Settlement(id=t.id, token=t.token, outcome="success") for t in tasks])
        assert [(end.id, end.verdict) for end in ends] == [(task.id, "settled") for task in tasks]

    # A life, as it can be read

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

    async def test_a_retry_waits_by_its_policy(self, scheduler: Scheduler, backend: Backend, kind: str) -> None:
        task = await self.held(backend, kind, retry=Waits(waits=[0, 3600]))
        await self.settle(backend, task, "retry")
        await self.settle(backend, await self.claim_one(backend, kind), "retry")
        assert await self.nothing_left(backend, kind)

    async def test_a_release_counts_as_no_attempt(self, backend: Backend, kind: str) -> None:
        await self.settle(backend, await self.held(backend, kind), "release")
        assert (await self.claim_one(backend, kind)).attempt == 1

    @pytest.mark.parametrize("outcome", ["retry", "crash"])
    async def test_failures_and_crashes_count_as_attempts(self, backend: Backend, kind: str, outcome: Outcome) -> None:
        task = await self.held(backend, kind, retry=Waits(waits=[0]))
        await self.settle(backend, task, outcome)
        assert (await self.claim_one(backend, kind)).attempt == 2

    async def test_max_attempts_bounds_retries(self, scheduler: Scheduler, backend: Backend, kind: str) -> None:
        task = await self.held(backend, kind, max_attempts=2, max_crashes=5, retry=Waits(waits=[0]))
        for outcome in ("retry", "crash", "retry"):
            assert (await self.info(scheduler, task.id)).status is not Status.DEAD
            await self.settle(backend, task, outcome)
            if outcome != "retry" or task.attempt == 1:
                task = await self.claim_one(backend, kind)
        assert (await self.info(scheduler, task.id)).status is Status.DEAD
        assert await self.nothing_left(backend, kind)

    @pytest.mark.parametrize("way", ["crash", "expiry"])
    async def test_max_crashes_bounds_holders_that_vanish(
        self, scheduler: Scheduler, backend: Backend, kind: str, way: Literal["crash", "expiry"]
    ) -> None:
        task = await self.briefly_held(backend, kind, max_crashes=0)
        if way == "crash":
            await self.settle(backend, task, "crash")
        else:
            await self.expire(task)
            assert await self.nothing_left(backend, kind)  # a claim judges what is due, a reader need not
        info = await self.info(scheduler, task.id)
        assert (info.status, info.crashes) == (Status.DEAD, 1)

    @pytest.mark.parametrize(("outcome", "limit"), [("retry", "max_attempts"), ("crash", "max_crashes")])
    async def test_a_dead_task_says_which_limit_it_reached(
        self, scheduler: Scheduler, backend: Backend, kind: str, outcome: Outcome, limit: str
    ) -> None:
        task = await self.held(backend, kind, max_attempts=1, max_crashes=0)
        assert (await self.info(scheduler, task.id)).reason is None
        await self.settle(backend, task, outcome, error={"type": "E"})
        info = await self.info(scheduler, task.id)
        assert info.status is Status.DEAD
        assert limit in (info.reason or "")
        assert info.error == {"type": "E"}

    async def test_crashes_do_not_lengthen_the_wait_for_a_retry(self, backend: Backend, kind: str) -> None:
        first = await self.held(backend, kind, retry=Waits(waits=[0, 3600]))
        await self.settle(backend, first, "crash")
        await self.settle(backend, await self.claim_one(backend, kind), "retry")
        assert (await self.claim_one(backend, kind)).attempt == 3

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
        assert _is_gone(beat, "taken")
        assert _is_gone(result, "taken")
        assert (await self.beat(backend, task)).verdict == "renewed"

    @pytest.mark.parametrize("outcome", ["success", "cancelled"])
    async def test_how_a_task_ended_is_why_any_token_of_it_is_gone(
        self, backend: Backend, kind: str, outcome: Outcome
    ) -> None:
        task = await self.held(backend, kind)
        await self.settle(backend, task, outcome)
        verdicts = await backend.beat([Beat(id=task.id, token=token) for token in (task.token, f"x{task.token}")])
        reason = "cancelled" if outcome == "cancelled" else "settled"
        assert all(_is_gone(verdict, reason) for verdict in verdicts)

    async def test_as_many_crashes_as_may_be_are_survived(self, backend: Backend, kind: str) -> None:
        task = await self.held(backend, kind, max_crashes=2)
        await self.settle(backend, task, "crash")
        await self.settle(backend, await self.claim_one(backend, kind), "crash")
        await self.settle(backend, await self.claim_one(backend, kind), "crash")
        assert await self.nothing_left(backend, kind)

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

    # After other tasks (SYSTEMS D8). Kinds differ, so that a service that spreads them does so here.

    async def scheduled_after(self, scheduler: Scheduler, kind: str, name: str, *others: str, **options: Any) -> str:
        """A task of a kind of its own that waits for others: its id, which is its kind too."""
        after = [f"{kind}-{other}" for other in others]
        await scheduler.schedule([NewTask(kind=f"{kind}-{name}", id=f"{kind}-{name}", after=after, **options)])
        return f"{kind}-{name}"

    async def run(self, backend: Backend, task_id: str, outcome: Outcome = "success") -> None:
        """Claim a task that is of a kind of its own, and end it so."""
        assert (await self.settle(backend, await self.claim_one(backend, task_id), outcome)).verdict == "settled"

    async def test_a_task_after_others_is_refused_where_there_are_no_dependencies(
        self, scheduler: Scheduler, backend: Backend, kind: str
    ) -> None:
        if backend.traits.dependencies:
            await self.scheduled_after(scheduler, kind, "b", "a")
            return
        with pytest.raises(Refused) as refusal:
            await scheduler.schedule([NewTask(kind=kind), NewTask(kind=kind, after=["a-1"])])
        (error,) = refusal.value.errors
        assert (error["item"], error["field"]) == (1, "after")
        assert error["detail"]
        assert await self.nothing_left(backend, kind)

    @pytest.mark.parametrize("order", ["before", "after", "together", "ended"])
    async def test_a_task_runs_after_another_in_whatever_order_they_come(
        self, scheduler: Scheduler, backend: Backend, other: Backend, kind: str, order: str
    ) -> None:
        if not backend.traits.dependencies:
            return
        first, second = NewTask(kind=f"{kind}-a", id="a" + kind), NewTask(kind=kind, id="b" + kind, after=["a" + kind])
        orders = {"before": [[first], [second]], "after": [[second], [first]], "together": [[second, first]]}
        for batch in orders.get(order, [[first]]):
            assert all(answer.created for answer in await scheduler.schedule(batch))
        if order != "ended":
            assert await self.nothing_left(backend, kind)
        await self.run(other, first.kind)
        if order == "ended":
            await scheduler.schedule([second])
        assert (await self.claim_one(backend, kind)).id == second.id

    async def test_a_task_that_waits_for_another_says_so_and_is_counted(
        self, scheduler: Scheduler, backend: Backend, kind: str
    ) -> None:
        if not backend.traits.dependencies:
            return
        waiting = await self.scheduled_after(scheduler, kind, "b", "a", "c")
        info = await self.info(scheduler, waiting)
        assert info.status is Status.NEW
        assert f"{kind}-a" in (info.reason or "")
        assert _ids((await scheduler.list(kind=waiting, status=Status.NEW)).tasks) == [waiting]
        assert (await scheduler.stats())["kinds"][waiting] == {"new": 1}

    async def test_a_chain_runs_in_its_order(self, scheduler: Scheduler, backend: Backend, kind: str) -> None:
        if not backend.traits.dependencies:
            return
        third = await self.scheduled_after(scheduler, kind, "c", "b")
        second = await self.scheduled_after(scheduler, kind, "b", "a")
        first = await self.scheduled_after(scheduler, kind, "a")
        for task_id, later in ((first, [second, third]), (second, [third]), (third, [])):
            for one in later:
                assert await self.nothing_left(backend, one)
            await self.run(backend, task_id)
        assert (await self.info(scheduler, third)).reason is None

    async def test_of_a_diamond_the_last_waits_for_both(
        self, scheduler: Scheduler, backend: Backend, kind: str
    ) -> None:
        if not backend.traits.dependencies:
            return
        last = await self.scheduled_after(scheduler, kind, "d", "b", "c")
        left = await self.scheduled_after(scheduler, kind, "b", "a")
        right = await self.scheduled_after(scheduler, kind, "c", "a")
        await self.run(backend, await self.scheduled_after(scheduler, kind, "a"))
        await self.run(backend, right)
        assert await self.nothing_left(backend, last)
        await self.run(backend, left)
        await self.run(backend, last)

    @pytest.mark.parametrize("outcome", ["fatal", "dead", "cancelled"])
    async def test_what_was_to_run_after_a_failure_is_dropped_and_so_is_what_comes_after_that(
        self, scheduler: Scheduler, backend: Backend, kind: str, outcome: str
    ) -> None:
        if not backend.traits.dependencies:
            return
        third = await self.scheduled_after(scheduler, kind, "c", "b")
        second = await self.scheduled_after(scheduler, kind, "b", "a")
        first = await self.scheduled_after(scheduler, kind, "a", max_attempts=1)
        if outcome == "cancelled":
            await scheduler.cancel([first])
        else:
            await self.run(backend, first, "fatal" if outcome == "fatal" else "retry")
        late = await self.scheduled_after(scheduler, kind, "late", "a")
        for task_id, before in ((second, first), (third, second), (late, first)):
            info = await self.info(scheduler, task_id)
            assert info.status is Status.DROPPED
            assert before in (info.reason or "")
            assert await self.nothing_left(backend, task_id)

    async def test_a_retry_of_what_others_wait_for_is_no_end(
        self, scheduler: Scheduler, backend: Backend, kind: str
    ) -> None:
        if not backend.traits.dependencies:
            return
        second = await self.scheduled_after(scheduler, kind, "b", "a")
        first = await self.scheduled_after(scheduler, kind, "a", retry=Waits(waits=[0]))
        await self.run(backend, first, "retry")
        assert await self.nothing_left(backend, second)
        assert (await self.info(scheduler, second)).status is Status.NEW
        await self.run(backend, first)
        await self.run(backend, second)

    async def test_a_task_after_others_is_scheduled_once(
        self, scheduler: Scheduler, backend: Backend, kind: str
    ) -> None:
        if not backend.traits.dependencies:
            return
        second = NewTask(kind=kind, id=kind, after=[f"{kind}-a"])
        answers = [(await scheduler.schedule([second]))[0] for _ in range(2)]
        assert [(answer.created, answer.conflict) for answer in answers] == [(True, False), (False, False)]
        await self.run(backend, await self.scheduled_after(scheduler, kind, "a"))
        await self.run(backend, kind)
        (again,) = await scheduler.schedule([second])
        assert (again.created, again.status) == (False, Status.SUCCESS)
        assert await self.nothing_left(backend, kind)

    async def test_a_task_that_waits_for_another_is_cancelled_at_once(
        self, scheduler: Scheduler, backend: Backend, kind: str
    ) -> None:
        if not backend.traits.dependencies:
            return
        second = await self.scheduled_after(scheduler, kind, "b", "a")
        (verdict,) = await scheduler.cancel([second])
        assert verdict.verdict == "cancelled"
        await self.run(backend, await self.scheduled_after(scheduler, kind, "a"))
        assert await self.nothing_left(backend, second)
        assert (await self.info(scheduler, second)).status is Status.CANCELLED

    async def test_a_task_after_others_is_not_ready_before_its_time_either(
        self, scheduler: Scheduler, backend: Backend, kind: str
    ) -> None:
        if not backend.traits.dependencies:
            return
        second = await self.scheduled_after(scheduler, kind, "b", "a", at=self.now() + timedelta(hours=1))
        await self.run(backend, await self.scheduled_after(scheduler, kind, "a"))
        assert await self.nothing_left(backend, second)
        assert (await self.info(scheduler, second)).status is Status.NEW

    # Cancelling

    async def test_a_waiting_task_is_cancelled_at_once(self, scheduler: Scheduler, backend: Backend, kind: str) -> None:
        await scheduler.schedule([NewTask(kind=kind, id=kind)])
        (verdict,) = await scheduler.cancel([kind])
        assert (verdict.id, verdict.verdict) == (kind, "cancelled")
        assert (await self.info(scheduler, kind)).status is Status.CANCELLED
        assert await self.nothing_left(backend, kind)

    async def test_a_repeated_cancel_is_answered_alike(self, scheduler: Scheduler, backend: Backend, kind: str) -> None:
        running = await self.held(backend, kind)
        await scheduler.schedule([NewTask(kind=kind, id=kind)])
        assert await scheduler.cancel([kind, running.id]) == await scheduler.cancel([kind, running.id])

    async def test_a_running_task_is_ordered_to_wind_down(
        self, scheduler: Scheduler, backend: Backend, kind: str
    ) -> None:
        task = await self.held(backend, kind)
        await self.beat(backend, task)
        (verdict,) = await scheduler.cancel([task.id])
        beat = await self.beat(backend, task)
        if backend.traits.orders:
            assert verdict.verdict == "ordered"
            assert (beat.verdict, beat.order) == ("renewed", "cancel")
            assert (await self.settle(backend, task, "cancelled")).verdict == "settled"
            assert (await self.info(scheduler, task.id)).status is Status.CANCELLED
        else:
            assert verdict.verdict != "ordered"
            assert beat.order is None

    @pytest.mark.parametrize("outcome", ["retry", "release", "crash"])
    async def test_a_cancelled_task_does_not_run_again(
        self, scheduler: Scheduler, backend: Backend, kind: str, outcome: Outcome
    ) -> None:
        task = await self.held(backend, kind, retry=Waits(waits=[0]))
        await scheduler.cancel([task.id])
        await self.settle(backend, task, outcome)
        assert (await self.info(scheduler, task.id)).status is Status.CANCELLED
        assert await self.nothing_left(backend, kind)

    async def test_a_cancelled_task_that_finishes_has_finished(
        self, scheduler: Scheduler, backend: Backend, kind: str
    ) -> None:
        task = await self.held(backend, kind)
        if backend.traits.orders:
            await scheduler.cancel([task.id])
        assert (await self.settle(backend, task)).verdict == "settled"
        assert (await self.info(scheduler, task.id)).status is Status.SUCCESS

    async def test_a_cancelled_task_whose_holder_vanishes_is_cancelled(
        self, scheduler: Scheduler, backend: Backend, kind: str
    ) -> None:
        task = await self.briefly_held(backend, kind)
        await scheduler.cancel([task.id])
        await self.expire(task)
        assert await self.nothing_left(backend, kind)
        assert (await self.info(scheduler, task.id)).status is Status.CANCELLED

    async def test_a_run_that_lasts_too_long_is_renewed_no_more(
        self, scheduler: Scheduler, backend: Backend, kind: str
    ) -> None:
        task = await self.held(backend, kind, max_runtime=2.0)
        assert (await self.beat(backend, task)).verdict == "renewed"
        await self.sleep(2.1)
        assert _is_gone(await self.beat(backend, task), "expired")
        assert await self.nothing_left(backend, kind)  # what was granted is not taken back
        assert (await self.info(scheduler, task.id)).crashes == 0

    async def test_what_has_ended_or_is_unknown_cannot_be_cancelled(
        self, scheduler: Scheduler, backend: Backend, kind: str
    ) -> None:
        task = await self.held(backend, kind)
        await self.settle(backend, task)
        verdicts = await scheduler.cancel([task.id, f"{kind}-nobody"])
        assert [verdict.id for verdict in verdicts] == [task.id, f"{kind}-nobody"]
        assert all(_is_gone(verdict) for verdict in verdicts)

    # Reading

    async def test_of_an_unknown_task_there_is_nothing(self, scheduler: Scheduler, kind: str) -> None:
        assert await scheduler.get(f"{kind}-nobody") is None

    async def test_a_listing_goes_on_where_it_ended(self, scheduler: Scheduler, kind: str) -> None:
        ids = [f"{kind}-{n}" for n in range(5)]
        for task_id in ids:
            await scheduler.schedule([NewTask(kind=kind, id=task_id)])
        found: list[str] = []
        cursor: str | None = None
        for _ in range(math.ceil(len(ids) / 2)):
            page = await scheduler.list(kind=kind, cursor=cursor, limit=2)
            found += [info.id for info in page.tasks]
            cursor = page.cursor
        assert found == ids
        assert cursor is None

    async def test_a_listing_matches_all_that_is_given(self, scheduler: Scheduler, backend: Backend, kind: str) -> None:
        await scheduler.schedule([NewTask(kind=kind, id=f"{kind}-{c}", collection=c) for c in ("a", "b")])
        blue = await scheduler.list(kind=kind, collection="b")
        new = await scheduler.list(kind=kind, status=Status.NEW)
        none = await scheduler.list(kind=kind, collection="b", status=Status.DEAD)
        assert _ids(blue.tasks) == [f"{kind}-b"]
        assert _ids(new.tasks) == [f"{kind}-a", f"{kind}-b"]
        assert none.tasks == []

    async def test_a_listing_finds_what_a_worker_holds(self, scheduler: Scheduler, backend: Backend, kind: str) -> None:
        task = await self.held(backend, kind)
        await scheduler.schedule([NewTask(kind=kind)])
        worker = (await self.info(scheduler, task.id)).worker
        assert worker
        assert _ids((await scheduler.list(kind=kind, worker=worker)).tasks) == [task.id]

    async def test_stats_count_by_kind_and_status(self, scheduler: Scheduler, backend: Backend, kind: str) -> None:
        await scheduler.schedule([NewTask(kind=kind) for _ in range(3)])
        await self.settle(backend, await self.claim_one(backend, kind))
        counts = (await scheduler.stats())["kinds"][kind]
        assert {status: count for status, count in counts.items() if count} == {"new": 2, "success": 1}


def _is_gone(verdict: Verdict, *reasons: str) -> bool:
    assert verdict.verdict == "gone"
    assert verdict.reason in (reasons or _GONE)
    return True


def _ids(tasks: Sequence[TaskInfo]) -> list[str]:
    return [task.id for task in tasks]
