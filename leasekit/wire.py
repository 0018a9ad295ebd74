"""HTTP messages of `/v1`, shared by the server and the HTTP adapter.

Items are the values of `leasekit.task`; this module has the envelopes around them. The server decodes into the classes
whose name ends in *Request*. In these, JSON values of users stay the bytes that came (`Raw`), so that they are not
decoded and encoded again.
"""

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, cast

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from leasekit.periodic import PeriodicName
from leasekit.task import (
    Beat,
    KindSettings,
    Name,
    NewTask,
    Scheduled,
    Seconds,
    Selection,
    Settlement,
    Status,
    Tag,
    Task,
    TaskSelection,
    TaskSettings,
    Ticket,
    Verdict,
)
from leasekit.task.words import MAX_TAGS, Labels
from leasekit.tokens import KindPattern, Scope

__all__ = [
    "FIRST_INSTANT", "LAST_INSTANT", "MAX_BATCH", "MAX_BODY", "MAX_ERROR", "MAX_KINDS", "MAX_NAMES", "MAX_NESTING",
    "MAX_NODES", "MAX_NODES_TOGETHER", "MAX_PAYLOAD", "MAX_PROGRESS", "MAX_SUCCESSORS", "MAX_THEN", "MAX_WAIT",
    "MAX_WAITS", "REQUEST_HEADER", "STORE_HEADER",
    "AwaitedTask", "BeatItem", "BeatsRequest", "CancelMatchingRequest", "CancelRequest", "CancelsRequest",
    "ChainRequest", "ChangedCollection", "ChangedKind", "ChangedTask", "ChangedToken", "ChangedWorker", "ClaimAnswer",
    "ClaimRequest", "DrainRequest", "EndedRequest",
    "GateRequest", "ItemError", "KindRequest", "NewTaskItem", "OneKind", "OnePeriodic", "OneTask", "OneToken",
    "OptionalName", "Problem", "ProblemType", "PurgeRequest", "RedriveRequest", "RescheduleMatchingRequest",
    "RescheduleRequest", "ResultsRequest", "RotateRequest", "ScheduleAnswer", "ScheduleRequest", "SettlementItem",
    "TaskFilters", "TokenRequest", "TriggerRequest", "VacuumRequest", "VerdictsAnswer", "WorkerWindow", "decode_value",
    "decoder_of", "given", "selected", "traceparent",
]  # fmt: skip

MAX_BODY = 8 * 1024 * 1024
MAX_PAYLOAD = 1024 * 1024  # payload and result
MAX_PROGRESS = 64 * 1024
MAX_ERROR = 64 * 1024
MAX_NAMES = 256 * 1024  # of a request, or of an item, without payloads, results, errors, progress and successors
MAX_THEN = 6 * 1024 * 1024  # all successors of one task: with its result they fit into one request, `MAX_BODY`
MAX_BATCH = 1000
MAX_KINDS = 100  # in one claim
MAX_SUCCESSORS = 1000  # of all results in one request
MAX_WAITS = 10_000  # tasks that those of one request run after, together
MAX_WAIT = 60.0
MAX_NESTING = 64
FIRST_INSTANT, LAST_INSTANT = datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)
"""What an instant in a request lies between: each of these can be expressed in every time zone."""
MAX_NODES = 100_000  # arrays and objects in one value
MAX_NODES_TOGETHER = 250_000  # in all values of a request
REQUEST_HEADER = "leasekit-request"  # new for each try of a client; the answer has the same value
STORE_HEADER = "leasekit-store"  # in each answer: the identity of the store that the server serves


def _null() -> Raw:
    # A factory, not a value, because msgspec derives a schema only from defaults that it can turn into JSON.
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

    def __post_init__(self) -> None:
        _check_waits(self.tasks)


class ScheduleAnswer(Struct, frozen=True, kw_only=True):
    tasks: list[Scheduled]


class WorkerWindow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The window of a worker, as it tells the service with its requests."""

    size: Annotated[int, Meta(ge=0, le=10_000_000)]
    """Tasks that the worker may hold at present."""
    waiting: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    """Tasks of these that wait, without a slot, for the next call of their handler."""


class ClaimRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    worker: Name
    """The name of the claiming worker."""
    kinds: Annotated[list[Name], Meta(min_length=1, max_length=MAX_KINDS)]
    """The kinds of tasks that the worker can run."""
    limit: Annotated[int, Meta(ge=0, le=MAX_BATCH)] = 1
    """Tasks, at most; 0 ends the claim: no task is granted to it from then on."""
    wait: Seconds = 0.0
    """Seconds to wait for the first task; more than `MAX_WAIT` is cut."""
    claim_id: Name
    """A new id for each claim; a repeated claim has the same id."""
    tickets: Annotated[list[Ticket], Meta(max_length=MAX_BATCH)] = []
    """Tickets from messages of queues: only their tasks are claimed, without a wait. Empty: any due tasks."""
    labels: Labels = {}
    """The labels of the worker: it also gets tasks that require some of these."""
    window: WorkerWindow | None = None
    """The worker's window, for whatever lists the workers; None: the worker does not say."""
    age: Seconds | None = None
    """Seconds since the worker's process started: a drain from before that is not about it; None: it does not say."""


class ClaimAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    waited: float
    tasks: list[Task]
    refused: list[str] = []
    """Tickets that are of no use any longer: their messages are to be deleted."""
    draining: bool = False
    """An operator drains the worker: it is granted nothing, and is to stop once it has finished what it holds."""


class BeatsRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    worker: Name
    beats: Annotated[list[BeatItem], _Batch]
    window: WorkerWindow | None = None
    """As in a claim: a worker whose window is full claims nothing."""


class ResultsRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    worker: Name
    results: Annotated[list[SettlementItem], _Batch]

    def __post_init__(self) -> None:
        # Raised here, so that every service and every adapter that reads a request refuses it.
        successors = sum(len(result.then) for result in self.results)
        if successors > MAX_SUCCESSORS:
            raise ValueError(
                f"the results have {successors:,} successors together (`then`), {MAX_SUCCESSORS:,} at most: "
                "send fewer results in one request"
            )
        _check_waits(task for result in self.results for task in result.then)


def _check_waits(tasks: Iterable[NewTask]) -> None:
    waits = sum(len(task.after) for task in tasks)
    if waits > MAX_WAITS:
        raise ValueError(
            f"the tasks run after {waits:,} others together (`after`), {MAX_WAITS:,} at most: "
            "send fewer tasks in one request"
        )


# Not None where a parameter is absent: msgspec would read the value *null* as None.
OptionalName: TypeAlias = Name | UnsetType


class OneTask(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameter of a request for one task."""

    task_id: Name


class AwaitedTask(OneTask, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of a request for one task, which may wait for its end."""

    wait: Seconds = 0.0
    """Seconds to wait until the task has ended; more than `MAX_WAIT` is cut."""


_Part = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]*\Z")]


class TaskFilters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of a listing: those that are absent select nothing."""

    kind: OptionalName = UNSET
    status: Status | UnsetType = UNSET
    collection: OptionalName = UNSET
    worker: OptionalName = UNSET
    root: OptionalName = UNSET
    tags: Annotated[list[Tag], Meta(min_length=1, max_length=MAX_TAGS)] | UnsetType = field(default=UNSET, name="tag")
    """May be given several times: the tasks have all of these tags."""
    key: OptionalName = UNSET
    reason: _Part | UnsetType = UNSET
    error: _Part | UnsetType = UNSET
    error_type: _Part | UnsetType = UNSET
    min_attempts: Annotated[int, Meta(ge=1, le=2**31 - 1)] | UnsetType = UNSET
    since: Annotated[datetime, Meta(tz=True)] | UnsetType = UNSET
    until: Annotated[datetime, Meta(tz=True)] | UnsetType = UNSET
    newest: bool = False
    cursor: Annotated[str, Meta(max_length=128)] | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=MAX_BATCH)] = 100


class OnePeriodic(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameter of a request for one periodic task."""

    name: PeriodicName


class TriggerRequest(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A firing on request."""

    at: Annotated[datetime, Meta(tz=True)] | None = None
    """The instant in the id of its task, with which a repeat makes no second task. None: now."""


class ChangedWorker(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of a request that drains a worker: which, and the name of the client, for the log."""

    name: Name
    worker: OptionalName = UNSET


class DrainRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request for the drain of a worker, which has no fields."""


class OneKind(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameter of a request for one kind."""

    kind: Name


class ChangedKind(OneKind, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of a request that changes a kind: which, and the name of the client, for the log."""

    worker: OptionalName = UNSET


class KindRequest(KindSettings, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """New settings of a kind, in place of all old ones: those that are left out have leasekit's defaults."""


class ChangedCollection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of a request that changes the gate of a collection: which, and the name of the client."""

    collection: Name
    worker: OptionalName = UNSET


class GateRequest(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A closed gate, in place of the one that the kind or the collection has."""

    mode: Literal["pause", "drop"] = "pause"
    """Whether due tasks wait, or end as *cancelled*."""
    until: Annotated[datetime, Meta(tz=True)] | None = None
    """When the gate opens by itself; null, and no `duration`: when it is opened."""
    duration: Seconds | None = None
    """In place of `until`: seconds from now on, by the service's clock."""
    reason: Annotated[str, Meta(max_length=500, pattern=r"^[^\x00-\x1f\x7f]*\Z")] | None = None
    """Why, for those who ask what the tasks wait for."""

    def __post_init__(self) -> None:
        if self.until is not None and self.duration is not None:
            raise ValueError("a gate opens at an instant (`until`) or after a `duration`: give one of them")


def selected(request: TaskSelection) -> Selection:
    """Return what a request selects tasks by; only what is given."""
    values = {name: getattr(request, name) for name in TaskSelection.__struct_fields__}
    return cast("Selection", {name: value for name, value in values.items() if value is not None})


def given(settings: TaskSettings) -> dict[str, Any]:
    """Return what is given of these settings, to be checked or sent."""
    values = {name: getattr(settings, name) for name in settings.__struct_fields__}
    return {name: value for name, value in values.items() if value is not UNSET}


class CancelRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ids: Annotated[list[Name], _Batch]


class ChangedTask(OneTask, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of a request that changes a task: which, and the name of the client, for its history."""

    worker: OptionalName = UNSET


class RescheduleRequest(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A change of a task that waits; what is not given stays."""

    at: Annotated[datetime, Meta(tz=True)] | None = None
    """When the task is due."""
    delay: Seconds | None = None
    """In place of `at`: seconds from now on, by the service's clock; 0: the task is due now."""
    priority: Annotated[int, Meta(ge=0, le=4)] | None = None
    """0 is the most urgent."""
    request_id: Name | None = None
    """A new id for each request: with it, a repeat of the last request changes nothing, and tells the task as it is."""

    def __post_init__(self) -> None:
        if self.at is None and self.delay is None and self.priority is None:
            raise ValueError("a reschedule changes when a task is due (`at`, `delay`) or its `priority`: give one")
        if self.at is not None and self.delay is not None:
            raise ValueError("`at` and `delay` both say when the task is due: give one of them")


class CancelMatchingRequest(TaskSelection, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A step of the cancel of all tasks that match all that is given, and have not ended."""

    dry_run: bool = False
    """Cancel nothing, and count; the answer has the token of the act."""
    token: Annotated[str, Meta(max_length=128)] | None = None
    """The token of the dry run, for the act and for further steps of the dry run."""
    cursor: Annotated[str, Meta(max_length=128)] | None = None
    """The cursor of the answer before; null: the first step."""

    def __post_init__(self) -> None:
        if not selected(self):
            raise ValueError("a bulk act selects tasks by `kind`, `status` or another field: give one")
        if self.status is not None and self.status.ended:
            raise ValueError(f"a task that is {self.status} has ended: name the status of tasks that wait or run")
        if self.token is None and not self.dry_run:
            raise ValueError("a bulk act takes the `token` of a dry run of the same request: make that first")


class RescheduleMatchingRequest(
    CancelMatchingRequest, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A step of the reschedule of all waiting tasks that match all given filters."""

    at: Annotated[datetime, Meta(tz=True)] | None = None
    """When the tasks are due."""
    delay: Seconds | None = None
    """In place of `at`: seconds from now on, by the service's clock; 0: they are due now."""
    priority: Annotated[int, Meta(ge=0, le=4)] | None = None
    """0 is the most urgent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.change  # noqa: B018 - raises for what contradicts itself

    @property
    def change(self) -> RescheduleRequest:
        """The change of each task."""
        return RescheduleRequest(at=self.at, delay=self.delay, priority=self.priority)


class ChainRequest(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A step of the cancel of a chain."""

    id: Name
    """A task of the chain, whichever."""
    cursor: Annotated[str, Meta(max_length=128)] | None = None
    """The cursor of the answer before; null: the first step."""


class EndedRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of which tasks to tell that they have ended."""

    ids: Annotated[list[Name], _Batch]
    wait: Seconds = 0.0
    """Seconds to wait until one of them has ended; more than `MAX_WAIT` is cut."""


class CancelsRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request for the cancel requests of tasks that this worker holds."""

    worker: Name
    wait: Seconds = 0.0
    """Seconds to wait for the first request; more than `MAX_WAIT` is cut."""


class PurgeRequest(TaskSelection, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The ended tasks to remove: these `ids`, or those that match all given filters."""

    ids: Annotated[list[Name], Meta(max_length=MAX_BATCH)] = []
    """The tasks; empty: those that match."""
    older_than: Seconds = 0.0
    """Seconds that have passed since the end of the task, at least."""
    cursor: Annotated[str, Meta(max_length=128)] | None = None
    """The cursor of the answer before: where the purge goes on."""
    dry_run: bool = False
    """Remove nothing, and count what would be removed."""

    def __post_init__(self) -> None:
        if self.status is not None and not self.status.ended:
            ended = ", ".join(status for status in Status if status.ended)
            raise ValueError(f"a task that is {self.status} has not ended, and cannot be purged: name one of {ended}")
        if self.ids and selected(self):
            raise ValueError("a purge names tasks (`ids`), or selects them by what they have in common: give either")


class VacuumRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request for a step of a vacuum, which has no fields."""


class RedriveRequest(TaskSelection, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The tasks to redrive: these `ids`, or a page of the tasks that match all given filters."""

    ids: Annotated[list[Name], Meta(max_length=MAX_BATCH)] = []
    """The tasks; empty: those that match, and something must be given by which they do."""
    status: Literal["dead", "fatal_failure", "dropped"] | None = None  # type: ignore[assignment]
    """None: `dead`."""
    cursor: Annotated[str, Meta(max_length=128)] | None = None
    """The cursor of the answer before: where the filters go on."""
    limit: Annotated[int, Meta(ge=1, le=MAX_BATCH)] = 100
    """Tasks that the filters select, at most."""
    dry_run: bool = False
    """Change nothing, and say what would be redriven."""
    redrive_id: Name | None = None
    """A new id for each redrive: with it, a repeat for the same `ids` has the same answer and changes nothing."""
    worker: Name | None = None
    """The name of the client, for the history of the tasks."""

    def __post_init__(self) -> None:
        if bool(selected(self)) is bool(self.ids):
            raise ValueError("a redrive names tasks (`ids`), or selects them by `kind`, `status` or another field")


_TokenId: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}\Z")]
Digest: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class TokenRequest(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A new access token."""

    id: _TokenId
    """Its id, a UUID that the client makes: a repeat makes no second token."""
    name: Name
    """Its name."""
    digest: Digest
    """The SHA-256 of its secret, in hexadecimal digits."""
    scopes: Annotated[list[Scope], Meta(min_length=1, max_length=4)]
    """What it allows."""
    kinds: Annotated[list[KindPattern], Meta(min_length=1, max_length=100)]
    """For tasks of which kinds."""
    expires_at: Annotated[datetime, Meta(tz=True)] | None = None
    """When it ends by itself."""


class RotateRequest(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A new secret of an access token."""

    digest: Digest
    """The SHA-256 of the new secret, in hexadecimal digits."""
    overlap: Annotated[float, Meta(ge=0, le=30 * 86400)] = 0.0
    """Seconds for which the secret before it is taken too."""


class OneToken(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameter of a request for one access token."""

    token: Name
    """Its id, or its name if it is not revoked."""


class ChangedToken(OneToken, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of a request that changes an access token: which, and the name of the client, for the audit."""

    worker: OptionalName = UNSET


class VerdictsAnswer(Struct, frozen=True, kw_only=True):
    verdicts: list[Verdict]


class ItemError(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fault of one item of a refused request."""

    detail: str
    field: str | None = None
    item: int | None = None


ProblemType = Literal[
    "urn:leasekit:problem:refused",  # the content of the request does not fit, now or later
    "urn:leasekit:problem:no-such-task",
    "urn:leasekit:problem:no-such-kind",  # the kind has no settings
    "urn:leasekit:problem:no-such-periodic",  # no periodic task has this name
    "urn:leasekit:problem:no-such-worker",  # no worker that holds leases, or called lately, has this name
    "urn:leasekit:problem:no-such-token",  # no access token has this id or name
    "urn:leasekit:problem:unauthenticated",  # the request has no access token, or none that is valid
    "urn:leasekit:problem:forbidden",  # its access token lacks a scope, or a kind that the request names
    "urn:leasekit:problem:malformed",  # the body is not JSON: as sent, or damaged on its way
    "urn:leasekit:problem:misdirected",  # the server has no such path, method, host or content type
    "urn:leasekit:problem:later",  # overloaded, failed, or too slow: the request may be repeated
]
"""The meaning of a refusal. Only leasekit uses these types, so they tell a leasekit server's answers apart from those
of an ingress or a firewall in front of it, which must never end a task."""


class Problem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An RFC 9457 problem document (`application/problem+json`) of a leasekit server."""

    type: ProblemType
    status: int
    title: str
    detail: str
    errors: list[ItemError] | None = None


_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-.*)?", re.ASCII
)


def traceparent(value: str | None) -> str | None:
    """Return a W3C `traceparent` unchanged; None if it is invalid, because tracing must never fail a request."""
    match = None if value is None else _TRACEPARENT.fullmatch(value)
    return None if match is None or (match[1] == "00" and match["more"]) else value


_T = TypeVar("_T")


def decoder_of(type_: type[_T]) -> msgspec.json.Decoder[_T]:
    """Return a decoder of JSON in which values of users stand.

    For a number near the ends of the range of floats, msgspec takes up to three hundred times as long as Python does,
    and holds the interpreter lock: a payload of a megabyte would stop all threads for seconds.
    """
    return msgspec.json.Decoder(type_, float_hook=float)


_decode = msgspec.json.Decoder(float_hook=float).decode


def decode_value(value: bytes | bytearray | memoryview | Raw | str) -> Any:
    """Decode a value of a user as `decoder_of` does. Raises what msgspec raises: `DecodeError` and `RecursionError`."""
    return _decode(value)
