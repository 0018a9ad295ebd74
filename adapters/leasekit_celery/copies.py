"""Copies of messages: a message that cannot run now is sent again for later, and then acknowledged."""

# pyright: basic, reportMissingTypeStubs=false
# Celery has no type annotations.

import itertools
import logging
import time
from contextlib import suppress
from typing import Any

from celery import Celery
from celery.exceptions import OperationalError, Reject, SoftTimeLimitExceeded
from kombu.serialization import registry

from leasekit_celery.children import PUT_OFF, REVOKED

logger = logging.getLogger("leasekit.celery")

_VISIBILITY = 3600.0  # seconds: the default of Celery's Redis transport
_FIRST = 5.0  # seconds until a message that was put off is delivered again; doubled each time …
_LATEST = 60.0  # … up to this
_RESEND = 1.0  # seconds between attempts to send a copy while the broker is away
_SHOWN = ("argsrepr", "kwargsrepr")  # arguments as logs show them, if the sender has set them


def put_off(task: Any, request: Any, why: str, *, first: float = _FIRST, level: int = logging.INFO) -> None:
    """Send a copy of the message for later; this message is then acknowledged. Its first run may be alive.

    The delay grows with each copy. A message that is rejected instead is delivered again at once, and again and
    again. That happens only if the broker does not accept the copy.
    """
    before = int((request.headers or {}).get(PUT_OFF, 0))
    # If the ETA were later than the visibility timeout, the broker would deliver one more copy each time.
    most = min(_LATEST, visibility_timeout(task.app) / 2)
    delay = min(first * 2.0 ** min(before, 10), most)
    shown = {name: value for name in _SHOWN if (value := getattr(request, name, None)) is not None}
    sent = _sending_options(request)
    again: Any = task.signature_from_request(request, countdown=delay, retries=request.retries, **shown, **sent)
    headers = again.options["headers"] = {**(again.options.get("headers") or {}), PUT_OFF: before + 1}
    if (revoked := getattr(request, REVOKED, None)) is not None:
        headers[REVOKED] = revoked
        again.options.pop("expires", None)  # brokers do not accept a message that has expired
    # Otherwise Celery would send the copy as a child of this task, but its parent is the task that called it.
    task.push_request(called_directly=True)
    try:
        _send_copy(task, again)
    finally:
        task.pop_request()
    logger.log(logging.DEBUG if before else level, "task %s is put off for %g s: %s", request.id, delay, why)


def _send_copy(task: Any, again: Any) -> None:
    """Send a copy of a message. Raises `Reject` if the broker does not accept it, so that the message comes again.

    Without `acks_late` the message was acknowledged when its task began, and the copy is all that is left of the
    task. So an outage of the broker is waited out, beyond a soft time limit.
    """
    for number in itertools.count():
        try:
            _send(task, again)
        except Exception as error:
            if task.acks_late:
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


def _send(task: Any, again: Any) -> None:
    """Send a message of a task, and nothing else.

    `task.apply_async` may be of a class of the user's, which sends each task once, say, or adds arguments. Celery's own
    would run the task here and now under `task_always_eager`.
    """
    options = {"ignore_result": task.ignore_result, **task._get_exec_options(), **again.options}
    task.app.send_task(task.name, again.args, again.kwargs, task_type=task, **options)


def _sending_options(request: Any) -> dict[str, Any]:
    """Return the options of the message that Celery does not repeat: its serializer, compression and delivery mode."""
    properties = request.properties or {}
    options = {
        "serializer": registry.type_to_name.get(properties.get("content_type")),
        "compression": request.get("compression"),
        "delivery_mode": properties.get("delivery_mode"),
    }
    return {name: value for name, value in options.items() if value is not None}


def visibility_timeout(app: Celery) -> float:
    return float((app.conf.broker_transport_options or {}).get("visibility_timeout", _VISIBILITY))
