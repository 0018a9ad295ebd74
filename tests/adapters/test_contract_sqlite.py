"""`sqlite://` keeps the contract: the server without HTTP, over a file."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from leasekit.backend import Backend
from leasekit.server.engine import connect
from leasekit.testing.contract import SchedulerContract


class TestSqlite(SchedulerContract):
    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[Backend]:
        backend = connect(f"sqlite:///{tmp_path}/tasks.db", worker="w1")
        yield backend
        await backend.aclose()
