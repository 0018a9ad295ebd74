"""Read access: tasks, listings, counts and workers."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, date, datetime
from itertools import groupby
from typing import NamedTuple

from msgspec import msgpack

from leasekit.errors import ProtocolError, Refused
from leasekit.task import Page, Stats, Status, TaskInfo, TaskSelection, WorkerInfo
from leasekit_redis import decoding
from leasekit_redis.chains import Chains, Member
from leasekit_redis.client import Link
from leasekit_redis.id_index import IdIndex
from leasekit_redis.records import ChainRows, Left, Row, Rows, decode
from leasekit_redis.scripts import PAGE, READ, ROWS

logger = logging.getLogger("leasekit")

_RUNS = 100  # of a task's history, the latest
_ROW = msgpack.Decoder(Row | str)
_ONE = msgpack.Decoder(Row)
_ROWS = msgpack.Decoder(Rows)
_CHAIN_ROWS = msgpack.Decoder(ChainRows)
_BEING_MADE = 3600.0  # seconds within which a task that was noted in a chain may yet be made
_NUMBER = re.compile(rb"-?\d{1,18}")
_CURSOR = re.compile(r"(\d{1,16})/([ -.0-~]{1,128})", re.ASCII)


class _Place(NamedTuple):
    """The position of a task in a listing of several kinds."""

    seq: int
    kind: str


class Reading:
    """Read the tasks, counts and workers of one service."""

    def __init__(self, link: Link, register: IdIndex, chains: Chains) -> None:
        self._link = link
        self._register = register
        self._chains = chains

    async def get(self, task_id: str) -> TaskInfo | None:
        (kind,) = await self._register.find([task_id])
        return None if kind is None else await self._get(kind, task_id)

    async def _get(self, kind: str, task_id: str) -> TaskInfo | None:
        raw = await self._link.run_for(kind, READ, {"id": task_id, "runs": _RUNS})
        if raw is None:
            return None
        try:
            row: Row | str = decode(raw, _ROW)
        except ProtocolError as error:
            raise ProtocolError(f"task {task_id!r} of kind {kind!r}: {error}") from None
        if isinstance(row, str):
            raise ProtocolError(decoding.damage(task_id, kind, row))
        return decoding.info(row, kind)

    async def page(
        self,
        wanted: dict[str, str],
        *,
        kind: str | None,
        newest: bool = False,
        cursor: str | None,
        limit: int,
        selection: TaskSelection = TaskSelection(),  # noqa: B008 - it is frozen
    ) -> Page:
        """Return tasks that match, oldest or newest first, without history; fewer if large or damaged."""
        place = _parse_cursor(cursor)
        kinds = await self._register.kinds() if kind is None else [kind]
        shown: list[tuple[_Place, Row]] = []
        for name in kinds:
            # Only as many rows as may be shown are kept in memory, however many kinds there are.
            try:
                found = self._rows(name, wanted, place, limit + 1, newest=newest, selection=selection)
                rows = [(_Place(row.state.seq, name), row) async for row in found]
            except ProtocolError as error:
                if kind is not None:
                    raise
                logger.error("kind %r is left out of a listing: %s", name, error)
                continue
            shown = sorted(shown + rows, key=lambda entry: entry[0], reverse=newest)[: limit + 1]
        tasks = [info for at, row in shown[:limit] for info in self._readable(row, at.kind)]
        for task in tasks:
            task.history.clear()
        last = shown[limit - 1][0] if len(shown) > limit else None
        return Page(tasks=tasks, cursor=None if last is None else f"{last.seq}/{last.kind}")

    async def _rows(
        self,
        kind: str,
        wanted: dict[str, str],
        place: _Place | None,
        limit: int,
        *,
        newest: bool,
        selection: TaskSelection,
    ) -> AsyncIterator[Row]:
        after: str | None = "+inf" if newest else "-inf"
        if place is not None:
            # Of two tasks with the same number, the one whose kind sorts first is shown first (newest first: last).
            is_later = kind < place.kind if newest else kind > place.kind
            after = f"{'' if is_later else '('}{place.seq}"
        while after is not None and limit > 0:
            argument = {**wanted, "newest": newest, "after": after, "limit": limit}
            rows: Rows = decode(await self._link.run_for(kind, PAGE, argument), _ROWS)
            for raw in rows.tasks:
                try:
                    row = decode(raw, _ONE)
                    if selection.needs_a_look and not selection.matches(decoding.info(row, kind)):
                        continue
                except ProtocolError as error:
                    logger.error("a task of kind %r is left out of a listing: %s", kind, error)
                else:
                    yield row
                limit -= 1
            after = None if rows.after is None else f"({rows.after}"

    async def chain(
        self, root: str, wanted: dict[str, str], *, kind: str | None, newest: bool, cursor: str | None, limit: int
    ) -> Page:
        """Return the tasks of the chain of this root that match, in the order in which they came."""
        place = _parse_cursor(cursor)
        members = await self._chains.members(
            root, after=None if place is None else place.seq, newest=newest, limit=limit + 1
        )
        tasks: list[TaskInfo] = []
        last: Member | None = None
        for of_kind, group in groupby(members[:limit], key=lambda member: member.kind):
            some = list(group)
            looked = len(some)
            if kind in (None, of_kind):
                rows = await self._rows_of_chain(root, wanted, of_kind, some)
                tasks += [task for raw in rows.tasks for task in self._readable(decode(raw, _ONE), of_kind)]
                looked = rows.looked
            last = some[looked - 1]
            if looked < len(some):  # the page is large enough
                break
        for task in tasks:
            task.history.clear()
        is_last = last is None or last == members[-1]
        return Page(tasks=tasks, cursor=None if last is None or is_last else f"{last.place}/{last.kind}")

    async def _rows_of_chain(
        self, root: str, wanted: dict[str, str], kind: str, members: Sequence[Member]
    ) -> ChainRows:
        """Read these tasks, and forget those that were noted long ago and never made."""
        argument = {**wanted, "root": root, "ids": [member.id for member in members]}
        rows: ChainRows = decode(await self._link.run_for(kind, ROWS, argument), _CHAIN_ROWS)
        long_ago = 1e6 * (time.time() - _BEING_MADE)
        strange = {member.id for member in members if 0 < member.place < long_ago}.intersection(rows.strange)
        await self._chains.leave([Left(name, root) for name in strange], kind)
        return rows

    @staticmethod
    def _readable(row: Row, kind: str) -> list[TaskInfo]:
        try:
            return [decoding.info(row, kind)]
        except ProtocolError as error:
            logger.error("a task of kind %r is left out of a listing: %s", kind, error)
            return []

    async def ended_on(self, kind: str, day: date, status: Status | None) -> list[TaskInfo]:
        first = datetime(day.year, day.month, day.day, tzinfo=UTC)
        begins_at = round(1000 * first.timestamp())
        ends_at = begins_at + 86_400_000  # the last day of the calendar has no next one
        ids = await self._link.command("ZRANGEBYSCORE", self._link.keys.one(kind, "ended"), begins_at, f"({ends_at}")
        infos: list[TaskInfo | None] = []
        for task_id in ids:
            try:
                infos.append(await self._get(kind, task_id.decode()))
            except ProtocolError as error:
                logger.error("a task of kind %r is left out of a listing: %s", kind, error)
        return [info for info in infos if info is not None and status in (None, info.status)]

    async def stats(self) -> Stats:
        """Count the tasks of each kind by status, and the damaged tasks."""
        kinds = await self._register.kinds()
        hashes = await self._hashes(kinds, "counts")
        counts = [{status: count for status, count in fields.items() if count} for fields in hashes]
        damaged = {kind: count.pop("damaged", 0) for kind, count in zip(kinds, counts, strict=True)}
        return Stats(
            kinds={kind: count for kind, count in zip(kinds, counts, strict=True) if count},
            damaged={kind: count for kind, count in damaged.items() if count},
        )

    async def workers(self) -> list[WorkerInfo]:
        kinds = await self._register.kinds()
        last_seen: dict[str, int] = {}
        running: dict[str, int] = {}
        served: dict[str, list[str]] = {}
        for kind, seen in zip(kinds, await self._hashes(kinds, "seen"), strict=True):
            for worker, at in seen.items():
                served.setdefault(worker, []).append(kind)
                last_seen[worker] = max(last_seen.get(worker, 0), at)
        for holders in await self._hashes(kinds, "holders"):
            for worker, count in holders.items():
                running[worker] = running.get(worker, 0) + count
        return [
            WorkerInfo(
                name=name,
                last_seen=decoding.moment(last_seen[name]) if name in last_seen else None,
                running=running.get(name, 0),
                kinds=sorted(served.get(name, [])),
            )
            for name in sorted(last_seen.keys() | running.keys())
        ]

    async def _hashes(self, kinds: Sequence[str], name: str) -> list[dict[str, int]]:
        async def read(kind: str) -> dict[str, int]:
            fields = await self._link.command("HGETALL", self._link.keys.one(kind, name))
            # Values that are not numbers are left out: the next script that counts begins anew.
            return {field.decode(errors="replace"): int(n) for field, n in fields.items() if _NUMBER.fullmatch(n)}

        return await asyncio.gather(*(read(kind) for kind in kinds))


def _parse_cursor(cursor: str | None) -> _Place | None:
    if cursor is None:
        return None
    match = _CURSOR.fullmatch(cursor)
    if match is None:
        raise Refused(
            "cursor must be the cursor of an earlier page",
            errors=[{"field": "cursor", "detail": "must be the cursor of an earlier page"}],
        )
    return _Place(int(match[1]), match[2])
