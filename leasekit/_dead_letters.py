"""The calls of operators on `Client` for tasks that have ended: look at dead tasks, redrive them, remove old tasks."""

import asyncio
import uuid
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack

from leasekit import hooks
from leasekit._arguments import check_ids, checked_selection
from leasekit._driver.connection import Connection
from leasekit._driver.retrying import repeat_until_answered
from leasekit._session import Session
from leasekit.backend import Backend, DeadLetters, Purger, Scheduler
from leasekit.config import check_number
from leasekit.errors import LeasekitError
from leasekit.task import Page, Purged, Redriven, Selection, Vacuumed

_BATCH = 200  # tasks of one request: heartbeats of others wait no longer than one such batch takes


class DeadLetterCalls:
    """The part of `Operating` for tasks that have ended."""

    hooks: hooks.Hooks
    _session: Session
    _retry_for: float | None

    def list_dead(self, *, cursor: str | None = None, limit: int = 100, **wanted: Unpack[Selection]) -> Page:
        """List the dead tasks that match all that is given, the oldest first.

        `status` may also be *fatal_failure* or *dropped*: what can be redriven. A page may have fewer tasks than
        `limit`, or none, and yet a cursor. Who reads all pages gets each task once, also if tasks are redriven
        meanwhile. Raises `LeasekitError` if the backend has no dead letters. Of SQS: a sample.

        Args:
            cursor: The cursor of the page before.
            limit: Tasks, at most.
            wanted: What the tasks have in common; `TaskSelection` has the meanings.
        """
        connection = self._session.connection()
        page = connection.run(self._list_dead(connection, wanted, cursor=cursor, limit=limit))
        return self._session.coding.shown(page)

    async def alist_dead(self, *, cursor: str | None = None, limit: int = 100, **wanted: Unpack[Selection]) -> Page:
        """Do what `list_dead` does, from an event loop."""
        connection = self._session.connection()
        page = await connection.arun(self._list_dead(connection, wanted, cursor=cursor, limit=limit))
        return self._session.coding.shown(page)

    async def _list_dead(self, connection: Connection, wanted: Selection, *, cursor: str | None, limit: int) -> Page:
        service = _require_dead_letters(connection.backend)
        step = partial(service.list_dead, cursor=cursor, limit=limit, **checked_selection(wanted))
        return await repeat_until_answered(step, self._retry_for)

    def redrive(
        self,
        *task_ids: str,
        cursor: str | None = None,
        limit: int = 1000,
        rate: int | None = None,
        dry_run: bool = False,
        **wanted: Unpack[Selection],
    ) -> Redriven:
        """Make dead tasks ready again, each with a new life: these tasks, or those that match all that is given.

        A new life has no failures and crashes; attempts, fences and the history continue. One verdict for each task:
        `redriven`, `gone` if it is unknown, or `failed` with the reason, which fails no other task. A call that was cut
        off can be made again: it goes on with the tasks that are left. SQS takes a `kind` alone, moves all its dead
        letters in the background, and answers with the name of the move (`moving`).

        Args:
            task_ids: The tasks; none: those that match, and something must be given by which they do.
            cursor: Where an earlier answer ended.
            limit: The most tasks that are selected, the oldest first; the answer's `cursor` leads to the others.
            rate: Tasks a second, at most; None: batch after batch.
            dry_run: Change nothing; a task that would be redriven is `redrivable`.
            wanted: What the tasks have in common; `TaskSelection` has the meanings. `status` is `dead` unless it is
                `fatal_failure`, or `dropped`: such a task waits again for the tasks that it ran after.
        """
        connection = self._session.connection()
        options = {**checked_selection(wanted), "dry_run": dry_run}
        return connection.run(self._redrive(connection, task_ids, options, cursor=cursor, limit=limit, rate=rate))

    async def aredrive(
        self,
        *task_ids: str,
        cursor: str | None = None,
        limit: int = 1000,
        rate: int | None = None,
        dry_run: bool = False,
        **wanted: Unpack[Selection],
    ) -> Redriven:
        """Do what `redrive` does, from an event loop."""
        connection = self._session.connection()
        options = {**checked_selection(wanted), "dry_run": dry_run}
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
        service = _Redriving(
            connection, _require_dead_letters(connection.backend), self._retry_for, self.hooks, options
        )
        if not isinstance(connection.backend, Scheduler):  # it knows no single tasks, and redrives in the background
            return await service.ask(task_ids, **options, rate=rate)
        if task_ids and options.keys() != {"dry_run"}:
            raise TypeError("redrive() got ids and filters: give either")
        return await service.redrive_all(task_ids, cursor, limit=limit, rate=rate)

    def purge(
        self, *task_ids: str, older_than: float = 0.0, dry_run: bool = True, **wanted: Unpack[Selection]
    ) -> Purged:
        """Count the ended tasks that match, and with `dry_run=False` remove them, with their results and history.

        Tasks that wait or run are never removed. An id, a dedupe key or a `once` of a removed task is free again. The
        service removes a few tasks at a time, so that heartbeats go on; if its answer to such a step is lost, the tasks
        of that step are removed and not counted. Raises `LeasekitError` if the backend cannot.

        Args:
            task_ids: The tasks; none: those that match all that is given.
            older_than: Only tasks that ended at least so many seconds ago. With 0, a worker whose report was not
                answered yet may be told that its task is unknown, and a `schedule` that was not answered yet may make
                its task again.
            dry_run: Remove nothing; the answer says what would be removed.
            wanted: What the tasks have in common; `TaskSelection` has the meanings.
        """
        connection = self._session.connection()
        return connection.run(self._purge(connection, task_ids, wanted, older_than=older_than, dry_run=dry_run))

    async def apurge(
        self, *task_ids: str, older_than: float = 0.0, dry_run: bool = True, **wanted: Unpack[Selection]
    ) -> Purged:
        """Do what `purge` does, from an event loop."""
        connection = self._session.connection()
        return await connection.arun(self._purge(connection, task_ids, wanted, older_than=older_than, dry_run=dry_run))

    async def _purge(
        self, connection: Connection, ids: Sequence[str], wanted: Selection, *, older_than: float, dry_run: bool
    ) -> Purged:
        check_ids(ids)
        check_number("older_than", older_than)
        chosen = checked_selection(wanted)
        if ids and chosen:
            raise TypeError("purge() got ids and filters: give either")
        service, kinds = _require_purger(connection.backend), dict[str, Counter[str]]()
        for start in range(0, len(ids) or 1, _BATCH):
            step = partial(service.purge, ids[start : start + _BATCH], older_than=older_than, dry_run=dry_run, **chosen)
            cursor: str | None = None
            while True:
                purged = await repeat_until_answered(partial(step, cursor=cursor), self._retry_for)
                for kind, counts in purged.kinds.items():
                    kinds.setdefault(kind, Counter()).update(counts)
                cursor = purged.cursor
                if cursor is None:
                    break
        return Purged(kinds={kind: dict(counts) for kind, counts in kinds.items()})

    def vacuum(self) -> Vacuumed:
        """Give the space of removed tasks back to the disk, in small steps. Raises `Refused` if there is no file."""
        connection = self._session.connection()
        return connection.run(self._vacuum(_require_space(connection.backend)))

    async def avacuum(self) -> Vacuumed:
        """Do what `vacuum` does, from an event loop."""
        connection = self._session.connection()
        return await connection.arun(self._vacuum(_require_space(connection.backend)))

    async def _vacuum(self, service: Purger) -> Vacuumed:
        freed = 0
        while True:
            step = await repeat_until_answered(service.vacuum, self._retry_for)
            freed += step.freed
            if not step.left or not step.freed:
                return Vacuumed(freed=freed, left=step.left)


class _Redriving:
    """The requests of one call of `redrive`, which share an id: a repeated one has the first one's answer."""

    def __init__(
        self,
        connection: Connection,
        service: DeadLetters,
        retry_for: float | None,
        on_event: hooks.Hooks,
        options: dict[str, Any],
    ) -> None:
        self._clock, self._service, self._retry_for = connection.clock, service, retry_for
        self._hooks, self._options = on_event, options
        self._redrive_id = uuid.uuid4().hex

    async def ask(self, ids: Sequence[str], **more: Any) -> Redriven:
        return await repeat_until_answered(partial(self._service.redrive, ids, **more), self._retry_for)

    async def redrive_all(
        self, task_ids: Sequence[str], cursor: str | None, *, limit: int, rate: int | None
    ) -> Redriven:
        """Redrive these tasks, or up to `limit` of those that match, batch by batch, at most `rate` a second."""
        size, left, answer = min(_BATCH, rate or _BATCH), task_ids, Redriven()
        while True:
            began_at = self._clock.now()
            if task_ids:
                more, left = await self.redrive(left[:size]), left[size:]
            else:
                more = await self.redrive_matching(cursor, min(size, limit - len(answer.tasks)))
                cursor = more.cursor
            answer = Redriven(tasks=[*answer.tasks, *more.tasks], cursor=cursor)
            if not left and cursor is None:
                return answer
            if rate is not None and not self._options["dry_run"]:
                await self._clock.wait(asyncio.Event(), began_at + len(more.tasks) / rate)
            if not task_ids and len(answer.tasks) >= limit:
                return answer

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


def _require_dead_letters(backend: Backend) -> DeadLetters:
    if not isinstance(backend, DeadLetters):
        raise LeasekitError(f"{type(backend).__name__} has no dead letters: look for them at the service itself")
    return backend


def _require_purger(backend: Backend) -> Purger | DeadLetters:
    if not isinstance(backend, Purger | DeadLetters):
        raise LeasekitError(f"{type(backend).__name__} cannot purge tasks: ask the service itself")
    return backend


def _require_space(backend: Backend) -> Purger:
    if not isinstance(backend, Purger):
        raise LeasekitError(f"{type(backend).__name__} has no space to give back: ask the service itself")
    return backend
