"""Tests of settling: how a run ends, what is refused afterwards, and what the next holder gets."""

from typing import Any, Literal

import pytest

from leasekit.backend import Backend
from leasekit.errors import Refused
from leasekit.task import Beat, Outcome, Settlement, Task
from leasekit.testing.contract.base import ContractBase, is_gone

_LAST: tuple[Outcome, ...] = ("success", "fatal", "cancelled")  # after which no run follows
_OUTCOMES: tuple[Outcome, ...] = ("release", "retry", "crash", "cancelled", "fatal", "success")


class Settling(ContractBase):
    """The promises of `Backend.settle`."""

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
        assert is_gone(await self.settle(backend, task, "fatal"), "settled", "unknown")

    @pytest.mark.parametrize("fits", [True, False])
    async def test_a_result_has_as_many_bytes_as_the_service_says_and_one_more_is_refused(
        self, backend: Backend, kind: str, *, fits: bool
    ) -> None:
        most = backend.capabilities.max_result
        task = await self.held(backend, kind)
        result = "x" * (2_000_000 if most is None else most - 2 + (not fits))
        if fits or most is None:
            assert (await self.settle(backend, task, result=result)).verdict == "settled"
            return
        with pytest.raises(Refused) as refusal:
            await self.settle(backend, task, result=result)
        assert [(error["item"], error["field"]) for error in refusal.value.errors] == [(0, "result")]
        assert (await self.beat(backend, task)).verdict == "renewed"  # nothing was applied
        assert (await self.settle(backend, task, "fatal", error={"type": "Refused"})).verdict == "settled"

    async def test_results_that_are_too_large_together_are_settled_all_the_same(
        self, backend: Backend, kind: str
    ) -> None:
        tasks = [await self.held(backend, kind) for _ in range(10)]
        result = "x" * (min(backend.capabilities.max_result or 900_000, 900_000) - 2)
        ends = [Settlement(id=task.id, token=task.token, outcome="success", result=result) for task in tasks]
        size = backend.capabilities.max_batch
        verdicts = [v for n in range(0, len(ends), size) for v in await backend.settle(ends[n : n + size])]
        assert [(verdict.id, verdict.verdict) for verdict in verdicts] == [(task.id, "settled") for task in tasks]

    async def test_a_beat_after_the_end_is_gone(self, backend: Backend, kind: str) -> None:
        task = await self.held(backend, kind)
        await self.settle(backend, task)
        assert is_gone(await self.beat(backend, task), "settled", "unknown")

    async def test_a_beat_after_giving_back_does_not_take_it_again(
        self, backend: Backend, other: Backend, kind: str
    ) -> None:
        task = await self.held(backend, kind)
        await self.settle(backend, task, "release")
        assert is_gone(await self.beat(backend, task))
        await self.claim_again(other, task)

    async def test_a_result_that_comes_late_is_not_thrown_away(self, backend: Backend, kind: str) -> None:
        held: dict[Outcome, Task] = {outcome: await self.briefly_held(backend, kind) for outcome in _LAST}
        await self.expire(*held.values())
        for outcome, task in held.items():
            verdicts = [await self.settle(backend, task, outcome) for _ in range(2)]
            if self.late_results:
                assert [verdict.verdict for verdict in verdicts] == ["settled"] * 2, outcome
                assert is_gone(await self.settle(backend, task, "crash"), "settled", "cancelled", "unknown")
            else:
                assert all(is_gone(verdict) for verdict in verdicts)
        assert not self.late_results or await self.nothing_left(backend, kind)

    async def test_a_result_that_comes_late_is_refused_where_another_has_the_task(
        self, backend: Backend, other: Backend, kind: str
    ) -> None:
        late = await self.briefly_held(backend, kind)
        await self.expire(late)
        current = await self.claim_again(other, late)
        if current is None or not backend.capabilities.refuses_stale:
            return
        assert is_gone(await self.settle(backend, late, result="late"))
        assert (await self.beat(other, current)).verdict == "renewed"
        assert (await self.settle(other, current, result="in time")).verdict == "settled"
        assert is_gone(await self.settle(backend, late, result="later"))

    async def test_stale_writes_are_refused(self, backend: Backend, other: Backend, kind: str) -> None:
        first = await self.briefly_held(backend, kind)
        await self.expire(first)
        second = await self.claim_again(other, first)
        verdicts = [
            await self.beat(backend, first),
            await self.beat(backend, first, started=False, progress="stale"),
            await self.settle(backend, first),
        ]
        if not backend.capabilities.refuses_stale:
            assert {verdict.verdict for verdict in verdicts} != {"gone"}, "all are gone: declare refuses_stale"
            return
        assert all(is_gone(verdict) for verdict in verdicts[:2])
        if second is not None:
            assert is_gone(verdicts[2])
            await self._no_stale_result_counts(backend, other, first, second)

    async def test_stale_writes_are_refused_beside_fresh_ones(
        self, backend: Backend, other: Backend, kind: str
    ) -> None:
        first = await self.held(backend, kind)
        await self.settle(backend, first, "release")
        second = await self.claim_again(other, first)
        if second is None or not backend.capabilities.refuses_stale:
            return
        runs = [first, second, first]
        beats = await other.beat([Beat(id=run.id, token=run.token) for run in runs])
        ends = await other.settle([Settlement(id=run.id, token=run.token, outcome="success") for run in runs])
        assert [verdict.verdict for verdict in beats] == ["gone", "renewed", "gone"]
        assert [verdict.verdict for verdict in ends] == ["gone", "settled", "gone"]

    async def test_tasks_that_share_an_id_are_told_apart_by_their_tokens(self, backend: Backend, kind: str) -> None:
        """Where ids do not name tasks, one call may hold several tasks of an id."""
        if backend.capabilities.unique_ids:
            return
        task = await self.held(backend, kind)
        tokens = ["of no claim", task.token]
        beats = await backend.beat([Beat(id=task.id, token=token) for token in tokens])
        ends = await backend.settle([Settlement(id=task.id, token=token, outcome="success") for token in tokens])
        assert [verdict.verdict for verdict in beats] == ["gone", "renewed"]
        assert [verdict.verdict for verdict in ends] == ["gone", "settled"]

    async def test_a_beat_and_a_result_of_an_unknown_task_are_gone(self, backend: Backend, kind: str) -> None:
        task = await self.held(backend, kind)
        await self.settle(backend, task)
        (beat,) = await backend.beat([Beat(id="nobody", token=task.token)])
        (result,) = await backend.settle([Settlement(id="nobody", token=task.token, outcome="success")])
        assert is_gone(beat)
        assert is_gone(result)

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
            assert again.progress == ({"page": 7, "né": [None]} if backend.capabilities.progress else None)

    @pytest.mark.parametrize("way", ["beat", "batch", "settle", "late"])
    async def test_progress_that_is_overtaken_does_not_replace_newer(
        self, backend: Backend, other: Backend, kind: str, way: Literal["beat", "batch", "settle", "late"]
    ) -> None:
        """A heartbeat may arrive after the next one, and a process that settles for a dead holder may know less.

        Numbers begin anew with each claim; a checkpoint without a number is always kept.
        """
        task = await (self.briefly_held if way == "late" else self.held)(backend, kind)
        newer, older = (Beat(id=task.id, token=task.token, progress=[number], progress_seq=number) for number in (2, 1))
        beats = [[newer, older]] if way == "batch" else [[newer], [older]] if way == "beat" else [[newer]]
        verdicts = [verdict for batch in beats for verdict in await backend.beat(batch)]
        assert {verdict.verdict for verdict in verdicts} == {"renewed"}, "an old beat renews as any other"
        if way == "late":
            await self.expire(task)
        last = {} if way in ("beat", "batch") else {"progress": [1], "progress_seq": 1}
        await self.settle(backend, task, "release", **last)
        if (second := await self.claim_again(other, task)) is None or not backend.capabilities.progress:
            return
        assert second.progress == [2]
        await self.beat(other, second, progress=[3], progress_seq=1)
        await self.settle(other, second, "release")
        if third := await self.claim_again(backend, task):
            assert third.progress == [3]
            await self.beat(backend, third, progress=[5], progress_seq=9)
            await self.settle(backend, third, "release", progress=[4])
        if fourth := await self.claim_again(other, task):
            assert fourth.progress == [4]

    @pytest.mark.parametrize("together", [True, False])
    async def test_progress_without_a_number_is_kept_though_an_overtaken_beat_comes_after_it(
        self, backend: Backend, other: Backend, kind: str, *, together: bool
    ) -> None:
        task = await self.held(backend, kind)
        await self.beat(backend, task, progress=[5], progress_seq=5)
        beats = [Beat(id=task.id, token=task.token, progress=[number], progress_seq=number) for number in (None, 3)]
        for batch in [beats] if together else [[beat] for beat in beats]:
            await backend.beat(batch)
        await self.settle(backend, task, "release")
        if (second := await self.claim_again(other, task)) and backend.capabilities.progress:
            assert second.progress == [None]

    async def test_progress_is_kept_whatever_it_is_and_however_it_came(
        self, backend: Backend, other: Backend, kind: str
    ) -> None:
        holder = backend
        task: Task | None = await self.held(backend, kind)
        values: list[Any] = ["", 0, [], False]
        for way, value in zip(["unstarted", "started", "release", "retry"], values, strict=True):
            if task is None:
                return
            assert (await self.beat(holder, task, progress="earlier")).verdict == "renewed"
            if "started" in way:
                await self.beat(holder, task, started=way == "started", progress=value)
            last = {} if "started" in way else {"progress": value}
            retry: Outcome = "retry" if way == "retry" else "release"
            assert (await self.settle(holder, task, retry, retry_after=0.0, **last)).verdict == "settled"
            holder = other if holder is backend else backend
            task = await self.claim_again(holder, task)
            if task is not None and backend.capabilities.progress:
                assert task.progress == value, f"lost or changed: progress {value!r}, {way}"
                assert type(task.progress) is type(value)

    async def test_progress_outlives_a_holder_that_vanished(self, backend: Backend, other: Backend, kind: str) -> None:
        task = await self.briefly_held(backend, kind)
        await self.beat(backend, task, progress=[1])
        await self.expire(task)
        if again := await self.claim_again(other, task):
            assert again.progress == ([1] if backend.capabilities.progress else None)

    async def _no_stale_result_counts(self, backend: Backend, other: Backend, first: Task, second: Task) -> None:
        """Check that no result of the first holder ends the run of the second, nor leaves anything to the third."""
        for outcome in _OUTCOMES:
            assert is_gone(await self.settle(backend, first, outcome, progress="stale")), outcome
            # This also renews the second lease, however long the loop takes.
            assert (await self.beat(other, second)).verdict == "renewed", f"ended by the {outcome} of another"
        assert await self.nothing_left(backend, first.kind)
        await self.settle(other, second, "release")
        third = await self.claim_again(backend, second)
        assert third is not None
        assert third.progress is None
        assert (await self.settle(backend, third)).verdict == "settled"
