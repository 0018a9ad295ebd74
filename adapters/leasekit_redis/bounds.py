"""What a request may hold: the same as at a leasekit server.

There is no server to look at a request, so it is read here as one would read it: through the types of the wire.
What does not fit is refused whole, with the item and the field, before anything is sent.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct

from leasekit.errors import Refused
from leasekit.task import Beat, NewTask, Settlement
from leasekit.wire import (
    MAX_BATCH,
    MAX_ERROR,
    MAX_PAYLOAD,
    MAX_PROGRESS,
    MAX_THEN,
    NewTaskItem,
    ResultsRequest,
    ScheduleRequest,
    SettlementItem,
    structural_fault,
)

__all__ = ["check_limit", "checked", "new_tasks", "progress_texts", "settlements"]

R = TypeVar("R", bound=Struct)

_PLACE = re.compile(r"`\$\.(?P<batch>\w+)(?:\[(?P<item>\d+)\])?(?:\.(?P<field>[^`]+))?`\Z")
_NO_JSON = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)
_ENDS = frozenset({"success", "fatal"})


def new_tasks(tasks: Sequence[NewTask]) -> list[NewTaskItem]:
    """The tasks as they would arrive at a server; their payloads are JSON. Raises `Refused`."""
    items = _through(ScheduleRequest, {"tasks": tasks}).tasks
    _refuse(fault for position, item in enumerate(items) for fault in _task(position, item))
    return items


def settlements(results: Sequence[Settlement], worker: str) -> list[SettlementItem]:
    """The results as they would arrive at a server; their values are JSON. Raises `Refused`."""
    items = _through(ResultsRequest, {"worker": worker, "results": results}).results
    _refuse(fault for position, item in enumerate(items) for fault in _result(position, item))
    return items


def progress_texts(beats: Sequence[Beat]) -> list[str | None]:
    """The progress of each beat as JSON, None where there is none. Raises `Refused`."""
    check_limit("beats", len(beats))
    texts: list[str | None] = []
    faults: list[dict[str, Any]] = []
    for position, beat in enumerate(beats):
        text = None
        if beat.progress is not UNSET:
            try:
                raw = Raw(msgspec.json.encode(beat.progress))
                text = bytes(raw).decode()
                faults += _value(position, "progress", raw, MAX_PROGRESS)
            except _NO_JSON as error:
                faults.append({"item": position, "field": "progress", "detail": f"is no JSON: {error}"})
        texts.append(text)
    _refuse(faults)
    return texts


def checked(request: type[R], fields: Mapping[str, Any]) -> R:
    """A request without values of users. Raises `Refused`."""
    try:
        return msgspec.convert(fields, request)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None


def check_limit(field: str, count: int) -> None:
    """Raises `Refused` where it is not a number of items that a batch or page may have."""
    if not 1 <= count <= MAX_BATCH:
        _refuse([{"field": field, "detail": f"{count}: give 1 to {MAX_BATCH}"}])


def _through(request: type[R], body: Mapping[str, Any]) -> R:
    try:
        return msgspec.json.decode(msgspec.json.encode(body), type=request)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except _NO_JSON as error:
        raise _unspeakable(body, error) from None


def _refusal(text: str) -> Refused:
    """What the types refuse, with its place: "Expected `int` <= 4 - at `$.tasks[1].priority`"."""
    detail, _, place = text.rpartition(" - at ")
    match = _PLACE.search(place)
    if match is None:
        return Refused(f"the request does not fit: {text:.500}", errors=[{"detail": text[:500]}])
    error: dict[str, Any] = {"field": match["field"] or match["batch"], "detail": detail[:500]}
    if match["item"] is not None:
        error["item"] = int(match["item"])
    return _refused([error])


def _unspeakable(body: Mapping[str, Any], error: Exception) -> Refused:
    for items in body.values():
        for position, item in enumerate(items if type(items) is not str else ()):
            try:
                msgspec.json.encode(item)
            except _NO_JSON as own:
                return _refused([{"item": position, "detail": f"is no JSON: {own}"}])
    return _refused([{"detail": f"is no JSON: {error}"}])


def _task(position: int, item: NewTaskItem, prefix: str = "") -> Iterable[dict[str, Any]]:
    yield from _value(position, f"{prefix}payload", item.payload, MAX_PAYLOAD)
    if item.id in item.after:
        yield {"item": position, "field": f"{prefix}after", "detail": "names the task itself: it would never be ready"}


def _result(position: int, item: SettlementItem) -> Iterable[dict[str, Any]]:
    yield from _value(position, "result", item.result, MAX_PAYLOAD)
    yield from _value(position, "error", item.error, MAX_ERROR)
    if item.progress is not UNSET:
        yield from _value(position, "progress", item.progress, MAX_PROGRESS)
    if item.then and item.outcome not in _ENDS:
        yield {"item": position, "field": "then", "detail": f"goes with success and fatal only, not {item.outcome}"}
    if len(item.then) > MAX_BATCH:
        yield {"item": position, "field": "then", "detail": f"has {len(item.then)} successors: {MAX_BATCH} at most"}
    if item.then and (size := len(msgspec.json.encode(item.then))) > MAX_THEN:
        yield {"item": position, "field": "then", "detail": f"has {size:,} bytes together: {MAX_THEN:,} at most"}
    for number, successor in enumerate(item.then):
        yield from _task(position, successor, f"then[{number}].")


def _value(position: int, field: str, value: Raw, most: int) -> Iterable[dict[str, Any]]:
    raw = bytes(value)
    if len(raw) > most:
        yield {"item": position, "field": field, "detail": f"has {len(raw):,} bytes: {most:,} at most"}
    elif (fault := structural_fault(raw)) is not None:
        yield {"item": position, "field": field, "detail": fault}


def _refuse(faults: Iterable[dict[str, Any]]) -> None:
    if errors := list(faults):
        raise _refused(errors)


def _refused(errors: list[dict[str, Any]]) -> Refused:
    first = errors[0]
    where = f"item {first['item']}: " if "item" in first else ""
    what = f"{first['field']} " if "field" in first else ""
    return Refused(f"{where}{what}{first['detail']}", errors=errors)
