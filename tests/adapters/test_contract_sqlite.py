"""`sqlite://` keeps the contract also over a file that another client serves: its requests go over a socket."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from leasekit.backend import Backend
from leasekit.server.shared import connect
from leasekit.task import Task
from leasekit.testing.contract import RedriverContract


class TestJoined(RedriverContract):
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
        (await self._owner._own._engine()).clock._is_after_gap = True  # type: ignore[attr-defined]
