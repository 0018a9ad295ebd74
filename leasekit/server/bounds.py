"""What a request may hold: the checks that its types cannot express (DESIGN §6, Bounds).

Both doors call them, HTTP and embedded, before anything reaches the engine. A request that does not fit is refused
whole, with the item and the field. Users' JSON comes as `msgspec.Raw`, which msgspec skips without looking closely:
bad UTF-8, lone surrogates and numbers out of range pass. So each value is decoded here once, and thrown away.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from leasekit.errors import Refused
from leasekit.task import Beat, NewTask, Outcome, Settlement
from leasekit.wire import MAX_BATCH, MAX_ERROR, MAX_NESTING, MAX_PAYLOAD, MAX_PROGRESS

__all__ = ["ENDS", "check_beats", "check_new_tasks", "check_settlements", "refusal", "shortened"]

ENDS: frozenset[Outcome] = frozenset({"success", "fatal"})
"""Outcomes that may have successors."""

_NULL = b"null"
_NO_DEPENDENCIES = "needs dependencies, a leasekit server has none: have the task before schedule this one, with `then`"
_TOO_DEEP = f"is nested too deep: {MAX_NESTING} levels at most"
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.encode
# `.tasks[3].retry.waits[1]`: the batch, the position in it, the field of the item.
_PLACE = re.compile(r"\.(\w+)(?:\[(\d+)\](?:\.(.+))?)?", re.DOTALL)
_ABSENT = re.compile(r"^Object (?:missing required|contains unknown) field `(.*)`$", re.DOTALL)
_LONGEST = 500  # characters of a text that may repeat what a client sent


def check_new_tasks(tasks: Sequence[NewTask]) -> None:
    """Refuse a batch in which a payload is too big, nested too deep, or no JSON, or a task is to wait for others.

    Raises `Refused`, with one error for each field that does not fit.
    """
    errors = _Errors()
    for item, task in enumerate(tasks):
        errors.check(item, "payload", task.payload, MAX_PAYLOAD)
        errors.check_after(item, "after", task)
    errors.refuse()


def check_beats(beats: Sequence[Beat]) -> None:
    """Refuse a batch in which a progress is too big, nested too deep, or no JSON. Raises `Refused`."""
    errors = _Errors()
    for item, beat in enumerate(beats):
        if beat.progress is not UNSET:
            errors.check(item, "progress", beat.progress, MAX_PROGRESS)
    errors.refuse()


def check_settlements(settlements: Sequence[Settlement]) -> None:
    """Refuse a batch in which a value or a successor does not fit, or `then` goes with a wrong outcome.

    Raises `Refused`, with one error for each field that does not fit.
    """
    errors = _Errors()
    for item, one in enumerate(settlements):
        errors.check(item, "result", one.result, MAX_PAYLOAD)
        errors.check(item, "error", one.error, MAX_ERROR)
        if one.progress is not UNSET:
            errors.check(item, "progress", one.progress, MAX_PROGRESS)
        if one.then:
            _check_successors(errors, item, one)
    errors.refuse()


def refusal(error: msgspec.ValidationError) -> Refused:
    """What the types refused, told like the rest: with the item and the field, as msgspec's message has them.

    `Expected `str`, got `int` - at `$.tasks[3].kind`` is item 3, field `kind`.
    """
    # The last "at": what stands before it may repeat names that the client chose.
    detail, _, path = str(error).rpartition(" - at `$")
    if not detail:
        detail, path = str(error), ""
    place = _PLACE.fullmatch(path.removesuffix("`"))
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
    said = ": ".join(entry[key] for key in ("field", "detail") if key in entry)
    return Refused(f"{where} does not fit, and nothing was applied: {said}", errors=[entry])


def shortened(text: str) -> str:
    """The text, or its beginning where it is long: it may repeat what a client sent."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


class _Errors:
    """What does not fit in one batch."""

    def __init__(self) -> None:
        self._found: list[dict[str, Any]] = []

    def add(self, item: int, field: str, detail: str) -> None:
        self._found.append({"item": item, "field": field, "detail": detail})

    def check(self, item: int, field: str, value: Any, most: int) -> None:
        detail = _fault(value, most)
        if detail is not None:
            self.add(item, field, detail)

    def check_after(self, item: int, field: str, task: NewTask) -> None:
        if task.after:
            self.add(item, field, _NO_DEPENDENCIES)

    def refuse(self) -> None:
        if self._found:
            first = self._found[0]
            raise Refused(f"item {first['item']}: {first['field']} {first['detail']}", errors=self._found)


def _check_successors(errors: _Errors, item: int, one: Settlement) -> None:
    if one.outcome not in ENDS:
        errors.add(item, "then", f"goes with success and fatal only, not with {one.outcome}")
    if len(one.then) > MAX_BATCH:
        errors.add(item, "then", f"has {len(one.then)} successors: {MAX_BATCH} at most")
    for position, task in enumerate(one.then):
        errors.check(item, f"then[{position}].payload", task.payload, MAX_PAYLOAD)
        errors.check_after(item, f"then[{position}].after", task)


def _fault(value: Any, most: int) -> str | None:
    try:
        # A plain value is the embedded user's; it is measured as it would travel.
        raw = bytes(value) if type(value) is Raw else _encode(value)
        if raw == _NULL:
            return None
        if len(raw) > most:
            return f"has {len(raw):,} bytes: {most:,} at most"
        decoded = _decode(raw)
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        return f"is no JSON: {error}"
    except RecursionError:
        return _TOO_DEEP
    # Brackets in strings count too: this only spares most values the walk.
    if raw.count(b"[") + raw.count(b"{") > MAX_NESTING and _nests_deeper_than(MAX_NESTING, decoded):
        return _TOO_DEEP
    return None


def _nests_deeper_than(most: int, value: Any) -> bool:
    """Whether arrays and objects are inside one another more than `most` times; level by level, no recursion."""
    outers = [value]
    for _ in range(most):
        outers = [
            inner
            for outer in outers
            if isinstance(outer, list | dict)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return any(isinstance(inner, list | dict) for inner in outers)
