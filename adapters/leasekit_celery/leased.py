"""The base of all tasks of an app: what a worker calls runs under a lease, what is called directly does not."""

# pyright: basic, reportMissingTypeStubs=false
# Celery has no types.

import logging
from contextlib import ExitStack
from typing import Any

from celery import Celery, Task
from celery.exceptions import Ignore, Reject, Retry

import leasekit
from leasekit import AlreadyDone, Client, ConfigError, Fatal, LeasekitError, LeaseLost, NotGranted

__all__ = ["LeasedTask", "install"]

logger = logging.getLogger("leasekit.celery")

_VISIBILITY = 3600.0  # seconds: what Celery's Redis transport has where nothing is set
_LATEST = 60.0  # seconds until a message that was put off is looked at again, at most


def install(app: Celery, url: str, *, ttl: float = 60.0) -> None:
    """Have every task of this app run under a lease of the service at `url`: any that accepts work will do.

    Call it right after the app was made, before its tasks are declared. `ttl`: after how many seconds without a beat a
    run counts as dead. A task with a `base` of its own takes part where that derives from `LeasedTask`.

    Raises `ConfigError` where tasks exist already, `UnknownScheme`, `MissingDependency`.
    """
    if app.finalized:
        raise ConfigError(
            f"app {app.main!r} has its tasks already: call leasekit_celery.install() before they are made"
        )
    client = leasekit.connect(url, beats=leasekit.Beats().for_ttl(ttl))

    class Leased(LeasedTask):
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
        if request.called_directly or request.is_eager:
            return super().__call__(*args, **kwargs)
        failure: Exception | None = None
        try:
            with ExitStack() as block:
                self._enter(block, request)
                try:
                    return self.run(*args, **kwargs)
                except (Retry, Reject, Ignore, LeaseLost):
                    raise  # the message comes again, or its author says that it is done with: not ours to judge
                except Exception as error:
                    if not self.acks_on_failure_or_timeout:
                        raise
                    failure = error  # its message is acknowledged: to Celery it has ended
                    raise Fatal(repr(error)) from error
        except LeaseLost as lost:
            if not self.acks_late:  # it was acknowledged before it began, and does not come again
                raise
            logger.warning("task %s is delivered again: %s", request.id, lost)
            raise Reject(lost, requeue=True) from lost
        except Fatal:
            if failure is None:  # the body's own
                raise
        assert failure is not None  # noqa: S101 - what ended well has returned
        raise failure

    def _enter(self, block: ExitStack, request: Any) -> None:
        """Its lease; what has none to be had is not run, and not lost."""
        try:
            block.enter_context(leasekit.lease(self.leases.once(f"celery:{request.id}")))
        except AlreadyDone:
            logger.info("task %s was delivered again, and had ended: it is acknowledged without running", request.id)
            raise Ignore from None
        except NotGranted:
            logger.info("task %s was delivered again while it runs: it is put off", request.id)
            self._put_off(request)
            raise Ignore from None
        except LeasekitError as error:
            logger.warning("task %s is delivered again: its lease cannot be had: %s", request.id, error)
            if self.acks_late:
                raise Reject(error, requeue=True) from error
            self._put_off(request)  # its message was acknowledged before: there is nothing else that would come again
            raise Ignore from None

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
