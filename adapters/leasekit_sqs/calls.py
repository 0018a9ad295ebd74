"""Calls of SQS, in threads, and what their errors mean here.

Errors come as `leasekit_aws.errors` has them; what SQS says in its own way is told apart here. No text that leaves this
file holds a receipt handle: SQS repeats them in its messages, and who has one can delete the message.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

from botocore.exceptions import ClientError

from leasekit.errors import BackendError, Refused, Throttled
from leasekit_aws.clients import Call, Clients
from leasekit_aws.errors import Answered, Forbidden, Unreached, meaning
from leasekit_aws.threads import in_thread

__all__ = ["Answer", "Calls", "Gone", "is_certain", "mappings", "of_entry", "refusing"]

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
    """The message is not ours any more: `reason` is the one of a verdict."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Calls:
    """The calls of one connection; to be used in one event loop."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    def start(
        self, operation: str, *, is_poll: bool = False, missed: Callable[[Answer], object] | None = None, **params: Any
    ) -> "asyncio.Future[Answer]":
        """One call, under way: the future ends when its thread does.

        Raises `BackendError`. Whoever may be cancelled while waiting shields it, or says in `missed` what to do with an
        answer that comes after that: it is called in the thread.
        """
        call = Call(operation, params)
        future = asyncio.wrap_future(in_thread(lambda: self._send(call, is_poll=is_poll), missed=missed))
        future.add_done_callback(_heard)
        return future

    async def __call__(self, operation: str, **params: Any) -> Answer:
        """What SQS answers. Raises `BackendError`."""
        return await asyncio.shield(self.start(operation, **params))

    def now(self, operation: str, **params: Any) -> Answer:
        """The same for who is in a thread already: it blocks."""
        return self._send(Call(operation, params), is_poll=False)

    def close(self) -> None:
        self._clients.close()

    def _send(self, call: Call, *, is_poll: bool) -> Answer:
        try:
            return self._clients.send(call, is_poll=is_poll)
        except BackendError as error:
            raise _in_our_words(error) from error


@asynccontextmanager
async def refusing() -> AsyncGenerator[None]:
    """Where nothing is at stake, credentials that AWS does not accept are no reason to try again."""
    try:
        yield
    except Forbidden as error:
        raise error.refusing() from error


def of_entry(failure: Mapping[str, Any]) -> BackendError:
    """What became of one entry of a batch that failed, in the words for a call of its own."""
    code, says = str(failure.get("Code", "")), str(failure.get("Message", ""))
    response: Any = {
        "Error": {"Code": code, "Message": _cut(says)},
        # As a call of its own would have been answered; the id marks it as an answer of AWS.
        "ResponseMetadata": {"HTTPStatusCode": 400 if failure.get("SenderFault") else 500, "RequestId": "entry"},
    }
    error = meaning(ClientError(response, "batch"))
    if code in _OVER or _NO_HANDLE.search(says):
        reason = "expired" if "has expired" in says else _OVER.get(code, "unknown")
        return Gone(str(error), reason=reason)
    return _in_our_words(error)


def mappings(answer: Answer, name: str) -> list[Mapping[str, Any]]:
    """What an answer lists under this name; what is none of it is left out."""
    found: object = answer.get(name)
    listed = cast("list[object]", found) if isinstance(found, list) else []
    return [cast("Mapping[str, Any]", one) for one in listed if isinstance(one, Mapping)]


def is_certain(error: BackendError) -> bool:
    """True where the request was certainly not applied."""
    return isinstance(error, (Forbidden, Refused, Throttled, Unreached))


def _in_our_words(error: BackendError) -> BackendError:
    says = _cut(str(error))
    code = error.code if isinstance(error, Answered) else ""
    if code in _NO_QUEUE:
        return Answered(f"there is no such queue in this region and account: {says}", code=code)
    if code in ("OverLimit", "AWS.SimpleQueueService.OverLimit"):
        return Throttled(f"too many messages of this queue are in flight: {says}")
    if _status(error) == 503 or "hrottl" in code:
        return Throttled(says)
    if code.startswith(("Kms", "KMS.")) and "AccessDenied" in code:
        return Forbidden(f"the key of this queue may not be used: {says}")
    error.args = (says,)
    return error


def _status(error: BackendError) -> object:
    cause = error.__cause__
    response: Any = cause.response if isinstance(cause, ClientError) else {}
    return response.get("ResponseMetadata", {}).get("HTTPStatusCode")


def _cut(text: str) -> str:
    """The text without whole receipt handles: of each its first six characters."""
    return _HANDLE.sub(lambda found: found[0][:6] + "…", text)


def _heard(future: "asyncio.Future[Answer]") -> None:
    """An error that nobody waits for any more is nobody's."""
    if not future.cancelled():
        future.exception()
