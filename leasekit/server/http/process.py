"""The process of a server: what `leasekit serve` runs, its sockets, and its end."""

import asyncio
import contextlib
import errno
import functools
import gc
import ipaddress
import logging
import os
import resource
import socket
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Generator
from types import FrameType

import uvicorn
import uvloop

from leasekit._log import LogThread, write
from leasekit.errors import ConfigError, StoreLocked
from leasekit.queues import TaskQueues
from leasekit.registry import open_queues
from leasekit.server.engine import Engine
from leasekit.server.http.app import NO_SECURITY, Api, ConsoleMode, Security
from leasekit.server.http.protocol import BoundedProtocol
from leasekit.server.http.reach import Reach, is_loopback
from leasekit.server.http.tls import Certificates
from leasekit.server.local_socket import beside, store_path
from leasekit.server.log_limit import LogLimit
from leasekit.server.node_roles import ALL_ROLES, Role, listed
from leasekit.server.store import SharedStore, Store
from leasekit.server.store.sqlite.lock import reserved
from leasekit.server.store.urls import open_store

BODY_TIMEOUT_AT_STOP = 2.0  # for the bodies that are under way when the server stops
IDLE_TIMEOUT = 75  # of a connection; longer than clients keep one, so that none is closed while a request arrives
STOP_TIMEOUT = 40  # for requests under way; longer than an answer may take
HAND_OVER_TIMEOUT = 3  # the same for processes of this machine: until the end nobody else can serve the store
YIELD_TIMEOUT = 15.0  # for a process that has the store open, and leaves it to a server
YIELD_PAUSE = 0.05
_CLOSE_TIMEOUT = 1.0
_OPEN_FILES = 10_000  # each client takes some, and each connection with TLS 50 KiB of memory before its first request
_ACCEPTS = 32  # connections that are accepted in one turn of the event loop
_SWITCH = 0.0005  # seconds; the default of 5 ms is what each read of a socket waits for while the writer computes
_RECEIVED, _SENT = 64 * 1024, 256 * 1024  # bytes that the system and TLS keep for a connection; else it is megabytes


def serve(
    host: str,
    port: int,
    store_url: str,
    security: Security = NO_SECURITY,
    *,
    migrate: bool = False,
    check: float | None = None,
    queue: str | None = None,
    console: ConsoleMode = "on",
    roles: frozenset[Role] = ALL_ROLES,
) -> None:
    """Serve until SIGTERM or SIGINT; print the address when the server is ready. Port 0 takes a free port.

    `check` is the seconds that the check of the store for damage may take; None: the default. Raises `ConfigError` (the
    address is not loopback, or cannot be listened on; the URL names no store), `StoreLocked` and `StoreDamaged`.
    """
    logging.getLogger("uvicorn.error").addFilter(LogLimit())  # of this process of our own
    _allow_open_files()
    sys.setswitchinterval(_SWITCH)
    with LogThread(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        queues = None if queue is None else open_queues(queue)
        store = open_store(store_url, check=check)
        _check_roles(roles, store, queues)
        if migrate and isinstance(store, SharedStore):
            store.migrate()
        runner.run(_serve(host, port, store, security=security, queues=queues, console=console, roles=roles))


def _allow_open_files() -> None:
    """Raise the soft limit of open files, as 1,024 are usual for a shell; a limit that is higher already stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if resource.RLIM_INFINITY != soft < most:
        with contextlib.suppress(ValueError, OSError):  # macOS has a lower bound of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _check_roles(roles: frozenset[Role], store: Store, queues: TaskQueues | None) -> None:
    """Raise `ConfigError` if a server of this store cannot have these roles alone."""
    if roles != ALL_ROLES and not isinstance(store, SharedStore):
        raise ConfigError(
            f"a server of this store has all roles ({listed(ALL_ROLES)}), as it is the only one: leave --role out, or "
            "take a PostgreSQL database, which several servers share"
        )
    if queues is not None and Role.CONSUMER not in roles:
        raise ConfigError("tasks are moved to queues by the consumer: leave --queue out, or add consumer to --role")


async def _serve(
    host: str,
    port: int,
    store: Store,
    *,
    security: Security,
    queues: TaskQueues | None,
    console: ConsoleMode,
    roles: frozenset[Role],
) -> None:
    # The address first: if it is taken, no new store is left behind.
    certificates = None if security.tls is None else Certificates(security.tls)
    listener, reach = _bind(host, port, security)
    with listener:
        async with _engine(store, _address(listener, has_tls=certificates is not None), queues, roles) as engine:
            api = Api(engine, reach=reach, console=console if Role.FRONTEND in roles else "off")
            server = Server(api, certificates=certificates)
            if reach.needs_tokens and not engine.tokens.has_any:
                _note(_NO_TOKENS)
            if store.is_new and store.url is not None:
                _note(f"leasekit serve: created a new store: {store.url.removeprefix('sqlite:///')}")
            sockets = [listener]
            # The objects that exist by now stay: each garbage collection of them would stop the process for 0.1 s.
            gc.freeze()
            async with beside(store, functools.partial(_join, server, sockets)), server.following():
                await server.serve(sockets=sockets)


async def _join(server: "Server", sockets: list[socket.socket], other: socket.socket) -> None:
    """Have a server serve another socket too: at once, or with those that it starts with."""
    if server.started:
        await server.startup([other])
    else:
        sockets.append(other)


def _note(sentence: str) -> None:
    """Print a sentence to stderr, by the thread of the log: where nobody reads it, the server is not held up."""
    write(functools.partial(print, sentence, file=sys.stderr, flush=True))


_NO_TOKENS = (
    "leasekit serve: the store has no access token yet, and no request is taken without one: "
    "make the first with `leasekit token create NAME --scope … --store URL`"
)


@contextlib.asynccontextmanager
async def _engine(
    store: Store, address: str, queues: TaskQueues | None = None, roles: frozenset[Role] = ALL_ROLES
) -> AsyncGenerator[Engine]:
    """Run an engine that is served at `address`.

    A process that is no server, and has the store open, leaves the store to this one.
    """
    path, time = store_path(store), asyncio.get_running_loop().time
    until = time() + YIELD_TIMEOUT
    async with contextlib.AsyncExitStack() as opened:
        if queues is not None:
            opened.push_async_callback(queues.aclose)
        is_reserved = path is not None and opened.enter_context(reserved(path))
        engine: Engine | None = None
        while engine is None:
            try:
                engine = await opened.enter_async_context(Engine(store, address=address, queues=queues, roles=roles))
            except StoreLocked:
                if not is_reserved or time() >= until:
                    raise
                await asyncio.sleep(YIELD_PAUSE)
        yield engine


async def serve_engine(engine: Engine, listener: socket.socket, stop: asyncio.Event) -> None:
    """Serve an engine of this process at a socket until `stop` is set; signals are left to the process."""
    server = InnerServer(Api(engine, console="on"), stop_timeout=HAND_OVER_TIMEOUT)
    serving, stopping = asyncio.create_task(server.serve(sockets=[listener])), asyncio.create_task(stop.wait())
    await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    server.should_exit = True
    await serving


def _copies(listener: socket.socket) -> list[socket.socket]:
    """Return a listening socket `_ACCEPTS` times.

    libuv takes one connection from a socket in each turn of its loop. Behind the connections of a flood, which make
    each turn long, a new one would wait for as many turns as there are connections before it.
    """
    return [listener, *(listener.dup() for _ in range(_ACCEPTS - 1))]


def bound_to_loopback(port: int) -> socket.socket:
    """Return a socket at a port of this machine. Raises `ConfigError`."""
    return _bind("127.0.0.1", port, NO_SECURITY)[0]


def _bind(host: str, port: int, security: Security) -> tuple[socket.socket, Reach]:
    """Return a socket with this address that does not listen yet: connections are refused until the store is open."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # The resolved address is bound, not the name: a name could resolve to another address the second time.
        reach = security.reach(is_open=not is_loopback(str(address[0])))
        listener = socket.socket(family)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVED)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SENT)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
        return listener, reach
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (")[0]  # socket adds "(while attempting to bind on …)"
        advice = "choose another --host or --port"
        if error.errno == errno.EADDRINUSE:
            advice = "is another leasekit server running? Stop it, or choose another --port"
        raise ConfigError(f"cannot listen on {host}, port {port}: {why}; {advice}") from error


class Server(uvicorn.Server):
    """uvicorn's server, which prints its addresses; its stop answers waiting claims and ends event streams."""

    _prints_address = True

    def __init__(self, app: Api, *, stop_timeout: int = STOP_TIMEOUT, certificates: Certificates | None = None) -> None:
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
        self._certificates = certificates
        self._with_tls: list[socket.socket] = []  # what is served with TLS, for the next certificate
        self._tls_servers: list[asyncio.Server] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve these sockets, also if others are served already; Unix sockets without TLS."""
        servers = list(self.servers) if self.started else []
        local = [listener for listener in sockets or [] if listener.family == socket.AF_UNIX]
        tcp = [listener for listener in sockets or [] if listener.family != socket.AF_UNIX]
        if local or not tcp:
            await super().startup([each for listener in local for each in _copies(listener)])
            servers += self.servers
        if tcp:
            servers += await self._start_tcp(tcp)
        self.servers = servers
        for listener in tcp if self._prints_address else ():
            scheme = "http" if self._certificates is None else "https"
            line = f"leasekit is listening on {scheme}://{_authority(listener)}\n"
            # By a thread of its own: what nobody reads holds up neither the server nor its log.
            threading.Thread(target=_say, args=(line,), name="leasekit-address", daemon=True).start()

    async def _start_tcp(self, listeners: list[socket.socket]) -> list[asyncio.Server]:
        """Serve these sockets, with TLS if there are certificates; return their servers."""
        if self._certificates is not None:
            self._with_tls += [listener.dup() for listener in listeners]
            self.config.ssl = self._certificates.context
        try:
            await super().startup([each for listener in listeners for each in _copies(listener)])
        finally:
            self.config.ssl = None
        if self._certificates is not None:
            self._tls_servers = list(self.servers)
        return list(self.servers)

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncGenerator[None]:
        """Read the certificate again when its files change, until the block ends."""
        if self._certificates is None:
            yield
            return
        following = asyncio.create_task(self._certificates.follow(self._renew), name="leasekit-certificates")
        try:
            yield
        finally:
            following.cancel()
            for listener in self._with_tls:
                listener.close()

    async def _renew(self) -> None:
        """Serve new connections with the new certificate; those that wait in the socket's queue get it too."""
        if not self.started or self.should_exit:
            return
        former, others = self._tls_servers, [each for each in self.servers if each not in self._tls_servers]
        with_tls, self._with_tls = self._with_tls, []
        self.servers = others + await self._start_tcp(with_tls)
        for server in former:
            server.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self._with_tls:
            listener.close()
        self._parts.bodies.shorten(BODY_TIMEOUT_AT_STOP)
        self._parts.engine.end_waits()
        self._parts.engine.feed.close()
        cutting = asyncio.create_task(self._cut_closed(), name="leasekit-cutting")
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()

    async def _cut_closed(self) -> None:
        """Cut closed connections of clients that do not say that they know it: with TLS, the close waits 30 s for them.

        Nobody else can serve the store until then. What is still to be sent is waited for.
        """
        while True:
            closed = [it for it in self.server_state.connections if it.transport.is_closing()]
            await asyncio.sleep(_CLOSE_TIMEOUT)
            for connection in closed:
                if connection in self.server_state.connections and not connection.transport.get_write_buffer_size():
                    connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal, and at once at the second; uvicorn's method would have the process die of it."""
        self.force_exit = self.should_exit
        self.should_exit = True


class InnerServer(Server):
    """A server within a process that is not its own: it handles no signals, and forks keep none of its connections."""

    _prints_address = False

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


def _address(listener: socket.socket, *, has_tls: bool = False) -> str:
    """Return where other machines may find this server: a socket that is open to all addresses has no own one."""
    host, port = listener.getsockname()[:2]
    is_any, scheme = ipaddress.ip_address(host).is_unspecified, "https" if has_tls else "http"
    return f"{scheme}://{socket.gethostname()}:{port}" if is_any else f"{scheme}://{_authority(listener)}"


def _authority(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if listener.family == socket.AF_INET6 else f"{host}:{port}"


_inner_servers: weakref.WeakSet[InnerServer] = weakref.WeakSet()


def _close_in_child() -> None:
    # A forked child would keep the connections open after its parent was killed, and others would wait for answers.
    for server in list(_inner_servers):
        for connection in list(server.server_state.connections):
            accepted = connection.transport.get_extra_info("socket")
            with contextlib.suppress(AttributeError, OSError):
                accepted._sock.close()  # not by its number, which the socket would close once more


os.register_at_fork(after_in_child=_close_in_child)
