"""The seam between the server's consumer, its workers, and a system of queues: one queue for each kind and priority.

A queue is a buffer and decides nothing. It may lose, repeat, reorder and delay messages: the store knows which task is
due, and each message only leads to a claim. So an implementation needs no transactions, and no order.

Methods may be called from one event loop only, and raise `BackendError` when the queues cannot be reached.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from leasekit.task import Ticket

__all__ = ["PRIORITIES", "Message", "QueueName", "TaskQueues"]

PRIORITIES = range(5)
"""The priorities of tasks, the most urgent first: each kind has a queue for each."""


class QueueName(NamedTuple):
    """Which tasks a queue is for."""

    kind: str
    """The kind of its tasks."""
    priority: int
    """Their priority."""


class Message(NamedTuple):
    """A received message. It is invisible to other receivers for a time, and comes again unless it is deleted."""

    queue: QueueName
    """The queue from which the message came."""
    ticket: Ticket
    """Its content."""
    receipt: Any = None
    """What the system of queues needs in order to delete it."""


class TaskQueues(Protocol):
    """The queues of one system. The consumer calls `send` and `depth`, and a worker the others."""

    async def send(self, queue: QueueName, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Send a message for each of these tickets, in order; return those that the queue has not taken."""
        ...

    async def depth(self, queue: QueueName) -> int:
        """Return how many messages a queue has, about, also those that are invisible."""
        ...

    async def receive(self, kinds: Sequence[str], *, limit: int, wait: float) -> list[Message]:
        """Receive up to `limit` messages of these kinds, the most urgent first; wait up to `wait` seconds for one."""
        ...

    async def delete(self, messages: Sequence[Message]) -> None:
        """Delete messages, so that they do not come again. A message that has been deleted is ignored."""
        ...

    async def show(self, messages: Sequence[Message]) -> None:
        """Make messages visible again at once."""
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...
