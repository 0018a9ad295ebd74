"""Calls of SQS in threads, and the meaning of their errors.

`leasekit_aws.errors` maps the errors; errors that are special to SQS are mapped here. No text that leaves this module
contains a receipt handle: SQS repeats handles in its messages, and a handle is enough to delete the message.
"""

import asyncio
import math
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

from botocore.exceptions import ClientError

from leasekit.errors import BackendError, Refused, Throttled
from leasekit_aws.boto_clients import BotoClients, Call
from leasekit_aws.daemon_threads import CallThreads
from leasekit_aws.errors import Answered, Forbidden, Unreached, meaning

Answer = dict[str, Any]

_HANDLE = re.compile(r"[\w+/=-]{100,}", re.ASCII)
_NO_QUEUE = frozenset({"AWS.SimpleQueueService.NonExistentQueue", "NonExistentQueue", "QueueDoesNotExist"})
_OVER = {
    "AWS.SimpleQueueService.MessageNotInflight": "expired",
    "InvalidIdFormat": "unknown",
    "MessageNotInflight": "expired",
    "ReceiptHandleIsInvalid": "unknown",
}
_NO_HANDLE = re.compile(r"parameter ReceiptHandle is invalid|Message does not exist|not available for visibility")


class Gone(Refused):
    """The lease of the message has ended: `reason` is that of a verdict."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Calls:
    """The calls of one connection, for use in one event loop."""

    def __init__(self, clients: BotoClients, clock: Callable[[], float]) -> None:
        self._clients = clients
        self._clock = clock
        self._threads = CallThreads()

    def start(
        self,
        operation: str,
        *,
        is_poll: bool = False,
        missed: Callable[[Answer], object] | None = None,
        leaves_by: float = math.inf,
        **params: Any,
    ) -> "asyncio.Future[Answer]":
        """Start a call; the future ends when its thread does. A request that has not left at `leaves_by` never does.

        The future raises `BackendError`. A caller that may be cancelled while it waits shields the future, or passes
        `missed`, which is called in the thread with an answer that comes after the cancellation.
        """
        call = Call(operation, params, partial(self._refuse_from, leaves_by))
        future = asyncio.wrap_future(self._threads.start(lambda: self._send(call, is_poll=is_poll), missed=missed))
        future.add_done_callback(_retrieve_error)
        return future

    async def __call__(self, operation: str, **params: Any) -> Answer:
        return await asyncio.shield(self.start(operation, **params))

    def now(self, operation: str, *, leaves_by: float, **params: Any) -> Answer:
        """Make a call in the calling thread, which blocks; `leaves_by` as in `start`. Raises `BackendError`."""
        return self._send(Call(operation, params, partial(self._refuse_from, leaves_by)), is_poll=False)

    def _refuse_from(self, leaves_by: float) -> None:
        if self._clock() >= leaves_by:
            raise Unreached("this call could not leave in time: another worker may have the message")

    def close(self) -> None:
        self._clients.close()

    def _send(self, call: Call, *, is_poll: bool) -> Answer:
        try:
            return self._clients.send(call, is_poll=is_poll)
        except BackendError as error:
            raise _meaning_for_sqs(error) from error


@asynccontextmanager
async def refusing() -> AsyncGenerator[None]:
    """Raise `Forbidden` as `Refused`, so that calls without a lease at stake are not repeated."""
    try:
        yield
    except Forbidden as error:
        raise error.refusing() from error


def of_entry(failure: Mapping[str, Any], operation: str) -> BackendError:
    """Return the error of an entry of a batch, as a call for that entry alone would have raised it."""
    code, says = str(failure.get("Code", "")), str(failure.get("Message", ""))
    response: Any = {
        "Error": {"Code": code, "Message": _cut(says)},
        # As AWS would have answered a call for this entry alone; the id marks it as an answer of AWS.
        "ResponseMetadata": {"HTTPStatusCode": 400 if failure.get("SenderFault") else 500, "RequestId": "entry"},
    }
    error = meaning(ClientError(response, operation.title().replace("_", "")))
    if code in _OVER or _NO_HANDLE.search(says):
        reason = "expired" if "has expired" in says else _OVER.get(code, "unknown")
        return Gone(str(error), reason=reason)
    return _meaning_for_sqs(error)


def mappings(answer: Answer, name: str) -> list[Mapping[str, Any]]:
    value: object = answer.get(name)
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [cast("Mapping[str, Any]", item) for item in items if isinstance(item, Mapping)]


def is_no_queue(error: BackendError) -> bool:
    return isinstance(error, Answered) and error.code in _NO_QUEUE


def is_unapplied(error: BackendError) -> bool:
    return isinstance(error, (Forbidden, Refused, Throttled, Unreached))


def _meaning_for_sqs(error: BackendError) -> BackendError:
    """Return the error with what its code means for SQS, without receipt handles."""
    says = _cut(str(error))
    code = error.code if isinstance(error, Answered) else ""
    if code in _NO_QUEUE:
        return Answered(f"the queue does not exist in this region and account: {says}", code=code)
    if code in ("OverLimit", "AWS.SimpleQueueService.OverLimit"):
        return Throttled(f"too many messages of this queue are in flight: {says}")
    if _http_status(error) == 503 or "hrottl" in code:
        return Throttled(says)
    if code.startswith(("Kms", "KMS.")) and "AccessDenied" in code:
        return Forbidden(f"the key of this queue may not be used: {says}")
    error.args = (says,)
    return error


def _http_status(error: BackendError) -> object:
    cause = error.__cause__
    response: Any = cause.response if isinstance(cause, ClientError) else {}
    return response.get("ResponseMetadata", {}).get("HTTPStatusCode")


def _cut(text: str) -> str:
    return _HANDLE.sub(lambda found: found[0][:6] + "…", text)


def _retrieve_error(future: "asyncio.Future[Answer]") -> None:
    """Retrieve the error of a call that no caller waits for, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()
