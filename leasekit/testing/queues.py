"""Queues in memory, `memory://` or `memory://name`, for tests: they can lose messages, repeat them, and fail."""

import asyncio
import itertools
from collections.abc import Sequence
from urllib.parse import urlsplit

from leasekit.errors import ConfigError, Unavailable
from leasekit.queues import PRIORITIES, Message, QueueName
from leasekit.task import Ticket

__all__ = ["MemoryQueues", "connect"]

_LOOK = 0.01  # seconds


class MemoryQueues:
    """Queues in this process. For any event loops, of one thread at a time for each method."""

    def __init__(self) -> None:
        self.failing: set[QueueName] = set()
        """The queues that take no messages: `send` raises `Unavailable`."""
        self.losing = False
        """Whether sent messages are lost."""
        self.deleted: list[Ticket] = []
        """What was deleted, in order."""
        self._visible: dict[QueueName, dict[int, Ticket]] = {}
        self._received: dict[int, Ticket] = {}
        self._numbers = itertools.count()

    @property
    def received(self) -> int:
        """How many messages were received, and neither deleted nor shown again."""
        return len(self._received)

    async def send(self, queue: QueueName, tickets: Sequence[Ticket]) -> list[Ticket]:
        if queue in self.failing:
            raise Unavailable("this queue fails, as the test wants it")
        if not self.losing:
            self._visible.setdefault(queue, {}).update((next(self._numbers), ticket) for ticket in tickets)
        return []

    async def depth(self, queue: QueueName) -> int:
        return len(self._visible.get(queue, {}))

    async def receive(self, kinds: Sequence[str], *, limit: int, wait: float) -> list[Message]:
        loop = asyncio.get_running_loop()
        until = loop.time() + wait
        while not (messages := self._take(kinds, limit)) and loop.time() < until:  # noqa: ASYNC110 - of any loop
            await asyncio.sleep(_LOOK)
        return messages

    async def delete(self, messages: Sequence[Message]) -> None:
        self.deleted += [message.ticket for message in messages]
        for message in messages:
            self._received.pop(message.receipt, None)

    async def show(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if (ticket := self._received.pop(message.receipt, None)) is not None:
                self._visible.setdefault(message.queue, {})[message.receipt] = ticket

    async def aclose(self) -> None:
        """Do nothing: there is no connection to close."""

    def _take(self, kinds: Sequence[str], limit: int) -> list[Message]:
        taken: list[Message] = []
        for name in (QueueName(kind, priority) for priority in PRIORITIES for kind in kinds):
            messages = self._visible.get(name, {})
            for number in list(messages)[: limit - len(taken)]:
                ticket = self._received[number] = messages.pop(number)
                taken.append(Message(name, ticket, number))
        return taken


def connect(url: str) -> MemoryQueues:
    """Open `memory://`, queues of this connection alone, or `memory://name`, which this process shares by name."""
    parts = urlsplit(url)
    if parts.path.strip("/") or parts.query:
        raise ConfigError("the URL of queues in memory is memory:// or memory://name: nothing may follow the name")
    return _shared.setdefault(parts.netloc, MemoryQueues()) if parts.netloc else MemoryQueues()


_shared: dict[str, MemoryQueues] = {}
