"""A visit: one request for a page, and what pages need to answer it."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Struct

from leasekit._lifecycle.validation import converted
from leasekit.errors import Refused
from leasekit.server.access import Access
from leasekit.server.engine import Engine
from leasekit.server.roles.audit import Note, names_of

Mode = Literal["read-only", "on"]

_S = TypeVar("_S", bound=Struct)


async def _always() -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Visit:
    """A request for a page, or for an act."""

    engine: Engine
    given: Mapping[str, str]
    """The parameters of the query, or of the form."""
    access: Access
    """The caller, and its rights."""
    may_act: bool = False
    """Whether acts are offered, and done."""
    by: str | None = None
    """The name of the caller, for the log and the history of tasks."""

    goes_on: Callable[[], Awaitable[bool]] = _always
    """Return whether the session goes on, for answers that take long."""

    @property
    def now(self) -> datetime:
        """The moment from which the page counts, by the store's time."""
        return datetime.fromtimestamp(self.engine.clock.peek(), UTC)

    def note(self, act: str, *, target: str | None = None, fields: Struct | None = None) -> Note:
        """Return what the audit log is to say of an act."""
        return Note(act, self.access, target, [] if fields is None else names_of(fields), "console")

    def params(self, type_: type[_S]) -> _S:
        """Return the parameters as a value of this class. Raises `Refused` if they do not fit."""
        return converted(_with_tags(_with_zones(self.given, type_), type_), type_)


def parameters(text: bytes) -> dict[str, str]:
    """Return what a query or a form says, without empty fields.

    Raises `Refused` for a parameter that is given twice, and for more than a hundred.
    """
    given: dict[str, str] = {}
    try:
        pairs = parse_qsl(text.decode("latin-1"), max_num_fields=100)
    except ValueError:
        raise Refused("there are more than 100 parameters: send fewer") from None
    for name, value in pairs:
        if name in given:
            detail = "is given twice"
            raise Refused(f"the parameter {name[:100]!r} {detail}", errors=[{"field": name[:100], "detail": detail}])
        given[name] = value
    return given


def _with_zones(given: Mapping[str, str], type_: type[Struct]) -> dict[str, Any]:
    """Read the moments of `datetime-local` fields, which have no zone, as UTC."""
    moments = {field.name for field in msgspec.structs.fields(type_) if "datetime" in str(field.type)}
    return {name: _zoned(value) if name in moments else value for name, value in given.items()}


def _with_tags(given: dict[str, Any], type_: type[Struct]) -> dict[str, Any]:
    """Read the field `tag`, which has one tag, as the list of tags that an API takes."""
    names = {field.name: field.encode_name for field in msgspec.structs.fields(type_)}
    if "tags" not in names or "tag" not in given:
        return given
    return {name: value for name, value in given.items() if name != "tag"} | {names["tags"]: [given["tag"]]}


def _zoned(text: str) -> str:
    has_zone = text.endswith(("Z", "z")) or "+" in text or text.count("-") > 2
    if has_zone:
        return text
    return f"{text}:00Z" if text.count(":") == 1 else f"{text}Z"
