"""What the tests of the driver share: a service in memory whose time and faults are decided by hand."""

from random import Random

import pytest

from leasekit.testing.clock import FakeClock
from leasekit.testing.faults import Faulty
from leasekit.testing.memory import MemoryBackend, MemoryService


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # the driver's own loop is nothing else


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000)


@pytest.fixture
def service(clock: FakeClock) -> MemoryService:
    return MemoryService(now=clock, random=Random(1))


@pytest.fixture
def faulty(service: MemoryService, clock: FakeClock) -> Faulty:
    return Faulty(MemoryBackend(service, worker="w"), sleep=clock.sleep)
