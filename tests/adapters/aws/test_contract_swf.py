"""The contract of an adapter, over SWF as botocore models it. (moto's SWF is in `test_swf_moto`.)"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from leasekit import NewTask
from leasekit.backend import Backend
from leasekit.testing.contract import BackendContract
from leasekit_swf import connect
from leasekit_swf.backend import task_id
from tests.adapters.aws.conftest import Aws


@asynccontextmanager
async def connected(url: str, worker: str) -> AsyncIterator[Backend]:
    backend = connect(f"swf://media/render?endpoint={url}", worker=worker)
    yield backend
    await backend.aclose()


class TestSwf(BackendContract):
    late_results = False
    max_payload = 32768

    @pytest.fixture(autouse=True)
    def _service(self, aws: Aws) -> None:
        self.aws = aws

    @pytest.fixture
    async def backend(self, aws: Aws) -> AsyncIterator[Backend]:
        async with connected(aws.url, "contract-a") as backend:
            yield backend

    @pytest.fixture
    async def other(self, aws: Aws) -> AsyncIterator[Backend]:
        async with connected(aws.url, "contract-b") as backend:
            yield backend

    @pytest.fixture
    async def out_of_reach(self, closed_port: int) -> AsyncIterator[Backend]:
        async with connected(f"http://127.0.0.1:{closed_port}", "contract-c") as backend:
            yield backend

    async def put(self, backend: Backend, task: NewTask) -> str:
        work = self.aws.schedule("render", task.kind, raw=msgspec.json.encode(task.payload).decode())
        return task_id(work.workflow, work.run, work.activity)

    async def sleep(self, seconds: float) -> None:
        self.aws.turn(seconds)
