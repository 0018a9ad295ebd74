"""End the `with` block of a lease, and show the keeper that a block is over, whatever ended it.

The owner of a lease is the function that ends its block: when that is dead, the block is over, or will never begin. A
`with` statement looks it up before it calls `__enter__`, and drops it when the block is over, even if a signal handler
raises just before the first line of the function. Nothing else refers to the function then, not even a traceback,
because functions written in C alone make it, look it up and call it: no frame refers to what they use.
"""

import logging
import sys
import weakref
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from functools import partial
from operator import methodcaller
from types import TracebackType
from typing import Any, Protocol

import anyio

from leasekit._driver.bridge import outcome
from leasekit._driver.explaining.recorder import Story
from leasekit._driver.keeping.held_lease import HeldLease, loss_reason
from leasekit._driver.reporting.outbox import Report
from leasekit._leased_run import LeasedRun
from leasekit.errors import LeaseLost
from leasekit.task import Verdict

_LOOK = 1.0
_LAST_WORD = 10.0  # seconds to wait for the answer to a result that is reported after the end of trust


class Exit(Protocol):
    """The type of `__exit__`."""

    def __call__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None, /
    ) -> None: ...


class AsyncExit(Protocol):
    """The type of `__aexit__`."""

    def __call__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None, /
    ) -> Coroutine[Any, Any, None]: ...


class _EndOfBlock(property):
    """`__exit__` and `__aexit__` of an object for a `with` statement: what `_exit_function()` of the object returns."""

    def __call__(self, manager: Any, *error: Any) -> Any:
        """End a block that was entered without a `with` statement: an ExitStack looks this up in the class."""
        return manager._leave(*error)


end_of_block: Any = _EndOfBlock(methodcaller("_exit_function"))


def leave(
    run: LeasedRun, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
) -> Coroutine[Any, Any, None] | None:
    """End a block that ended with `error`, and wait for the answer; in an event loop, return what does that."""
    if not run.is_async:
        _leave(run, error)
        return None
    leaving = _leaving(run, error)
    try:
        connection = run.connection
        if connection is not None and not connection.forked:
            # The exit function dies where the waiting begins; the coroutine lives until its end.
            run.held.hand_over(connection.owner(run.held, weakref.ref(leaving)))
        return leaving
    finally:
        del leaving  # or the traceback of an interrupt here would keep the lease


def _leave(run: LeasedRun, error: BaseException | None) -> None:
    report = _end(run, error)
    if report is None:
        return
    verdict: Verdict | None = None
    # At the interpreter's end, a generator that was not read to its end may leave its block: no answer comes then.
    while verdict is None and not sys.is_finalizing() and (left := _patience(run)) > 0:
        try:
            verdict = report.answer.result(left)
        except TimeoutError:
            continue
        except CancelledError:  # its client was closed
            break
    _conclude(run, report, verdict, error)


async def _leaving(run: LeasedRun, error: BaseException | None) -> None:
    ended_by = run.leave_scope(error)
    ours, error = ended_by is not error, ended_by
    report = _end(run, error)
    if report is not None:
        await _answered(run, report, error)
    if ours and error is not None:
        raise error


async def _answered(run: LeasedRun, report: Report, error: BaseException | None) -> None:
    verdict: Verdict | None = None
    while verdict is None and (left := _patience(run)) > 0:
        # Shielded: a report that was cancelled midway would leave a task that neither runs nor has ended.
        with anyio.move_on_after(left, shield=True):
            try:
                verdict = await outcome(report.answer, keep=True)
            except CancelledError:  # its client was closed
                break
    _conclude(run, report, verdict, error)


def _end(run: LeasedRun, error: BaseException | None) -> Report | None:
    try:
        run.detach()
        return _report(run, error)
    except BaseException:  # also an interrupt: if no settlement is on its way by now, the keeper makes one
        connection = run.connection
        if connection is not None and not connection.forked:
            connection.driver.call_soon(connection.keeper.abandoned, run.held, run.held.owner)
        raise


def _report(run: LeasedRun, error: BaseException | None) -> Report | None:
    """Send the settlement, if any, and do not wait. Raises `LeaseLost`, unless that or an interruption is under way."""
    held, connection = run.held, run.connection
    assert connection is not None  # noqa: S101 - it came with the held lease
    if connection.forked:  # a child leaves the block of its parent: the lease is not the child's to end
        return None
    settlement = run.ended(error)
    if settlement is None or not held.reportable(connection.backend.capabilities):
        connection.driver.call_soon(connection.keeper.finish, held)
        run.log_end(logging.DEBUG, "lost")
        if error is None or (isinstance(error, Exception) and not run.is_own_loss(error)):
            raise held.loss() from error
        return None
    # A service that obeys stale reports must get none after the end of trust, though the block waits a little longer.
    refuses_stale = connection.backend.capabilities.refuses_stale
    report = held.report_due = Report(settlement, is_over=None if refuses_stale else partial(_is_over, held))
    connection.driver.call_soon(connection.keeper.settle, held, report)
    run.log_end(logging.DEBUG, settlement.outcome)
    return report


def _is_over(held: HeldLease) -> bool:
    return held.clock.now() >= held.term.trusted_until


def _patience(run: LeasedRun) -> float:
    """Seconds to wait for the answer before looking again; zero or less once waiting is of no use."""
    held, ended_at = run.held, run.ended_at
    assert ended_at is not None  # noqa: S101 - the run has ended
    # Heartbeats may move the end of trust meanwhile, and a suspended machine brings it nearer.
    return min(max(held.term.trusted_until, ended_at + _LAST_WORD) - held.clock.now(), _LOOK)


def _conclude(run: LeasedRun, report: Report, verdict: Verdict | None, error: BaseException | None) -> None:
    """Raise `LeaseLost` if code ended well but its result was refused, or not answered in time (None).

    After an error nothing is raised; but a service that obeys stale reports must not get one after the end of trust.
    """
    connection = run.connection
    if verdict is not None and verdict.reason == "unreported":  # by the outbox, which has not sent it
        verdict = None
    if verdict is not None and (error is not None or verdict.verdict != "gone"):
        return
    if error is not None and (connection is None or connection.backend.capabilities.refuses_stale):
        return
    if verdict is None:
        why, word = "its result could not be reported while the lease lasted", "unreported"
    else:
        word = verdict.reason or "unknown"
        why = f"the service refused its result: {word}"
    held = run.held
    story = held.explained if held.lost else None
    if story is not None:
        why = f"{why}; {story.why}"
    events = () if story is None else story.events
    if connection is not None:
        connection.driver.call_soon(connection.keeper.told_lost, held, report, loss_reason(word), Story(why, events))
    if error is None:
        message = f"lost task {run.task.id}: {why}"
        raise LeaseLost(message, task_id=run.task.id, reason=loss_reason(word), events=events)
