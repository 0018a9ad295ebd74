"""`sqlite://` keeps the contract also over a file that another client serves: its requests go over a socket."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from leasekit.backend import Backend
from leasekit.server import shared
from leasekit.server.engine import Engine
from leasekit.task import Task
from leasekit.testing.clock import FakeClock
from leasekit.testing.contract import RedriverContract


class TestJoined(RedriverContract):
    """The engine has a clock that the tests turn."""

    @pytest.fixture
    async def backend(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Backend]:
        self._clock = clock = FakeClock(datetime.now(UTC).timestamp())
        monkeypatch.setattr(shared, "Engine", partial(Engine, clock=clock))
        owner = shared.connect(f"sqlite:///{tmp_path}/tasks.db", worker="owner")
        await owner.stats()
        self._engine = await owner._own._engine()
        backend = shared.connect(f"sqlite:///{tmp_path}/tasks.db", worker="w1")
        yield backend
        await backend.aclose()
        await owner.aclose()

    async def sleep(self, seconds: float) -> None:
        self._clock.advance(seconds + 0.001)  # instants are rounded to microseconds
        await self._engine.tick()

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._clock(), UTC)

    async def interrupt(self, *tasks: Task) -> None:
        """As after a time in which the owner of the store did not run."""
        self._engine.clock._is_after_gap = True  # type: ignore[attr-defined]
