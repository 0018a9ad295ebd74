"""Values on their way into and out of strings that a service bounds."""

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from leasekit.errors import ProtocolError, Refused

__all__ = ["error_json", "json_text", "payload", "text_of"]

_LONGEST_INPUT = 1024 * 1024
_SHORT = 1000


def payload(text: object) -> Any:
    """The input of a task: JSON as its value, anything else as the string that it is; None where there is none.

    Raises `ProtocolError` for what is no string, or one that no service carries.
    """
    if text is None:
        return None
    if not isinstance(text, str) or len(text) > _LONGEST_INPUT:
        raise ProtocolError(f"the input of a task is no string of at most {_LONGEST_INPUT:,} characters")
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text


def json_text(value: Any, field: str, *, at_most: int, item: int = 0, unit: str = "characters") -> str:
    """A value as JSON. Raises `Refused`, naming the field, where it is none, or more than the service takes."""
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _refused(f"the {field} cannot be sent as JSON: {error}", field, item) from error
    size = len(text.encode()) if unit == "bytes" else len(text)
    if size > at_most:
        raise _refused(f"the {field} has {size:,} {unit} as JSON, the service takes {at_most:,}", field, item)
    return text


def error_json(error: Any, *, at_most: int, **more: Any) -> str:
    """`{"error": …}` as JSON, with what else is known. Too long, it is cut: no task shall fail to end because of that.

    The traceback goes first, then all but the beginning of the message, then what else is known.
    """
    known = {name: value for name, value in more.items() if value is not None}
    try:
        whole: Any = msgspec.json.decode(msgspec.json.encode(error))
    except (TypeError, ValueError, OverflowError, RecursionError) as failure:
        whole = f"the error is no JSON: {failure}"
    fields = cast("dict[str, Any]", whole) if isinstance(whole, dict) else {}
    untraced = {name: value for name, value in fields.items() if name != "traceback"}
    brief = str(fields.get("message", cast("object", whole)))[:_SHORT]
    for said in (cast("object", whole), untraced or brief, brief):
        text = msgspec.json.encode({"error": said, **known}).decode()
        if len(text.encode()) <= at_most:
            return text
    return msgspec.json.encode({"error": brief}).decode()


def text_of(answer: Mapping[str, Any], *path: str, at_most: int) -> str:
    """A string of an answer. Raises `ProtocolError` where it is not there, empty, or longer than it can be."""
    value: Any = answer
    for name in path:
        value = cast("Mapping[str, Any]", value).get(name) if isinstance(value, Mapping) else None
    if not isinstance(value, str) or not 0 < len(value) <= at_most:
        raise ProtocolError(f"a task came whose {'.'.join(path)} is no string of 1-{at_most} characters")
    return value


def _refused(message: str, field: str, item: int) -> Refused:
    return Refused(message, errors=[{"item": item, "field": field, "detail": message}])
