"""The door for those in the same process: a backend over an engine, without HTTP between.

What the wire would refuse is refused here too, by going through its types: the same shapes, the same bounds, the same
errors. Users' values leave as plain values.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from leasekit.backend import Traits
from leasekit.errors import ProtocolError, Refused, Unavailable
from leasekit.server.bounds import check_beats, check_new_tasks, check_settlements, refusal
from leasekit.task import Beat, Claimed, HistoryEntry, NewTask, Page, Scheduled, Settlement, Status, TaskInfo, Verdict
from leasekit.wire import (
    MAX_BATCH,
    BeatsRequest,
    CancelRequest,
    ClaimRequest,
    ResultsRequest,
    ScheduleRequest,
)

if TYPE_CHECKING:
    from leasekit.server.engine import Engine

__all__ = ["EmbeddedBackend"]

_R = TypeVar("_R")


class EmbeddedBackend:
    """A `Backend`, `Scheduler` and `Roster` over an engine that is opened by the first call, in its event loop."""

    traits = Traits(max_batch=MAX_BATCH, max_claim=MAX_BATCH)

    def __init__(self, make: "Callable[[], AbstractAsyncContextManager[Engine]]", *, worker: str) -> None:
        self._make = make
        self._worker = worker
        self._opening = asyncio.Lock()
        self._opened: tuple[AbstractAsyncContextManager[Engine], Engine] | None = None
        self._is_closed = False

    async def claim(self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str) -> Claimed:
        """Take up to `limit` tasks of these kinds; wait up to `wait` seconds for the first."""
        asked = _through(
            ClaimRequest,
            {"worker": self._worker, "kinds": kinds, "limit": limit, "wait": wait, "claim_id": claim_id},
        )
        engine = await self._engine()
        claimed = await engine.claim(
            worker=self._worker, kinds=asked.kinds, limit=asked.limit, wait=asked.wait, claim_id=asked.claim_id
        )
        tasks = [replace(task, payload=_plain(task.payload), progress=_plain(task.progress)) for task in claimed.tasks]
        return Claimed(tasks=tasks, waited=claimed.waited)

    async def beat(self, beats: Sequence[Beat]) -> list[Verdict]:
        """Renew leases: `renewed` or `gone` for each, in order."""
        if not beats:
            return []
        items = _through(BeatsRequest, {"worker": self._worker, "beats": beats}).beats
        check_beats(items)
        return await (await self._engine()).heartbeat(self._worker, items)

    async def settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        """End leases: `settled` or `gone` for each, in order."""
        if not settlements:
            return []
        items = _through(ResultsRequest, {"worker": self._worker, "results": settlements}).results
        check_settlements(items)
        return await (await self._engine()).results(self._worker, items)

    async def schedule(self, tasks: Sequence[NewTask]) -> list[Scheduled]:
        """Accept tasks: when this returns they are durable. The same id, or live dedupe key, makes no second task."""
        if not tasks:
            return []
        items = _through(ScheduleRequest, {"tasks": tasks}).tasks
        check_new_tasks(items)
        return await (await self._engine()).schedule(items)

    async def get(self, task_id: str) -> TaskInfo | None:
        """Everything about one task, None where there is none of that id."""
        info = await (await self._engine()).get(task_id)
        return None if info is None else _decoded(info)

    async def cancel(self, task_ids: Sequence[str]) -> list[Verdict]:
        """Cancel: `cancelled` where it waits, `ordered` where it runs, `gone` where it has ended or is unknown."""
        if not task_ids:
            return []
        ids = _through(CancelRequest, {"ids": task_ids}).ids
        return await (await self._engine()).cancel(ids)

    async def stats(self) -> dict[str, Any]:
        """How many tasks of each kind are in which status: `{"kinds": {kind: {status: count}}}`."""
        return await (await self._engine()).stats()

    async def workers(self) -> list[dict[str, Any]]:
        """Workers that hold leases, or were heard of lately: `name`, `last_seen` (RFC 3339, or None), `running`."""
        return await (await self._engine()).workers()

    async def aclose(self) -> None:
        """Close the engine. Leases are not touched."""
        async with self._opening:
            self._is_closed = True
            opened, self._opened = self._opened, None
            if opened is not None:
                await opened[0].__aexit__(None, None, None)

    async def _engine(self) -> "Engine":
        if self._opened is not None:
            return self._opened[1]
        async with self._opening:
            if self._is_closed:
                raise Unavailable("this backend was closed")
            if self._opened is None:
                manager = self._make()
                self._opened = (manager, await manager.__aenter__())
            return self._opened[1]

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
        if not 1 <= limit <= MAX_BATCH:
            detail = f"is not between 1 and {MAX_BATCH}"
            raise Refused(f"limit {detail}", errors=[{"field": "limit", "detail": detail}])
        engine = await self._engine()
        page = await engine.list(
            kind=kind, status=status, collection=collection, worker=worker, cursor=cursor, limit=limit
        )
        return Page(tasks=[_decoded(info) for info in page.tasks], cursor=page.cursor)


def _through(request: type[_R], body: Mapping[str, Any]) -> _R:
    """The request as the server would read it from the wire: checked, and users' values as bytes."""
    try:
        return msgspec.json.decode(msgspec.json.encode(body), type=request)
    except msgspec.ValidationError as error:
        raise refusal(error) from None
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise _unspeakable(body, error) from None


def _unspeakable(body: Mapping[str, Any], error: Exception) -> Refused:
    """Which item is it that cannot be written as JSON?"""
    for field, items in body.items():
        if type(items) not in (list, tuple):
            continue
        for position, item in enumerate(items):
            try:
                msgspec.json.encode(item)
            except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as own:
                detail = f"is no JSON: {own}"
                return Refused(
                    f"item {position} {detail}", errors=[{"item": position, "field": field, "detail": detail}]
                )
    return Refused(f"the request is no JSON: {error}", errors=[{"detail": f"is no JSON: {error}"}])


def _decoded(info: TaskInfo) -> TaskInfo:
    return replace(
        info,
        payload=_plain(info.payload),
        progress=_plain(info.progress),
        result=_plain(info.result),
        error=_plain(info.error),
        history=[_decoded_entry(entry) for entry in info.history],
    )


def _decoded_entry(entry: HistoryEntry) -> HistoryEntry:
    return replace(entry, result=_plain(entry.result), error=_plain(entry.error))


def _plain(value: Any) -> Any:
    try:
        return msgspec.json.decode(value) if isinstance(value, Raw) else value
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"what the store keeps makes no sense: {error}") from None
