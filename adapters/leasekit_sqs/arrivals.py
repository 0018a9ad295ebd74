"""How the messages of a user's own receive loop were asked for, and when, taken from events of its boto3 client.

A message may be visible again before the `with` block of its lease begins: the last of ten that arrive at once, or one
whose answer was slow. A standard queue answers success to a call that extends it then. SQS does not say when it granted
a message, but it cannot have been before the receive was sent. A message whose receive was not observed came before its
client was first seen here, and so its time counts from that moment.

An observed receive asks for all attributes, whatever its caller asked for: without them a copy of the message for the
dead-letter queue would lack them, and its message group.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

_MOST = 1_000  # messages that arrived and were not looked up yet
_CHANGES = ("DeleteMessage", "DeleteMessageBatch", "ChangeMessageVisibility", "ChangeMessageVisibilityBatch")
_ATTRIBUTES = ("Attributes", "MessageAttributes")
_ASKED_AT, _TIMEOUT, _WAIT = "leasekit_asked_at", "leasekit_visibility_timeout", "leasekit_wait_time"


class Arrival(NamedTuple):
    """How a message was received."""

    asked_at: float  # if the receive was not observed: when its client was first seen
    timeout: int | None = None  # the `VisibilityTimeout` that the receive named
    wait: int = 0  # the `WaitTimeSeconds` that the receive named
    is_known: bool = False  # False: the receive was not observed
    parts: Mapping[str, Any] = MappingProxyType({})  # of the message: all its attributes; empty if not known


class Arrivals:
    """The receives of all clients that were passed to `watch` or `of`. Any thread may call it.

    `calling` is called with operation and receipt handle before one of these clients deletes, hides or shows a message.
    """

    def __init__(self, clock: Callable[[], float], calling: Callable[[str, str], object]) -> None:
        self._clock = clock
        self._calling = calling
        self._seen: WeakKeyDictionary[Any, float] = WeakKeyDictionary()  # client → since when it is observed
        self._arrivals: OrderedDict[str, Arrival] = OrderedDict()

    def watch(self, client: Any) -> float:
        """Observe a client of boto3 or aiobotocore from now on; return since when it is observed."""
        if client not in self._seen:
            self._seen[client] = self._clock()
            events = client.meta.events
            events.register("before-parameter-build.sqs.ReceiveMessage", self._note_and_widen)
            events.register("request-created.sqs.ReceiveMessage", self._note_request)
            events.register("after-call.sqs.ReceiveMessage", self._note_answer)
            for operation in _CHANGES:
                events.register(f"before-parameter-build.sqs.{operation}", self._note_call)
        return self._seen[client]

    def of(self, client: Any, handle: str) -> Arrival:
        """Return how the message with this receipt handle was received. Observe the client."""
        since = self.watch(client)
        return self._arrivals.pop(handle, None) or Arrival(since)

    def _note_and_widen(self, params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
        context[_TIMEOUT] = params.get("VisibilityTimeout")
        context[_WAIT] = params.get("WaitTimeSeconds", 0)
        params["MessageAttributeNames"] = ["All"]
        # The older name, unless the caller takes the newer one, which boto3 1.34.0 does not know.
        params[newer if (newer := "MessageSystemAttributeNames") in params else "AttributeNames"] = ["All"]

    def _note_request(self, request: Any, **_: Any) -> None:
        request.context[_ASKED_AT] = self._clock()  # of the latest try: botocore repeats a call that failed

    def _note_answer(self, parsed: Mapping[str, Any], context: Mapping[str, Any], **_: Any) -> None:
        if _ASKED_AT not in context:  # it left before its client was observed
            return
        timeout, wait = context.get(_TIMEOUT), context.get(_WAIT, 0)
        arrival = Arrival(context[_ASKED_AT], timeout, wait, is_known=_TIMEOUT in context)
        for message in parsed.get("Messages", []):
            # Copies, because the caller's message is the same object.
            parts = {name: dict(message[name]) for name in _ATTRIBUTES if name in message}
            self._arrivals[message.get("ReceiptHandle", "")] = arrival._replace(parts=parts)
        while len(self._arrivals) > _MOST:
            self._arrivals.popitem(last=False)

    def _note_call(self, params: Mapping[str, Any], model: Any, **_: Any) -> None:
        entries: Any = params.get("Entries")  # not validated yet
        parts: list[Any] = [params, *entries] if isinstance(entries, (list, tuple)) else [params]
        for part in parts:
            handle = cast("Mapping[str, Any]", part).get("ReceiptHandle") if isinstance(part, Mapping) else None
            if isinstance(handle, str):
                self._calling(str(model.name), handle)
