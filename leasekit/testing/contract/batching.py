"""Tests of batches: a batch is answered item by item, in order."""

from leasekit.backend import Backend
from leasekit.task import Beat, Settlement
from leasekit.testing.contract.base import ContractBase


class Batching(ContractBase):
    """The promises of `Backend.beat` and `Backend.settle` for batches."""

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

    async def test_each_progress_of_a_batch_goes_to_its_own_task(self, backend: Backend, kind: str) -> None:
        tasks = [await self.held(backend, kind) for _ in range(3)]
        if not (backend.capabilities.progress and backend.capabilities.retries):
            return
        await backend.beat([Beat(id=task.id, token=task.token, progress=[n]) for n, task in enumerate(tasks)])
        for task in tasks:
            await self.settle(backend, task, "release")
        again = [await self.claim_one(backend, kind) for _ in tasks]
        assert {task.id: task.progress for task in again} == {task.id: [n] for n, task in enumerate(tasks)}

    async def test_empty_batches_answer_empty(self, backend: Backend) -> None:
        assert await backend.beat([]) == []
        assert await backend.settle([]) == []

    async def test_the_largest_batch_is_taken(self, backend: Backend, kind: str) -> None:
        task = await self.held(backend, kind)
        strangers = [Beat(id=f"nobody-{n}", token=task.token) for n in range(backend.capabilities.max_batch - 1)]
        verdicts = await backend.beat([*strangers, Beat(id=task.id, token=task.token)])
        assert len(verdicts) == backend.capabilities.max_batch
        assert verdicts[-1].verdict == "renewed"
        assert {verdict.verdict for verdict in verdicts[:-1]} <= {"gone"}
