"""connect() → Client: a backend plus the keeper of its leases, with two doors for every method.

The blocking door has the plain names (`schedule`), the other one an `a` in front (`await aschedule`), for asyncio and
trio alike. Both only hand over to the driver's thread, where backend and keeper live.
"""

import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, Unpack

import anyio
import msgspec
from msgspec.structs import replace

from leasekit._arguments import check_arguments
from leasekit._binding import bind
from leasekit._driver.clock import BOOT_CLOCK, Clock
from leasekit._driver.connection import Connection
from leasekit._driver.guarding.watchdog import Mode, check_mode
from leasekit._driver.keeping.held_lease import HeldLease
from leasekit._driver.locks import taken
from leasekit._driver.reporting import encoding
from leasekit._driver.reporting.completion import all_ended
from leasekit._driver.retrying import call_once, call_until
from leasekit._driver.thread import check_process
from leasekit.backend import Backend, Scheduler, TaskSink, WorkerDirectory
from leasekit.claiming import Tasks
from leasekit.config import Heartbeats
from leasekit.errors import Closed, ConfigError, LeasekitError, Refused
from leasekit.hooks import Hook, Hooks
from leasekit.ids import uuid7s
from leasekit.named import Named, Once
from leasekit.registry import open_backend
from leasekit.task import NewTask, Page, Scheduled, Stats, Status, Task, TaskInfo, TaskOptions, Verdict, WorkerInfo
from leasekit.wire import MAX_KINDS

__all__ = ["Client", "connect"]

T = TypeVar("T")

# Two threads that use a client at once get one connection. Reentrant: signal handlers may close clients.
_connecting = threading.RLock()


def _forget() -> None:
    """In a forked child the lock may be held by a thread that is not here."""
    global _connecting  # noqa: PLW0603 - one for each process
    _connecting = threading.RLock()


os.register_at_fork(after_in_child=_forget)

_RETRY_FOR = 30.0  # seconds for which calls of users are repeated while the service is away


def connect(
    url_or_backend: str | Backend,
    *,
    heartbeats: Heartbeats | None = None,
    hooks: Sequence[Hook] = (),
    worker: str | None = None,
    retry_for: float | None = None,
) -> "Client":
    """Return a client of the service at this URL, or of a backend of your own.

    Nothing is opened before the first call. Raises `UnknownScheme`, `MissingDependency`, `ConfigError`.

    Args:
        url_or_backend: Where the tasks are: `http://host:port`, `sqlite:///file.db`, `memory://`, the scheme of an
            installed adapter, or a backend object.
        heartbeats: The rhythm of heartbeats. Where the service grants another ttl, the rhythm follows it.
        hooks: Callables that hear what happens.
        worker: The name under which this process claims. By default it has host, process and a random part, so that a
            worker that was started anew is not taken for the former one.
        retry_for: Seconds for which calls are repeated while the service is away; None: 30; 0: each is made once.
    """
    return Client(url_or_backend, heartbeats=heartbeats, hooks=hooks, worker=worker, retry_for=retry_for)


class Client:
    """A service, and the keeper of the leases that this process holds from it.

    It may be used by any number of threads and event loops at once. A forked child that goes on using it gets
    a connection of its own; the leases stay with the parent. Close it, or use it in a `with` block, to give back
    what was claimed and not begun.
    """

    def __init__(
        self,
        url_or_backend: str | Backend,
        *,
        heartbeats: Heartbeats | None = None,
        hooks: Sequence[Hook] = (),
        worker: str | None = None,
        retry_for: float | None = None,
        clock: Clock = BOOT_CLOCK,
        last_resort: Callable[[], None] | None = None,
        watchdog: Mode = "soft",
    ) -> None:
        if not url_or_backend:  # None too, from an environment that lacks a variable
            raise ConfigError("which service? Give a URL, as in http://127.0.0.1:8077, or a backend")
        check_arguments(service=url_or_backend, heartbeats=heartbeats, hooks=hooks, retry_for=retry_for)
        check_mode(watchdog)
        self.heartbeats = heartbeats or Heartbeats()
        """The rhythm of heartbeats."""
        self.worker = worker or _incarnation()
        """The name under which this process claims."""
        self.hooks = Hooks(hooks)
        """The listeners of this client."""
        self._clock = clock
        self._last_resort = last_resort
        self._watchdog: Mode = watchdog
        self._retry_for = retry_for
        self._url = url_or_backend if isinstance(url_or_backend, str) else None
        # Made here, so that a URL that nobody understands is refused here.
        self._backend: Backend | None = self._open() if isinstance(url_or_backend, str) else url_or_backend
        if self._url is not None:
            self._url = getattr(self._backend, "url", None) or self._url  # relative paths mean this directory
        self._made_in = os.getpid()
        self._connection: Connection | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        service = self._url and _without_password(self._url)
        return f"<{type(self).__name__} of {service or 'a backend object'} as {self.worker!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client cannot be pickled: this process keeps its leases; connect() in the other process")

    def _open(self) -> Backend:
        assert self._url is not None  # noqa: S101 - for the type checker
        return open_backend(self._url, worker=self.worker)

    @property
    def url(self) -> str | None:
        """The URL of the service, from any working directory; None for a backend object. It may hold a password."""
        return self._url

    def listen(self, hook: Hook) -> None:
        """Have one more hook hear what happens, from now on."""
        self.hooks.add(hook)

    def connection(self) -> Connection:
        """This process's connection, made on first use. For leasekit's own parts.

        Raises `ConfigError` where gevent or eventlet has replaced what it works with, which may happen at any time.
        """
        check_process()
        connection = self._connection
        if connection is not None and not connection.forked:
            return connection
        lock = _connecting
        for _ in taken(lock):
            try:
                return self._connected()
            finally:
                lock.release()
        raise AssertionError  # it was taken

    def _connected(self) -> Connection:
        if self._is_closed:
            raise Closed
        if self._connection is not None and not self._connection.forked:  # another thread was first
            return self._connection
        backend = self._backend
        if backend is None or self._made_in != os.getpid():
            if self._url is None:
                raise ConfigError("a backend object is not carried over a fork: connect() by URL, or in the child")
            if self._made_in != os.getpid():
                self.worker, self._made_in = _incarnation(), os.getpid()
            backend = self._open()
        self._connection = Connection(
            backend,
            self.heartbeats,
            clock=self._clock,
            hooks=self.hooks,
            last_resort=self._last_resort,
            watchdog=self._watchdog,
        )
        self._backend = None
        return self._connection

    def check_process(self) -> None:
        """Raise `ConfigError` if this process can keep no leases, before there is work: where gevent has patched it.

        Nothing is opened.
        """
        check_process()

    def _reserve(self, task: Task, lease: object) -> tuple[Connection, HeldLease] | None:
        """Reserve what this process holds of a task, for as long as `lease` lives."""
        connection = self._connection
        if connection is None or connection.forked or (held := connection.keeper.get(task)) is None:
            return None
        return self._reserved(connection, held, lease)

    def _reserve_adopted(self, task: Task, lease: object) -> tuple[Connection, HeldLease] | None:
        """Hold a task that this client has not claimed; a task is adopted for one lease."""
        bind(task, self._reserve)
        connection = self.connection()
        held = connection.keeper.get(task)
        if held is None:
            held = connection.keeper.adopt(task)
            connection.driver.call_soon(connection.keeper.start_renewing, held)
        return self._reserved(connection, held, lease)

    def _reserved(self, connection: Connection, held: HeldLease, lease: object) -> tuple[Connection, HeldLease]:
        if not held.begun:
            held.wanted_by = connection.owner(held, lease)  # first: who is interrupted here has not reserved it
        held.reserved = True
        return connection, held

    # Claiming -----------------------------------------------------------------------------------------------------

    def tasks(self, *kinds: str, until_idle: float | None = None) -> "Tasks":
        """Return tasks of these kinds, one at a time, for `for` and `async for`.

        Each is beaten from when it was claimed; one of which no `lease(task)` was made when the loop asks for the next
        is given back.

        Args:
            kinds: One or more kinds of tasks.
            until_idle: The loop ends when no task has come for so many seconds; None: it goes on for ever.
        """
        if not kinds:
            raise ConfigError("tasks() of which kind? Name at least one")
        if len(kinds) > MAX_KINDS:
            raise ConfigError(f"tasks() of {len(kinds)} kinds: a claim has {MAX_KINDS} at most, use more loops")
        return Tasks(self.connection, self._reserve, kinds, until_idle=until_idle)

    def adopt(self, task: Task) -> Task:
        """Have `lease(task)` keep a task that somebody else has received from this client's service: your own loop.

        Returns the task. Nobody knows when it was granted, so the block begins once a first beat was acknowledged; if
        the service says that it is gone, the block raises `LeaseLost` and nothing of it runs. A task is adopted for one
        lease; one of which no lease is made is not touched.
        """
        return bind(task, self._reserve_adopted)

    def named(self, name: str, *, wait: float | None = None, ttl: float | None = None) -> Named:
        """A lease of a name, for leader election, singletons and locks: `with client.named("nightly"):`.

        One holder at a time, with a fence, kept by heartbeats like that of a task; the block begins when it is granted.
        `wait`: for at most so many seconds, then `NotGranted` is raised; 0 tries once, None waits for ever. `ttl`:
        after how many seconds without a beat the next one may have it; whoever uses a name first decides that.

        Raises ValueError for a name that is empty or too long, `LeasekitError` where the backend accepts no work.
        """
        return Named(self, self._reserve, name, wait=wait, ttl=self.heartbeats.ttl if ttl is None else ttl)

    def once(self, name: str, *, wait: float | None = 0, ttl: float | None = None) -> Once:
        """A lease of something that is to be run to its end once, however often it is delivered: a message, say.

        The block of `with client.once(message.id):` begins where nobody runs it and nobody has; it raises
        `NotGranted` while another does (after `wait` seconds), and `AlreadyDone` once a block of that name has ended
        well, or with `Fatal`. One that fails otherwise gives it back. `ttl` and errors as of `named`.
        """
        return Once(self, self._reserve, name, wait=wait, ttl=self.heartbeats.ttl if ttl is None else ttl)

    # Scheduling ---------------------------------------------------------------------------------------------------

    def schedule(self, kind: str, payload: Any = None, **options: Unpack[TaskOptions]) -> Scheduled:
        """Schedule one task: when this returns it is durable, and will be run until it is settled.

        While the service is away it is tried again for half a minute: under the same id, so it is scheduled once.
        Raises `Refused` (says which field), `Unavailable`, `Throttled`.
        """
        return self.schedule_all([NewTask(kind=kind, payload=payload, **options)])[0]

    async def aschedule(self, kind: str, payload: Any = None, **options: Unpack[TaskOptions]) -> Scheduled:
        """`schedule`, from an event loop."""
        return (await self.aschedule_all([NewTask(kind=kind, payload=payload, **options)]))[0]

    def schedule_all(self, tasks: Sequence[NewTask]) -> list[Scheduled]:
        """Schedule a batch: one answer for each, in order; refused as a whole where one item is bad."""
        with self.hooks.scheduling(_with_ids(tasks)) as identified:
            return self._call(partial(self._task_sink.schedule, identified))

    async def aschedule_all(self, tasks: Sequence[NewTask]) -> list[Scheduled]:
        """`schedule_all`, from an event loop."""
        with self.hooks.scheduling(_with_ids(tasks)) as identified:
            return await self._acall(partial(self._task_sink.schedule, identified))

    def get(self, task_id: str) -> TaskInfo | None:
        """Return everything about one task; None if no task has that id."""
        return self._call(partial(self._scheduler.get, task_id))

    async def aget(self, task_id: str) -> TaskInfo | None:
        """`get`, from an event loop."""
        return await self._acall(partial(self._scheduler.get, task_id))

    def list_tasks(
        self,
        *,
        kind: str | None = None,
        status: Status | None = None,
        collection: str | None = None,
        worker: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page:
        """Tasks that match all that is given, oldest first; `cursor` is where an earlier page ended."""
        wanted = partial(self._scheduler.list_tasks, kind=kind, status=status, collection=collection, worker=worker)
        return self._call(partial(wanted, cursor=cursor, limit=limit))

    async def alist_tasks(
        self,
        *,
        kind: str | None = None,
        status: Status | None = None,
        collection: str | None = None,
        worker: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page:
        """`list_tasks`, from an event loop."""
        wanted = partial(self._scheduler.list_tasks, kind=kind, status=status, collection=collection, worker=worker)
        return await self._acall(partial(wanted, cursor=cursor, limit=limit))

    def cancel(self, *task_ids: str) -> list[Verdict]:
        """Cancel tasks: at once where they wait, by an order to the holder where they run."""
        return self._call(partial(self._scheduler.cancel, task_ids))

    async def acancel(self, *task_ids: str) -> list[Verdict]:
        """`cancel`, from an event loop."""
        return await self._acall(partial(self._scheduler.cancel, task_ids))

    def wait_tasks(self, *task_ids: str, timeout: float | None = None) -> list[TaskInfo]:
        """Wait until these tasks have ended, and return them in this order; their `status` says how they ended.

        They are looked at more and more rarely, up to once a second. `timeout`: seconds, None for ever. While the
        service is away it is tried again as in every call.

        Raises TimeoutError that names those that have not ended, and `LeasekitError` for an id of no task.
        """
        connection = self.connection()
        return connection.run(self._all_ended(connection, task_ids, timeout))

    async def await_tasks(self, *task_ids: str, timeout: float | None = None) -> list[TaskInfo]:
        """`wait_tasks`, from an event loop."""
        connection = self.connection()
        return await connection.arun(self._all_ended(connection, task_ids, timeout))

    async def _all_ended(
        self, connection: Connection, task_ids: Sequence[str], timeout: float | None
    ) -> list[TaskInfo]:
        service = _scheduler(connection.backend)

        async def look(task_id: str) -> TaskInfo | None:
            if connection.closed:  # the driver may go on for others
                raise Closed
            return await _persist(lambda: service.get(task_id), self._retry_for)

        return await all_ended(look, task_ids, clock=connection.clock, timeout=timeout)

    def stats(self) -> Stats:
        """Count the tasks of each kind in each status."""
        return self._call(self._task_sink.stats)

    async def astats(self) -> Stats:
        """`stats`, from an event loop."""
        return await self._acall(self._task_sink.stats)

    def workers(self) -> list[WorkerInfo]:
        """List the workers that hold leases, or were heard of lately.

        Raises `LeasekitError` where the backend does not tell.
        """
        connection = self.connection()
        directory = _worker_directory(connection.backend)
        return connection.run(_persist(directory.workers, self._retry_for))

    async def aworkers(self) -> list[WorkerInfo]:
        """`workers`, from an event loop."""
        connection = self.connection()
        directory = _worker_directory(connection.backend)
        return await connection.arun(_persist(directory.workers, self._retry_for))

    @property
    def _task_sink(self) -> TaskSink:
        return _task_sink(self.connection().backend)

    @property
    def _scheduler(self) -> Scheduler:
        return _scheduler(self.connection().backend)

    def _call(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return self.connection().run(_persist(call, self._retry_for))

    async def _acall(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await self.connection().arun(_persist(call, self._retry_for))

    # The end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back what was claimed and not begun, wait for reports under way, and let go of the connection.

        A closed client stays closed: what is asked of it raises `Closed`. It can be closed again, to no effect.
        """
        if (connection := self._parting()) is not None:
            try:
                connection.run(connection.aclose())
            finally:
                connection.release()

    async def aclose(self) -> None:
        """`close`, from an event loop. Being cancelled does not cut it short: it takes some ten seconds at most."""
        if (connection := self._parting()) is not None:
            with anyio.CancelScope(shield=True):
                try:
                    await connection.arun(connection.aclose())
                finally:
                    await anyio.to_thread.run_sync(connection.release)  # waits for the thread's end

    def _parting(self) -> Connection | None:
        lock = _connecting
        for _ in taken(lock):
            try:
                connection = self._connection
                if connection is not None and not connection.forked:
                    connection.refuse_hooks()
                    self._connection = None
                self._is_closed = True
                return None if connection is None or connection.forked else connection
            finally:
                lock.release()
        raise AssertionError  # it was taken

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()


async def _persist(call: Callable[[], Coroutine[Any, Any, T]], retry_for: float | None) -> T:
    for_at_most = _RETRY_FOR if retry_for is None else retry_for
    return await call_until(lambda: call_once(call, within=_RETRY_FOR), for_at_most=for_at_most)


def _task_sink(backend: Backend) -> TaskSink:
    if not isinstance(backend, TaskSink):
        raise LeasekitError(
            f"{type(backend).__name__} hands out tasks, it does not accept them: schedule at the service"
        )
    return backend


def _scheduler(backend: Backend) -> Scheduler:
    _task_sink(backend)
    if not isinstance(backend, Scheduler):
        raise LeasekitError(f"{type(backend).__name__} accepts tasks, and does not know what becomes of each")
    return backend


def _worker_directory(backend: Backend) -> WorkerDirectory:
    if not isinstance(backend, WorkerDirectory):
        raise LeasekitError(f"{type(backend).__name__} does not tell who its workers are: ask the service itself")
    return backend


def _with_ids(tasks: Sequence[NewTask]) -> list[NewTask]:
    """An id for each, made up here: only so can a schedule whose answer was lost be repeated.

    Raises `Refused` where a payload would arrive as another value.
    """
    for item, task in enumerate(tasks):
        _check_numbers(item, task.payload)
    ids = iter(uuid7s(len(tasks), time.time()))
    return [task if task.id is not None else replace(task, id=next(ids)) for task in tasks]


def _check_numbers(item: int, payload: Any) -> None:
    try:
        data = msgspec.json.encode(payload)
    except (TypeError, ValueError, OverflowError, RecursionError):  # the service's adapter says of which item
        return
    if encoding.loses_number(payload, data):
        detail = encoding.NO_NUMBER
        raise Refused(f"item {item}: payload {detail}", errors=[{"item": item, "field": "payload", "detail": detail}])


def _without_password(url: str) -> str:
    """A URL as far as it is fit for a log: neither user and password nor options."""
    return re.sub(r"://[^/?#]*@", "://", url.partition("?")[0])


def _incarnation() -> str:
    host = re.sub(r"[^!-.0-~]", "-", socket.gethostname())[:80] or "host"
    return f"{host}:{os.getpid()}:{secrets.token_hex(4)}"
