"""Arguments and answers of the scripts, as msgpack: the same names as in Lua.

Times are milliseconds by the clock of Redis; values of users are JSON texts, which no script parses.
"""

from typing import Any, Literal, NamedTuple

from msgspec import MsgspecError, Raw, Struct, json, msgpack

from leasekit.errors import ProtocolError, Refused
from leasekit.task import RetryPolicy, Status

_encode = msgpack.Encoder().encode
_json = json.Encoder().encode
_PLAIN = msgpack.Decoder()


class Stored(Struct, omit_defaults=True):
    """The fixed part of a task; written once, as JSON."""

    payload: Raw
    collection: str | None = None
    traceparent: str | None = None


class NewRecord(Struct, omit_defaults=True):
    """A task to be scheduled; fields with default values are not stored."""

    id: str
    stored: str
    digest: str  # of the payload: the same id with another digest is a conflict
    due: int | None = None
    delay: int | None = None  # instead of `due`: from when the task is accepted
    priority: int = 2
    collection: str | None = None
    dedupe: str | None = None
    window: int | None = None
    max_attempts: int | None = None
    max_crashes: int = 5
    max_runtime: int | None = None
    expiry: Literal["retry"] | None = None  # None: a time-out is a crash
    claim_ttl: int = 300_000
    beat_ttl: int = 300_000
    retry: RetryPolicy | None = None
    after: list[str] | None = None
    parent: str | None = None
    root: str | None = None
    is_over: bool = False  # the chain is cancelled: so is the task, from the beginning
    is_name: bool = False


class Added(Struct, array_like=True):
    """The answer for one scheduled task."""

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
    max_runtime: int | None = None


class Grants(Struct):
    """The answer to a claim. `next`: milliseconds until there may be a task; `is_repeat`: it was answered before."""

    now: int
    waited: float
    tasks: list[Raw]  # each a `Granted`, if it can be read
    next: int | None = None
    is_repeat: bool = False
    steps_back: int | None = None


class Named(Struct, array_like=True):
    """The answer to a claim of a name: how its task was, and its grant."""

    added: list[Added]
    grants: Grants


class Result(Struct, omit_defaults=True):
    """The result of a run, as a holder settles it."""

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
    """The changing part of a task."""

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
    after: list[str] = []  # ids of the tasks that this task waits for
    claimed_at: int | None = None
    started_at: int | None = None
    heartbeat_at: int | None = None
    progress_at: int | None = None
    ended_at: int | None = None
    parent: str | None = None
    root: str | None = None  # None: the task came from no other


class Past(Struct):
    """A past run of a task."""

    fence: int
    attempt: int
    outcome: str
    at: int
    worker: str | None = None
    result: str | None = None
    error: str | None = None
    claimed_at: int | None = None
    started_at: int | None = None
    heartbeat_at: int | None = None


class Row(Struct):
    """The records of one task."""

    id: str
    state: State
    stored: str
    progress: str | None = None
    runs: list[Past] = []
    lease_until: int | None = None
    cancel_requested: bool | None = None


class Rows(Struct):
    """A part of a listing, and the number after which the listing goes on."""

    tasks: list[Raw]  # each a `Row`, if it can be read
    after: str | None = None


class ChainRows(Struct):
    """Tasks of a chain, those that are not of it, and how many were looked at."""

    tasks: list[Raw]  # each a `Row`, if it can be read
    strange: list[str]
    looked: int


class Heard(Struct):
    """The answer to heartbeats or results: the time in Redis, and the script's verdict on each."""

    now: int
    words: list[int | str | list[int]]
    steps_back: int | None = None


class Cancelled(Struct):
    """The answer to a cancel request. `ending`: cancelled tasks that other tasks wait for."""

    words: list[str]
    ending: list[str]


class Gated(Struct):
    """A task that waits for others; `age` is the milliseconds since it was scheduled."""

    id: str
    after: list[str]
    age: int


class Damaged(Struct):
    """A task that was set aside, and what is damaged."""

    id: str
    damage: str


class MaintenanceWork(Struct):
    """The work of maintenance outside of a kind's slot."""

    now: int
    outbox: list[str]
    ending: list[str]
    gated: list[Gated]
    old: list[str]
    unmet: list[Gated]
    damaged: list[Damaged]
    is_free: bool
    is_done: bool
    next: int | None = None
    steps_back: int | None = None


class Purgeable(Struct):
    """A page of ended tasks, how each has ended, and which of them waited for others."""

    ids: list[str]
    statuses: list[str]
    unmet: list[Gated]
    last_id: str | None = None
    last_at: int | None = None


class Left(NamedTuple):
    """A deleted task of a chain."""

    id: str
    root: str


class Dropped(Struct):
    """How each deleted task had ended, the tasks that are still there, and those of chains."""

    statuses: list[str]
    kept: list[str]
    left: list[Left] = []


class DueKinds(Struct):
    """The kinds that are due for maintenance, given to one client until `own_until`."""

    own_until: int
    kinds: list[str]


def encode(argument: object) -> bytes:
    """Encode a script's argument. Raises `Refused` for text that is not valid Unicode."""
    try:
        return _encode(argument)
    except ValueError as error:
        raise Refused(f"a value cannot be encoded for Redis: {error}") from None


def decode(raw: bytes | Raw | None, decoder: msgpack.Decoder[Any]) -> Any:
    try:
        return decoder.decode(raw or b"")
    except (MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a record in Redis cannot be read: {error}") from None


def status_of(state: bytes | None) -> Status | None:
    """Return the status in a state record; None if there is no record, or its status cannot be read."""
    try:
        return Status(_PLAIN.decode(state or b"")["status"])
    except (MsgspecError, ValueError, KeyError, TypeError):
        return None


def json_text(value: object) -> str:
    return _json(value).decode()
