"""`sqlite://`: one file that several processes of a machine use. The first one opens the store and serves the others.

The others send their requests over a socket beside the file (`tasks.db.sock`), as HTTP. When the process that has the
store open ends, however it ends, the kernel drops its lock on the file: the next request of any other process takes the
lock, opens the store, and serves from then on. Leases survive that, as they survive the restart of a server.

A `leasekit serve` goes first: it reserves the file, and the process that has the store open closes its engine, and
joins the server.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import os
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from datetime import datetime
from typing import Any, Protocol, cast

from leasekit._forwarding import ForwardingScheduler
from leasekit.backend import (
    Backend,
    BulkChanger,
    CancelSource,
    ChainDirectory,
    DeadLetters,
    EndSource,
    GateDirectory,
    KindDirectory,
    NodeDirectory,
    PeriodicDirectory,
    Purger,
    Rescheduler,
    Scheduler,
    TicketSource,
    TokenDirectory,
    WindowListener,
    WorkerDirectory,
    WorkerDrainer,
)
from leasekit.errors import BackendError, ConfigError, StoreLocked, Unavailable
from leasekit.periodic import PeriodicInfo, PeriodicTask
from leasekit.registry import needs_extra, open_backend
from leasekit.server.embedded import DirectBackend, EmbeddedBackend
from leasekit.server.engine import Engine
from leasekit.server.local_socket import LONGEST, beside, socket_path, store_path
from leasekit.server.store import RETENTION, Store
from leasekit.server.store.sqlite.lock import is_reserved, one_user
from leasekit.server.store.urls import open_store
from leasekit.task import (
    ChainCancelled,
    Claimed,
    Ended,
    GateInfo,
    KindInfo,
    KindSettings,
    Matched,
    NodeInfo,
    Rescheduled,
    Scheduled,
    Vacuumed,
    WorkerInfo,
)
from leasekit.tokens import AuditPage, TokenInfo

# With an older store; with the first other process that uses the store.
_LOADED_LATER = ("alembic", "httptools", "prometheus_client", "starlette", "uvicorn", "uvloop")
logger = logging.getLogger("leasekit.server")

_AGAIN = 1.0  # seconds until a server that could not start is started again
_FOR_THE_SERVER = 5.0  # seconds for which calls wait for the server to which this process has left the store
_WATCH = 0.5  # seconds between two looks at whether a server has reserved the store
_LOOK = 0.02  # seconds between two looks at whether something has happened


class _Service(
    Backend,
    Scheduler,
    BulkChanger,
    CancelSource,
    EndSource,
    WindowListener,
    WorkerDirectory,
    WorkerDrainer,
    NodeDirectory,
    KindDirectory,
    PeriodicDirectory,
    GateDirectory,
    ChainDirectory,
    DeadLetters,
    Purger,
    Rescheduler,
    TicketSource,
    TokenDirectory,
    Protocol,
):
    pass


class SharedBackend(ForwardingScheduler):
    """A backend over the store in a file: over an engine of this process, or of the process that has the store open."""

    capabilities = DirectBackend.capabilities

    def __init__(self, store: Store, *, worker: str) -> None:
        # With its retention, because any process of the file may be the one that serves it.
        self.url = f"{store.url}?retention={store.retention:g}" if store.retention != RETENTION else store.url
        """The URL of the store, valid in any working directory."""
        self._path = path = socket_path(store)
        self._file = store_path(store)
        self._own = EmbeddedBackend(lambda: _serving(store, self._watch), worker=worker)
        self._joined = None if path is None else cast("_Service", open_backend(f"http+unix://{path}", worker=worker))
        self._service: _Service | None = None
        self._holder = ""  # the process that has the store open, as a clause
        self._choosing = asyncio.Lock()
        self._handing_over: asyncio.Task[None] | None = None

    async def claim_tickets(self, *args: Any, **options: Any) -> Claimed:
        claimed: Claimed = await self._call("claim_tickets", *args, **options)
        return claimed

    async def workers(self) -> list[WorkerInfo]:
        return cast("list[WorkerInfo]", await self._call("workers"))

    async def drain_worker(self, worker: str) -> WorkerInfo:
        """Drain a worker: see `WorkerDrainer`, like the next."""
        return cast("WorkerInfo", await self._call("drain_worker", worker))

    async def undrain_worker(self, worker: str) -> None:
        """Take a drain back."""
        await self._call("undrain_worker", worker)

    async def tell_window(self, size: int, waiting: int) -> None:
        """Note the worker's window: see `WindowListener`."""
        await self._call("tell_window", size, waiting)

    async def nodes(self) -> list[NodeInfo]:
        return cast("list[NodeInfo]", await self._call("nodes"))

    async def cancels(self, *, wait: float) -> list[str]:
        """Wait for cancel requests: see `CancelSource`."""
        return cast("list[str]", await self._call("cancels", wait=wait))

    async def ended(self, task_ids: Sequence[str], *, wait: float) -> Ended:
        """Wait for the ends of tasks: see `EndSource`."""
        return cast("Ended", await self._call("ended", task_ids, wait=wait))

    async def vacuum(self) -> Vacuumed:
        """Give free space of the file back, one step: see `Purger`."""
        return cast("Vacuumed", await self._call("vacuum"))

    async def reschedule(self, task_id: str, **wanted: Any) -> Rescheduled:
        """Change a task that waits: see `Rescheduler`."""
        return cast("Rescheduled", await self._call("reschedule", task_id, **wanted))

    async def cancel_matching(self, **wanted: Any) -> Matched:
        """Do a step of a bulk cancel: see `BulkChanger`, like the next."""
        return cast("Matched", await self._call("cancel_matching", **wanted))

    async def reschedule_matching(self, **wanted: Any) -> Matched:
        """Do a step of a bulk reschedule."""
        return cast("Matched", await self._call("reschedule_matching", **wanted))

    async def kinds(self) -> list[KindInfo]:
        """List the kinds that have settings: see `KindDirectory`, like all that follow."""
        return cast("list[KindInfo]", await self._call("kinds"))

    async def kind(self, kind: str) -> KindInfo | None:
        """Return the settings of a kind."""
        return cast("KindInfo | None", await self._call("kind", kind))

    async def set_kind(
        self, kind: str, settings: KindSettings, *, is_declared: bool = False, was: KindSettings | None = None
    ) -> KindInfo:
        """Replace the settings of a kind."""
        return cast("KindInfo", await self._call("set_kind", kind, settings, is_declared=is_declared, was=was))

    async def delete_kind(self, kind: str, *, was: KindSettings | None = None) -> None:
        """Remove the settings of a kind."""
        await self._call("delete_kind", kind, was=was)

    async def list_periodic(self) -> list[PeriodicInfo]:
        """List the periodic tasks: see `PeriodicDirectory`, like all that follow."""
        return cast("list[PeriodicInfo]", await self._call("list_periodic"))

    async def get_periodic(self, name: str) -> PeriodicInfo | None:
        """Return a periodic task."""
        return cast("PeriodicInfo | None", await self._call("get_periodic", name))

    async def set_periodic(self, name: str, task: PeriodicTask, *, is_declared: bool = False) -> PeriodicInfo:
        """Add or replace a periodic task."""
        return cast("PeriodicInfo", await self._call("set_periodic", name, task, is_declared=is_declared))

    async def pause_periodic(self, name: str, *, is_paused: bool = True) -> PeriodicInfo:
        """Pause or resume a periodic task."""
        return cast("PeriodicInfo", await self._call("pause_periodic", name, is_paused=is_paused))

    async def trigger_periodic(self, name: str, *, at: datetime) -> Scheduled:
        """Let a periodic task fire once."""
        return cast("Scheduled", await self._call("trigger_periodic", name, at=at))

    async def delete_periodic(self, name: str) -> None:
        """Remove a periodic task."""
        await self._call("delete_periodic", name)

    async def tokens(self) -> list[TokenInfo]:
        """List the access tokens: see `TokenDirectory`, like all that follow."""
        return cast("list[TokenInfo]", await self._call("tokens"))

    async def token(self, token: str) -> TokenInfo | None:
        """Return an access token."""
        return cast("TokenInfo | None", await self._call("token", token))

    async def create_token(self, **wanted: Any) -> TokenInfo:
        """Make an access token."""
        return cast("TokenInfo", await self._call("create_token", **wanted))

    async def revoke_token(self, token: str) -> TokenInfo:
        """End an access token."""
        return cast("TokenInfo", await self._call("revoke_token", token))

    async def rotate_token(self, token: str, *, digest: str, overlap: float = 0.0) -> TokenInfo:
        """Give an access token another secret."""
        return cast("TokenInfo", await self._call("rotate_token", token, digest=digest, overlap=overlap))

    async def audit(self, *, cursor: str | None = None, limit: int = 100) -> AuditPage:
        """Return a page of the log of what operators did."""
        return cast("AuditPage", await self._call("audit", cursor=cursor, limit=limit))

    async def gates(self) -> list[GateInfo]:
        """List the closed gates: see `GateDirectory`, like all that follow."""
        return cast("list[GateInfo]", await self._call("gates"))

    async def set_gate(self, **wanted: Any) -> GateInfo:
        """Close a gate."""
        return cast("GateInfo", await self._call("set_gate", **wanted))

    async def open_gate(self, *, kind: str | None = None, collection: str | None = None) -> None:
        """Open a gate."""
        await self._call("open_gate", kind=kind, collection=collection)

    async def cancel_chain(self, task_id: str, *, cursor: str | None = None) -> ChainCancelled:
        """Do a step of the cancel of a chain: see `ChainDirectory`."""
        return cast("ChainCancelled", await self._call("cancel_chain", task_id, cursor=cursor))

    async def aclose(self) -> None:
        """Close the engine, or the connections to the other process. Leases are not touched."""
        self._service = self._own  # which refuses calls once it is closed
        await self._own.aclose()
        if self._handing_over is not None:  # its engine is closed by now
            self._handing_over.cancel()
        if self._joined is not None:
            await self._joined.aclose()

    async def _call(self, name: str, /, *args: Any, **options: Any) -> Any:
        service = self._service or await self._choose()
        try:
            return await getattr(service, name)(*args, **options)
        except Unavailable as error:
            if service is not self._joined:
                raise
            if self._service is service:  # the process that serves the store may have ended: choose again
                self._service = None
            raise Unavailable(f"{self._holder}: {error}") from error

    async def _choose(self) -> _Service:
        """Open the store, or join the process that has it open.

        Raises `StoreLocked` if that has no socket, and `BackendError` if that runs as another user.
        """
        async with self._choosing:
            if self._service is None and self._joined is not None and self._is_reserved():
                self._holder = "a server has reserved the store"
                self._service = self._joined
            if self._service is None:
                try:
                    await self._own.open()
                except StoreLocked as error:
                    self._holder = str(error).partition(": ")[0]
                    if self._path is None or self._joined is None:
                        why = f"a socket beside the file would have a path of more than {LONGEST} bytes"
                        what = f"{self._holder}, which cannot be joined, because {why}"
                        raise StoreLocked(f"{what}: move the store to a shorter path, or stop that process") from None
                    if self._path.exists() and not os.access(self._path, os.W_OK):
                        raise BackendError(
                            f"{self._holder}, and runs as another user: {one_user(self._path.with_suffix(''))}"
                        ) from error
                    self._service = self._joined
                else:
                    self._service = self._own
            return self._service

    def _is_reserved(self) -> bool:
        """Return whether a server has reserved the file; it will open the store, and this process must join it."""
        return self._file is not None and is_reserved(self._file)

    async def _watch(self) -> None:
        """Hand the store over once a server has reserved it."""
        while self._joined is None or not self._is_reserved():  # noqa: ASYNC110 - by another process
            await asyncio.sleep(_WATCH)
        self._handing_over = asyncio.create_task(self._hand_over())

    async def _hand_over(self) -> None:
        """Close the engine, so that the server can open the store; calls wait until it serves."""
        async with self._choosing:
            logger.info("a server takes the store over, and this process joins it")
            self._service = None
            await self._own.release()
            with contextlib.suppress(TimeoutError):  # that server has ended, or opens a large store
                async with asyncio.timeout(_FOR_THE_SERVER):
                    while self._path is not None and not self._path.exists():  # noqa: ASYNC110 - of another process
                        await asyncio.sleep(_LOOK)


def connect_database(url: str, *, worker: str) -> EmbeddedBackend:
    """Return a backend over a PostgreSQL database, which this process opens as a node when it makes its first call.

    Raises `ConfigError` for a URL that cannot be read, and `MissingDependency`.
    """
    store = open_store(url)
    return EmbeddedBackend(lambda: Engine(store), worker=worker)


def connect(url: str, *, worker: str) -> SharedBackend:
    """Return a backend over the store in a file. The first call opens the store, or joins the process that has it open.

    Raises `ConfigError` for a URL that names no store, and `MissingDependency`.
    """
    with needs_extra("server"):
        for library in _LOADED_LATER:
            if importlib.util.find_spec(library) is None:
                raise ModuleNotFoundError(name=library)
    store = open_store(url)
    if store.url is None:
        raise ConfigError("memory: is the store of one server: use memory://name, or sqlite:///file.db")
    return SharedBackend(store, worker=worker)


@contextlib.asynccontextmanager
async def _serving(store: Store, watch: Callable[[], Coroutine[Any, Any, None]]) -> AsyncGenerator[Engine]:
    """Run an engine, and serve it to other processes at the socket beside the store.

    `watch` runs meanwhile.
    """
    servers: list[_LazyServer] = []
    async with Engine(store) as engine:

        async def listen(listener: socket.socket) -> None:
            servers.append(_LazyServer(engine, listener))

        async with beside(store, listen):
            watching = asyncio.create_task(watch())
            try:
                yield engine
            finally:
                watching.cancel()
                await asyncio.gather(*(server.stop() for server in servers))
                # A claim of this process may have been granted tasks, which its answer must still bring.
                engine.end_waits()
                while engine.claims_waiting:  # noqa: ASYNC110 - the last answer is milliseconds away
                    await asyncio.sleep(_LOOK)


class _LazyServer:
    """Serves an engine from the first connection on: a process that is alone with its file loads no HTTP server."""

    def __init__(self, engine: Engine, listener: socket.socket) -> None:
        self._engine = engine
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(listener, self._start)
        self._serving: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    def _start(self) -> None:
        self._loop.remove_reader(self._listener)
        self._serving = self._loop.create_task(self._serve())

    async def _serve(self) -> None:
        while not self._stop.is_set():
            try:
                # In a thread, because the import takes longer than a heartbeat may wait.
                process = await asyncio.to_thread(importlib.import_module, "leasekit.server.http.process")
                await process.serve_engine(self._engine, self._listener, self._stop)
            except Exception:  # no descriptor or thread was free, for example
                logger.exception("the processes that share a store with this one are not served; this is tried again")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), _AGAIN)

    async def stop(self) -> None:
        self._loop.remove_reader(self._listener)
        self._stop.set()
        if self._serving is not None:
            await self._serving
