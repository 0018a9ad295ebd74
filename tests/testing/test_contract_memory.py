"""`memory://` keeps the contract, on a clock that nobody waits for."""

from datetime import datetime

import pytest

from leasekit.testing.clock import FakeClock
from leasekit.testing.contract import DeadLettersContract
from leasekit.testing.memory import MemoryBackend, MemoryService


class TestMemory(DeadLettersContract):
    @pytest.fixture(autouse=True)
    def _turn(self, clock: FakeClock) -> None:
        self.clock = clock

    @pytest.fixture
    async def backend(self, service: MemoryService) -> MemoryBackend:
        return MemoryBackend(service, worker="w1")

    @pytest.fixture
    async def other(self, service: MemoryService) -> MemoryBackend:
        return MemoryBackend(service, worker="w2")

    async def sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def now(self) -> datetime:
        return self.clock.later(0)
