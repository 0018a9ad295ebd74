"""The real server, on a port of its own, over a real store: SQLite, and PostgreSQL too where the store matters."""

import asyncio
import json
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from http.client import HTTPConnection
from typing import Any, NamedTuple, Protocol

import pytest
import uvloop

from leasekit.server.engine import Engine
from leasekit.server.http.app import Api
from leasekit.server.http.bodies import Bodies
from leasekit.server.http.disconnect import DisconnectWatch
from leasekit.server.http.lease_kinds import LeaseKinds
from leasekit.server.http.process import Server
from leasekit.server.node_roles import ALL_ROLES, Role
from leasekit.server.roles.tokens import Create
from leasekit.server.store.postgres.store import PostgresStore
from leasekit.server.store.urls import open_store
from leasekit.tokens import SCOPES, digest_of, new_secret
from leasekit.wire import TokenRequest
from tests.postgres_server import PostgresServer

PATIENCE = 30.0  # seconds, for facts that come within milliseconds


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)


class Running:
    """A server that runs in a thread."""

    engine: Engine
    loop: asyncio.AbstractEventLoop
    polls: DisconnectWatch
    waits: DisconnectWatch
    bodies: Bodies
    lease_kinds: LeaseKinds
    connections: set[Any]

    token: str | None = None
    """The access token that is sent where a call names no other."""

    def __init__(self, port: int) -> None:
        self.port = port

    def give_token(self) -> str:
        """Make an access token that may do everything, for calls from now on: the server asks for one then."""
        secret = new_secret()
        everything = TokenRequest(
            id=uuid.uuid4().hex, name="everything", digest=digest_of(secret).hex(), scopes=list(SCOPES), kinds=["*"]
        )
        making = self.engine.operations.change_token(Create(everything))
        asyncio.run_coroutine_threadsafe(making, self.loop).result(PATIENCE)
        self.token = secret
        return secret

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """One request on a connection of its own. A body that is not bytes is sent as JSON."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)) as connection:
            raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            sent = {"content-type": "application/json"} if body is not None else {}
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            if self.token is not None:
                named.setdefault("authorization", f"Bearer {self.token}")
            connection.request(method, path, raw, sent | named)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def get(self, path: str) -> Any:
        answer = self.call("GET", path)
        assert answer.status == 200, answer
        return answer.json

    def post(self, path: str, body: Any) -> Any:
        answer = self.call("POST", path, body)
        assert answer.status == 200, answer
        return answer.json

    def tick(self) -> None:
        """Have the consumer do its work now."""
        asyncio.run_coroutine_threadsafe(self.engine.tick(), self.loop).result(PATIENCE)

    def open(self) -> socket.socket:
        """A plain connection, for what `http.client` would not send."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
    return data


@contextmanager
def run(
    store: str, *, clock: Callable[[], float] | None = None, roles: frozenset[Role] = ALL_ROLES, **options: Any
) -> Iterator[Running]:
    """Run a server in a thread; `clock` and `roles` are those of its engine."""
    listener = socket.create_server(("127.0.0.1", 0))
    running = Running(listener.getsockname()[1])
    servers: list[Server] = []
    opened = threading.Event()

    async def serve() -> None:
        async with Engine(open_store(store), clock=clock, roles=roles) as engine:
            app = Api(engine, **options)
            running.loop = asyncio.get_running_loop()
            running.engine, running.polls, running.waits = engine, app.parts.polls, app.parts.waits
            running.bodies = app.parts.bodies
            running.lease_kinds = app.parts.lease_kinds
            servers.append(Server(app))
            running.connections = servers[0].server_state.connections
            opened.set()
            await servers[0].serve(sockets=[listener])

    def in_thread() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=in_thread)
    thread.start()
    assert opened.wait(PATIENCE)
    try:
        yield running
    finally:
        servers[0].should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


# What is asked there reaches the store. The other files are about HTTP itself, about an engine that is replaced, about
# the process and its command line, or about what only a file can do; `tests/cli/test_nodes.py` has processes on
# PostgreSQL.
_ON_BOTH_STORES = {
    "test_events",
    "test_http_access",
    "test_http_life",
    "test_http_periodic",
    "test_http_refusals",
    "test_overload",
    "test_reads",
    "test_schemathesis",
}
_ON_ALL_STORES = {"test_http_circles"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "new_store" in metafunc.fixturenames:
        name = metafunc.definition.path.stem
        schemes = ["sqlite", "postgresql"] if name in _ON_BOTH_STORES | _ON_ALL_STORES else ["sqlite"]
        schemes += ["memory"] if name in _ON_ALL_STORES else []
        metafunc.parametrize("new_store", schemes, indirect=True, scope="module")


@pytest.fixture(scope="module")
def new_store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], str]:
    """Return the URL of a new store each time."""
    if request.param == "memory":
        return lambda: "memory:"
    if request.param == "sqlite":
        return lambda: f"sqlite:///{tmp_path_factory.mktemp('store')}/tasks.db"
    postgres: PostgresServer = request.getfixturevalue("postgres")

    def new_database() -> str:
        url = postgres.new_database()
        PostgresStore(url).migrate()
        return url

    return new_database


@pytest.fixture(scope="module")
def server(new_store: Callable[[], str]) -> Iterator[Running]:
    """One server for all tests of a module: each has kinds of its own."""
    with run(new_store()) as running:
        yield running


class RunServer(Protocol):
    def __call__(self, **options: Any) -> AbstractContextManager[Running]: ...


@pytest.fixture
def run_server(new_store: Callable[[], str]) -> RunServer:
    """`with run_server(**options) as server`: a server of one's own."""
    return lambda **options: run(new_store(), **options)
