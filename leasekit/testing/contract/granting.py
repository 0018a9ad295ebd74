"""Tests of grants: how long a grant lasts, how old it is, and that no other holder has it."""

import itertools
import threading
from contextlib import suppress
from datetime import datetime, timedelta

import anyio
import pytest

from leasekit.backend import Backend
from leasekit.errors import BackendError
from leasekit.task import Beat, Claimed, NewTask, Settlement, Task
from leasekit.testing.contract.base import ContractBase

_LEAST_DIFFERENCE = 8  # characters in which two tokens differ; a counter or a clock changes fewer


class Granting(ContractBase):
    """The promises on which the trust of a holder rests."""

    async def test_a_claim_lasts_no_less_than_it_says(self, backend: Backend, other: Backend, kind: str) -> None:
        since = self.now()
        task = await self.briefly_held(backend, kind)
        await self._lasts(backend, other, task, task.ttl, since)

    async def test_a_renewal_lasts_no_less_than_it_says(self, backend: Backend, other: Backend, kind: str) -> None:
        task = await self.briefly_held(backend, kind)
        since = self.now()
        verdict = await self.beat(backend, task)
        assert verdict.ttl is not None
        await self._lasts(backend, other, task, verdict.ttl, since)

    async def test_waited_is_never_more_than_the_claim_took(self, backend: Backend, other: Backend, kind: str) -> None:
        since = self.now()
        async with self.waiting(other, kind) as answers:
            await self.sleep(1)
            await self.put(backend, NewTask(kind=kind))
        self._check_waited_within(answers[0], since)
        await self.put(backend, NewTask(kind=kind))
        since = self.now()
        self._check_waited_within(await self.claim(backend, kind), since)

    async def test_a_waiting_claim_lets_the_event_loop_run(self, backend: Backend, other: Backend, kind: str) -> None:
        turns, ended = 0, threading.Event()
        # The loop is measured against a thread, because a busy machine holds up both.
        beside = threading.Thread(target=lambda: [ended.wait(0.01) for _ in range(50)])
        async with self.waiting(other, kind) as answers:
            beside.start()
            while beside.is_alive():
                await anyio.sleep(0.01)
                turns += 1
            has_answered = bool(answers)
            await self.put(backend, NewTask(kind=kind))
        blocks = turns < 5 or has_answered
        assert not blocks, "the claim blocks the event loop while it waits: call blocking libraries in a thread"

    async def test_each_task_goes_to_one_of_many_that_wait(self, backend: Backend, other: Backend, kind: str) -> None:
        async with self.waiting(backend, kind, claims=3) as here, self.waiting(other, kind, claims=3) as there:
            for _ in range(6):
                await self.put(backend, NewTask(kind=kind))
        got = [task.id for answer in here + there for task in answer.tasks]
        assert len(got) == 6
        assert len(set(got)) == 6, "a task was granted to two claims that were under way at the same time"

    async def test_a_token_cannot_be_guessed_from_another(self, backend: Backend, kind: str) -> None:
        tasks = [await self.held(backend, kind) for _ in range(4)]
        tokens = [task.token.replace(task.id, "") for task in tasks]
        assert min(map(len, tokens)) >= _LEAST_DIFFERENCE
        for a, b in itertools.combinations(tokens, 2):
            assert _difference(a, b) >= _LEAST_DIFFERENCE, f"tokens are alike: {a!r}, {b!r}"

    async def test_attempts_grow_with_failures(self, backend: Backend, kind: str) -> None:
        task = await self.held(backend, kind)
        for attempt in (1, 2, 3) if backend.capabilities.retries else (1,):
            assert task.attempt == attempt
            await self.settle(backend, task, "retry", retry_after=0.0)
            task = await self.claim_again(backend, task) or task

    async def test_a_release_is_counted_as_declared(self, backend: Backend, kind: str) -> None:
        task = await self.held(backend, kind)
        await self.settle(backend, task, "release")
        if again := await self.claim_again(backend, task):
            assert again.attempt == (2 if self.counts_releases else 1)

    async def test_a_retry_is_due_when_its_wait_is_over(self, backend: Backend, other: Backend, kind: str) -> None:
        task = await self.held(backend, kind)
        since = self.now()
        await self.settle(backend, task, "retry", retry_after=2.0)
        early = await self.claim(other, kind, wait=0)
        assert not early.tasks or self.now() - since >= timedelta(seconds=2)
        await self.sleep(2.1)
        assert early.tasks or not backend.capabilities.retries or await self.claim_again(other, task)

    async def test_a_service_out_of_reach_raises_backend_errors(self, out_of_reach: Backend | None, kind: str) -> None:
        if out_of_reach is None:
            return
        beats, ends = [Beat(id=kind, token=kind)], [Settlement(id=kind, token=kind, outcome="success")]
        with pytest.raises(BackendError):
            await self.claim(out_of_reach, kind)  # with a wait, because a poll may fail in a thread, after the claim
        # A service with one request per item fails item by item; an adapter may refuse a made-up receipt by itself.
        with suppress(BackendError):
            assert (await out_of_reach.beat(beats))[0].verdict in {"failed", "gone"}
        with suppress(BackendError):
            assert (await out_of_reach.settle(ends))[0].verdict in {"failed", "gone"}

    async def _lasts(self, backend: Backend, other: Backend, task: Task, ttl: float, since: datetime) -> None:
        """Check that a lease is held for all of the `ttl` seconds that its holder was told, from `since` on."""
        for n in range(1, 41 if backend.capabilities.retries else 1):  # twice as long as it should take
            await self.sleep(ttl / 20)
            if (await self.claim(other, task.kind, wait=0)).tasks:
                # A subclass may turn the clock of its service but not that of `now`: count at least the time slept.
                held = max(n * ttl / 20, (self.now() - since).total_seconds())
                # Measured from before the grant until after the next one: a busy machine only makes this longer.
                assert held >= ttl - 0.01, f"granted again after {held:g} of the {ttl:g} s that the holder was told"
                return
        await self.sleep(ttl * 0.75)
        taken = (await self.claim(other, task.kind, wait=0)).tasks
        verdict = await self.beat(backend, task)
        if self.now() - since < timedelta(seconds=ttl):  # else this machine was too slow to tell
            assert not taken, f"granted again before the {ttl:g} s were over that the holder was told"
            assert verdict.verdict == "renewed"

    def _check_waited_within(self, claimed: Claimed, since: datetime) -> None:
        waited = 0.0 if claimed.waited is None else claimed.waited
        took = (self.now() - since).total_seconds()
        assert waited <= took * 1.001, f"waited {waited:g} s in a claim that took {took:g} s"


def _difference(a: str, b: str) -> int:
    """Count the places in which two texts differ."""
    return sum(x != y for x, y in zip(a, b, strict=False)) + abs(len(a) - len(b))
