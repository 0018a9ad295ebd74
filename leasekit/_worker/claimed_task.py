"""Claimed task: one task on its way through a worker, from claim and buffer to run and report."""

import logging
import os
import traceback
from collections.abc import Callable
from typing import cast

import msgspec

from leasekit._driver.connection import Connection
from leasekit._driver.keeping.held_lease import HeldLease
from leasekit._driver.reporting import encoding
from leasekit._leased_run import LeasedRun, log_run
from leasekit._worker.handlers import Handler
from leasekit.errors import Cancelled, Draining, IdleTimeout, LeaseError, LeaseLost
from leasekit.hooks import log_fields
from leasekit.task import Settlement

logger = logging.getLogger("leasekit")

_CHILD_CAME_BACK = 70  # EX_SOFTWARE
_THEN = {"retry": "; it is tried again, unless this was its last attempt"}  # only the service knows
_FAILED = frozenset({"retry", "fatal", "crash"})


class ClaimedTask:
    """A task on its way through a worker. `begin` and `end` are for the executor's thread, the rest for the driver."""

    __slots__ = ("_connection", "_ended", "again", "handler", "held", "run", "since")

    def __init__(
        self,
        held: HeldLease,
        handler: Handler,
        connection: Connection,
        *,
        since: float,
        ended: Callable[["ClaimedTask", Settlement | None], None],
    ) -> None:
        self.held = held
        self.handler = handler
        self.since = since  # when the task came into the buffer
        self.run: LeasedRun | None = None  # set while the handler runs
        self.again: HeldLease | None = None  # the same task, if it was delivered again meanwhile
        self._connection = connection
        self._ended = ended

    @property
    def task_id(self) -> str:
        return self.held.task.id

    @property
    def key(self) -> str:
        """The id of the task; its token where the service may hold several tasks of one id."""
        task = self.held.task
        return task.id if self._connection.backend.capabilities.unique_ids else task.token

    @property
    def _log_fields(self) -> dict[str, str]:
        return log_fields(self.task_id, self.held.task.token)

    def begin(self) -> LeasedRun | None:
        """Begin a run, whose handler the caller then calls; None if the lease is over, and the handler must not run."""
        run = LeasedRun(self.held.task, idle_timeout=self.handler.idle_timeout)
        try:
            run.begin(self._connection, self.held)
        except LeaseError as error:
            log_run(self._connection, self.held.task, logging.INFO, f"is not begun: {error}")
            self._ended(self, None)
            return None
        self.run = run
        run.log_begin(logging.INFO)
        return run

    def interrupt(self) -> None:
        """Cancel a running async handler, without changing its lease."""
        if (cancel := self.held.listener) is not None:
            cancel()

    def end(self, run: LeasedRun, error: BaseException | None, *, interrupted: bool = False) -> None:
        """Record the end of the handler: its slot is free, and the settlement is on its way.

        `interrupted`: the worker was cancelled, not the handler ended; the task is then released. Otherwise a
        KeyboardInterrupt or SystemExit is a failure like any other: a handler does not end the worker.
        """
        if self._connection.forked:
            # A child process that the handler forked came back from the handler. It holds no lease and must not go on.
            os._exit(0 if error is None else _CHILD_CAME_BACK)
        if error is not None and any(encoding.each(error, MemoryError)):
            _free_frames(error)
        try:
            settlement = run.ended(error, interrupted="release" if interrupted else "retry")
        except BaseException as unreportable:  # of the error's own methods
            logger.exception("the outcome of task %s cannot be reported", run.task.id, extra=self._log_fields)
            settlement = run.ended(RuntimeError(f"its error cannot be reported: {type(unreportable).__qualname__}"))
        self._ended(self, settlement)
        is_stop = isinstance(error, LeaseLost | Cancelled | Draining | IdleTimeout)
        shown = None if interrupted or is_stop else error
        why = str(error) if is_stop else _message(settlement) if error is None else ""  # else the traceback says why
        self._log_end(run, settlement, why=why, error=shown)

    def settle(
        self, run: LeasedRun, settlement: Settlement | None, error: Exception | None = None, *, why: str = ""
    ) -> None:
        """Record the end of a handler in another process. No settlement: it was stopped because its lease was lost.

        `why` is for the log.
        """
        run.ended_elsewhere(settlement, error)
        self._ended(self, settlement)
        self._log_end(run, settlement, why=why or _message(settlement))

    def _log_end(
        self, run: LeasedRun, settlement: Settlement | None, *, why: str, error: BaseException | None = None
    ) -> None:
        outcome = "lost" if settlement is None else settlement.outcome
        level = logging.WARNING if outcome in _FAILED else logging.INFO
        run.log_end(level, outcome, f"{why and ': '}{why}{_THEN.get(outcome, '')}", error)


def _message(settlement: Settlement | None) -> str:
    """Return the message of an error such as a payload that does not fit. A value given to `fail` is for no log."""
    if settlement is None or settlement.error is None:
        return ""
    match msgspec.json.decode(msgspec.json.encode(settlement.error)):  # most are encoded already
        case {"message": str(message)}:
            return message
        case _:
            return ""


def _free_frames(error: BaseException) -> None:
    """Free the memory that the error's frames hold: after a MemoryError nothing could be reported without it."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()  # causes may form a cycle
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        left += (one.__cause__, one.__context__)
        if isinstance(one, BaseExceptionGroup):
            left += cast("BaseExceptionGroup[BaseException]", one).exceptions
