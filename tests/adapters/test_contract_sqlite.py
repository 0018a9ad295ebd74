"""`sqlite://` keeps the contract: the server without HTTP, over a file."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from leasekit.backend import Backend
from leasekit.server.embedded import connect
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
        engine = await self._backend._engine()
        engine._commit._is_after_gap = True
