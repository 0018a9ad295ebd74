"""Encode what users write: values as JSON, errors as type, message and traceback; then by the codec of the client."""

import json
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from leasekit._driver.coding import CLEAR, Coding
from leasekit._lifecycle.validation import value_fault
from leasekit.codecs import Encoded
from leasekit.errors import TooLarge
from leasekit.periodic import PeriodicTask
from leasekit.task import NewTask, Settlement
from leasekit.wire import MAX_ERROR, MAX_PAYLOAD, MAX_PROGRESS, MAX_THEN

E = TypeVar("E", bound=BaseException)

_NO_NUMBER = "holds NaN or an infinity, which JSON does not have: give None, a string, or a finite number"
_MAX_MESSAGE = 2000
_MAX_TRACEBACK = 8 * 1024
_MAX_DESCRIBED = 40 * 1024  # bytes of JSON, where a control character takes six: a codec and Base64 make it larger


class _RawSuccessor(NewTask, frozen=True, kw_only=True, omit_defaults=True):
    payload: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))


class RawSettlement(Settlement, frozen=True, kw_only=True, omit_defaults=True):
    """A settlement that is decoded to be sent on. Users' values keep every byte, so that a repeat equals the first."""

    id: str  # any that an adapter has given to its task
    result: msgspec.Raw = None  # type: ignore[assignment] # what is left out stays so
    error: msgspec.Raw = None  # type: ignore[assignment]
    progress: msgspec.Raw | UnsetType = UNSET
    then: list[_RawSuccessor] = []  # type: ignore[assignment]


def encoded(value: Any, what: str, *, at_most: int | None = None, coding: Coding = CLEAR) -> msgspec.Raw:
    """Return `value` as JSON. Encoding happens once, and here, so that the caller sees the ValueError of a bad value.

    `what` names the value in errors. Raises `TooLarge` if what is sent has more than `at_most` bytes, and ValueError if
    the value is nested deeper than services take.
    """
    raw = coding.encoded(_json(value, what))
    check_size(raw, what, at_most)
    return raw


def check_size(raw: msgspec.Raw, what: str, at_most: int | None) -> None:
    """Raise `TooLarge` if a value, as it is sent, has more bytes than this."""
    if at_most is not None and (size := len(bytes(raw))) > at_most:
        raise TooLarge(
            f"this {what} has {size:,} bytes as JSON, the service takes {at_most:,}: "
            "store it elsewhere, and pass a reference to it"
        )


def _json(value: Any, what: str) -> msgspec.Raw:
    try:
        data = msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"this {what} is not JSON: {error}") from error
    if loses_number(value, data):
        raise ValueError(f"this {what} {_NO_NUMBER}")
    if (fault := value_fault(data, len(data))) is not None:
        raise ValueError(f"this {what} {fault}")
    return msgspec.Raw(data)


def loses_number(value: Any, data: bytes) -> bool:
    """Return whether `value` holds NaN or an infinity, for which its JSON, `data`, has null."""
    if value is None or b"null" not in data:
        return False
    try:
        json.dumps(msgspec.to_builtins(value, str_keys=True, enc_hook=lambda _: None), allow_nan=False)
    except ValueError:
        return True
    except (TypeError, RecursionError):  # only msgspec can encode it; a value nested too deep is refused elsewhere
        return False
    return False


def number_fault(task: NewTask) -> tuple[str, str] | None:
    """Return the first field of `task` that would lose NaN or an infinity, and what is wrong with it; None if none."""
    try:
        if b"null" not in msgspec.json.encode(task):
            return None
        values = ((name, getattr(task, name)) for name in task.__struct_fields__)
        fields = ((name, value) for name, value in values if value is not None and value is not UNSET)
        name = next((name for name, value in fields if loses_number(value, msgspec.json.encode(value))), None)
    except (TypeError, ValueError, OverflowError, RecursionError):  # not JSON: the service's adapter says why
        return None
    if name is None:
        return None
    return name, _NO_NUMBER if name == "payload" else "holds NaN or an infinity: give a finite number, or leave it out"


def progress(value: Any, *, at_most: int | None = None, coding: Coding = CLEAR) -> msgspec.Raw:
    """Return a checkpoint as it is sent.

    Raises ValueError if it is no JSON, is nested too deeply, or has more than 64 KiB or `at_most` bytes.
    """
    raw = encoded(value, "progress", coding=coding)
    most = MAX_PROGRESS if at_most is None else min(at_most, MAX_PROGRESS)
    if (size := len(bytes(raw))) > most:
        raise ValueError(f"this progress has {size:,} bytes: {most:,} at most")
    return raw


def reported_error(error: Any, coding: Coding) -> msgspec.Raw:
    """Return an error that code reports, an exception or a JSON value of its own. Raises ValueError and `TooLarge`."""
    raw = coding.error(described(error) if isinstance(error, BaseException) else _json(error, "error"))
    check_size(raw, "error", MAX_ERROR)
    return raw


def submitted(tasks: Sequence[NewTask], coding: Coding) -> list[NewTask]:
    """Return tasks with an id each as they are sent. Raises ValueError if the codec cannot encode a payload."""
    return [_coded(task, coding, known_as=task.id) for task in tasks]


def periodic(name: str, task: PeriodicTask, coding: Coding) -> PeriodicTask:
    """Return a periodic task as it is sent."""
    return _coded(task, coding, known_as=name)


def from_executor(settlement: Settlement, coding: Coding) -> Settlement:
    """Return a settlement of another process, which has no codec, as it is sent; but its checkpoint as it is."""
    if coding is CLEAR:
        return settlement
    return replace(
        settlement,
        result=None if settlement.result is None else coding.encoded(settlement.result),
        error=None if settlement.error is None else coding.error(settlement.error),
        then=[_coded(task, coding, known_as=task.id) for task in settlement.then],
    )


W = TypeVar("W", NewTask, PeriodicTask)


def _coded(work: W, coding: Coding, *, known_as: str | None) -> W:
    payload = work.payload
    if coding is CLEAR or payload is None or isinstance(payload, Encoded):
        return work
    clear = payload if isinstance(payload, msgspec.Raw) else _json(payload, "payload")
    return replace(work, payload=coding.encoded(clear, known_as=known_as))


def successor(task: NewTask, coding: Coding = CLEAR) -> NewTask:
    """Return a successor with its payload as JSON. Raises ValueError (`TooLarge`) if no service would accept the task.

    The check comes before the settlement, because a settlement is refused as a whole, with its result.
    """
    if (fault := number_fault(task)) is not None:
        raise ValueError(f"this {' '.join(fault)}")
    raw = _json(task.payload, "payload")
    try:  # msgspec checks the fields of a Struct only when it decodes one
        checked = msgspec.json.decode(bytes(encoded(replace(task, payload=None), "task")), type=NewTask)
    except msgspec.ValidationError as error:
        raise ValueError(f"this task of kind {task.kind!r} cannot be scheduled: {error}") from error
    if checked.id in checked.after:
        raise ValueError(f"task {checked.id!r} names itself in `after`: it would never be ready")
    coded = _coded(replace(checked, payload=raw), coding, known_as=checked.id)
    check_size(coded.payload, "payload", MAX_PAYLOAD)
    return coded


def size_of_successors(tasks: Sequence[NewTask], before: int) -> int:
    """Return `before` plus the bytes of `tasks` as JSON in one settlement. Raises `TooLarge` above the bound."""
    size = before + sum(len(msgspec.json.encode(task)) + 2 for task in tasks)
    if size > MAX_THEN:
        raise TooLarge(
            f"the successors of a task have {size:,} bytes as JSON together, a service takes {MAX_THEN:,}: "
            "put less into their payloads, or have a successor schedule the rest"
        )
    return size


def described(error: BaseException, *, message: str | None = None) -> msgspec.Raw:
    """Return type, message and traceback of an error as JSON; `message` replaces its own."""
    try:
        message = str(error) if message is None else message
    except Exception as broken:  # noqa: BLE001 - an error whose text fails must be reported all the same
        message = f"<no text: {type(broken).__qualname__}>"
    try:
        lines = "".join(traceback.format_exception(error))
    except Exception as broken:  # noqa: BLE001 - a SyntaxError that user code built by hand, for example
        lines = f"<no traceback: {type(broken).__qualname__}>"
    text = {"type": type(error).__qualname__, "message": message[:_MAX_MESSAGE], "traceback": lines[-_MAX_TRACEBACK:]}
    # A message may hold characters that UTF-8 cannot encode (file names do).
    text = {name: value.encode(errors="replace").decode() for name, value in text.items()}
    raw = encoded(text, "error")
    if len(bytes(raw)) <= _MAX_DESCRIBED:
        return raw
    return encoded({**text, "traceback": text["traceback"][-_MAX_TRACEBACK // 2 :]}, "error")


def each(error: BaseException, kind: type[E]) -> Iterator[E]:
    """Yield `error`, or the errors that a task group has wrapped in it, as far as they are of type `kind`."""
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from each(inner, kind)
    elif isinstance(error, kind):
        yield error
