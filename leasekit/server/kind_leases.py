"""Which consumer enqueues which kinds: leases of names, one for each kind, spread evenly over the consumers of a store.

Rule 1: a consumer moves the tasks of the kinds whose leases it holds. It stops before another can have the lease.
Rule 2: a consumer holds no more than its share, the kinds divided by the consumers. It gives back what is beyond.
Rule 3: each consumer also holds a lease of its own, by which the others count it. When one dies, its leases expire.

The leases spread work and load. That each task is moved once does not depend on them: transactions see to that.
"""

import asyncio
import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from leasekit.errors import BackendError
from leasekit.named import PREFIXES, kind_of
from leasekit.task import Beat, Claimed, NewTask, Scheduled, Settlement, Verdict

logger = logging.getLogger("leasekit.server")

_TTL = 10.0  # seconds after which the kinds of a consumer that has died are free
_EVERY = 2.0  # seconds between two renewals
_MARGIN = 1.0  # seconds before its end at which a lease is given up
_IDLE = 60.0  # seconds for which a kind without waiting tasks stays where it is
_MADE_FOR = 60.0  # seconds after which a name that may have been removed is made again
_CLOSING = 2.0  # seconds that giving back may take
_LONGEST = 80  # characters of a kind that are in the name of its lease

CONSUMER = "leasekit-consumer-"
"""How the names begin under which consumers hold leases."""


class Service(Protocol):
    """The part of an engine that leases need."""

    async def schedule(self, tasks: Sequence[NewTask]) -> list[Scheduled]: ...

    async def claim(self, *, worker: str, kinds: Sequence[str], limit: int, wait: float, claim_id: str) -> Claimed: ...

    async def heartbeat(self, worker: str, beats: Sequence[Beat]) -> list[Verdict]: ...

    async def results(self, worker: str, settlements: Sequence[Settlement]) -> list[Verdict]: ...


@dataclass(slots=True)
class _Held:
    """A lease that this consumer holds."""

    token: str
    until: float  # by the event loop's time


class KindLeases:
    """The leases of one consumer. `holders` returns the names of all that hold leases in the store."""

    def __init__(
        self, service: Service, *, consumer_id: str, holders: Callable[[], Awaitable[Collection[str]]]
    ) -> None:
        self._service = service
        self._worker = CONSUMER + consumer_id
        self._holders = holders
        self._own = kind_of(f"leasekit.consumer:{consumer_id}")
        self._held: dict[str, _Held] = {}  # by the name of the lease
        self._kinds: dict[str, str] = {}  # name of the lease → kind
        self._seen: dict[str, float] = {}  # kind → when it had waiting tasks last
        self._made: dict[str, float] = {}  # name → when it was scheduled
        self._looked_at = -math.inf

    @property
    def kinds(self) -> set[str]:
        """The kinds whose tasks this consumer moves at present."""
        now = _now()
        return {self._kinds[name] for name, held in self._held.items() if name in self._kinds and now < held.until}

    def is_new(self, kinds: Iterable[str]) -> bool:
        """Whether one of these kinds was not seen at the last look, so that no consumer may have it yet."""
        return any(kind not in self._seen and not kind.startswith(PREFIXES) for kind in kinds)

    async def look(self, kinds: Collection[str]) -> None:
        """Renew the leases, and give back or claim some, given the kinds of tasks that wait. Raises `BackendError`."""
        now = _now()
        if now < self._looked_at + _EVERY and not self.is_new(kinds):
            return
        self._looked_at = now
        self._see(kinds, now)
        await self._renew()
        if self._own not in self._held:
            await self._claim([self._own], 1)
        consumers = sum(holder.startswith(CONSUMER) for holder in await self._holders())
        share = math.ceil(len(self._seen) / max(1, consumers))
        await self._give_back(self._beyond(share))
        if (free := share - len(self._held) + 1) > 0:  # its own lease is not of a kind
            names = [name for name, kind in self._kinds.items() if kind in self._seen and name not in self._held]
            await self._claim(names, free)

    async def close(self) -> None:
        """Give all leases back, so that others need not wait for their ends."""
        with suppress(BackendError, TimeoutError):
            async with asyncio.timeout(_CLOSING):
                await self._give_back(list(self._held))
        self._held.clear()

    def _see(self, kinds: Iterable[str], now: float) -> None:
        self._seen.update({kind: now for kind in kinds if not kind.startswith(PREFIXES)})
        self._seen = {kind: at for kind, at in self._seen.items() if now - at < _IDLE}
        self._kinds = {kind_of(f"leasekit.queues:{_short(kind)}"): kind for kind in self._seen}

    def _beyond(self, share: int) -> list[str]:
        """Return the leases to give back: of kinds without tasks, and those beyond the share."""
        of_kinds = [name for name in self._held if name in self._kinds]
        idle = [name for name in self._held if name not in self._kinds and name != self._own]
        return idle + of_kinds[share:]

    async def _renew(self) -> None:
        now = _now()
        held = {name: lease for name, lease in self._held.items() if now < lease.until}
        beats = [Beat(id=name, token=lease.token) for name, lease in held.items()]
        self._held = held
        if not beats:
            return
        for verdict in await self._service.heartbeat(self._worker, beats):
            if verdict.verdict == "renewed":
                held[verdict.id].until = now + _TTL - _MARGIN
            elif verdict.verdict == "gone":
                del held[verdict.id]

    async def _claim(self, names: Sequence[str], limit: int) -> None:
        now = _now()
        if not names:
            return
        if make := [name for name in names if now - self._made.get(name, -math.inf) >= _MADE_FOR]:
            await self._service.schedule([_task(name) for name in make])
            self._made.update(dict.fromkeys(make, now))
        claimed = await self._service.claim(
            worker=self._worker, kinds=names, limit=limit, wait=0, claim_id=uuid.uuid4().hex
        )
        for task in claimed.tasks:
            self._held[task.id] = _Held(task.token, now + _TTL - _MARGIN)
        if claimed.tasks:
            logger.debug("%s moves tasks of %s", self._worker, ", ".join(sorted(self.kinds)))

    async def _give_back(self, names: Sequence[str]) -> None:
        leases = {name: self._held.pop(name) for name in names}  # first: nothing is moved without a lease
        if leases:
            await self._service.results(
                self._worker,
                [Settlement(id=name, token=lease.token, outcome="release") for name, lease in leases.items()],
            )


def _now() -> float:
    return asyncio.get_running_loop().time()


def _short(kind: str) -> str:
    return kind if len(kind) <= _LONGEST and kind.isalnum() else sha256(kind.encode()).hexdigest()[:32]


def _task(name: str) -> NewTask:
    return NewTask(
        kind=name, id=name, max_attempts=None, max_crashes=1_000_000, claim_timeout=_TTL, heartbeat_timeout=_TTL
    )
