"""The base class of an app's tasks: a task that a worker runs has a lease, a task that is called directly has none.

    message ── lease ── task body ──┬── returns, or fails for good ── Celery stores and sends the rest ── settled
                                    └── must run again, or rejects its message ── released at once

The run is settled after Celery has stored its result: settled before, the result would be lost if the worker died in
between. A worker may die between the settlement and the acknowledgement of the message: then the message is delivered
once more, and acknowledged without running.

A run that has sent a retry or its replacement releases the lease, so that the task can go on, and leaves its own number
as the checkpoint: another copy of a message with that number, or a lower one, is acknowledged without running.

    {"shop.charge": [0, 2]}    by the task's name: replacements and retries before the last run that has ended
"""

# pyright: basic, reportMissingTypeStubs=false
# Celery has no type annotations.

import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Any
from urllib.parse import quote

from celery import Celery, Task, signals, states
from celery.exceptions import Ignore, Reject, Retry
from celery.utils.imports import symbol_by_name
from kombu.serialization import registry

import leasekit
from leasekit import AlreadyDone, Client, ConfigError, Fatal, Lease, LeasekitError, LeaseLost, NotGranted

logger = logging.getLogger("leasekit.celery")

_VISIBILITY = 3600.0  # seconds: the default of Celery's Redis transport
_LATEST = 60.0  # seconds, at most, until a message that was put off is delivered again
_HANDED_ON = 5.0  # seconds to wait for a lease: a retry may arrive before the run that sent it has released it
_LONGEST = 100  # characters of an id that fit into the name of a lease
_RUN = "leasekit_run"  # attribute of a request: its lease, and the exception that was handled when the task began
_HAS_SUCCESSOR = "leasekit_has_successor"  # attribute of a request: its run has sent a retry, or its replacement
_REFUSED = "leasekit_refused"  # header of a message: how often its lease could not be obtained
_SHOWN = ("argsrepr", "kwargsrepr")  # arguments as logs show them, if the sender has set them
_NOT_OURS_TO_JUDGE = (Retry, Reject, Ignore, LeaseLost)  # the message comes again, or the task itself dismisses it


def install(app: Celery, url: str, *, ttl: float = 60.0) -> None:
    """Run every task of this app under a lease of the service at `url`, which must keep names (SQS, for one, does not).

    Call this right after the app was made, before its tasks are declared. `ttl`: seconds without a heartbeat after
    which a run counts as dead. The app's `task_cls` is kept. A task with a `base` of its own has leases if that base
    derives from `LeasedTask`.

    Raises `ConfigError` if tasks exist already, or the service cannot keep names, `UnknownScheme`, `MissingDependency`.
    """
    if app.finalized:
        raise ConfigError(
            f"app {app.main!r} already has tasks: call leasekit_celery.install() before tasks are declared"
        )
    client = leasekit.connect(url, heartbeats=leasekit.Heartbeats().for_ttl(ttl))
    client.check_names()
    theirs: Any = symbol_by_name(app.task_cls)
    bases: tuple[Any, ...] = (theirs,) if issubclass(theirs, LeasedTask) else (LeasedTask, theirs)

    class Leased(*bases):  # type: ignore[misc]  # the bases are values
        abstract = True
        leases = client

    app.task_cls = Leased
    vars(app).pop("Task", None)  # cached from the former class


class LeasedTask(Task):  # type: ignore[misc]  # celery has no types
    """A Celery task that runs under the lease of its id."""

    abstract = True
    leases: Client

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task: under its lease if a worker calls it, without a lease if it is called like a function."""
        request = self.request
        if request.called_directly or request.is_eager or hasattr(request, _RUN):
            return super().__call__(*args, **kwargs)
        held = self._enter_lease(request)
        setattr(request, _RUN, (held, sys.exception()))
        try:
            return self._run_held(held, request, args, kwargs)
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
            setattr(self.request, _HAS_SUCCESSOR, True)
            raise
        setattr(self.request, _HAS_SUCCESSOR, True)
        return retry

    def replace(self, sig: Any) -> Any:
        """Send a replacement, as Celery does, and note that this run has one."""
        try:
            return super().replace(sig)
        except Ignore:
            if sig.subtask_type is None:  # the body of a chord does not carry the number of replacements
                setattr(self.request, _HAS_SUCCESSOR, True)
            raise

    def _run_held(self, held: Lease, request: Any, args: Any, kwargs: Any) -> Any:
        """Run the task's code. An ended run stays under its lease until Celery has finished with it (`_settle`)."""
        theirs = super().__call__  # of another base class; Celery's own would hide the request
        body = self.run if getattr(theirs, "__func__", None) is Task.__call__ else theirs
        try:
            result = body(*args, **kwargs)
        except BaseException as error:
            has_ended = isinstance(error, Exception) and not isinstance(error, _NOT_OURS_TO_JUDGE)
            if held.lost or not (has_ended and self.acks_on_failure_or_timeout):
                if isinstance(error, (Retry, Ignore)):
                    self._note_end(held, request)
                _leave_lease(request, error)
            raise
        if held.lost:  # a lost lease must be reported before Celery stores the result
            _leave_lease(request, None)
        return result

    def _enter_lease(self, request: Any) -> Lease:
        """Enter the lease of a request; raise `Ignore` if the task must not run. Its message is not lost."""
        follows = request.retries or request.replaced_task_nesting
        once = self.leases.once(_name(request.id), wait=_HANDED_ON if follows else 0)
        try:
            held = leasekit.lease(once).__enter__()
            self._check_attempt(held, request)
            return held
        except AlreadyDone:
            logger.info("task %s was delivered again, and had ended: acknowledged without running", request.id)
            raise Ignore from None
        except NotGranted as refused:
            if refused.ended is not None:
                self._revoke(request, refused)
            else:
                logger.info("task %s was delivered again while it runs: it is put off", request.id)
                self._put_off(request)
            raise Ignore from None
        except LeasekitError as error:
            logger.warning("task %s is put off: its lease cannot be obtained: %s", request.id, error)
            before = int((request.headers or {}).get(_REFUSED, 0))
            # The delay grows: a rejected message would be delivered again at once, as long as the service refuses.
            self._put_off(request, delay=2.0 ** min(before, 10), headers={_REFUSED: before + 1})
            raise Ignore from None

    def _check_attempt(self, held: Lease, request: Any) -> None:
        """Give the lease back and raise `AlreadyDone` if the run of this number, or a later one, has ended."""
        if _number(request) <= _ended(held).get(str(self.name), []):
            done = AlreadyDone(f"attempt {request.retries} of task {request.id} was run to its end before")
            held.release()
            held.__exit__(AlreadyDone, done, None)
            raise done

    def _note_end(self, held: Lease, request: Any) -> None:
        """Record that this run has ended if another follows it: the record is sent with the lease's release."""
        if hasattr(request, _HAS_SUCCESSOR):
            with suppress(LeasekitError):  # a lost lease raises when it is left
                held.progress(_ended(held) | {str(self.name): _number(request)})

    def _revoke(self, request: Any, refused: NotGranted) -> None:
        """Revoke a task that was cancelled at the service of the leases, so that it never runs."""
        logger.warning("task %s is revoked, and acknowledged without running: %s", request.id, refused)
        is_stored = not self.ignore_result or self.store_errors_even_if_ignored
        try:
            self.backend.mark_as_revoked(request.id, str(refused), request=request, store_result=is_stored)
        except Exception as error:  # noqa: BLE001 - whatever its result backend raises
            logger.warning("task %s is revoked later: its result cannot be stored: %s", request.id, error)
            self._put_off(request)
        else:
            signals.task_revoked.send(sender=self, request=request, terminated=False, signum=None, expired=False)

    def _put_off(self, request: Any, *, delay: float = _LATEST, headers: Mapping[str, int] | None = None) -> None:
        """Send a copy of the message for later; this message is then acknowledged. Its first run may be alive.

        A message that is rejected instead is delivered again at once, and again and again. That happens only if the
        broker does not accept the copy.
        """
        options: dict[str, Any] = self.app.conf.broker_transport_options or {}
        # If the ETA were later than the visibility timeout, the broker would deliver one more copy each time.
        delay = min(delay, _LATEST, float(options.get("visibility_timeout", _VISIBILITY)) / 2)
        shown = {name: value for name in _SHOWN if (value := getattr(request, name, None)) is not None}
        sent = _sending_options(request)
        again: Any = self.signature_from_request(request, countdown=delay, retries=request.retries, **shown, **sent)
        again.options["headers"] = {**(again.options.get("headers") or {}), **(headers or {})}
        # Otherwise Celery would send the copy as a child of this task, but its parent is the task that called it.
        self.push_request(called_directly=True)
        try:
            again.apply_async()
        except Exception as error:
            if not self.acks_late:
                raise
            logger.warning("task %s is delivered again: the broker does not accept a copy: %s", request.id, error)
            raise Reject(error, requeue=True) from error
        finally:
            self.pop_request()
        logger.info("task %s is tried again in %g s", request.id, delay)


def _name(task_id: str) -> str:
    """Return the name of a task's lease: an id of more than a hundred plain characters is replaced by its digest."""
    return f"celery:{task_id if len(quote(task_id)) <= _LONGEST else sha256(task_id.encode()).hexdigest()}"


def _sending_options(request: Any) -> dict[str, Any]:
    """Return the options of the message that Celery does not repeat: its serializer, compression and delivery mode."""
    properties = request.properties or {}
    options = {
        "serializer": registry.type_to_name.get(properties.get("content_type")),
        "compression": request.get("compression"),
        "delivery_mode": properties.get("delivery_mode"),
    }
    return {name: value for name, value in options.items() if value is not None}


def _number(request: Any) -> list[int]:
    """Return the number of the attempt that a message asks for; the numbers of one task grow."""
    return [request.replaced_task_nesting or 0, request.retries or 0]


def _ended(held: Lease) -> dict[str, list[int]]:
    """Return the numbers of the last ended runs that had a successor, by the task's name."""
    return held.checkpoint if isinstance(held.checkpoint, dict) else {}


def _leave_lease(request: Any, error: BaseException | None) -> None:
    held, _ = vars(request).pop(_RUN)
    held.__exit__(None if error is None else type(error), error, None)


def _settle(task: Any, state: str | None, retval: Any, **_: Any) -> None:
    """Settle a run after Celery has stored its result and sent its callbacks and its chain."""
    request = task.request
    if not hasattr(request, _RUN):
        return
    held, outer = getattr(request, _RUN)
    broken_off_by = sys.exception()
    error: BaseException | None = None
    if broken_off_by is not outer:  # the callbacks may not be sent: the task runs again if redelivered
        error = broken_off_by
    elif hasattr(request, _HAS_SUCCESSOR):  # `retry(throw=False)`: the task goes on, whatever this run returned
        task._note_end(held, request)
        error = Retry()
    elif state != states.SUCCESS:
        error = Fatal(repr(retval)) if task.acks_on_failure_or_timeout else Retry(exc=retval)
    try:
        _leave_lease(request, error)
    except LeaseLost as lost:
        logger.warning("task %s may run again, though it has ended: %s", request.id, lost)


def _check_process(sender: Any, **_: Any) -> None:
    """End a worker that starts in a process that cannot keep leases, with a message that says what to do."""
    if issubclass(sender.app.Task, LeasedTask):
        try:
            sender.app.Task.leases.check_process()
        except ConfigError as error:
            raise SystemExit(f"leasekit: {error}") from error  # Celery logs any other exception and goes on


def _note_content_type(request: Any, **_: Any) -> None:
    """Note how a received message is serialized: with most brokers, its properties do not say it to the task."""
    if isinstance(request.task, LeasedTask):
        properties = request.request_dict["properties"]
        request.request_dict["properties"] = {**properties, "content_type": request.message.content_type}


signals.task_received.connect(_note_content_type)
signals.task_postrun.connect(_settle)
signals.worker_init.connect(_check_process)
