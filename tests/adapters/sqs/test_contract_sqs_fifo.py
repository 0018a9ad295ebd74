"""The contract of an adapter, over a queue that keeps order, as moto plays it."""

import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from types_boto3_sqs import SQSClient

from leasekit.backend import Backend
from leasekit.task import NewTask, effective
from leasekit.testing.contract import BackendContract
from leasekit_aws.boto_clients import BotoClients
from leasekit_sqs import Address, SqsBackend
from tests.adapters.sqs.conftest import Ahead


class TestFifoQueue(BackendContract):
    short_ttl = 3.0
    counts_releases = True

    @pytest.fixture
    def queue(self, sqs: SQSClient) -> str:
        name = f"q-{uuid.uuid4().hex[:12]}.fifo"
        sqs.create_queue(QueueName=name, Attributes={"FifoQueue": "true"})
        return name

    @pytest.fixture
    async def backend(self, queue: str, clients: BotoClients, ahead: Ahead) -> AsyncIterator[Backend]:
        self._ahead = ahead
        backend = SqsBackend(Address(queue=queue), clients=clients, clock=ahead)
        yield backend
        await backend.aclose()

    @pytest.fixture
    async def other(self, queue: str, clients: BotoClients, ahead: Ahead) -> AsyncIterator[Backend]:
        backend = SqsBackend(Address(queue=queue), clients=clients, clock=ahead)
        yield backend
        await backend.aclose()

    async def put(self, backend: Backend, task: NewTask) -> str:
        assert isinstance(backend, SqsBackend)
        object.__setattr__(backend.address, "ttl", int(effective(task).claim_ttl))  # who receives decides
        (answer,) = await backend.schedule([NewTask(kind=task.kind, payload=task.payload)])
        assert answer.created
        return answer.id

    async def sleep(self, seconds: float) -> None:
        self._ahead.seconds += seconds

    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self._ahead.seconds)
