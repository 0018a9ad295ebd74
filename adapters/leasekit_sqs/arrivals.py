"""How the messages of a user's own receive loop were asked for, and when, taken from events of its boto3 client.

A message may be visible again before the `with` block of its lease begins: the last of ten that arrive at once, or one
whose answer was slow. A standard queue answers success to a call that extends it then. SQS does not say when it granted
a message, but it cannot have been before the receive was sent. Of messages that a client received before it was first
seen here, nothing is known.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakSet

_MOST = 1_000  # messages that arrived and were not looked up yet
_ASKED_AT, _TIMEOUT, _WAIT = "leasekit_asked_at", "leasekit_visibility_timeout", "leasekit_wait_time"


class Arrival(NamedTuple):
    """How a message was received."""

    asked_at: float
    timeout: int | None = None  # the `VisibilityTimeout` that the receive named
    wait: int = 0  # the `WaitTimeSeconds` that the receive named
    is_known: bool = False  # False: the receive was not observed


class Arrivals:
    """The receives of all clients that were passed to `of`. Any thread may call it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._clients: WeakSet[Any] = WeakSet()
        self._arrivals: OrderedDict[str, Arrival] = OrderedDict()

    def of(self, client: Any, handle: str) -> Arrival:
        """Return how the message with this receipt handle was received; if unknown, as of now. Observe the client."""
        if client not in self._clients:
            self._clients.add(client)
            client.meta.events.register("before-parameter-build.sqs.ReceiveMessage", self._note_times)
            client.meta.events.register("request-created.sqs.ReceiveMessage", self._note_request)
            client.meta.events.register("after-call.sqs.ReceiveMessage", self._note_answer)
        return self._arrivals.pop(handle, None) or Arrival(self._clock())

    def _note_times(self, params: Mapping[str, Any], context: dict[str, Any], **_: Any) -> None:
        context[_TIMEOUT] = params.get("VisibilityTimeout")
        context[_WAIT] = params.get("WaitTimeSeconds", 0)

    def _note_request(self, request: Any, **_: Any) -> None:
        request.context[_ASKED_AT] = self._clock()  # of the latest try: botocore repeats a call that failed

    def _note_answer(self, parsed: Mapping[str, Any], context: Mapping[str, Any], **_: Any) -> None:
        asked_at = context.get(_ASKED_AT, self._clock())
        arrival = Arrival(asked_at, context.get(_TIMEOUT), context.get(_WAIT, 0), is_known=_TIMEOUT in context)
        for message in parsed.get("Messages", []):
            self._arrivals[message.get("ReceiptHandle", "")] = arrival
        while len(self._arrivals) > _MOST:
            self._arrivals.popitem(last=False)
