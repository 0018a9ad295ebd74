"""Arrival times of messages in a user's own receive loop, taken from events of its boto3 client.

If ten messages arrive at once, the lease of the last may have ended before its turn comes, and a standard queue answers
success to a call that extends it then. The arrival times of messages that a client received before it was first seen
here are unknown.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

__all__ = ["Arrivals"]

_MOST = 1_000  # messages that arrived and were not looked up yet


class Arrivals:
    """The arrival times at all clients that were passed to `at`. Any thread may call it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._clients: WeakSet[Any] = WeakSet()
        self._at: OrderedDict[str, float] = OrderedDict()

    def at(self, client: Any, handle: str) -> float:
        """Return when the message with this receipt handle arrived; the present time if that is unknown."""
        if client not in self._clients:
            self._clients.add(client)
            client.meta.events.register("after-call.sqs.ReceiveMessage", self._came)
        return self._at.pop(handle, self._clock())

    def _came(self, parsed: Mapping[str, Any], **_: Any) -> None:
        now = self._clock()
        for message in parsed.get("Messages", []):
            self._at[message.get("ReceiptHandle", "")] = now
        while len(self._at) > _MOST:
            self._at.popitem(last=False)
