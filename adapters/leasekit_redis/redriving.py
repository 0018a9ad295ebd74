"""Redrive: begin a new life of tasks that have ended, one script for each kind."""

import uuid
from collections.abc import Sequence

from msgspec import msgpack

from leasekit.errors import ProtocolError
from leasekit.task import Redriven, Verdict
from leasekit.wire import RedriveRequest
from leasekit_redis.client import Link, by_kind
from leasekit_redis.id_index import IdIndex
from leasekit_redis.reading import Reading
from leasekit_redis.records import decode
from leasekit_redis.scripts import REDRIVE

_WORDS = msgpack.Decoder(dict[str, list[str]])


class Redriving:
    """The redrives of one service."""

    def __init__(self, link: Link, register: IdIndex, reading: Reading, *, worker: str) -> None:
        self._link = link
        self._register = register
        self._reading = reading
        self._worker = worker

    async def redrive(self, request: RedriveRequest) -> Redriven:
        if request.ids:
            ids, cursor = request.ids, None
            kinds = await self._register.find(ids)
        else:
            wanted: dict[str, str] = {"status": request.status or "dead"}
            if request.collection is not None:
                wanted["collection"] = request.collection
            page = await self._reading.page(
                wanted, kind=request.kind, cursor=request.cursor, limit=request.limit, selection=request
            )
            ids, cursor, kinds = [task.id for task in page.tasks], page.cursor, [task.kind for task in page.tasks]
        redrive_id = request.redrive_id or uuid.uuid4().hex
        verdicts = [Verdict(id=task_id, verdict="gone", reason="unknown") for task_id in ids]
        if not request.dry_run and (known := [kind for kind in kinds if kind is not None]):
            await self._register.note(dict.fromkeys(known))
        for kind, positions in by_kind(kinds):
            some = [ids[at] for at in positions]
            argument = {
                "ids": some,
                "redrive_id": redrive_id,
                "worker": self._worker,
                "retention": round(1000 * self._link.address.retention),
                "dry_run": request.dry_run,
            }
            words = decode(await self._link.run_for(kind, REDRIVE, argument), _WORDS)["words"]
            for at, verdict in zip(positions, _verdicts(some, words), strict=True):
                verdicts[at] = verdict
        return Redriven(tasks=verdicts, cursor=cursor)


def _verdicts(ids: Sequence[str], words: Sequence[str]) -> list[Verdict]:
    if len(ids) != len(words):
        raise ProtocolError(f"Redis gave {len(words)} verdicts on {len(ids)} tasks")
    return [_verdict(task_id, word) for task_id, word in zip(ids, words, strict=True)]


def _verdict(task_id: str, word: str) -> Verdict:
    match word:
        case "redriven" | "redrivable":
            return Verdict(id=task_id, verdict=word)
        case "gone":
            return Verdict(id=task_id, verdict="gone", reason="unknown")
        case _:
            return Verdict(id=task_id, verdict="failed", reason=word)
