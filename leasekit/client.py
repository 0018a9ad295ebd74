"""connect() → Client: a backend plus the keeper of its leases, with two doors for every method.

The blocking methods have the plain names (`schedule`), the others an `a` in front (`await aschedule`), for asyncio and
trio alike. Both only hand over to the driver's thread, where backend and keeper live.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, Self, TypedDict, TypeVar, Unpack, cast

from leasekit._arguments import check_arguments, check_fields, check_ids, checked_labels, checked_status, new_task
from leasekit._batches import alone, parts, placed, with_ids
from leasekit._binding import bind
from leasekit._driver.clock import BOOT_CLOCK, Clock
from leasekit._driver.connection import Connection
from leasekit._driver.guarding.watchdog import Mode
from leasekit._driver.reporting.completion import all_ended
from leasekit._driver.reporting.encoding import submitted
from leasekit._driver.retrying import call_once, patience, repeat_until_answered
from leasekit._driver.thread import check_process
from leasekit._flow_calls import FlowCalls
from leasekit._operating import require_scheduler
from leasekit._session import Session
from leasekit.backend import Backend, EndSource
from leasekit.codecs import Codecs
from leasekit.config import Heartbeats, check_number
from leasekit.errors import BackendError, Closed, ConfigError
from leasekit.hooks import Hook, Hooks
from leasekit.named import Named, Once, kind_of, require_names
from leasekit.queues import TaskQueues
from leasekit.task import Ended, Health, NewTask, Page, Scheduled, Status, Task, TaskInfo, TaskOptions, Verdict
from leasekit.task_iterator import Tasks
from leasekit.wire import MAX_KINDS

__all__ = ["Client", "ServiceOptions", "connect"]

T = TypeVar("T")


class ServiceOptions(TypedDict, total=False):
    """Options of a service, most of them of `http://` and `https://`. None counts as not given."""

    headers: Mapping[str, str] | None
    """Headers of each request, such as `{"Authorization": "Bearer …"}` for a proxy in front of the server."""
    ca: str | os.PathLike[str] | None
    """A file or directory with the certificates to trust, in place of the public authorities and `SSL_CERT_FILE`."""
    proxy: str | None
    """The URL of the proxy that leads to the server, in place of `HTTPS_PROXY`, `ALL_PROXY` and their like."""
    token: str | None
    """The access token of this client, as `leasekit token create` has printed it, in place of `LEASEKIT_TOKEN`."""
    cert: str | os.PathLike[str] | None
    """A PEM file with the certificate of this client and its key, for servers that ask for one."""
    plain_http: bool | None
    """Whether the token may be sent over `http://` to another machine, where others on the way can read it."""
    queue: str | TaskQueues | None
    """The URL of the queues to which the server moves due tasks, `redis://…` or `sqs://…`: tasks are claimed as their
    messages say, and others are left. The service must have been started with the same `--queue`."""


def connect(
    url_or_backend: str | Backend | None = None,
    *,
    heartbeats: Heartbeats | None = None,
    hooks: Sequence[Hook] = (),
    worker: str | None = None,
    retry_for: float | None = None,
    codec: Codecs = None,
    **options: Unpack[ServiceOptions],
) -> "Client":
    """Return a client of the service at this URL, or of a backend object.

    Nothing is opened before the first call. Raises `UnknownScheme`, `MissingDependency`, `ConfigError`.

    Args:
        url_or_backend: The service: `http://host:port`, `sqlite:///file.db` (in the working directory),
            `sqlite:////path/file.db`, `postgresql://host/database`, `memory://`, the scheme of an installed adapter, or
            a backend object. None: the URL in the environment variable `LEASEKIT_URL`.
        heartbeats: The rhythm of heartbeats. If the service grants another ttl, the rhythm follows it.
        hooks: Callables that are called with each event.
        worker: The name under which this process claims. By default it has host, process and a random part, so that a
            restarted worker is not taken for the former one.
        retry_for: Seconds for which calls are repeated while the service is away; None: 30; 0: each is made once.
        codec: A `leasekit.codecs.Codec` that encrypts or compresses payloads, progress and results before they leave
            this process; or several, of which the first encodes, and each decodes what it has encoded.
        options: What the backend of the URL is given: `token`, `headers`, `ca`, `cert`, `proxy` and `plain_http` for
            `http://` and `https://`; and `queue`, the URL of queues, for a service that fills them (`ServiceOptions`).
    """
    service = os.environ.get("LEASEKIT_URL") if url_or_backend is None else url_or_backend
    if not service:
        raise ConfigError("which service? Give a URL, as in http://127.0.0.1:8077, or set LEASEKIT_URL")
    return Client(
        service,
        heartbeats=heartbeats,
        hooks=hooks,
        worker=worker,
        retry_for=retry_for,
        codec=codec,
        options=options,
    )


class Client(FlowCalls):
    """A service, and the keeper of the leases that this process holds from it.

    Any number of threads and event loops may use a client at once. A forked child that goes on using it gets a
    connection of its own; the leases stay with the parent. Closing the client, or leaving its `with` block, gives back
    the tasks that were claimed and not begun.
    """

    def __init__(
        self,
        url_or_backend: str | Backend,
        *,
        heartbeats: Heartbeats | None = None,
        hooks: Sequence[Hook] = (),
        worker: str | None = None,
        retry_for: float | None = None,
        codec: Codecs = None,
        clock: Clock = BOOT_CLOCK,
        last_resort: Callable[[], None] | None = None,
        watchdog: Mode = "soft",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check_arguments(service=url_or_backend, heartbeats=heartbeats, hooks=hooks, retry_for=retry_for)
        self.heartbeats = heartbeats or Heartbeats()
        """The rhythm of heartbeats."""
        self.hooks = Hooks(hooks)
        """The listeners of this client."""
        self._retry_for = retry_for
        self._session = Session(
            url_or_backend,
            heartbeats=self.heartbeats,
            hooks=self.hooks,
            worker=worker,
            clock=clock,
            last_resort=last_resort,
            watchdog=watchdog,
            options=options or {},
            codecs=codec,
        )

    def __repr__(self) -> str:
        # Neither user and password nor options, which are not fit for a log.
        service = self.url and re.sub(r"://[^/?#]*@", "://", self.url.partition("?")[0])
        return f"<{type(self).__name__} of {service or 'a backend object'} as {self.worker!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client cannot be pickled: this process keeps its leases; connect() in the other process")

    @property
    def url(self) -> str | None:
        """The URL of the service, from any working directory; None for a backend object. It may hold a password."""
        return self._session.url

    @property
    def options(self) -> Mapping[str, Any]:
        """The options that the backend was given. They may hold credentials."""
        return self._session.options

    @property
    def worker(self) -> str:
        """The name under which this process claims."""
        return self._session.worker

    def listen(self, hook: Hook) -> None:
        """Add a hook, which is called with each event from now on."""
        self.hooks.add(hook)

    def health(self) -> Health:
        """Return whether this process can keep its leases of this client. Any thread may call this; it does not wait.

        A client that is not in use is healthy: it holds nothing.
        """
        connection = self._session.current
        return Health(ok=True) if connection is None else connection.health()

    def __connection__(self) -> Connection:
        """Return this process's connection, for leasekit's own parts. See `Session.connection`."""
        return self._session.connection()

    def check_process(self) -> None:
        """Raise `ConfigError` if this process can keep no leases because gevent or eventlet has patched it."""
        check_process()

    def require_names(self) -> None:
        """Raise `ConfigError` if the service cannot hold leases of names (`named`, `once`). Nothing is opened."""
        if (backend := self._session.backend) is not None:
            require_names(backend)

    def tasks(
        self, *kinds: str, until_idle: float | None = None, labels: Mapping[str, str] = MappingProxyType({})
    ) -> "Tasks":
        """Return tasks of these kinds, one at a time, for `for` and `async for`.

        The lease of a task is renewed from its claim on. When the loop asks for the next task, the last one is given
        back unless a `lease(task)` was made of it. A process that can open no more files and sockets gets
        `LeasekitError` instead of a task.

        Args:
            kinds: One or more kinds of tasks.
            until_idle: The loop ends when no task has come for this many seconds; None: it goes on for ever.
            labels: What this process has, as `{"gpu": "a100"}`: it also gets tasks that require some of these.
        """
        if not kinds:
            raise ConfigError("tasks() got no kind: name at least one")
        if len(kinds) > MAX_KINDS:
            raise ConfigError(f"tasks() of {len(kinds)} kinds: a claim has {MAX_KINDS} at most, use more loops")
        check_number("until_idle", until_idle, or_infinity=True, or_none=True)
        return Tasks(
            self._session.connection,
            self._session.reserve,
            kinds,
            until_idle=until_idle,
            labels=checked_labels(labels),
        )

    def adopt(self, task: Task) -> Task:
        """Prepare a task that your own loop has received from this client's service for `lease(task)`, and return it.

        The time of the grant is unknown, so the block begins once a first heartbeat was acknowledged; if the service
        answers that the lease is gone, the block raises `LeaseLost` and none of its code runs. A task is adopted for
        one lease; without a lease it is not touched.
        """
        return bind(task, self._session.reserve_adopted)

    def named(self, name: str, *, wait: float | None = None, ttl: float | None = None) -> Named:
        """Return a lease of a name, for leader election, singletons and locks: `with client.named("nightly"):`.

        A name has one holder at a time, with a fence; heartbeats keep its lease. The block begins at the grant. `wait`:
        seconds after which `NotGranted` is raised; 0 tries once, None waits for ever. A service that is away is waited
        for no longer than that, and for `retry_for` at most: then `Unavailable` is raised. `ttl`: seconds without a
        heartbeat after which another holder may be granted the name; the first use of a name decides it.

        Raises ValueError for a name that is empty or too long, `LeasekitError` if the backend accepts no work.
        """
        return Named(self, self._session, name, wait=wait, ttl=self.heartbeats.ttl if ttl is None else ttl)

    def revoke(self, name: str) -> Verdict:
        """Ask the holder of a name to give it back: `cancel_requested`, `cancelled` if it is free, `gone` if unknown.

        The holder gets `Cancelled` where it calls `check()`, and keeps the name until its block or its lease has ended.
        Then the name can be granted again.
        """
        return self.cancel(kind_of(name))[0]

    async def arevoke(self, name: str) -> Verdict:
        """Do what `revoke` does, from an event loop."""
        return (await self.acancel(kind_of(name)))[0]

    def once(self, name: str, *, wait: float | None = 0, ttl: float | None = None) -> Once:
        """Return a lease for code that must run to its end once, however often it is triggered (by a message, say).

        The block of `with client.once(message.id):` raises `NotGranted` while another block of that name runs (after
        `wait` seconds), and `AlreadyDone` once one has ended well, or with `Fatal`. A block that fails otherwise gives
        the name back. `ttl` and errors as for `named`.
        """
        return Once(self, self._session, name, wait=wait, ttl=self.heartbeats.ttl if ttl is None else ttl)

    def schedule(self, kind: str, payload: Any = None, **options: Unpack[TaskOptions]) -> Scheduled:
        """Schedule one task: when this returns the task is durable, and will be run until it is settled.

        While the service is away the call is repeated for `retry_for`, under the same id, so that there is one task.
        Raises `Refused` (with the field), `Unavailable`, `Throttled`.
        """
        task = new_task(kind, payload, options)
        with alone():
            return self.schedule_all([task])[0]

    async def aschedule(self, kind: str, payload: Any = None, **options: Unpack[TaskOptions]) -> Scheduled:
        """Do what `schedule` does, from an event loop."""
        task = new_task(kind, payload, options)
        with alone():
            return (await self.aschedule_all([task]))[0]

    def schedule_all(self, tasks: Sequence[NewTask]) -> list[Scheduled]:
        """Schedule a batch: one answer for each task, in order. One bad task has the whole batch refused.

        More than 1,000 tasks are sent in parts of 1,000: if one is refused, the parts before it stay scheduled.
        """
        return self.__schedule__(tasks)

    async def aschedule_all(self, tasks: Sequence[NewTask]) -> list[Scheduled]:
        """Do what `schedule_all` does, from an event loop."""
        return await self.__aschedule__(tasks)

    def __schedule__(self, tasks: Sequence[NewTask], *, at_most: float | None = None) -> list[Scheduled]:
        """Schedule a batch, for leasekit's own parts; the call is repeated for no longer than `at_most` seconds."""
        check_fields(tasks)
        with self.hooks.scheduling(submitted(with_ids(tasks), self._session.coding)) as identified:
            answers: list[Scheduled] = []
            for first, part in parts(identified):
                with placed(first):
                    answers += self._call(partial(self._task_sink.schedule, part), at_most=at_most)
            return answers

    async def __aschedule__(self, tasks: Sequence[NewTask], *, at_most: float | None = None) -> list[Scheduled]:
        """Do what `__schedule__` does, from an event loop."""
        check_fields(tasks)
        with self.hooks.scheduling(submitted(with_ids(tasks), self._session.coding)) as identified:
            answers: list[Scheduled] = []
            for first, part in parts(identified):
                with placed(first):
                    answers += await self._acall(partial(self._task_sink.schedule, part), at_most=at_most)
            return answers

    def __deliver__(self, tasks: Sequence[NewTask], *, at_most: float) -> list[Scheduled]:
        """Schedule what was written elsewhere as it is, for leasekit's own parts: with its ids, and encoded there."""
        return self._call(partial(self._task_sink.schedule, tasks), at_most=at_most)

    def get(self, task_id: str) -> TaskInfo | None:
        """Return everything about one task; None if no task has that id."""
        check_ids([task_id])
        return self._call(partial(self._scheduler.get, task_id))

    async def aget(self, task_id: str) -> TaskInfo | None:
        """Do what `get` does, from an event loop."""
        check_ids([task_id])
        return await self._acall(partial(self._scheduler.get, task_id))

    def list_tasks(
        self,
        *,
        kind: str | None = None,
        status: Status | None = None,
        collection: str | None = None,
        tags: Sequence[str] = (),
        worker: str | None = None,
        root: str | None = None,
        newest: bool = False,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page:
        """Return the tasks that match all arguments, oldest first, or with `newest=True` newest first.

        `tags` selects tasks that have all of these, `root` a chain, by its first task. `cursor` is where an earlier
        page of the same listing ended.
        """
        status = checked_status(status)
        wanted = self._listing(kind=kind, status=status, collection=collection, tags=tags, worker=worker, root=root)
        return self._call(partial(wanted, newest=newest, cursor=cursor, limit=limit))

    async def alist_tasks(
        self,
        *,
        kind: str | None = None,
        status: Status | None = None,
        collection: str | None = None,
        tags: Sequence[str] = (),
        worker: str | None = None,
        root: str | None = None,
        newest: bool = False,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page:
        """Do what `list_tasks` does, from an event loop."""
        status = checked_status(status)
        wanted = self._listing(kind=kind, status=status, collection=collection, tags=tags, worker=worker, root=root)
        return await self._acall(partial(wanted, newest=newest, cursor=cursor, limit=limit))

    def cancel(self, *task_ids: str) -> list[Verdict]:
        """Cancel tasks: at once if they wait; if they run, their holders are told to stop."""
        check_ids(task_ids)
        return self._call(partial(self._scheduler.cancel, task_ids))

    async def acancel(self, *task_ids: str) -> list[Verdict]:
        """Do what `cancel` does, from an event loop."""
        check_ids(task_ids)
        return await self._acall(partial(self._scheduler.cancel, task_ids))

    def wait_tasks(self, *task_ids: str, timeout: float | None = None) -> list[TaskInfo]:
        """Wait until these tasks have ended, and return them in this order; their `status` says how they ended.

        A service with leasekit's own store is asked for all of them at once, and answers when one has ended; others are
        polled more and more rarely, down to once a second. `timeout`: seconds, None for ever. While the service is
        away, each question is repeated like every call.

        Raises TimeoutError with the tasks that have not ended, and `LeasekitError` for an unknown id.
        """
        connection = self._session.connection()
        return self._session.coding.shown(connection.run(self._all_ended(connection, task_ids, timeout)))

    async def await_tasks(self, *task_ids: str, timeout: float | None = None) -> list[TaskInfo]:
        """Do what `wait_tasks` does, from an event loop."""
        connection = self._session.connection()
        return self._session.coding.shown(await connection.arun(self._all_ended(connection, task_ids, timeout)))

    async def _all_ended(
        self, connection: Connection, task_ids: Sequence[str], timeout: float | None
    ) -> list[TaskInfo]:
        check_ids(task_ids)
        service = require_scheduler(connection.backend)

        async def poll(task_id: str) -> TaskInfo | None:
            if connection.closed:  # the driver may go on for others
                raise Closed
            return await repeat_until_answered(lambda: service.get(task_id), self._retry_for)

        async def ask(ids: Sequence[str], seconds: float) -> Ended:
            ended, within = cast("EndSource", service).ended, seconds + patience(self._retry_for)[1]
            if not connection.closed:  # the driver may go on for others
                with suppress(BackendError):  # the next question has this error too, and is repeated
                    found = await call_once(lambda: ended(ids, wait=seconds), within=within)
                    if found.tasks or not connection.closed:
                        return found
            if connection.closed:
                raise Closed
            return await repeat_until_answered(lambda: ended(ids, wait=0), self._retry_for)

        tells = isinstance(service, EndSource)
        clock = connection.clock
        return await all_ended(poll, task_ids, clock=clock, timeout=timeout, ask=ask if tells else None)

    def close(self) -> None:
        """Give back tasks that were not begun, wait for reports in progress, and close the connection.

        A closed client stays closed: its methods raise `Closed`. Closing it again has no effect.
        """
        if (connection := self._session.close()) is not None:
            connection.close_here()

    async def aclose(self) -> None:
        """Do what `close` does, from an event loop. It takes 10 s at most, and cancelling does not stop it."""
        if (connection := self._session.close()) is not None:
            await connection.aclose_whole()

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
