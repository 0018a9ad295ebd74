"""The access tokens: make, revoke, rotate and list them; and the sessions of the console that begin with one.

Rule 1: a caller makes, changes and sees only tokens that allow nothing that it may not do itself, and for no longer.
Rule 2: a token that was revoked, or has expired, never becomes valid again.
Rule 3: no id is the name of another token: who ends or rotates the token of a name gets no decoy in its place.
Rule 4: once a token was made, the store always has one, valid or not: servers do not become open again.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hmac import compare_digest
from typing import NamedTuple, cast

from leasekit.errors import AccessDenied, Refused
from leasekit.server.access import LOCAL, Access
from leasekit.server.roles.audit import Counted
from leasekit.server.store import SessionRow, TokenRow, View
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.tokens import SCOPES, Scope, TokenInfo
from leasekit.wire import RotateRequest, TokenRequest

_MOST = 1000  # tokens, which are all in the memory of each node
_MOST_OF_SOME = 500  # that operators of some kinds may make: they leave those of all kinds some to make
_SESSIONS = 1000  # at the same time; the oldest ends for a new one …
_OF_ONE = 100  # … of all, and of those that began with one access token
_KEPT = 30 * 86400.0  # seconds for which a token is listed that is no longer valid


class Conflict(Refused):
    """The refusal of what would be fine, if there were not what there is."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(f"{field} {detail}", errors=[{"field": field, "detail": detail}])


class Create(NamedTuple):
    """Make an access token."""

    order: TokenRequest
    by: Access = LOCAL


class Revoke(NamedTuple):
    """End an access token, for good."""

    token: str
    by: Access = LOCAL


class Rotate(NamedTuple):
    """Give an access token another secret."""

    token: str
    order: RotateRequest
    by: Access = LOCAL


Change = Create | Revoke | Rotate


def change(turn: UnitOfWork, changes: Sequence[Change]) -> list[Counted[TokenInfo | None]]:
    """Change access tokens; None where there is none of this id or name (that the caller may see).

    Raises `Refused`, and `AccessDenied` where a new token would allow more than its maker may do.
    """
    turn.tx.begin_change()
    return [_changed(turn, wanted) for wanted in changes]


def _changed(turn: UnitOfWork, wanted: Change) -> Counted[TokenInfo | None]:
    rows = {row.id: row for row in turn.tx.tokens()}
    if rows and wanted.by.is_guest:
        raise AccessDenied("the store has an access token by now, and takes no change without one")
    if isinstance(wanted, Create):
        made = _created(turn, rows, wanted)
        return Counted(info(made), int(made is not rows.get(made.id)))
    old = find(rows, wanted.token, turn.now)
    if old is None or not is_covered(wanted.by, old):
        return Counted(None, 0)
    if isinstance(wanted, Revoke):
        new = old._replace(revoked_at=turn.now, former_digest=None, former_until=None)
        new = old if old.revoked_at is not None else new
    else:
        new = _rotated(turn, rows, old, wanted)
    if new is not old:
        turn.tx.set_tokens([new])
    return Counted(info(new), int(new is not old))


def _created(turn: UnitOfWork, rows: Mapping[str, TokenRow], wanted: Create) -> TokenRow:
    """Make an access token, or return the row of an earlier, repeated request. Raises `AccessDenied` and `Refused`."""
    order, by = wanted.order, wanted.by
    digest, until = bytes.fromhex(order.digest), None if order.expires_at is None else order.expires_at.timestamp()
    scopes, kinds = _listed(order.scopes), "/".join(dict.fromkeys(order.kinds))
    known = rows.get(order.id)
    if known is not None and is_covered(by, known) and compare_digest(known.digest, digest):
        asked = (order.name, scopes, kinds, until)
        if (known.name, known.scopes, known.kinds, known.expires_at) == asked:
            return known
    _check_order(turn, rows, order, until)
    _check_room(rows, by)
    if not by.covers(order.scopes, order.kinds, until):
        raise AccessDenied(
            f"the access token {by.name!r} cannot make one that may do more than itself, or for longer: it has the "
            f"scopes {_listed(by.scopes)} for the kinds {', '.join(by.kinds.patterns)}{_until(by.expires_at)}"
        )
    row = TokenRow(
        *(order.id, order.name, digest, None, None, scopes, kinds, turn.now, by.name, until, None, None, None)
    )
    turn.tx.set_tokens([row])
    return row


def _check_order(turn: UnitOfWork, rows: Mapping[str, TokenRow], order: TokenRequest, until: float | None) -> None:
    """Raise `Refused` for a token that cannot be made."""
    for pattern in order.kinds:
        if "*" in pattern[:-1]:
            _refuse("kinds", f"has the pattern {pattern!r}: a * stands only at the end, as in mail.*")
    if until is not None and until <= turn.now:
        _refuse("expires_at", "has passed: give a later one")
    if order.name == LOCAL.name:
        _refuse("name", f"is what callers without a token are called, {LOCAL.name!r}: use another")
    if order.name != order.name.strip():
        _refuse("name", f"begins or ends with a space, so that it looks like another one, {order.name!r}: leave it out")
    if order.name.startswith("-"):
        _refuse("name", f"begins with a hyphen, as options do and empty fields are shown, {order.name!r}: use another")
    if order.id in rows or any(row.name == order.id for row in rows.values()):
        raise Conflict("id", "is that of another access token, or its name: make a new one")
    if order.name in rows or any(row.name == order.name and is_valid(row, turn.now) for row in rows.values()):
        raise Conflict("name", f"is that of an access token, {order.name!r}: revoke or rotate it, or use another name")
    _check_digest(rows, bytes.fromhex(order.digest))


def _check_room(rows: Mapping[str, TokenRow], by: Access) -> None:
    """Raise `Conflict` if there are as many tokens as a caller may fill the store with."""
    most = _MOST if by.has_all_kinds else _MOST_OF_SOME
    if len(rows) >= most:
        raise Conflict(
            "id",
            f"is that of one token too many: there are {most}, with those that have ended in the last 30 days. "
            f"Let clients share a token, or wait until ended ones are 30 days old",
        )


def _check_digest(rows: Mapping[str, TokenRow], digest: bytes) -> None:
    used = [known for row in rows.values() for known in (row.digest, row.former_digest) if known is not None]
    if any(compare_digest(known, digest) for known in used):
        raise Conflict("digest", "is that of a secret that was used before: make a new one")


def _refuse(field: str, detail: str) -> None:
    raise Refused(f"{field} {detail}", errors=[{"field": field, "detail": detail}])


def _rotated(turn: UnitOfWork, rows: Mapping[str, TokenRow], old: TokenRow, wanted: Rotate) -> TokenRow:
    digest = bytes.fromhex(wanted.order.digest)
    if compare_digest(digest, old.digest):
        return old
    if not is_valid(old, turn.now):
        raise Conflict("token", f"was revoked, or has expired, {old.name!r}: make another one")
    _check_digest(rows, digest)
    # Without an overlap too: a late copy of the request before does not bring its secret back.
    until = turn.now + wanted.order.overlap if wanted.order.overlap else _LONG_AGO
    return old._replace(digest=digest, former_digest=old.digest, former_until=until, rotated_at=turn.now)


def find(rows: Mapping[str, TokenRow], token: str, now: float) -> TokenRow | None:
    """Return the token with this id, or else the valid one with this name."""
    if token in rows:
        return rows[token]
    return next((row for row in rows.values() if row.name == token and is_valid(row, now)), None)


def is_valid(row: TokenRow, now: float) -> bool:
    """Return whether a token is neither revoked nor expired."""
    return row.revoked_at is None and (row.expires_at is None or now < row.expires_at)


def is_covered(by: Access, row: TokenRow) -> bool:
    """Return whether a caller may do all that a token allows."""
    return by.token_id in (None, row.id) or by.covers(row.scopes.split(","), row.kinds.split("/"), row.expires_at)


def listed(view: View, by: Access = LOCAL) -> list[TokenInfo]:
    """Return the tokens that a caller may see, the oldest first."""
    return [info(row) for row in view.tokens() if is_covered(by, row)]


def one(view: View, token: str, *, by: Access = LOCAL, now: float) -> TokenInfo | None:
    """Return a token by its id or name; None: there is none that the caller may see."""
    row = find({row.id: row for row in view.tokens()}, token, now)
    return None if row is None or not is_covered(by, row) else info(row)


def use(turn: UnitOfWork, uses: Sequence[Mapping[str, float]]) -> list[None]:
    """Note when tokens were used last."""
    for used_at in uses:
        turn.tx.use_tokens(used_at)
    return [None] * len(uses)


def change_sessions(turn: UnitOfWork, changes: Sequence[SessionRow | bytes]) -> list[None]:
    """Begin sessions of the console, or end those with these digests."""
    begun = [change for change in changes if isinstance(change, SessionRow)]
    gone = [change for change in changes if not isinstance(change, SessionRow)]
    if begun:
        room, of_token = _SESSIONS - len(begun), Counter(row.secret for row in begun)
        for row in reversed(turn.tx.sessions()):
            if turn.now < row.until and room > 0 and of_token[row.secret] < _OF_ONE:
                room -= 1
                of_token[row.secret] += 1
            else:
                gone.append(row.digest)
    turn.tx.remove_sessions(gone)
    turn.tx.add_sessions(begun)
    return [None] * len(changes)


def forget(turn: UnitOfWork) -> None:
    """Remove tokens that ended long ago (Rule 4)."""
    rows = turn.tx.tokens()
    old = [row.id for row in rows[:-1] if min(row.revoked_at or _NEVER, row.expires_at or _NEVER) < turn.now - _KEPT]
    if old:
        turn.tx.begin_change()
        turn.tx.remove_tokens(old)


_NEVER = 1e12
_LONG_AGO = 0.0


def info(row: TokenRow) -> TokenInfo:
    """Describe a token."""
    return TokenInfo(
        id=row.id,
        name=row.name,
        scopes=[cast("Scope", scope) for scope in row.scopes.split(",")],
        kinds=row.kinds.split("/"),
        created_at=_moment(row.created_at),
        created_by=row.created_by,
        expires_at=_moment_or_none(row.expires_at),
        used_at=_moment_or_none(row.used_at),
        rotated_at=_moment_or_none(row.rotated_at),
        former_until=_moment_or_none(row.former_until or None),
        revoked_at=_moment_or_none(row.revoked_at),
    )


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def _moment_or_none(at: float | None) -> datetime | None:
    return None if at is None else _moment(at)


def _listed(scopes: Sequence[str] | frozenset[Scope]) -> str:
    return ",".join(scope for scope in SCOPES if scope in scopes)


def _until(expires_at: float | None) -> str:
    return "" if expires_at is None else f", until {_moment(expires_at):%Y-%m-%d %H:%M:%S} UTC"
