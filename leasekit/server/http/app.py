"""The engine behind HTTP, as an ASGI application and as a process.

`Api` is for use with another ASGI server; `serve` is what `leasekit serve` runs.
"""

import asyncio
import contextlib
import errno
import functools
import gc
import ipaddress
import logging
import os
import socket
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Generator, Sequence
from http import HTTPMethod
from types import FrameType

import msgspec
import uvicorn
import uvloop
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from leasekit._log import LogThread, write
from leasekit.errors import ConfigError, StoreLocked
from leasekit.server.engine import Engine
from leasekit.server.http.disconnect import DisconnectWatch
from leasekit.server.http.echo import echo_request_header
from leasekit.server.http.metrics import Metrics
from leasekit.server.http.openapi import document
from leasekit.server.http.operations import JSON, Operation
from leasekit.server.http.problems import problem_of
from leasekit.server.http.protocol import BoundedProtocol
from leasekit.server.http.request import ApiRequest, BodyTimeouts, Parts
from leasekit.server.http.routes import OPERATIONS
from leasekit.server.http.sending import Sending
from leasekit.server.local_socket import beside, store_path
from leasekit.server.log_limit import LogLimit
from leasekit.server.store import SharedStore, Store
from leasekit.server.store.sqlite.lock import reserved
from leasekit.server.store.urls import open_store
from leasekit.wire import STORE_HEADER

BODY_TIMEOUT = 30.0
BODY_TIMEOUT_AT_STOP = 2.0  # for the bodies that are under way when the server stops
IDLE_TIMEOUT = 75  # of a connection; longer than clients keep one, so that none is closed while a request arrives
STOP_TIMEOUT = 40  # for requests under way; longer than an answer may take
HAND_OVER_TIMEOUT = 3  # the same for processes of this machine: until the end nobody else can serve the store
YIELD_TIMEOUT = 15.0  # for a process that has the store open, and leaves it to a server
YIELD_PAUSE = 0.05


class Api(Router):
    """The ASGI application over an open engine. A request body must arrive within `body_timeout` seconds.

    Unless `any_host`, the `Host` header must name this machine: this refuses web pages of other hosts whose names
    resolve to 127.0.0.1.
    """

    def __init__(self, engine: Engine, *, body_timeout: float = BODY_TIMEOUT, any_host: bool = False) -> None:
        sending = Sending()
        engine.check_room = sending.check_room
        self.parts = Parts(engine, DisconnectWatch(), Metrics(engine), sending, BodyTimeouts(body_timeout))
        self.any_host = any_host
        self.store_header = STORE_HEADER.encode(), engine.store_id.encode()
        operations = [*OPERATIONS, _OPENAPI]
        paths = dict.fromkeys(operation.path for operation in operations)
        routes = [_Route(self, path, [each for each in operations if each.path == path]) for path in paths]
        super().__init__(routes, redirect_slashes=False, default=_Resource(self, None, {}))


class _Route(Route):
    """The route of one path. It answers methods that it does not have, unless another route has them."""

    def __init__(self, api: Api, path: str, operations: Sequence[Operation]) -> None:
        of_method = {operation.method: operation for operation in operations}
        if (reads := of_method.get(HTTPMethod.GET)) is not None and reads.media_type != "text/event-stream":
            of_method[HTTPMethod.HEAD] = reads  # the HTTP layer sends the head alone
        super().__init__(path, _Resource(api, path, of_method))
        self.methods = {*of_method, "OPTIONS"}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


class _Resource:
    """Run the operations of one path, as an ASGI application; `path` is None for all unknown paths."""

    def __init__(self, api: Api, path: str | None, of_method: dict[HTTPMethod, Operation]) -> None:
        self._api = api
        self._path = path
        self._of_method = of_method

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                echo_request_header(message, scope)
                message["headers"] = [*message["headers"], self._api.store_header]
                self._api.parts.metrics.count(self._path, scope["method"], message["status"])
            await send(message)

        request = ApiRequest(scope, receive, self._api.parts)
        try:
            response = await self._answer(request)
        except Exception as error:  # noqa: BLE001 - each is answered, and those that are not expected are logged
            response = problem_of(request, error)
        await response(scope, receive, send_and_count)

    async def _answer(self, request: ApiRequest) -> Response:
        _check_host(request, any_host=self._api.any_host)
        if self._path is None:
            raise HTTPException(404, "there is no such route")
        allow = {"allow": ", ".join(sorted([*self._of_method, "OPTIONS"]))}
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=allow)
        operation = self._of_method.get(request.method)  # type: ignore[call-overload]  # HTTPMethod is a str
        if operation is None:
            raise HTTPException(405, "this route does not accept this method: use one of the `allow` header", allow)
        answer = await operation(request)
        return answer if isinstance(answer, Response) else Response(msgspec.json.encode(answer), media_type=JSON)


def _check_host(request: ApiRequest, *, any_host: bool) -> None:
    """Refuse requests of web pages: of another origin, or of a host whose name resolves to this machine."""
    hosts = request.headers.getlist("host") or [""]
    if len(hosts) > 1:
        raise HTTPException(400, "the request has more than one Host header")
    if not any_host and not _is_loopback(_without_port(hosts[0])):
        raise HTTPException(403, "the Host header must name this machine, such as localhost")
    if any(origin.partition("://")[2] != hosts[0] for origin in request.headers.getlist("origin")):
        raise HTTPException(403, "the request comes from a web page of another origin")


def _without_port(host: str) -> str:
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return name.strip("[]")


async def _openapi(request: ApiRequest) -> Response:
    return Response(_document(), media_type=JSON)


@functools.cache
def _document() -> bytes:
    return document(OPERATIONS)


_OPENAPI = Operation(HTTPMethod.GET, "/openapi.json", _openapi, None, None, dict, JSON, {})


def _is_loopback(host: str) -> bool:
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(
    host: str, port: int, store_url: str, *, insecure: bool = False, migrate: bool = False, check: float | None = None
) -> None:
    """Serve until SIGTERM or SIGINT; print the address when the server is ready. Port 0 takes a free port.

    `check` is the seconds that the check of the store for damage may take; None: the default. Raises `ConfigError` (the
    address is not loopback, or cannot be listened on; the URL names no store), `StoreLocked` and `StoreDamaged`.
    """
    logging.getLogger("uvicorn.error").addFilter(LogLimit())  # of this process of our own
    with LogThread(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        store = open_store(store_url, check=check)
        if migrate and isinstance(store, SharedStore):
            store.migrate()
        runner.run(_serve(host, port, store, insecure=insecure))


async def _serve(host: str, port: int, store: Store, *, insecure: bool) -> None:
    # The address first: if it is taken, no new store is left behind.
    with _bind(host, port, insecure=insecure) as listener:
        async with _engine(store, _address(listener)) as engine:
            server = Server(Api(engine, any_host=insecure))
            if store.is_new and store.url is not None:
                path = store.url.removeprefix("sqlite:///")
                write(
                    functools.partial(
                        print, f"leasekit serve: created a new store: {path}", file=sys.stderr, flush=True
                    )
                )
            sockets = [listener]

            async def listen(other: socket.socket) -> None:
                if server.started:
                    await server.startup([other])
                else:
                    sockets.append(other)

            # The objects that exist by now stay: each garbage collection of them would stop the process for 0.1 s.
            gc.freeze()
            async with beside(store, listen):
                await server.serve(sockets=sockets)


@contextlib.asynccontextmanager
async def _engine(store: Store, address: str) -> AsyncGenerator[Engine]:
    """Run an engine that is served at `address`.

    A process that is no server, and has the store open, leaves the store to this one.
    """
    path, time = store_path(store), asyncio.get_running_loop().time
    until = time() + YIELD_TIMEOUT
    async with contextlib.AsyncExitStack() as opened:
        is_reserved = path is not None and opened.enter_context(reserved(path))
        engine: Engine | None = None
        while engine is None:
            try:
                engine = await opened.enter_async_context(Engine(store, address=address))
            except StoreLocked:
                if not is_reserved or time() >= until:
                    raise
                await asyncio.sleep(YIELD_PAUSE)
        yield engine


async def serve_engine(engine: Engine, listener: socket.socket, stop: asyncio.Event) -> None:
    """Serve an engine of this process at a socket until `stop` is set; signals are left to the process."""
    server = _InnerServer(Api(engine), stop_timeout=HAND_OVER_TIMEOUT)
    serving, stopping = asyncio.create_task(server.serve(sockets=[listener])), asyncio.create_task(stop.wait())
    await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    server.should_exit = True
    await serving


def _bind(host: str, port: int, *, insecure: bool) -> socket.socket:
    """Return a socket with this address that does not listen yet: connections are refused until the store is open."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # The resolved address is bound, not the name: a name could resolve to another address the second time.
        if not insecure and not _is_loopback(str(address[0])):
            raise ConfigError(
                f"{host} is open to other machines, and the server has neither authentication nor TLS yet: "
                "use 127.0.0.1, or add --insecure if you trust every machine of the network"
            )
        listener = socket.socket(family)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
        return listener
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (")[0]  # socket adds "(while attempting to bind on …)"
        advice = "choose another --host or --port"
        if error.errno == errno.EADDRINUSE:
            advice = "is another leasekit server running? Stop it, or choose another --port"
        raise ConfigError(f"cannot listen on {host}, port {port}: {why}; {advice}") from error


class Server(uvicorn.Server):
    """uvicorn's server, which prints its addresses; its stop answers waiting claims and ends event streams."""

    def __init__(self, app: Api, *, stop_timeout: int = STOP_TIMEOUT) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=IDLE_TIMEOUT,
                timeout_graceful_shutdown=stop_timeout,
            )
        )
        self._parts = app.parts

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve these sockets, also if others are served already."""
        servers = self.servers if self.started else []
        await super().startup(sockets)
        self.servers += servers
        for listener in sockets or []:
            if listener.family == socket.AF_UNIX:
                continue
            line = f"leasekit is listening on http://{_authority(listener)}\n"
            # By a thread of its own: what nobody reads holds up neither the server nor its log.
            threading.Thread(target=_say, args=(line,), name="leasekit-address", daemon=True).start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._parts.bodies.shorten(BODY_TIMEOUT_AT_STOP)
        self._parts.engine.end_waits()
        self._parts.engine.feed.close()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal, and at once at the second; uvicorn's method would have the process die of it."""
        self.force_exit = self.should_exit
        self.should_exit = True


class _InnerServer(Server):
    """A server within a process that is not its own: it handles no signals, and forks keep none of its connections."""

    def __init__(self, app: Api, *, stop_timeout: int = STOP_TIMEOUT) -> None:
        super().__init__(app, stop_timeout=stop_timeout)
        _inner_servers.add(self)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def _say(line: str) -> None:
    # Past the buffer of stdout: if nobody reads, this thread would keep it locked, and the process could not end.
    with contextlib.suppress(OSError, AttributeError):  # stdout is closed
        os.write(sys.stdout.fileno(), line.encode())


def _address(listener: socket.socket) -> str:
    """Return where other machines may find this server: a socket that is open to all addresses has no own one."""
    host, port = listener.getsockname()[:2]
    is_any = ipaddress.ip_address(host).is_unspecified
    return f"http://{socket.gethostname()}:{port}" if is_any else f"http://{_authority(listener)}"


def _authority(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if listener.family == socket.AF_INET6 else f"{host}:{port}"


_inner_servers: weakref.WeakSet[_InnerServer] = weakref.WeakSet()


def _close_in_child() -> None:
    # A forked child would keep the connections open after its parent was killed, and others would wait for answers.
    for server in list(_inner_servers):
        for connection in list(server.server_state.connections):
            accepted = connection.transport.get_extra_info("socket")
            with contextlib.suppress(AttributeError, OSError):
                accepted._sock.close()  # not by its number, which the socket would close once more


os.register_at_fork(after_in_child=_close_in_child)
