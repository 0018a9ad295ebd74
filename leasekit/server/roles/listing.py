"""Listing: a page of tasks that match, found in steps of bounded work."""

from collections.abc import Iterable, Sequence

from leasekit.server.access import KindPatterns
from leasekit.server.roles.selection import (
    AFTER_ALL,
    Stretch,
    matching,
    number_to_read,
    of_kinds,
    seq_of_cursor,
)
from leasekit.server.roles.task_infos import infos_of
from leasekit.server.store import Filter, Trigger, View
from leasekit.task import Page, TaskInfo, TaskSelection

_BYTES = 4 * 1024 * 1024  # of values in one page


class Listing:
    """A page of a listing, found in steps of bounded work: other reads go in between, however few tasks match."""

    def __init__(
        self,
        wanted: Filter,
        selection: TaskSelection,
        *,
        cursor: str | None,
        limit: int,
        kinds: KindPatterns | None = None,
    ) -> None:
        """Begin a page of up to `limit` tasks, fewer if big. Raises `Refused` for a made-up `cursor`.

        Only tasks of these `kinds` (None: of all) are in it.
        """
        self._wanted, self._selection, self._accept = wanted, selection, of_kinds(kinds)
        self._limit = limit
        self._after = AFTER_ALL if wanted.newest and cursor is None else seq_of_cursor(cursor)
        self._tasks: list[TaskInfo] = []
        self._size = 0

    def look(self, view: View, *, now: float, gained: float = 0.0) -> Page | None:
        """Look at the next tasks. Return the page once it is full or no task is left, else None."""
        stretch = Stretch.next(view, self._wanted, after=self._after)
        if stretch is None:
            return Page(tasks=self._tasks, cursor=None)
        room = self._limit - len(self._tasks)
        most = number_to_read(room, self._selection, self._accept)
        rows = view.page(self._wanted, after=self._after, limit=most, **stretch._asdict())
        found = matching(view, [row for row in rows if self._accept(row)], self._selection)
        infos = infos_of(view, found[:room], history=False, now=now, gained=gained)
        if self._take(infos, found) < len(found):
            return Page(tasks=self._tasks, cursor=str(self._after))
        self._after = rows[-1].seq if len(rows) == most else stretch.until
        return None

    @property
    def so_far(self) -> Page:
        """The tasks that were found, and where the search goes on."""
        return Page(tasks=self._tasks, cursor=str(self._after))

    def _take(self, infos: Iterable[TaskInfo], rows: Sequence[Trigger]) -> int:
        """Add tasks as long as they have room, and return how many were added."""
        before = len(self._tasks)
        for row, info in zip(rows, infos, strict=False):
            if self._size > _BYTES:
                break
            self._tasks.append(info)
            self._size += sum(len(bytes(value)) for value in (info.payload, info.progress, info.result, info.error))
            self._after = row.seq
        return len(self._tasks) - before
