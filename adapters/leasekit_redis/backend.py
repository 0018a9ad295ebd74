"""`RedisBackend`: the seam. Each method is a script for each kind that it concerns."""

import asyncio
import contextlib
import random
import secrets
from collections.abc import Coroutine, Sequence
from datetime import date
from typing import Any

from msgspec import msgpack

from leasekit.backend import Traits
from leasekit.errors import BackendError, Refused
from leasekit.task import Beat, Claimed, NewTask, Page, Scheduled, Settlement, Status, TaskInfo, Verdict
from leasekit.wire import MAX_BATCH, CancelRequest, ClaimRequest
from leasekit_redis import answers, bounds
from leasekit_redis.address import Address, parse
from leasekit_redis.claiming import Claims
from leasekit_redis.clocks import Clocks
from leasekit_redis.dependencies import Dependencies
from leasekit_redis.faults import bearing
from leasekit_redis.holding import Holding
from leasekit_redis.intake import Intake
from leasekit_redis.keys import Keys
from leasekit_redis.link import Link
from leasekit_redis.mover import Mover
from leasekit_redis.reading import Reading
from leasekit_redis.records import Cancelled, decode, encode
from leasekit_redis.register import Register
from leasekit_redis.scripts import CANCEL, DROP, REDRIVE
from leasekit_redis.waiting import Wakes

__all__ = ["RedisBackend", "connect"]

_CANCELLED = msgpack.Decoder(Cancelled)
_IDS = msgpack.Decoder(dict[str, list[str]])


def connect(url: str, *, worker: str) -> "RedisBackend":
    """The backend of the Redis at this URL (`leasekit_redis.address` says what it may hold). Nothing is opened yet.

    Raises `ConfigError` where the URL is none: the message does not repeat it, for it may hold a password.
    """
    return RedisBackend(parse(url), worker=worker)


class RedisBackend:
    """Tasks in a Redis, or a Redis cluster: a `Backend`, a `Scheduler` and a `Roster`, without a server of ours."""

    traits = Traits(max_batch=MAX_BATCH, max_claim=MAX_BATCH, dependencies=True)

    def __init__(self, address: Address, *, worker: str, chance: random.Random | None = None) -> None:
        self._worker = worker
        self._link = link = Link(address)
        self._keys = keys = Keys(address.prefix)
        self._clocks = clocks = Clocks(is_one=not address.is_cluster)
        name = secrets.token_hex(8)
        self._wakes = Wakes(link, keys.channel(name), self._pass_on)
        self._register = register = Register(link, keys)
        self._dependencies = dependencies = Dependencies(link, keys, register)
        self._intake = Intake(link, keys, register, dependencies)
        self._claims = Claims(link, keys, clocks, self._wakes, give_back=self._give_back)
        self._mover = Mover(link, keys, clocks, register, self._intake, dependencies, name=name)
        self._holding = Holding(
            link,
            keys,
            clocks,
            register,
            worker=worker,
            deliver=self._mover.deliver,
            dependencies=dependencies,
            chance=chance or random.SystemRandom(),
        )
        self._reading = Reading(link, keys, register)
        self._moving: asyncio.Task[None] | None = None
        self._errands: set[asyncio.Task[None]] = set()

    async def claim(self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str) -> Claimed:
        """Take up to `limit` tasks of these kinds; wait up to `wait` seconds for the first."""
        fields = {"worker": self._worker, "kinds": list(kinds), "limit": limit, "wait": wait, "claim_id": claim_id}
        asked = bounds.checked(ClaimRequest, fields)
        self._keep_moving()
        return await self._claims.claim(asked)

    async def beat(self, beats: Sequence[Beat]) -> list[Verdict]:
        """Renew leases: `renewed`, `gone` or `failed` for each, in order."""
        with bearing():
            return await self._holding.beat(beats, bounds.progress_texts(beats)) if beats else []

    async def settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        """End leases: `settled`, `gone` or `failed` for each, in order."""
        with bearing():
            return await self._holding.settle(bounds.settlements(settlements, self._worker)) if settlements else []

    async def schedule(self, tasks: Sequence[NewTask]) -> list[Scheduled]:
        """Accept tasks. The same id, or live dedupe key, makes no second task.

        When this returns they are as durable as this Redis makes anything (see the package's docstring).
        """
        if not tasks:
            return []
        items = bounds.new_tasks(tasks)
        self._keep_moving()
        return await self._intake.schedule(items)

    async def cancel(self, task_ids: Sequence[str]) -> list[Verdict]:
        """Cancel: `cancelled` where it waits, `ordered` where it runs, `gone` where it has ended or is unknown."""
        if not task_ids:
            return []
        ids = bounds.checked(CancelRequest, {"ids": list(task_ids)}).ids
        kinds = await self._register.find(ids)
        verdicts = [Verdict(id=task_id, verdict="gone", reason="unknown") for task_id in ids]
        for kind in dict.fromkeys(kind for kind in kinds if kind is not None):
            positions = [at for at, one in enumerate(kinds) if one == kind]
            some = [ids[at] for at in positions]
            argument = encode({"ids": some, **self._clocks.known(kind)})
            raw = await self._link.run(CANCEL, self._keys.of_kind(kind), argument)
            found: Cancelled = decode(raw, _CANCELLED)
            for at, verdict in zip(positions, answers.cancelled(some, found.words), strict=True):
                verdicts[at] = verdict
            with contextlib.suppress(BackendError):  # what fails here is left to the movers
                await self._dependencies.release(kind, found.ending)
        return verdicts

    async def redrive(self, kind: str, task_ids: Sequence[str] | None = None, *, limit: int = 100) -> list[str]:
        """Make dead tasks ready again, their failures and crashes forgotten: these, or those dead for the longest.

        Returns the ids of those that were dead.
        """
        bounds.check_limit("limit", limit)
        if task_ids is not None:
            bounds.check_limit("task_ids", len(task_ids))
        argument = encode({"ids": None if task_ids is None else list(task_ids), "limit": limit})
        await self._register.note([kind])
        answer: dict[str, list[str]] = decode(await self._link.run(REDRIVE, self._keys.of_kind(kind), argument), _IDS)
        return answer["ids"]

    async def discard(self, kind: str, task_ids: Sequence[str]) -> int:
        """Throw away what is left of tasks that were set aside because they were damaged, and free their ids.

        Returns how many of these were.
        """
        bounds.check_limit("task_ids", len(task_ids))
        scores = await self._link.command("ZMSCORE", self._keys.one(kind, "damaged"), *task_ids)
        ids = [task_id for task_id, score in zip(task_ids, scores, strict=True) if score is not None]
        if ids:
            await self._register.forget(ids)
            argument = encode({"ids": ids, "retention": 0, "is_damaged": True})
            await self._link.run(DROP, self._keys.of_kind(kind), argument)
        return len(ids)

    async def tend(self) -> None:
        """Do at once what every client does now and then (`leasekit_redis.mover`)."""
        await self._mover.once()

    async def get(self, task_id: str) -> TaskInfo | None:
        """Everything about one task, None where there is none of that id."""
        try:
            bounds.checked(CancelRequest, {"ids": [task_id]})
        except Refused:  # no task can have such an id
            return None
        return await self._reading.get(task_id)

    async def ended_on(self, kind: str, day: date, *, status: Status | None = None) -> list[TaskInfo]:
        """Tasks of a kind that ended on a day (UTC), as long as they are kept; in the order in which they ended."""
        return await self._reading.ended_on(kind, day, status)

    async def stats(self) -> dict[str, Any]:
        """How many tasks of each kind are in which status: `{"kinds": {kind: {status: count}}}`, and `damaged`."""
        return await self._reading.stats()

    async def workers(self) -> list[dict[str, Any]]:
        """Workers that hold leases, or were heard of lately: `name`, `last_seen` (RFC 3339, or None), `running`."""
        return await self._reading.workers()

    async def aclose(self) -> None:
        """Let go of connections. Leases are not touched."""
        moving, self._moving = self._moving, None
        errands = [*self._errands, *([moving] if moving else [])]
        for task in errands:
            task.cancel()
        if errands:
            await asyncio.wait(errands)
        await self._wakes.aclose()
        await self._link.aclose()

    def _keep_moving(self) -> None:
        if self._moving is None or self._moving.done():
            self._moving = asyncio.get_running_loop().create_task(self._mover.run())

    def _pass_on(self, meta_key: str) -> None:
        """Something is ready, and the claim that was told waits no more: have another one told."""
        kind = self._claims.kind_of(meta_key)
        if kind is not None:
            self._send(self._mover.tend(kind))  # where it fails: claims that wait look again by themselves

    def _give_back(self, kind: str, claim_id: str) -> None:
        """What a claim was granted without hearing of it is made ready again."""
        self._send(self._recall(kind, claim_id))  # where it fails: the leases run out by themselves

    async def _recall(self, kind: str, claim_id: str) -> None:
        tasks = await self._claims.recall(self._worker, kind, claim_id)
        await self.settle([Settlement(id=task.id, token=task.token, outcome="release") for task in tasks])

    def _send(self, work: Coroutine[Any, Any, object]) -> None:
        """Do it beside the calls that are made; it may fail."""

        async def run() -> None:
            with contextlib.suppress(BackendError):
                await work

        errand = asyncio.get_running_loop().create_task(run())
        self._errands.add(errand)
        errand.add_done_callback(self._errands.discard)

    # Last in the class: below it, `list` is this method and no longer the type.
    async def list(
        self,
        *,
        kind: str | None = None,
        status: Status | None = None,
        collection: str | None = None,
        worker: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page:
        """Tasks that match all that is given, oldest first; `cursor` is where an earlier page ended."""
        bounds.check_limit("limit", limit)
        asked = {"status": status, "collection": collection, "worker": worker}
        wanted = {name: str(value) for name, value in asked.items() if value is not None}
        return await self._reading.page(wanted, kind=kind, cursor=cursor, limit=limit)
