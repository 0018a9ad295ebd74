"""The HTTP messages of `/v1`, shared by the server and the HTTP adapter.

Items are the values of `leasekit.task`; here are the envelopes around them. The server decodes into the classes
whose name ends in *Request*; there JSON values of users stay the bytes that came (`Raw`), so that nothing is decoded
and encoded twice.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from leasekit.errors import Refused
from leasekit.task import Beat, Name, NewTask, Scheduled, Seconds, Settlement, Task, Verdict

__all__ = [
    "MAX_BATCH", "MAX_BODY", "MAX_ERROR", "MAX_KINDS", "MAX_NAMES", "MAX_NESTING", "MAX_NODES",
    "MAX_NODES_TOGETHER", "MAX_PAYLOAD", "MAX_PROGRESS", "MAX_SUCCESSORS", "MAX_THEN", "MAX_WAIT", "REQUEST_HEADER",
    "BeatItem", "BeatsRequest", "CancelRequest", "ClaimAnswer", "ClaimRequest", "ItemError", "NewTaskItem", "Problem",
    "ProblemType", "ResultsRequest", "ScheduleAnswer", "ScheduleRequest", "SettlementItem", "VerdictsAnswer",
    "brackets", "check_kinds", "structural_fault", "traceparent",
]  # fmt: skip

MAX_BODY = 8 * 1024 * 1024
MAX_PAYLOAD = 1024 * 1024  # payload and result
MAX_PROGRESS = 64 * 1024
MAX_ERROR = 64 * 1024
MAX_NAMES = 256 * 1024  # a request, or an item of one, without payloads, results, errors, progress and successors
MAX_THEN = 6 * 1024 * 1024  # all successors of one task: with its result they fit into one request, `MAX_BODY`
MAX_BATCH = 1000
MAX_KINDS = 100  # in one claim
MAX_SUCCESSORS = 1000  # of all results in one request
MAX_WAIT = 60.0
MAX_NESTING = 64
MAX_NODES = 100_000  # arrays and objects in one value
MAX_NODES_TOGETHER = 250_000  # in all values of a request
REQUEST_HEADER = "leasekit-request"  # new for each try of a client; the answer has the same


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
    kinds: Annotated[list[Name], Meta(min_length=1, max_length=MAX_KINDS)]
    limit: Annotated[int, Meta(ge=0, le=MAX_BATCH)] = 1
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

    def __post_init__(self) -> None:
        # Raised here, so that it is refused by everything that reads a request: each service, and each adapter.
        successors = sum(len(result.then) for result in self.results)
        if successors > MAX_SUCCESSORS:
            raise ValueError(
                f"the results have {successors:,} successors together (`then`), {MAX_SUCCESSORS:,} at most: "
                "send fewer results in one request"
            )


class CancelRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ids: Annotated[list[Name], _Batch]


class VerdictsAnswer(Struct, frozen=True, kw_only=True):
    verdicts: list[Verdict]


class ItemError(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is wrong with one item of a refused request."""

    detail: str
    field: str | None = None
    item: int | None = None


ProblemType = Literal[
    "urn:leasekit:problem:refused",  # what the request holds does not fit, now or later
    "urn:leasekit:problem:no-such-task",
    "urn:leasekit:problem:malformed",  # the body is not JSON: as it was sent, or because of what happened on its way
    "urn:leasekit:problem:misdirected",  # nothing here answers such a request: its path, method, host, content type
    "urn:leasekit:problem:later",  # overloaded, failed, or too slow: the request may be repeated
]
"""What a refusal means. No document of anybody else has such a type, so these tell a leasekit server's answers apart
from those of an ingress or a firewall in front of it, which must never end a task."""


class Problem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An RFC 9457 problem document (`application/problem+json`) of a leasekit server."""

    type: ProblemType
    status: int
    title: str
    detail: str
    errors: list[ItemError] | None = None


def check_kinds(kinds: Sequence[str]) -> None:
    """Raise `Refused` where a claim names no kind, or more than any service takes."""
    if not 1 <= len(kinds) <= MAX_KINDS:
        detail = f"a claim of {len(kinds):,} kinds: name 1 to {MAX_KINDS}, and make more claims for more"
        raise Refused(detail, errors=[{"field": "kinds", "detail": detail}])


_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-.*)?", re.ASCII
)


def traceparent(value: str | None) -> str | None:
    """A W3C `traceparent` as it is; None where it is none, for tracing must never fail a request."""
    match = None if value is None else _TRACEPARENT.fullmatch(value)
    return None if match is None or (match[1] == "00" and match["more"]) else value


_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


def brackets(value: bytes) -> bytes:
    """The brackets of a JSON value outside of its strings, all as square ones; none where there are only a few.

    Nothing is decoded for it: a megabyte of brackets would make half a million objects.
    """
    if value.count(b"[") + value.count(b"{") <= MAX_NESTING:  # also counts those in strings
        return b""
    return _without_strings(value).translate(_BRACKETS, _NO_BRACKETS)


def structural_fault(value: bytes) -> str | None:
    """Say why the arrays and objects of a JSON value are too many or too deep; None where they are not."""
    left = brackets(value)
    nodes = left.count(b"[")
    if nodes > MAX_NODES:
        return f"has {nodes:,} arrays and objects: {MAX_NODES:,} at most"
    for _ in range(MAX_NESTING):
        left = left.replace(b"[]", b"")  # the innermost
    return f"is nested too deep: {MAX_NESTING} levels at most" if left else None


def _without_strings(value: bytes) -> bytes:
    # Escaped quotes go first; then every other part between quotes is inside of a string.
    return b"".join(value.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2]) if b'"' in value else value
