"""The pytest plugin: fixtures for tests of code that holds leases. All of them begin with `leasekit_`.

A package of its own, because pytest loads plugins in every run of whoever has leasekit installed: it imports leasekit
only when a test asks for a fixture.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from leasekit import Client
    from leasekit.testing.clock import FakeClock
    from leasekit.testing.effects import Effects
    from leasekit.testing.faults import Faulty
    from leasekit.testing.proxy import Proxy

__all__ = ["leasekit_client", "leasekit_clock", "leasekit_effects", "leasekit_proxy", "leasekit_service"]


@pytest.fixture
def leasekit_clock() -> "FakeClock":
    """A clock that moves by hand. With it in a test, it is the time of `leasekit_service`."""
    from leasekit.testing.clock import FakeClock

    return FakeClock()


@pytest.fixture
def leasekit_service(request: pytest.FixtureRequest) -> "Faulty":
    """A service in memory with faults on demand: `leasekit_service.script("beat", faults.steal)`."""
    from leasekit.testing.faults import Faulty
    from leasekit.testing.memory import MemoryBackend, MemoryService

    is_by_hand = "leasekit_clock" in request.fixturenames
    service = MemoryService(now=request.getfixturevalue("leasekit_clock")) if is_by_hand else MemoryService()
    return Faulty(MemoryBackend(service, worker="test"))


@pytest.fixture
def leasekit_client(leasekit_service: "Faulty", leasekit_effects: "Effects") -> "Iterator[Client]":
    """A client of `leasekit_service`, whose leases `leasekit_effects` knows of; closed after the test."""
    import leasekit

    with leasekit.connect(leasekit_service, hooks=[leasekit_effects]) as client:
        yield client


@pytest.fixture
def leasekit_effects(tmp_path: Path) -> "Iterator[Effects]":
    """Side effects: `record(held)` beside each, and `assert_none_after_loss()` at the end. Kept in `effects.jsonl`."""
    from leasekit.testing.effects import Effects
    from leasekit.testing.history import Log

    with Log(tmp_path / "effects.jsonl", who="test") as log:
        yield Effects(log)


@pytest.fixture
def leasekit_proxy() -> "Iterator[Callable[[str], Proxy]]":
    """`leasekit_proxy("http://127.0.0.1:8077")` is a proxy with faults before that service, until the test is over."""
    from leasekit.testing.proxy import Proxy

    with ExitStack() as opened:
        yield lambda target: opened.enter_context(Proxy(target))
