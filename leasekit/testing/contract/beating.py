"""Tests of heartbeats: a lease lives with heartbeats, and expires without."""

from leasekit.backend import Backend
from leasekit.task import Beat
from leasekit.testing.contract.base import ContractBase, is_gone


class Beating(ContractBase):
    """The promises of `Backend.beat`."""

    async def test_a_beat_renews_and_says_for_how_long(self, backend: Backend, kind: str) -> None:
        verdict = await self.beat(backend, await self.held(backend, kind))
        assert verdict.verdict == "renewed"
        assert verdict.ttl
        assert verdict.ttl > 0
        assert not verdict.cancel_requested

    async def test_a_beaten_lease_outlives_its_claim(self, backend: Backend, other: Backend, kind: str) -> None:
        task = await self.briefly_held(backend, kind)
        for _ in range(4):
            await self.sleep(task.ttl / 3)
            assert (await self.beat(backend, task)).verdict == "renewed"
        assert await self.nothing_left(other, kind)

    async def test_a_beat_brings_no_end_nearer(self, backend: Backend, other: Backend, kind: str) -> None:
        """The answer to a heartbeat may be lost: then the holder relies on what the claim granted."""
        ttl = self.short_ttl
        task = await self.held(backend, kind, claim_timeout=ttl + 60, heartbeat_timeout=ttl)
        for started in (False, True):
            verdict = await self.beat(backend, task, started=started)
            assert verdict.ttl
            assert verdict.ttl <= task.ttl
        await self.sleep(ttl + 0.5)
        assert await self.nothing_left(other, kind)
        assert (await self.beat(backend, task)).verdict == "renewed"

    async def test_a_lease_lasts_for_what_a_beat_said_though_a_claim_grants_less(
        self, backend: Backend, other: Backend, kind: str
    ) -> None:
        """A heartbeat has each lease of a batch outlive a shorter `claim_timeout`, the last as well as the first."""
        ttl, count = self.short_ttl, min(12, backend.capabilities.max_batch)
        tasks = [await self.held(backend, kind, claim_timeout=ttl, heartbeat_timeout=ttl + 60) for _ in range(count)]
        verdicts = await backend.beat([Beat(id=task.id, token=task.token) for task in tasks])
        renewed = {verdict.id for verdict in verdicts if verdict.ttl and verdict.ttl > ttl + 1}
        if renewed:  # else the service has one ttl for both
            await self.sleep(ttl + 0.5)
            taken: set[str] = set()
            while more := (await self.claim(other, kind, limit=count, wait=0)).tasks:
                taken |= {task.id for task in more}
            assert not renewed & taken

    async def test_the_longest_progress_is_taken(self, backend: Backend, kind: str) -> None:
        task = await self.held(backend, kind)
        assert (
            await self.beat(backend, task, progress="x" * (backend.capabilities.max_progress - 2))
        ).verdict == "renewed"

    async def test_a_beat_renews_before_the_handler_begins(self, backend: Backend, kind: str) -> None:
        task = await self.held(backend, kind)
        assert (await self.beat(backend, task, started=False)).verdict == "renewed"

    async def test_a_lease_without_beats_expires(self, backend: Backend, other: Backend, kind: str) -> None:
        first = await self.briefly_held(backend, kind)
        await self.expire(first)
        if second := await self.claim_again(other, first):
            assert second.token != first.token

    async def test_a_beat_of_an_expired_lease_is_gone(self, backend: Backend, kind: str) -> None:
        task = await self.briefly_held(backend, kind)
        await self.expire(task)
        for started in (False, True):
            assert is_gone(await self.beat(backend, task, started=started), "expired", "taken", "unknown")

    async def test_gone_stays_gone_after_an_interruption(self, backend: Backend, kind: str) -> None:
        task = await self.briefly_held(backend, kind)
        await self.expire(task)
        assert is_gone(await self.beat(backend, task))
        await self.interrupt(task)
        assert is_gone(await self.beat(backend, task))
