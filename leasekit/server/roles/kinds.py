"""The settings of kinds: change and list them."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from leasekit.errors import Refused
from leasekit.named import PREFIXES
from leasekit.server.key_rooms import release_kinds
from leasekit.server.roles.frontend import moment
from leasekit.server.rooms import Rooms
from leasekit.server.store import KindRow, View
from leasekit.server.store.kind_defaults import decoded
from leasekit.server.store.kind_rules import rules_of
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import KindInfo, KindSettings

_encode = msgspec.json.Encoder().encode


class KindChange(NamedTuple):
    """New settings of a kind."""

    kind: str
    settings: KindSettings | None  # None: the kind is to have none
    by: str | None  # who asked


def check_kind(kind: str) -> None:
    """Raise `Refused` if the tasks of this kind stand for a name: a lease of a name says itself what holds for it."""
    if kind.startswith(PREFIXES):
        detail = "stands for the lease of a name, which has no settings: give the options where the name is leased"
        raise Refused(f"the kind {kind!r} {detail}", errors=[{"field": "kind", "detail": detail}])


def change(turn: UnitOfWork, changes: Sequence[KindChange]) -> list[KindInfo | None]:
    """Replace the settings of kinds. Settings that are the same already are left as they are."""
    rows = {row.name: row for row in turn.tx.kinds()}
    answers: list[KindInfo | None] = []
    for kind, settings, by in changes:
        data = None if settings is None else _encode(settings)
        if data != (rows[kind].settings if kind in rows else None):
            turn.tx.set_kind(kind, data, at=turn.now, by=by)
            rows[kind] = KindRow(kind, data, turn.now, by, 0)
            turn.tell_of_kind(kind, by)
            if settings is not None:
                Rooms.refit(turn, kind, rules_of(settings))
            release_kinds(turn, [kind])
            turn.freed(kind)
        answers.append(_info(rows[kind]) if kind in rows else None)
    return answers


def listed(view: View) -> list[KindInfo]:
    """Return the kinds that have settings, sorted by name."""
    return [info for info in map(_info, view.kinds()) if info is not None]


def described(kind: str, settings: KindSettings | None) -> str:
    """Return what was done with a kind, for logs."""
    what = f"the settings of kind {kind!r}"
    return f"removed {what}" if settings is None else f"set {what}: {_encode(settings).decode()}"


def _info(row: KindRow) -> KindInfo | None:
    settings = decoded(row)
    if settings is None:
        return None
    return KindInfo(kind=row.name, settings=settings, changed_at=moment(row.changed_at), changed_by=row.changed_by)
