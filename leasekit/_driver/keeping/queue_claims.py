"""Claims by messages: receive what queues say is due, claim just these tasks, and delete the messages.

Rule 1: a message is deleted once its task was granted, or its ticket was refused for good. Whatever else happens, the
        message comes again, and a claim by it costs one call.
Rule 2: a claim that is repeated sends the same tickets under its `claim_id` again: so it gets the tasks that a lost
        answer had.
Rule 3: the tasks of names (`named`, `once`) have no queues, and are claimed from the service as ever.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from leasekit._driver.thread import spawn
from leasekit.backend import Backend, TicketSource, cancel_all
from leasekit.errors import BackendError
from leasekit.queues import Message, TaskQueues
from leasekit.task import Claimed
from leasekit.task.words import NAME_PREFIXES

logger = logging.getLogger("leasekit")

_UNANSWERED = 100  # claims whose messages are remembered, at most
_DELETE = 5.0  # seconds that the last deletions may take when the connection is closed


@dataclass(slots=True)
class _Sent:
    """The messages by which a claim was sent, and how long after its begin."""

    messages: Sequence[Message]
    after: float


class QueueClaims:
    """The claims of one connection over queues; `claim` takes the place of that of the backend."""

    def __init__(self, backend: Backend, queues: TaskQueues, *, now: Callable[[], float]) -> None:
        self._backend = backend
        self._queues = queues
        self._now = now
        self._unanswered: dict[str, _Sent] = {}
        self._deleting: set[asyncio.Task[None]] = set()

    async def claim(
        self,
        kinds: Sequence[str],
        *,
        limit: int,
        wait: float,
        claim_id: str,
        labels: Mapping[str, str] | None = None,
    ) -> Claimed:
        """Claim up to `limit` tasks of these kinds; wait up to `wait` seconds for messages of such."""
        if all(kind.startswith(NAME_PREFIXES) for kind in kinds):
            return await self._backend.claim(kinds, limit=limit, wait=wait, claim_id=claim_id)
        began_at = self._now()
        claimed = await self._ask_again(kinds, limit=limit, claim_id=claim_id)
        while claimed is None or not (claimed.tasks or claimed.draining):
            left = began_at + wait - self._now()
            messages = await self._queues.receive(kinds, limit=limit, wait=max(0.0, left))
            if not messages:
                return Claimed(tasks=[], waited=self._now() - began_at)
            sent = _Sent(messages, self._now() - began_at)
            claimed = await self._ask(kinds, sent, limit=limit, claim_id=claim_id)
        return claimed

    async def aclose(self) -> None:
        """Delete what is left to be deleted, and close the queues' connections."""
        if self._deleting:
            await asyncio.wait(list(self._deleting), timeout=_DELETE)
        await cancel_all(self._deleting)
        await self._queues.aclose()

    async def _ask_again(self, kinds: Sequence[str], *, limit: int, claim_id: str) -> Claimed | None:
        sent = self._unanswered.get(claim_id)
        return None if sent is None else await self._ask(kinds, sent, limit=limit, claim_id=claim_id)

    async def _ask(self, kinds: Sequence[str], sent: _Sent, *, limit: int, claim_id: str) -> Claimed:
        assert isinstance(self._backend, TicketSource)  # noqa: S101 - checked when the client was made
        self._remember(claim_id, sent)
        tickets = [message.ticket for message in sent.messages]
        claimed = await self._backend.claim_tickets(kinds, tickets, limit=limit, claim_id=claim_id)
        self._unanswered.pop(claim_id, None)
        done = {task.id for task in claimed.tasks}.union(claimed.refused)
        self._settle(
            [message for message in sent.messages if message.ticket.id in done],
            [message for message in sent.messages if message.ticket.id not in done],
        )
        # Trust counts from when the caller began, plus this: the service was asked no earlier.
        waited = None if claimed.waited is None else sent.after + claimed.waited
        return replace(claimed, waited=waited)

    def _remember(self, claim_id: str, sent: _Sent) -> None:
        self._unanswered[claim_id] = sent
        if len(self._unanswered) > _UNANSWERED:
            del self._unanswered[next(iter(self._unanswered))]

    def _settle(self, done: Sequence[Message], left: Sequence[Message]) -> None:
        """Delete messages, and show others again: beside the claim, whose tasks begin meanwhile."""

        async def settle() -> None:
            try:
                if done:
                    await self._queues.delete(done)
                if left:
                    await self._queues.show(left)
            except BackendError as error:  # they come again, and are refused
                logger.debug("messages of queues could not be deleted: %s", error)

        spawn(settle(), self._deleting)
