"""The base of all tasks of an app: what a worker calls runs under a lease, what is called directly does not.

    the message comes ── lease ── body ──┬── returns, fails for good ── Celery stores and sends what follows ── settled
                                         └── is to run again, gives itself back ── given back at once

Between its settlement and the acknowledgement of its message a worker may die: then the message comes once more, and is
acknowledged without running. Had it been settled before Celery stored its result, that would be lost.
"""

# pyright: basic, reportMissingTypeStubs=false
# Celery has no types.

import logging
import sys
from hashlib import sha256
from typing import Any
from urllib.parse import quote

from celery import Celery, Task, signals, states
from celery.exceptions import Ignore, Reject, Retry
from celery.utils.imports import symbol_by_name

import leasekit
from leasekit import AlreadyDone, Client, ConfigError, Fatal, Lease, LeasekitError, LeaseLost, NotGranted

__all__ = ["LeasedTask", "install"]

logger = logging.getLogger("leasekit.celery")

_VISIBILITY = 3600.0  # seconds: what Celery's Redis transport has where nothing is set
_LATEST = 60.0  # seconds until a message that was put off is looked at again, at most
_HANDED_ON = 5.0  # seconds: a retry may come before the run that sent it has given its lease back
_LONGEST = 100  # characters of an id, as a name has them
_RUN = "leasekit_run"  # of a request: its lease, and what was being handled when its body began
_NOT_OURS_TO_JUDGE = (Retry, Reject, Ignore, LeaseLost)  # it comes again, or its author says that it is done with


def install(app: Celery, url: str, *, ttl: float = 60.0) -> None:
    """Have every task of this app run under a lease of the service at `url`: any that accepts work will do.

    Call it right after the app was made, before its tasks are declared. `ttl`: after how many seconds without a beat a
    run counts as dead. The app's `task_cls` is kept. A task with a `base` of its own takes part where that derives from
    `LeasedTask`.

    Raises `ConfigError` where tasks exist already, `UnknownScheme`, `MissingDependency`.
    """
    if app.finalized:
        raise ConfigError(
            f"app {app.main!r} has its tasks already: call leasekit_celery.install() before they are made"
        )
    client = leasekit.connect(url, beats=leasekit.Beats().for_ttl(ttl))
    theirs: Any = symbol_by_name(app.task_cls)
    bases: tuple[Any, ...] = (theirs,) if issubclass(theirs, LeasedTask) else (LeasedTask, theirs)

    class Leased(*bases):  # type: ignore[misc]  # they are values
        abstract = True
        leases = client

    app.task_cls = Leased
    vars(app).pop("Task", None)  # made before, of the former class


class LeasedTask(Task):  # type: ignore[misc]  # celery has no types
    """A Celery task that runs under the lease of its id."""

    abstract = True
    leases: Client

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it: under its lease where a worker does, and as it is where somebody calls it like a function."""
        request = self.request
        if request.called_directly or request.is_eager or hasattr(request, _RUN):
            return super().__call__(*args, **kwargs)
        held = self._entered(request)
        setattr(request, _RUN, (held, sys.exception()))
        try:
            return self._run_held(held, request, args, kwargs)
        except LeaseLost as lost:
            if not self.acks_late:  # it was acknowledged before it began, and does not come again
                raise
            logger.warning("task %s is delivered again: %s", request.id, lost)
            raise Reject(lost, requeue=True) from lost

    def _run_held(self, held: Lease, request: Any, args: Any, kwargs: Any) -> Any:
        """The body. What has ended for Celery stays held until Celery has done with it (`_settle`)."""
        theirs = super().__call__  # that of another base; Celery's own would hide the request
        body = self.run if getattr(theirs, "__func__", None) is Task.__call__ else theirs
        try:
            result = body(*args, **kwargs)
        except BaseException as error:
            has_ended = isinstance(error, Exception) and not isinstance(error, _NOT_OURS_TO_JUDGE)
            if held.lost or not (has_ended and self.acks_on_failure_or_timeout):
                _leave(request, error)
            raise
        if held.lost:  # whether its result still counts has to be known before Celery stores it
            _leave(request, None)
        return result

    def _entered(self, request: Any) -> Lease:
        """Its lease; what has none to be had is not run, and not lost."""
        follows = request.retries or request.replaced_task_nesting
        once = self.leases.once(_name(request.id), wait=_HANDED_ON if follows else 0)
        try:
            return leasekit.lease(once).__enter__()
        except AlreadyDone:
            logger.info("task %s was delivered again, and had ended: it is acknowledged without running", request.id)
            raise Ignore from None
        except NotGranted as refused:
            if refused.ended is not None:
                self._revoke(request, refused)
            else:
                logger.info("task %s was delivered again while it runs: it is put off", request.id)
                self._put_off(request)
            raise Ignore from None
        except LeasekitError as error:
            logger.warning("task %s is delivered again: its lease cannot be had: %s", request.id, error)
            if self.acks_late:
                raise Reject(error, requeue=True) from error
            self._put_off(request)  # its message was acknowledged before: there is nothing else that would come again
            raise Ignore from None

    def _revoke(self, request: Any, refused: NotGranted) -> None:
        """Somebody has cancelled it at the service of the leases: to Celery it is revoked, and never runs."""
        logger.warning("task %s is revoked, and acknowledged without running: %s", request.id, refused)
        is_stored = not self.ignore_result or self.store_errors_even_if_ignored
        try:
            self.backend.mark_as_revoked(request.id, str(refused), request=request, store_result=is_stored)
        except Exception as error:  # noqa: BLE001 - whatever its result backend raises
            logger.warning("task %s is revoked later: its result cannot be stored: %s", request.id, error)
            self._put_off(request)
        else:
            signals.task_revoked.send(sender=self, request=request, terminated=False, signum=None, expired=False)

    def _put_off(self, request: Any) -> None:
        """A copy of the message comes later, and this one is acknowledged: its first run is alive, or died just now.

        To leave it unacknowledged would have the broker deliver it at once, and again, and again. That happens only
        where the broker does not take the copy.
        """
        options: dict[str, Any] = self.app.conf.broker_transport_options or {}
        # Of an ETA that is later than the visibility time-out the broker would deliver one more copy, each time.
        delay = min(_LATEST, float(options.get("visibility_timeout", _VISIBILITY)) / 2)
        again: Any = self.signature_from_request(request, countdown=delay, retries=request.retries)
        try:
            again.apply_async()
        except Exception as error:
            if not self.acks_late:
                raise
            logger.warning("task %s is delivered again: the broker does not take it for later: %s", request.id, error)
            raise Reject(error, requeue=True) from error
        logger.info("task %s is looked at again in %g s", request.id, delay)


def _name(task_id: str) -> str:
    """Of a lease: it has room for a hundred plain characters; what is longer stands there as its digest."""
    return f"celery:{task_id if len(quote(task_id)) <= _LONGEST else sha256(task_id.encode()).hexdigest()}"


def _leave(request: Any, error: BaseException | None) -> None:
    held, _ = vars(request).pop(_RUN)
    held.__exit__(None if error is None else type(error), error, None)


def _settle(task: Any, state: str | None, retval: Any, **_: Any) -> None:
    """Celery has done all that follows from a run: its result is stored, its callbacks and its chain are sent."""
    request = task.request
    if not hasattr(request, _RUN):
        return
    _, outer = getattr(request, _RUN)
    broken_off_by = sys.exception()
    error: BaseException | None = None
    if broken_off_by is not outer:  # and what follows from it may not have been done: it runs again if it comes again
        error = broken_off_by
    elif state != states.SUCCESS:
        error = Fatal(repr(retval)) if task.acks_on_failure_or_timeout else Retry(exc=retval)
    try:
        _leave(request, error)
    except LeaseLost as lost:
        logger.warning("task %s may run again, though it has ended: %s", request.id, lost)


signals.task_postrun.connect(_settle)
