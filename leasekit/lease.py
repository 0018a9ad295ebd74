"""lease(): the handle that users hold while their code runs, with its two doors (`with`, `async with`).

How the code begins and ends is `_leased_run.py`, and how a block ends `_blocks.py`; this is what users call.
"""

import functools
import inspect
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, ParamSpec, Protocol, Self, TypeVar, Unpack, overload

import msgspec
from msgspec import UNSET

from leasekit._arguments import check_idle_timeout, new_task
from leasekit._binding import give_back, refuse_lost, reserve_of
from leasekit._blocks import AsyncExit, Exit, end_of_block, leave
from leasekit._driver.bridge import call_soon_here, outcome
from leasekit._driver.coding import CLEAR, Coding
from leasekit._driver.connection import Connection
from leasekit._driver.keeping.held_lease import HeldLease, Owner
from leasekit._driver.reporting import encoding
from leasekit._leased_run import LeasedRun
from leasekit.config import check_number
from leasekit.errors import CannotDecode, NotHeld
from leasekit.task import NewTask, Scheduled, Task, TaskInfo, TaskOptions
from leasekit.wire import MAX_PAYLOAD, MAX_WAITS, decode_value

__all__ = ["Lease", "lease", "leased"]

P = ParamSpec("P")
R = TypeVar("R")

_MAX_THEN = 1000  # successors of one task: what a service takes in one batch


class _Name(Protocol):
    """A name that can be leased: `client.named(…)` and `client.once(…)`."""

    def __lease__(self, idle_timeout: float | None) -> "Lease": ...


class _Handler(Protocol):
    """A declared handler, or its `options(…)`."""

    def __task__(self, payload: Any, options: TaskOptions) -> NewTask: ...


def lease(task: Task | _Name, *, idle_timeout: float | None = None) -> "Lease":
    """Keep the lease of `task` while the code in the `with` (or `async with`) block runs; stop the code if it is lost.

    Enter every lease that you make. Until then, its heartbeats go on as long as a variable refers to it.

    A name (`client.named(…)`) is acquired where the block begins, and given back where the block ends.

    The block raises `LeaseLost` if the lease was lost: side effects must stop then, and nothing is settled. An
    exception out of the block settles the task as a retriable failure (`Fatal`: as a fatal one), and is raised on.

    Args:
        task: A task of `client.tasks()`, or `client.named(…)`.
        idle_timeout: Code that reports no progress for so many seconds is told to stop, and the task is tried again.
    """
    if isinstance(task, Task):
        try:
            check_idle_timeout(idle_timeout)
            return Lease(LeasedRun(task, idle_timeout=idle_timeout))
        except BaseException:  # interrupted, say: the traceback would keep what is about to own the lease
            give_back(task)
            raise
    check_idle_timeout(idle_timeout)
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
        self._then_waits = 0  # tasks after which they run, together
        exits = self._exits = {None: functools.partial(leave, run)}  # a `with` statement takes the function away, once
        self._leave = functools.partial(leave, run)
        self._exit_function: Callable[..., Any] = functools.partial(exits.pop, None, self._leave)
        self._exit: Owner = weakref.ref(exits[None])
        self._entries = [None]  # the first block to begin takes it away: only that block's end is the lease's
        self._kept: object = None  # the exit function of a block that was entered without a `with` statement
        # The block may begin in another thread or task: a loop over tasks must not give the task back.
        reserve = reserve_of(run.task)
        self._reserved = None if reserve is None else reserve(run.task, self._exit)

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
        """1 for the first run; releases are not counted, except on SQS. 0 where the service has not said."""
        return self.task.attempt

    @property
    def executions(self) -> int:
        """How often the handler was called under this lease, this call included: more than once after `NotYet`.

        The next holder of the task begins at 1 again; `progress` carries over what it must know.
        """
        return self._run.executions

    @property
    def checkpoint(self) -> Any:
        """The value that the last holder, or the last call of the handler, reported with `progress`; else None."""
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
        most = None if connection is None else connection.max_progress
        encoded = encoding.progress(value, at_most=most, coding=self._coding)
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

    def remaining_runtime(self) -> float | None:
        """Return the seconds until the `max_runtime` of this run is over, never below zero; None without such a limit.

        The service counts from the heartbeat that says that the code has begun. At the end the lease is lost.
        """
        held = self._run.held
        held.check_process()
        return held.remaining_runtime

    @property
    def lost(self) -> bool:
        """True once the lease is lost."""
        return self._run.held.lost

    def complete(self, result: Any = None) -> None:
        """Settle the task as a success with this result (JSON, up to 1 MiB; less, if the service takes less).

        Sent when the block ends. Raises ValueError if the result is not JSON (NaN and infinities are none) or is nested
        deeper than 64 levels, and `TooLarge`.
        """
        connection = self._run.connection
        most = MAX_PAYLOAD if connection is None else connection.max_result
        self._run.decide("success", result=encoding.encoded(result, "result", at_most=most, coding=self._coding))

    def fail(self, error: Any, *, retry: bool | float = True) -> None:
        """Settle the task as failed: tried again by its policy, or in `retry` seconds, or never (`retry=False`).

        `error` is an exception, or any JSON value up to 64 KiB and 64 levels deep. Sent when the block ends.
        """
        value = encoding.reported_error(error, self._coding)
        after = None if isinstance(retry, bool) else retry
        check_number("retry", after, or_none=True)
        self._run.decide("fatal" if retry is False else "retry", error=value, retry_after=after)

    def release(self, *, after: float | None = None) -> None:
        """Give the task back, without counting the attempt, when the block ends: ready at once, or `after` seconds."""
        check_number("after", after, or_none=True)
        self._run.decide("release", retry_after=after)

    def then(self, kind: str | _Handler, payload: Any = None, **options: Unpack[TaskOptions]) -> None:
        """Have a successor scheduled when this task is settled, in the same transaction: both happen, or neither.

        A successor that is given as a handler, and not by the name of a kind, has the handler's defaults; the payload
        must be one that the handler takes.

        Successors go with a success or a fatal failure. After any other end of this run they are dropped, and the next
        run adds them anew. A successor needs no `id`: the service derives one, so that a report that is repeated makes
        no second task.

        Raises what `check` raises, ValueError if no service would take such a task (`Client.schedule` has the bounds;
        up to 1,000 for each task), `TooLarge` if the successors have more than 6 MiB together, and `LeasekitError` if
        the backend accepts no work, or has no dependencies (`after`).
        """
        self.check()
        task = new_task(kind, payload, options) if isinstance(kind, str) else kind.__task__(payload, options)
        self.__then__([task])

    @property
    def __connection__(self) -> Connection:
        """The connection that keeps the lease, for leasekit's own parts."""
        assert self._run.connection is not None  # noqa: S101 - it came with the held lease
        return self._run.connection

    @property
    def __latest__(self) -> Any:
        """The latest progress of this lease, or else the `checkpoint`: code that said `NotYet` runs again under it."""
        latest = self._run.held.progress
        if latest is UNSET:
            return self.checkpoint
        return self._coding.clear(decode_value(msgspec.json.encode(latest)), "the latest progress")

    def __then__(self, tasks: Sequence[NewTask]) -> None:
        """Do what `then` does, for leasekit's own parts: for all of these or none, and whether or not to stop."""
        connection, successors = self.__connection__, self._run.successors
        connection.check_accepts_work()
        if len(successors) + len(tasks) > _MAX_THEN:
            raise ValueError(f"task {self.task.id} has {_MAX_THEN} successors, the most there can be: schedule a batch")
        checked = [encoding.successor(task, self._coding) for task in tasks]
        waits = self._then_waits + sum(len(task.after) for task in checked)
        if waits > MAX_WAITS:
            raise ValueError(
                f"the successors of task {self.task.id} run after {waits:,} tasks together, {MAX_WAITS:,} at most: "
                "have a successor schedule the rest"
            )
        for task in checked:
            connection.check_dependencies(task)
        with connection.hooks.scheduling(checked) as traced:
            self._then_size = encoding.size_of_successors(traced, self._then_size)
            successors += traced
            self._then_waits = waits

    @property
    def _coding(self) -> Coding:
        """The coding of the client that keeps the lease, also before the block begins."""
        connection = self._run.connection or (self._reserved and self._reserved[0])
        return CLEAR if connection is None else connection.coding

    @property
    def decided(self) -> bool:
        """True once `complete`, `fail` or `release` was called."""
        return self._run.decided

    def __returned__(self, result: R) -> R:
        """Complete the task with what its function returned, unless the function decided otherwise, and return that.

        Raises what `check` raised if the function did not heed it.
        """
        if not self.decided:
            self._run.check_heeded()
            self.complete(result)
        return result

    def __enter__(self) -> Self:
        connection, held = self._take()
        try:
            connection.refuse_hooks()
            owner = self._own(connection, held)
            if held.confirmed is not None:
                held.confirmed.result()
            self._run.begin(connection, held, owner)
            self._run.log_begin(logging.DEBUG)
            self._run.attach()
            self._run.open()
        except CannotDecode as error:
            leave(self._run, type(error), error, None)  # settles the task
            self._kept = None
            raise
        except BaseException:
            self._kept = None
            raise
        return self

    __exit__: Exit = end_of_block

    async def __aenter__(self) -> Self:
        connection, held = self._take()
        try:
            owner = self._own(connection, held)
            if held.confirmed is not None:
                await outcome(held.confirmed, keep=True)
            self._run.begin(connection, held, owner)
            self._run.log_begin(logging.DEBUG)
            self._run.enter_scope(call_soon_here())
            self._run.open()
        except CannotDecode as error:
            if (leaving := leave(self._run, type(error), error, None)) is not None:
                await leaving
            self._kept = None
            raise
        except BaseException:
            self._kept = None
            raise
        return self

    __aexit__: AsyncExit = end_of_block

    def _take(self) -> tuple[Connection, HeldLease]:
        if self._run.begun:
            raise NotHeld(f"the lease of task {self.task.id} has been used before: claim the task again")
        if reserve_of(self.task) is None:
            raise NotHeld(f"task {self.task.id} was not claimed by a client of this process: use client.tasks()")
        if self._reserved is None or self._reserved[0].forked or self._exit() is None:
            refuse_lost(self.task)
            raise NotHeld(f"the lease of task {self.task.id} has ended, or is held by another process: claim it again")
        try:
            self._entries.pop()
        except IndexError:
            raise NotHeld(f"the lease of task {self.task.id} is being used by another block: enter it once") from None
        self._kept = self._exits.pop(None, None)
        return self._reserved

    def _own(self, connection: Connection, held: HeldLease) -> Owner:
        """Make the exit function of the block that enters the owner of the lease."""
        held.awaits_block = False
        owner = connection.owner(held, self._exit)
        if not held.begun:
            held.wanted_by = owner
        return owner


@overload
def leased(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def leased(*, idle_timeout: float | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def leased(function: Any = None, /, *, idle_timeout: float | None = None) -> Any:
    """Run a function under the lease of the task that is its first argument; its value is the task's result.

    For plain and `async` functions. A parameter named `held` receives the lease.
    """
    check_idle_timeout(idle_timeout)
    if function is None:
        return functools.partial(leased, idle_timeout=idle_timeout)
    wants_held = "held" in inspect.signature(function).parameters

    def extra(held: Lease, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**kwargs, "held": held} if wants_held else kwargs

    @functools.wraps(function)
    async def run_async(task: Task, *args: Any, **kwargs: Any) -> Any:
        async with lease(task, idle_timeout=idle_timeout) as held:
            return held.__returned__(await function(task, *args, **extra(held, kwargs)))

    @functools.wraps(function)
    def run(task: Task, *args: Any, **kwargs: Any) -> Any:
        with lease(task, idle_timeout=idle_timeout) as held:
            return held.__returned__(function(task, *args, **extra(held, kwargs)))

    return run_async if inspect.iscoroutinefunction(function) else run
