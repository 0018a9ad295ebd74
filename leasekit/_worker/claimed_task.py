"""Claimed task: one task on its way through a worker, from claim and buffer to run and report.

buffer ──▶ begin … end ──▶ report
   ▲            └─ NotYet: it waits, its lease is kept
   └────────────────────┘
"""

import logging
import os
import traceback
from collections.abc import Callable
from typing import cast

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from leasekit._driver.connection import Connection
from leasekit._driver.keeping.held_lease import HeldLease
from leasekit._driver.reporting import encoding
from leasekit._leased_run import LeasedRun, log_run
from leasekit._worker.around import CHILD_CAME_BACK
from leasekit._worker.handlers import Handler
from leasekit.errors import Cancelled, CannotDecode, Draining, IdleTimeout, LeaseError, LeaseLost, NotYet
from leasekit.hooks import log_fields
from leasekit.task import Settlement, Task
from leasekit.wire import decode_value

logger = logging.getLogger("leasekit")

LONGEST_WAIT = 30.0
"""Seconds: a run that must wait for longer gives its task back, and any worker goes on when the wait is over."""

_THEN = {"retry": "; it is tried again, unless this was its last attempt"}  # only the service knows
_FAILED = frozenset({"retry", "fatal", "crash"})


class ClaimedTask:
    """A task on its way through a worker.

    `begin`, `end` and `settle` are for the executor's thread, the rest for the driver. `ended` is called with the
    settlement (None: there is nothing to report), `paused` when the run waits.
    """

    __slots__ = (
        "_connection", "_ended", "_not_yet", "_paused", "again", "began_at", "due_at", "executions", "handler", "held",
        "run", "since", "waits",
    )  # fmt: skip

    def __init__(
        self,
        held: HeldLease,
        handler: Handler,
        connection: Connection,
        *,
        since: float,
        ended: Callable[["ClaimedTask", Settlement | None], None],
        paused: Callable[["ClaimedTask"], None] | None = None,
    ) -> None:
        self.held = held
        self.handler = handler
        self.since = since  # when the task came into the buffer
        self.run: LeasedRun | None = None  # of the latest call of the handler
        self.executions = 0  # calls of the handler under this lease
        self.began_at = 0.0  # when the latest call began
        self.waits = 0.0  # for how long after it the run waits, in seconds …
        self.due_at = 0.0  # … until the next call is due …
        self._not_yet: BaseException | None = None  # … and how the latest one has ended
        self.again: HeldLease | None = None  # the same task, if it was delivered again meanwhile
        self._connection = connection
        self._ended = ended
        self._paused = paused

    @property
    def is_new(self) -> bool:
        """Whether the handler has not been called yet."""
        return self.executions == 0

    @property
    def cost(self) -> float:
        """For how many seconds the latest call of the handler held its slot."""
        ended_at = None if self.run is None else self.run.ended_at
        return 0.0 if ended_at is None else max(0.0, ended_at - self.began_at)

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
        """Begin a run, or go on with one that waited; the caller then calls the handler. None: it must not run.

        The lease is over then, or the run was told to stop, or this worker cannot decode the task.
        """
        if not self.is_new and self.held.stop is not None:  # it was told just now, before it could be taken out
            self._ended(self, self.give_up())
            return None
        self.executions += 1
        begun_at = 0.0 if self.run is None else self.run.begun_at
        run = LeasedRun(
            self._task, idle_timeout=self.handler.idle_timeout, executions=self.executions, begun_at=begun_at
        )
        try:
            run.begin(self._connection, self.held)
        except LeaseError as error:
            log_run(self._connection, self.held.task, logging.INFO, f"is not begun: {error}")
            self._ended(self, None)
            return None
        self.began_at = self.held.clock.now()
        self.run = run
        if self.executions == 1:
            run.log_begin(logging.INFO)
        try:
            run.open()
        except CannotDecode as error:
            self.end(run, error)
            return None
        return run

    @property
    def _task(self) -> Task:
        """The task for the next call of the handler, with the latest progress of the calls before as its checkpoint."""
        task, progress = self.held.task, self.held.progress
        if self.is_new or progress is UNSET:
            return task
        return replace(task, progress=decode_value(msgspec.json.encode(progress)))

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
            os._exit(0 if error is None else CHILD_CAME_BACK)
        if error is not None and any(encoding.each(error, MemoryError)):
            _free_frames(error)
        if error is not None and not interrupted and self._pause(run, error):
            return
        try:
            settlement = run.ended(error, interrupted="release" if interrupted else "retry")
        except BaseException as unreportable:  # of the error's own methods
            logger.exception("the outcome of task %s cannot be reported", run.task.id, extra=self._log_fields)
            settlement = run.ended(RuntimeError(f"its error cannot be reported: {type(unreportable).__qualname__}"))
        self._ended(self, settlement)
        is_stop = isinstance(error, LeaseLost | Cancelled | CannotDecode | Draining | IdleTimeout | NotYet)
        shown = None if interrupted or is_stop else error
        why = str(error) if is_stop else _message(settlement) if error is None else ""  # else the traceback says why
        self._log_end(run, settlement, why=why, error=shown, warns=isinstance(error, CannotDecode))

    def _pause(self, run: LeasedRun, error: BaseException) -> bool:
        """Have the run wait if its handler has ended with `NotYet`; return whether it waits.

        A long wait is not for here: the task is given back until then.
        """
        after = run.wait_for(error)
        if after is None or after > LONGEST_WAIT or self._paused is None:
            return False
        run.paused(error)
        run.log_pause(after)
        self._not_yet, self.waits, self.due_at = error, after, self.held.clock.now() + after
        self._paused(self)
        return True

    def give_up(self) -> Settlement | None:
        """End a run that waits, without another call of its handler. Return the settlement; None: its lease is lost."""
        run, error = self.run, self._not_yet
        assert run is not None and error is not None  # noqa: S101, PT018 - it waits
        settlement = run.ended_waiting(error, due_at=self.due_at)
        self._log_end(run, settlement, why="it was waiting for its next call")
        return settlement

    def settle(
        self, run: LeasedRun, settlement: Settlement | None, error: Exception | None = None, *, why: str = ""
    ) -> None:
        """Record the end of a run whose handler ended in another process, died with that, or was not started.

        No settlement: the lease was lost. `error` is for the trace, and `why` for the log.
        """
        run.ended_elsewhere(settlement, error)
        self._ended(self, settlement)
        self._log_end(run, settlement, why=why or _message(settlement))

    def _log_end(
        self,
        run: LeasedRun,
        settlement: Settlement | None,
        *,
        why: str,
        error: BaseException | None = None,
        warns: bool = False,
    ) -> None:
        outcome = "lost" if settlement is None else settlement.outcome
        level = logging.WARNING if warns or outcome in _FAILED else logging.INFO
        run.log_end(level, outcome, f"{why and ': '}{why}{_THEN.get(outcome, '')}", error)


def _message(settlement: Settlement | None) -> str:
    """Return the message of an error such as a payload that does not fit. A value given to `fail` is for no log."""
    if settlement is None or settlement.error is None:
        return ""
    match decode_value(msgspec.json.encode(settlement.error)):  # most are encoded already
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
