"""Damaged rows, written by a bad disk or by another program: detect them, and set their tasks aside.

Rule: a damaged row concerns its own task only. That task ends as *dead*, with the damage as its reason.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import fields, replace

from leasekit._lifecycle.states import LEASED, WAITING
from leasekit.server.store import Content, DrainRow, GateRow, Run, TokenRow, Trigger
from leasekit.task import Status

logger = logging.getLogger("leasekit.server")

_MOST = 2**62  # the greatest count; the store can hold twice as much
_FIRST, _LAST = -6.2e10, 253_402_300_800.0  # seconds since the epoch: the years 5 to 9999, as in a `datetime`
_TTL = 365 * 86400.0  # the longest ttl of a task
_SHA256 = 32  # bytes
_FIELDS = fields(Trigger)
_INSTEAD = {"priority": 2, "claim_timeout": 1.0, "heartbeat_timeout": 1.0, "status": Status.DEAD}
_AFTER_EXPIRY = frozenset({Status.ENQUEUED, Status.RETRIABLE_FAILURE})  # the token of an expired lease is kept
_NAMES = frozenset(status.value for status in Status)
_scan = msgspec.json.Decoder(Raw).decode


def json_fault(value: Any) -> str | None:
    """Return why `value` is not JSON, or None. The scan builds no values: decoding costs three to six times as much."""
    try:
        _scan(value)
        if not value.isascii() and isinstance(value, bytes):
            value.decode()
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        return str(error)
    return None


def content_fault(content: Content | None) -> str | None:
    """Return why a task's payload or progress cannot be read; None: both can."""
    if content is None:
        return "its row of `task` is missing"
    if (fault := json_fault(content.payload)) is not None:
        return f"its payload is not JSON: {fault}"
    if content.progress is not None and (fault := json_fault(content.progress)) is not None:
        return f"its progress is not JSON: {fault}"
    texts: tuple[Any, ...] = (content.collection, content.traceparent)
    is_text = all(isinstance(text, str | None) for text in texts)
    return None if is_text else "its collection or traceparent is not text"


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and _FIRST < value < _LAST


def triggers(rows: Sequence[tuple[Any, ...]]) -> tuple[list[Trigger], list[Trigger]]:
    """Decode rows into the states of tasks, and return which of them are newly set aside and must still be written."""
    try:
        # Not strict: SQLite has neither statuses nor booleans of its own.
        tasks = msgspec.convert(rows, list[Trigger], strict=False)
    except msgspec.ValidationError:
        pass
    else:
        if not any(map(_fault, tasks)):
            return tasks, []
    read = [_read(row) for row in rows]
    return [task for task, _ in read], [task for task, is_written in read if not is_written]


def set_aside(row: Trigger, damage: str) -> Trigger:
    """Return a damaged task's state as *dead*, with the damage as its reason; an ended task keeps its status."""
    status = row.status if row.status.ended else Status.DEAD
    reason = f"the store is damaged, and this task is set aside: {damage}; schedule it again under another id"
    ended_at = time.time() if row.ended_at is None else row.ended_at
    ended = replace(row, status=status, owner=None, token=None, next_trigger_at=None, reason=reason, ended_at=ended_at)
    return replace(ended, cancel_requested=False)


def log(rows: Iterable[Trigger]) -> None:
    for row in rows:
        logger.error("task %r of kind %r is %s: %s", row.id, row.kind, row.status, row.reason)


def runs(rows: Iterable[tuple[Any, ...]]) -> list[Run]:
    whole: list[Run] = []
    for row in rows:
        run = Run(*row)
        try:
            msgspec.convert((run.attempt, run.outcome, run.at, run.worker), tuple[int, str, float, str | None])
        except msgspec.ValidationError as error:
            logger.error("run %s of task number %s is left out, its row is damaged: %s", run.fence, run.seq, error)
        else:
            whole += [run] if is_number(run.at) else []
    return whole


def gates(rows: Iterable[tuple[Any, ...]]) -> list[GateRow]:
    whole: list[GateRow] = []
    for row in rows:
        try:
            gate = msgspec.convert(row, GateRow)
        except msgspec.ValidationError as error:
            logger.error("the gate of the %s %r has no effect, its row is damaged: %s", row[0], row[1], error)
        else:
            whole += [gate] if is_number(gate.changed_at) and is_number(gate.until or 0) else []
    return whole


def drains(rows: Iterable[tuple[Any, ...]]) -> list[DrainRow]:
    whole: list[DrainRow] = []
    for row in rows:
        try:
            drain = msgspec.convert(row, DrainRow)
        except msgspec.ValidationError as error:
            logger.error("the drain of the worker %r has no effect, its row is damaged: %s", row[0], error)
        else:
            whole += [drain] if is_number(drain.at) else []
    return whole


def tokens(rows: Iterable[tuple[Any, ...]]) -> list[TokenRow]:
    """Return the access tokens; one whose row is damaged is not valid."""
    whole: list[TokenRow] = []
    for row in rows:
        try:
            token = msgspec.convert(row, TokenRow)
        except msgspec.ValidationError as error:
            logger.error("the access token %r is not valid, its row is damaged: %s", row[0], error)
        else:
            times = (token.created_at, token.former_until, token.expires_at, token.used_at, token.rotated_at)
            is_whole = all(is_number(at or 0) for at in (*times, token.revoked_at)) and len(token.digest) == _SHA256
            whole += [token] if is_whole else []
    return whole


def statuses(rows: Iterable[tuple[Any, Any, int]]) -> dict[str, dict[str, int]]:
    """Sum up the tasks of each kind by status; an unknown status counts as *damaged*."""
    counts: dict[str, dict[str, int]] = {}
    for kind, status, count in rows:
        of_kind = counts.setdefault(kind if isinstance(kind, str) else repr(kind), {})
        name = status if status in _NAMES else "damaged"
        of_kind[name] = of_kind.get(name, 0) + count
    return counts


def _read(row: tuple[Any, ...]) -> tuple[Trigger, bool]:
    """Decode one state column by column; also return whether the row already has this state."""
    values: list[Any] = []
    damage: list[str] = []
    for field, value in zip(_FIELDS, row, strict=True):
        try:
            values.append(msgspec.convert(value, field.type, strict=False))
        except msgspec.ValidationError:
            damage.append(field.name)
            values.append(_INSTEAD.get(field.name, field.default if not field.required else repr(value)))
    task = Trigger(*values)
    fault = f"{', '.join(damage)} of its row of `trigger`" if damage else _fault(task)
    if fault is None:
        return task, True
    is_over = "status" not in damage and task.status.ended
    is_written = is_over and (task.owner, task.token, task.next_trigger_at) == (None, None, None)
    return set_aside(task, fault), is_written


def _fault(row: Trigger) -> str | None:
    is_leased = row.status in LEASED
    may_have_token = is_leased or row.status in _AFTER_EXPIRY
    if (row.owner is not None) is not is_leased or (row.token is not None and not may_have_token):
        return f"it is {row.status}, and its owner or token does not fit this status"
    if (row.next_trigger_at is None) is (is_leased or row.status in WAITING):
        return f"it is {row.status}, and next_trigger_at does not fit this status"
    if not (0 < row.claim_timeout <= _TTL and 0 < row.heartbeat_timeout <= _TTL):
        return f"its timeouts are {row.claim_timeout:g} and {row.heartbeat_timeout:g} s, out of bounds"
    if not (is_number(row.next_trigger_at or 0) and max(row.fence, row.attempt, row.crashes, row.failures) < _MOST):
        return "a number in its row of `trigger` is too big"
    return None if row.id else "its id is empty"
