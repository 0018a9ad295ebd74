"""What keeps a lease, and how it ends without."""

from leasekit.backend import Backend
from leasekit.testing.contract.ground import Ground, is_gone

__all__ = ["Beating"]


class Beating(Ground):
    """The promises of `Backend.beat`."""

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
        assert is_gone(await self.beat(backend, task), "expired", "taken", "unknown")
