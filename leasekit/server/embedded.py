"""A backend over an engine in the same process, without HTTP.

Requests are checked as HTTP requests are, by the same types: the same shapes, the same bounds, the same errors. Users'
values are returned decoded.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from leasekit import wire
from leasekit._lifecycle.validation import check_limit, checked
from leasekit.backend import Capabilities, dead_ones, unknown_task
from leasekit.errors import ProtocolError, Refused, Unavailable
from leasekit.periodic import PeriodicInfo, PeriodicTask, PeriodicTaskItem
from leasekit.server.engine import Engine
from leasekit.server.roles import gates, periodic
from leasekit.server.roles import tokens as access_tokens
from leasekit.server.roles.audit import Note, names_of, the_one
from leasekit.task import (
    Beat,
    ChainCancelled,
    Claimed,
    Ended,
    GateInfo,
    KindInfo,
    KindSettings,
    Matched,
    NewTask,
    NodeInfo,
    Page,
    Purged,
    Redriven,
    Rescheduled,
    Scheduled,
    Settlement,
    Stats,
    Task,
    TaskInfo,
    Ticket,
    Vacuumed,
    Verdict,
    WorkerInfo,
)
from leasekit.tokens import AuditPage, TokenInfo
from leasekit.wire import decode_value

T = TypeVar("T")

_NO_LABELS: Mapping[str, str] = {}


class DirectBackend:
    """A backend with all protocols of `leasekit.backend`, over the engine that a subclass returns from `_engine`."""

    capabilities = Capabilities(
        max_batch=wire.MAX_BATCH,
        max_claim=wire.MAX_BATCH,
        dependencies=True,
        keys=True,
        debounce=True,
        start_deadlines=True,
        tags=True,
        labels=True,
    )

    def __init__(self, *, worker: str) -> None:
        self.worker = worker
        self._since: float | None = None  # when the first claim was made, by the engine's time

    async def _engine(self) -> Engine:
        raise NotImplementedError

    def _noting(self, act: str, *, target: str | None = None, fields: Struct | None = None) -> dict[str, Any]:
        """Return the argument by which the engine writes an act of an operator into its audit log, if it has one."""
        return {}

    async def claim(
        self,
        kinds: Sequence[str],
        *,
        limit: int,
        wait: float,
        claim_id: str,
        labels: Mapping[str, str] = _NO_LABELS,
    ) -> Claimed:
        fields = {"worker": self.worker, "kinds": kinds, "limit": limit, "wait": wait, "claim_id": claim_id}
        request = checked(wire.ClaimRequest, {**fields, "labels": labels})
        return await self._claim(request)

    async def claim_tickets(
        self, kinds: Sequence[str], tickets: Sequence[Ticket], *, limit: int, claim_id: str
    ) -> Claimed:
        fields = {"worker": self.worker, "kinds": kinds, "limit": limit, "claim_id": claim_id, "tickets": tickets}
        request = checked(wire.ClaimRequest, fields)
        return await self._claim(request)

    async def _claim(self, request: wire.ClaimRequest) -> Claimed:
        engine = await self._engine()
        if self._since is None:
            self._since = engine.clock.peek()
        claimed = await engine.claim(
            worker=self.worker,
            kinds=request.kinds,
            limit=request.limit,
            wait=request.wait,
            claim_id=request.claim_id,
            tickets=request.tickets,
            labels=request.labels,
            since=self._since,
        )
        return replace(claimed, tasks=[plain(task) for task in claimed.tasks])

    async def beat(self, beats: Sequence[Beat]) -> list[Verdict]:
        if not beats:
            return []
        items = checked(wire.BeatsRequest, {"worker": self.worker, "beats": beats}).beats
        return await (await self._engine()).heartbeat(self.worker, items)

    async def settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        if not settlements:
            return []
        request = {"worker": self.worker, "results": settlements}
        items = checked(wire.ResultsRequest, request).results
        return await (await self._engine()).results(self.worker, items)

    async def schedule(self, tasks: Sequence[NewTask]) -> list[Scheduled]:
        if not tasks:
            return []
        items = checked(wire.ScheduleRequest, {"tasks": tasks}).tasks
        return await (await self._engine()).schedule(items)

    async def get(self, task_id: str) -> TaskInfo | None:
        checked(wire.OneTask, {"task_id": task_id})
        info = await (await self._engine()).queries.get(task_id)
        return None if info is None else plain_info(info)

    async def cancel(self, task_ids: Sequence[str]) -> list[Verdict]:
        if not task_ids:
            return []
        ids = checked(wire.CancelRequest, {"ids": task_ids}).ids
        return await (await self._engine()).cancel(ids)

    async def cancels(self, *, wait: float) -> list[str]:
        return await (await self._engine()).cancels(worker=self.worker, wait=wait)

    async def redrive(self, task_ids: Sequence[str] = (), *, rate: int | None = None, **options: Any) -> Redriven:
        request = checked(wire.RedriveRequest, {"ids": task_ids, "worker": self.worker, **options})
        noting = self._noting("tasks.redrive", target=request.kind or the_one(request.ids), fields=request)
        return await (await self._engine()).operations.redrive(request, **noting)

    async def list_dead(self, *, cursor: str | None = None, limit: int = 100, **wanted: Any) -> Page:
        return await self.list_tasks(cursor=cursor, limit=limit, **dead_ones(wanted))

    async def stats(self) -> Stats:
        return await (await self._engine()).queries.stats()

    async def workers(self) -> list[WorkerInfo]:
        return await (await self._engine()).fleet.workers()

    async def drain_worker(self, worker: str) -> WorkerInfo:
        checked(wire.ChangedWorker, {"name": worker})
        noting = self._noting("worker.drain", target=worker)
        info = await (await self._engine()).operations.drain(worker, by=self.worker, **noting)
        if info is None:
            raise Refused(f"there is no worker {worker!r}: none of this name holds tasks, or has called lately")
        return info

    async def undrain_worker(self, worker: str) -> None:
        checked(wire.ChangedWorker, {"name": worker})
        noting = self._noting("worker.undrain", target=worker)
        await (await self._engine()).operations.undrain(worker, by=self.worker, **noting)

    async def tell_window(self, size: int, waiting: int) -> None:
        (await self._engine()).fleet.note_window(self.worker, wire.WorkerWindow(size=size, waiting=waiting))

    async def nodes(self) -> list[NodeInfo]:
        return await (await self._engine()).fleet.nodes()

    async def kinds(self) -> list[KindInfo]:
        return await (await self._engine()).queries.kinds()

    async def kind(self, kind: str) -> KindInfo | None:
        checked(wire.OneKind, {"kind": kind})
        return next((info for info in await self.kinds() if info.kind == kind), None)

    async def set_kind(
        self, kind: str, settings: KindSettings, *, is_declared: bool = False, was: KindSettings | None = None
    ) -> KindInfo:
        checked(wire.OneKind, {"kind": kind})
        given = checked(wire.KindRequest, wire.given(settings))
        noting = self._noting("kind.declare" if is_declared else "kind.set", target=kind, fields=given)
        info = await (await self._engine()).operations.set_kind(
            kind, given, by=self.worker, is_declared=is_declared, was=was, **noting
        )
        assert info is not None  # noqa: S101 - it was just set
        return info

    async def delete_kind(self, kind: str, *, was: KindSettings | None = None) -> None:
        checked(wire.OneKind, {"kind": kind})
        await (await self._engine()).operations.set_kind(
            kind, None, by=self.worker, was=was, **self._noting("kind.delete", target=kind)
        )

    async def list_periodic(self) -> list[PeriodicInfo]:
        engine, found = await self._engine(), list[PeriodicInfo]()
        while page := await engine.queries.periodics(after=found[-1].name if found else ""):
            found += page
        return [_plain_periodic(info) for info in found]

    async def get_periodic(self, name: str) -> PeriodicInfo | None:
        checked(wire.OnePeriodic, {"name": name})
        info = await (await self._engine()).queries.periodic(name)
        return None if info is None else _plain_periodic(info)

    async def set_periodic(self, name: str, task: PeriodicTask, *, is_declared: bool = False) -> PeriodicInfo:
        item = checked(PeriodicTaskItem, wire.given(task))
        act = "periodic.declare" if is_declared else "periodic.set"
        return _plain_periodic(
            await self._change_periodic(periodic.Put(name, item, self.worker, is_declared), act, item)
        )

    async def pause_periodic(self, name: str, *, is_paused: bool = True) -> PeriodicInfo:
        act = "periodic.pause" if is_paused else "periodic.resume"
        return _plain_periodic(await self._change_periodic(periodic.Pause(name, is_paused, self.worker), act))

    async def trigger_periodic(self, name: str, *, at: datetime) -> Scheduled:
        asked = checked(wire.TriggerRequest, {"at": at})
        change = periodic.Trigger(name, None if asked.at is None else asked.at.timestamp(), self.worker)
        scheduled: Scheduled = await self._change_periodic(change, "periodic.trigger")
        return scheduled

    async def delete_periodic(self, name: str) -> None:
        checked(wire.OnePeriodic, {"name": name})
        noting = self._noting("periodic.delete", target=name)
        await (await self._engine()).operations.change_periodic(periodic.Remove(name, self.worker), **noting)

    async def _change_periodic(self, change: periodic.Change, act: str, fields: Struct | None = None) -> Any:
        checked(wire.OnePeriodic, {"name": change.name})
        noting = self._noting(act, target=change.name, fields=fields)
        answer = await (await self._engine()).operations.change_periodic(change, **noting)
        if answer is None:
            raise Refused(f"there is no periodic task {change.name!r}")
        return answer

    async def gates(self) -> list[GateInfo]:
        return await (await self._engine()).queries.gates()

    async def set_gate(self, *, kind: str | None = None, collection: str | None = None, **wanted: Any) -> GateInfo:
        request = checked(wire.GateRequest, wanted)
        gated = gates.Gated.one_of(kind, collection)
        noting = self._noting(f"{gated.scope}.{request.mode}", target=gated.name, fields=request)
        info = await (await self._engine()).operations.set_gate(gated.closed(request, self.worker), **noting)
        assert info is not None  # noqa: S101 - it was just closed
        return info

    async def open_gate(self, *, kind: str | None = None, collection: str | None = None) -> None:
        gated = gates.Gated.one_of(kind, collection)
        noting = self._noting(f"{gated.scope}.open", target=gated.name)
        await (await self._engine()).operations.set_gate(gated.opened(self.worker), **noting)

    async def cancel_chain(self, task_id: str, *, cursor: str | None = None) -> ChainCancelled:
        request = checked(wire.ChainRequest, {"id": task_id, "cursor": cursor})
        return await (await self._engine()).cancel_chain(request)

    async def reschedule(self, task_id: str, **wanted: Any) -> Rescheduled:
        checked(wire.OneTask, {"task_id": task_id})
        request = checked(wire.RescheduleRequest, wanted)
        answer = await (await self._engine()).operations.reschedule(task_id, request, by=self.worker)
        if answer is None:
            raise Refused(unknown_task(task_id))
        return answer

    async def cancel_matching(self, **wanted: Any) -> Matched:
        request = checked(wire.CancelMatchingRequest, wanted)
        noting = self._noting("tasks.cancel-matching", target=request.kind, fields=request)
        return await (await self._engine()).operations.cancel_matching(request, **noting)

    async def reschedule_matching(self, **wanted: Any) -> Matched:
        request = checked(wire.RescheduleMatchingRequest, wanted)
        noting = self._noting("tasks.reschedule-matching", target=request.kind, fields=request)
        return await (await self._engine()).operations.reschedule_matching(request, by=self.worker, **noting)

    async def purge(self, task_ids: Sequence[str] = (), **options: Any) -> Purged:
        request = checked(wire.PurgeRequest, {"ids": task_ids, **options})
        noting = self._noting("tasks.purge", target=request.kind, fields=request)
        return await (await self._engine()).operations.purge(request, **noting)

    async def vacuum(self) -> Vacuumed:
        return await (await self._engine()).operations.vacuum(**self._noting("store.vacuum"))

    async def list_tasks(self, *, limit: int = 100, **filters: Any) -> Page:
        check_limit("limit", limit)
        wanted = {name: value for name, value in filters.items() if value is not None}
        tags = {"tag": wanted["tags"]} if "tags" in wanted else {}
        checked(wire.TaskFilters, {name: value for name, value in wanted.items() if name != "tags"} | tags)
        page = await (await self._engine()).queries.list_tasks(limit=limit, **wanted)
        return Page(tasks=[plain_info(info) for info in page.tasks], cursor=page.cursor)


class EmbeddedBackend(DirectBackend):
    """A backend over an engine that the first call opens, in the event loop of that call.

    The engine is opened and closed in tasks of its own, which go on if a caller is cancelled: another call may need the
    engine, and one that is neither open nor closed would keep its store locked for as long as this process lives.
    """

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[Engine]], *, worker: str) -> None:
        super().__init__(worker=worker)
        self._make = make
        self._opening = asyncio.Lock()
        self._opened: tuple[AbstractAsyncContextManager[Engine], Engine] | None = None
        self._is_closed = False
        self._changing: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        await self._engine()

    async def aclose(self) -> None:
        self._is_closed = True
        await self.release()

    async def release(self) -> None:
        """Close the engine. A later call opens another, unless this backend is closed."""
        await self._whole(self._closed_engine())

    def _noting(self, act: str, *, target: str | None = None, fields: Struct | None = None) -> dict[str, Any]:
        names = [] if fields is None else names_of(fields)
        return {"note": Note(act, target=target, fields=names, worker=self.worker)}

    async def tokens(self) -> list[TokenInfo]:
        """List the access tokens: see `TokenDirectory`, like all that follow."""
        return await (await self._engine()).queries.list_tokens()

    async def token(self, token: str) -> TokenInfo | None:
        """Return an access token."""
        checked(wire.OneToken, {"token": token})
        return await (await self._engine()).queries.get_token(token)

    async def create_token(self, *, token_id: str, **wanted: Any) -> TokenInfo:
        """Make an access token."""
        order = checked(wire.TokenRequest, {"id": token_id, **wanted})
        noting = self._noting("token.create", target=order.name, fields=order)
        info = await (await self._engine()).operations.change_token(access_tokens.Create(order), **noting)
        assert info is not None  # noqa: S101 - it was just made
        return info

    async def revoke_token(self, token: str) -> TokenInfo:
        """End an access token."""
        return await self._change_token(access_tokens.Revoke(token), "token.revoke")

    async def rotate_token(self, token: str, *, digest: str, overlap: float = 0.0) -> TokenInfo:
        """Give an access token another secret."""
        order = checked(wire.RotateRequest, {"digest": digest, "overlap": overlap})
        return await self._change_token(access_tokens.Rotate(token, order), "token.rotate", order)

    async def _change_token(
        self, change: access_tokens.Revoke | access_tokens.Rotate, act: str, fields: Struct | None = None
    ) -> TokenInfo:
        checked(wire.OneToken, {"token": change.token})
        noting = self._noting(act, target=change.token, fields=fields)
        if (info := await (await self._engine()).operations.change_token(change, **noting)) is None:
            raise Refused(f"there is no access token {change.token!r}: name one that `tokens` lists")
        return info

    async def audit(self, *, cursor: str | None = None, limit: int = 100) -> AuditPage:
        """Return a page of the log of what operators did."""
        check_limit("limit", limit)
        return await (await self._engine()).queries.audit(cursor=cursor, limit=limit)

    async def ended(self, task_ids: Sequence[str], *, wait: float) -> Ended:
        """Wait for the ends of tasks: see `EndSource`."""
        ids = checked(wire.EndedRequest, {"ids": task_ids, "wait": wait}).ids
        found = await (await self._engine()).queries.ended(ids, wait=wait)
        return replace(found, tasks=[plain_info(info) for info in found.tasks])

    async def _engine(self) -> Engine:
        if self._opened is not None:
            return self._opened[1]
        return await self._whole(self._opened_engine())

    async def _opened_engine(self) -> Engine:
        async with self._opening:
            if self._is_closed:
                raise Unavailable("this backend is closed: make a new one")
            if self._opened is None:
                manager = self._make()
                self._opened = (manager, await manager.__aenter__())
            return self._opened[1]

    async def _closed_engine(self) -> None:
        async with self._opening:
            opened, self._opened = self._opened, None
            if opened is not None:
                await opened[0].__aexit__(None, None, None)

    async def _whole(self, change: Coroutine[Any, Any, T]) -> T:
        """Do all of a change, also if this call is cancelled."""
        task = asyncio.create_task(change)
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # retrieved, or asyncio would log it
        return await asyncio.shield(task)


def plain(task: Task) -> Task:
    """Return a task with users' values decoded, so that it shares no object with the service."""
    return replace(task, payload=_decoded_value(task.payload), progress=_decoded_value(task.progress))


def plain_info(info: TaskInfo) -> TaskInfo:
    """Return a task's information with users' values decoded from JSON."""
    return replace(
        info,
        payload=_decoded_value(info.payload),
        progress=_decoded_value(info.progress),
        result=_decoded_value(info.result),
        error=_decoded_value(info.error),
        history=[
            replace(entry, result=_decoded_value(entry.result), error=_decoded_value(entry.error))
            for entry in info.history
        ],
    )


def _decoded_value(value: Any) -> Any:
    try:
        return decode_value(value) if isinstance(value, Raw) else value
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a value in the store is not JSON: {error}") from None


def _plain_periodic(info: PeriodicInfo) -> PeriodicInfo:
    """Return a periodic task with its payload decoded."""
    return msgspec.json.decode(msgspec.json.encode(info), type=PeriodicInfo)
