"""The calls of operators on `Client`: what is done with tasks and workers from outside, and not by a task's holder."""

from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Literal, TypeVar

from leasekit._arguments import check_ids
from leasekit._change_calls import ChangeCalls
from leasekit._dead_letters import DeadLetterCalls
from leasekit._driver.retrying import patience, repeat_until_answered
from leasekit._periodic_calls import PeriodicCalls
from leasekit._token_calls import TokenCalls
from leasekit.backend import (
    Backend,
    ChainDirectory,
    GateDirectory,
    KindDirectory,
    NodeDirectory,
    Scheduler,
    TaskSink,
    WorkerDirectory,
    WorkerDrainer,
)
from leasekit.config import check_number
from leasekit.errors import LeasekitError
from leasekit.task import (
    GateInfo,
    KindInfo,
    KindSettings,
    NodeInfo,
    Page,
    Stats,
    Verdict,
    WorkerInfo,
)

T = TypeVar("T")

_BATCH = 200  # tasks of one request: heartbeats of others wait no longer than one such batch takes


class Operating(ChangeCalls, DeadLetterCalls, PeriodicCalls, TokenCalls):
    """The part of `Client` that operators use."""

    def stats(self) -> Stats:
        """Count the tasks of each kind in each status."""
        return self._call(self._task_sink.stats)

    async def astats(self) -> Stats:
        """Do what `stats` does, from an event loop."""
        return await self._acall(self._task_sink.stats)

    def workers(self) -> list[WorkerInfo]:
        """List the workers that hold leases, or sent a request lately. Raises `LeasekitError` if the backend cannot."""
        return self._call(self._worker_directory.workers)

    async def aworkers(self) -> list[WorkerInfo]:
        """Do what `workers` does, from an event loop."""
        return await self._acall(self._worker_directory.workers)

    def drain_worker(self, worker: str) -> WorkerInfo:
        """Have a worker finish what it holds, take nothing new, and stop; return what it holds at present.

        From the return on, no process of the service grants it a task. A `leasekit.Worker` then ends as after SIGTERM,
        but without a limit of time, and a loop over `client.tasks()` ends. The drain is over when `undrain_worker`
        takes it back, when a process that started later claims under the same name, and ten minutes after the worker
        was last heard of. Raises `Refused` if there is no such worker, and `LeasekitError` if the backend cannot.

        Args:
            worker: The name of the worker, as `workers` lists it.
        """
        return self._call(partial(self._worker_drainer.drain_worker, worker))

    async def adrain_worker(self, worker: str) -> WorkerInfo:
        """Do what `drain_worker` does, from an event loop."""
        return await self._acall(partial(self._worker_drainer.drain_worker, worker))

    def undrain_worker(self, worker: str) -> None:
        """Take a drain back, if there is one: the worker is granted tasks again, unless it has stopped by now."""
        self._call(partial(self._worker_drainer.undrain_worker, worker))

    async def aundrain_worker(self, worker: str) -> None:
        """Do what `undrain_worker` does, from an event loop."""
        await self._acall(partial(self._worker_drainer.undrain_worker, worker))

    def nodes(self) -> list[NodeInfo]:
        """List the servers, and other processes that have the store open. Raises `LeasekitError` if the backend cannot.

        A file, and a store in memory, have one. Those that have left stay in the list for ten minutes.
        """
        return self._call(self._node_directory.nodes)

    async def anodes(self) -> list[NodeInfo]:
        """Do what `nodes` does, from an event loop."""
        return await self._acall(self._node_directory.nodes)

    def kinds(self) -> list[KindInfo]:
        """List the kinds that have settings, sorted by name. Raises `LeasekitError` if the backend has none."""
        return self._call(self._kind_directory.kinds)

    async def akinds(self) -> list[KindInfo]:
        """Do what `kinds` does, from an event loop."""
        return await self._acall(self._kind_directory.kinds)

    def kind(self, kind: str) -> KindInfo | None:
        """Return the settings of a kind; None: it has none. Raises `LeasekitError` if the backend has none at all."""
        _check_kind(kind)
        return self._call(partial(self._kind_directory.kind, kind))

    async def akind(self, kind: str) -> KindInfo | None:
        """Do what `kind` does, from an event loop."""
        _check_kind(kind)
        return await self._acall(partial(self._kind_directory.kind, kind))

    def set_kind(self, kind: str, settings: KindSettings, *, was: KindSettings | None = None) -> KindInfo:
        """Replace all settings of a kind, for the tasks of it that are scheduled from now on, by whichever client.

        What a submission says itself, or the handler through which it is scheduled, wins over the settings of its kind.
        Tasks that were scheduled before keep their options; `retention` counts for them too. Raises `Refused` for
        settings out of bounds and for kinds of names, and `LeasekitError` if the backend has no settings of kinds.

        `was`: the settings that the kind was seen to have (`KindSettings()`: none). If others have changed them since,
        nothing is changed, and `Refused` is raised, with an error whose field is *was*: get them, and decide again.
        """
        _check_kind(kind)
        _check_settings(settings)
        return self._call(partial(self._kind_directory.set_kind, kind, settings, **_seen(was)))

    async def aset_kind(self, kind: str, settings: KindSettings, *, was: KindSettings | None = None) -> KindInfo:
        """Do what `set_kind` does, from an event loop."""
        _check_kind(kind)
        _check_settings(settings)
        return await self._acall(partial(self._kind_directory.set_kind, kind, settings, **_seen(was)))

    def delete_kind(self, kind: str, *, was: KindSettings | None = None) -> None:
        """Remove the settings of a kind, if it has any: leasekit's defaults hold again. Its tasks stay.

        `was`: as in `set_kind`.
        """
        _check_kind(kind)
        self._call(partial(self._kind_directory.delete_kind, kind, **_seen(was)))

    async def adelete_kind(self, kind: str, *, was: KindSettings | None = None) -> None:
        """Do what `delete_kind` does, from an event loop."""
        _check_kind(kind)
        await self._acall(partial(self._kind_directory.delete_kind, kind, **_seen(was)))

    def gates(self) -> list[GateInfo]:
        """List the closed gates: those of kinds, then those of collections. Raises `LeasekitError` without gates."""
        return self._call(self._gate_directory.gates)

    async def agates(self) -> list[GateInfo]:
        """Do what `gates` does, from an event loop."""
        return await self._acall(self._gate_directory.gates)

    def pause(
        self,
        *,
        kind: str | None = None,
        collection: str | None = None,
        until: float | datetime | None = None,
        reason: str | None = None,
    ) -> GateInfo:
        """Close the gate of a kind or of a collection: its tasks wait, and those that run are left alone.

        From the return on, no process is granted such a task. Tasks are accepted meanwhile, keep their order, and spend
        no attempt. It replaces a gate that is closed already. Raises `Refused` for kinds of names, and `LeasekitError`
        if the backend has no gates.

        Args:
            kind: The kind that is closed; either this or `collection`.
            collection: The collection that is closed.
            until: When the gate opens by itself: seconds from now, or an instant; None: when `open` is called.
            reason: Why, for those who ask what the tasks wait for.
        """
        return self._call(self._closing("pause", kind, collection, until, reason))

    async def apause(
        self,
        *,
        kind: str | None = None,
        collection: str | None = None,
        until: float | datetime | None = None,
        reason: str | None = None,
    ) -> GateInfo:
        """Do what `pause` does, from an event loop."""
        return await self._acall(self._closing("pause", kind, collection, until, reason))

    def drop(
        self,
        *,
        kind: str | None = None,
        collection: str | None = None,
        until: float | datetime | None = None,
        reason: str | None = None,
    ) -> GateInfo:
        """Close a gate as `pause` does, but end due tasks as *cancelled* instead of having them wait.

        Their `reason` names the gate. They end a few at a time, in the background; tasks of a collection when a worker
        that claims their kind comes to them. The arguments are those of `pause`.
        """
        return self._call(self._closing("drop", kind, collection, until, reason))

    async def adrop(
        self,
        *,
        kind: str | None = None,
        collection: str | None = None,
        until: float | datetime | None = None,
        reason: str | None = None,
    ) -> GateInfo:
        """Do what `drop` does, from an event loop."""
        return await self._acall(self._closing("drop", kind, collection, until, reason))

    def open(self, *, kind: str | None = None, collection: str | None = None) -> None:
        """Open the gate of a kind or of a collection, if it is closed: its tasks can be claimed again."""
        self._call(partial(self._gate_directory.open_gate, kind=kind, collection=collection))

    async def aopen(self, *, kind: str | None = None, collection: str | None = None) -> None:
        """Do what `open` does, from an event loop."""
        await self._acall(partial(self._gate_directory.open_gate, kind=kind, collection=collection))

    def _closing(
        self,
        mode: Literal["pause", "drop"],
        kind: str | None,
        collection: str | None,
        until: float | datetime | None,
        reason: str | None,
    ) -> Callable[[], Coroutine[Any, Any, GateInfo]]:
        if not isinstance(until, datetime):
            check_number("until", until, or_none=True)
        return partial(
            self._gate_directory.set_gate,
            kind=kind,
            collection=collection,
            mode=mode,
            until=until if isinstance(until, datetime) else None,
            duration=None if isinstance(until, datetime) else until,
            reason=reason,
        )

    def cancel_chain(self, task_id: str) -> list[Verdict]:
        """Cancel all tasks that came from the same first task as this one, itself included, if they have not ended.

        A task that comes from them later, by a run that goes on, is cancelled where it is accepted. Raises
        `LeasekitError` if the backend has no chains.
        """
        connection = self._session.connection()
        return connection.run(self._cancel_chain(require_chains(connection.backend), task_id))

    async def acancel_chain(self, task_id: str) -> list[Verdict]:
        """Do what `cancel_chain` does, from an event loop."""
        connection = self._session.connection()
        return await connection.arun(self._cancel_chain(require_chains(connection.backend), task_id))

    async def _cancel_chain(self, service: ChainDirectory, task_id: str) -> list[Verdict]:
        check_ids([task_id])
        verdicts: list[Verdict] = []
        cursor: str | None = None
        while True:
            step = partial(service.cancel_chain, task_id, cursor=cursor)
            cancelled = await repeat_until_answered(step, self._retry_for)
            verdicts += cancelled.tasks
            cursor = cancelled.cursor
            if cursor is None:
                return verdicts

    def _listing(
        self, *, root: str | None, tags: Sequence[str] = (), **filters: Any
    ) -> Callable[..., Coroutine[Any, Any, Page]]:
        backend = self._session.connection().backend
        if root is not None:
            require_chains(backend)
            filters["root"] = root
        if tags:
            require_tags(backend)
            filters["tags"] = list(tags)
        return partial(self._scheduler.list_tasks, **filters)

    @property
    def _task_sink(self) -> TaskSink:
        return require_task_sink(self._session.connection().backend)

    @property
    def _scheduler(self) -> Scheduler:
        return require_scheduler(self._session.connection().backend)

    @property
    def _worker_directory(self) -> WorkerDirectory:
        backend = self._session.connection().backend
        if not isinstance(backend, WorkerDirectory):
            raise LeasekitError(f"{type(backend).__name__} cannot list its workers: ask the service itself")
        return backend

    @property
    def _worker_drainer(self) -> WorkerDrainer:
        backend = self._session.connection().backend
        if not isinstance(backend, WorkerDrainer):
            raise LeasekitError(f"{type(backend).__name__} cannot drain workers: send SIGTERM to the worker")
        return backend

    @property
    def _node_directory(self) -> NodeDirectory:
        backend = self._session.connection().backend
        if not isinstance(backend, NodeDirectory):
            raise LeasekitError(f"{type(backend).__name__} cannot list nodes: ask the service itself")
        return backend

    @property
    def _kind_directory(self) -> KindDirectory:
        backend = self._session.connection().backend
        if not isinstance(backend, KindDirectory):
            raise LeasekitError(f"{type(backend).__name__} has no settings of kinds: give options with each task")
        return backend

    @property
    def _gate_directory(self) -> GateDirectory:
        backend = self._session.connection().backend
        if not isinstance(backend, GateDirectory):
            raise LeasekitError(f"{type(backend).__name__} has no gates: stop the workers, or cancel tasks")
        return backend

    def _call(self, call: Callable[[], Coroutine[Any, Any, T]], *, at_most: float | None = None) -> T:
        session = self._session
        return session.coding.shown(session.connection().run(repeat_until_answered(call, self._retry_for, at_most)))

    def __patience__(self, at_most: float | None) -> tuple[float, float]:
        """Return for how long a call is repeated, and within how long each try must be answered, for leasekit's own."""
        return patience(self._retry_for, at_most)

    async def _acall(self, call: Callable[[], Coroutine[Any, Any, T]], *, at_most: float | None = None) -> T:
        session, calling = self._session, repeat_until_answered(call, self._retry_for, at_most)
        return session.coding.shown(await session.connection().arun(calling))


def _check_kind(kind: object) -> None:
    """Raise TypeError if this is no kind."""
    if not isinstance(kind, str):
        raise TypeError(f"kinds are strings, got {type(kind).__name__}: give a string")


def _seen(was: KindSettings | None) -> dict[str, Any]:
    """Return the argument of a backend that says what a kind was seen to have; none if a client has not looked."""
    if was is None:
        return {}
    _check_settings(was)
    return {"was": was}


def _check_settings(settings: object) -> None:
    """Raise TypeError if these are no settings of a kind."""
    if not isinstance(settings, KindSettings):
        raise TypeError(f"settings must be leasekit.KindSettings(…), got {type(settings).__name__}")


def require_task_sink(backend: Backend) -> TaskSink:
    if not isinstance(backend, TaskSink):
        raise LeasekitError(
            f"{type(backend).__name__} hands out tasks, it does not accept them: schedule at the service"
        )
    return backend


def require_scheduler(backend: Backend) -> Scheduler:
    require_task_sink(backend)
    if not isinstance(backend, Scheduler):
        raise LeasekitError(f"{type(backend).__name__} accepts tasks, and does not know what becomes of each")
    return backend


def require_tags(backend: Backend) -> None:
    if not backend.capabilities.tags:
        raise LeasekitError(
            f"{type(backend).__name__} cannot find tasks by their tags: list them by kind or collection"
        )


def require_chains(backend: Backend) -> ChainDirectory:
    if not isinstance(backend, ChainDirectory):
        raise LeasekitError(f"{type(backend).__name__} has no chains: cancel tasks by their ids")
    return backend
