"""Rows of a store, batches of which go in and come out of its transactions."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from leasekit.server.store.routes import kind_of
from leasekit.task import Status


class Entity(Struct, frozen=True, gc=False):
    """The definition of a task. The fields are in the order of the table's columns."""

    seq: int  # the store's own key, which grows in the order in which tasks are accepted
    id: str
    kind: str
    collection: str | None
    priority: int
    created_at: float
    at: float
    max_attempts: int | None
    max_crashes: int
    max_runtime: float | None
    enqueue_timeout: float
    retry: bytes | None  # a `RetryPolicy` as JSON; None: the default
    expiry: str | None  # as in `Limits`
    dedupe_key: str | None
    traceparent: str | None
    digest: bytes  # the digest of the payload, which is the same for every way to write the same JSON
    payload: bytes  # the last column: SQLite reads through a big value to reach the columns behind it


def shifted(run_until: float | None, shift: float | None) -> float | None:
    """Return the end of a run moved by `shift` seconds (None: unknown); an end that is already over stays."""
    if run_until is None or run_until <= 0:
        return run_until
    return None if shift is None else run_until + shift


class Content(NamedTuple):
    """The values of a task that its holder gets."""

    payload: bytes
    collection: str | None
    traceparent: str | None
    progress: bytes | None  # the last checkpoint of the last holder


class Checkpoint(NamedTuple):
    """The progress that a holder has reported."""

    value: bytes
    fence: int  # the fence of the holder's claim
    number: int  # the number of the report in its run
    at: float | None = None  # when the report came

    @property
    def mark(self) -> tuple[int, int]:
        """The fence and the number, which grow with every report on the task."""
        return self.fence, self.number


class Run(Struct, frozen=True, gc=False):
    """The end of one run of a task. The fields are in the order of the table's columns."""

    seq: int
    fence: int
    attempt: int
    outcome: str  # an `Outcome`, or *expired*
    at: float
    worker: str | None
    claimed_at: float | None
    started_at: float | None
    heartbeat_at: float | None
    token: str
    digest: bytes | None  # the digest of the holder's report; None: there was no report
    result: bytes | None
    error: bytes | None


class Dedupe(NamedTuple):
    """The first task with a (kind, key), and the end of its dedupe window (None: as long as the task is kept)."""

    kind: str
    key: str
    id: str
    until: float | None


class Deadline(NamedTuple):
    """By when a task must have begun."""

    allowed: float  # the seconds after its due time
    at: float


class KindDeclaration(NamedTuple):
    """A declaration of the settings of a kind, by code. The fields are in the order of the table's columns."""

    declared: bytes | None = None  # the `KindSettings` that took effect last, as JSON; None: no code has
    digests: str | None = None  # of what code has declared, the newest first
    declared_at: float | None = None  # when the first of them was declared last


NOT_DECLARED = KindDeclaration()


class KindRow(NamedTuple):
    """The settings of a kind. The fields are in the order of the table's columns."""

    name: str
    settings: bytes | None  # `KindSettings` as JSON; None: the kind no longer has any
    changed_at: float
    changed_by: str | None
    change: int  # the number of its last change, which grows with each change of any kind
    declared: bytes | None = None  # as in `KindDeclaration`, like all that follow
    digests: str | None = None
    declared_at: float | None = None

    @property
    def declaration(self) -> KindDeclaration:
        """Return what code has declared."""
        return KindDeclaration(*self[5:])


class GateRow(NamedTuple):
    """A gate of a kind or a collection. The fields are in the order of the table's columns."""

    scope: str  # "kind" or "collection"
    name: str
    mode: str  # "pause", "drop", or "open": the tasks that it has parked are put back
    until: float | None  # by the store's time; None: until it is opened
    reason: str | None
    changed_at: float
    changed_by: str | None

    def holds(self, now: float) -> bool:
        return self.mode != "open" and (self.until is None or now < self.until)


class DrainRow(NamedTuple):
    """A worker that takes no new tasks. The fields are in the order of the table's columns."""

    worker: str
    at: float  # when an operator asked for it, by the store's time
    by: str | None


class PeriodicRow(NamedTuple):
    """A periodic task. The fields are in the order of the table's columns."""

    name: str
    task: bytes  # a `PeriodicTask` as JSON
    since: float  # the nominal instant of the last firing that was judged, or when its rule began
    next_at: float | None  # when the next firing is made; None: never, or not while it is paused
    is_paused: bool
    last_id: str | None  # of the task of the last firing
    firings: bytes  # what became of the latest ones: a list of `Firing` as JSON
    digests: str | None  # of what code has declared, the newest first; None: no code has
    declared_at: float | None  # when the first of them was declared last
    changed_at: float
    changed_by: str | None
    version: int  # grows with each write


class MinuteRow(NamedTuple):
    """The events of one kind in one minute at one node. The fields are in the order of the table's columns."""

    at: int  # the minutes since the epoch
    kind: str
    node: str
    counts: bytes  # as `server.history` writes them


class TokenRow(NamedTuple):
    """An access token. The fields are in the order of the table's columns."""

    id: str
    name: str
    digest: bytes  # the SHA-256 of its secret
    former_digest: bytes | None  # that of the secret before it
    former_until: float | None  # until when that is taken too
    scopes: str  # with commas between them
    kinds: str  # patterns of kinds, with `/` between them, which no kind has
    created_at: float
    created_by: str  # the name of a token, or *local*
    expires_at: float | None
    used_at: float | None  # to within five minutes: one write for many requests
    rotated_at: float | None
    revoked_at: float | None


class SessionRow(NamedTuple):
    """A session of the web console. The fields are in the order of the table's columns."""

    digest: bytes  # the SHA-256 of its cookie
    secret: bytes  # the SHA-256 of the secret of an access token, with which it began
    until: float


class AuditRow(NamedTuple):
    """An act of an operator. The fields are in the order of the table's columns."""

    id: str  # grows with time
    at: float
    by: str  # the name of an access token, or *local*
    token_id: str | None
    worker: str | None
    act: str
    target: str | None
    fields: str  # names, with commas between them
    changed: int


class ClaimMemory(NamedTuple):
    """The answer that a claim got."""

    worker: str
    claim_id: str
    granted_at: float
    waited: float
    grants: Sequence[tuple[int, str]]  # the `seq` and the token of each granted task


class Anchor(NamedTuple):
    """A moment by two clocks, by which a later process translates the instants in the store."""

    boot_id: str  # the id of the start of the machine, and the time namespace, from which `boot` counts
    boot: float  # the moment by CLOCK_BOOTTIME
    instant: float  # the moment by the clock of leases in the process that wrote the anchor


class Holding(NamedTuple):
    """The leases of one worker."""

    running: int = 0
    ttl: float | None = None  # the shortest
    kinds: frozenset[str] = frozenset()

    @classmethod
    def by_owner(cls, leases: Iterable[tuple[str, str, int, float | None]]) -> "dict[str, Holding]":
        """Sum up leases: owner, kind, number and shortest ttl."""
        of_owners: dict[str, list[tuple[str, int, float | None]]] = {}
        for owner, kind, number, ttl in leases:
            of_owners.setdefault(owner, []).append((kind, number, ttl))
        return {
            owner: cls(
                sum(number for _, number, _ in of_owner),
                min((ttl for _, _, ttl in of_owner if ttl is not None), default=None),
                frozenset(kind for kind, _, _ in of_owner),
            )
            for owner, of_owner in of_owners.items()
        }


class Lane(NamedTuple):
    """The waiting tasks of one kind and priority that have keys, or those that have none, and when the first is due.

    Tasks that require labels have lanes of their own, which count as lanes of tasks with keys.
    """

    priority: int
    name: str
    """The kind, or the name of a route (`routes`)."""
    due_at: float
    has_keys: bool = False

    @property
    def kind(self) -> str:
        """The kind of the tasks."""
        return kind_of(self.name)


class Share(NamedTuple):
    """A key of a lane, and its virtual time: how many tasks were taken from it, counted from where it joined."""

    taken: float
    key: str


class Ending(NamedTuple):
    """The end of a task, by which ended tasks are sorted."""

    at: float
    seq: int


class Space(NamedTuple):
    """The bytes that a store takes, and that its disk has left."""

    file: int
    log: int
    free: int


class Filter(NamedTuple):
    """The tasks that a listing selects, and their order; None selects any."""

    kind: str | None = None
    status: Status | None = None
    collection: str | None = None
    worker: str | None = None
    newest: bool = False
    """Whether the newest task comes first."""
    root: str | None = None
    """The first task of a chain: it, and the tasks that came from it."""
    is_live: bool = False
    """Whether tasks that have ended are left out."""
    scheduled_by: float | None = None
    """When a task was accepted at the latest."""
    tags: Sequence[str] = ()
    """The tags that a task has, all of them: see `View.tagged`."""


class Tagged(NamedTuple):
    """A part of the tasks with a tag."""

    seqs: Sequence[int]
    """The tasks that have all wanted tags."""
    last: int | None
    """The last `seq` that was looked at; None: no task with the tag was left."""
