"""When the messages of a user's own receive loop were asked for, taken from events of its boto3 client.

A message may be visible again before the `with` block of its lease begins: the last of ten that arrive at once, or one
whose answer was slow. A standard queue answers success to a call that extends it then. SQS does not say when it granted
a message, but it cannot have been before the receive was sent. Of messages that a client received before it was first
seen here, that is unknown.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

_MOST = 1_000  # messages that arrived and were not looked up yet


_ASKED_AT = "leasekit_asked_at"


class Arrivals:
    """The receives of all clients that were passed to `asked_at`. Any thread may call it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._clients: WeakSet[Any] = WeakSet()
        self._asked_at: OrderedDict[str, float] = OrderedDict()

    def asked_at(self, client: Any, handle: str) -> float:
        """Return when the message with this receipt handle was asked for; now if unknown. Observe the client."""
        if client not in self._clients:
            self._clients.add(client)
            client.meta.events.register("request-created.sqs.ReceiveMessage", self._note_request)
            client.meta.events.register("after-call.sqs.ReceiveMessage", self._note_answer)
        return self._asked_at.pop(handle, self._clock())

    def _note_request(self, request: Any, **_: Any) -> None:
        request.context[_ASKED_AT] = self._clock()  # of the latest try: botocore repeats a call that failed

    def _note_answer(self, parsed: Mapping[str, Any], context: Mapping[str, Any], **_: Any) -> None:
        asked_at = context.get(_ASKED_AT, self._clock())
        for message in parsed.get("Messages", []):
            self._asked_at[message.get("ReceiptHandle", "")] = asked_at
        while len(self._asked_at) > _MOST:
            self._asked_at.popitem(last=False)
