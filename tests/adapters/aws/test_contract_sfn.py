"""The contract of an adapter, over the activities of Step Functions as botocore models them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from leasekit import NewTask
from leasekit.backend import Backend
from leasekit.testing.contract import BackendContract
from leasekit_sfn import connect
from leasekit_sfn.backend import task_id
from tests.adapters.aws.conftest import Aws


def arn(kind: str) -> str:
    return f"arn:aws:states:eu-central-1:123456789012:activity:{kind}"


@asynccontextmanager
async def connected(url: str, kind: str, worker: str) -> AsyncIterator[Backend]:
    arns = ",".join(arn(kind + end) for end in ("", "-a", "-b", "-other"))
    backend = connect(f"sfn://{arns}?endpoint={url}", worker=worker)
    yield backend
    await backend.aclose()


class TestSfn(BackendContract):
    late_results = False

    @pytest.fixture(autouse=True)
    def _service(self, aws: Aws) -> None:
        self.aws = aws

    @pytest.fixture
    async def backend(self, aws: Aws, kind: str) -> AsyncIterator[Backend]:
        async with connected(aws.url, kind, "contract-a") as backend:
            yield backend

    @pytest.fixture
    async def other(self, aws: Aws, kind: str) -> AsyncIterator[Backend]:
        async with connected(aws.url, kind, "contract-b") as backend:
            yield backend

    @pytest.fixture
    async def out_of_reach(self, closed_port: int, kind: str) -> AsyncIterator[Backend]:
        async with connected(f"http://127.0.0.1:{closed_port}", kind, "contract-c") as backend:
            yield backend

    async def put(self, backend: Backend, task: NewTask) -> str:
        work = self.aws.schedule(arn(task.kind), task.kind, raw=msgspec.json.encode(task.payload).decode())
        return task_id(work.token)

    async def sleep(self, seconds: float) -> None:
        self.aws.turn(seconds)
