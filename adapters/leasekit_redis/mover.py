"""What has to be done now and then, by whichever client comes by.

Every client waits `interval × (1/2 + random) × clients`, so that the fleet as a whole comes by once in an interval,
whatever its size, and never in step. Claims take back expired leases by themselves; a mover does it where nobody
claims.
"""

import asyncio
import logging
import random
import time
from collections.abc import Sequence

import msgspec
from msgspec import msgpack

from leasekit.errors import BackendError
from leasekit.wire import NewTaskItem
from leasekit_redis import answers
from leasekit_redis.clocks import Clocks
from leasekit_redis.dependencies import Dependencies
from leasekit_redis.intake import Intake
from leasekit_redis.keys import Keys
from leasekit_redis.link import Link
from leasekit_redis.records import Tended, decode, encode
from leasekit_redis.register import Register
from leasekit_redis.scripts import ASIDE, CENSUS, DROP, TEND

__all__ = ["Mover"]

logger = logging.getLogger("leasekit")

INTERVAL = 15.0  # seconds between two visits of the whole fleet
_SEEN_FOR = 3_600.0  # seconds for which a worker that holds nothing is listed
_ROUNDS = 100  # of one visit: what is left then is the next one's
_KINDS = 1000  # that are looked up at once
_COUNT = msgpack.Decoder(int)
_TENDED = msgpack.Decoder(Tended)
_successor = msgspec.json.Decoder(NewTaskItem).decode


class Mover:
    """One client's share of the work."""

    def __init__(
        self,
        link: Link,
        keys: Keys,
        clocks: Clocks,
        register: Register,
        intake: Intake,
        dependencies: Dependencies,
        *,
        name: str,
    ) -> None:
        self._link = link
        self._keys = keys
        self._clocks = clocks
        self._register = register
        self._intake = intake
        self._dependencies = dependencies
        self._name = name
        self._clients = 1

    async def run(self) -> None:
        """Come by at its pace, for ever."""
        while True:
            await asyncio.sleep(INTERVAL * (0.5 + random.random()) * self._clients)  # noqa: S311
            try:
                await self.once()
            except BackendError as error:
                logger.debug("what is due in Redis could not be moved, and is tried again: %s", error)

    async def once(self) -> None:
        """Visit every kind that may need it; raises in the end what the first raised that could not be helped."""
        interval = round(1000 * INTERVAL)
        census = encode([self._name, interval])
        self._clients = decode(await self._link.run(CENSUS, [self._keys.clients], census), _COUNT)
        failures: list[BackendError] = []
        while (visit := await self._register.to_visit(interval=interval, limit=_KINDS)).kinds:
            for kind in visit.kinds:
                try:
                    next_visit = await self.tend(kind)
                except BackendError as error:  # a part of a cluster may be away, for long: the rest is not
                    failures.append(error)
                    continue
                if next_visit is None or next_visit > visit.own_until:
                    await self._register.visited(kind, own_until=visit.own_until, next_visit=next_visit)
        if failures:
            raise failures[0]

    async def tend(self, kind: str) -> int | None:
        """Take back leases, wake claims, deliver successors, tell who waits, drop what was kept long enough.

        Gives when there may be something again, in milliseconds by Redis's clock; None: there is nothing any more.
        """
        retention = round(1000 * self._link.address.retention)
        failure: BackendError | None = None
        for _ in range(_ROUNDS):
            asked_at = time.monotonic()
            asked = {"retention": retention, "seen_for": 1000 * _SEEN_FOR, **self._clocks.known(kind)}
            tended: Tended = decode(await self._link.run(TEND, self._keys.of_kind(kind), encode(asked)), _TENDED)
            self._clocks.told(kind, tended.now, asked_at=asked_at)
            for one in tended.damaged:
                logger.error("%s", answers.damage(one.id, kind, one.damage))
            # What makes room comes first, and goes on whatever becomes of the rest: full memory refuses successors.
            await self._dependencies.withdraw(kind, tended.unmet)
            await self._drop(kind, tended.old, retention)
            try:
                await self._dependencies.release(kind, tended.ending)
                await self.deliver(kind, tended.outbox)
                await self._dependencies.ask_again(kind, tended.gated, retention=self._link.address.retention)
            except BackendError as error:
                failure = error
            if failure and not tended.old:
                break
            if tended.is_done and not failure:
                return tended.next
        if failure:
            raise failure
        return 0

    async def deliver(self, kind: str, outbox: Sequence[str]) -> None:
        """Schedule the successors that this kind's tasks have, then take them out of its outbox.

        Their ids make it once, however often and by whomever it is done.
        """
        if not outbox:
            return
        successors: dict[str, NewTaskItem] = {}
        damaged: list[tuple[str, str]] = []
        for one in outbox:
            try:
                successors[one] = _successor(one)
            except ValueError as error:
                damaged.append((one, f"successor: {error}"))
        if damaged:
            await self._link.run(ASIDE, self._keys.of_kind(kind), encode({"tasks": [], "successors": damaged}))
        await self._intake.schedule(list(successors.values()))
        key = self._keys.one(kind, "outbox")
        for one in successors:
            await self._link.command("LREM", key, 1, one)

    async def _drop(self, kind: str, ids: Sequence[str], retention: int) -> None:
        if ids:
            # In this order: an id must not stand for a task that is not there (see `register`).
            await self._register.forget(ids)
            await self._link.run(DROP, self._keys.of_kind(kind), encode({"ids": ids, "retention": retention}))
