"""The boto3 clients of one service, and calls of them.

There are two clients, because a long poll outlasts botocore's usual timeout (60 s), and a heartbeat must not wait
nearly as long.
"""

import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import boto3
import botocore.session
from botocore.config import Config

from leasekit.errors import ProtocolError
from leasekit_aws.errors import meaning

# One try each: the cycle repeats heartbeats, the keeper's outbox repeats settlements.
_ONE_TRY = Config(
    connect_timeout=3,
    read_timeout=8,
    retries={"total_max_attempts": 1, "mode": "standard"},
    max_pool_connections=20,
    tcp_keepalive=True,
)
_POLLS = _ONE_TRY.merge(Config(read_timeout=75))
_MOST_IDS = 10_000  # of answers, of the newest: a proxy repeats an answer as that to the next request of a connection


@dataclass(frozen=True, slots=True)
class Call:
    """A request as a value: the method of the boto3 client, and its arguments."""

    operation: str
    params: Mapping[str, Any]
    leaving: Callable[[], object] | None = None
    """Called when the request is about to leave: what it raises is raised, and the request does not leave.

    It is called again once there is a connection, because the look-up of a host can take half a minute.
    """


class _Body(io.BytesIO):
    """A request's body, which asks before it is sent; the service takes no request whose body is missing."""

    def __init__(self, body: bytes, leaving: Callable[[], object]) -> None:
        super().__init__(body)
        self._leaving = leaving

    def read(self, size: int | None = -1, /) -> bytes:
        self._leaving()
        return super().read(size)


class BotoClients:
    """The clients of one service. The first call makes them in its thread, which takes a tenth of a second.

    `like` is a client of the user's own, whose credentials, endpoint and settings (except timeouts and retries) are
    used.
    """

    def __init__(
        self, service: str, *, region: str | None = None, endpoint: str | None = None, like: Any = None
    ) -> None:
        self._service = service
        self._region = region
        self._endpoint = endpoint
        self._like = like
        self._session: Any = None
        self._made: dict[bool, Any] = {}
        self._making = threading.Lock()
        self._ids: OrderedDict[str, int] = OrderedDict()  # of the latest answers, guarded by …
        self._noting = threading.Lock()
        self._sending = threading.local()  # the call of each thread

    def send(self, call: Call, *, is_poll: bool = False) -> dict[str, Any]:
        """Make a call and return the service's answer. Blocks; raises `BackendError` and nothing else."""
        try:
            client = self._client(is_poll=is_poll)
            self._sending.call = call
            answer: object = getattr(client, call.operation)(**call.params)
        except Exception as error:  # botocore also lets errors of sockets and of its own parsing through
            self._refuse_repeated(call, _request_id(getattr(error, "response", None)), is_poll=is_poll)
            raise meaning(error) from error
        if not (request_id := _request_id(answer)):
            raise ProtocolError(f"{call.operation}: the answer is not of AWS (no request id): is a proxy in between?")
        self._refuse_repeated(call, request_id, is_poll=is_poll)
        return cast("dict[str, Any]", answer)

    def _refuse_repeated(self, call: Call, request_id: str, *, is_poll: bool) -> None:
        """Raise `ProtocolError` if an earlier answer had this id, and close connections: they may shift more answers.

        An id that comes a third time is that of an emulator, which gives all answers one id.
        """
        if not request_id:
            return
        with self._noting:
            times = self._ids[request_id] = self._ids.get(request_id, 0) + 1
            if len(self._ids) > _MOST_IDS:
                self._ids.popitem(last=False)
        if times == 2:
            self._client(is_poll=is_poll).close()
            what = f"{call.operation}: the answer has the request id of an earlier one ({request_id[:100]})"
            raise ProtocolError(f"{what}: a proxy has delivered that twice; the request may be repeated")

    def close(self) -> None:
        """Close connections that are not in use; a later call opens new ones."""
        with self._making:
            for client in self._made.values():
                client.close()

    def _client(self, *, is_poll: bool) -> Any:
        with self._making:
            if is_poll not in self._made:
                self._made[is_poll] = self._make(_POLLS if is_poll else _ONE_TRY)
            return self._made[is_poll]

    def _make(self, config: Config) -> Any:
        """Return a new boto3 client with these settings."""
        region, endpoint, verify = self._region, self._endpoint, None
        if self._like is not None:
            region, endpoint = self._like.meta.region_name, self._like.meta.endpoint_url
            config, verify = self._like.meta.config.merge(config), verify_of(self._like)
        # A session of its own, because boto3's default session is not safe among threads.
        self._session = self._session or (boto3.session.Session() if self._like is None else _session_of(self._like))
        client = self._session.client(
            self._service, region_name=region, endpoint_url=endpoint, config=config, verify=verify
        )
        client.meta.events.register("before-send", self._ask_before_leaving)
        return client

    def _ask_before_leaving(self, request: Any, **_: Any) -> None:
        """Ask whether a request may still leave, now that it is signed: new credentials may have taken a minute."""
        if (leaving := self._sending.call.leaving) is not None:
            leaving()
            if isinstance(request.body, bytes):
                request.body = _Body(request.body, leaving)


def credentials_of(client: Any) -> Any:
    """Return the credentials object that a client signs with, which refreshes the credentials itself."""
    return client._request_signer._credentials  # boto3 has no other way to ask


def verify_of(client: Any) -> Any:
    """Return how a client verifies certificates: True, False or the path of its authorities."""
    return client._endpoint.http_session._verify  # boto3 has no other way to ask


def _session_of(client: Any) -> boto3.session.Session:
    session = botocore.session.get_session()
    credentials = credentials_of(client)
    session.register_component("credential_provider", SimpleNamespace(load_credentials=lambda: credentials))
    return boto3.session.Session(botocore_session=session)


def _request_id(answer: object) -> str:
    """Return AWS's id of an answer; empty if it has none: a proxy's page may parse as an answer without content."""
    metadata = cast("Mapping[str, Any]", answer).get("ResponseMetadata") if isinstance(answer, Mapping) else None
    return str(cast("Mapping[str, Any]", metadata).get("RequestId") or "") if isinstance(metadata, Mapping) else ""
