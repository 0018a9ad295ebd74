"""Values as strings of bounded length, and strings as values."""

from collections.abc import Mapping
from typing import Any, cast

import msgspec
from msgspec import UNSET

from leasekit.errors import ProtocolError, Refused
from leasekit.task import Settlement
from leasekit.wire import decode_value

_LONGEST_INPUT = 1024 * 1024
_SHORT = 1000


def payload(text: object) -> Any:
    """Return a task's input, decoded if it is JSON, else as it is. Raises `ProtocolError`: too long, or no text."""
    if text is None:
        return None
    if not isinstance(text, str) or len(text) > _LONGEST_INPUT:
        raise ProtocolError(f"the input of a task must be a string of at most {_LONGEST_INPUT:,} characters")
    try:
        return decode_value(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text


def json_text(value: Any, field: str, *, at_most: int, item: int = 0, unit: str = "characters") -> str:
    """Return a value as JSON. Raises `Refused`, which names the field, if that is impossible or too long."""
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _refused(f"the {field} cannot be sent as JSON: {error}", field, item) from error
    size = len(text.encode()) if unit == "bytes" else len(text)
    if size > at_most:
        raise _refused(f"the {field} has {size:,} {unit} as JSON, the service takes {at_most:,}", field, item)
    return text


def failure_json(settlement: Settlement, *, at_most: int) -> str:
    """Return `{"error": …, "retry_after": …, "progress": …}` as JSON, cut to fit, because a settlement must be sent.

    The traceback is cut first, then all but the beginning of the message, then all but the error.
    """
    more = {"retry_after": settlement.retry_after, "progress": settlement.progress}
    known = {name: value for name, value in more.items() if value is not None and value is not UNSET}
    try:
        whole: Any = decode_value(msgspec.json.encode(settlement.error))
    except (TypeError, ValueError, OverflowError, RecursionError) as failure:
        whole = f"the error cannot be sent as JSON: {failure}"
    fields = cast("dict[str, Any]", whole) if isinstance(whole, dict) else {}
    untraced = {name: value for name, value in fields.items() if name != "traceback"}
    brief = str(fields.get("message", cast("object", whole)))[:_SHORT]
    for shown in (cast("object", whole), untraced or brief, brief):
        text = msgspec.json.encode({"error": shown, **known}).decode()
        if len(text.encode()) <= at_most:
            return text
    return msgspec.json.encode({"error": brief}).decode()


def text_of(answer: Mapping[str, Any], *path: str, at_most: int) -> str:
    """Return a string in an answer. Raises `ProtocolError` if it is missing, empty or too long."""
    value: Any = answer
    for name in path:
        value = cast("Mapping[str, Any]", value).get(name) if isinstance(value, Mapping) else None
    if not isinstance(value, str) or not 0 < len(value) <= at_most:
        raise ProtocolError(f"the {'.'.join(path)} of a task must be a string of 1 to {at_most} characters")
    return value


def _refused(message: str, field: str, item: int) -> Refused:
    return Refused(message, errors=[{"item": item, "field": field, "detail": message}])
