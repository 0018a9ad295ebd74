"""What the tests of the test kit share."""

from random import Random

import pytest

from leasekit.testing.clock import FakeClock
from leasekit.testing.memory import MemoryBackend, MemoryService

pytest.register_assert_rewrite("leasekit.testing.contract")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def service(clock: FakeClock) -> MemoryService:
    return MemoryService(now=clock, random=Random(1))


@pytest.fixture
def memory(service: MemoryService) -> MemoryBackend:
    return MemoryBackend(service, worker="w1")
