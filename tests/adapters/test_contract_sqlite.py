"""`sqlite://` keeps the contract: the server without HTTP, over a file, and joined by another process's client."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from leasekit.backend import Backend
from leasekit.server.shared import connect
from leasekit.task import Task
from leasekit.testing.contract import SchedulerContract


class TestSqlite(SchedulerContract):
    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[Backend]:
        self._backend = backend = connect(f"sqlite:///{tmp_path}/tasks.db", worker="w1")
        yield backend
        await backend.aclose()

    async def interrupt(self, *tasks: Task) -> None:
        """As after a time in which the server did not run."""
        engine = await self._backend._own._engine()
        engine._commit._is_after_gap = True


class TestJoined(SchedulerContract):
    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[Backend]:
        self._owner = owner = connect(f"sqlite:///{tmp_path}/tasks.db", worker="owner")
        await owner.stats()
        backend = connect(f"sqlite:///{tmp_path}/tasks.db", worker="w1")
        yield backend
        await backend.aclose()
        await owner.aclose()

    async def interrupt(self, *tasks: Task) -> None:
        """As after a time in which the owner of the store did not run."""
        (await self._owner._own._engine())._commit._is_after_gap = True
