"""Endings: how a leased run ends, and what is settled: after Celery has stored the result and sent the rest."""

# pyright: basic, reportMissingTypeStubs=false
# Celery has no type annotations.

import logging
import sys
from contextlib import suppress
from traceback import walk_tb
from typing import Any

from celery import states
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded

from leasekit import Fatal, Lease, LeaseLost
from leasekit_celery import children
from leasekit_celery.children import safe_repr
from leasekit_celery.notes import Stage
from leasekit_celery.task_lease import TaskLease, attempt_number

logger = logging.getLogger("leasekit.celery")

RUN = "leasekit_run"  # attribute of a request: its `Run`
# Attribute of a request whose run has sent a retry, or its replacement: whether that carries a higher number.
HAS_SUCCESSOR = "leasekit_has_successor"
UNSENT = "leasekit_unsent"  # attribute of a `Reject`: Celery raises it for a retry that the broker does not accept


def note_successor(request: Any, *, is_numbered: bool) -> None:
    """Note that the run of a request has sent another in its own place, for its process and for its main process.

    `is_numbered`: what it has sent carries a higher number.
    """
    setattr(request, HAS_SUCCESSOR, is_numbered)
    if children.notes is not None and hasattr(request, RUN):  # not a task that is called like a function
        children.notes.note_stage(Stage.FOLLOWED if is_numbered else Stage.REPLACED)


class Run:
    """The run of a request under its lease."""

    def __init__(self, held: Lease, outer: BaseException | None) -> None:
        self.held = held
        self.lease = TaskLease(held)
        self.outer = outer  # the exception that was handled when the task began
        if children.notes is not None:
            children.notes.write(held)

    def leave(self, error: BaseException | None) -> None:
        """Leave the lease. Its note is removed after that: until then another process must be able to end it."""
        try:
            self.held.__exit__(None if error is None else type(error), error, None)
        finally:
            if children.notes is not None:
                children.notes.leave()


def leave_lease(request: Any, error: BaseException | None) -> None:
    """Leave the lease of a run that ended with `error`, which a soft time limit does not replace: a retry is sent."""
    run: Run = vars(request).pop(RUN)
    with suppress(SoftTimeLimitExceeded):  # while the answer is waited for
        run.leave(error)


def settle(task: Any, state: str | None, retval: Any) -> None:
    """Settle a run after Celery has stored its result and sent its callbacks and its chain."""
    request = task.request
    run: Run = getattr(request, RUN)
    broken_off_by = sys.exception()
    if children.is_for_main(broken_off_by):
        return
    error: BaseException | None = None
    if broken_off_by is not None and broken_off_by is not run.outer:
        # Celery acknowledges a failure also if a handler of it raises (`on_failure`).
        has_failed = _is_handled(task, broken_off_by) and not hasattr(request, HAS_SUCCESSOR)
        ends = has_failed and not isinstance(broken_off_by, MemoryError) and is_end(task, broken_off_by)
        # Otherwise its result is not stored, or its callbacks are not sent: the task runs again if redelivered.
        error = Fatal(safe_repr(broken_off_by)) if ends else broken_off_by
    elif hasattr(request, HAS_SUCCESSOR):  # `retry(throw=False)`: the task goes on, whatever this run returned
        task.note_end(request)
        error = Retry()
    elif state == states.REJECTED:
        error = Fatal(f"{rejection(request)} {safe_repr(retval)}")
    elif state not in (states.SUCCESS, states.IGNORED):
        error = Fatal(safe_repr(retval)) if _acks_failure(task) else Retry(exc=retval)
    if children.notes is not None and (error is None or isinstance(error, Fatal)):
        children.notes.note_stage(Stage.ENDED)
    try:
        leave_lease(request, error)
    except LeaseLost as lost:
        logger.warning("task %s may run again, though it has ended: %s", request.id, lost)


def rejection(request: Any) -> str:
    """Return how the error of a run begins that ended by `Reject`: a message of this number is rejected again."""
    return f"the task rejected its message (attempt {attempt_number(request)}):"


def _acks_failure(task: Any) -> bool:
    """Return whether Celery acknowledges the message of a task that has failed, so that it has ended."""
    return bool(getattr(task, "acks_on_failure", task.acks_on_failure_or_timeout))  # Celery 5.7 has an option for each


def is_end(task: Any, error: BaseException) -> bool:
    """Return whether a task that raises this has ended: its message does not come again, and nothing goes on for it."""
    if isinstance(error, Reject):  # a broker that is away does not take the rejection either
        return not (error.requeue or hasattr(error, UNSENT))
    if isinstance(error, Ignore):  # the task dismisses its message; `replace` raises it too
        return not hasattr(task.request, HAS_SUCCESSOR)
    return isinstance(error, Exception) and not isinstance(error, (Retry, LeaseLost)) and _acks_failure(task)


def _is_handled(task: Any, error: BaseException) -> bool:
    """Return whether the task's `on_failure` has raised this: Celery calls it once the failure is stored."""
    handler = getattr(task.on_failure, "__code__", None)
    return any(frame.f_code is handler for frame, _ in walk_tb(error.__traceback__))
