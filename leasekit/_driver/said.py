"""What bodies say, in the form in which it travels: values as JSON, errors described, seconds that make sense."""

import re
import traceback
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import msgspec
from msgspec.structs import replace

from leasekit.task import NewTask

__all__ = ["described", "each", "encoded", "progress", "seconds", "successor"]

E = TypeVar("E", bound=BaseException)

_MAX_PROGRESS = 64 * 1024
_MAX_PAYLOAD = 1024 * 1024
_MAX_NESTING = 64
_MAX_MESSAGE = 2000
_MAX_TRACEBACK = 8 * 1024
_LONGEST_WAIT = 10 * 365 * 86400


def encoded(value: Any, what: str) -> msgspec.Raw:
    """A value as JSON: encoded once, and here, where the one who made it can see that it is none (ValueError)."""
    try:
        return msgspec.Raw(msgspec.json.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"this {what} is no JSON: {error}") from error


def progress(value: Any, *, at_most: int | None = None) -> msgspec.Raw:
    """A checkpoint as JSON. Raises ValueError where the service would not keep it, for it goes with everybody's beats.

    `at_most`: the bytes that this service takes; None: it is not known yet.
    """
    raw = encoded(value, "progress")
    data = bytes(raw)
    most = _MAX_PROGRESS if at_most is None else min(at_most, _MAX_PROGRESS)
    if len(data) > most:
        raise ValueError(f"progress of {len(data)} bytes is above the {most} that are kept")
    if _depth(data) > _MAX_NESTING:
        raise ValueError(f"progress is nested deeper than the {_MAX_NESTING} levels that are kept")
    return raw


def successor(task: NewTask) -> NewTask:
    """A task that is to follow, its payload as JSON. Raises ValueError where no service would take it.

    Here and not with the settlement: that is refused as a whole, and the result with it.
    """
    raw = encoded(task.payload, "payload")
    data = bytes(raw)
    if len(data) > _MAX_PAYLOAD:
        raise ValueError(f"a payload of {len(data)} bytes is above the {_MAX_PAYLOAD} that are taken")
    if _depth(data) > _MAX_NESTING:
        raise ValueError(f"this payload is nested deeper than the {_MAX_NESTING} levels that are taken")
    try:  # a Struct checks its fields only where it is decoded
        checked = msgspec.json.decode(bytes(encoded(replace(task, payload=None), "task")), type=NewTask)
    except msgspec.ValidationError as error:
        raise ValueError(f"no task of kind {task.kind!r} can be scheduled so: {error}") from error
    return replace(checked, payload=raw)


def _depth(data: bytes) -> int:
    if data.count(b"[") + data.count(b"{") <= _MAX_NESTING:
        return 0  # not worth a closer look
    depth = deepest = 0
    for bracket in re.findall(rb"[\[{\]}]", re.sub(rb'"(?:[^"\\]|\\.)*"', b"", data)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def seconds(value: float, what: str) -> float:
    """A time to wait. Raises ValueError where it is none."""
    if not 0 <= value <= _LONGEST_WAIT:
        raise ValueError(f"{what}={value!r} is no time to wait: give 0 to {_LONGEST_WAIT} seconds")
    return float(value)


def described(error: BaseException) -> msgspec.Raw:
    """An exception as the error of a settlement."""
    try:
        message = str(error)
    except Exception as broken:  # noqa: BLE001 - an error whose text cannot be had has to be reported all the same
        message = f"<no text: {type(broken).__qualname__}>"
    try:
        lines = "".join(traceback.format_exception(error))
    except Exception as broken:  # noqa: BLE001 - of a SyntaxError that somebody made by himself, say
        lines = f"<no traceback: {type(broken).__qualname__}>"
    text = {"type": type(error).__qualname__, "message": message[:_MAX_MESSAGE], "traceback": lines[-_MAX_TRACEBACK:]}
    # A message may hold what UTF-8 cannot say (file names do).
    return encoded({name: value.encode(errors="replace").decode() for name, value in text.items()}, "error")


def each(error: BaseException, kind: type[E]) -> Iterator[E]:
    """The error, or where a task group has wrapped some, each of these, as far as they are of this kind."""
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from each(inner, kind)
    elif isinstance(error, kind):
        yield error
