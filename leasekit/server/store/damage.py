"""What a store does about rows that make no sense: a bad disk, or a program with the file in its hands, wrote them.

Rule: a damaged row concerns its own task. That one ends as *dead*, with the damage as its reason; the others go on.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import fields, replace

from leasekit._lifecycle.states import LEASED, WAITING
from leasekit.server.store import Content, Run, Trigger
from leasekit.task import Status

__all__ = ["content_fault", "is_number", "json_fault", "log", "runs", "set_aside", "statuses", "triggers"]

logger = logging.getLogger("leasekit.server")

_MOST = 2**62  # of what is counted up: the store can hold twice as much
_FIRST, _LAST = -6.2e10, 253_402_300_800.0  # seconds since the epoch: the years 5 to 9999, which a date can say
_TTL = 365 * 86400.0  # the longest that a task can ask for
_FIELDS = fields(Trigger)
_INSTEAD = {"priority": 2, "claim_timeout": 1.0, "heartbeat_timeout": 1.0, "status": Status.DEAD}
_NAMES = frozenset(status.value for status in Status)
_scan = msgspec.json.Decoder(Raw).decode


def json_fault(value: Any) -> str | None:
    """Why this is not JSON, None where it is. No values are built: to decode costs three to six times as much."""
    try:
        _scan(value)
        if not value.isascii() and isinstance(value, bytes):
            value.decode()
    except (ValueError, TypeError, RecursionError) as error:
        return str(error)
    return None


def content_fault(content: Content | None) -> str | None:
    """Why a holder cannot be given this, None where it can."""
    if content is None:
        return "its row of `task` is missing"
    if (fault := json_fault(content.payload)) is not None:
        return f"its payload is not JSON: {fault}"
    if content.progress is not None and (fault := json_fault(content.progress)) is not None:
        return f"its progress is not JSON: {fault}"
    texts: tuple[Any, ...] = (content.collection, content.traceparent)
    is_text = all(isinstance(one, str | None) for one in texts)
    return None if is_text else "its collection or traceparent is no text"


def is_number(value: Any) -> bool:
    """Whether this is a time that can be, or a span of it."""
    return isinstance(value, int | float) and _FIRST < value < _LAST


def triggers(rows: Sequence[tuple[Any, ...]]) -> tuple[list[Trigger], list[Trigger]]:
    """Where these tasks stand, and those of them that are damaged and have yet to be written as they stand."""
    try:
        # Not strictly: SQLite has neither statuses nor booleans of its own.
        found = msgspec.convert(rows, list[Trigger], strict=False)
    except msgspec.ValidationError:
        pass
    else:
        if not any(map(_fault, found)):
            return found, []
    read = [_read(row) for row in rows]
    return [one for one, _ in read], [one for one, is_written in read if not is_written]


def set_aside(row: Trigger, damage: str) -> Trigger:
    """End a damaged task; a status that is final stays."""
    status = row.status if row.status.ended else Status.DEAD
    reason = f"the store is damaged, and this task was set aside: {damage}; schedule it again under another id"
    return replace(row, status=status, ordered=False, owner=None, token=None, next_trigger_at=None, reason=reason)


def log(rows: Iterable[Trigger]) -> None:
    """Say which tasks were set aside, and why."""
    for row in rows:
        logger.error("task %r of kind %r is %s: %s", row.id, row.kind, row.status, row.reason)


def runs(rows: Iterable[tuple[Any, ...]]) -> list[Run]:
    """The runs by their rows; those that cannot be read are left out."""
    found: list[Run] = []
    for row in rows:
        one = Run(*row)
        try:
            msgspec.convert((one.attempt, one.outcome, one.at, one.worker), tuple[int, str, float, str | None])
        except msgspec.ValidationError as error:
            logger.error("run %s of task number %s is left out, its row is damaged: %s", one.fence, one.seq, error)
        else:
            found += [one] if is_number(one.at) else []
    return found


def statuses(rows: Iterable[tuple[Any, Any, int]]) -> dict[str, dict[str, int]]:
    """How many tasks of each kind are in which status; *damaged*: in one that there is not."""
    found: dict[str, dict[str, int]] = {}
    for kind, status, count in rows:
        of_kind = found.setdefault(kind if isinstance(kind, str) else repr(kind), {})
        name = status if status in _NAMES else "damaged"
        of_kind[name] = of_kind.get(name, 0) + count
    return found


def _read(row: tuple[Any, ...]) -> tuple[Trigger, bool]:
    """Where a task stands by its row, column by column; and whether the row says so."""
    values: list[Any] = []
    damage: list[str] = []
    for field, value in zip(_FIELDS, row, strict=True):
        try:
            values.append(msgspec.convert(value, field.type, strict=False))
        except msgspec.ValidationError:
            damage.append(field.name)
            values.append(_INSTEAD.get(field.name, field.default if not field.required else repr(value)))
    found = Trigger(*values)
    fault = f"{', '.join(damage)} of its row of `trigger`" if damage else _fault(found)
    if fault is None:
        return found, True
    is_over = "status" not in damage and found.status.ended
    is_written = is_over and (found.owner, found.token, found.next_trigger_at) == (None, None, None)
    return set_aside(found, fault), is_written


def _fault(row: Trigger) -> str | None:
    """What of a task's place cannot be."""
    is_leased = row.status in LEASED
    may_have_token = is_leased or row.status is Status.ENQUEUED  # of a lease that ran out
    if (row.owner is not None) is not is_leased or (row.token is not None and not may_have_token):
        return f"it is {row.status}, and its owner or token does not fit that"
    if (row.next_trigger_at is None) is (is_leased or row.status in WAITING):
        return f"it is {row.status}, and next_trigger_at does not fit that"
    if not (0 < row.claim_timeout <= _TTL and 0 < row.heartbeat_timeout <= _TTL):
        return f"its timeouts are {row.claim_timeout:g} and {row.heartbeat_timeout:g} s"
    if not (is_number(row.next_trigger_at or 0) and max(row.fence, row.attempt, row.crashes, row.failures) < _MOST):
        return "a number in its row of `trigger` is too big"
    return None if row.id else "its id is empty"
