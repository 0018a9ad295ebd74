"""What the tests of the harness share."""

import pytest

from leasekit.testing.memory import MemoryBackend, MemoryService

pytest.register_assert_rewrite("leasekit.testing.contract")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def memory(service: MemoryService) -> MemoryBackend:
    return MemoryBackend(service, worker="w1")
