"""The engine behind HTTP, as an ASGI application and as a process.

`create_app` is for use with another ASGI server; `serve` is what `leasekit serve` runs.
"""

import asyncio
import contextlib
import functools
import gc
import ipaddress
import os
import socket
import weakref
from collections.abc import Generator
from types import FrameType
from typing import Any

import uvicorn
import uvloop
from litestar import Litestar, Request, get
from litestar.datastructures import State
from litestar.di import Provide
from litestar.exceptions import HTTPException

from leasekit.errors import ConfigError
from leasekit.server.engine import Engine
from leasekit.server.http.disconnect import DisconnectWatch
from leasekit.server.http.echo import echo_request_header
from leasekit.server.http.metrics import Metrics
from leasekit.server.http.openapi import document
from leasekit.server.http.problems import HANDLERS
from leasekit.server.http.protocol import BoundedProtocol
from leasekit.server.http.request import ApiRequest
from leasekit.server.http.routes import OPTIONS, PROVIDED, ROUTES
from leasekit.server.http.sending import Sending
from leasekit.server.local_socket import beside
from leasekit.server.store import Store
from leasekit.server.store.sql import CHECK
from leasekit.server.store.urls import open_store

__all__ = ["Server", "create_app", "serve", "serve_engine"]

BODY_TIMEOUT = 30.0
IDLE_TIMEOUT = 75  # of a connection; longer than clients keep one, so that none is closed while a request arrives
STOP_TIMEOUT = 40  # for requests under way; longer than a slow request body may take
HAND_OVER_TIMEOUT = 3  # the same for processes of this machine: until the end nobody else can serve the store


def create_app(engine: Engine, *, body_timeout: float = BODY_TIMEOUT, any_host: bool = False) -> Litestar:
    """Return the ASGI application over an open engine. A request body must arrive within `body_timeout` seconds.

    Unless `any_host`, the `Host` header must name this machine: this refuses web pages of other hosts whose names
    resolve to 127.0.0.1.
    """
    polls, metrics, sending = DisconnectWatch(), Metrics(engine), Sending()
    engine.check_room = sending.check_room
    return Litestar(
        route_handlers=[*OPTIONS, *ROUTES, openapi_json],
        request_class=ApiRequest,
        state=State({"polls": polls, "sending": sending, "engine": engine, "body_timeout": body_timeout}),
        dependencies={
            "engine": Provide(lambda: engine, sync_to_thread=False),
            "polls": Provide(lambda: polls, sync_to_thread=False),
            "metrics": Provide(lambda: metrics, sync_to_thread=False),
            "sending": Provide(lambda: sending, sync_to_thread=False),
        },
        before_send=[metrics.before_send, echo_request_header],
        before_request=None if any_host else _refuse_foreign_hosts,
        exception_handlers=HANDLERS,
        openapi_config=None,
        logging_config=None,
    )


@get("/openapi.json", include_in_schema=False, sync_to_thread=True)
def openapi_json() -> dict[str, Any]:
    """Return the OpenAPI document."""
    return _document()


@functools.cache
def _document() -> dict[str, Any]:
    return document(ROUTES, PROVIDED)


# Asynchronous, and not a guard, for speed: Litestar runs sync hooks in threads, and copies the handler for a guard.
async def _refuse_foreign_hosts(request: Request[Any, Any, Any]) -> None:
    host = request.headers.get("host", "")
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if not _is_loopback(name.strip("[]")):
        raise HTTPException("the Host header must name this machine, such as localhost", status_code=403)


def _is_loopback(host: str) -> bool:
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# As a process -------------------------------------------------------------------------------------------------


def serve(host: str, port: int, store_url: str, *, insecure: bool = False, check: float = CHECK) -> None:
    """Serve until SIGTERM or SIGINT; print the address when the server is ready. Port 0 takes a free port.

    `check` is the seconds that the check of the store for damage may take. Raises `ConfigError` (the address is not
    loopback, or cannot be listened on; the URL names no store), `StoreLocked` and `StoreDamaged`.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(host, port, open_store(store_url, check=check), insecure=insecure))


async def _serve(host: str, port: int, store: Store, *, insecure: bool) -> None:
    async with Engine(store) as engine:
        with _listen(host, port, insecure=insecure) as listener, beside(store) as others:
            server = Server(create_app(engine, any_host=insecure))
            # The objects that exist by now stay: each garbage collection of them would stop the process for 0.1 s.
            gc.freeze()
            await server.serve(sockets=[listener, *others])


async def serve_engine(engine: Engine, listener: socket.socket, stop: asyncio.Event) -> None:
    """Serve an engine of this process at a socket until `stop` is set; signals are left to the process."""
    server = _InnerServer(create_app(engine), stop_timeout=HAND_OVER_TIMEOUT)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await stop.wait()
    server.should_exit = True
    await serving


def _listen(host: str, port: int, *, insecure: bool) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # The resolved address is bound, not the name: a name could resolve to another address the second time.
        if not insecure and not _is_loopback(str(address[0])):
            raise ConfigError(
                f"{host} is open to other machines, and the server has neither authentication nor TLS yet: "
                "use 127.0.0.1, or add --insecure if you trust every machine of the network"
            )
        return socket.create_server(address, family=family)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (")[0]  # socket adds "(while attempting to bind on …)"
        raise ConfigError(f"cannot listen on {host}, port {port}: {why}; choose another --host or --port") from error


class Server(uvicorn.Server):
    """uvicorn's server, which prints its addresses; its stop answers waiting claims and ends event streams."""

    def __init__(self, app: Litestar, *, stop_timeout: int = STOP_TIMEOUT) -> None:
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
        self._engine: Engine = app.state.engine

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            if listener.family == socket.AF_UNIX:
                continue
            print(f"leasekit is listening on http://{_authority(listener)}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.end_waits()
        self._engine.feed.close()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal, and at once at the second; uvicorn's method would have the process die of it."""
        self.force_exit = self.should_exit
        self.should_exit = True


class _InnerServer(Server):
    """A server within a process that is not its own: it handles no signals, and forks keep none of its connections."""

    def __init__(self, app: Litestar, *, stop_timeout: int = STOP_TIMEOUT) -> None:
        super().__init__(app, stop_timeout=stop_timeout)
        _inner_servers.add(self)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


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
