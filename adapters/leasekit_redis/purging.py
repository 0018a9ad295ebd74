"""Purges: remove ended tasks of all kinds, some hundred at a time, for as long as one call may take."""

import re
import time
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from msgspec import msgpack

from leasekit.errors import Refused
from leasekit.task import Purged
from leasekit.wire import PurgeRequest
from leasekit_redis.client import Link, by_kind
from leasekit_redis.dependencies import Dependencies
from leasekit_redis.id_index import IdIndex
from leasekit_redis.maintenance import Maintenance
from leasekit_redis.reading import Reading
from leasekit_redis.records import Purgeable, decode
from leasekit_redis.scripts import PURGE

_CHOSEN = 2**52  # an age in milliseconds that only a task has which a purge has chosen
_LISTED = 100  # tasks of one script, because Redis serves no other client meanwhile
_CALL = 2.0  # seconds after which a call ends, and its cursor begins the next
_PAGE = msgpack.Decoder(Purgeable)
_CURSOR = re.compile(r"([ -.0-~]{1,128})(?:/(\d{1,15})/([ -.0-~]{1,128}))?", re.ASCII)


class _Place(NamedTuple):
    """The place at which a purge goes on: a kind, and the last task of it that was looked at."""

    kind: str
    last_at: int | None = None
    last_id: str | None = None

    def __str__(self) -> str:
        return self.kind if self.last_id is None else f"{self.kind}/{self.last_at}/{self.last_id}"


class Purging:
    """The purges that one client does."""

    def __init__(
        self,
        link: Link,
        register: IdIndex,
        dependencies: Dependencies,
        maintenance: Maintenance,
        reading: Reading,
    ) -> None:
        self._link = link
        self._register = register
        self._reading = reading
        self._dependencies = dependencies
        self._maintenance = maintenance

    async def purge(self, wanted: PurgeRequest) -> Purged:
        """Remove tasks, page by page, for `_CALL` seconds; the rest is left to the next call."""
        if wanted.ids:
            return await self._purge_those(wanted, wanted.ids, await self._register.find(wanted.ids), cursor=None)
        if wanted.needs_a_look or wanted.collection is not None:
            return await self._purge_page(wanted)
        place = _place(wanted.cursor) if wanted.cursor is not None else _Place("")
        kinds = await self._register.kinds() if wanted.kind is None else [wanted.kind]
        places = [place if kind == place.kind else _Place(kind) for kind in kinds if kind >= place.kind]
        until = time.monotonic() + _CALL
        found: dict[str, Counter[str]] = {}
        for first, following in zip_longest(places, places[1:]):
            at: _Place | None = first
            while at is not None:
                statuses, at = await self._page(wanted, at)
                found.setdefault(first.kind, Counter()).update(statuses)
                if time.monotonic() > until and (rest := at or following) is not None:
                    return _purged(found, cursor=str(rest))
        return _purged(found, cursor=None)

    async def _purge_page(self, wanted: PurgeRequest) -> Purged:
        """Remove those tasks of a page of a listing that have ended."""
        filters = {name: str(value) for name in ("status", "collection") if (value := getattr(wanted, name))}
        page = await self._reading.page(
            filters, kind=wanted.kind, cursor=wanted.cursor, limit=_LISTED, selection=wanted
        )
        ids, kinds = [task.id for task in page.tasks], [task.kind for task in page.tasks]
        return await self._purge_those(wanted, ids, kinds, cursor=page.cursor)

    async def _purge_those(
        self, wanted: PurgeRequest, ids: Sequence[str], kinds: Sequence[str | None], *, cursor: str | None
    ) -> Purged:
        found: dict[str, Counter[str]] = {}
        for kind, positions in by_kind(kinds):
            for start in range(0, len(positions), _LISTED):
                some = [ids[at] for at in positions[start : start + _LISTED]]
                statuses, _ = await self._page(wanted, _Place(kind), ids=some)
                found.setdefault(kind, Counter()).update(statuses)
        return _purged(found, cursor=cursor)

    async def _page(
        self, wanted: PurgeRequest, place: _Place, *, ids: Sequence[str] | None = None
    ) -> tuple[list[str], _Place | None]:
        """Remove a page of tasks, or these; return how they had ended, and where the next page begins."""
        argument = {
            "age": round(1000 * wanted.older_than),
            "dry_run": wanted.dry_run,
            "status": wanted.status,
            "last_id": place.last_id,
            "last_at": place.last_at,
            "ids": ids,
        }
        given = {name: value for name, value in argument.items() if value is not None}
        page: Purgeable = decode(await self._link.run_for(place.kind, PURGE, given), _PAGE)
        after = None if page.last_id is None else _Place(place.kind, page.last_at, page.last_id)
        if wanted.dry_run or not page.ids:
            return page.statuses, after
        # Soon, maintenance removes what is left: of a kind without tasks, or of a purge whose client has died.
        await self._register.note([place.kind])
        await self._dependencies.withdraw(place.kind, page.unmet)
        # Not by `age`: under an id that another purge has freed meanwhile, there may be a task that does not match.
        statuses = await self._maintenance.drop(place.kind, page.ids, _CHOSEN)
        return statuses, after


def _place(cursor: str) -> _Place:
    match = _CURSOR.fullmatch(cursor)
    if match is None:
        detail = "must be the cursor of an earlier step"
        raise Refused(f"cursor {detail}", errors=[{"field": "cursor", "detail": detail}])
    return _Place(match[1], int(match[2]) if match[2] else None, match[3])


def _purged(found: dict[str, Counter[str]], *, cursor: str | None) -> Purged:
    return Purged(kinds={kind: dict(counts) for kind, counts in found.items() if counts}, cursor=cursor)
