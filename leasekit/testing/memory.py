"""`memory://`: a lease service in this process, for tests.

`MemoryBackend` is one connection to a `MemoryService`. What passes it has been JSON, within the bounds of
`leasekit.wire`, so that it refuses what a service across a network would.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, Raw, Struct, structs

from leasekit.backend import Traits
from leasekit.errors import ConfigError, Refused
from leasekit.task import Beat, Claimed, NewTask, Page, Scheduled, Settlement, Status, TaskInfo, Verdict
from leasekit.testing.service import MemoryService
from leasekit.wire import (
    MAX_BATCH,
    MAX_ERROR,
    MAX_PAYLOAD,
    MAX_PROGRESS,
    MAX_THEN,
    BeatsRequest,
    CancelRequest,
    ClaimRequest,
    NewTaskItem,
    ResultsRequest,
    ScheduleRequest,
    SettlementItem,
    structural_fault,
)

__all__ = ["MemoryBackend", "MemoryService", "connect"]

_shared: dict[str, MemoryService] = {}


def connect(url: str, *, worker: str) -> "MemoryBackend":
    """Open `memory://`, a service of this connection's own, or `memory://name`, one for all who say that name here.

    Raises `ConfigError` where the URL says more than a name.
    """
    parts = urlsplit(url)
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError("a memory URL is memory:// or memory://name: nothing may follow the name")
    name = parts.netloc
    # setdefault is atomic: two threads that open one name at once get one service.
    return MemoryBackend(_shared.setdefault(name, MemoryService()) if name else MemoryService(), worker=worker)


class MemoryBackend:
    """One worker's connection to a `MemoryService`: a `Backend` and a `Scheduler`."""

    traits = Traits(max_batch=MAX_BATCH, max_claim=MAX_BATCH)

    def __init__(self, service: MemoryService, *, worker: str) -> None:
        self.service = service
        self.worker = worker

    async def claim(self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str) -> Claimed:
        fields = {"worker": self.worker, "kinds": kinds, "limit": limit, "wait": wait, "claim_id": claim_id}
        return await self.service.claim(_checked(ClaimRequest, fields))

    async def beat(self, beats: Sequence[Beat]) -> list[Verdict]:
        if not beats:
            return []
        return self.service.beat(_checked(BeatsRequest, {"worker": self.worker, "beats": beats}).beats)

    async def settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        if not settlements:
            return []
        return self.service.settle(_checked(ResultsRequest, {"worker": self.worker, "results": settlements}).results)

    async def schedule(self, tasks: Sequence[NewTask]) -> list[Scheduled]:
        if not tasks:
            return []
        return self.service.schedule(_checked(ScheduleRequest, {"tasks": tasks}).tasks)

    async def cancel(self, task_ids: Sequence[str]) -> list[Verdict]:
        if not task_ids:
            return []
        return self.service.cancel(_checked(CancelRequest, {"ids": task_ids}).ids)

    async def get(self, task_id: str) -> TaskInfo | None:
        return self.service.get(task_id)

    async def stats(self) -> dict[str, Any]:
        return self.service.stats()

    def steal(self, task_id: str, token: str) -> None:
        """Have this lease run out, and somebody else be granted the task: `MemoryService.steal`."""
        self.service.steal(task_id, token=token)

    async def aclose(self) -> None:
        """There is nothing to let go of."""

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
        if cursor is not None and not cursor.isdecimal():
            _refuse([{"field": "cursor", "detail": "no earlier page ended there"}])
        if not 1 <= limit <= MAX_BATCH:
            _refuse([{"field": "limit", "detail": f"give 1 to {MAX_BATCH}"}])
        wanted = {"kind": kind, "status": status, "collection": collection, "worker": worker}
        given = {name: value for name, value in wanted.items() if value is not None}
        return self.service.page(
            lambda info: all(getattr(info, name) == value for name, value in given.items()),
            after=-1 if cursor is None else int(cursor),
            limit=limit,
        )


# What passes a connection -------------------------------------------------------------------------------------

_Request = TypeVar("_Request", bound=Struct)
_PLACE = re.compile(r"`\$\.(?P<envelope>\w+)(?:\[(?P<item>\d+)\])?(?:\.(?P<field>[\w.\[\]]+))?`$")
_NO_JSON = (TypeError, ValueError, OverflowError, RecursionError)
_BOUNDS = {"payload": MAX_PAYLOAD, "result": MAX_PAYLOAD, "error": MAX_ERROR, "progress": MAX_PROGRESS}


def _checked(kind: type[_Request], fields: dict[str, Any]) -> _Request:
    """The request as a service reads it; raises `Refused` for what a service would not take."""
    try:
        request = msgspec.json.decode(_encoded(fields), type=kind)
    except (msgspec.ValidationError, RecursionError) as error:
        _refuse([_problem_of(error)])
    if problems := [problem for n, item in _items(structs.asdict(request)) for problem in _problems(n, item)]:
        _refuse(problems)
    return request


def _encoded(fields: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(fields)
    except _NO_JSON as error:
        _refuse([{"item": _culprit(fields), "detail": f"is no JSON: {error}"}])


def _culprit(fields: dict[str, Any]) -> int | None:
    """Which item it was, where one of them alone is no JSON either."""
    for position, item in _items(fields):
        try:
            msgspec.json.encode(item)
        except _NO_JSON:
            return position
    return None


def _items(fields: dict[str, Any]) -> Iterator[tuple[int, Any]]:
    for batch in fields.values():
        if not isinstance(batch, str | int | float):
            yield from enumerate(batch)


def _problem_of(error: Exception) -> dict[str, Any]:
    detail, _, place = str(error).rpartition(" - at ")
    match = _PLACE.search(place)
    if match is None:
        return {"detail": str(error)}
    item = match["item"]
    # Of an item its field; of the envelope the envelope's.
    return {"item": None if item is None else int(item), "field": match["field"] or match["envelope"], "detail": detail}


def _problems(position: int, item: object) -> Iterator[dict[str, Any]]:
    """What is wrong with an item that its schema cannot say."""
    for name, most in _BOUNDS.items():
        raw = getattr(item, name, UNSET)
        if isinstance(raw, Raw) and len(bytes(raw)) > most:
            yield {"item": position, "field": name, "detail": f"{len(bytes(raw))} bytes: at most {most}"}
        elif isinstance(raw, Raw) and (fault := structural_fault(bytes(raw))) is not None:
            yield {"item": position, "field": name, "detail": fault}
    if isinstance(item, NewTaskItem) and item.after:
        yield {"item": position, "field": "after", "detail": "there are no dependencies here: use `then`"}
    if isinstance(item, SettlementItem):
        if item.then and item.outcome not in ("success", "fatal"):
            yield {"item": position, "field": "then", "detail": "goes with success and fatal only"}
        if item.then and (size := len(msgspec.json.encode(item.then))) > MAX_THEN:
            yield {"item": position, "field": "then", "detail": f"has {size:,} bytes together: at most {MAX_THEN:,}"}
        for successor in item.then:
            yield from _problems(position, successor)


def _refuse(problems: list[dict[str, Any]]) -> NoReturn:
    errors = [{name: value for name, value in problem.items() if value is not None} for problem in problems]
    said = ": ".join(errors[0][name] for name in ("field", "detail") if name in errors[0])
    raise Refused(f"refused: {said}", errors=errors)
