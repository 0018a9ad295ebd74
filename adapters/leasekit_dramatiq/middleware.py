"""The middleware: a lease is entered before a message is processed, and left before its acknowledgement, in its thread.

A run that ended well stays held until the other middleware has done what follows from it: results are stored, pipelines
and groups go on. Who dies before that runs it again; who dies after it was settled has the message acknowledged without
running. One that failed gives its lease back at once: a retry may be there at any moment.
"""

import logging
import threading
from hashlib import sha256
from typing import Any, cast
from urllib.parse import quote

from dramatiq import Broker, MessageProxy, Middleware
from dramatiq.middleware import SkipMessage

import leasekit
from leasekit import AlreadyDone, Lease, LeaseLost, NotGranted

__all__ = ["Leases"]

logger = logging.getLogger("leasekit.dramatiq")

_LONGEST = 100  # characters of an id, as a name has them


class Leases(Middleware):
    """Every message of the broker runs under the lease of its id, kept by the service at `url`.

    `ttl`: after how many seconds without a beat a run counts as dead. `again_in`: in how many seconds a message whose
    first run is alive is looked at again.

    Raises `UnknownScheme`, `MissingDependency`, `ConfigError`.
    """

    def __init__(self, url: str, *, ttl: float = 60.0, again_in: float = 15.0) -> None:
        self._client = leasekit.connect(url, beats=leasekit.Beats().for_ttl(ttl))
        self._again_in = again_in
        self._here = threading.local()  # the lease of the message that this thread processes

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Enter its lease; where there is none to be had, skip the message: it is acknowledged without running."""
        if message.failed:  # another middleware will not have it run
            return
        lease = leasekit.lease(self._client.once(_name(message.message_id)))
        try:
            lease.__enter__()
        except AlreadyDone:
            logger.info("message %s was delivered again, and had ended well", message.message_id)
            _keep_result(message)
            raise SkipMessage(f"message {message.message_id} has been processed") from None
        except NotGranted as refused:
            if refused.ended is not None:
                logger.warning("message %s is rejected, and never runs: %s", message.message_id, refused)
                message.fail()  # a dead letter; who waits for its result is told
                raise SkipMessage(str(refused)) from None
            logger.info("message %s was delivered again while it runs", message.message_id)
            self._put_off(broker, message)
            raise SkipMessage(f"message {message.message_id} is being processed") from None
        except Exception as error:
            # Not run without a lease, and not lost: Dramatiq goes on with a message whose middleware fails.
            logger.warning("message %s is looked at again: its lease cannot be had: %s", message.message_id, error)
            self._put_off(broker, message)
            raise SkipMessage(f"the lease of message {message.message_id} cannot be had") from error
        self._here.lease = lease

    def _put_off(self, broker: Broker, message: MessageProxy) -> None:
        """A copy of it comes later; this one is about to be acknowledged. Where that fails, it is a dead letter."""
        try:
            cast("Any", broker).enqueue(message.copy(), delay=round(1000 * self._again_in))  # its types are incomplete
        except Exception as error:  # noqa: BLE001 - Dramatiq would go on, and run it
            logger.error("message %s cannot be put off, and is rejected: %s", message.message_id, error)
            message.fail()
        else:
            _keep_result(message)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        """Leave its lease where the run failed: that gives it back, and Dramatiq's own retries decide what follows."""
        if exception is None and message.failed:  # another middleware would not have it run
            self.after_skip_message(broker, message)
        elif exception is not None:
            self._leave(message, exception)

    def before_ack(self, broker: Broker, message: MessageProxy) -> None:
        """Leave its lease: all other middleware has done what follows from a run that ended well."""
        self._leave(message, None)

    def before_nack(self, broker: Broker, message: MessageProxy) -> None:
        """Give its lease back: another middleware has made a dead letter of it, though it had ended well."""
        self.after_skip_message(broker, message)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        """Give its lease back where another middleware has it skipped: it has not run."""
        if (lease := self._lease) is not None:
            lease.release()
        self._leave(message, None)

    @property
    def _lease(self) -> Lease | None:
        return getattr(self._here, "lease", None)

    def _leave(self, message: MessageProxy, exception: BaseException | None) -> None:
        lease, self._here.lease = self._lease, None
        if lease is None:
            return
        try:
            lease.__exit__(None if exception is None else type(exception), exception, None)
        except LeaseLost as lost:
            logger.warning("message %s may run again: %s", message.message_id, lost)

    def after_worker_shutdown(self, broker: Broker, worker: Any) -> None:
        """Let go of the service."""
        self._client.close()


def _name(message_id: str) -> str:
    """Of a lease: it has room for a hundred plain characters; what is longer stands there as its digest."""
    return f"dramatiq:{message_id if len(quote(message_id)) <= _LONGEST else sha256(message_id.encode()).hexdigest()}"


def _keep_result(message: MessageProxy) -> None:
    """Dramatiq stores None as the result of what is skipped; here another run has stored its own, or will."""
    message.options["store_results"] = False
