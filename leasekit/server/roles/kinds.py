"""The settings of kinds: change and list them.

What code declares and what operators set is judged by `declarations.py`, for each setting by itself.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from leasekit.errors import Refused
from leasekit.named import PREFIXES
from leasekit.server.declarations import declare, digest_of
from leasekit.server.key_rooms import release_kinds
from leasekit.server.roles.audit import Counted
from leasekit.server.roles.frontend import moment
from leasekit.server.roles.tokens import Conflict
from leasekit.server.rooms import Rooms
from leasekit.server.store import KindRow, View
from leasekit.server.store.kind_defaults import decoded
from leasekit.server.store.kind_rules import NO_RULES, rules_of
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import KindInfo, KindSettings
from leasekit.wire import KindRequest, given

_encode = msgspec.json.Encoder().encode


class KindChange(NamedTuple):
    """New settings of a kind."""

    kind: str
    settings: KindSettings | None  # None: the kind is to have none
    by: str | None  # who asked
    is_declared: bool = False  # whether the code of a worker says so, and not an operator
    was: KindSettings | None = None  # refuse a change of other settings than these; None: of any


def check_kind(kind: str) -> None:
    """Raise `Refused` if the tasks of this kind stand for a name: a lease of a name says itself what holds for it."""
    if kind.startswith(PREFIXES):
        detail = "stands for the lease of a name, which has no settings: give the options where the name is leased"
        raise Refused(f"the kind {kind!r} {detail}", errors=[{"field": "kind", "detail": detail}])


def settings_in(text: str) -> KindSettings:
    """Return the settings in a JSON text that says what a kind was seen to have.

    Raises `Conflict` for any other text: no kind has what it says.
    """
    try:
        return msgspec.json.decode(text, type=KindRequest)
    except (ValueError, msgspec.MsgspecError) as error:
        raise Conflict("was", f"must be the settings of a kind, as JSON: {error}") from None


def text_of(settings: KindSettings | None) -> str:
    """Return settings as `settings_in` reads them."""
    return _encode(settings or KindSettings()).decode()


def change(turn: UnitOfWork, changes: Sequence[KindChange]) -> list[Counted[KindInfo | None]]:
    """Replace the settings of kinds. Settings that are the same already are left as they are.

    Raises `Conflict` for a kind that has not the settings any longer on which its change is based.
    """
    rows = {row.name: row for row in turn.tx.kinds()}
    if not all(_is_repeat(rows.get(wanted.kind), wanted, turn.now) for wanted in changes):
        turn.tx.begin_change()  # what is read from here on, no other node changes meanwhile
        rows = {row.name: row for row in turn.tx.kinds()}
    answers: list[Counted[KindInfo | None]] = []
    for wanted in changes:
        old = rows.get(wanted.kind, KindRow(wanted.kind, None, turn.now, None, 0))
        new = rows[wanted.kind] = _declared(old, wanted, turn.now) if wanted.is_declared else _set(old, wanted)
        if new.settings != old.settings:
            _check_was(old, wanted)
            rows[wanted.kind] = new = new._replace(changed_at=turn.now, changed_by=wanted.by)
        _write(turn, old, new)
        answers.append(_counted(old, new, wanted))
    return answers


def _check_was(row: KindRow, wanted: KindChange) -> None:
    """Raise `Conflict` if others have changed the settings that a change is to replace since its client saw them."""
    if wanted.was is not None and (names := _differing(wanted.was, decoded(row))):
        detail = f"is not what the kind {row.name!r} has by now: others have changed {', '.join(names)}. Look again"
        raise Conflict("was", detail)


def _counted(old: KindRow, new: KindRow, wanted: KindChange) -> Counted[KindInfo | None]:
    is_change = new.settings != old.settings
    is_repeat = wanted.is_declared and not is_change  # as most declarations are, which are not to fill the log
    return Counted(_info(new), None if is_repeat else int(is_change), _differing(decoded(old), decoded(new)))


def _differing(old: KindSettings | None, new: KindSettings | None) -> list[str]:
    """Return the names of the settings in which these differ."""
    before, after = given(old or KindSettings()), given(new or KindSettings())
    return [name for name in {**before, **after} if before.get(name, UNSET) != after.get(name, UNSET)]


def _is_repeat(row: KindRow | None, wanted: KindChange, now: float) -> bool:
    """Return whether this is a declaration that changes nothing."""
    return row is not None and wanted.is_declared and not declare(row, digest_of(_encode(wanted.settings)), now)[1]


def _set(row: KindRow, wanted: KindChange) -> KindRow:
    """Return the row with what an operator sets; what code declared is only forgotten with all settings."""
    if wanted.settings is None:
        return KindRow(row.name, None, row.changed_at, row.changed_by, row.change)
    return row._replace(settings=_encode(wanted.settings))


def _declared(row: KindRow, wanted: KindChange, now: float) -> KindRow:
    """Return the row with a declaration, which changes the settings if it is a new one."""
    data = _encode(wanted.settings)
    noted, is_new = declare(row, digest_of(data), now)
    if not is_new or wanted.settings is None:
        return noted
    return noted._replace(settings=_encode(_merged(row, wanted.settings)), declared=data)


def _merged(row: KindRow, declared: KindSettings) -> KindSettings:
    """Change the settings in which this declaration differs from the one before; leave the others as they are."""
    current = decoded(row)
    if current is None:
        return declared
    after, changed = given(declared), set(_differing(_declaration(row), declared))
    merged = {name: value for name, value in given(current).items() if name not in changed}
    try:
        return KindSettings(**merged, **{name: after[name] for name in changed & after.keys()})
    except ValueError:  # they contradict what was changed by hand
        return declared


def _write(turn: UnitOfWork, old: KindRow, new: KindRow) -> None:
    if new.settings == old.settings and new.digests == old.digests:
        if new.digests is not None and new.declared_at is not None and new.declared_at != old.declared_at:
            turn.tx.note_kind(new.name, new.digests, at=new.declared_at)
        return
    at, by, declaration = new.changed_at, new.changed_by, new.declaration
    turn.tx.set_kind(new.name, new.settings, at=at, by=by, declaration=declaration)
    if new.settings != old.settings:
        turn.tell_of_kind(new.name, by)
        rules = NO_RULES if (settings := decoded(new)) is None else rules_of(settings)
        Rooms.refit(turn, new.name, rules)
        if not rules.ordered:
            turn.tx.drop_places_of(new.name)
        release_kinds(turn, [new.name])
        turn.freed(new.name)


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
    return KindInfo(
        kind=row.name,
        settings=settings,
        changed_at=moment(row.changed_at),
        changed_by=row.changed_by,
        declared=_declaration(row),
        declared_at=None if row.declared_at is None else moment(row.declared_at),
    )


def _declaration(row: KindRow) -> KindSettings | None:
    return None if row.declared is None else decoded(row._replace(settings=row.declared))
