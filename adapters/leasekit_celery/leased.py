"""The base class of an app's tasks: a task that a worker runs has a lease, a task that is called directly has none.

    message ── lease ── task body ──┬── returns, or fails for good ── Celery stores and sends the rest ── settled
                                    └── must run again, or gives its message back ── released at once

The run is settled after Celery has stored its result: settled before, the result would be lost if the worker died in
between. A worker may die between the settlement and the acknowledgement of the message: then the message is delivered
once more, and acknowledged without running.

A run that has sent a retry or its replacement releases the lease, so that the task can go on, and leaves its own number
in the checkpoint: another copy of a message with that number, or a lower one, is acknowledged without running. A retry
gets the lease once Celery has stored the state RETRY.

A pool process of a prefork worker runs one task at a time. So the watchdog may end it when its lease is lost, and the
main process reports the end of a run that cannot report it itself (`children.py`).
"""

# pyright: basic, reportMissingTypeStubs=false
# Celery has no type annotations.

import logging
import os
import sys
from contextlib import suppress
from functools import cache
from inspect import signature
from typing import Any, NoReturn

from celery import Celery, Task, signals, states
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from celery.utils.imports import symbol_by_name

import leasekit
from leasekit import AlreadyDone, Client, Lease, LeasekitError, LeaseLost, NotGranted
from leasekit.named import kind_of
from leasekit_celery import children, endings
from leasekit_celery.children import DISMISSED, PUT_OFF, REVOKED, LeasedRequest
from leasekit_celery.copies import put_off
from leasekit_celery.endings import HAS_SUCCESSOR, RUN, UNSENT, Run, is_end, leave_lease, note_successor, rejection
from leasekit_celery.outage import Outage
from leasekit_celery.task_lease import TaskLease, attempt_number, current, lease_name, takes_lease

logger = logging.getLogger("leasekit.celery")

_HANDED_ON = 5.0  # seconds to wait for a lease: a retry may arrive before the run that sent it has released it
_ASKED = "leasekit_asked"  # attribute of a request: its lease was asked for
# A task's `track_started` once `stores_started` has its value: false, so that Celery does not store STARTED for copies.
_TAKEN_OVER: Any = ()


class LeasedTask(Task):  # type: ignore[misc]  # celery has no types
    """A Celery task that runs under the lease of its id."""

    abstract = True
    leases: Client
    leased: bool | None = None
    """Whether the task has leases: `@app.task(leased=False)` has none. None: as `install` was told."""
    kills_lost: bool
    """Whether a pool process is ended when the lease of its task is lost. Only the app's `Task` has it."""
    outage: Outage
    """Whether the service of the leases answered this worker when it was asked last."""
    stores_started = False
    """Whether a run that has its lease stores the state STARTED: what the task, or the app, says of `track_started`."""

    @classmethod
    def bind(cls, app: Celery) -> Any:
        """Bind the class to its app, as Celery does when the task is declared.

        Its `Request`, which may be its own, gets leases; `track_started` is taken over.
        """
        cls.Request = _lease_requests(symbol_by_name(cls.Request))
        if cls.leased is None:  # its base is not the app's own class
            cls.leased = getattr(app.Task, "leased", True)
        bound = super().bind(app)
        if cls.leased and cls.track_started is not _TAKEN_OVER:  # Celery may bind a class more than once
            cls.stores_started, cls.track_started = bool(cls.track_started), _TAKEN_OVER
        return bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task: under its lease if a worker calls it, without a lease if it is called like a function."""
        request = self.request
        if not self.leased or request.called_directly or request.is_eager or hasattr(request, RUN):
            return super().__call__(*args, **kwargs)
        if not takes_lease(self, request.delivery_info):
            if not hasattr(self.app.Task, "leases"):
                why = "its app has not called leasekit_celery.install"
                logger.warning("task %s (%s) runs without a lease: %s", request.id, self.name, why)
            self._store_started(request)
            return super().__call__(*args, **kwargs)
        self._enter_lease(request, sys.exception())
        if request.headers and request.headers.pop(PUT_OFF, None):  # a retry of this run was not put off
            request.delivery_info = {**(request.delivery_info or {}), "redelivered": True}
        try:
            return self._run_held(request, args, kwargs)
        except LeaseLost as lost:
            if not self.acks_late:  # the message was acknowledged before the task began, and is not delivered again
                raise
            logger.warning("task %s is delivered again: %s", request.id, lost)
            raise Reject(lost, requeue=True) from lost

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """Send a retry, as Celery does, and note that this run has one: with `throw=False` the task's code goes on."""
        try:
            retry = super().retry(*args, **kwargs)
        except Retry:
            note_successor(self.request, is_numbered=True)
            raise
        except Reject as unsent:
            setattr(unsent, UNSENT, True)
            raise
        note_successor(self.request, is_numbered=True)
        return retry

    def replace(self, sig: Any) -> Any:
        """Send a replacement, as Celery does, and note that this run has one."""
        try:
            return super().replace(sig)
        except Ignore:
            # A chain that is the body of a chord does not carry the number of replacements. Protocol 1 never does, nor
            # does Celery 5.3.0.
            sends_number = "replaced_task_nesting" in signature(self.app.amqp.create_task_message).parameters
            note_successor(self.request, is_numbered=sends_number and sig.subtask_type is None)
            raise

    def _run_held(self, request: Any, args: Any, kwargs: Any) -> Any:
        """Run the task's code. An ended run stays under its lease until Celery has finished with it (`_settle`)."""
        theirs = super().__call__  # of another base class; Celery's own would hide the request
        body = self.run if getattr(theirs, "__func__", None) is Task.__call__ else theirs
        run: Run = getattr(request, RUN)
        held = run.held
        outer = current.get()
        try:
            current.set(run.lease)
            self._store_started(request)
            result = body(*args, **kwargs)
        except BaseException as error:
            if held.lost or not self._keeps_lease(request, error):
                self._give_lease_up(request, error)
            raise
        finally:
            current.set(outer)
        if held.lost and not hasattr(request, HAS_SUCCESSOR):
            self._check_not_taken(held, request)
        return result

    def _keeps_lease(self, request: Any, error: BaseException) -> bool:
        """Return whether the run keeps its lease until Celery has dealt with `error`.

        A retry that was sent waits for the lease until Celery has stored the state RETRY of this run: that would
        replace the state of a retry that has ended by then.
        """
        if isinstance(error, Retry) and hasattr(request, HAS_SUCCESSOR):
            self.note_end(request)
            return True
        return children.is_for_main(error) or is_end(self, error)

    def _give_lease_up(self, request: Any, error: BaseException) -> None:
        """Leave the lease before Celery deals with `error`. Raises `LeaseLost` if the message must come again."""
        ends = isinstance(error, (Retry, Ignore)) or not isinstance(error, Exception)
        has_sent = ends and hasattr(request, HAS_SUCCESSOR)
        if has_sent:
            self.note_end(request)
        try:
            leave_lease(request, error)
        except LeaseLost as lost:
            if self.acks_late and not has_sent:
                raise
            logger.warning("task %s may run again, though it has ended: %s", request.id, lost)

    def _check_not_taken(self, held: Lease, request: Any) -> None:
        """Leave a lost lease and raise `LeaseLost`, unless the service says that no other run has begun since.

        Nothing is settled here: Celery has not stored the result yet, and does not if this raises.
        """
        task_id = held.task.id
        try:
            info = self.app.Task.leases.get(task_id)
        except LeasekitError as error:
            if not self.acks_late:  # the message does not come again
                return
            why = f"the service does not say whether another run has begun: {error}"
        else:
            if info is not None and info.fence == held.fence and not info.status.ended:
                return
            why = "another run may have begun"
        lost = LeaseLost(f"lost task {task_id} before its end: {why}", task_id=task_id, reason="unreported")
        leave_lease(request, lost)
        raise lost

    def _store_started(self, request: Any) -> None:
        if self.stores_started and not vars(request).get("ignore_result", self.ignore_result):
            process = {"pid": os.getpid(), "hostname": request.hostname}
            self.backend.store_result(request.id, process, states.STARTED, request=request)

    def _enter_lease(self, request: Any, outer: BaseException | None) -> None:
        """Begin the run of a request; raise `Ignore` if the task must not run. Its message is not lost.

        `outer`: the exception that was handled when the task began.
        """
        setattr(request, _ASKED, True)
        if children.notes is not None:
            children.notes.clear()  # of an earlier run of this task, perhaps
        held: Lease | None = None
        try:
            held = self._obtain(request)
            if REVOKED in vars(request):
                self._end_revoked(held, request)
            if held.attempt > 1:  # what gives a lease back, as a retry does, does not count
                why = "an earlier attempt has died without a report"
                logger.info("task %s runs again, as attempt %d: %s", request.id, held.attempt, why)
            setattr(request, RUN, Run(held, outer))
        except SoftTimeLimitExceeded as limit:
            # A lease that nothing refers to is released at once; the traceback has it too if it was just granted.
            vars(request).pop(RUN, None)
            limit.__traceback__ = limit.__context__ = held = None
            if children.notes is not None:
                children.notes.clear()
            put_off(self, request, "it has no lease", first=1.0)
            raise Ignore from None
        except NotGranted as refused:
            self.app.Task.outage.ends()
            if refused.ended is not None:
                self._revoke(request, str(refused))
            else:
                put_off(self, request, "another run has its lease")
            raise Ignore from None
        except LeasekitError as error:
            # Warnings are rare: a backlog of a thousand messages would repeat them a thousand times.
            level = logging.WARNING if self.app.Task.outage.begins() else logging.DEBUG
            logger.log(level, "the lease of task %s cannot be obtained: %s", request.id, error)
            put_off(self, request, "it has no lease", first=1.0, level=min(level, logging.INFO))
            raise Ignore from None

    def _obtain(self, request: Any) -> Lease:
        """Return the lease of a request. Raises `Ignore` or `Reject` if its task has ended."""
        follows = request.retries or request.replaced_task_nesting
        once = self.app.Task.leases.once(lease_name(request.id), wait=_HANDED_ON if follows else 0)
        try:
            held = leasekit.lease(once).__enter__()
            self.app.Task.outage.ends()
            self._check_attempt(held, request)
        except AlreadyDone:
            self.app.Task.outage.ends()
            self._dismiss(request)
        return held

    def _dismiss(self, request: Any) -> NoReturn:
        """Dismiss a message whose task has ended: reject it if the task has rejected it before, else acknowledge it.

        A rejection may not have reached the broker, because Celery sends it after the run: then its dead letter would
        be missing. A message that a dead-letter exchange has sent back shows that it has.
        """
        if self.acks_late and "x-death" not in vars(request):
            info = self.app.Task.leases.get(kind_of(lease_name(request.id), "once:"))
            error = info.error if info is not None else None
            if isinstance(error, dict) and str(error.get("message")).startswith(rejection(request)):
                logger.info("task %s was delivered again, and had ended: rejected again, without running", request.id)
                raise Reject(DISMISSED, requeue=False) from None
        logger.info("task %s was delivered again, and had ended: acknowledged without running", request.id)
        raise Ignore from None

    def _check_attempt(self, held: Lease, request: Any) -> None:
        """Give the lease back and raise `AlreadyDone` if the run of this number, or a later one, has ended."""
        if attempt_number(request) <= TaskLease(held).last_ended(str(self.name)):
            done = AlreadyDone(f"attempt {request.retries} of task {request.id} was run to its end before")
            held.release()
            held.__exit__(AlreadyDone, done, None)
            raise done

    def note_end(self, request: Any) -> None:
        """Record that this run has ended, and that another follows it: the record is sent with the lease's release."""
        lease: TaskLease = getattr(request, RUN).lease
        with suppress(LeasekitError):  # a lost lease raises when it is left
            if getattr(request, HAS_SUCCESSOR):
                lease.note_end(str(self.name), attempt_number(request))
            else:  # what follows may have the number of a run that has ended
                lease.forget_ends()

    def _end_revoked(self, held: Lease, request: Any) -> NoReturn:
        """Settle the lease of a task that was revoked, or has expired, and that no other run has: it never runs."""
        reason = getattr(request, REVOKED)
        if self._revoke(request, reason):
            held.fail(f"the task is {reason}", retry=False)
        else:
            held.release()
        held.__exit__(None, None, None)
        raise Ignore

    def _revoke(self, request: Any, reason: str) -> bool:
        """Revoke a task, so that it never runs; return False if its result cannot be stored, and it is put off."""
        logger.warning("task %s is revoked, and acknowledged without running: %s", request.id, reason)
        is_stored = not self.ignore_result or self.store_errors_even_if_ignored
        try:
            self.backend.mark_as_revoked(request.id, reason, request=request, store_result=is_stored)
        except Exception as error:  # noqa: BLE001 - whatever its result backend raises
            logger.warning("task %s is revoked later: its result cannot be stored: %s", request.id, error)
            put_off(self, request, "its result cannot be stored")
            return False
        expired = reason == "expired"
        signals.task_revoked.send(sender=self, request=request, terminated=False, signum=None, expired=expired)
        return True


@cache
def _lease_requests(request_class: Any) -> Any:
    """Return the class of a worker's messages that has leases, and all that this one has."""
    if issubclass(request_class, LeasedRequest):
        return request_class
    return type("Request", (LeasedRequest, request_class), {})


def settle(task: Any, state: str | None, retval: Any, **_: Any) -> None:
    """Settle the run of a task, if it has a lease; warn of a task that should have had one."""
    request = task.request
    if not hasattr(request, RUN):
        is_leased = isinstance(task, LeasedTask) and not request.is_eager and takes_lease(task, request.delivery_info)
        if is_leased and state == states.SUCCESS and not hasattr(request, _ASKED):
            why = "the __call__ of its class must call super().__call__, not self.run"
            logger.warning("task %s (%s) ran without a lease: %s", request.id, task.name, why)
        return
    endings.settle(task, state, retval)


def _note_content_type(request: Any, **_: Any) -> None:
    """Note how a received message is serialized: with most brokers, its properties do not say it to the task."""
    if isinstance(request.task, LeasedTask):
        properties = request.request_dict["properties"]
        request.request_dict["properties"] = {**properties, "content_type": request.message.content_type}


signals.task_received.connect(_note_content_type)
signals.task_postrun.connect(settle)
