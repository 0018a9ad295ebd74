"""Leased run: one run of code under the lease of its task, from its begin to the settlement that reports its end.

    begin ── code ── end ──┬── normally ───────────── success, with what `complete` was given
                           ├── an exception ───────── retry; `Fatal`: fatal; what `fail`, `release` said stands
                           ├── NotYet ─────────────── release, with its delay; a worker keeps the lease and calls again
                           ├── cancelled on request ─ cancelled
                           ├── interrupted ────────── release: ready again at once, the attempt is not counted
                           └── LeaseLost ──────────── nothing: the task may belong to another process (the keeper
                                                      reports a crash if `max_runtime` was over)

Nothing is settled before the code has ended, and heartbeats go on until the settlement is answered.
"""

import logging
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import anyio
import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from leasekit import _lineage
from leasekit._driver.bridge import ring
from leasekit._driver.connection import Connection
from leasekit._driver.keeping.held_lease import HeldLease, Owner
from leasekit._driver.reporting import encoding
from leasekit.errors import Cancelled, CannotDecode, Draining, Fatal, LeaseError, LeaseLost, NotHeld, NotYet, TooLarge
from leasekit.hooks import Running, log_fields
from leasekit.task import NewTask, Outcome, Settlement, Task

logger = logging.getLogger("leasekit")

_DEFAULT_WAIT = 1.0  # seconds until code that said `NotYet`, and no time, is called again

P = ParamSpec("P")
R = TypeVar("R")

# The stored error is shown to people who wait for the task. The message of the exception is for the handler's author.
_ENDED_BY_STOP: dict[type[BaseException], str] = {
    Cancelled: "was cancelled",
    Draining: "was given back: its worker stopped",
}

_NOT_HEEDED = (
    "returned a result after `check` or `progress` had raised {} times that it must end ({}): something in it catches "
    "`leasekit.LeaseError`, perhaps as an Exception, and goes on. It may have skipped work, so its result is not taken"
)

_FOR_OTHERS = 10.0  # seconds for which a task is left to clients that have its codec

OutcomeOf = Callable[[HeldLease, BaseException | None, Outcome], Outcome]
"""Returns the outcome of code that ended with this error; the last argument is the outcome of an interruption."""


def outcome_of(held: HeldLease, error: BaseException | None, interrupted: Outcome) -> Outcome:
    """Return the outcome of code that ended with `error`, without a call of `complete`, `fail` or `release`.

    `interrupted` is the outcome of code that was interrupted, by KeyboardInterrupt, say.
    """
    if error is None:
        return "success"
    if any(encoding.each(error, Fatal)):
        return "fatal"
    # Only on this task's own request: the error may be that of another lease, whose block is within this one.
    if held.stop is Cancelled and _ends_for(error, Cancelled):
        return "cancelled"
    if held.stop is Draining and _ends_for(error, Draining):
        return "release"
    if held.stop is None and not_yet(error) is not None:
        return "release"
    # An interruption (KeyboardInterrupt, a cancelled loop, the end of the interpreter) says nothing of the task.
    return "retry" if isinstance(error, Exception) else interrupted


def _described(error: BaseException) -> msgspec.Raw:
    if not_yet(error) is not None:  # where the code stood says nothing
        return encoding.encoded({"type": NotYet.__name__, "message": str(error)[:2000]}, "error")
    return encoding.described(error, message=_ENDED_BY_STOP.get(type(error)))


def _ends_for(error: BaseException, stop: type[LeaseError]) -> bool:
    """Return whether code that was told to `stop` has ended so: with that error, or with `NotYet`."""
    return any(encoding.each(error, stop)) or not_yet(error) is not None


def not_yet(error: BaseException | None) -> float | None:
    """Return after how many seconds the code asks, by `NotYet`, to be called again; None: it does not ask for that.

    In an exception group, the longest wait counts, and any error that is not `NotYet` makes the answer None.
    """
    if isinstance(error, NotYet):
        return _DEFAULT_WAIT if error.after is None else error.after
    if not isinstance(error, BaseExceptionGroup):
        return None
    waits = [not_yet(inner) for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions]
    return None if None in waits else max(wait for wait in waits if wait is not None)


def log_run(
    connection: Connection, task: Task, level: int, text: str, error: BaseException | None = None, **fields: object
) -> None:
    """Log a line about a run in the driver's thread: there a log that is stuck holds up no code."""
    if logger.isEnabledFor(level):
        line = f"task {task.id} ({task.kind}) {text}"
        extra = log_fields(task.id, task.token) | {"kind": task.kind, **fields}
        connection.driver.call_soon(partial(logger.log, level, "%s", line, exc_info=error, extra=extra))


def _counted(attempt: int) -> str:
    return f", attempt {attempt}" if attempt else ""


class LeasedRun:
    """The parts of a lease that `with` blocks and workers share; users have a `Lease` of it.

    `begin`, `decide`, `enter_scope` and the ends are called by the thread that runs the code, `move` by the driver's.
    """

    def __init__(
        self,
        task: Task,
        *,
        idle_timeout: float | None = None,
        outcome_of: OutcomeOf = outcome_of,
        executions: int = 1,
        begun_at: float = 0.0,
    ) -> None:
        self.task = task
        self.executions = executions  # calls of the handler under this lease, this one included
        self.connection: Connection | None = None  # set together with the held lease
        self.successors: list[NewTask] = []
        self.begun_at = begun_at  # the first of these calls
        self.ended_at: float | None = None
        self.times_told = 0  # how often `check` told the code to end
        self._idle_timeout = idle_timeout
        self._outcome_of = outcome_of
        self._held: HeldLease | None = None
        self._scope: anyio.CancelScope | None = None
        self._trace: Running | None = None
        self._place: _lineage.Place | None = None
        self._outcome: Outcome | None = None
        self._result: Any = None
        self._error: Any = None
        self._retry_after: float | None = None

    @property
    def begun(self) -> bool:
        return self._held is not None

    @property
    def is_over(self) -> bool:
        """Whether the code has ended, or an interrupt ended its block and nothing was left to say so."""
        if self._held is None or self.ended_at is not None or not self._held.handler_runs:
            return True
        owner = self._held.owner
        return owner is not None and owner() is None

    @property
    def is_async(self) -> bool:
        return self._scope is not None

    @property
    def held(self) -> HeldLease:
        """The held lease. Raises `NotHeld` before the begin."""
        if self._held is None:
            raise NotHeld(f"the lease of task {self.task.id} has not begun: use it in a `with` block")
        return self._held

    def error_after_end(self) -> NotHeld:
        return NotHeld(f"the lease of task {self.task.id} has ended: report in its block what there is to report")

    def check(self) -> None:
        """Raise what the code must know, and count it."""
        if (told := self._stop_told()) is not None:
            self.times_told += 1
            raise told

    def check_heeded(self) -> None:
        """Raise what `check` raised if the code went on to call it again: it caught what told it to end."""
        if self.times_told > 1 and (told := self._stop_told()) is not None:
            assert self.connection is not None  # noqa: S101 - it came with the held lease
            log_run(self.connection, self.task, logging.WARNING, _NOT_HEEDED.format(self.times_told, told))
            raise told

    @property
    def decided(self) -> bool:
        return self._outcome is not None

    def decide(
        self, outcome: Outcome, *, result: Any = None, error: Any = None, retry_after: float | None = None
    ) -> None:
        """Record the outcome that the code asks for; the latest counts."""
        if self.ended_at is not None:
            raise self.error_after_end()
        if self._held is not None:
            self._held.check_process()
        self._outcome, self._result, self._error, self._retry_after = outcome, result, error, retry_after

    def begin(self, connection: Connection, held: HeldLease, owner: Owner | None = None) -> None:
        """Begin the run: the caller then runs the code, but not if this raises. `owner`: see `HeldLease.begin`."""
        if self.executions > 1:
            held.resume()
        else:
            held.begin(self._idle_timeout, owner)
        self.connection, self._held = connection, held
        if (tracer := connection.hooks.tracer) is not None:  # else nothing here may swallow an interrupt
            self._trace = self._safely(tracer.running, held.task)  # this very object, which events carry too
        if self._idle_timeout is not None and self.executions == 1:
            connection.driver.call_soon(connection.keeper.watch, held)

    def attach(self) -> None:
        """Make this run, and its trace, the current ones in this context, in which the code starts."""
        self._place = _lineage.enter(self.task, self)
        if self._trace is not None:
            self._safely(self._trace.enter)

    def detach(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            _lineage.leave(place)
        if self._trace is not None:
            self._safely(self._trace.leave)

    def open(self) -> None:
        """Decode what the code is given. Raises `CannotDecode`: the run ends by that, and none of the code has begun.

        A task whose codec this process does not have is given back, and its attempt is not counted.
        """
        assert self.connection is not None  # noqa: S101 - it came with the held lease
        try:
            self.task = self.connection.coding.open(self.task)
        except CannotDecode as error:
            if not error.has_codec:
                self.decide("release", retry_after=_FOR_OTHERS)
            raise

    def enter_scope(self, call_soon: Callable[..., object]) -> None:
        """Open the scope of async code, which is cancelled, in the loop of `call_soon`, when the code must end."""
        self.attach()
        scope = self._scope = anyio.CancelScope()
        scope.__enter__()
        with suppress(TypeError):  # a coroutine of other making, which nothing may refer to weakly
            self.held.coroutine = weakref.ref(anyio.get_current_task().coro)
        self.held.listener = lambda: ring(call_soon, scope.cancel)
        if self._stop_told() is not None:  # told before the listener was there
            scope.cancel()

    def leave_scope(self, error: BaseException | None) -> BaseException | None:
        """Close the scope of async code. Return its error, or what it was told if that has cancelled the scope."""
        self.detach()
        assert self._scope is not None  # noqa: S101 - `enter_scope` has made it
        try:
            ours = self._scope.__exit__(None if error is None else type(error), error, None)
            ours = ours and error is not None  # trio says True also where there was nothing to swallow
        except RuntimeError as misplaced:
            # The block was left in another task than it was entered in, or not in nested order, as by a generator
            # that was not read to its end. The error of the code stays what it is.
            if misplaced is not error:
                logger.warning("the block of task %s could not have been cancelled: %s", self.task.id, misplaced)
            return error
        except BaseException as rest:  # noqa: BLE001 - the part of a group that is no cancellation by this scope
            return rest
        return (self._stop_told() or error) if ours else error

    def move(self, held: HeldLease) -> None:
        """Go on, in the driver's thread, under the newest lease of a task that was delivered again meanwhile."""
        old = self.held
        held.watchdog = old.watchdog  # it guards the same code
        held.begin(self._idle_timeout)
        held.idle_at = old.idle_at  # a delivery is no activity of the handler
        held.listener, old.listener = old.listener, None
        held.thread, held.coroutine = old.thread, old.coroutine
        values = {"payload": self.task.payload, "progress": self.task.progress}
        self.task = replace(held.task, **values) if vars(self.task).get("is_open") else held.task
        self._held = held
        if old.progress is not UNSET and held.progress is UNSET:
            held.report(old.progress)
        old.unguard()
        if old.ended:
            held.pause()

    def _stop_told(self) -> LeaseError | None:
        if self._held is not None and self.ended_at is not None:
            return self.error_after_end()
        return self._why_told()

    def _why_told(self) -> LeaseError | None:
        try:
            self.held.check()
        except LeaseError as told:
            return told
        return None

    def ended(self, error: BaseException | None, *, interrupted: Outcome = "release") -> Settlement | None:
        """Record that the code has ended. Return the settlement; None if it raised any error after its lease was lost.

        Code that ended without an error has a settlement even then: `HeldLease.reportable` tells whether it counts.
        `interrupted` is the outcome of an error that is no `Exception`.
        """
        held = self._mark_ended()
        is_stopped = error is not None and (held.lost or self.is_own_loss(error))
        settlement = None if is_stopped else self._settlement(error, interrupted)
        self._end_trace(settlement, error)
        return settlement

    def wait_for(self, error: BaseException | None) -> float | None:
        """Return in how many seconds the handler is to be called again under this lease; None: the run has ended.

        It has also ended if the code was told to stop, or has said how its task ends.
        """
        after, held = not_yet(error), self.held
        is_over = held.stop is not None or held.lost or self._outcome not in (None, "success")
        return None if is_over else after

    def paused(self, error: BaseException) -> None:
        """Record that the code has ended with `NotYet`, and that the run goes on: another `LeasedRun` continues it."""
        held = self.held
        self.ended_at = held.clock.now()
        held.pause()
        if self._trace is not None:
            self._safely(self._trace.end, held.task, "not_yet", error)

    def ended_waiting(self, error: BaseException, *, due_at: float) -> Settlement | None:
        """Record that a paused run ends without another call of its code, which has ended with `error`.

        Return the settlement: a release until `due_at`, unless the code was told to stop. None: the lease was lost.
        """
        held, now = self.held, self.held.clock.now()
        if held.lost:
            return None
        told = self._why_told()
        settlement = self._settlement(error if told is None else told, "release")
        if settlement.outcome != "release":
            return settlement
        return replace(settlement, retry_after=max(0.0, due_at - now))

    def ended_elsewhere(self, settlement: Settlement | None, error: BaseException | None) -> None:
        """Record that a run in another process is over. `settlement` is its report; None: the lease was lost."""
        self._mark_ended()
        self._end_trace(settlement, error)

    def log_begin(self, level: int) -> None:
        assert self.connection is not None  # noqa: S101 - it came with the held lease
        self.begun_at = self.held.clock.now()
        attempt = self.task.attempt
        log_run(self.connection, self.task, level, f"begins{_counted(attempt)}", attempt=attempt)

    def log_pause(self, after: float) -> None:
        assert self.connection is not None  # noqa: S101 - it came with the held lease
        text = f"waits: not yet, called again in {after:g} s (call {self.executions})"
        log_run(self.connection, self.task, logging.DEBUG, text, executions=self.executions)

    def log_end(self, level: int, outcome: str, more: str = "", error: BaseException | None = None) -> None:
        assert self.connection is not None  # noqa: S101 - it came with the held lease
        attempt, duration = self.task.attempt, round((self.ended_at or self.begun_at) - self.begun_at, 3)
        calls = f", {self.executions} calls" if self.executions > 1 else ""
        text = f"ended: {outcome}{_counted(attempt)}{calls}, {duration} s{more}"
        fields = {"attempt": attempt, "duration": duration, "outcome": outcome, "executions": self.executions}
        log_run(self.connection, self.task, level, text, error, **fields)

    def is_own_loss(self, error: BaseException) -> bool:
        """Return whether `error` says that this lease was lost, and not another one, whose block is within its own."""
        return any(loss.task_id in ("", self.task.id) for loss in encoding.each(error, LeaseLost))

    def _mark_ended(self) -> HeldLease:
        held = self.held
        held.listener = None
        self.ended_at = held.clock.now()
        # Here, in the code's own thread: the driver may not get its turn in time.
        held.end()
        return held

    def _settlement(self, error: BaseException | None, interrupted: Outcome) -> Settlement:
        task, held = self.task, self.held
        outcome, result, described, after = self._outcome, self._result, self._error, self._retry_after
        is_too_large = error is not None and any(encoding.each(error, TooLarge))
        if outcome is None or (error is not None and outcome == "success"):
            outcome, result = self._outcome_of(held, error, interrupted), None
            after = not_yet(error) if outcome == "release" else None
            described = None if error is None else self._described(error)
        return Settlement(
            id=task.id,
            token=task.token,
            outcome=outcome,
            result=result,
            error=described,
            retry_after=after,
            progress=held.progress,
            # Some of the successors, without the rest, are worse than none.
            then=list(self.successors) if outcome in ("success", "fatal") and not is_too_large else [],
        )

    def _described(self, error: BaseException) -> msgspec.Raw:
        described = _described(error)
        if self.connection is None or isinstance(error, CannotDecode):  # whose text is for operators
            return described
        return self.connection.coding.error(described)

    def _end_trace(self, settlement: Settlement | None, error: BaseException | None) -> None:
        if self._trace is not None:
            outcome = settlement.outcome if settlement is not None else None
            self._safely(self._trace.end, self.held.task, outcome, error)

    def _safely(self, trace: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Call a tracer: its errors must not keep the lease of code that has ended, or never begins."""
        try:
            return trace(*args, **kwargs)
        except Exception:
            logger.exception("task %s is not traced as it should be", self.task.id)
            return None
