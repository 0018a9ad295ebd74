"""The contract of an adapter, over a standard queue, as moto plays it."""

from collections.abc import AsyncIterator
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest

from leasekit.backend import Backend
from leasekit.task import NewTask, effective
from leasekit.testing.contract import BackendContract
from leasekit_aws.boto_clients import BotoClients
from leasekit_sqs import Address, SqsBackend
from tests.adapters.sqs.conftest import Ahead


class TestStandardQueue(BackendContract):
    counts_releases = True  # how often a message was received is the only count that SQS keeps
    short_ttl = 3.0  # the clock goes on by itself too: on a busy machine a beat may be late

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

    @pytest.fixture
    async def out_of_reach(self, closed_port: int) -> AsyncIterator[Backend]:
        with closing(BotoClients("sqs", region="eu-west-1", endpoint=f"http://127.0.0.1:{closed_port}")) as clients:
            backend = SqsBackend(Address(queue="q"), clients=clients)
            yield backend
            await backend.aclose()

    async def put(self, backend: Backend, task: NewTask) -> str:
        assert isinstance(backend, SqsBackend)
        # Who receives decides how long a lease lasts, and these tests have it from the task.
        object.__setattr__(backend.address, "ttl", int(effective(task).claim_ttl))
        (answer,) = await backend.schedule([NewTask(kind=task.kind, payload=task.payload)])
        assert answer.created
        return answer.id

    async def sleep(self, seconds: float) -> None:
        self._ahead.seconds += seconds

    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self._ahead.seconds)
