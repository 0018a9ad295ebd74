"""One task on its way through a worker: claimed, buffered, run, reported."""

import logging
import os
import traceback
from collections.abc import Callable
from typing import cast

from leasekit._driver import encoding
from leasekit._driver.connection import Connection
from leasekit._driver.holding import Holding
from leasekit.errors import Cancelled, Draining, Fatal, IdleTimeout, LeaseError, LeaseLost
from leasekit.hooks import about
from leasekit.lease import Lease
from leasekit.task import Settlement
from leasekit.worker.handlers import Handler

__all__ = ["Work"]

logger = logging.getLogger("leasekit")

_CHILD_CAME_BACK = 70  # EX_SOFTWARE


class Work:
    """One task, its handler, and the lease under which the handler runs.

    `begin` and `end` are the executor's, in its own thread; all else is the driver's.
    """

    __slots__ = ("_connection", "_ended", "again", "handler", "holding", "lease", "since")

    def __init__(
        self,
        holding: Holding,
        handler: Handler,
        connection: Connection,
        *,
        since: float,
        ended: Callable[["Work", Settlement | None], None],
    ) -> None:
        self.holding = holding
        self.handler = handler
        self.since = since  # when it came into the buffer
        self.lease: Lease | None = None  # once the body runs
        self.again: Holding | None = None  # the same task, delivered again meanwhile
        self._connection = connection
        self._ended = ended

    @property
    def task_id(self) -> str:
        return self.holding.task.id

    @property
    def _about(self) -> dict[str, str]:
        return about(self.task_id, self.holding.task.token)

    def begin(self) -> Lease | None:
        """The body starts; None where its lease is over, and it must not."""
        lease = Lease(self.holding.task, idle_timeout=self.handler.idle_timeout)
        try:
            lease.begin(self._connection, self.holding)
        except LeaseError as error:
            logger.info("task %s is not begun: %s", self.task_id, error, extra=self._about)
            self._ended(self, None)
            return None
        self.lease = lease
        return lease

    def interrupt(self) -> None:
        """Cancel an async body that runs, without a word of its lease."""
        if (cancel := self.holding.listener) is not None:
            cancel()

    def end(self, lease: Lease, error: BaseException | None, *, interrupted: bool = False) -> None:
        """The body has ended, and the slot is free. The report is on its way from here.

        `interrupted`: not by itself, the worker was cancelled; the task is then given back. Otherwise a
        KeyboardInterrupt or SystemExit is a failure like any other: a handler does not end the worker.
        """
        if self._connection.forked:
            # A child that the handler forked has come back from it. It holds nothing, and must not be a second worker.
            os._exit(0 if error is None else _CHILD_CAME_BACK)
        if error is not None and any(encoding.each(error, MemoryError)):
            _let_go(error)
        try:
            settlement = lease.ended(error, interrupted="release" if interrupted else "retry")
        except Exception as unreportable:
            logger.exception("what task %s ended with cannot be reported", lease.task.id, extra=self._about)
            settlement = lease.ended(RuntimeError(f"its error cannot be reported: {type(unreportable).__qualname__}"))
        self._ended(self, settlement)
        if error is not None and not interrupted:
            self._log(lease, error)

    def settle(self, lease: Lease, settlement: Settlement | None, error: Exception | None = None) -> None:
        """`end`, of a body that ran in another process; None where it was stopped because its lease was lost."""
        lease.over(settlement, error)
        self._ended(self, settlement)

    def _log(self, lease: Lease, error: BaseException) -> None:
        task = lease.task
        if isinstance(error, LeaseLost | Cancelled | Draining | IdleTimeout):
            logger.info("task %s (%s) was stopped: %s", task.id, task.kind, error, extra=self._about)
        else:
            how = "for good" if isinstance(error, Fatal) else "and will be tried again"
            logger.warning("task %s (%s) failed, %s", task.id, task.kind, how, exc_info=error, extra=self._about)


def _let_go(error: BaseException) -> None:
    """Free what the body had when memory ran out: its frames hold it, and without memory nothing can be reported."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()  # causes may go round in a circle
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        left += (one.__cause__, one.__context__)
        if isinstance(one, BaseExceptionGroup):
            left += cast("BaseExceptionGroup[BaseException]", one).exceptions
