"""What bodies say, in the form in which it travels: values as JSON, errors described, seconds that make sense."""

import traceback
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

import msgspec
from msgspec.structs import replace

from leasekit.errors import TooLarge
from leasekit.task import NewTask
from leasekit.wire import MAX_PAYLOAD, MAX_PROGRESS, MAX_THEN, structural_fault

__all__ = ["described", "each", "encoded", "progress", "seconds", "size_of_successors", "successor"]

E = TypeVar("E", bound=BaseException)

_MAX_MESSAGE = 2000
_MAX_TRACEBACK = 8 * 1024
_LONGEST_WAIT = 10 * 365 * 86400


def encoded(value: Any, what: str, *, at_most: int | None = None) -> msgspec.Raw:
    """A value as JSON: encoded once, and here, where the one who made it can see that it is none (ValueError).

    Raises `TooLarge` where it has more than `at_most` bytes.
    """
    try:
        data = msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"this {what} is no JSON: {error}") from error
    if at_most is not None and len(data) > at_most:
        raise TooLarge(
            f"this {what} has {len(data):,} bytes as JSON, the service takes {at_most:,}: "
            "keep it elsewhere, and say here where it is"
        )
    return msgspec.Raw(data)


def progress(value: Any, *, at_most: int | None = None) -> msgspec.Raw:
    """A checkpoint as JSON. Raises ValueError where the service would not keep it, for it goes with everybody's beats.

    `at_most`: the bytes that this service takes; None: it is not known yet.
    """
    raw = encoded(value, "progress")
    data = bytes(raw)
    most = MAX_PROGRESS if at_most is None else min(at_most, MAX_PROGRESS)
    if len(data) > most:
        raise ValueError(f"progress of {len(data)} bytes is above the {most} that are kept")
    if (fault := structural_fault(data)) is not None:
        raise ValueError(f"this progress {fault}")
    return raw


def successor(task: NewTask) -> NewTask:
    """A task that is to follow, its payload as JSON. Raises ValueError (`TooLarge`) where no service would take it.

    Here and not with the settlement: that is refused as a whole, and the result with it.
    """
    raw = encoded(task.payload, "payload", at_most=MAX_PAYLOAD)
    data = bytes(raw)
    if (fault := structural_fault(data)) is not None:
        raise ValueError(f"this payload {fault}")
    try:  # a Struct checks its fields only where it is decoded
        checked = msgspec.json.decode(bytes(encoded(replace(task, payload=None), "task")), type=NewTask)
    except msgspec.ValidationError as error:
        raise ValueError(f"no task of kind {task.kind!r} can be scheduled so: {error}") from error
    return replace(checked, payload=raw)


def size_of_successors(tasks: Sequence[NewTask], before: int) -> int:
    """Bytes of these and of what was `before` them, as JSON in one settlement. Raises `TooLarge` above the bound."""
    size = before + sum(len(msgspec.json.encode(task)) + 2 for task in tasks)
    if size > MAX_THEN:
        raise TooLarge(
            f"the successors of a task have {size:,} bytes as JSON together, a service takes {MAX_THEN:,}: "
            "put less into their payloads, or have a successor schedule the rest"
        )
    return size


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
