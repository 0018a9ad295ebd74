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
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, cast, overload

import anyio
import msgspec

from leasekit._driver.bridge import call_soon_here, outcome, ring
from leasekit._driver.connection import Connection
from leasekit._driver.holding import Holding
from leasekit._driver.outbox import Report
from leasekit.errors import Cancelled, Fatal, LeaseError, LeaseLost, NotHeld
from leasekit.task import Outcome, Settlement, Task, Verdict

__all__ = ["Lease", "lease", "leased"]

P = ParamSpec("P")
R = TypeVar("R")

_MAX_PROGRESS = 64 * 1024
_MAX_TRACEBACK = 8 * 1024
_LAST_WORD = 10.0  # seconds to wait for the answer to a result that is reported after the end of trust


def lease(task: Task, *, idle_timeout: float | None = None) -> "Lease":
    """Keep `task` ours while the body of the `with` (or `async with`) runs, and say so when it no longer is.

    `idle_timeout`: a body that reports no progress for so many seconds is told to stop, and the task is tried again.

    The block raises `LeaseLost` when the lease was lost: side effects must stop then, and nothing is settled. An
    exception of the body settles the task as a retriable failure (`Fatal`: as a fatal one) and goes on its way.
    """
    return Lease(task, idle_timeout=idle_timeout)


class Lease:
    """The right to run one task, in this process, for as long as it lasts."""

    def __init__(self, task: Task, *, idle_timeout: float | None = None) -> None:
        self.task = task
        self._idle_timeout = idle_timeout
        self._connection: Connection | None = None
        self._holding: Holding | None = None
        self._scope: anyio.CancelScope | None = None
        self._outcome: Outcome | None = None
        self._result: Any = None
        self._error: Any = None
        self._retry_after: float | None = None
        self._ended_at = 0.0
        if task.client is not None and (holding := task.client.holding(task)) is not None:
            holding.reserved = True  # it may begin in another thread or task: a loop over tasks must not give it back

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
        """What the last holder reported with `progress`; None where there was none."""
        return self.task.progress

    def progress(self, value: Any) -> None:
        """Record how far the body is: the next holder's `checkpoint`. The latest wins; it goes with the next beat.

        Raises `LeaseLost` and the like as `check` does, ValueError where it is no JSON or above 64 KiB.
        """
        encoded = _json(value, "progress")
        if len(bytes(encoded)) > _MAX_PROGRESS:
            raise ValueError(f"progress of {len(bytes(encoded))} bytes is above the {_MAX_PROGRESS} that are kept")
        self.check()
        self._held.report(encoded)

    def check(self) -> None:
        """Return at once while all is well. Call it before each side effect that must not happen twice.

        Raises `LeaseLost` (someone else may hold the task now), `Cancelled` (nobody wants it any more), `IdleTimeout`.
        """
        self._held.check()

    def remaining(self) -> float:
        """Seconds for which the lease may be believed in if no further beat gets through; never below zero."""
        held = self._held
        return 0.0 if held.lost else max(0.0, held.term.lost_at - held.clock.now())

    @property
    def lost(self) -> bool:
        """True once the lease is lost."""
        return self._held.lost

    @property
    def _held(self) -> Holding:
        if self._holding is None:
            raise NotHeld(f"the lease of task {self.task.id} has not begun: use it in a `with` block")
        return self._holding

    # How it is to end ---------------------------------------------------------------------------------------------

    def complete(self, result: Any = None) -> None:
        """The task succeeded with this result (JSON, up to 1 MiB). Sent when the block ends."""
        self._decide("success", result=_json(result, "result"))

    def fail(self, error: Any, *, retry: bool | float = True) -> None:
        """The task failed: to be tried again (by its policy, or in `retry` seconds), or for good (`retry=False`).

        `error` is an exception, or anything that is JSON. Sent when the block ends.
        """
        value = _described(error) if isinstance(error, BaseException) else _json(error, "error")
        after = None if isinstance(retry, bool) else float(retry)
        self._decide("fatal" if retry is False else "retry", error=value, retry_after=after)

    def release(self, *, after: float | None = None) -> None:
        """Give the task back untried: ready at once, or `after` so many seconds. Sent when the block ends."""
        self._decide("release", retry_after=after)

    @property
    def decided(self) -> bool:
        """True once the body has said how it is to end."""
        return self._outcome is not None

    def _decide(
        self, outcome: Outcome, *, result: Any = None, error: Any = None, retry_after: float | None = None
    ) -> None:
        self._outcome, self._result, self._error, self._retry_after = outcome, result, error, retry_after

    # The doors ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        connection, holding = self._take()
        if holding.confirmed is not None:
            holding.confirmed.result()
        self.begin(connection, holding)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        report = self.end(error)
        while report is not None:
            try:
                return self._conclude(report.answer.result(self._patience(error)), error)
            except TimeoutError:  # beats may have moved the end of trust: look again
                continue
        return None

    async def __aenter__(self) -> Self:
        connection, holding = self._take()
        if holding.confirmed is not None:
            await outcome(holding.confirmed, keep=True)
        scope = self._scope = anyio.CancelScope()
        call_soon = call_soon_here()
        holding.listener = lambda: ring(call_soon, scope.cancel)
        self.begin(connection, holding)
        scope.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._scope is not None  # noqa: S101 - __aenter__ has made it
        ours = self._scope.__exit__(kind, error, tb)
        if ours:  # the body was cancelled by what it was told: that is how it ended
            error = self._told()
        report = self.end(error)
        while report is not None:
            # Shielded: to be cancelled in the middle of a report would leave a task that nobody runs and nobody ended.
            with anyio.move_on_after(self._patience(error), shield=True):
                self._conclude(await outcome(report.answer, keep=True), error)
                break
        if ours and error is not None:
            raise error

    def _take(self) -> tuple[Connection, Holding]:
        if self._holding is not None:
            raise NotHeld(f"the lease of task {self.task.id} has been used before: claim the task again")
        client = self.task.client
        if client is None:
            raise NotHeld(f"task {self.task.id} was not claimed by a client of this process: use client.tasks()")
        connection = client.connection()
        holding = connection.keeper.get(self.task)
        if holding is None:
            raise NotHeld(f"the lease of task {self.task.id} has ended, or is held by another process: claim it again")
        return connection, holding

    def begin(self, connection: Connection, holding: Holding) -> None:
        """The first half of a door, for a worker: the body starts."""
        if holding.lost:
            raise holding.loss()
        holding.begin(self._idle_timeout)
        self._connection, self._holding = connection, holding
        if self._idle_timeout is not None:
            connection.driver.call_soon(connection.keeper.watch, holding)

    def _told(self) -> BaseException | None:
        try:
            self.check()
        except LeaseError as told:
            return told
        return None

    # The end ------------------------------------------------------------------------------------------------------

    def end(self, error: BaseException | None) -> Report | None:
        """The second half, which does not wait: the body has ended. None where there is nothing to be reported.

        Raises `LeaseLost` where the lease was lost, unless that (or an interruption) is on its way already.
        """
        holding, connection = self._held, self._connection
        assert connection is not None  # noqa: S101 - it came with the holding
        if connection.forked:  # a child leaves the block of its parent: the lease is not the child's to end
            return None
        holding.listener = None
        self._ended_at = holding.clock.now()
        settlement = None if self._nothing_to_settle(error) else self._settlement(error)
        if settlement is None:
            connection.driver.call_soon(connection.keeper.finish, holding)
            if error is None or (isinstance(error, Exception) and not _is(error, LeaseLost)):
                raise holding.loss() from error
            return None
        report = Report(settlement)
        connection.driver.call_soon(connection.keeper.settle, holding, report)
        return report

    def _nothing_to_settle(self, error: BaseException | None) -> bool:
        """True where the task is no longer ours to settle."""
        if _is(error, LeaseLost):
            return True
        if not self._held.lost:
            return False
        # Work that was finished is reported all the same, as long as nobody said that the task has gone to another:
        # a result outranks a late beat (SYSTEMS C9), and the service refuses it if it comes too late.
        finished = error is None and self._held.reason in (None, "expired", "strikes")
        assert self._connection is not None  # noqa: S101 - it came with the holding
        return not (finished and self._connection.backend.traits.refuses_stale)

    def _settlement(self, error: BaseException | None) -> Settlement:
        task, progress = self.task, self._held.progress
        outcome, result, described, after = self._outcome, self._result, self._error, self._retry_after
        if outcome is None or (error is not None and outcome == "success"):
            outcome, result, described, after = _outcome_of(error), None, error and _described(error), None
        return Settlement(
            id=task.id,
            token=task.token,
            outcome=outcome,
            result=result,
            error=described,
            retry_after=after,
            progress=progress,
        )

    def _patience(self, error: BaseException | None) -> float:
        """Seconds to go on waiting for the answer; raises `LeaseLost` when it is no use any more."""
        held = self._held
        until = max(held.term.trusted_until, self._ended_at + _LAST_WORD)
        left = until - held.clock.now()
        if left <= 0 and error is None:
            why = "its result could not be reported while the lease lasted; it goes on being reported"
            raise LeaseLost(f"lost task {self.task.id}: {why}", task_id=self.task.id, reason="unreported")
        return left

    def _conclude(self, verdict: Verdict, error: BaseException | None) -> None:
        if verdict.verdict == "gone" and error is None:
            why = f"the service refused its result: {verdict.reason or 'gone'}"
            raise LeaseLost(
                f"lost task {self.task.id}: {why}", task_id=self.task.id, reason=verdict.reason or "unknown"
            )


def _is(error: BaseException | None, kind: type[BaseException]) -> bool:
    """Also where a task group has wrapped it."""
    if isinstance(error, BaseExceptionGroup):
        return any(_is(inner, kind) for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions)
    return isinstance(error, kind)


def _outcome_of(error: BaseException | None) -> Outcome:
    if error is None:
        return "success"
    if _is(error, Fatal):
        return "fatal"
    if _is(error, Cancelled):
        return "cancelled"
    # What interrupts (KeyboardInterrupt, a cancelled event loop, the end of the interpreter) says nothing of the task.
    return "retry" if isinstance(error, Exception) else "release"


def _json(value: Any, what: str) -> msgspec.Raw:
    """Encoded once, and here, where the one who made it can see that it is no JSON."""
    try:
        return msgspec.Raw(msgspec.json.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"this {what} is no JSON: {error}") from error


def _described(error: BaseException) -> msgspec.Raw:
    """An exception as the error of a settlement."""
    lines = "".join(traceback.format_exception(error))
    text = {"type": type(error).__qualname__, "message": str(error)[:2000], "traceback": lines[-_MAX_TRACEBACK:]}
    # A message may hold what UTF-8 cannot say (file names do).
    return _json({name: value.encode(errors="replace").decode() for name, value in text.items()}, "error")


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
