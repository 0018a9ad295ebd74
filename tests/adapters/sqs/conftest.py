"""SQS as moto plays it, over real HTTP, and credentials that are made up."""

import functools
import logging
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

import boto3
import pytest
from moto.core.utils import unix_time, unix_time_millis
from moto.moto_server.werkzeug_app import DomainDispatcherApplication as Dispatcher
from moto.server import ThreadedMotoServer
from moto.sqs.models import Queue
from types_boto3_sqs import SQSClient

import leasekit_sqs
from leasekit_aws.boto_clients import BotoClients
from leasekit_sqs import Address, SqsBackend
from leasekit_sqs.backend import boot_time
from tests.adapters.botocore_models import read_once as read_once
from tests.adapters.sqs.fake import Fake

pytest.register_assert_rewrite("leasekit.testing.contract")

REGION = "eu-west-1"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "made-up",
    "AWS_SECRET_ACCESS_KEY": "canary-of-a-secret",
    "AWS_DEFAULT_REGION": REGION,
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def one_change_at_a_time() -> None:
    """Have moto delete messages of a queue one after the other: of two deletions at once, one would be lost."""
    delete = Queue.delete_message

    def delete_alone(self: Queue, receipt_handle: str) -> None:
        with self._messages_lock:
            delete(self, receipt_handle)

    Queue.delete_message = delete_alone  # type: ignore[method-assign]


def find_services_once() -> None:
    """Spare moto from listing its folder, and from trying the patterns of all services, for each request."""
    Dispatcher.get_backend_for_host = functools.cache(Dispatcher.get_backend_for_host)  # type: ignore[method-assign]


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    one_change_at_a_time()
    find_services_once()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()
    if server._server is not None:
        server._server.server_close()  # moto leaves its socket open


@pytest.fixture(autouse=True)
def made_up_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)


@pytest.fixture(scope="session")
def sqs(moto: str) -> Iterator[SQSClient]:
    """boto3's own client of the service."""
    session = boto3.session.Session(
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        region_name=REGION,
    )
    client = session.client("sqs", endpoint_url=moto)
    yield client
    client.close()


@pytest.fixture(scope="session")
def clients(moto: str) -> Iterator[BotoClients]:
    """Those of all backends: boto3 takes a tenth of a second and more to make one. Made by the first call."""
    clients = BotoClients("sqs", region=REGION, endpoint=moto)
    yield clients
    clients.close()


@pytest.fixture
def queue(sqs: SQSClient) -> str:
    """The name of a queue that was made for this test."""
    name = f"q-{uuid.uuid4().hex[:12]}"
    sqs.create_queue(QueueName=name)
    return name


class Ahead:
    """By how much the clocks of moto and of a backend are ahead of the real one."""

    seconds = 0.0

    def __call__(self) -> float:
        return boot_time() + self.seconds


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Ahead:
    """Turn the clock of moto; it is the clock of backends that are given it."""
    ahead = Ahead()
    monkeypatch.setattr("moto.sqs.models.unix_time", lambda: unix_time() + ahead.seconds)
    monkeypatch.setattr("moto.sqs.models.unix_time_millis", lambda: unix_time_millis() + ahead.seconds * 1000)
    return ahead


class Url(Protocol):
    def __call__(self, name: str = ..., **options: object) -> str: ...


@pytest.fixture
def url(moto: str, queue: str) -> Url:
    """The URL of that queue, or of another, for leasekit."""

    def make(name: str = queue, **options: object) -> str:
        more = "".join(f"&{key}={value}" for key, value in options.items())
        return f"sqs://{name}?region={REGION}&endpoint={moto}{more}"

    return make


@pytest.fixture(autouse=True)
def keepers_are_closed() -> Iterator[None]:
    yield
    leasekit_sqs.close()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def _aws() -> Iterator[tuple[Fake, BotoClients]]:
    service = Fake()
    clients = BotoClients("sqs", region=REGION, endpoint=service.endpoint)
    yield service, clients
    clients.close()
    service.close()


@pytest.fixture
def aws(_aws: tuple[Fake, BotoClients]) -> Fake:
    """SQS as AWS documents it, by a clock that tests turn."""
    service, _ = _aws
    service.reset()
    return service


class Connect(Protocol):
    def __call__(self, queue: str = "q", **options: Any) -> SqsBackend: ...


@pytest.fixture
async def connected(aws: Fake, _aws: tuple[Fake, BotoClients]) -> AsyncIterator[Connect]:
    """A backend of that service, by the same clock. One is enough for a test, two are two processes."""
    made: list[SqsBackend] = []

    def connect(queue: str = "q", **options: Any) -> SqsBackend:
        backend = SqsBackend(Address(queue=queue, **options), clients=_aws[1], clock=lambda: aws.now)
        made.append(backend)
        return backend

    yield connect
    for backend in made:  # the next test is not to meet calls of this one
        await backend.aclose()
