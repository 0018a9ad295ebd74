"""The calls of operators on `Client`: what is done with tasks and workers from outside, and not by a task's holder."""

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Literal, TypeVar

from leasekit import hooks
from leasekit._arguments import check_ids, checked_status
from leasekit._driver.connection import Connection
from leasekit._driver.retrying import patience, repeat_until_answered
from leasekit._session import Session
from leasekit.backend import (
    Backend,
    ChainDirectory,
    GateDirectory,
    KindDirectory,
    NodeDirectory,
    Purger,
    Redriver,
    Scheduler,
    TaskSink,
    WorkerDirectory,
)
from leasekit.config import check_number
from leasekit.errors import LeasekitError
from leasekit.task import (
    GateInfo,
    KindInfo,
    KindSettings,
    NodeInfo,
    Page,
    Purged,
    Redriven,
    Stats,
    Status,
    Vacuumed,
    Verdict,
    WorkerInfo,
)

T = TypeVar("T")

_BATCH = 200  # tasks of one request: heartbeats of others wait no longer than one such batch takes


class Operating:
    """The part of `Client` that operators use."""

    hooks: hooks.Hooks
    _session: Session
    _retry_for: float | None

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

    def set_kind(self, kind: str, settings: KindSettings) -> KindInfo:
        """Replace all settings of a kind, for the tasks of it that are scheduled from now on, by whichever client.

        What a submission says itself, or the handler through which it is scheduled, wins over the settings of its kind.
        Tasks that were scheduled before keep their options; `retention` counts for them too. Raises `Refused` for
        settings out of bounds and for kinds of names, and `LeasekitError` if the backend has no settings of kinds.
        """
        _check_kind(kind)
        _check_settings(settings)
        return self._call(partial(self._kind_directory.set_kind, kind, settings))

    async def aset_kind(self, kind: str, settings: KindSettings) -> KindInfo:
        """Do what `set_kind` does, from an event loop."""
        _check_kind(kind)
        _check_settings(settings)
        return await self._acall(partial(self._kind_directory.set_kind, kind, settings))

    def delete_kind(self, kind: str) -> None:
        """Remove the settings of a kind, if it has any: leasekit's defaults hold again. Its tasks stay."""
        _check_kind(kind)
        self._call(partial(self._kind_directory.delete_kind, kind))

    async def adelete_kind(self, kind: str) -> None:
        """Do what `delete_kind` does, from an event loop."""
        _check_kind(kind)
        await self._acall(partial(self._kind_directory.delete_kind, kind))

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

    def redrive(
        self,
        *task_ids: str,
        kind: str | None = None,
        status: Status | None = None,
        collection: str | None = None,
        cursor: str | None = None,
        limit: int = 1000,
        rate: int | None = None,
        dry_run: bool = False,
    ) -> Redriven:
        """Make dead tasks ready again, each with a new life: these tasks, or those that match all filters.

        A new life has no failures and crashes; attempts, fences and the history continue. One verdict for each task:
        `redriven`, `gone` if it is unknown, or `failed` with the reason, which fails no other task. SQS takes a `kind`
        alone, moves all its dead letters in the background, and answers with the name of the move (`moving`).

        Args:
            task_ids: The tasks; none: the filters select them, and at least one must be given.
            kind: Only tasks of this kind.
            status: `dead` (None), `fatal_failure`, or `dropped`, which waits again for the tasks that it ran after.
            collection: Only tasks of this collection.
            cursor: Where an earlier answer ended.
            limit: The most tasks that the filters select, the oldest first; the answer's `cursor` leads to the others.
            rate: Tasks a second, at most; None: batch after batch.
            dry_run: Change nothing; a task that would be redriven is `redrivable`.
        """
        connection = self._session.connection()
        options = {"kind": kind, "status": checked_status(status), "collection": collection, "dry_run": dry_run}
        return connection.run(self._redrive(connection, task_ids, options, cursor=cursor, limit=limit, rate=rate))

    async def aredrive(
        self,
        *task_ids: str,
        kind: str | None = None,
        status: Status | None = None,
        collection: str | None = None,
        cursor: str | None = None,
        limit: int = 1000,
        rate: int | None = None,
        dry_run: bool = False,
    ) -> Redriven:
        """Do what `redrive` does, from an event loop."""
        connection = self._session.connection()
        options = {"kind": kind, "status": checked_status(status), "collection": collection, "dry_run": dry_run}
        return await connection.arun(
            self._redrive(connection, task_ids, options, cursor=cursor, limit=limit, rate=rate)
        )

    async def _redrive(
        self,
        connection: Connection,
        task_ids: Sequence[str],
        options: dict[str, Any],
        *,
        cursor: str | None,
        limit: int,
        rate: int | None,
    ) -> Redriven:
        check_ids(task_ids)
        check_number("limit", limit, unit="", least=1, whole=True)
        check_number("rate", rate, unit="", least=1, whole=True, or_none=True)
        service = _Redriving(connection, _require_redriver(connection.backend), self._retry_for, self.hooks, options)
        if not isinstance(connection.backend, Scheduler):  # it knows no single tasks, and redrives in the background
            return await service.ask(task_ids, **options, rate=rate)
        if task_ids and any(options[name] is not None for name in ("kind", "status", "collection")):
            raise TypeError("redrive() got ids and filters: give either")
        size, left, answer = min(_BATCH, rate or _BATCH), task_ids, Redriven()
        while True:
            began_at = connection.clock.now()
            if task_ids:
                more, left = await service.redrive(left[:size]), left[size:]
            else:
                more = await service.redrive_matching(cursor, min(size, limit - len(answer.tasks)))
                cursor = more.cursor
            answer = Redriven(tasks=[*answer.tasks, *more.tasks], cursor=cursor)
            if not left and cursor is None:
                return answer
            if rate is not None and not options["dry_run"]:
                await connection.clock.wait(asyncio.Event(), began_at + len(more.tasks) / rate)
            if not task_ids and len(answer.tasks) >= limit:
                return answer

    def purge(
        self, *, kind: str | None = None, status: Status | None = None, older_than: float = 0.0, dry_run: bool = True
    ) -> Purged:
        """Count the ended tasks that match, and with `dry_run=False` remove them, with their results and history.

        Tasks that wait or run are never removed. An id, a dedupe key or a `once` of a removed task is free again. The
        service removes a few tasks at a time, so that heartbeats go on; if its answer to such a step is lost, the tasks
        of that step are removed and not counted. Raises `LeasekitError` if the backend cannot.

        Args:
            kind: Only tasks of this kind.
            status: Only tasks that ended in this status.
            older_than: Only tasks that ended at least so many seconds ago. With 0, a worker whose report was not
                answered yet may be told that its task is unknown, and a `schedule` that was not answered yet may make
                its task again.
            dry_run: Remove nothing; the answer says what would be removed.
        """
        check_number("older_than", older_than)
        wanted: dict[str, Any] = {"kind": kind, "status": checked_status(status), "older_than": older_than}
        connection = self._session.connection()
        return connection.run(self._purge(_require_purger(connection.backend), wanted, dry_run=dry_run))

    async def apurge(
        self, *, kind: str | None = None, status: Status | None = None, older_than: float = 0.0, dry_run: bool = True
    ) -> Purged:
        """Do what `purge` does, from an event loop."""
        check_number("older_than", older_than)
        wanted: dict[str, Any] = {"kind": kind, "status": checked_status(status), "older_than": older_than}
        connection = self._session.connection()
        return await connection.arun(self._purge(_require_purger(connection.backend), wanted, dry_run=dry_run))

    async def _purge(self, service: Purger, wanted: dict[str, Any], *, dry_run: bool) -> Purged:
        kinds: dict[str, Counter[str]] = {}
        cursor: str | None = None
        while True:
            step = partial(service.purge, **wanted, cursor=cursor, dry_run=dry_run)
            purged = await repeat_until_answered(step, self._retry_for)
            for kind, counts in purged.kinds.items():
                kinds.setdefault(kind, Counter()).update(counts)
            cursor = purged.cursor
            if cursor is None:
                return Purged(kinds={kind: dict(counts) for kind, counts in kinds.items()})

    def vacuum(self) -> Vacuumed:
        """Give the space of removed tasks back to the disk, in small steps. Raises `Refused` if there is no file."""
        connection = self._session.connection()
        return connection.run(self._vacuum(_require_purger(connection.backend)))

    async def avacuum(self) -> Vacuumed:
        """Do what `vacuum` does, from an event loop."""
        connection = self._session.connection()
        return await connection.arun(self._vacuum(_require_purger(connection.backend)))

    async def _vacuum(self, service: Purger) -> Vacuumed:
        freed = 0
        while True:
            step = await repeat_until_answered(service.vacuum, self._retry_for)
            freed += step.freed
            if not step.left or not step.freed:
                return Vacuumed(freed=freed, left=step.left)

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

    def _listing(self, *, root: str | None, **filters: Any) -> Callable[..., Coroutine[Any, Any, Page]]:
        if root is not None:
            require_chains(self._session.connection().backend)
            filters["root"] = root
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
        return self._session.connection().run(repeat_until_answered(call, self._retry_for, at_most))

    def __patience__(self, at_most: float | None) -> tuple[float, float]:
        """Return for how long a call is repeated, and within how long each try must be answered, for leasekit's own."""
        return patience(self._retry_for, at_most)

    async def _acall(self, call: Callable[[], Coroutine[Any, Any, T]], *, at_most: float | None = None) -> T:
        return await self._session.connection().arun(repeat_until_answered(call, self._retry_for, at_most))


class _Redriving:
    """The requests of one call of `redrive`, which share an id: a repeated one has the first one's answer."""

    def __init__(
        self,
        connection: Connection,
        service: Redriver,
        retry_for: float | None,
        on_event: hooks.Hooks,
        options: dict[str, Any],
    ) -> None:
        self._clock, self._service, self._retry_for = connection.clock, service, retry_for
        self._hooks, self._options = on_event, options
        self._redrive_id = uuid.uuid4().hex

    async def ask(self, ids: Sequence[str], **more: Any) -> Redriven:
        return await repeat_until_answered(partial(self._service.redrive, ids, **more), self._retry_for)

    async def redrive(self, ids: Sequence[str]) -> Redriven:
        """Redrive these tasks."""
        answer = await self.ask(ids, redrive_id=self._redrive_id, dry_run=self._options["dry_run"])
        redriven = [task.id for task in answer.tasks if task.verdict == "redriven"]
        if redriven and self._hooks.active:
            self._hooks(hooks.Redriven(at=self._clock.now(), task_ids=redriven))
        return answer

    async def redrive_matching(self, cursor: str | None, size: int) -> Redriven:
        """Redrive the next tasks that match the filters."""
        # Selected first: a repeated request for ids has the same answer, and one for a filter would find others.
        selected = await self.ask((), **{**self._options, "dry_run": True}, cursor=cursor, limit=size)
        ids = [task.id for task in selected.tasks if task.verdict == "redrivable"]
        if self._options["dry_run"] or not ids:
            return selected
        done = {task.id: task for task in (await self.redrive(ids)).tasks}
        return Redriven(tasks=[done.get(task.id, task) for task in selected.tasks], cursor=selected.cursor)


def _check_kind(kind: object) -> None:
    """Raise TypeError if this is no kind."""
    if not isinstance(kind, str):
        raise TypeError(f"kinds are strings, got {type(kind).__name__}: give a string")


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


def _require_redriver(backend: Backend) -> Redriver:
    if not isinstance(backend, Redriver):
        raise LeasekitError(f"{type(backend).__name__} cannot redrive tasks: do it at the service itself")
    return backend


def require_chains(backend: Backend) -> ChainDirectory:
    if not isinstance(backend, ChainDirectory):
        raise LeasekitError(f"{type(backend).__name__} has no chains: cancel tasks by their ids")
    return backend


def _require_purger(backend: Backend) -> Purger:
    if not isinstance(backend, Purger):
        raise LeasekitError(f"{type(backend).__name__} cannot purge tasks: ask the service itself")
    return backend
