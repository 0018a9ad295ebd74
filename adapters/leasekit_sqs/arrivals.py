"""When messages came to a loop of the user's own, which does not say it: its client of boto3's is listened to.

Of ten messages that came at once the last may have run out before its turn comes, and a standard queue says *done* to
who extends it then. Of what a client has received before it was first seen here nothing is known.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

__all__ = ["Arrivals"]

_MOST = 1_000  # messages that came and were not taken yet


class Arrivals:
    """The arrivals at all clients that were shown here. Any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._clients: WeakSet[Any] = WeakSet()
        self._at: OrderedDict[str, float] = OrderedDict()

    def at(self, client: Any, handle: str) -> float:
        """When the message with this receipt handle came; now, where that is not known."""
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
