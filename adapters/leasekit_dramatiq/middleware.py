"""The middleware: enter a lease before a message is processed, and leave it before the acknowledgement, in one thread.

A run that succeeded stays under its lease until the other middleware has finished its work: results are stored,
pipelines and groups go on. If the worker dies before that, the message runs again; if it dies after the settlement, the
message is acknowledged without running. A failed run releases its lease at once, because a retry may come at any
moment, and because Dramatiq decides whether one comes.
"""

import logging
import threading
import time
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from hashlib import sha256
from typing import Any, cast
from urllib.parse import quote
from weakref import WeakSet

from dramatiq import Actor, Broker, MessageProxy, Middleware
from dramatiq.middleware import Interrupt, MiddlewareError, SkipMessage

import leasekit
from leasekit import AlreadyDone, Cancelled, ConfigError, Lease, LeasekitError, LeaseLost, NotGranted
from leasekit.config import check_number
from leasekit.named import kind_of
from leasekit.task import Status
from leasekit_dramatiq.coroutines import waits_for_its_end

logger = logging.getLogger("leasekit.dramatiq")

_PATIENCE = 5.0  # seconds for which calls are repeated while the service of the leases is away
_BROKER_PATIENCE = 600.0  # seconds for which a message that must be put off is sent again while the broker is away
_BROKER_PAUSE = 5.0  # seconds between two tries; Dramatiq's own between two of an acknowledgement
_LONGEST = 100  # characters of an id that fit into the name of a lease
_RUNS = (Status.CLAIMED, Status.PROCESSING)  # of a lease that another run has

_current: ContextVar[Lease | None] = ContextVar("leasekit_dramatiq_lease", default=None)


def current_lease() -> Lease | None:
    """Return the lease of the message that this code processes; None in an actor that is called like a function.

    Use its `check`, `fence`, `progress` and `checkpoint`. The middleware decides how it ends.
    """
    return _current.get()


class _Here(threading.local):
    """The message that a thread processes."""

    lease: Lease | None = None
    has_succeeded = False


class Leases(Middleware):
    """Run every message of the broker under the lease of its id, at the service at `url`, which must keep names.

    `ttl`: seconds without a heartbeat after which a run counts as dead; a longer ttl survives a longer outage of the
    service (300: 139 s, 60: 24 s). `again_in`: seconds until a message whose first run is alive is tried again.

    Raises `UnknownScheme`, `MissingDependency`, `ConfigError`.
    """

    def __init__(self, url: str, *, ttl: float = 300.0, again_in: float = 15.0) -> None:
        check_number("again_in", again_in, least=0.001)
        # Shorter patience than a client's own: a message whose lease cannot be obtained is put off.
        rhythm = leasekit.Heartbeats().for_ttl(ttl)
        self._url = url
        self._connect = partial(leasekit.connect, url, heartbeats=rhythm, retry_for=_PATIENCE)
        self._client = self._connect()
        self._client.require_names()
        self._is_closed = False
        self._workers: set[Any] = set()  # workers that have booted and share the client
        # The last worker was shut down. False also for a worker that was started before it got this middleware.
        self._is_shut_down = False
        self._booting = threading.Lock()
        self._again_in = again_in
        self._here = _Here()
        # Those of all threads, also after a worker's end. Weak, so that a lease that an interrupt has left alone ends.
        self._held: WeakSet[Lease] = WeakSet()

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Enter the message's lease; if it is not granted, skip the message: it is acknowledged without running."""
        if message.failed:  # another middleware has already rejected the message
            return
        try:
            lease = leasekit.lease(self._client.once(_name(message.message_id)))
            lease.__enter__()
            self._here.lease, self._here.has_succeeded = lease, False
            self._held.add(lease)
            _current.set(lease)
        except AlreadyDone:
            logger.info("message %s was delivered again, and had ended well", message.message_id)
            _keep_result(message)
            raise SkipMessage(f"message {message.message_id} has been processed") from None
        except NotGranted as refused:
            if refused.ended is not None:
                logger.warning("message %s is rejected, and never runs: %s", message.message_id, refused)
                message.fail()  # makes it a dead letter, and tells callers that wait for its result
                raise SkipMessage(str(refused)) from None
            logger.info("message %s was delivered again while it runs", message.message_id)
            self._put_off(broker, message)
            raise SkipMessage(f"message {message.message_id} is being processed") from None
        except (Exception, Interrupt) as error:  # a time limit or a shutdown is no failure of what has not begun
            # Put off here, because Dramatiq runs a message even if its middleware fails: without a lease.
            why = str(error) or type(error).__name__
            logger.warning("message %s is put off: its lease cannot be obtained: %s", message.message_id, why)
            self._leave_lease(message, release=True)  # it was obtained, if the interrupt came late
            self._put_off(broker, message)
            raise SkipMessage(f"the lease of message {message.message_id} cannot be obtained") from error

    def _put_off(self, broker: Broker, message: MessageProxy) -> bool:
        """Send a copy of a message for later, because this one is acknowledged; if that fails, it is a dead letter.

        While the broker is away this is repeated, as Dramatiq repeats an acknowledgement. More copies do no harm.
        """
        until = time.monotonic() + _BROKER_PATIENCE
        while (error := self._send_later(broker, message)) is not None:
            if time.monotonic() >= until:
                logger.error("message %s cannot be put off, and is rejected: %s", message.message_id, error)
                message.fail()  # otherwise Dramatiq would run the message
                return False
            if not isinstance(error, Interrupt):
                logger.warning("message %s cannot be put off, and is tried again: %s", message.message_id, error)
                with suppress(Interrupt):
                    time.sleep(_BROKER_PAUSE)
        _keep_result(message)
        return True

    def _send_later(self, broker: Broker, message: MessageProxy) -> BaseException | None:
        """Send a copy of a message for later; return the error if that failed."""
        try:
            cast("Any", broker).enqueue(message.copy(), delay=round(1000 * self._again_in))  # its types are incomplete
        except (Exception, Interrupt) as error:  # noqa: BLE001 - the caller decides; the copy may have left
            return error
        return None

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        """Release the lease of a failed run, also if it raised `Fatal`: Dramatiq decides whether it runs again."""
        if exception is not None or message.failed:  # failed alone: another middleware has rejected the message
            self._leave_lease(message, exception, release=not isinstance(exception, Cancelled))
        else:
            self._here.has_succeeded = True

    def before_ack(self, broker: Broker, message: MessageProxy) -> None:
        """Leave the lease of a run that succeeded, after all other middleware has finished its work on it.

        A run of which `after_process_message` has not heard was interrupted while Dramatiq dealt with its failure: its
        lease is released, so that another delivery runs.
        """
        self._leave_lease(message, release=not self._here.has_succeeded)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        """Release the lease of a message that another middleware has skipped, because it has not run.

        A message that another middleware rejects, for its age, say, while a run has its lease, or may have it, is put
        off.
        """
        is_rejected = self._here.lease is None and message.failed
        if is_rejected and self._may_run(message) and self._put_off(broker, message):
            message.failed = False
        self._leave_lease(message, release=True)

    def before_nack(self, broker: Broker, message: MessageProxy) -> None:
        """Release the lease of a message that is a dead letter, and keep the result of another run of it."""
        if self._here.lease is None and self._has_succeeded(message):
            _keep_result(message)
        self._leave_lease(message, release=True)

    def _may_run(self, message: MessageProxy) -> bool:
        try:
            return self._status(message) in _RUNS
        except (LeasekitError, Interrupt) as error:  # another run may be alive during an outage
            logger.warning("message %s is put off: the state of its lease is unknown: %s", message.message_id, error)
            return True

    def _has_succeeded(self, message: MessageProxy) -> bool:
        try:
            return self._status(message) is Status.SUCCESS
        except (LeasekitError, Interrupt) as error:
            logger.warning("message %s may have a result, which is replaced: %s", message.message_id, error)
            return False

    def _status(self, message: MessageProxy) -> Status | None:
        info = self._client.get(kind_of(_name(message.message_id), "once:"))
        return None if info is None else info.status

    def _leave_lease(
        self, message: MessageProxy, exception: BaseException | None = None, *, release: bool = False
    ) -> None:
        lease, self._here.lease = self._here.lease, None
        _current.set(None)
        if lease is None:
            return
        try:
            if release:
                lease.release()
            lease.__exit__(None if exception is None else type(exception), exception, None)
        except LeaseLost as lost:
            logger.warning("message %s may run again: %s", message.message_id, lost)
        except Interrupt as error:
            # Raised from here, it would keep the other middleware from retrying a message that is acknowledged then.
            why = str(error) or type(error).__name__
            logger.warning("the lease of message %s is left without an answer: %s", message.message_id, why)
        finally:
            self._held.discard(lease)
            if self._is_shut_down:  # the run has outlived the last worker
                self._close_if_unused()

    def after_declare_actor(self, broker: Broker, actor: Actor[Any, Any] | str) -> None:
        """Let no async actor return before its coroutine has ended: its lease would be released."""
        if isinstance(actor, str):  # older versions pass its name, if it was declared before
            actor = cast("Actor[Any, Any]", cast("Any", broker).get_actor(actor))
        actor.fn = waits_for_its_end(actor.fn)

    def before_worker_boot(self, broker: Broker, worker: Any) -> None:
        """Connect again if the workers before this one have all been shut down.

        Raises `MiddlewareError`, so that the worker does not start, if gevent has patched its process, or if the broker
        has this middleware twice for one service: no message would ever run, because each holds up the other's.
        """
        if sum(isinstance(other, Leases) and other._url == self._url for other in broker.middleware) > 1:
            raise MiddlewareError("this broker has Leases of one service twice, so no message could run: add it once")
        try:
            self._client.check_process()
        except ConfigError as error:
            raise MiddlewareError(str(error)) from error
        with self._booting:
            if self._is_closed:
                self._client, self._is_closed = self._connect(), False
            # Here, where no time limit strikes: CPython may raise it in the thread that this starts, which then hangs.
            self._client.__connection__()
            self._workers.add(worker)
            self._is_shut_down = False

    def after_worker_shutdown(self, broker: Broker, worker: Any) -> None:
        """Close the client with the last worker of this broker, or with a run that the worker did not wait for."""
        with self._booting:
            self._workers.discard(worker)
            self._is_shut_down = not self._workers
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        with self._booting:
            if not (self._workers or self._held or self._is_closed):
                self._is_closed = True
                self._client.close()


def _name(message_id: str) -> str:
    """Return the name of a message's lease: an id of more than a hundred plain characters is replaced by its digest.

    So is an id of another program's that is no text.
    """
    try:
        is_short = len(quote(message_id, safe="")) <= _LONGEST
    except (TypeError, UnicodeError):
        message_id, is_short = repr(message_id), False
    return f"dramatiq:{message_id if is_short else sha256(message_id.encode()).hexdigest()}"


def _keep_result(message: MessageProxy) -> None:
    """Stop Dramatiq from storing None as the result of a skipped message, whose other run stores a result itself."""
    message.options["store_results"] = False
