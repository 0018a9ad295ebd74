"""The base class of an app's tasks: a task that a worker runs has a lease, a task that is called directly has none.

    message ── lease ── task body ──┬── returns, or fails for good ── Celery stores and sends the rest ── settled
                                    └── must run again, or gives its message back ── released at once

The run is settled after Celery has stored its result: settled before, the result would be lost if the worker died in
between. A worker may die between the settlement and the acknowledgement of the message: then the message is delivered
once more, and acknowledged without running.

A run that has sent a retry or its replacement releases the lease, so that the task can go on, and leaves its own number
in the checkpoint: another copy of a message with that number, or a lower one, is acknowledged without running.

A pool process of a prefork worker runs one task at a time. So the watchdog may end it when its lease is lost, and the
main process reports the end of a run that cannot report it itself (`children.py`).
"""

# pyright: basic, reportMissingTypeStubs=false
# Celery has no type annotations.

import itertools
import logging
import math
import os
import sys
import time
from contextlib import suppress
from functools import cache
from inspect import signature
from traceback import walk_tb
from typing import Any, Literal, NoReturn, cast

from celery import Celery, Task, signals, states
from celery.concurrency import get_implementation
from celery.concurrency.prefork import TaskPool
from celery.exceptions import Ignore, OperationalError, Reject, Retry, SoftTimeLimitExceeded
from celery.utils.imports import symbol_by_name
from kombu.serialization import registry

import leasekit
from leasekit import (
    AlreadyDone,
    Client,
    ConfigError,
    Fatal,
    Lease,
    LeasekitError,
    LeaseLost,
    NotGranted,
    Refused,
    UnknownScheme,
    Untrusted,
)
from leasekit.named import kind_of
from leasekit.registry import open_backend
from leasekit_celery import children
from leasekit_celery.children import DISMISSED, PUT_OFF, REVOKED, LeasedRequest, end_process
from leasekit_celery.outage import Outage
from leasekit_celery.task_lease import TaskLease, attempt_number, current, lease_name, takes_lease

logger = logging.getLogger("leasekit.celery")

_VISIBILITY = 3600.0  # seconds: the default of Celery's Redis transport
_PATIENCE = 5.0  # seconds for which calls are repeated while the service of the leases is away
_FIRST = 5.0  # seconds until a message that was put off is delivered again; doubled each time …
_LATEST = 60.0  # … up to this
_RESEND = 1.0  # seconds between attempts to send a copy while the broker is away
_HANDED_ON = 5.0  # seconds to wait for a lease: a retry may arrive before the run that sent it has released it
_RUN = "leasekit_run"  # attribute of a request: its `_Run`
_ASKED = "leasekit_asked"  # attribute of a request: its lease was asked for
# Attribute of a request whose run has sent a retry, or its replacement: whether that carries a higher number.
_HAS_SUCCESSOR = "leasekit_has_successor"
_UNSENT = "leasekit_unsent"  # attribute of a `Reject`: Celery raises it for a retry that the broker does not accept
# A task's `track_started` once `stores_started` has its value: false, so that Celery does not store STARTED for copies.
_TAKEN_OVER: Any = ()
_SHOWN = ("argsrepr", "kwargsrepr")  # arguments as logs show them, if the sender has set them


def install(
    app: Celery, url: str, *, ttl: float = 300.0, on_lost: Literal["kill", "continue"] = "kill", leased: bool = True
) -> None:
    """Run the tasks of this app under leases of the service at `url`, which must keep names (SQS, for one, does not).

    Call this right after the app was made, before its tasks are declared. The app's `task_cls` is kept. A task with a
    `base` of its own has leases if that base derives from `LeasedTask`; a worker that starts warns of the others.

    Raises `ConfigError` if tasks are in use already, or the service cannot keep names, `UnknownScheme`,
    `MissingDependency`.

    Args:
        app: The app.
        url: The service of the leases.
        ttl: Seconds without a heartbeat after which a run counts as dead. A longer ttl survives a longer outage of the
            service (300: 139 s, 60: 24 s); after the death of a whole machine, its tasks wait for so long.
        on_lost: What happens to code that goes on after its lease is lost. "kill": its pool process is ended before
            another run may begin, and the message is delivered again (`-P prefork` only). "continue": nothing.
        leased: Whether tasks have leases that do not say so themselves: `@app.task(leased=…)`.
    """
    if app.finalized:
        raise ConfigError(
            f"app {app.main!r} already has tasks: call leasekit_celery.install() before tasks are declared"
        )
    if on_lost not in ("kill", "continue"):
        raise ConfigError(f"on_lost={on_lost!r} is not known: use 'kill' or 'continue'")
    theirs: Any = symbol_by_name(app.task_cls)
    bases: tuple[Any, ...] = (theirs,) if issubclass(theirs, LeasedTask) else (LeasedTask, theirs)
    try:
        client = _client(url, ttl)
        client.check_names()
    except (ConfigError, UnknownScheme) as error:
        # All before an @ may be a password, and so may options.
        shown = f"{url.partition('://')[0]}://***" if "@" in url else url.partition("?")[0]
        example = "redis://localhost:6379/1?retention=1d"
        raise type(error)(f"{error} (install was given {shown!r}; a Redis is {example})") from error
    options = {"leases": client, "outage": Outage(), "kills_lost": on_lost == "kill", "leased": leased}
    app.task_cls = type("Leased", bases, {"abstract": True, **options})
    vars(app).pop("Task", None)  # cached from the former class


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
        if not self.leased or request.called_directly or request.is_eager or hasattr(request, _RUN):
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
            setattr(self.request, _HAS_SUCCESSOR, True)
            raise
        except Reject as unsent:
            setattr(unsent, _UNSENT, True)
            raise
        setattr(self.request, _HAS_SUCCESSOR, True)
        return retry

    def replace(self, sig: Any) -> Any:
        """Send a replacement, as Celery does, and note that this run has one."""
        try:
            return super().replace(sig)
        except Ignore:
            # A chain that is the body of a chord does not carry the number of replacements. Protocol 1 never does, nor
            # does Celery 5.3.0.
            sends_number = "replaced_task_nesting" in signature(self.app.amqp.create_task_message).parameters
            setattr(self.request, _HAS_SUCCESSOR, sends_number and sig.subtask_type is None)
            raise

    def _run_held(self, request: Any, args: Any, kwargs: Any) -> Any:
        """Run the task's code. An ended run stays under its lease until Celery has finished with it (`_settle`)."""
        theirs = super().__call__  # of another base class; Celery's own would hide the request
        body = self.run if getattr(theirs, "__func__", None) is Task.__call__ else theirs
        run: _Run = getattr(request, _RUN)
        held = run.held
        outer = current.get()
        try:
            current.set(run.lease)
            self._store_started(request)
            result = body(*args, **kwargs)
        except BaseException as error:
            if held.lost or not (children.is_for_main(error) or _is_end(self, error)):
                self._give_lease_up(request, error)
            raise
        finally:
            current.set(outer)
        if held.lost and not hasattr(request, _HAS_SUCCESSOR):
            self._check_not_taken(held, request)
        return result

    def _give_lease_up(self, request: Any, error: BaseException) -> None:
        """Leave the lease before Celery deals with `error`. Raises `LeaseLost` if the message must come again."""
        has_sent = isinstance(error, (Retry, Ignore)) and hasattr(request, _HAS_SUCCESSOR)
        if has_sent:
            self._note_end(request)
        try:
            _leave_lease(request, error)
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
        _leave_lease(request, lost)
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
        held: Lease | None = None
        try:
            held = self._obtain(request)
            if REVOKED in vars(request):
                self._end_revoked(held, request)
            if held.attempt > 1:  # what gives a lease back, as a retry does, does not count
                why = "an earlier attempt has died without a report"
                logger.info("task %s runs again, as attempt %d: %s", request.id, held.attempt, why)
            setattr(request, _RUN, _Run(held, outer))
        except SoftTimeLimitExceeded as limit:
            # A lease that nothing refers to is released at once; the traceback has it too if it was just granted.
            vars(request).pop(_RUN, None)
            limit.__traceback__ = limit.__context__ = held = None
            if children.notes is not None:
                children.notes.clear()
            self._put_off(request, "it has no lease", first=1.0)
            raise Ignore from None
        except NotGranted as refused:
            self.app.Task.outage.ends()
            if refused.ended is not None:
                self._revoke(request, str(refused))
            else:
                self._put_off(request, "another run has its lease")
            raise Ignore from None
        except LeasekitError as error:
            # Warnings are rare: a backlog of a thousand messages would repeat them a thousand times.
            level = logging.WARNING if self.app.Task.outage.begins() else logging.DEBUG
            logger.log(level, "the lease of task %s cannot be obtained: %s", request.id, error)
            self._put_off(request, "it has no lease", first=1.0, level=min(level, logging.INFO))
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
            if isinstance(error, dict) and str(error.get("message")).startswith(_rejection(request)):
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

    def _note_end(self, request: Any) -> None:
        """Record that this run has ended, and that another follows it: the record is sent with the lease's release."""
        lease: TaskLease = getattr(request, _RUN).lease
        with suppress(LeasekitError):  # a lost lease raises when it is left
            if getattr(request, _HAS_SUCCESSOR):
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
            self._put_off(request, "its result cannot be stored")
            return False
        expired = reason == "expired"
        signals.task_revoked.send(sender=self, request=request, terminated=False, signum=None, expired=expired)
        return True

    def _put_off(self, request: Any, why: str, *, first: float = _FIRST, level: int = logging.INFO) -> None:
        """Send a copy of the message for later; this message is then acknowledged. Its first run may be alive.

        The delay grows with each copy. A message that is rejected instead is delivered again at once, and again and
        again. That happens only if the broker does not accept the copy.
        """
        before = int((request.headers or {}).get(PUT_OFF, 0))
        # If the ETA were later than the visibility timeout, the broker would deliver one more copy each time.
        most = min(_LATEST, _visibility_timeout(self.app) / 2)
        delay = min(first * 2.0 ** min(before, 10), most)
        shown = {name: value for name in _SHOWN if (value := getattr(request, name, None)) is not None}
        sent = _sending_options(request)
        again: Any = self.signature_from_request(request, countdown=delay, retries=request.retries, **shown, **sent)
        headers = again.options["headers"] = {**(again.options.get("headers") or {}), PUT_OFF: before + 1}
        if (revoked := getattr(request, REVOKED, None)) is not None:
            headers[REVOKED] = revoked
            again.options.pop("expires", None)  # brokers do not accept a message that has expired
        # Otherwise Celery would send the copy as a child of this task, but its parent is the task that called it.
        self.push_request(called_directly=True)
        try:
            self._send_copy(again)
        finally:
            self.pop_request()
        logger.log(logging.DEBUG if before else level, "task %s is put off for %g s: %s", request.id, delay, why)

    def _send_copy(self, again: Any) -> None:
        """Send a copy of a message. Raises `Reject` if the broker does not accept it, so that the message comes again.

        Without `acks_late` the message was acknowledged when its task began, and the copy is all that is left of the
        task. So an outage of the broker is waited out, beyond a soft time limit.
        """
        for number in itertools.count():
            try:
                again.apply_async()
            except Exception as error:
                if self.acks_late:
                    logger.warning("task %s is delivered again: the broker does not accept a copy: %s", again.id, error)
                    raise Reject(error, requeue=True) from error
                if not isinstance(error, (OperationalError, SoftTimeLimitExceeded)):
                    raise
                level = logging.DEBUG if number else logging.WARNING
                logger.log(level, "task %s waits until the broker accepts a copy of its message: %s", again.id, error)
            else:
                return
            with suppress(SoftTimeLimitExceeded):
                time.sleep(_RESEND)


@cache
def _lease_requests(request_class: Any) -> Any:
    """Return the class of a worker's messages that has leases, and all that this one has."""
    if issubclass(request_class, LeasedRequest):
        return request_class
    return type("Request", (LeasedRequest, request_class), {})


def _sending_options(request: Any) -> dict[str, Any]:
    """Return the options of the message that Celery does not repeat: its serializer, compression and delivery mode."""
    properties = request.properties or {}
    options = {
        "serializer": registry.type_to_name.get(properties.get("content_type")),
        "compression": request.get("compression"),
        "delivery_mode": properties.get("delivery_mode"),
    }
    return {name: value for name, value in options.items() if value is not None}


def _rejection(request: Any) -> str:
    """Return how the error of a run begins that ended by `Reject`: a message of this number is rejected again."""
    return f"the task rejected its message (attempt {attempt_number(request)}):"


def _acks_failure(task: Any) -> bool:
    """Return whether Celery acknowledges the message of a task that has failed, so that it has ended."""
    return bool(getattr(task, "acks_on_failure", task.acks_on_failure_or_timeout))  # Celery 5.7 has an option for each


def _is_end(task: Any, error: BaseException) -> bool:
    """Return whether a task that raises this has ended: its message does not come again, and nothing goes on for it."""
    if isinstance(error, Reject):  # a broker that is away does not take the rejection either
        return not (error.requeue or hasattr(error, _UNSENT))
    if isinstance(error, Ignore):  # the task dismisses its message; `replace` raises it too
        return not hasattr(task.request, _HAS_SUCCESSOR)
    return isinstance(error, Exception) and not isinstance(error, (Retry, LeaseLost)) and _acks_failure(task)


def _is_handled(task: Any, error: BaseException) -> bool:
    """Return whether the task's `on_failure` has raised this: Celery calls it once the failure is stored."""
    handler = getattr(task.on_failure, "__code__", None)
    return any(frame.f_code is handler for frame, _ in walk_tb(error.__traceback__))


class _Run:
    """The run of a request under its lease."""

    def __init__(self, held: Lease, outer: BaseException | None) -> None:
        self.held = held
        self.lease = TaskLease(held)
        self.outer = outer  # the exception that was handled when the task began
        if children.notes is not None:
            children.notes.write(held)

    def leave(self, error: BaseException | None) -> None:
        """Leave the lease. Its note is cleared after that: until then another process must be able to end it."""
        try:
            self.held.__exit__(None if error is None else type(error), error, None)
        finally:
            if children.notes is not None:
                children.notes.clear()


def _leave_lease(request: Any, error: BaseException | None) -> None:
    """Leave the lease of a run that ended with `error`, which a soft time limit does not replace: a retry is sent."""
    run: _Run = vars(request).pop(_RUN)
    with suppress(SoftTimeLimitExceeded):  # while the answer is waited for
        run.leave(error)


def _settle(task: Any, state: str | None, retval: Any, **_: Any) -> None:
    """Settle a run after Celery has stored its result and sent its callbacks and its chain."""
    request = task.request
    if not hasattr(request, _RUN):
        is_leased = isinstance(task, LeasedTask) and not request.is_eager and takes_lease(task, request.delivery_info)
        if is_leased and state == states.SUCCESS and not hasattr(request, _ASKED):
            why = "the __call__ of its class must call super().__call__, not self.run"
            logger.warning("task %s (%s) ran without a lease: %s", request.id, task.name, why)
        return
    run: _Run = getattr(request, _RUN)
    broken_off_by = sys.exception()
    if children.is_for_main(broken_off_by):
        return
    error: BaseException | None = None
    if broken_off_by is not None and broken_off_by is not run.outer:
        # Celery acknowledges a failure also if a handler of it raises (`on_failure`).
        has_failed = _is_handled(task, broken_off_by) and not hasattr(request, _HAS_SUCCESSOR)
        is_end = has_failed and not isinstance(broken_off_by, MemoryError) and _is_end(task, broken_off_by)
        # Otherwise its result is not stored, or its callbacks are not sent: the task runs again if redelivered.
        error = Fatal(repr(broken_off_by)) if is_end else broken_off_by
    elif hasattr(request, _HAS_SUCCESSOR):  # `retry(throw=False)`: the task goes on, whatever this run returned
        task._note_end(request)
        error = Retry()
    elif state == states.REJECTED:
        error = Fatal(f"{_rejection(request)} {retval!r}")
    elif state not in (states.SUCCESS, states.IGNORED):
        error = Fatal(repr(retval)) if _acks_failure(task) else Retry(exc=retval)
    if children.notes is not None and (error is None or isinstance(error, Fatal)):
        children.notes.note_end()
    try:
        _leave_lease(request, error)
    except LeaseLost as lost:
        logger.warning("task %s may run again, though it has ended: %s", request.id, lost)


def _client(url: str, ttl: float, **options: Any) -> Client:
    # Shorter patience than a client's own: a message whose lease cannot be obtained is put off, and its slot is free.
    return Client(url, heartbeats=leasekit.Heartbeats().for_ttl(ttl), retry_for=_PATIENCE, **options)


def _prepare_worker(sender: Any, **_: Any) -> None:
    """Check the process of a worker that starts, and prepare the leases of its pool processes."""
    task_class = sender.app.Task
    if not issubclass(task_class, LeasedTask):
        return
    signals.task_postrun.disconnect(_settle)  # the last one again: handlers of the app's modules are before it
    signals.task_postrun.connect(_settle)
    leases, pool = task_class.leases, cast("type", get_implementation(sender.pool_cls))
    try:
        leases.check_process()
    except ConfigError as error:
        raise SystemExit(f"leasekit: {error}") from error  # Celery logs any other exception and goes on
    if (leases.url or "").startswith("memory:") and issubclass(pool, TaskPool):
        raise SystemExit(
            "leasekit: each process of a prefork pool has leases of its own with memory://, and tasks would overlap: "
            "use redis://, http:// or sqlite://, or -P threads"
        )
    if leases.url is not None and issubclass(pool, TaskPool):
        notes = children.share_notes()
        options = {"watchdog": "auto", "last_resort": end_process} if task_class.kills_lost else {}
        task_class.leases = _client(leases.url, leases.heartbeats.ttl, hooks=[notes.hear], **options)


def _look_at_service(instance: Any, **_: Any) -> None:
    """Log where the leases are. A worker also starts while their service is away, but not if that refuses it."""
    if not issubclass(instance.app.Task, LeasedTask):
        return
    without = _name_tasks_without_leases(instance.app)
    leases = instance.app.Task.leases
    _compare_retention(instance.app, leases)
    where = f"{leases!r}, ttl {leases.heartbeats.ttl:g} s"
    try:
        # A client of its own: it leaves no thread in a process that will fork.
        with leasekit.connect(leases.url, retry_for=1) as client:
            client.get("leasekit")  # any id does
    except (Refused, Untrusted) as error:
        raise SystemExit(f"leasekit: {error}") from error
    except LeasekitError as error:
        instance.app.Task.outage.begins(before_tasks=True)
        logger.warning("no task runs before the service of the leases answers (%s): %s", where, error)
    else:
        but = f", but not {', '.join(without)}" if without else ""
        logger.info("tasks run under leases (%s)%s", where, but)


def _visibility_timeout(app: Celery) -> float:
    return float((app.conf.broker_transport_options or {}).get("visibility_timeout", _VISIBILITY))


def _compare_retention(app: Celery, leases: Client) -> None:
    """Log that ended tasks may be forgotten before the last copies of their messages have come."""
    backend = open_backend(leases.url, worker=leases.worker) if leases.url else None  # it opens no connection
    retention, visibility = getattr(backend, "retention", math.inf), _visibility_timeout(app)
    if retention <= visibility:
        logger.warning(
            "an ended task is remembered for %g s, and the broker may deliver it again after %g s (visibility_timeout)"
            ": such a copy runs: choose retention=… in the URL of the leases longer than that, plus your longest ETA",
            retention,
            visibility,
        )


def _name_tasks_without_leases(app: Celery) -> list[str]:
    """Log, and return, the tasks that should have leases, and have none because of their class."""
    without: list[str] = []
    for name, task in sorted(app.tasks.items()):
        is_left_out = name.startswith("celery.") or not getattr(task, "leased", app.Task.leased)
        if not (is_left_out or isinstance(task, LeasedTask)):
            own, base = type(task).__mro__[:2]  # the decorator makes a class for each task
            logger.warning(
                "not under leases: %s (its class %s does not derive from leasekit_celery.LeasedTask)",
                name,
                (own if base is Task else base).__name__,
            )
            without.append(name)
    return without


def _note_content_type(request: Any, **_: Any) -> None:
    """Note how a received message is serialized: with most brokers, its properties do not say it to the task."""
    if isinstance(request.task, LeasedTask):
        properties = request.request_dict["properties"]
        request.request_dict["properties"] = {**properties, "content_type": request.message.content_type}


signals.task_received.connect(_note_content_type)
signals.task_postrun.connect(_settle)
signals.worker_init.connect(_prepare_worker)
signals.celeryd_after_setup.connect(_look_at_service)  # of the log; no process was forked yet
