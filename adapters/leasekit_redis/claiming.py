"""Claims: one script for each kind, asked again when something is ready, or may be."""

import logging
import random
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec import Raw, msgpack

from leasekit.errors import ProtocolError, Unavailable
from leasekit.task import Claimed, Task
from leasekit.wire import MAX_WAIT, ClaimRequest
from leasekit_redis import answers
from leasekit_redis.clocks import Clocks
from leasekit_redis.keys import Keys
from leasekit_redis.link import Link
from leasekit_redis.recent import Recent
from leasekit_redis.records import Grants, decode, encode
from leasekit_redis.scripts import ASIDE, CLAIM
from leasekit_redis.waiting import Wakes

__all__ = ["Claims"]

logger = logging.getLogger("leasekit")

_LOOK = 5.0  # seconds until a claim that waits looks again though nobody told it, about
_SOONEST = 0.001
_REMEMBERED = 10_000  # claims that this client remembers to have asked
_AWAY = 5.0  # seconds until a shard that failed is asked again while another serves
_UNHEARD = 100  # claims of one kind that are asked what they were granted, when its shard answers again
_GRANTS = msgpack.Decoder(Grants)
_FIELDS = msgpack.Decoder(list[Raw])
_ANY = msgpack.Decoder()
_NOTHING = {"limit": 0, "seed": "", "waited": 0, "waiter": None, "wait": 0}  # what a recall asks for besides


class _Found(NamedTuple):
    tasks: list[Task]
    waited: float
    next: float  # seconds until there may be something
    is_repeat: bool  # the claim was answered before: what of it is live is all that it gets


class Claims:
    """The claims of one client.

    `give_back(kind, claim_id)` is called when a kind answers again that a claim which has ended did not hear: what it
    was granted there lies with nobody.
    """

    def __init__(
        self, link: Link, keys: Keys, clocks: Clocks, wakes: Wakes, *, give_back: Callable[[str, str], None]
    ) -> None:
        self._link = link
        self._keys = keys
        self._clocks = clocks
        self._wakes = wakes
        self._asked: dict[str, set[str]] = {}  # claim → kinds that have failed to answer it
        self._turn = 0
        self._said: Recent[None] = Recent()  # kinds that were said to be damaged
        self._told_as: Recent[str] = Recent()  # how messages name a kind → the kind
        self._give_back = give_back
        self._away: dict[str, float] = {}  # shards that failed last, and when they are asked again
        self._unheard: Recent[dict[str, None]] = Recent()  # kind → claims that ended without its answer

    async def claim(self, asked: ClaimRequest) -> Claimed:
        """Tasks, or none once `wait` seconds are over.

        `waited` counts up to when the request that was granted left: so not a moment of trust is given away, or won.
        With the limit 0 the claim ends, at each of the kinds.
        """
        began_at = time.monotonic()
        if not asked.limit:
            found = await self._look(asked, list(dict.fromkeys(asked.kinds)), began_at, began_at)
            return Claimed(tasks=found.tasks, waited=found.waited)
        deadline = began_at + min(asked.wait, MAX_WAIT)
        if asked.wait > 0:
            await self._wakes.subscribe()
        kinds = self._in_turn(asked.kinds)
        for kind in kinds:
            self._told_as[self._keys.of_kind(kind)[0].decode()] = kind
        if self._is_repeat(asked.claim_id) and len(kinds) > 1:
            found = await self._look(asked, kinds, began_at, deadline, recall=True)
            if found.is_repeat:
                return self._answered(asked, found)
        with self._wakes.waiting(asked.claim_id) as waiter:
            looked_at: Sequence[str] = kinds
            while True:
                is_last = time.monotonic() >= deadline
                found = await self._look(asked, looked_at, began_at, deadline)
                if found.tasks or found.is_repeat or is_last:
                    return self._answered(asked, found)
                pause = min(found.next, _LOOK * (0.5 + random.random()))  # noqa: S311 - not in step with others
                told = await waiter.wait(min(max(pause, _SOONEST), max(deadline - time.monotonic(), 0.0)))
                looked_at = [kind for kind in kinds if kind in {self._told_as.get(one) for one in told}] or kinds

    def _answered(self, asked: ClaimRequest, found: _Found) -> Claimed:
        for kind in self._asked.get(asked.claim_id, ()):
            claims = self._unheard.setdefault(kind, {})
            if len(claims) < _UNHEARD:
                claims[asked.claim_id] = None
        return Claimed(tasks=found.tasks, waited=found.waited)

    async def recall(self, worker: str, kind: str, claim_id: str) -> list[Task]:
        """What a claim was granted of a kind, as far as it is still live."""
        request = {**_NOTHING, "kind": kind, "worker": worker, "claim_id": claim_id, "recall": True}
        grants: Grants = decode(await self._link.run(CLAIM, self._keys.of_kind(kind), encode(request)), _GRANTS)
        return await self._readable(grants.tasks, kind)

    async def _look(
        self, asked: ClaimRequest, kinds: Sequence[str], began_at: float, deadline: float, *, recall: bool = False
    ) -> _Found:
        """What the kinds have, in this order, up to the limit.

        A kind whose keys are damaged, or whose shard does not answer, is passed over, as long as another kind answers.
        Raises what one of them raised where none does: a repeat gets it all.
        """
        tasks: list[Task] = []
        waited: list[float] = []
        soonest = _LOOK
        is_repeat = False
        damaged: dict[str, ProtocolError] = {}
        shards = await self._shards(kinds)
        failed: dict[str, Unavailable] = {}  # shards
        unheard = self._asked.setdefault(asked.claim_id, set())
        has_answer = False
        for kind in self._present(kinds, shards):
            now = time.monotonic()
            if shards[kind] in failed:
                continue
            request = {
                "kind": kind,
                "worker": asked.worker,
                "claim_id": asked.claim_id,
                "limit": asked.limit and asked.limit - len(tasks),
                "seed": secrets.token_hex(16),
                "waited": now - began_at,
                "waiter": self._wakes.name(asked.claim_id) if asked.wait > 0 else None,
                "wait": max(0, round(1000 * (deadline - now))),
                "recall": recall,
                **self._clocks.known(kind),
            }
            try:
                raw = await self._link.run(CLAIM, self._keys.of_kind(kind), encode(request))
                grants: Grants = decode(raw, _GRANTS)
            except ProtocolError as error:
                damaged[kind] = error
                continue
            except Unavailable as error:
                failed[shards[kind]] = error
                unheard.add(kind)
                continue
            has_answer = True
            unheard.discard(kind)
            self._heard(kind, shards[kind], asked.claim_id)
            if not (grants.is_repeat or recall):  # else the script has not looked whether the clock has jumped
                self._clocks.told(kind, grants.now, asked_at=now)
            tasks += await self._readable(grants.tasks, kind)
            is_repeat = is_repeat or grants.is_repeat
            if grants.tasks:
                waited.append(grants.waited)
            if grants.next is not None:
                soonest = min(soonest, grants.next / 1000)
            if 0 < asked.limit <= len(tasks):
                break
        if not has_answer:
            raise next(iter([*failed.values(), *damaged.values()]))
        self._pass_over(failed)
        self._say(damaged)
        since = min(waited, default=time.monotonic() - began_at)
        return _Found(tasks, since, soonest, is_repeat)

    async def _shards(self, kinds: Sequence[str]) -> dict[str, str]:
        """Where each kind is kept."""
        found = await self._link.shards([self._keys.of_kind(kind)[0] for kind in kinds])
        return dict(zip(kinds, found, strict=True))

    def _present(self, kinds: Sequence[str], shards: dict[str, str]) -> Sequence[str]:
        """The kinds whose shards have not failed just now; all, where each has."""
        now = time.monotonic()
        return [kind for kind in kinds if self._away.get(shards[kind], now) <= now] or kinds

    def _pass_over(self, failed: dict[str, Unavailable]) -> None:
        for shard, error in failed.items():
            if shard not in self._away:
                logger.warning("claims pass over the kinds that are kept at %s until it answers: %s", shard, error)
            self._away[shard] = time.monotonic() + _AWAY

    def _heard(self, kind: str, shard: str, claim_id: str) -> None:
        """A kind answers this claim; others may have ended without its answer."""
        self._away.pop(shard, None)
        self._said.pop(kind, None)
        for unheard in self._unheard.pop(kind, ()):
            if unheard != claim_id:
                self._give_back(kind, unheard)

    async def _readable(self, granted: Sequence[Raw], kind: str) -> list[Task]:
        """The tasks that were granted. What cannot be read is set aside, so that nobody is granted it again."""
        tasks: list[Task] = []
        aside: list[tuple[Any, Any, str]] = []
        for one in granted:
            try:
                tasks.append(answers.task(one, kind))
            except ProtocolError as error:
                task_id, token = (_ANY.decode(field) for field in _FIELDS.decode(one)[:2])
                aside.append((task_id, token, str(error)))
        if aside:
            await self._link.run(ASIDE, self._keys.of_kind(kind), encode({"tasks": aside, "successors": []}))
        return tasks

    def _say(self, damaged: dict[str, ProtocolError]) -> None:
        for kind, error in damaged.items():
            if kind not in self._said:
                logger.error("nothing of kind %r can be claimed, other kinds can: %s", kind, error)
                self._said[kind] = None

    def kind_of(self, meta_key: str) -> str | None:
        """Which kind a message is about, of those that were asked for lately."""
        return self._told_as.get(meta_key)

    def _in_turn(self, kinds: Sequence[str]) -> list[str]:
        """Another kind first each time: none is passed over for good while the others have enough to do."""
        distinct = list(dict.fromkeys(kinds))
        self._turn += 1
        first = self._turn % len(distinct)
        return distinct[first:] + distinct[:first]

    def _is_repeat(self, claim_id: str) -> bool:
        if claim_id in self._asked:
            return True
        self._asked[claim_id] = set()
        if len(self._asked) > _REMEMBERED:
            del self._asked[next(iter(self._asked))]
        return False
