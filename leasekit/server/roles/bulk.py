"""Bulk acts: cancel or reschedule the tasks that match, after a dry run that has counted them.

Rule 1: a dry run answers with a token: a digest of what was asked, and how far the store went then. An act takes the
        token of the same request, and touches no task that was scheduled later.
Rule 2: one step looks for tasks in snapshots, and changes so few in its transaction that no heartbeat waits long.
Rule 3: a task is judged again where it is changed. One that was claimed, given back or settled since it was found is
        left to the next step, or to nobody.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from leasekit._lifecycle.states import WAITING
from leasekit.errors import Refused
from leasekit.named import PREFIXES
from leasekit.server.access import KindPatterns
from leasekit.server.roles import frontend, rescheduling
from leasekit.server.roles.audit import Counted, together
from leasekit.server.roles.selection import AFTER_ALL, Found, Search, of_kinds, split
from leasekit.server.store import Trigger, View
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import Matched, Rescheduled, Verdict
from leasekit.wire import CancelMatchingRequest, RescheduleMatchingRequest, RescheduleRequest, selected

STEP = 200  # tasks that one step changes
_COUNTED = 5_000  # tasks that one step of a dry run counts
_TOKEN = re.compile(r"(\d{1,18})-(\d{1,18})-([0-9a-f]{24})", re.ASCII)


class Act(NamedTuple):
    """A step of a bulk act: where it looks, and the token of the whole act."""

    search: Search
    token: str
    is_dry: bool

    def answer(self, found: Found, changed: Collection[str]) -> Matched:
        """Count those of the tasks that were found which were changed; in a dry run: which would be."""
        kinds: dict[str, dict[str, int]] = {}
        for row in found.rows:
            if self.is_dry or row.id in changed:
                of_kind = kinds.setdefault(row.kind, {})
                of_kind[row.status.value] = of_kind.get(row.status.value, 0) + 1
        return Matched(kinds=kinds, token=self.token, cursor=found.cursor)


class Change(NamedTuple):
    """Tasks that were found, and what is to become of them."""

    rows: Sequence[Trigger]
    to: RescheduleRequest | None = None  # None: they are cancelled
    by: str | None = None


def begin(view: View, request: CancelMatchingRequest, kinds: KindPatterns | None = None, *, now: float) -> Act:
    """Begin a step; the first of a dry run makes the token. Raises `Refused` for the token of another request.

    Only tasks of these `kinds` (None: of all) are found.
    """
    digest = _digest(request)
    if request.token is None:
        last, until = view.next_seq(after=AFTER_ALL, newest=True) or 0, math.ceil(1e6 * now) + 1  # rounded up
    else:
        last, until = _bounds(request.token, digest)
    wanted, selection = split(selected(request))
    wanted = wanted._replace(is_live=True, scheduled_by=until / 1e6)
    moves, is_ours = isinstance(request, RescheduleMatchingRequest), of_kinds(kinds)
    search = Search(
        wanted,
        selection,
        cursor=request.cursor,
        limit=_COUNTED if request.dry_run else STEP,
        last=last,
        accept=lambda row: is_ours(row) and not row.kind.startswith(PREFIXES) and (not moves or row.status in WAITING),
    )
    return Act(search, f"{last}-{until}-{digest}", request.dry_run)


def _digest(request: CancelMatchingRequest) -> str:
    """Return the digest of what is asked, without how far it has come."""
    asked = replace(request, token=None, cursor=None, dry_run=True)
    return blake2b(type(request).__name__.encode() + msgspec.json.encode(asked), digest_size=12).hexdigest()


def _bounds(token: str, digest: str) -> tuple[int, int]:
    """Return the last `seq`, and the moment, of the dry run that has made this token."""
    match = _TOKEN.fullmatch(token)
    if match is None or match[3] != digest:
        detail = "must be the answer to a dry run of the same request: make one with the same filters"
        raise Refused(f"token {detail}", errors=[{"field": "token", "detail": detail}])
    return int(match[1]), int(match[2])


def cancel(turn: UnitOfWork, changes: Sequence[Change]) -> list[Counted[list[tuple[Verdict, str | None]]]]:
    """Cancel the tasks that are what they were when they were found."""
    wanted = ([*map(frontend.Cancel, _unchanged(turn, change.rows))] for change in changes)
    return [together(frontend.cancel(turn, requests)) for requests in wanted]


def reschedule(turn: UnitOfWork, changes: Sequence[Change]) -> list[Counted[list[str]]]:
    """Reschedule the tasks that wait as they did when they were found; return their ids."""
    return [_rescheduled(turn, change) for change in changes]


def _rescheduled(turn: UnitOfWork, change: Change) -> Counted[list[str]]:
    assert change.to is not None  # noqa: S101 - a reschedule says what to
    wanted = [rescheduling.Reschedule(task_id, change.to, change.by) for task_id in _unchanged(turn, change.rows)]
    done = together(rescheduling.reschedule(turn, wanted))
    return Counted([answer.id for answer in done.answer if isinstance(answer, Rescheduled)], done.changed)


def _unchanged(turn: UnitOfWork, rows: Iterable[Trigger]) -> list[str]:
    found = {row.id: row for row in rows}
    now: Mapping[str, Trigger] = turn.tx.triggers(found.keys())
    return [task_id for task_id, row in found.items() if task_id in now and _is_as(now[task_id], row)]


def _is_as(row: Trigger, before: Trigger) -> bool:
    """Return whether a task waits, or runs, as it did before. Another task may have its id by now."""
    waits, waited = row.status in WAITING, before.status in WAITING
    return (row.seq, row.fence, waits, row.status.ended) == (before.seq, before.fence, waited, False)
