"""How a run ends, what is refused afterwards, and what the next holder gets."""

from typing import Any, Literal

import pytest

from leasekit.backend import Backend
from leasekit.task import Beat, Outcome, Settlement
from leasekit.testing.contract.ground import Ground, is_gone

__all__ = ["Settling"]


class Settling(Ground):
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
        task = await self.briefly_held(backend, kind)
        await self.expire(task)
        verdict = await self.settle(backend, task, result="late")
        if self.late_results:
            assert verdict.verdict == "settled"
            assert await self.nothing_left(backend, kind)
        else:
            assert is_gone(verdict)

    async def test_stale_writes_are_refused(self, backend: Backend, other: Backend, kind: str) -> None:
        first = await self.briefly_held(backend, kind)
        await self.expire(first)
        second = await self.claim_again(other, first)
        verdicts = [await self.beat(backend, first), await self.settle(backend, first)]
        if backend.traits.refuses_stale:
            assert second is None or all(is_gone(verdict) for verdict in verdicts)
            assert is_gone(verdicts[0])
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
            assert again.progress == ({"page": 7, "né": [None]} if backend.traits.progress else None)

    async def test_progress_outlives_a_holder_that_vanished(self, backend: Backend, other: Backend, kind: str) -> None:
        task = await self.briefly_held(backend, kind)
        await self.beat(backend, task, progress=[1])
        await self.expire(task)
        if again := await self.claim_again(other, task):
            assert again.progress == ([1] if backend.traits.progress else None)
