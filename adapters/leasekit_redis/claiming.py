"""Claims: one script for each kind, run again when tasks are ready, or may be."""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec import Raw, msgpack
from msgspec.structs import replace

from leasekit.errors import ProtocolError, Unavailable
from leasekit.task import Claimed, Task
from leasekit.wire import MAX_WAIT, ClaimRequest
from leasekit_redis import decoding
from leasekit_redis.client import MOST, Link
from leasekit_redis.clocks import Clocks
from leasekit_redis.intake import answer_of
from leasekit_redis.lru import LRU
from leasekit_redis.records import Grants, Named, NewRecord, decode, encode
from leasekit_redis.scripts import ASIDE, CLAIM, CLAIM_NAME
from leasekit_redis.waiting import Wakes

logger = logging.getLogger("leasekit")

_LOOK = 5.0  # seconds, roughly, until a waiting claim looks again without having been woken
_SOONEST = 0.001
_AWAY = 5.0  # seconds until a shard that failed is asked again while another serves
_UNHEARD = 100  # unanswered claims of one kind that are recalled when its shard answers again
_GRANTS = msgpack.Decoder(Grants)
_NAMED = msgpack.Decoder(Named)
_FIELDS = msgpack.Decoder(list[Raw])
_ANY = msgpack.Decoder()
_NOTHING = {"limit": 0, "seed": "", "waited": 0, "waiter": None, "wait": 0}  # the other fields of a recall


class _Found(NamedTuple):
    tasks: list[Task]
    waited: float
    next: float  # seconds until there may be something
    is_repeat: bool  # the claim was answered before: it gets its leases that are still live, and no others

    @property
    def claimed(self) -> Claimed:
        return Claimed(tasks=self.tasks, waited=self.waited)


class _Sweep:
    """A pass of a claim over several kinds: the tasks granted so far, and the kinds and shards that failed.

    `recall`: grant nothing new, but return the tasks that an earlier, unanswered pass of this claim was granted.
    """

    def __init__(self, asked: ClaimRequest, began_at: float, deadline: float, *, recall: bool = False) -> None:
        self.asked = asked
        self.recall = recall
        self._began_at = began_at
        self._deadline = deadline
        self._tasks: list[Task] = []
        self._waited: list[float] = []
        self._next = _LOOK
        self._is_repeat = False
        self.has_answer = False
        self.failed: dict[str, Unavailable] = {}  # shards
        self.damaged: dict[str, ProtocolError] = {}  # kinds

    @property
    def is_full(self) -> bool:
        return 0 < self.asked.limit <= len(self._tasks)

    @property
    def error(self) -> Unavailable:
        return next(iter([*self.failed.values(), *self.damaged.values()]))

    def request(self, now: float) -> dict[str, Any]:
        return {
            "worker": self.asked.worker,
            "claim_id": self.asked.claim_id,
            "limit": self.asked.limit and min(MOST, self.asked.limit - len(self._tasks)),
            "seed": secrets.token_hex(16),
            "waited": now - self._began_at,
            "wait": max(0, round(1000 * (self._deadline - now))),
            "recall": self.recall,
        }

    def add(self, grants: Grants, tasks: list[Task]) -> None:
        self.has_answer = True
        self._tasks += tasks
        self._is_repeat = self._is_repeat or grants.is_repeat
        if grants.tasks:
            self._waited.append(grants.waited)
        if grants.next is not None:
            self._next = min(self._next, grants.next / 1000)

    def found(self) -> _Found:
        waited = min(self._waited, default=time.monotonic() - self._began_at)
        return _Found(self._tasks, waited, self._next, self._is_repeat)


class Claims:
    """The claims of one client.

    `give_back(kind, claim_id)` is called when a kind answers again whose answer to an ended claim was lost: no worker
    runs the tasks that this claim may have been granted there.
    """

    def __init__(self, link: Link, clocks: Clocks, wakes: Wakes, *, give_back: Callable[[str, str], None]) -> None:
        self._link = link
        self._clocks = clocks
        self._wakes = wakes
        self._asked: LRU[set[str]] = LRU()  # claim → kinds that have failed to answer it
        self._turn = 0
        self._said: LRU[None] = LRU()  # kinds that were logged as damaged
        self._told_as: LRU[str] = LRU()  # how messages name a kind → the kind
        self._give_back = give_back
        self._away: dict[str, float] = {}  # shards that failed last, and when they are asked again
        self._unheard: LRU[dict[str, None]] = LRU()  # kind → claims that ended without its answer

    async def claim(self, asked: ClaimRequest) -> Claimed:
        """Claim tasks; return none once `wait` seconds are over.

        `waited` counts up to when the granted request left, so trust begins exactly there. With the limit 0 the claim
        is ended at each of its kinds.
        """
        if not asked.limit:
            return await self._end(asked)
        began_at = time.monotonic()
        deadline = began_at + min(asked.wait, MAX_WAIT)
        if asked.wait > 0:
            await self._wakes.subscribe()
        kinds = self._in_turn(asked.kinds)
        for kind in kinds:
            self._told_as[self._link.keys.of_kind(kind)[0].decode()] = kind
        if self._note_claim(asked.claim_id) and len(kinds) > 1:
            found = await self._claim_from(asked, kinds, began_at, deadline, recall=True)
            if found.is_repeat:
                return self._conclude(asked, found)
        with self._wakes.waiting(asked.claim_id) as waiter:
            looked_at: Sequence[str] = kinds
            while True:
                is_last = time.monotonic() >= deadline
                found = await self._claim_from(asked, looked_at, began_at, deadline)
                if found.tasks or found.is_repeat or is_last:
                    return self._conclude(asked, found)
                pause = min(found.next, _LOOK * (0.5 + random.random()))  # noqa: S311 - not in step with others
                told = await waiter.wait(min(max(pause, _SOONEST), max(deadline - time.monotonic(), 0.0)))
                looked_at = [kind for kind in kinds if kind in {self._told_as.get(key) for key in told}] or kinds

    async def claim_name(self, asked: ClaimRequest, record: NewRecord, *, soon: int) -> Claimed | None:
        """Make and claim the task of a name in one script; None if that takes more than one.

        `soon`: the milliseconds until its kind is due for maintenance.
        """
        (kind,) = asked.kinds
        now = time.monotonic()
        sweep = _Sweep(asked, now, now)
        request = {**sweep.request(now), "kind": kind, "tasks": [record], "soon": soon, **self._clocks.known(kind)}
        keys = self._link.keys
        try:
            shared = (keys.kinds, keys.register[keys.part(kind)])
            raw = await self._link.run_for_name(kind, CLAIM_NAME, shared, encode(request))
        except ProtocolError:
            return None
        if raw is None:
            return None
        named: Named = decode(raw, _NAMED)
        self._heard(kind, str(self._link.address), asked.claim_id)
        if not named.grants.is_repeat:
            self._clocks.told(kind, named.grants.now, asked_at=now, steps_back=named.grants.steps_back)
        sweep.add(named.grants, await self._readable(named.grants.tasks, kind))
        return replace(sweep.found().claimed, status=answer_of(named.added[0]).status)

    def _conclude(self, asked: ClaimRequest, found: _Found) -> Claimed:
        """Return the answer to a claim; remember to end the claim at each kind that has failed to answer."""
        for kind in self._asked.get(asked.claim_id, ()):
            self._end_later(kind, asked.claim_id)
        return found.claimed

    def _end_later(self, kind: str, claim_id: str) -> None:
        claims = self._unheard.setdefault(kind, {})
        if len(claims) < _UNHEARD:
            claims[claim_id] = None

    async def recall(self, worker: str, kind: str, claim_id: str) -> list[Task]:
        """End a claim at a kind; return the tasks that it was granted there whose leases are still live."""
        request = {**_NOTHING, "kind": kind, "worker": worker, "claim_id": claim_id, "recall": True}
        try:
            grants: Grants = decode(await self._link.run_for(kind, CLAIM, request), _GRANTS)
        except Unavailable:
            self._end_later(kind, claim_id)
            raise
        return await self._readable(grants.tasks, kind)

    async def _end(self, asked: ClaimRequest) -> Claimed:
        """End the claim at each of its kinds; return the live leases that it was granted, without their payloads.

        Raises if a server does not answer, or no kind does, because a request under way could be granted tasks there.
        Called again, kinds that have answered answer the same. If it is not called again, the claim ends at a kind when
        that answers another claim of this client.
        """
        began_at = time.monotonic()
        sweep = _Sweep(asked, began_at, began_at)
        kinds = list(dict.fromkeys(asked.kinds))
        for kind in kinds:
            self._end_later(kind, asked.claim_id)
        shards = await self._shards(kinds)
        await asyncio.gather(*(self._end_at_shard(sweep, shard, shards) for shard in dict.fromkeys(shards.values())))
        if sweep.failed or not sweep.has_answer:
            raise sweep.error
        self._log_damaged(sweep.damaged)
        return sweep.found().claimed

    async def _end_at_shard(self, sweep: "_Sweep", shard: str, shards: dict[str, str]) -> None:
        for kind in (kind for kind, place in shards.items() if place == shard):
            if shard not in sweep.failed:
                await self._claim_from_kind(sweep, kind, shard)

    async def _claim_from(
        self, asked: ClaimRequest, kinds: Sequence[str], began_at: float, deadline: float, *, recall: bool = False
    ) -> _Found:
        """Claim from the kinds, in this order, up to the limit.

        A kind whose keys are damaged, or whose shard does not answer, is skipped as long as another kind answers. If no
        kind answers, raises the first error: a repeat of the claim loses nothing.
        """
        sweep = _Sweep(asked, began_at, deadline, recall=recall)
        shards = await self._shards(kinds)
        for kind in self._present(kinds, shards):
            if shards[kind] not in sweep.failed:
                await self._claim_from_kind(sweep, kind, shards[kind])
            if sweep.is_full:
                break
        if not sweep.has_answer:
            raise sweep.error
        self._skip_shards(sweep.failed)
        self._log_damaged(sweep.damaged)
        return sweep.found()

    async def _claim_from_kind(self, sweep: "_Sweep", kind: str, shard: str) -> None:
        """Add the answer of one kind to `sweep`, or the error why the kind did not answer."""
        claim_id = sweep.asked.claim_id
        unheard = self._asked.setdefault(claim_id, set())
        now = time.monotonic()
        waiter = self._wakes.name(claim_id) if sweep.asked.wait > 0 else None
        request = {**sweep.request(now), "kind": kind, "waiter": waiter, **self._clocks.known(kind)}
        try:
            raw = await self._link.run_for(kind, CLAIM, request)
            grants: Grants = decode(raw, _GRANTS)
        except ProtocolError as error:
            sweep.damaged[kind] = error
            return
        except Unavailable as error:
            sweep.failed[shard] = error
            unheard.add(kind)
            return
        unheard.discard(kind)
        self._heard(kind, shard, claim_id)
        if not (grants.is_repeat or sweep.recall):  # in these cases the script does not check for a jump of the clock
            self._clocks.told(kind, grants.now, asked_at=now, steps_back=grants.steps_back)
        sweep.add(grants, await self._readable(grants.tasks, kind))

    async def _shards(self, kinds: Sequence[str]) -> dict[str, str]:
        found = await self._link.shards([self._link.keys.of_kind(kind)[0] for kind in kinds])
        return dict(zip(kinds, found, strict=True))

    def _present(self, kinds: Sequence[str], shards: dict[str, str]) -> Sequence[str]:
        """Return the kinds whose shards have not failed lately; all kinds if every shard has."""
        now = time.monotonic()
        return [kind for kind in kinds if self._away.get(shards[kind], now) <= now] or kinds

    def _skip_shards(self, failed: dict[str, Unavailable]) -> None:
        for shard, error in failed.items():
            if shard not in self._away:
                logger.warning("claims skip the kinds that are kept at %s until it answers: %s", shard, error)
            self._away[shard] = time.monotonic() + _AWAY

    def _heard(self, kind: str, shard: str, claim_id: str) -> None:
        """Note that a kind has answered this claim; give back what other claims may hold that missed its answer."""
        self._away.pop(shard, None)
        self._said.pop(kind, None)
        for unheard in self._unheard.pop(kind, ()):
            if unheard != claim_id:
                self._give_back(kind, unheard)

    async def _readable(self, granted: Sequence[Raw], kind: str) -> list[Task]:
        """Decode the granted tasks. A task that cannot be decoded is set aside, so that it is never granted again."""
        tasks: list[Task] = []
        aside: list[tuple[Any, Any, str]] = []
        for raw in granted:
            try:
                tasks.append(decoding.task(raw, kind))
            except ProtocolError as error:
                task_id, token = (_ANY.decode(field) for field in _FIELDS.decode(raw)[:2])
                aside.append((task_id, token, str(error)))
        if aside:
            await self._link.run_for(kind, ASIDE, {"tasks": aside, "successors": []})
        return tasks

    def _log_damaged(self, damaged: dict[str, ProtocolError]) -> None:
        for kind, error in damaged.items():
            if kind not in self._said:
                logger.error("tasks of kind %r cannot be claimed, other kinds can: %s", kind, error)
                self._said[kind] = None

    def kind_of(self, meta_key: str) -> str | None:
        """Return the kind that a message names by its key; None if this client has not claimed that kind lately."""
        return self._told_as.get(meta_key)

    def _in_turn(self, kinds: Sequence[str]) -> list[str]:
        """Return the kinds, another one first each time, so that no kind starves while the others have enough tasks."""
        distinct = list(dict.fromkeys(kinds))
        self._turn += 1
        first = self._turn % len(distinct)
        return distinct[first:] + distinct[:first]

    def _note_claim(self, claim_id: str) -> bool:
        is_known = claim_id in self._asked
        self._asked[claim_id] = self._asked.get(claim_id, set())
        return is_known
