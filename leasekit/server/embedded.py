"""A backend over an engine in the same process, without HTTP.

Requests are checked as HTTP requests are, by the same types: the same shapes, the same bounds, the same errors. Users'
values are returned decoded.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from leasekit import wire
from leasekit._lifecycle.validation import check_limit, checked
from leasekit.backend import Capabilities
from leasekit.errors import ProtocolError, Unavailable
from leasekit.server.engine import Engine
from leasekit.server.roles import gates
from leasekit.task import (
    Beat,
    ChainCancelled,
    Claimed,
    GateInfo,
    KindInfo,
    KindSettings,
    NewTask,
    NodeInfo,
    Page,
    Purged,
    Redriven,
    Scheduled,
    Settlement,
    Stats,
    Task,
    TaskInfo,
    Vacuumed,
    Verdict,
    WorkerInfo,
)


class DirectBackend:
    """A backend with all protocols of `leasekit.backend`, over the engine that a subclass returns from `_engine`."""

    capabilities = Capabilities(max_batch=wire.MAX_BATCH, max_claim=wire.MAX_BATCH, dependencies=True, keys=True)

    def __init__(self, *, worker: str) -> None:
        self.worker = worker

    async def _engine(self) -> Engine:
        raise NotImplementedError

    async def claim(self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str) -> Claimed:
        fields = {"worker": self.worker, "kinds": kinds, "limit": limit, "wait": wait, "claim_id": claim_id}
        request = checked(wire.ClaimRequest, fields)
        engine = await self._engine()
        claimed = await engine.claim(
            worker=self.worker, kinds=request.kinds, limit=request.limit, wait=request.wait, claim_id=request.claim_id
        )
        return Claimed(tasks=[plain(task) for task in claimed.tasks], waited=claimed.waited)

    async def beat(self, beats: Sequence[Beat]) -> list[Verdict]:
        if not beats:
            return []
        items = checked(wire.BeatsRequest, {"worker": self.worker, "beats": beats}).beats
        return await (await self._engine()).heartbeat(self.worker, items)

    async def settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        if not settlements:
            return []
        request = {"worker": self.worker, "results": settlements}
        items = checked(wire.ResultsRequest, request, dependencies=True).results
        return await (await self._engine()).results(self.worker, items)

    async def schedule(self, tasks: Sequence[NewTask]) -> list[Scheduled]:
        if not tasks:
            return []
        items = checked(wire.ScheduleRequest, {"tasks": tasks}, dependencies=True).tasks
        return await (await self._engine()).schedule(items)

    async def get(self, task_id: str) -> TaskInfo | None:
        checked(wire.OneTask, {"task_id": task_id})
        info = await (await self._engine()).get(task_id)
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
        return await (await self._engine()).redrive(request)

    async def stats(self) -> Stats:
        return await (await self._engine()).stats()

    async def workers(self) -> list[WorkerInfo]:
        return await (await self._engine()).workers()

    async def nodes(self) -> list[NodeInfo]:
        return await (await self._engine()).nodes()

    async def kinds(self) -> list[KindInfo]:
        return await (await self._engine()).kinds()

    async def kind(self, kind: str) -> KindInfo | None:
        checked(wire.OneKind, {"kind": kind})
        return next((info for info in await self.kinds() if info.kind == kind), None)

    async def set_kind(self, kind: str, settings: KindSettings) -> KindInfo:
        checked(wire.OneKind, {"kind": kind})
        given = checked(wire.KindRequest, wire.given(settings))
        info = await (await self._engine()).set_kind(kind, given, by=self.worker)
        assert info is not None  # noqa: S101 - it was just set
        return info

    async def delete_kind(self, kind: str) -> None:
        checked(wire.OneKind, {"kind": kind})
        await (await self._engine()).set_kind(kind, None, by=self.worker)

    async def gates(self) -> list[GateInfo]:
        return await (await self._engine()).gates()

    async def set_gate(self, *, kind: str | None = None, collection: str | None = None, **wanted: Any) -> GateInfo:
        request = checked(wire.GateRequest, wanted)
        info = await (await self._engine()).set_gate(gates.Gated.one_of(kind, collection).closed(request, self.worker))
        assert info is not None  # noqa: S101 - it was just closed
        return info

    async def open_gate(self, *, kind: str | None = None, collection: str | None = None) -> None:
        await (await self._engine()).set_gate(gates.Gated.one_of(kind, collection).opened(self.worker))

    async def cancel_chain(self, task_id: str, *, cursor: str | None = None) -> ChainCancelled:
        request = checked(wire.ChainRequest, {"id": task_id, "cursor": cursor})
        return await (await self._engine()).cancel_chain(request)

    async def purge(self, **options: Any) -> Purged:
        return await (await self._engine()).purge(checked(wire.PurgeRequest, options))

    async def vacuum(self) -> Vacuumed:
        return await (await self._engine()).vacuum()

    async def list_tasks(self, *, limit: int = 100, **filters: Any) -> Page:
        check_limit("limit", limit)
        checked(wire.TaskFilters, {name: value for name, value in filters.items() if value is not None})
        page = await (await self._engine()).list_tasks(limit=limit, **filters)
        return Page(tasks=[plain_info(info) for info in page.tasks], cursor=page.cursor)


class EmbeddedBackend(DirectBackend):
    """A backend over an engine that the first call opens, in the event loop of that call."""

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[Engine]], *, worker: str) -> None:
        super().__init__(worker=worker)
        self._make = make
        self._opening = asyncio.Lock()
        self._opened: tuple[AbstractAsyncContextManager[Engine], Engine] | None = None
        self._is_closed = False

    async def open(self) -> None:
        await self._engine()

    async def aclose(self) -> None:
        self._is_closed = True
        await self.release()

    async def release(self) -> None:
        """Close the engine. A later call opens another, unless this backend is closed."""
        async with self._opening:
            opened, self._opened = self._opened, None
            if opened is not None:
                await opened[0].__aexit__(None, None, None)

    async def _engine(self) -> Engine:
        if self._opened is not None:
            return self._opened[1]
        async with self._opening:
            if self._is_closed:
                raise Unavailable("this backend is closed: make a new one")
            if self._opened is None:
                manager = self._make()
                self._opened = (manager, await manager.__aenter__())
            return self._opened[1]


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
        return msgspec.json.decode(value) if isinstance(value, Raw) else value
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a value in the store is not JSON: {error}") from None
