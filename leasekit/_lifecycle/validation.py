"""Checks of requests, which raise `Refused` in all services alike, and of the values that holders hand to the keeper.

Every service calls these checks before anything is applied: HTTP and embedded, memory, Redis. A request that does not
fit is refused whole, with the item and the field. Users' JSON comes as `msgspec.Raw`, in which msgspec does not find
bad UTF-8, lone surrogates and numbers out of range. So each value is decoded here once, and thrown away.

Rule 1: work is bounded, not only bytes. A request that would take long to decode is refused before it is decoded: many
short items in a long list (`read`), many arrays and objects in a value (`value_fault`).
"""

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from math import isinf
from typing import Any, NoReturn, TypeVar, cast

import msgspec
from msgspec import UNSET, Raw, Struct

from leasekit import wire
from leasekit.errors import Refused
from leasekit.task import Beat, NewTask, Outcome, Settlement, TaskSelection

_R = TypeVar("_R", bound=Struct)

ENDS: frozenset[Outcome] = frozenset({"success", "fatal"})  # outcomes that may have successors

_NULL = b"null"
_NO_DEBOUNCE = "has no effect at this service: its dedupe keys count as long as tasks are kept"
LACKING = {
    "after": "needs dependencies, which this service lacks: schedule this task from the one before, with `then`",
    "key": "needs fair shares by key, which this service lacks: leave the key out",
    "debounce": _NO_DEBOUNCE,
    "dedupe_scope": _NO_DEBOUNCE,
    "tags": "needs an index of tags, which this service lacks: use `collection`, or leave the tags out",
    "requires": "needs labels of workers, which this service lacks: give such tasks a kind of their own",
    "prefers": "needs labels of workers, which this service lacks: leave it out",
    "start_deadline": "has no effect at this service, which starts a task however late it is: leave it out",
}
"""The options of a task that a service may lack, and why it refuses them."""
_NOT_GIVEN: tuple[Any, ...] = (None, UNSET, [], {}, "kept")
_FIRST, _LAST = (f"{at.replace(tzinfo=None).isoformat()}Z" for at in (wire.FIRST_INSTANT, wire.LAST_INSTANT))
_NO_INSTANT = f"is out of reach: give an instant from {_FIRST} to {_LAST}"
_OWN_DEPENDENCY = "names the task itself: it would never be ready"
_NO_JSON = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)
_encode = msgspec.json.encode
# `.tasks[3].retry.waits[1]`: the batch, the position in it, the field of the item.
_PLACE = re.compile(r"\.(\w+)(?:\[(\d+)\](?:\.(.+))?)?", re.DOTALL)
# The last "at" of msgspec's message: the text before it may repeat names that the client chose.
_AT = re.compile(r"(.*) - at (`key` in )?`\$(.*)`", re.DOTALL)
_ABSENT = re.compile(r"^Object (?:missing required|contains unknown) field `(.*)`$", re.DOTALL)
# msgspec's message about a number with a fraction or exponent where the type is an integer, and the path to it.
_FLOAT = re.compile(r"Expected `int(?: \| null)?`, got `float` - at `\$((?:\.\w+|\[\d+\])+)`")
_STEP = re.compile(r"\w+|\[\d+\]")
_MOST_FIELDS = 20  # a request has fewer fields that are integers
_LONGEST = 500  # characters of a text that may repeat what a client sent


def read(body: bytes, request_type: type[Any]) -> Any:
    """Decode and check a request of this type. Raises `Refused`, msgspec's `DecodeError`, and `RecursionError`."""
    if len(body) > wire.MAX_NAMES:
        _check_shape(body)
    return _decode_and_check(body, request_type, lacks=())


def checked(request_type: type[_R], body: Mapping[str, Any], *, lacks: Collection[str] = ()) -> _R:
    """Check a request of this process as a server would, and return it with users' values as bytes.

    `lacks`: the options of tasks that this service does not have, of `LACKING`. Raises `Refused`.
    """
    try:
        return _decode_and_check(_encode(body), request_type, lacks=lacks)
    except Refused:
        raise
    except _NO_JSON as error:
        raise _not_json(body, error) from None


def check_kinds(kinds: Sequence[str]) -> None:
    """Raise `Refused` if a claim names no kind, or more kinds than any service takes."""
    if not 1 <= len(kinds) <= wire.MAX_KINDS:
        detail = f"a claim of {len(kinds):,} kinds: name 1 to {wire.MAX_KINDS}, and make more claims for more"
        raise Refused(detail, errors=[{"field": "kinds", "detail": detail}])


def check_limit(field: str, count: object) -> None:
    """Raise `Refused` if a batch or page must not have `count` items; `field` is the name of that number."""
    if not (isinstance(count, int) and 1 <= count <= wire.MAX_BATCH):
        detail = f"is {count!r}: give a whole number from 1 to {wire.MAX_BATCH}"
        raise Refused(f"{field} {detail}", errors=[{"field": field, "detail": detail}])


def converted(values: Mapping[str, Any], type_: type[_R]) -> _R:
    """Read the parameters of a request, which are texts. Raises `Refused`."""
    try:
        request = msgspec.convert(values, type_, strict=False)
    except msgspec.ValidationError as error:
        raise refusal(error) from None
    _check_instants(request)
    return request


def check_new_tasks(tasks: Sequence[NewTask], *, lacks: Collection[str] = ()) -> None:
    """Raise `Refused` if a payload is too big, too deep or not JSON, or a task has an option that cannot be."""
    errors = _Errors(lacks)
    for item, task in enumerate(tasks):
        errors.check_task(item, "", task)
    errors.refuse()


def check_beats(beats: Sequence[Beat], *, lacks: Collection[str] = ()) -> None:
    """Raise `Refused` if a progress is too big, nested too deep or not JSON; `lacks` has no effect here."""
    errors = _Errors(lacks)
    for item, beat in enumerate(beats):
        if beat.progress is not UNSET:
            errors.check_value(item, "progress", beat.progress, wire.MAX_PROGRESS)
    errors.refuse()


def check_settlements(settlements: Sequence[Settlement], *, lacks: Collection[str] = ()) -> None:
    """Raise `Refused` if a value or a successor does not fit, or if an outcome must not have successors."""
    errors = _Errors(lacks)
    for item, settlement in enumerate(settlements):
        errors.check_value(item, "result", settlement.result, wire.MAX_PAYLOAD)
        errors.check_value(item, "error", settlement.error, wire.MAX_ERROR)
        if settlement.progress is not UNSET:
            errors.check_value(item, "progress", settlement.progress, wire.MAX_PROGRESS)
        if settlement.then:
            _check_successors(errors, item, settlement)
    errors.refuse()


def refusal(error: msgspec.ValidationError) -> Refused:
    """Turn msgspec's error, which ends in "at `$.tasks[3].kind`", into a `Refused` of item 3 and field `kind`."""
    at = _AT.fullmatch(str(error))
    detail, in_key, path = at.groups() if at else (str(error), None, "")
    if in_key:
        detail = f"a name in it does not fit: {detail}"
    place = _PLACE.fullmatch(path.replace("[...]", ""))
    batch, item, inside = place.groups() if place else (None, None, None)
    absent = _ABSENT.search(detail)
    names = [batch if item is None else inside, absent[1] if absent else None]
    # An item of the wrong type altogether has no field: then the batch is named.
    field = ".".join(name for name in names if name) or batch
    entry: dict[str, Any] = {"detail": shortened(detail)}
    if item is not None:
        entry["item"] = int(item)
    if field:
        entry["field"] = shortened(field)
    where = "the request" if item is None else f"item {item}"
    fault = ": ".join(entry[key] for key in ("field", "detail") if key in entry)
    return Refused(f"{where} does not fit, and nothing was applied: {fault}", errors=[entry])


def shortened(text: str) -> str:
    """Cut a long text, which may repeat what a client sent."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


class _Errors:
    """The faults of one batch: each check adds those that it finds, and `refuse` raises all of them as a `Refused`."""

    def __init__(self, lacks: Collection[str]) -> None:
        self._lacks = lacks
        self._faults: list[dict[str, Any]] = []
        self._nodes = 0

    def add(self, item: int, field: str, detail: str) -> None:
        self._faults.append({"item": item, "field": field, "detail": detail})

    def check_value(self, item: int, field: str, value: Any, most: int) -> None:
        try:
            # A plain value is measured as it would be sent.
            raw = bytes(value) if type(value) is Raw else _encode(value)
            detail = self._fault(raw, most)
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            detail = f"is not JSON: {error}"
        except RecursionError:
            detail = _TOO_DEEP
        if detail is not None:
            self.add(item, field, detail)

    def check_task(self, item: int, field_prefix: str, task: NewTask) -> None:
        self.check_value(item, f"{field_prefix}payload", task.payload, wire.MAX_PAYLOAD)
        for option in self._lacks:
            if getattr(task, option) not in _NOT_GIVEN:
                self.add(item, f"{field_prefix}{option}", LACKING[option])
        if task.at is not None and not _is_expressible(task.at):
            self.add(item, f"{field_prefix}at", _NO_INSTANT)
        if task.id in task.after:
            self.add(item, f"{field_prefix}after", _OWN_DEPENDENCY)

    def _fault(self, raw: bytes, most: int) -> str | None:
        """Return why a value does not fit; raise if it is not JSON, or if the values together have too many parts."""
        if raw == _NULL:
            return None
        if (fault := value_fault(raw, most)) is not None:
            return fault
        self._nodes += _brackets(raw).count(b"[")
        if self._nodes > wire.MAX_NODES_TOGETHER:
            detail = f"the values have more than {wire.MAX_NODES_TOGETHER:,} arrays and objects together"
            raise Refused(f"{detail}: send fewer items in one request", errors=[{"detail": detail}])
        _look_through(raw)
        return None

    def refuse(self) -> None:
        if self._faults:
            first = self._faults[0]
            raise Refused(f"item {first['item']}: {first['field']} {first['detail']}", errors=self._faults)


def _check_float(text: str) -> None:
    if isinf(float(text)):
        raise ValueError("Number out of range")


# msgspec takes ten times as long as Python for numbers near the ends of the range, and holds the interpreter lock.
_look_through = msgspec.json.Decoder(float_hook=_check_float).decode


def _check_successors(errors: _Errors, item: int, settlement: Settlement) -> None:
    then = settlement.then
    if settlement.outcome not in ENDS:
        errors.add(item, "then", f"goes with success and fatal only, not with {settlement.outcome}")
    if len(then) > wire.MAX_BATCH:
        errors.add(item, "then", f"has {len(then)} successors: {wire.MAX_BATCH} at most")
    if (size := len(_encode(then))) > wire.MAX_THEN:
        errors.add(item, "then", f"has {size:,} bytes together: {wire.MAX_THEN:,} at most")
    for position, task in enumerate(then):
        errors.check_task(item, f"then[{position}].", task)


# One value ------------------------------------------------------------------------------------------------------

_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_TOO_DEEP = f"is nested too deep: {wire.MAX_NESTING} levels at most"


def value_fault(value: bytes, most: int) -> str | None:
    """Return why a JSON value is too big, has too many arrays and objects, or is too deep; None if it fits."""
    if len(value) > most:
        return f"has {len(value):,} bytes: {most:,} at most"
    left = _brackets(value)
    if not left:  # nearly always
        return None
    nodes = left.count(b"[")
    if nodes > wire.MAX_NODES:
        return f"has {nodes:,} arrays and objects: {wire.MAX_NODES:,} at most"
    for _ in range(wire.MAX_NESTING):
        left = left.replace(b"[]", b"")  # the innermost
    return _TOO_DEEP if left else None


def _brackets(value: bytes) -> bytes:
    """Return the brackets of a JSON value outside of its strings, as square ones; empty if up to `MAX_NESTING` open.

    The value is not decoded: a megabyte of brackets would make half a million objects.
    """
    if value.count(b"[") + value.count(b"{") <= wire.MAX_NESTING:  # also counts those in strings
        return b""
    if b'"' in value:  # escaped quotes go first; then every other part between quotes is inside of a string
        value = b"".join(value.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])
    return value.translate(_BRACKETS, _NO_BRACKETS)


# Long requests, before they are decoded -------------------------------------------------------------------------

_NO_VALUE = Raw(b"")


class _Item(Struct):
    """The fields of an item that may be long."""

    payload: Raw = _NO_VALUE
    result: Raw = _NO_VALUE
    error: Raw = _NO_VALUE
    progress: Raw = _NO_VALUE
    then: list[Raw] = []

    def rest(self, whole: int) -> int:
        """Return the bytes of the other fields, in an item of `whole` bytes."""
        values = [self.payload, self.result, self.error, self.progress, *self.then]
        return whole - sum(len(bytes(value)) for value in values)


class _Request(Struct):
    """The batch of a request, which may be long."""

    tasks: list[Raw] = []
    beats: list[Raw] = []
    results: list[Raw] = []


def _check_shape(body: bytes) -> None:
    """Refuse a long request that has too many items, or too many bytes in fields that should be short.

    The request's types would refuse it too, but only after all of it was decoded: a million items take seconds.
    """
    try:
        request = msgspec.json.decode(body, type=_Request)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return  # the request's types say what is wrong; decoding ends at the first mistake
    batches = {"tasks": request.tasks, "beats": request.beats, "results": request.results}
    if len(body) - sum(len(bytes(item)) for items in batches.values() for item in items) > wire.MAX_NAMES:
        _refuse_long_fields("the request", {})
    for field, items in batches.items():
        _check_count(items, {"field": field}, field)
        for position, item in enumerate(items):
            _check_item(item, {"item": position, "field": field})


def _check_item(item: Raw, error_place: Mapping[str, Any]) -> None:
    size = len(bytes(item))
    if size <= wire.MAX_NAMES:
        return
    try:
        fields = msgspec.json.decode(item, type=_Item)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return
    if fields.rest(size) > wire.MAX_NAMES:
        _refuse_long_fields(f"item {error_place['item']}", error_place)
    _check_count(fields.then, {**error_place, "field": "then"}, f"item {error_place['item']}: then")
    for successor in fields.then:
        _check_item(successor, {**error_place, "field": "then"})


def _check_count(items: Sequence[Raw], error_place: Mapping[str, Any], name: str) -> None:
    """Raise `Refused` for more than `MAX_BATCH` items; `error_place` says which item and field, for programs."""
    if len(items) > wire.MAX_BATCH:
        detail = f"has {len(items):,} items: {wire.MAX_BATCH:,} at most"
        raise Refused(f"{name} {detail}", errors=[{**error_place, "detail": detail}])


def _refuse_long_fields(subject: str, error_place: Mapping[str, Any]) -> NoReturn:
    detail = f"has more than {wire.MAX_NAMES:,} bytes besides payloads, results, errors, progress and successors"
    raise Refused(f"{subject} {detail}", errors=[{**error_place, "detail": detail}])


# Decoding -------------------------------------------------------------------------------------------------------

_CHECKS: dict[type[Any], tuple[str, Callable[..., None]]] = {
    wire.ScheduleRequest: ("tasks", check_new_tasks),
    wire.BeatsRequest: ("beats", check_beats),
    wire.ResultsRequest: ("results", check_settlements),
}


def _decode_and_check(body: bytes, request_type: type[_R], *, lacks: Collection[str]) -> _R:
    request: _R = _decode_request(body, request_type)
    if type(request) in _CHECKS:
        batch, check = _CHECKS[type(request)]
        check(getattr(request, batch), lacks=lacks)
        return request
    _check_instants(request)
    if "tags" in lacks and isinstance(request, TaskSelection) and request.tags is not None:
        detail = LACKING["tags"]
        raise Refused(f"tags {detail}", errors=[{"field": "tags", "detail": detail}])
    return request


def _check_instants(request: Struct) -> None:
    """Raise `Refused` if a field of a request has an instant that some time zone cannot express."""
    for name in _instants(type(request)):
        value = getattr(request, name)
        if value is not None and value is not UNSET and not _is_expressible(value):
            raise Refused(f"{name} {_NO_INSTANT}", errors=[{"field": name, "detail": _NO_INSTANT}])


@functools.cache
def _instants(type_: type[Struct]) -> Sequence[str]:
    """Return the fields whose values are instants."""
    return [field.name for field in msgspec.structs.fields(type_) if "datetime" in str(field.type)]


def _is_expressible(instant: Any) -> bool:
    return bool(wire.FIRST_INSTANT <= instant <= wire.LAST_INSTANT)


def _decode_request(body: bytes, request_type: type[_R]) -> _R:
    """Decode a request; in fields that are integers, 39.0 is one too, as in JSON Schema. Raises `Refused`."""
    for _ in range(_MOST_FIELDS):
        try:
            return cast("_R", _decoder(request_type).decode(body))
        except msgspec.ValidationError as error:
            place = _FLOAT.fullmatch(str(error))
            before = body
            if place is not None:
                with suppress(msgspec.MsgspecError):  # another item has no such field: the next try says so
                    body = bytes(_with_integers(Raw(body), _STEP.findall(place[1])))
            if body == before:
                raise refusal(error) from None
    raise Refused("the request has too many fields that must be integers and are not")


def _with_integers(value: Raw, path: Sequence[str]) -> Raw:
    """Return JSON in which integral numbers at this path are written as integers, in all items of lists."""
    if not path:
        number = wire.decode_value(value)
        return Raw(b"%d" % number) if isinstance(number, float) and number.is_integer() else value
    step, *rest = path
    if step.startswith("["):
        return Raw(_encode([_with_integers(item, rest) for item in msgspec.json.decode(value, type=list[Raw])]))
    fields = msgspec.json.decode(value, type=dict[str, Raw])
    if step in fields:
        fields[step] = _with_integers(fields[step], rest)
    return Raw(_encode(fields))


def _not_json(body: Mapping[str, Any], error: Exception) -> Refused:
    """Make the error that names the first item that cannot be encoded as JSON."""
    for field, items in body.items():
        for position, item in enumerate(items if type(items) in (list, tuple) else ()):
            if (fault := _encoding_error(item)) is not None:
                names = getattr(item, "__struct_fields__", ())
                inner = next((name for name in names if _encoding_error(getattr(item, name)) is not None), field)
                detail = f"is not JSON: {fault}"
                place = {"item": position, "field": inner, "detail": detail}
                return Refused(f"item {position} {detail}", errors=[place])
    return Refused(f"the request is not JSON: {error}", errors=[{"detail": f"is not JSON: {error}"}])


def _encoding_error(value: Any) -> Exception | None:
    try:
        _encode(None if value is UNSET else value)
    except _NO_JSON as error:
        return error
    return None


@functools.cache
def _decoder(request_type: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(request_type)
