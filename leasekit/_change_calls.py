"""The calls of operators on `Client` for tasks that wait: change when they are due, and how urgent they are."""

import uuid
from collections import Counter
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Unpack

from leasekit._arguments import check_ids, checked_selection
from leasekit._driver.retrying import repeat_until_answered
from leasekit._session import Session
from leasekit.backend import Backend, BulkChanger, Rescheduler
from leasekit.errors import LeasekitError
from leasekit.task import Matched, Rescheduled, Selection


class ChangeCalls:
    """The part of `Operating` for tasks that wait."""

    _session: Session
    _retry_for: float | None

    def reschedule(
        self,
        task_id: str,
        *,
        at: datetime | None = None,
        delay: float | timedelta | None = None,
        priority: int | None = None,
    ) -> Rescheduled:
        """Change when a waiting task is due, or its priority; `delay=0` makes it due now. What is not given stays.

        The task still waits for its turn: behind a closed gate, for other tasks, at a limit. Raises `Refused` with the
        reason if it runs, has ended or is unknown, and `LeasekitError` if the backend cannot change tasks.

        Args:
            task_id: The task.
            at: When it is due: an instant with a time zone.
            delay: In place of `at`: seconds from now on, by the service's clock.
            priority: 0 is the most urgent, 4 the least.
        """
        connection = self._session.connection()
        call = _rescheduling(connection.backend, task_id, at=at, delay=delay, priority=priority)
        return connection.run(repeat_until_answered(call, self._retry_for))

    async def areschedule(
        self,
        task_id: str,
        *,
        at: datetime | None = None,
        delay: float | timedelta | None = None,
        priority: int | None = None,
    ) -> Rescheduled:
        """Do what `reschedule` does, from an event loop."""
        connection = self._session.connection()
        call = _rescheduling(connection.backend, task_id, at=at, delay=delay, priority=priority)
        return await connection.arun(repeat_until_answered(call, self._retry_for))

    def cancel_matching(self, *, token: str | None = None, **wanted: Unpack[Selection]) -> Matched:
        """Count the tasks that match and have not ended, and with the `token` of that answer cancel them.

        Tasks that wait are cancelled, those that run are told to stop. None that was scheduled after the count began is
        touched. The service cancels a few at a time, so that heartbeats go on; a call that was cut off can be made
        again. Raises `Refused` for a token of other filters, and `LeasekitError` if the backend cannot.

        Args:
            token: That of the answer of this same call without a token; None: nothing is cancelled.
            wanted: What the tasks have in common; `TaskSelection` has the meanings.
        """
        connection = self._session.connection()
        return connection.run(self._in_steps(_require_bulk(connection.backend).cancel_matching, token, wanted))

    async def acancel_matching(self, *, token: str | None = None, **wanted: Unpack[Selection]) -> Matched:
        """Do what `cancel_matching` does, from an event loop."""
        connection = self._session.connection()
        return await connection.arun(self._in_steps(_require_bulk(connection.backend).cancel_matching, token, wanted))

    def reschedule_matching(
        self,
        *,
        at: datetime | None = None,
        delay: float | timedelta | None = None,
        priority: int | None = None,
        token: str | None = None,
        **wanted: Unpack[Selection],
    ) -> Matched:
        """Count the tasks that match and wait, and with the `token` of that answer reschedule them.

        `at`, `delay` and `priority` are those of `reschedule`, the rest is as `cancel_matching` has it.
        """
        connection = self._session.connection()
        call = partial(
            _require_bulk(connection.backend).reschedule_matching, at=at, delay=_seconds(delay), priority=priority
        )
        return connection.run(self._in_steps(call, token, wanted))

    async def areschedule_matching(
        self,
        *,
        at: datetime | None = None,
        delay: float | timedelta | None = None,
        priority: int | None = None,
        token: str | None = None,
        **wanted: Unpack[Selection],
    ) -> Matched:
        """Do what `reschedule_matching` does, from an event loop."""
        connection = self._session.connection()
        call = partial(
            _require_bulk(connection.backend).reschedule_matching, at=at, delay=_seconds(delay), priority=priority
        )
        return await connection.arun(self._in_steps(call, token, wanted))

    async def _in_steps(
        self, call: Callable[..., Coroutine[Any, Any, Matched]], token: str | None, wanted: Selection
    ) -> Matched:
        chosen, is_dry = checked_selection(wanted), token is None
        kinds, cursor = dict[str, Counter[str]](), None
        while True:
            step = partial(call, dry_run=is_dry, token=token, cursor=cursor, **chosen)
            matched = await repeat_until_answered(step, self._retry_for)
            for kind, counts in matched.kinds.items():
                kinds.setdefault(kind, Counter()).update(counts)
            token, cursor = matched.token, matched.cursor
            if cursor is None:
                return Matched(kinds={kind: dict(counts) for kind, counts in kinds.items()}, token=token)


def _seconds(delay: float | timedelta | None) -> float | None:
    return delay.total_seconds() if isinstance(delay, timedelta) else delay


def _rescheduling(
    backend: Backend, task_id: str, *, delay: float | timedelta | None, **wanted: Any
) -> Callable[[], Coroutine[Any, Any, Rescheduled]]:
    check_ids([task_id])
    service = _require_rescheduler(backend)
    return partial(service.reschedule, task_id, delay=_seconds(delay), request_id=uuid.uuid4().hex, **wanted)


def _require_rescheduler(backend: Backend) -> Rescheduler:
    if not isinstance(backend, Rescheduler):
        raise LeasekitError(
            f"{type(backend).__name__} cannot change a task that waits: cancel it, and schedule another"
        )
    return backend


def _require_bulk(backend: Backend) -> BulkChanger:
    if not isinstance(backend, BulkChanger):
        raise LeasekitError(f"{type(backend).__name__} has no bulk acts: list the tasks, and change each by its id")
    return backend
