"""The consumer's work on the tasks of a store, a part of which is done in each period."""

import asyncio
import logging
from contextlib import suppress

from leasekit.server.clock import Clock
from leasekit.server.commit import GroupCommit
from leasekit.server.inbox import Inbox
from leasekit.server.readers import Readers
from leasekit.server.request_classes import FIRE, KEEP_FOLLOWERS, KEEP_GATES, REAP
from leasekit.server.roles import consumer, firing, following, gates
from leasekit.server.store_room import StoreRoom

logger = logging.getLogger("leasekit.server")

_REAP_MOST = 1000  # leases that are expired in one tick, at most
_FIRE_MOST = 2_000  # periodic tasks that are judged in one tick, at most: leases that end wait for them, and a start
_PATIENCE = 2.0  # seconds that leases that end wait for a slow read
_KEEP_MOST = 20_000  # tasks that gates put back or end in one tick, at most


class ConsumersWork:
    """The parts of the consumer's work that no request asks for, of one engine; for its event loop."""

    def __init__(self, commit: GroupCommit, readers: Readers, clock: Clock, inbox: Inbox, room: StoreRoom) -> None:
        self._commit = commit
        self._readers = readers
        self._clock = clock
        self._inbox = inbox
        self._room = room

    async def tick(self) -> None:
        """Expire leases, end or put back what gates hold, tell tasks that wait for others, fire periodic tasks."""
        taken = consumer.REAP_BATCH
        for _ in range(_REAP_MOST // consumer.REAP_BATCH):
            if taken < consumer.REAP_BATCH:
                break
            taken = await self._commit.ask(REAP, None, size=1)
            if taken:
                logger.info("%d leases have expired", taken)
        await self._keep_gates()
        await self._keep_followers()
        await self._fire()
        if self._commit.kinds.has_inbox and self._room.lack is None:
            self._inbox.ring()

    async def _keep_gates(self) -> None:
        for _ in range(_KEEP_MOST // gates.STEP if self._commit.kinds.gates.rows else 0):
            if not await self._commit.ask(KEEP_GATES, None, size=gates.STEP):
                break

    async def _keep_followers(self) -> None:
        """Tell the tasks that wait for others what was left to be told, if this store has such tasks."""
        for _ in range(_KEEP_MOST // following.STEP if self._commit.kinds.has_waits else 0):
            if not await self._commit.ask(KEEP_FOLLOWERS, None, size=following.STEP):
                break

    async def _fire(self) -> None:
        """Make the firings of periodic tasks that are due; they wait while no new tasks are accepted."""
        fires_at = self._commit.kinds.fires_at
        if fires_at is None or fires_at > self._clock.peek() or self._room.lack is not None:
            return
        if not self._readers.are_open:
            return
        now, names = self._clock.peek(), list[str]()
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                names = await self._readers.read(lambda view: view.names_due(now=now, limit=_FIRE_MOST), is_vital=True)
        for _ in range(_FIRE_MOST // firing.STEP):
            if not names:
                break
            judged = await self._commit.ask(FIRE, names[: firing.STEP], size=firing.STEP)
            names = names[judged:]
