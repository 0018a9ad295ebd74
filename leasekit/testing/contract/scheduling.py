"""Tests of scheduling: which tasks are accepted, how often, and when they are ready."""

from datetime import timedelta
from typing import Any

import pytest

from leasekit.errors import Refused
from leasekit.task import Beat, NewTask, Settlement, Status, Task
from leasekit.testing.contract.base import SchedulerBase, Service


class Scheduling(SchedulerBase):
    """The promises of `Scheduler.schedule`, except on tasks that wait for others."""

    async def test_scheduling_answers_in_order(self, backend: Service, kind: str) -> None:
        ids = [f"{kind}-{n}" for n in range(5)]
        answers = await backend.schedule([NewTask(kind=kind, id=task_id) for task_id in ids])
        assert [answer.id for answer in answers] == ids
        assert all(answer.created and not answer.conflict and answer.status is Status.NEW for answer in answers)

    async def test_a_task_without_id_gets_one_of_its_own(self, backend: Service, kind: str) -> None:
        first, second = await backend.schedule([NewTask(kind=kind), NewTask(kind=kind)])
        assert first.id
        assert first.id != second.id

    async def test_the_same_id_makes_no_second_task(self, backend: Service, kind: str) -> None:
        task = NewTask(kind=kind, id=kind, payload={"a": 1, "b": [2]})
        await backend.schedule([task])
        again, within = await backend.schedule([task, task])
        for answer in (again, within):
            assert (answer.id, answer.created, answer.conflict) == (kind, False, False)
        assert len((await self.claim(backend, kind, limit=5)).tasks) == 1

    async def test_scheduling_again_returns_the_status(self, backend: Service, kind: str) -> None:
        await self.settle(backend, await self.held(backend, kind, id=kind))
        (answer,) = await backend.schedule([NewTask(kind=kind, id=kind)])
        assert (answer.created, answer.status) == (False, Status.SUCCESS)

    async def test_the_same_id_with_another_payload_is_a_conflict(self, backend: Service, kind: str) -> None:
        await backend.schedule([NewTask(kind=kind, id=kind, payload=1)])
        payload, of_kind = await backend.schedule(
            [NewTask(kind=kind, id=kind, payload=2), NewTask(kind=kind + "-b", id=kind, payload=1)]
        )
        assert (payload.created, payload.conflict) == (False, True)
        assert (of_kind.created, of_kind.conflict) == (False, True)
        info = await self.info(backend, kind)
        assert (info.kind, info.payload) == (kind, 1)

    async def test_encoded_payloads_of_one_digest_are_the_same(self, backend: Service, kind: str) -> None:
        first, other, clear = (
            {"$codec": "a", "data": "eA==", "digest": "d1"},
            {"$codec": "a", "data": "eA==", "digest": "d2"},
            {"clear": True},
        )
        again = {"digest": "d1", "data": "eQ==", "$codec": "b"}  # another nonce, after another key was taken into use
        await backend.schedule([NewTask(kind=kind, id=kind, payload=first)])
        answers = await backend.schedule(
            [NewTask(kind=kind, id=kind, payload=it) for it in (first, again, other, clear)]
        )
        assert [(answer.created, answer.conflict) for answer in answers] == [
            (False, False), (False, False), (False, True), (False, True),
        ]  # fmt: skip
        assert (await self.info(backend, kind)).payload == first

    async def test_encoded_payloads_without_a_digest_are_compared_as_they_are(
        self, backend: Service, kind: str
    ) -> None:
        await backend.schedule([NewTask(kind=kind, id=kind, payload={"$codec": "a", "data": "eA=="})])
        same, other = await backend.schedule(
            [NewTask(kind=kind, id=kind, payload={"$codec": "a", "data": data}) for data in ("eA==", "eQ==")]
        )
        assert (same.conflict, other.conflict) == (False, True)

    async def test_an_id_stands_for_one_task_though_a_batch_gives_it_to_two_kinds(
        self, backend: Service, kind: str
    ) -> None:
        first, second = await backend.schedule([NewTask(kind=kind, id=kind), NewTask(kind=kind + "-b", id=kind)])
        assert (first.created, first.conflict) == (True, False)
        assert (second.id, second.created, second.conflict) == (kind, False, True)
        assert (await self.info(backend, kind)).kind == kind
        assert await self.nothing_left(backend, kind + "-b")

    async def test_a_dedupe_key_makes_one_task_even_when_it_ended(self, backend: Service, kind: str) -> None:
        (first,) = await backend.schedule([NewTask(kind=kind, dedupe_key="key / ü")])
        (second,) = await backend.schedule([NewTask(kind=kind, dedupe_key="key / ü", payload=2)])
        await self.settle(backend, await self.claim_one(backend, kind))
        (third,) = await backend.schedule([NewTask(kind=kind, dedupe_key="key / ü")])
        assert (first.created, second.created, third.created) == (True, False, False)
        assert first.id == second.id == third.id
        assert await self.nothing_left(backend, kind)

    async def test_a_dedupe_key_counts_for_its_kind(self, backend: Service, kind: str) -> None:
        answers = await backend.schedule([NewTask(kind=kind + end, dedupe_key="k") for end in ("-a", "-b")])
        assert [answer.created for answer in answers] == [True, True]

    async def test_a_dedupe_key_counts_for_its_window(self, backend: Service, kind: str) -> None:
        task = NewTask(kind=kind, dedupe_key="k", dedupe_window=1.0)
        (first,) = await backend.schedule([task])
        await self.sleep(1.1)
        (second,) = await backend.schedule([task])
        assert second.created
        assert second.id != first.id

    async def test_a_later_task_is_not_ready_before_its_time(self, backend: Service, kind: str) -> None:
        await backend.schedule([NewTask(kind=kind, at=self.now() + timedelta(days=1))])
        assert await self.nothing_left(backend, kind)

    async def test_a_delay_counts_from_when_the_service_accepts_the_task(self, backend: Service, kind: str) -> None:
        before = self.now() - timedelta(milliseconds=1)  # services may round
        await backend.schedule([NewTask(kind=kind, id=kind, delay=86_400)])
        after = self.now() + timedelta(milliseconds=1)
        info = await backend.get(kind)
        assert info is not None
        assert before <= info.at - timedelta(days=1) <= after
        assert await self.nothing_left(backend, kind)

    @pytest.mark.parametrize("field", ["at", "delay"])
    async def test_a_waiting_claim_gets_a_task_when_it_is_due(self, backend: Service, kind: str, field: str) -> None:
        due = NewTask(kind=kind, payload="due", delay=1.0)
        if field == "at":
            due = NewTask(kind=kind, payload="due", at=self.now() + timedelta(seconds=1))
        await backend.schedule([due])
        async with self.waiting(backend, kind) as answers:
            await self.sleep(1)
        assert [task.payload for task in answers[0].tasks] == ["due"]

    async def test_the_most_urgent_goes_first(self, backend: Service, kind: str) -> None:
        await backend.schedule([NewTask(kind=kind, priority=p, payload=p) for p in (3, 0, 4, 1, 2)])
        got = [(await self.claim_one(backend, kind)).priority for _ in range(5)]
        assert got == [0, 1, 2, 3, 4]

    async def test_of_the_equally_urgent_the_oldest_goes_first(self, backend: Service, kind: str) -> None:
        for n in range(4):
            await backend.schedule([NewTask(kind=kind, payload=n)])
            await self.sleep(0.01)  # services order by the millisecond
        assert [(await self.claim_one(backend, kind)).payload for _ in range(4)] == [0, 1, 2, 3]

    async def test_a_task_carries_what_was_given(self, backend: Service, kind: str) -> None:
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        task = await self.held(backend, kind, collection="blue", priority=1, traceparent=trace)
        assert (task.collection, task.priority, task.traceparent) == ("blue", 1, trace)

    async def test_claims_and_beats_grant_what_the_task_says(self, backend: Service, kind: str) -> None:
        options = [{"claim_timeout": 120.0 + n, "heartbeat_timeout": 60.0 + n} for n in range(3)]
        tasks = [await self.held(backend, kind, **option) for option in options]
        beats = await backend.beat([Beat(id=task.id, token=task.token) for task in tasks])
        assert [task.ttl for task in tasks] == [120, 121, 122]
        assert [beat.ttl for beat in beats] == [60, 61, 62]

    async def test_a_claim_grants_what_a_beat_does_where_nothing_else_is_said(
        self, backend: Service, kind: str
    ) -> None:
        options: list[dict[str, Any]] = [{"heartbeat_timeout": 60.0}, {"claim_timeout": 60.0}, {}]
        tasks = [await self.held(backend, kind, **option) for option in options]
        beats = await backend.beat([Beat(id=task.id, token=task.token) for task in tasks])
        assert [task.ttl for task in tasks] == [60, 60, 300]
        assert [beat.ttl for beat in beats] == [60, 300, 300]

    async def test_a_batch_with_one_bad_task_is_refused_whole(self, backend: Service, kind: str) -> None:
        with pytest.raises(Refused) as refusal:
            await backend.schedule([NewTask(kind=kind), NewTask(kind=kind, priority=9)])
        assert [(error["item"], error["field"]) for error in refusal.value.errors] == [(1, "priority")]
        assert await self.nothing_left(backend, kind)

    async def test_a_payload_out_of_bounds_is_refused(self, backend: Service, kind: str) -> None:
        with pytest.raises(Refused):
            await backend.schedule([NewTask(kind=kind, payload="x" * (1024 * 1024 + 1))])

    async def test_empty_schedules_and_cancels_answer_empty(self, backend: Service) -> None:
        assert await backend.schedule([]) == []
        assert await backend.cancel([]) == []

    async def test_the_largest_batch_goes_through_a_whole_life(self, backend: Service, kind: str) -> None:
        count = backend.capabilities.max_batch
        answers = await backend.schedule([NewTask(kind=kind, payload=n) for n in range(count)])
        tasks: list[Task] = []
        while len(tasks) < count:
            more = (await self.claim(backend, kind, limit=backend.capabilities.max_claim)).tasks
            assert more
            tasks += more
        assert {task.id for task in tasks} == {answer.id for answer in answers}
        beats = await backend.beat([Beat(id=task.id, token=task.token) for task in tasks])
        assert {verdict.verdict for verdict in beats} == {"renewed"}
        ends = await backend.settle([Settlement(id=t.id, token=t.token, outcome="success") for t in tasks])
        assert [(end.id, end.verdict) for end in ends] == [(task.id, "settled") for task in tasks]
