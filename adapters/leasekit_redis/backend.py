"""`RedisBackend`: the backend interface on Redis. Each method runs one script for each kind that it concerns.

Heartbeats of many kinds share a script where one server has all keys.
"""

import asyncio
import contextlib
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence
from datetime import date
from typing import Any, ParamSpec, TypeVar

from msgspec import msgpack
from msgspec.structs import replace

from leasekit.backend import Capabilities, cancel_all, check_limit, checked, dead_ones
from leasekit.errors import BackendError, Refused
from leasekit.task import (
    Beat,
    ChainCancelled,
    Claimed,
    NewTask,
    Page,
    Purged,
    Redriven,
    Scheduled,
    Settlement,
    Stats,
    Status,
    TaskInfo,
    TaskSelection,
    Vacuumed,
    Verdict,
    WorkerInfo,
)
from leasekit.wire import (
    MAX_BATCH,
    BeatsRequest,
    CancelRequest,
    ChainRequest,
    ClaimRequest,
    PurgeRequest,
    RedriveRequest,
    ResultsRequest,
    ScheduleRequest,
)
from leasekit_redis import decoding
from leasekit_redis.address import Address, parse
from leasekit_redis.chains import Chains, Member
from leasekit_redis.claiming import Claims
from leasekit_redis.client import MOST, Link, by_kind
from leasekit_redis.clocks import Clocks
from leasekit_redis.dependencies import Dependencies
from leasekit_redis.errors import bearing
from leasekit_redis.id_index import IdIndex
from leasekit_redis.intake import Intake, new_record
from leasekit_redis.maintenance import INTERVAL, Maintenance
from leasekit_redis.purging import Purging
from leasekit_redis.reading import Reading
from leasekit_redis.records import Cancelled, decode
from leasekit_redis.redriving import Redriving
from leasekit_redis.renewing import Renewing
from leasekit_redis.scripts import CANCEL, DROP
from leasekit_redis.waiting import Wakes

_LACKS = ("key", "tags", "requires", "prefers", "debounce", "dedupe_scope", "start_deadline")  # of the options of tasks
_CANCELLED = msgpack.Decoder(Cancelled)

P = ParamSpec("P")
S = TypeVar("S", bound=TaskSelection)


def connect(url: str, *, worker: str) -> "RedisBackend":
    """Return the backend for the Redis at this URL (see `leasekit_redis.address`). Nothing is opened yet.

    Raises `ConfigError` if the URL is wrong; the message never contains the URL, which may hold a password.
    """
    return RedisBackend(parse(url), worker=worker)


class RedisBackend:
    """Tasks in a Redis or Redis cluster, without a leasekit server: all protocols of `leasekit.backend`."""

    capabilities = Capabilities(max_batch=MAX_BATCH, max_claim=MAX_BATCH, dependencies=True)

    def __init__(self, address: Address, *, worker: str, chance: random.Random | None = None) -> None:
        self.retention = address.retention
        """Seconds for which ended tasks are kept."""
        self._worker = worker
        self._link = link = Link(address)
        self._clocks = clocks = Clocks(is_one=not address.is_cluster, stepped=self._prolong_leases)
        name = secrets.token_hex(8)
        self._wakes = Wakes(link, link.keys.channel(name), link.keys.cancels(worker), self._pass_on)
        self._register = register = IdIndex(link)
        self._dependencies = dependencies = Dependencies(link, register)
        self._chains = chains = Chains(link, register)
        self._intake = Intake(link, register, dependencies, chains)
        self._claims = Claims(link, clocks, self._wakes, give_back=self._give_back)
        self._maintenance = Maintenance(link, clocks, register, self._intake, dependencies, chains, name=name)
        self._renewing = Renewing(
            link,
            clocks,
            register,
            worker=worker,
            deliver=self._maintenance.deliver,
            dependencies=dependencies,
            chance=chance or random.SystemRandom(),
        )
        self._reading = Reading(link, register, chains)
        self._purging = Purging(link, register, dependencies, self._maintenance, self._reading)
        self._redriving = Redriving(link, register, self._reading, worker=worker)
        self._maintaining: asyncio.Task[None] | None = None
        self._errands: set[asyncio.Task[None]] = set()

    async def claim(self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str) -> Claimed:
        fields = {"worker": self._worker, "kinds": list(kinds), "limit": limit, "wait": wait, "claim_id": claim_id}
        asked = checked(ClaimRequest, fields)
        self._ensure_maintenance()
        claimed = await self._claims.claim(asked)
        if unnoted := self._register.not_noted(task.kind for task in claimed.tasks):
            self._start(self._register.note, unnoted)  # maintenance of a quiet kind is rare, and is needed soon now
        return claimed

    async def claim_name(self, task: NewTask, *, claim_id: str) -> Claimed:
        if self._link.is_one_server:
            (item,) = checked(ScheduleRequest, {"tasks": [task]}, lacks=_LACKS).tasks
            asked = ClaimRequest(worker=self._worker, kinds=[task.kind], limit=1, wait=0, claim_id=claim_id)
            self._ensure_maintenance()
            claimed = await self._claims.claim_name(asked, new_record(item, task.kind), soon=round(1000 * INTERVAL))
            if claimed is not None:
                return claimed
        (scheduled,) = await self.schedule([task])
        claimed = await self.claim([task.kind], limit=1, wait=0, claim_id=claim_id)
        return replace(claimed, status=scheduled.status)

    async def beat(self, beats: Sequence[Beat]) -> list[Verdict]:
        if not beats:
            return []
        items = checked(BeatsRequest, {"worker": self._worker, "beats": beats}).beats
        with bearing():
            return await self._renewing.beat(items)

    async def settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        if not settlements:
            return []
        items = checked(ResultsRequest, {"worker": self._worker, "results": settlements}, lacks=_LACKS).results
        with bearing():
            return await self._renewing.settle(items)

    async def schedule(self, tasks: Sequence[NewTask]) -> list[Scheduled]:
        """Accept tasks. The same id, or live dedupe key, makes no second task.

        When this returns, the tasks are as durable as anything in this Redis (see the package's docstring).
        """
        if not tasks:
            return []
        items = checked(ScheduleRequest, {"tasks": tasks}, lacks=_LACKS).tasks
        self._ensure_maintenance()
        return await self._intake.schedule(items)

    async def cancel(self, task_ids: Sequence[str]) -> list[Verdict]:
        if not task_ids:
            return []
        ids = checked(CancelRequest, {"ids": list(task_ids)}).ids
        kinds = await self._register.find(ids)
        verdicts = [Verdict(id=task_id, verdict="gone", reason="unknown") for task_id in ids]
        for kind, positions in by_kind(kinds):
            some = [ids[at] for at in positions]
            answer = await self._cancel_of_kind(kind, some)
            for at, verdict in zip(positions, decoding.cancelled(some, answer.words), strict=True):
                verdicts[at] = verdict
            await self._release(kind, answer.ending)
        return verdicts

    async def cancel_chain(self, task_id: str, *, cursor: str | None = None) -> ChainCancelled:
        asked = checked(ChainRequest, {"id": task_id} if cursor is None else {"id": task_id, "cursor": cursor})
        root = (await self._chains.roots([asked.id]))[asked.id]
        after = None if asked.cursor is None else int(asked.cursor)
        members = await self._chains.members(root, after=after, newest=False, limit=MOST)
        if after is None and members:
            await self._chains.mark(root)
            members = await self._chains.members(root, after=None, newest=False, limit=MOST)  # none is missed now
        verdicts = [verdict for part in await self._cancel_members(root, members) for verdict in part]
        is_last = len(members) < MOST
        return ChainCancelled(root=root, tasks=verdicts, cursor=None if is_last else str(members[-1].place))

    async def _cancel_members(self, root: str, members: Sequence[Member]) -> list[list[Verdict]]:
        """Cancel these tasks of a chain; return the verdicts on those that had not ended."""
        answers: list[list[Verdict]] = []
        ending: list[tuple[str, list[str]]] = []
        for kind, positions in by_kind([member.kind for member in members]):
            ids = [members[at].id for at in positions]
            answer = await self._cancel_of_kind(kind, ids, chain=root)
            verdicts = decoding.cancelled(ids, answer.words)
            answers.append([verdict for verdict in verdicts if verdict.verdict != "gone"])
            ending.append((kind, answer.ending))
        for kind, ended in ending:  # last: what waits for them is cancelled too, and not dropped
            await self._release(kind, ended)
        return answers

    async def _cancel_of_kind(self, kind: str, ids: Sequence[str], **options: str) -> Cancelled:
        argument = {"ids": ids, "channels": self._link.keys.cancels(""), **options, **self._clocks.known(kind)}
        answer: Cancelled = decode(await self._link.run_for(kind, CANCEL, argument), _CANCELLED)
        return answer

    async def _release(self, kind: str, ended: Sequence[str]) -> None:
        with contextlib.suppress(BackendError):  # maintenance repeats what fails here
            await self._dependencies.release(kind, ended)

    async def cancels(self, *, wait: float) -> list[str]:
        return await self._wakes.cancels(wait)

    async def redrive(self, task_ids: Sequence[str] = (), *, rate: int | None = None, **options: Any) -> Redriven:
        """Begin a new life of dead tasks, one script for each kind. A dry run only reads."""
        request = _selection(checked(RedriveRequest, {"ids": list(task_ids), **options}, lacks=_LACKS))
        self._ensure_maintenance()  # asks again for what dropped tasks wait for
        return await self._redriving.redrive(request)

    async def purge(self, task_ids: Sequence[str] = (), **options: Any) -> Purged:
        return await self._purging.purge(_selection(checked(PurgeRequest, {"ids": task_ids, **options}, lacks=_LACKS)))

    async def vacuum(self) -> Vacuumed:
        """Raise `Refused`: there is no file."""
        raise Refused("Redis keeps tasks in memory, and uses the room of removed tasks again: there is no file")

    async def discard(self, kind: str, task_ids: Sequence[str]) -> int:
        """Delete tasks that were set aside as damaged, and free their ids; return how many of the given ones were."""
        check_limit("task_ids", len(task_ids))
        scores = await self._link.command("ZMSCORE", self._link.keys.one(kind, "damaged"), *task_ids)
        ids = [task_id for task_id, score in zip(task_ids, scores, strict=True) if score is not None]
        if ids:
            await self._register.forget(kind, ids)
            await self._link.run_for(kind, DROP, {"ids": ids, "retention": 0, "is_damaged": True})
        return len(ids)

    async def maintain(self) -> None:
        """Run now the maintenance that every client runs at intervals (`leasekit_redis.maintenance`)."""
        await self._maintenance.once()

    async def get(self, task_id: str) -> TaskInfo | None:
        try:
            checked(CancelRequest, {"ids": [task_id]})
        except Refused:  # no task can have such an id
            return None
        return await self._reading.get(task_id)

    async def ended_on(self, kind: str, day: date, *, status: Status | None = None) -> list[TaskInfo]:
        """Return the kept tasks of a kind that ended on a day (UTC), in the order in which they ended."""
        return await self._reading.ended_on(kind, day, status)

    async def stats(self) -> Stats:
        """Count the tasks of each kind by status (`kinds`), and the damaged tasks of each kind (`damaged`)."""
        return await self._reading.stats()

    async def workers(self) -> list[WorkerInfo]:
        return await self._reading.workers()

    async def aclose(self) -> None:
        await self._wakes.aclose()  # first, because its messages start errands
        maintaining, self._maintaining = self._maintaining, None
        await cancel_all([*self._errands, *([maintaining] if maintaining else [])])
        await self._link.aclose()

    def _ensure_maintenance(self) -> None:
        if self._maintaining is None or self._maintaining.done():
            self._maintaining = asyncio.get_running_loop().create_task(self._maintenance.run())

    def _pass_on(self, meta_key: str) -> None:
        """Wake another claim for a ready task, because the claim that was woken for it has ended."""
        kind = self._claims.kind_of(meta_key)
        if kind is not None:
            self._start(self._maintenance.maintain, kind)  # if it fails, waiting claims look again by themselves

    def _prolong_leases(self, kind: str) -> None:
        """Prolong the leases of a kind before a client that does not know of the clock step expires them."""
        self._start(self._maintenance.maintain, kind)

    def _give_back(self, kind: str, claim_id: str) -> None:
        """Release the tasks that a claim was granted in an answer that was lost."""
        self._start(self._recall_and_release, kind, claim_id)  # if it fails, the leases expire by themselves

    async def _recall_and_release(self, kind: str, claim_id: str) -> None:
        tasks = await self._claims.recall(self._worker, kind, claim_id)
        await self.settle([Settlement(id=task.id, token=task.token, outcome="release") for task in tasks])

    def _start(self, work: Callable[P, Awaitable[object]], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run `work` in the background; a `BackendError` is ignored."""

        async def run() -> None:
            with contextlib.suppress(BackendError):
                await work(*args, **kwargs)

        errand = asyncio.get_running_loop().create_task(run())
        self._errands.add(errand)
        errand.add_done_callback(self._errands.discard)

    async def list_tasks(
        self,
        *,
        kind: str | None = None,
        newest: bool = False,
        cursor: str | None = None,
        limit: int = 100,
        root: str | None = None,
        **filters: str | None,
    ) -> Page:
        check_limit("limit", limit)
        wanted = {name: str(value) for name, value in filters.items() if value is not None}
        if root is not None:
            return await self._reading.chain(root, wanted, kind=kind, newest=newest, cursor=cursor, limit=limit)
        return await self._reading.page(wanted, kind=kind, newest=newest, cursor=cursor, limit=limit)

    async def list_dead(self, *, cursor: str | None = None, limit: int = 100, **wanted: Any) -> Page:
        check_limit("limit", limit)
        selection = _selection(checked(TaskSelection, dead_ones(wanted), lacks=_LACKS))
        filters = {name: str(value) for name in ("status", "collection") if (value := getattr(selection, name))}
        return await self._reading.page(filters, kind=selection.kind, cursor=cursor, limit=limit, selection=selection)


def _selection(wanted: S) -> S:
    """Return the selection. Raises `Refused` if it has a key, because Redis keeps no keys of tasks."""
    if wanted.key is not None:
        raise Refused("Redis keeps no keys of tasks, and cannot select by one: use `collection`, or other filters")
    return wanted
