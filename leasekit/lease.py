"""lease(): the handle that users hold while their code runs, with its two doors (`with`, `async with`).

How the code begins and ends is `_leased_run.py`; this is what users call, and how a block waits for its answer.
"""

import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, Protocol, Self, TypeVar, Unpack, overload

import anyio

from leasekit._binding import reserve_of
from leasekit._blocks import Block, end_of_block
from leasekit._driver.bridge import call_soon_here, outcome
from leasekit._driver.connection import Connection
from leasekit._driver.keeping.held_lease import HeldLease, Owner, loss_reason
from leasekit._driver.reporting import encoding
from leasekit._driver.reporting.outbox import Report
from leasekit._leased_run import LeasedRun
from leasekit.errors import LeaseLost, NotHeld
from leasekit.task import NewTask, Scheduled, Task, TaskInfo, TaskOptions, Verdict
from leasekit.wire import MAX_ERROR, MAX_PAYLOAD

__all__ = ["Lease", "lease", "leased"]

P = ParamSpec("P")
R = TypeVar("R")

_LOOK = 1.0
_MAX_THEN = 1000  # successors of one task: what a service takes in one batch
_LAST_WORD = 10.0  # seconds to wait for the answer to a result that is reported after the end of trust


class _Name(Protocol):
    """A name that can be leased: `client.named(…)` and `client.once(…)`."""

    def __lease__(self, idle_timeout: float | None) -> "Lease": ...


def lease(task: Task | _Name, *, idle_timeout: float | None = None) -> "Lease":
    """Keep the lease of `task` while the code in the `with` (or `async with`) block runs; stop the code if it is lost.

    A name (`client.named(…)`) is acquired where the block begins, and given back where the block ends.

    The block raises `LeaseLost` if the lease was lost: side effects must stop then, and nothing is settled. An
    exception out of the block settles the task as a retriable failure (`Fatal`: as a fatal one), and is raised on.

    Args:
        task: A task of `client.tasks()`, or `client.named(…)`.
        idle_timeout: Code that reports no progress for so many seconds is told to stop, and the task is tried again.
    """
    if idle_timeout is not None and not 0 < idle_timeout < math.inf:
        raise ValueError(f"idle_timeout must be more than 0 s, got {idle_timeout!r}: give seconds, or None")
    if isinstance(task, Task):
        return Lease(LeasedRun(task, idle_timeout=idle_timeout))
    if not hasattr(task, "__lease__"):
        what = f"a lease is of a task or of client.named(…), not of {type(task).__name__}"
        if isinstance(task, (NewTask, Scheduled, TaskInfo)):
            raise TypeError(f"{what}: claim the task first, as in `for task in client.tasks(kind)`")
        raise TypeError(f"{what}: what boto3 returned has leasekit_sqs.lease, leasekit_swf.lease, leasekit_sfn.lease")
    return task.__lease__(idle_timeout)


class Lease:
    """The right to run one task, in this process, for as long as the lease lasts."""

    def __init__(self, run: LeasedRun) -> None:
        self._run = run
        self._then_size = 0  # bytes of all successors, as JSON
        self._block: Block | None = None  # of the `with` statement that is about to enter
        # The block may begin in another thread or task: a loop over tasks must not give the task back.
        reserve = reserve_of(run.task)
        self._reserved = None if reserve is None else reserve(run.task, self)

    def __repr__(self) -> str:
        if not self._run.begun:
            state = "not begun"
        elif self._run.ended_at is not None:
            state = "ended"
        else:
            state = "lost" if self.lost else "held"
        return f"<{type(self).__name__} of {self.task!r}: {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a lease cannot be pickled: this process keeps it; send task {self.task.id}'s payload instead")

    # What the code needs ------------------------------------------------------------------------------------------

    @property
    def task(self) -> Task:
        """The leased task."""
        return self._run.task

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
        """Record how far the code is: the next holder's `checkpoint`. The latest wins.

        The service has it within about a second, by an early heartbeat that carries all new progress of the process;
        after heartbeats that failed, with the next try. A worker's supervisor has it at once, and reports it if the
        worker is killed before.

        Raises what `check` raises, after the value was recorded, and ValueError if the value is not JSON, above 64 KiB
        (or less, if the service takes less: SWF 2,048 bytes), or nested too deep.
        """
        connection = self._run.connection
        encoded = encoding.progress(value, at_most=None if connection is None else connection.max_progress)
        held = self._run.held
        if self._run.ended_at is None and held.pid == os.getpid():
            held.report(encoded)  # first: code that is told to end has come so far all the same
        self.check()

    def check(self) -> None:
        """Return at once while all is well. Call it before each side effect that must not happen twice.

        Raises `LeaseLost` (another process may hold the task now), `Cancelled` (its cancel is requested),
        `IdleTimeout`, `Draining` (the worker stops), and `NotHeld` before and after the block.
        """
        self._run.check()

    def remaining(self) -> float:
        """Return the seconds until the lease is lost if no further heartbeat gets through; never below zero."""
        held = self._run.held
        held.check_process()
        return 0.0 if held.lost else max(0.0, held.term.lost_at - held.clock.now())

    @property
    def lost(self) -> bool:
        """True once the lease is lost."""
        return self._run.held.lost

    # How it is to end ---------------------------------------------------------------------------------------------

    def complete(self, result: Any = None) -> None:
        """Settle the task as a success with this result (JSON, up to 1 MiB; less, if the service takes less).

        Sent when the block ends. Raises ValueError if the result is not JSON (NaN and infinities are none), and
        `TooLarge`.
        """
        connection = self._run.connection
        most = MAX_PAYLOAD if connection is None else connection.max_result
        self._run.decide("success", result=encoding.encoded(result, "result", at_most=most))

    def fail(self, error: Any, *, retry: bool | float = True) -> None:
        """Settle the task as failed: tried again by its policy, or in `retry` seconds, or never (`retry=False`).

        `error` is an exception, or any JSON value up to 64 KiB. Sent when the block ends.
        """
        is_raised = isinstance(error, BaseException)
        value = encoding.described(error) if is_raised else encoding.encoded(error, "error", at_most=MAX_ERROR)
        after = None if isinstance(retry, bool) else encoding.seconds(retry, "retry")
        self._run.decide("fatal" if retry is False else "retry", error=value, retry_after=after)

    def release(self, *, after: float | None = None) -> None:
        """Give the task back, without counting the attempt, when the block ends: ready at once, or `after` seconds."""
        self._run.decide("release", retry_after=None if after is None else encoding.seconds(after, "after"))

    def then(self, kind: str, payload: Any = None, **options: Unpack[TaskOptions]) -> None:
        """Schedule a successor when this task is settled, in the same transaction: both happen, or neither.

        Successors go with a success or a fatal failure. They are dropped if the code fails otherwise, is released or
        cancelled, or loses its lease: the next run collects them anew. A successor needs no `id`: the service derives
        one, so a report that is repeated makes no second task.

        Raises what `check` raises, ValueError if no service would take such a task (`Client.schedule` has the bounds;
        up to 1,000 for each task), `TooLarge` if the successors have more than 6 MiB together, and `LeasekitError` if
        the backend accepts no work, or has no dependencies (`after`).
        """
        self.check()
        connection, successors = self._run.connection, self._run.successors
        assert connection is not None  # noqa: S101 - it came with the held lease
        connection.check_accepts_work()
        if len(successors) >= _MAX_THEN:
            raise ValueError(f"task {self.task.id} has {_MAX_THEN} successors, the most there can be: schedule a batch")
        task = encoding.successor(NewTask(kind=kind, payload=payload, **options))
        connection.check_dependencies(task)
        with connection.hooks.scheduling([task]) as traced:
            self._then_size = encoding.size_of_successors(traced, self._then_size)
            successors += traced

    @property
    def decided(self) -> bool:
        """True once `complete`, `fail` or `release` was called."""
        return self._run.decided

    # The doors ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        connection, held = self._take()
        connection.refuse_hooks()
        owner = None
        try:
            owner = self._own(connection, held)
            if held.confirmed is not None:
                held.confirmed.result()
            self._run.begin(connection, held, owner)
            self._run.attach()
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
        # At the interpreter's end, a generator that was not read to its end may leave its block: no answer comes then.
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
            self._run.begin(connection, held, owner)
            self._run.enter_scope(call_soon_here())
        except BaseException:
            self._not_entered(connection, held, owner)
            raise
        return self

    @end_of_block
    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> Coroutine[Any, Any, None]:
        leaving = self._leaving(error)
        try:
            connection = self._run.connection
            if connection is not None and not connection.forked:
                # The object of `end_of_block` dies where the waiting begins; the coroutine lives until its end.
                self._run.held.hand_over(connection.owner(self._run.held, leaving))
            return leaving
        finally:
            del leaving  # or the traceback of an interrupt here would keep the lease

    async def _leaving(self, error: BaseException | None) -> None:
        ended_by = self._run.leave_scope(error)
        ours, error = ended_by is not error, ended_by
        report = self._end(error)
        if report is not None:
            await self._answered(report, error)
        if ours and error is not None:
            raise error

    async def _answered(self, report: Report, error: BaseException | None) -> None:
        verdict: Verdict | None = None
        while verdict is None and (left := self._patience()) > 0:
            # Shielded: a report that was cancelled midway would leave a task that neither runs nor has ended.
            with anyio.move_on_after(left, shield=True):
                try:
                    verdict = await outcome(report.answer, keep=True)
                except CancelledError:  # its client was closed
                    break
        self._conclude(verdict, error)

    def _take(self) -> tuple[Connection, HeldLease]:
        if self._run.begun:
            raise NotHeld(f"the lease of task {self.task.id} has been used before: claim the task again")
        if reserve_of(self.task) is None:
            raise NotHeld(f"task {self.task.id} was not claimed by a client of this process: use client.tasks()")
        if self._reserved is None or self._reserved[0].forked:
            raise NotHeld(f"the lease of task {self.task.id} has ended, or is held by another process: claim it again")
        return self._reserved

    def _own(self, connection: Connection, held: HeldLease) -> Owner:
        """Make the block that enters the owner of the lease; without a `with` statement, this object."""
        block = None if self._block is None else self._block()
        owner = connection.owner(held, block or self)
        if not held.begun:
            held.wanted_by = owner
        return owner

    def _not_entered(self, connection: Connection, held: HeldLease, owner: Owner | None) -> None:
        """Release the task, whose block will not begin, unless another lease of it has begun."""
        connection.driver.call_soon(connection.keeper.release_if_unstarted, held)
        connection.driver.call_soon(connection.keeper.abandoned, held, owner)

    # The end ------------------------------------------------------------------------------------------------------

    def _end(self, error: BaseException | None) -> Report | None:
        try:
            self._run.detach()
            return self._report(error)
        except BaseException:  # also an interrupt: if no settlement is on its way by now, the keeper makes one
            connection = self._run.connection
            if connection is not None and not connection.forked:
                held = self._run.held
                connection.driver.call_soon(connection.keeper.abandoned, held, held.owner)
            raise

    def _report(self, error: BaseException | None) -> Report | None:
        """Send the settlement, without waiting for the answer; return None if there is nothing to report.

        Raises `LeaseLost` if the lease was lost, unless that (or an interruption) is on its way already.
        """
        held, connection = self._run.held, self._run.connection
        assert connection is not None  # noqa: S101 - it came with the held lease
        if connection.forked:  # a child leaves the block of its parent: the lease is not the child's to end
            return None
        settlement = self._run.ended(error)
        if settlement is None or not held.reportable(connection.backend.capabilities):
            connection.driver.call_soon(connection.keeper.finish, held)
            if error is None or (isinstance(error, Exception) and not self._run.is_own_loss(error)):
                raise held.loss() from error
            return None
        report = held.report_due = Report(settlement)
        connection.driver.call_soon(connection.keeper.settle, held, report)
        return report

    def _patience(self) -> float:
        """Seconds to wait for the answer before looking again; zero or less once waiting is of no use."""
        held, ended_at = self._run.held, self._run.ended_at
        assert ended_at is not None  # noqa: S101 - the run has ended
        # Heartbeats may move the end of trust meanwhile, and a suspended machine brings it nearer.
        return min(max(held.term.trusted_until, ended_at + _LAST_WORD) - held.clock.now(), _LOOK)

    def _conclude(self, verdict: Verdict | None, error: BaseException | None) -> None:
        """Raise `LeaseLost` if code ended well but its result was refused, or not answered in time (None)."""
        if error is not None or (verdict is not None and verdict.verdict != "gone"):
            return
        if verdict is None:
            why, word = "its result could not be reported while the lease lasted", "unreported"
        else:
            word = verdict.reason or "unknown"
            why = f"the service refused its result: {word}"
        held = self._run.held
        story = held.explained if held.lost else None
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
    """Run a function under the lease of the task that is its first argument; its value is the task's result.

    For plain and `async` functions. A parameter named `held` receives the lease.
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
