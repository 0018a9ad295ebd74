"""The calls of operators on `Client`: what is done with tasks from outside, and not by their holders."""

import asyncio
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from leasekit import hooks
from leasekit._arguments import check_ids, checked_status
from leasekit._driver.connection import Connection
from leasekit._driver.retrying import repeat_until_answered
from leasekit._session import Session
from leasekit.backend import Backend, Redriver, Scheduler
from leasekit.config import check_number
from leasekit.errors import LeasekitError
from leasekit.task import Redriven, Status

_BATCH = 200  # tasks of one request: heartbeats of others wait no longer than one such batch takes


class Operating:
    """The part of `Client` that operators use."""

    hooks: hooks.Hooks
    _session: Session
    _retry_for: float | None

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
        backend = _require_redriver(connection.backend)
        redrive_id, dry_run = uuid.uuid4().hex, options["dry_run"]

        async def ask(ids: Sequence[str], **more: Any) -> Redriven:
            return await repeat_until_answered(partial(backend.redrive, ids, **more), self._retry_for)

        async def batch(ids: Sequence[str]) -> Redriven:
            answer = await ask(ids, redrive_id=redrive_id, dry_run=dry_run)
            redriven = [task.id for task in answer.tasks if task.verdict == "redriven"]
            if redriven and self.hooks.active:
                self.hooks(hooks.Redriven(at=connection.clock.now(), task_ids=redriven))
            return answer

        async def page(size: int) -> Redriven:
            # Selected first: a repeated request for ids has the same answer, and one for a filter would find others.
            selected = await ask((), **{**options, "dry_run": True}, cursor=cursor, limit=size)
            ids = [task.id for task in selected.tasks if task.verdict == "redrivable"]
            if dry_run or not ids:
                return selected
            done = {task.id: task for task in (await batch(ids)).tasks}
            return Redriven(tasks=[done.get(task.id, task) for task in selected.tasks], cursor=selected.cursor)

        if not isinstance(backend, Scheduler):  # it does not know single tasks, and redrives in the background
            return await ask(task_ids, **options, rate=rate)
        if task_ids and any(options[name] is not None for name in ("kind", "status", "collection")):
            raise TypeError("redrive() got ids and filters: give either")
        size, left, answer = min(_BATCH, rate or _BATCH), list(task_ids), Redriven()
        while True:
            began_at = connection.clock.now()
            if task_ids:
                more, left = await batch(left[:size]), left[size:]
            else:
                more = await page(min(size, limit - len(answer.tasks)))
                cursor = more.cursor
            answer = Redriven(tasks=[*answer.tasks, *more.tasks], cursor=cursor)
            if not left and cursor is None:
                return answer
            if rate is not None and not dry_run:
                await connection.clock.wait(asyncio.Event(), began_at + len(more.tasks) / rate)
            if not task_ids and len(answer.tasks) >= limit:
                return answer


def _require_redriver(backend: Backend) -> Redriver:
    if not isinstance(backend, Redriver):
        raise LeasekitError(f"{type(backend).__name__} cannot redrive tasks: do it at the service itself")
    return backend
