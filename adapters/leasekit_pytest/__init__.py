"""The pytest plugin: fixtures for tests of code that holds leases. Their names begin with `leasekit_`.

The plugin is a package of its own, because pytest loads plugins in every run where leasekit is installed: leasekit is
imported only when a test asks for a fixture.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from leasekit import Client
    from leasekit.testing.clock import FakeClock
    from leasekit.testing.effects import Effects
    from leasekit.testing.faults import Faulty

__all__ = ["leasekit_client", "leasekit_clock", "leasekit_effects", "leasekit_service", "leasekit_url"]


@pytest.fixture
def leasekit_clock() -> "FakeClock":
    """A clock that the test moves by hand. In a test that uses this fixture, the service goes by it."""
    from leasekit.testing.clock import FakeClock

    return FakeClock()


@pytest.fixture
def leasekit_url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an in-memory service of this test alone, which is the environment's LEASEKIT_URL meanwhile."""
    from leasekit.testing.memory import MemoryService, shared

    is_by_hand = "leasekit_clock" in request.fixturenames
    service = MemoryService(now=request.getfixturevalue("leasekit_clock")) if is_by_hand else MemoryService()
    with shared(service) as url:
        monkeypatch.setenv("LEASEKIT_URL", url)
        yield url


@pytest.fixture
def leasekit_service(leasekit_url: str) -> "Faulty":
    """The service of `leasekit_url` with faults on demand: `leasekit_service.script("beat", faults.steal)`."""
    from leasekit.registry import open_backend
    from leasekit.testing.faults import Faulty

    return Faulty(open_backend(leasekit_url, worker="test"))


@pytest.fixture
def leasekit_client(leasekit_service: "Faulty", leasekit_effects: "Effects") -> "Iterator[Client]":
    """A client of `leasekit_service` whose leases `leasekit_effects` observes; closed after the test."""
    import leasekit

    with leasekit.connect(leasekit_service, hooks=[leasekit_effects]) as client:
        yield client


@pytest.fixture
def leasekit_effects() -> "Effects":
    """A record of side effects: call `record(held)` beside each, and `assert_none_after_loss()` at the end."""
    from leasekit.testing.effects import Effects

    return Effects()
