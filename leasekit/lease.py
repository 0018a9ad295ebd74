"""lease(): the handle that users hold while their code runs, with its two doors (`with`, `async with`).

The life of a block:

    begin ── body ── end ──┬── normally ───────────── success, with what `complete` was given
                           ├── an exception ───────── retry; `Fatal`: fatal; what `fail`, `release` said stands
                           ├── cancelled by order ─── cancelled
                           ├── interrupted ────────── release: ready again at once, the attempt is not counted
                           └── LeaseLost ──────────── nothing: it is no longer ours to settle

Nothing is settled before the body has ended, and beats go on until the settlement is answered.
"""

import functools
import inspect
import logging
import math
import os
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, Protocol, Self, TypeVar, Unpack, overload

import anyio
from msgspec import UNSET

from leasekit._binding import reserve_of
from leasekit._blocks import Block, end_of_block
from leasekit._driver.bridge import call_soon_here, outcome, ring
from leasekit._driver.connection import Connection
from leasekit._driver.keeping.held_lease import HeldLease, Owner, loss_reason
from leasekit._driver.reporting import encoding
from leasekit._driver.reporting.outbox import Report
from leasekit.errors import Cancelled, Draining, Fatal, LeaseError, LeaseLost, NotHeld, TooLarge
from leasekit.hooks import Running
from leasekit.task import NewTask, Outcome, Scheduled, Settlement, Task, TaskInfo, TaskOptions, Verdict
from leasekit.wire import MAX_ERROR, MAX_PAYLOAD

__all__ = ["Lease", "lease", "leased"]

logger = logging.getLogger("leasekit")

P = ParamSpec("P")
R = TypeVar("R")

_LOOK = 1.0
_MAX_THEN = 1000  # successors of one task: what a service takes in one batch
_LAST_WORD = 10.0  # seconds to wait for the answer to a result that is reported after the end of trust


class _Name(Protocol):
    """A name that can be leased: `client.named(…)` and `client.once(…)`."""

    def _leased(self, idle_timeout: float | None) -> "Lease": ...


def lease(task: Task | _Name, *, idle_timeout: float | None = None) -> "Lease":
    """Keep `task` ours while the body of the `with` (or `async with`) runs, and say so when it no longer is.

    Of a name (`client.named(…)`): it is acquired where the block begins, and given back where it ends, however it does.

    The block raises `LeaseLost` when the lease was lost: side effects must stop then, and nothing is settled. An
    exception of the body settles the task as a retriable failure (`Fatal`: as a fatal one) and goes on its way.

    Args:
        task: What `client.tasks()` gave, or `client.named(…)`.
        idle_timeout: A body that reports no progress for so many seconds is told to stop, and the task is tried again.
    """
    if idle_timeout is not None and not 0 < idle_timeout < math.inf:
        raise ValueError(f"idle_timeout={idle_timeout!r} is no time to be idle: give seconds above zero")
    if isinstance(task, Task):
        return Lease(task, idle_timeout=idle_timeout)
    if not hasattr(task, "_leased"):
        what = f"a lease is of a task or of client.named(…), not of {type(task).__name__}"
        if isinstance(task, (NewTask, Scheduled, TaskInfo)):
            raise TypeError(f"{what}: claim the task first, as in `for task in client.tasks(kind)`")
        raise TypeError(f"{what}: what boto3 returned has leasekit_sqs.lease, leasekit_swf.lease, leasekit_sfn.lease")
    return task._leased(idle_timeout)  # pyright: ignore[reportPrivateUsage] - the other half of this door


class Lease:
    """The right to run one task, in this process, for as long as it lasts."""

    def __init__(self, task: Task, *, idle_timeout: float | None = None) -> None:
        self.task = task
        """The task that the lease is of."""
        self._idle_timeout = idle_timeout
        self._connection: Connection | None = None
        self._record: HeldLease | None = None
        self._scope: anyio.CancelScope | None = None
        self._outcome: Outcome | None = None
        self._result: Any = None
        self._error: Any = None
        self._retry_after: float | None = None
        self._then: list[NewTask] = []
        self._then_size = 0  # of these, as JSON
        self._ended_at: float | None = None
        self._running: Running | None = None
        self._block: Block | None = None  # of the `with` statement that is about to enter
        # It may begin in another thread or task: a loop over tasks must not give it back.
        reserve = reserve_of(task)
        self._reserved = None if reserve is None else reserve(task, self)

    def __repr__(self) -> str:
        if self._record is None:
            state = "not begun"
        elif self._ended_at is not None:
            state = "ended"
        else:
            state = "lost" if self._record.lost else "held"
        return f"<{type(self).__name__} of {self.task!r}: {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a lease cannot be pickled: this process keeps it; send task {self.task.id}'s payload instead")

    # What the body needs ------------------------------------------------------------------------------------------

    @property
    def fence(self) -> int:
        """A number that grows with every claim of the task: systems downstream refuse writes with a smaller one."""
        return self.task.fence

    @property
    def attempt(self) -> int:
        """1 for the first run; releases are not counted."""
        return self.task.attempt

    @property
    def checkpoint(self) -> Any:
        """The value that the last holder reported with `progress`; None if there is none."""
        return self.task.progress

    def progress(self, value: Any) -> None:
        """Record how far the body is: the next holder's `checkpoint`. The latest wins.

        The service has it within about a second, by an early beat that carries all new progress of the process;
        after beats that failed, with the next try. A worker's supervisor has it at once, and reports it where the
        worker is killed before.

        Raises what `check` raises, when it is recorded, and ValueError where it is not JSON, above 64 KiB (or less,
        where the service takes less: SWF 2,048 bytes), or nested too deep.
        """
        encoded = encoding.progress(value, at_most=None if self._connection is None else self._connection.max_progress)
        held = self._held
        if self._ended_at is None and held.pid == os.getpid():
            held.report(encoded)  # first: who is told to end has come so far all the same
        self.check()

    def check(self) -> None:
        """Return at once while all is well. Call it before each side effect that must not happen twice.

        Raises `LeaseLost` (someone else may hold the task now), `Cancelled` (nobody wants it any more), `IdleTimeout`,
        `Draining` (the worker stops), and `NotHeld` before and after the block.
        """
        held = self._held
        if self._ended_at is not None:
            raise self._over()
        held.check()

    def remaining(self) -> float:
        """Seconds for which the lease may be believed in if no further beat gets through; never below zero."""
        held = self._held
        held.check_process()
        return 0.0 if held.lost else max(0.0, held.term.lost_at - held.clock.now())

    @property
    def lost(self) -> bool:
        """True once the lease is lost."""
        return self._held.lost

    @property
    def _held(self) -> HeldLease:
        if self._record is None:
            raise NotHeld(f"the lease of task {self.task.id} has not begun: use it in a `with` block")
        return self._record

    def _over(self) -> NotHeld:
        return NotHeld(f"the lease of task {self.task.id} has ended: what is to be said of it belongs into its block")

    # How it is to end ---------------------------------------------------------------------------------------------

    def complete(self, result: Any = None) -> None:
        """The task succeeded with this result (JSON, up to 1 MiB; less, where the service takes less).

        Sent when the block ends. Raises ValueError where it is not JSON (NaN and infinities are none), and `TooLarge`.
        """
        most = MAX_PAYLOAD if self._connection is None else self._connection.max_result
        self._decide("success", result=encoding.encoded(result, "result", at_most=most))

    def fail(self, error: Any, *, retry: bool | float = True) -> None:
        """The task failed: to be tried again (by its policy, or in `retry` seconds), or for good (`retry=False`).

        `error` is an exception, or anything that is JSON, up to 64 KiB. Sent when the block ends.
        """
        is_raised = isinstance(error, BaseException)
        value = encoding.described(error) if is_raised else encoding.encoded(error, "error", at_most=MAX_ERROR)
        after = None if isinstance(retry, bool) else encoding.seconds(retry, "retry")
        self._decide("fatal" if retry is False else "retry", error=value, retry_after=after)

    def release(self, *, after: float | None = None) -> None:
        """Give the task back untried: ready at once, or `after` so many seconds. Sent when the block ends."""
        self._decide("release", retry_after=None if after is None else encoding.seconds(after, "after"))

    def then(self, kind: str, payload: Any = None, **options: Unpack[TaskOptions]) -> None:
        """Have one more task scheduled when this one is settled, in the same transaction: both, or neither.

        It travels with a success or a fatal failure. A body that fails otherwise, is released, cancelled or loses its
        lease takes it along: what a failing body has collected is dropped, and its next run says it anew.
        An `id` of its own is not needed: the service derives one, so a report that is repeated makes no second task.

        Raises what `check` raises, ValueError where no service would take such a task (`Client.schedule` has the
        bounds; up to 1,000 for each task), `TooLarge` where they have more than 6 MiB together, and `LeasekitError`
        where the backend accepts no work, or has no dependencies (`after`).
        """
        self.check()
        connection = self._connection
        assert connection is not None  # noqa: S101 - it came with the held
        connection.check_accepts_work()
        if len(self._then) >= _MAX_THEN:
            raise ValueError(f"task {self.task.id} has {_MAX_THEN} successors, the most there can be: schedule a batch")
        task = encoding.successor(NewTask(kind=kind, payload=payload, **options))
        connection.check_dependencies(task)
        with connection.hooks.scheduling([task]) as traced:
            self._then_size = encoding.size_of_successors(traced, self._then_size)
            self._then += traced

    @property
    def decided(self) -> bool:
        """True once the body has said how it is to end."""
        return self._outcome is not None

    def _decide(
        self, outcome: Outcome, *, result: Any = None, error: Any = None, retry_after: float | None = None
    ) -> None:
        if self._ended_at is not None:
            raise self._over()
        if self._record is not None:
            self._record.check_process()
        self._outcome, self._result, self._error, self._retry_after = outcome, result, error, retry_after

    # The doors ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        connection, held = self._take()
        connection.refuse_hooks()
        owner = None
        try:
            owner = self._own(connection, held)
            if held.confirmed is not None:
                held.confirmed.result()
            self._begin(connection, held, owner)
            self._attach()
        except BaseException:
            self._not_entered(connection, held, owner)
            raise
        return self

    @end_of_block
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        report = self._end(error)
        if report is None:
            return
        verdict: Verdict | None = None
        # Where the interpreter ends, a generator that was not read to its end may leave its block: nobody answers then.
        while verdict is None and not sys.is_finalizing() and (left := self._patience()) > 0:
            try:
                verdict = report.answer.result(left)
            except TimeoutError:
                continue
            except CancelledError:  # its client was closed
                break
        self._conclude(verdict, error)

    async def __aenter__(self) -> Self:
        connection, held = self._take()
        owner = None
        try:
            owner = self._own(connection, held)
            if held.confirmed is not None:
                await outcome(held.confirmed, keep=True)
            self._begin(connection, held, owner)
            self._enter_scope(call_soon_here())
        except BaseException:
            self._not_entered(connection, held, owner)
            raise
        return self

    @end_of_block
    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> Coroutine[Any, Any, None]:
        leaving = self._leaving(error)
        if self._record is not None and self._connection is not None and not self._connection.forked:
            # The block's own end dies where the waiting begins; what is waited for lives until it has ended.
            self._record.hand_over(self._connection.owner(self._record, leaving))
        return leaving

    async def _leaving(self, error: BaseException | None) -> None:
        ended_by = self._leave_scope(error)
        ours, error = ended_by is not error, ended_by
        report = self._end(error)
        if report is not None:
            await self._answered(report, error)
        if ours and error is not None:
            raise error

    async def _answered(self, report: Report, error: BaseException | None) -> None:
        verdict: Verdict | None = None
        while verdict is None and (left := self._patience()) > 0:
            # Shielded: to be cancelled in the middle of a report would leave a task that nobody runs and nobody ended.
            with anyio.move_on_after(left, shield=True):
                try:
                    verdict = await outcome(report.answer, keep=True)
                except CancelledError:  # its client was closed
                    break
        self._conclude(verdict, error)

    def _take(self) -> tuple[Connection, HeldLease]:
        if self._record is not None:
            raise NotHeld(f"the lease of task {self.task.id} has been used before: claim the task again")
        if reserve_of(self.task) is None:
            raise NotHeld(f"task {self.task.id} was not claimed by a client of this process: use client.tasks()")
        if self._reserved is None or self._reserved[0].forked:
            raise NotHeld(f"the lease of task {self.task.id} has ended, or is held by another process: claim it again")
        return self._reserved

    def _own(self, connection: Connection, held: HeldLease) -> Owner:
        """The block that enters has the lease from here; without a `with` statement, this object has it."""
        block = None if self._block is None else self._block()
        owner = connection.owner(held, block or self)
        if not held.begun:
            held.wanted_by = owner
        return owner

    def _not_entered(self, connection: Connection, held: HeldLease, owner: Owner | None) -> None:
        """Release the task, whose block will not begin, unless another lease of it has begun."""
        connection.driver.call_soon(connection.keeper.release_if_unstarted, held)
        connection.driver.call_soon(connection.keeper.abandoned, held, owner)

    def _begin(self, connection: Connection, held: HeldLease, owner: Owner | None = None) -> None:
        """The first half of a door, for a worker: the body starts."""
        held.begin(self._idle_timeout, owner)
        self._connection, self._record = connection, held
        self._running = self._safely(connection.hooks.running, held.task)  # not a copy of it: events carry this one
        if self._idle_timeout is not None:
            connection.driver.call_soon(connection.keeper.watch, held)

    def _attach(self) -> None:
        """A body starts in this very context: it finds there who traces it."""
        if self._running is not None:
            self._safely(self._running.enter)

    def _detach(self) -> None:
        if self._running is not None:
            self._safely(self._running.leave)

    def _safely(self, trace: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """A body is traced: who fails in that must not keep the lease of one that has ended, or never begins."""
        try:
            return trace(*args, **kwargs)
        except Exception:
            logger.exception("task %s is not traced as it should be", self.task.id)
            return None

    def _enter_scope(self, call_soon: Callable[..., object]) -> None:
        """An async body starts here: it is cancelled, in the loop of `call_soon`, when it has to end."""
        self._attach()
        scope = self._scope = anyio.CancelScope()
        scope.__enter__()
        self._held.listener = lambda: ring(call_soon, scope.cancel)
        if self._told() is not None:  # before it listened
            scope.cancel()

    def _leave_scope(self, error: BaseException | None) -> BaseException | None:
        """An async body has ended. Returns how: with what it was told, where that is what cancelled it."""
        self._detach()
        assert self._scope is not None  # noqa: S101 - `_enter_scope` has made it
        try:
            ours = self._scope.__exit__(None if error is None else type(error), error, None)
            ours = ours and error is not None  # trio says True also where there was nothing to swallow
        except RuntimeError as misplaced:
            # The block was left in another task than it was entered in, or not in nested order, as generators are that
            # were not read to their end. How it ended is how it ended all the same.
            if misplaced is not error:
                logger.warning("the block of task %s could not have been cancelled: %s", self.task.id, misplaced)
            return error
        except BaseException as rest:  # noqa: BLE001 - of a group: what is no cancellation of ours
            return rest
        return (self._told() or error) if ours else error

    def _move(self, held: HeldLease) -> None:
        """The task was delivered again while its body runs: go on under the newest lease.

        In the driver's thread, and not after the body was told to end.
        """
        old = self._held
        held.watchdog = old.watchdog  # it is the same body
        held.begin(self._idle_timeout)
        if old.progress is not UNSET:
            held.report(old.progress)
        held.listener, old.listener = old.listener, None
        self.task, self._record = held.task, held
        old.watchdog.ended(old.term)

    def _told(self) -> BaseException | None:
        try:
            self.check()
        except LeaseError as told:
            return told
        return None

    # The end ------------------------------------------------------------------------------------------------------

    def _end(self, error: BaseException | None) -> Report | None:
        try:
            self._detach()
            return self._finish(error)
        except BaseException:  # also an interrupt: where the end is not on its way by now, the keeper makes one
            if self._connection is not None and not self._connection.forked:
                held = self._held
                self._connection.driver.call_soon(self._connection.keeper.abandoned, held, held.owner)
            raise

    def _finish(self, error: BaseException | None) -> Report | None:
        """The second half of a door, which does not wait: None where there is nothing to be reported.

        Raises `LeaseLost` where the lease was lost, unless that (or an interruption) is on its way already.
        """
        held, connection = self._held, self._connection
        assert connection is not None  # noqa: S101 - it came with the held
        if connection.forked:  # a child leaves the block of its parent: the lease is not the child's to end
            return None
        settlement = self._ended(error)
        if settlement is None or not held.reportable(connection.backend.capabilities):
            connection.driver.call_soon(connection.keeper.finish, held)
            if error is None or (isinstance(error, Exception) and not self._is_our_loss(error)):
                raise held.loss() from error
            return None
        report = held.report_due = Report(settlement)
        connection.driver.call_soon(connection.keeper.settle, held, report)
        return report

    def _ended(self, error: BaseException | None, *, interrupted: Outcome = "release") -> Settlement | None:
        """The second half, for a worker: the body has ended so. None where it was stopped because the lease was lost.

        `interrupted` is what an exception means that is no `Exception`.
        """
        held = self._closed()
        is_over = error is not None and (held.lost or self._is_our_loss(error))
        settlement = None if is_over else self._settlement(error, interrupted)
        self._traced(settlement, error)
        return settlement

    def _ended_elsewhere(self, settlement: Settlement | None, error: BaseException | None) -> None:
        """The second half, for a worker whose body ran in another process, and has said there how it ended."""
        self._closed()
        self._traced(settlement, error)

    def _closed(self) -> HeldLease:
        held = self._held
        held.listener = None
        self._ended_at = held.clock.now()
        held.watchdog.ended(held.term)  # here, in the body's own thread: the driver may not get its turn in time
        return held

    def _traced(self, settlement: Settlement | None, error: BaseException | None) -> None:
        if self._running is not None:
            outcome = settlement.outcome if settlement is not None else None
            self._safely(self._running.end, self._held.task, outcome, error)

    def _is_our_loss(self, error: BaseException) -> bool:
        """Not that of another lease, whose block is within ours."""
        return any(loss.task_id in ("", self.task.id) for loss in encoding.each(error, LeaseLost))

    def _settlement(self, error: BaseException | None, interrupted: Outcome) -> Settlement:
        task, progress = self.task, self._held.progress
        outcome, result, described, after = self._outcome, self._result, self._error, self._retry_after
        is_too_large = error is not None and any(encoding.each(error, TooLarge))
        if outcome is None or (error is not None and outcome == "success"):
            outcome, result, after = self._outcome_of(error, interrupted), None, None
            described = None if error is None else encoding.described(error)
        return Settlement(
            id=task.id,
            token=task.token,
            outcome=outcome,
            result=result,
            error=described,
            retry_after=after,
            progress=progress,
            # Some of what was to follow, without the rest, is worse than nothing.
            then=list(self._then) if outcome in ("success", "fatal") and not is_too_large else [],
        )

    def _outcome_of(self, error: BaseException | None, interrupted: Outcome) -> Outcome:
        if error is None:
            return "success"
        if any(encoding.each(error, Fatal)):
            return "fatal"
        # Only where that was the order: it may be that of another lease, whose block is within ours.
        if self._held.stop is Cancelled and any(encoding.each(error, Cancelled)):
            return "cancelled"
        if self._held.stop is Draining and any(encoding.each(error, Draining)):
            return "release"
        # What interrupts (KeyboardInterrupt, a cancelled loop, the end of the interpreter) says nothing of the task.
        return "retry" if isinstance(error, Exception) else interrupted

    def _patience(self) -> float:
        """Seconds to wait for the answer before looking again; none when it is no use any more."""
        held = self._held
        assert self._ended_at is not None  # noqa: S101 - `_ended` was called
        # Heartbeats may move the end of trust meanwhile, and a suspended machine brings it nearer.
        return min(max(held.term.trusted_until, self._ended_at + _LAST_WORD) - held.clock.now(), _LOOK)

    def _conclude(self, verdict: Verdict | None, error: BaseException | None) -> None:
        """Raise `LeaseLost` where the result of a body that ended well did not get there."""
        if error is not None or (verdict is not None and verdict.verdict != "gone"):
            return
        if verdict is None:
            why, word = "its result could not be reported while the lease lasted", "unreported"
        else:
            word = verdict.reason or "unknown"
            why = f"the service refused its result: {word}"
        story = self._held.explained if self._held.lost else None
        if story is not None:
            why = f"{why}; {story.why}"
        events = () if story is None else story.events
        message = f"lost task {self.task.id}: {why}"
        raise LeaseLost(message, task_id=self.task.id, reason=loss_reason(word), events=events)


@overload
def leased(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def leased(*, idle_timeout: float | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def leased(function: Any = None, /, *, idle_timeout: float | None = None) -> Any:
    """Run a function under the lease of the task that it takes first; what it returns is the task's result.

    For plain and `async` functions. One that has a parameter `held` gets the lease by that name.
    """
    if function is None:
        return functools.partial(leased, idle_timeout=idle_timeout)
    wants_held = "held" in inspect.signature(function).parameters

    def extra(held: Lease, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**kwargs, "held": held} if wants_held else kwargs

    @functools.wraps(function)
    async def run_async(task: Task, *args: Any, **kwargs: Any) -> Any:
        async with lease(task, idle_timeout=idle_timeout) as held:
            result = await function(task, *args, **extra(held, kwargs))
            if not held.decided:
                held.complete(result)
            return result

    @functools.wraps(function)
    def run(task: Task, *args: Any, **kwargs: Any) -> Any:
        with lease(task, idle_timeout=idle_timeout) as held:
            result = function(task, *args, **extra(held, kwargs))
            if not held.decided:
                held.complete(result)
            return result

    return run_async if inspect.iscoroutinefunction(function) else run
