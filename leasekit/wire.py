"""The HTTP messages of `/v1`, shared by the server and the HTTP adapter (DESIGN §6).

Items are the values of `leasekit.task`; here are the envelopes around them. The server decodes into the classes
whose name ends in *Request*; there JSON values of users stay the bytes that came (`Raw`), so that nothing is decoded
and encoded twice.
"""

import re
from typing import Annotated

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from leasekit.task import Beat, Name, NewTask, Scheduled, Seconds, Settlement, Task, Verdict

__all__ = [
    "MAX_BATCH", "MAX_BODY", "MAX_ERROR", "MAX_NESTING", "MAX_PAYLOAD", "MAX_PROGRESS", "MAX_WAIT", "BeatItem",
    "BeatsRequest", "CancelRequest", "ClaimAnswer", "ClaimRequest", "ItemError", "NewTaskItem", "Problem",
    "ResultsRequest", "ScheduleAnswer", "ScheduleRequest", "SettlementItem", "VerdictsAnswer", "traceparent",
]  # fmt: skip

MAX_BODY = 8 * 1024 * 1024
MAX_PAYLOAD = 1024 * 1024  # payload and result
MAX_PROGRESS = 64 * 1024
MAX_ERROR = 64 * 1024
MAX_BATCH = 1000
MAX_WAIT = 60.0
MAX_NESTING = 64


def _null() -> Raw:
    # A factory, not a value: msgspec draws a schema with a default only from what it can turn into JSON.
    return _NULL


_NULL = Raw(b"null")
_Batch = Meta(min_length=1, max_length=MAX_BATCH)


class NewTaskItem(NewTask, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    payload: Raw = field(default_factory=_null)


class BeatItem(Beat, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    token: Name
    progress: Raw | UnsetType = UNSET


class SettlementItem(Settlement, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    token: Name
    result: Raw = field(default_factory=_null)
    error: Raw = field(default_factory=_null)
    progress: Raw | UnsetType = UNSET
    then: list[NewTaskItem] = []  # type: ignore[assignment]


class ScheduleRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tasks: Annotated[list[NewTaskItem], _Batch]


class ScheduleAnswer(Struct, frozen=True, kw_only=True):
    tasks: list[Scheduled]


class ClaimRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    worker: Name
    kinds: Annotated[list[Name], _Batch]
    limit: Annotated[int, Meta(ge=1, le=MAX_BATCH)] = 1
    wait: Seconds = 0.0  # more than MAX_WAIT is cut
    claim_id: Name


class ClaimAnswer(Struct, frozen=True, kw_only=True):
    waited: float
    tasks: list[Task]


class BeatsRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    worker: Name
    beats: Annotated[list[BeatItem], _Batch]


class ResultsRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    worker: Name
    results: Annotated[list[SettlementItem], _Batch]


class CancelRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ids: Annotated[list[Name], _Batch]


class VerdictsAnswer(Struct, frozen=True, kw_only=True):
    verdicts: list[Verdict]


class ItemError(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is wrong with one item of a refused request."""

    detail: str
    field: str | None = None
    item: int | None = None


class Problem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An RFC 9457 problem document (`application/problem+json`)."""

    status: int
    title: str
    detail: str
    type: str = "about:blank"
    errors: list[ItemError] | None = None


_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-.*)?", re.ASCII
)


def traceparent(value: str | None) -> str | None:
    """A W3C `traceparent` as it is; None where it is none, for tracing must never fail a request."""
    match = None if value is None else _TRACEPARENT.fullmatch(value)
    return None if match is None or (match[1] == "00" and match["more"]) else value
