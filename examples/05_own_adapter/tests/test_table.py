import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from leasekit_table import TableBackend, put

from leasekit import NewTask
from leasekit.backend import Backend, effective
from leasekit.testing.contract import BackendContract


class TestTable(BackendContract):
    @pytest.fixture
    def jobs(self, tmp_path: Path) -> str:
        return str(tmp_path / "jobs.db")

    @pytest.fixture
    async def backend(self, jobs: str) -> AsyncIterator[Backend]:
        self.file = jobs
        backend = TableBackend(jobs)
        yield backend
        await backend.aclose()

    @pytest.fixture
    async def other(self, jobs: str) -> AsyncIterator[Backend]:
        other = TableBackend(jobs)
        yield other
        await other.aclose()

    async def put(self, backend: Backend, task: NewTask) -> str:
        job = uuid.uuid4().hex
        put(self.file, job, task.kind, task.payload, effective(task).claim_ttl)
        return job
