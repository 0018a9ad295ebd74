"""What goes to the scripts and comes back, as msgpack: the same names as in Lua.

Times are milliseconds by Redis's clock; values of users are JSON texts, which no script looks into.
"""

from typing import Any

from msgspec import Raw, Struct, json, msgpack

from leasekit.errors import ProtocolError, Refused
from leasekit.task import RetryPolicy, Status

__all__ = [
    "Added", "Cancelled", "Damaged", "Gated", "Granted", "Grants", "Heard", "NewRecord", "Past", "Result", "Row",
    "Rows", "State", "Stored", "Tended", "Visit", "decode", "encode", "json_text", "status_of",
]  # fmt: skip

_encode = msgpack.Encoder().encode
_json = json.Encoder().encode
_PLAIN = msgpack.Decoder()


class Stored(Struct, omit_defaults=True):
    """What a task is; written once, as JSON."""

    payload: Raw
    collection: str | None = None
    traceparent: str | None = None


class NewRecord(Struct, omit_defaults=True):
    """A task on its way in; what is the default is not kept."""

    id: str
    stored: str
    digest: str  # of kind and payload: the same id with another one is a conflict
    due: int | None = None
    priority: int = 2
    collection: str | None = None
    dedupe: str | None = None
    window: int | None = None
    max_attempts: int | None = None
    max_crashes: int = 5
    max_runtime: int | None = None
    claim_ttl: int = 300_000
    beat_ttl: int = 300_000
    retry: RetryPolicy | None = None
    after: list[str] | None = None


class Added(Struct, array_like=True):
    """What became of a task that was scheduled."""

    id: str
    created: bool
    status: str
    conflict: bool


class Granted(Struct, array_like=True):
    """A task that was claimed."""

    id: str
    token: str
    ttl: int
    fence: int
    attempt: int
    priority: int
    stored: str
    progress: str


class Grants(Struct):
    """The answer to a claim. `next`: in how many milliseconds there may be more; `is_repeat`: it had one before."""

    now: int
    waited: float
    tasks: list[Raw]  # each a `Granted`, if it can be read
    next: int | None = None
    is_repeat: bool = False


class Result(Struct, omit_defaults=True):
    """How a run ended."""

    id: str
    token: str
    outcome: str
    digest: str
    chance: float
    result: str | None = None
    error: str | None = None
    retry_after: int | None = None
    progress: str | None = None
    progress_seq: int | None = None
    successors: list[str] | None = None


class State(Struct):
    """Where a task stands."""

    status: str
    seq: int
    fence: int
    attempt: int
    due: int
    priority: int = 2
    failures: int = 0
    crashes: int = 0
    worker: str | None = None
    reason: str | None = None
    digest: str = ""
    after: list[str] = []  # what it waits for


class Past(Struct):
    """One run of a task, as it ended."""

    fence: int
    attempt: int
    outcome: str
    at: int
    worker: str | None = None
    result: str | None = None
    error: str | None = None


class Row(Struct):
    """All about one task."""

    id: str
    state: State
    stored: str
    progress: str | None = None
    runs: list[Past] = []


class Rows(Struct):
    """Some tasks of a listing, and after which number it goes on."""

    tasks: list[Raw]  # each a `Row`, if it can be read
    after: str | None = None


class Heard(Struct):
    """What became of beats or results, a verdict for each as a script says it; and what time it was."""

    now: int
    words: list[int | str | list[int]]


class Cancelled(Struct):
    """What became of wishes to cancel. `ending`: those by which others wait no more."""

    words: list[str]
    ending: list[str]


class Gated(Struct):
    """A task that waits for others, and for how many milliseconds it has."""

    id: str
    after: list[str]
    age: int


class Damaged(Struct):
    """A task that was set aside, and what is wrong with it."""

    id: str
    damage: str


class Tended(Struct):
    """What a mover has to do outside of a kind's slot."""

    now: int
    outbox: list[str]
    ending: list[str]
    gated: list[Gated]
    old: list[str]
    unmet: list[Gated]
    damaged: list[Damaged]
    is_done: bool
    next: int | None = None


class Visit(Struct):
    """Kinds to be visited, by whom asked, until when they are."""

    own_until: int
    kinds: list[str]


def encode(argument: object) -> bytes:
    """A script's argument. Raises `Refused` for what is no text."""
    try:
        return _encode(argument)
    except ValueError as error:
        raise Refused(f"this cannot be sent: {error}") from None


def decode(raw: bytes | Raw | None, decoder: msgpack.Decoder[Any]) -> Any:
    """A script's answer as what `decoder` is for. Raises `ProtocolError`."""
    try:
        return decoder.decode(raw or b"")
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"what Redis keeps makes no sense: {error}") from None


def status_of(state: bytes | None) -> Status | None:
    """The status that a state says, None where there is none, or none that can be read."""
    try:
        return Status(_PLAIN.decode(state or b"")["status"])
    except (ValueError, KeyError, TypeError):
        return None


def json_text(value: object) -> str:
    """A value as JSON."""
    return _json(value).decode()
