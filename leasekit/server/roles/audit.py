"""The audit log: what operators did, written in the transaction of the change.

Rule 1: each request of an operator writes one entry, even if it finds nothing to change. A dry run writes none.
Rule 2: an entry has names (of kinds, settings, filters, of the task or chain that a request is for) and numbers, and
no value that a client has sent.
Rule 3: its count is how many things its own request has changed: tasks, or the kind, gate, drain, periodic task or
access token that was to change. What was so already, a repeat has found done, or a request names twice, counts once at
most.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import NODEFAULT, UNSET, Struct

from leasekit.ids import uuid7s
from leasekit.server.access import LOCAL, Access
from leasekit.server.store import AuditRow, View
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.tokens import AuditEntry, AuditPage

_T = TypeVar("_T")

KEPT = 365 * 86400.0
"""Seconds for which entries are kept."""


class Counted(NamedTuple, Generic[_T]):
    """The answer to a request, or to a part of one, and what the audit log tells of what it has changed."""

    answer: _T
    changed: int | None
    """How many things it has changed (Rule 3); None: it is left out of the log."""
    fields: Sequence[str] | None = None
    """The names of what it has changed; None: those of what was given."""


def together(parts: Sequence[Counted[_T]]) -> Counted[list[_T]]:
    """Return the answers to the parts of a request, with what all have changed."""
    return Counted([part.answer for part in parts], sum(part.changed or 0 for part in parts))


class Note(NamedTuple):
    """An entry to be written into the audit log once its request is applied."""

    act: str
    by: Access = LOCAL
    target: str | None = None
    fields: Sequence[str] = ()
    worker: str | None = None

    def row(self, turn: UnitOfWork, count: int, fields: Sequence[str] | None = None) -> AuditRow:
        (entry_id,) = uuid7s(1, turn.now, turn.random)
        names = ",".join(sorted(self.fields if fields is None else fields))
        by, token_id = self.by.name, self.by.token_id
        return AuditRow(entry_id, turn.now, by, token_id, self.worker, self.act, self.target, names, count)


def the_one(ids: Sequence[str] | None) -> str | None:
    """Return the id of the task that a request names, as the target of its entry; None if there is not just one."""
    return ids[0] if ids and len(ids) == 1 else None


def names_of(values: Struct) -> list[str]:
    """Return the names of the fields whose values differ from their defaults, without those of every request."""
    return [
        field.encode_name
        for field in msgspec.structs.fields(values)
        if field.name not in _OF_EVERY_STEP and getattr(values, field.name) not in (UNSET, [], _default(field))
    ]


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default_factory is NODEFAULT else field.default_factory()


_OF_EVERY_STEP = frozenset({"cursor", "dry_run", "limit", "token", "redrive_id", "request_id", "worker"})


def page(view: View, *, cursor: str | None, limit: int) -> AuditPage:
    """Return the entries before `cursor`, the latest first."""
    rows = view.audit(before=cursor or "", limit=limit)
    return AuditPage(entries=[_entry(row) for row in rows], cursor=rows[-1].id if len(rows) == limit else None)


def _entry(row: AuditRow) -> AuditEntry:
    return AuditEntry(
        id=row.id,
        at=datetime.fromtimestamp(row.at, UTC),
        by=row.by,
        token_id=row.token_id,
        worker=row.worker,
        act=row.act,
        target=row.target,
        fields=row.fields.split(",") if row.fields else [],
        count=row.changed,
    )


def forget(turn: UnitOfWork, *, limit: int) -> bool:
    """Delete entries that were kept for long enough; return whether more of them may be left."""
    return turn.tx.forget_audit(before=turn.now - KEPT, limit=limit) == limit
