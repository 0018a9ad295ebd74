"""The seam between the server's rules and the storage of tasks.

One engine opens a store and gets transactions from it: batches of plain rows in, batches of plain rows out, without
rules. All methods are synchronous. One thread writes; readers work beside it, on connections of their own.

A task consists of an `Entity`, its definition, which is written once, and a `Trigger`, its state, which is small and
changes often. Times are seconds since the epoch, users' JSON values are bytes. Times are by the store's clock, which
follows the wall clock forward, except for the ends of leases and runs: by a clock without steps (`server.clock`).
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, runtime_checkable

from msgspec import Struct

from leasekit._lifecycle.rows import Limits, Trigger
from leasekit.server.store.routes import kind_of
from leasekit.task import Status

__all__ = [
    "MESSAGE",
    "RETENTION",
    "Anchor",
    "AuditRow",
    "Checkpoint",
    "ClaimMemory",
    "Company",
    "Contended",
    "Content",
    "Deadline",
    "Dedupe",
    "Ending",
    "Entity",
    "Filter",
    "GateRow",
    "Holding",
    "InboxRow",
    "KindRow",
    "Lane",
    "Limits",
    "Locked",
    "MinuteRow",
    "Node",
    "NodeRow",
    "PeriodicRow",
    "Reading",
    "Run",
    "Share",
    "SharedStore",
    "SharedTx",
    "Space",
    "Store",
    "Tagged",
    "TokenRow",
    "Trigger",
    "Tx",
    "View",
    "shifted",
]


RETENTION = 30 * 86400.0
"""Seconds for which a store keeps ended tasks, if its URL does not say another time."""

MESSAGE = 7900
"""The bytes of a message between nodes, at most."""


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


class KindRow(NamedTuple):
    """The settings of a kind. The fields are in the order of the table's columns."""

    name: str
    settings: bytes | None  # `KindSettings` as JSON; None: the kind no longer has any
    changed_at: float
    changed_by: str | None
    change: int  # the number of its last change, which grows with each change of any kind


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


class Contended(Exception):
    """Another writer has changed the same rows meanwhile: the transaction is undone, and must be repeated."""


class Locked(Contended):
    """Another session has kept rows locked for longer than a transaction may wait: it is undone."""


class Reading(NamedTuple):
    """The clock of a database that several nodes share, at the start of a transaction, and what they know of it."""

    wall: float  # the wall clock of the database, in seconds since the epoch
    correction: float  # the seconds by which this is ahead of the clock of leases, in which it made a step
    gained: float  # the seconds by which the clock of due times is ahead of the clock of leases
    last: Anchor | None  # the last sign of any node; None: there never was one
    others_seen: float | None  # when another node was seen last that has not left since; None: there is none
    before: float  # a moment before the reading, by the boot clock of this machine
    after: float  # a moment after the reading
    kind_change: int | None = None  # the number of the last change of a kind or gate; None: there are no such tables
    has_waits: bool = False  # whether any task was ever scheduled after another
    has_routes: bool = False  # whether any task has ever required labels


class Node(NamedTuple):
    """A process that has a shared store open, and what it says of itself with its signs."""

    id: str  # made anew at each start
    name: str  # the machine and the process
    version: str  # of leasekit
    address: str | None = None  # where the node serves clients over HTTP
    wants_events: bool = False  # of the other nodes
    workers: bytes | None = None  # those that the node has heard of, as a `Directory` writes them

    @classmethod
    def of_this_process(cls, node_id: str) -> "Node":
        import platform
        from importlib.metadata import version

        return cls(node_id, f"{platform.node()}:{os.getpid()}", version("leasekit"))


class NodeRow(NamedTuple):
    """A node as others see it. Moments are by the clock of leases."""

    id: str
    name: str
    version: str
    address: str | None
    wants_events: bool
    started_at: float
    seen: float  # the moment of its last sign
    has_left: bool


class InboxRow(NamedTuple):
    """A task that an application has put into the inbox of a shared database, in a transaction of its own."""

    number: int
    task: str | None  # JSON, as the application wrote it; None: it is too large to be read
    at: float  # when it was written, by the clock of the database


class Company(NamedTuple):
    """The nodes that share a store, and what they share."""

    tables: int  # the version of the tables
    fault: str | None  # why this node cannot use them
    correction: float  # the seconds by which the wall clock is ahead of the clock of leases
    nodes: list[NodeRow]  # this one too; the last that were seen


class View(Protocol):
    """A consistent snapshot of the store, which the writer does not wait for."""

    def triggers(self, ids: Collection[str]) -> dict[str, Trigger]:
        """Return the states of the tasks with these ids; unknown ids are left out."""
        ...

    def entities(self, seqs: Collection[int]) -> dict[int, Entity]:
        """Return the definitions of these tasks."""
        ...

    def progress(self, seqs: Collection[int]) -> dict[int, Checkpoint]:
        """Return the latest checkpoints of these tasks; tasks without one are left out."""
        ...

    def last_runs(self, seq: int, *, limit: int) -> list[Run]:
        """Return the latest `limit` runs of a task with results and errors, the oldest first."""
        ...

    def page(
        self,
        wanted: Filter,
        *,
        after: int,
        limit: int,
        until: int | None = None,
        among: Sequence[int] | None = None,
    ) -> list[Trigger]:
        """Return the first `limit` matching tasks after the one whose `seq` is `after`, in the order of `wanted`.

        `until` is the last `seq` that is looked at; None: all are. `among` are the only tasks that are looked at, with
        the tags of `wanted`; None: it has no tags.
        """
        ...

    def tagged(self, tags: Sequence[str], *, after: int, newest: bool, limit: int) -> Tagged:
        """Return which of the next `limit` tasks after the `seq` `after` have all these tags.

        Only tasks with the rarest of the tags are looked at, and only these count towards `limit`.
        """
        ...

    def tags(self, seqs: Collection[int]) -> dict[int, list[str]]:
        """Return the tags of these tasks, sorted; tasks without tags are left out."""
        ...

    def next_seq(self, *, after: int, newest: bool) -> int | None:
        """Return the `seq` of the first task after this one, in the order of such a listing; None: there is none."""
        ...

    def dedupes(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], Dedupe]:
        """Return the first tasks with these (kind, key); unknown keys are left out."""
        ...

    def counts(self) -> dict[str, dict[str, int]]:
        """Count the tasks of each kind in each status."""
        ...

    def holders(self) -> dict[str, Holding]:
        """Return what each worker holds."""
        ...

    def lanes(self, kinds: Collection[str]) -> list[Lane]:
        """Return the lanes of these kinds, and of the routes among them, in which tasks wait, the most urgent first."""
        ...

    def routes(self, kinds: Collection[str]) -> list[str]:
        """Return the routes of these kinds that have waiting tasks, or had some lately."""
        ...

    def routes_of(self, seqs: Collection[int]) -> dict[int, str]:
        """Return the routes of these tasks; tasks that require nothing are left out."""
        ...

    def count_waiting(self, lane: Lane, *, now: float, most: int) -> tuple[int, int]:
        """Count the tasks of a lane that are due, and those that are due later; each up to `most`."""
        ...

    def count_keys(self, lane: Lane, *, now: float, most: int) -> int:
        """Count the keys of a lane that have due tasks, about; up to `most`, or twice that."""
        ...

    def ended(self, wanted: Filter, *, until: float, after: Ending, limit: int) -> list[Ending]:
        """Return the first `limit` matching tasks that ended by `until`, sorted, those after `after` only."""
        ...

    def end_further(self, *, until: float, after: Ending, skip: int) -> float | None:
        """Return when the task ended that comes `skip` tasks behind `after`; None: by `until`, fewer have ended."""
        ...

    def ended_of(
        self, kinds: Collection[str], *, others: bool, until: float, after: Ending, limit: int
    ) -> list[Ending]:
        """Return what `ended` returns, but only of the tasks of these kinds, or, with `others`, of all other kinds."""
        ...

    def count_ended(self, wanted: Filter, *, until: float) -> dict[str, dict[str, int]]:
        """Count the matching tasks of each kind in each status that ended by `until`."""
        ...

    def kinds(self, *, after: int = 0) -> list[KindRow]:
        """Return the kinds whose settings were changed after the change with this number, sorted by name."""
        ...

    def gates(self) -> list[GateRow]:
        """Return all gates, sorted by scope and name."""
        ...

    def parked_tasks(self, seqs: Collection[int]) -> dict[int, float]:
        """Return when those of these tasks were due that a gate has parked."""
        ...

    def keys(self, seqs: Collection[int]) -> dict[int, str]:
        """Return the keys of these tasks; tasks without one are left out."""
        ...

    def periodic(self, name: str) -> PeriodicRow | None:
        """Return a periodic task; None: there is none of this name. In a transaction, other writers of it wait."""
        ...

    def periodics(self, *, after: str, limit: int) -> list[PeriodicRow]:
        """Return the first `limit` periodic tasks whose names come after `after`, sorted by name."""
        ...

    def tokens(self) -> list[TokenRow]:
        """Return all access tokens, also those that are revoked, the oldest first."""
        ...

    def audit(self, *, before: str, limit: int) -> list[AuditRow]:
        """Return up to `limit` acts of operators whose ids come before `before` (empty: all do), the latest first."""
        ...

    def running(self, kinds: Collection[str]) -> dict[str, int]:
        """Count the leased tasks of each of these kinds; kinds without any are left out."""
        ...

    def running_of_keys(self, kind: str, keys: Collection[str]) -> dict[str, int]:
        """Count the leased tasks of each of these keys of a kind; keys without any are left out."""
        ...

    def full_keys(self, kinds: Collection[str], *, now: float, limit: int) -> list[tuple[Lane, str]]:
        """Return up to `limit` keys that have left their lanes and come back later than now.

        Each comes with its lane, as it is with the key.
        """
        ...

    def waits_of(self, ids: Collection[str]) -> list[tuple[str, str]]:
        """Return what these tasks still wait for: pairs of an awaited task and one of these, sorted by the latter."""
        ...

    def chains_of(self, seqs: Collection[int]) -> dict[int, tuple[str, str]]:
        """Return the parents and the roots of these tasks; tasks that came from no other are left out."""
        ...

    def deadlines(self, seqs: Collection[int]) -> dict[int, Deadline]:
        """Return by when these tasks must have begun; tasks without a start deadline are left out."""
        ...

    def roots(self, ids: Collection[str]) -> dict[str, str]:
        """Return the roots of the chains of these tasks; unknown ids are left out."""
        ...

    def due_times(self, seqs: Collection[int]) -> dict[int, float]:
        """Return when these tasks were to be due, as they were scheduled."""
        ...

    def minutes(self, *, since: int, kind: str | None = None) -> list[MinuteRow]:
        """Return what happened in each minute from `since` on, to tasks of this kind, or (None) of all kinds."""
        ...

    def free_names(self, *, until: float, limit: int) -> list[int]:
        """Return up to `limit` waiting tasks that stand for names (`named`, `once`) and have been due since `until`."""
        ...

    def free_space(self) -> int:
        """Return the bytes of the file that no task needs any longer. Raises `Refused` if none can be given back."""
        ...


class Tx(View, Protocol):
    """A transaction of the writer. Readers see its changes only after it has committed."""

    def allocate_seqs(self, count: int) -> int:
        """Reserve `count` consecutive `seq`s, larger than all before, and return the first."""
        ...

    def add(
        self,
        entities: Sequence[Entity],
        triggers: Sequence[Trigger],
        keys: Mapping[int, str] = ...,
        routes: Mapping[int, str] = ...,
    ) -> None:
        """Insert new tasks; `keys` and `routes` are those of tasks that have one.

        Raises `Refused` if there is no room for keys and routes.
        """
        ...

    def queued_routes(self) -> Mapping[str, Sequence[float]]:
        """Return the routes in which this transaction has queued tasks, and when these are due."""
        ...

    def add_tags(self, tags: Sequence[tuple[str, int]]) -> None:
        """Insert the tags of new tasks: pairs of a tag and a `seq`. Raises `Refused` if there is no room for tags."""
        ...

    def unlocked_triggers(self, ids: Collection[str]) -> tuple[dict[str, Trigger], Collection[str]]:
        """Return the states of the tasks with these ids, without those that another writer has locked, and their ids.

        Unknown ids are left out of both.
        """
        return self.triggers(ids), ()

    def triggers_of(self, seqs: Collection[int]) -> dict[int, Trigger]:
        """Return the states of the tasks with these numbers; unknown numbers are left out."""
        ...

    def digests(self, seqs: Collection[int]) -> dict[int, bytes]:
        """Return the digests of these tasks' payloads."""
        ...

    def contents(self, seqs: Collection[int]) -> dict[int, Content]:
        """Return the values of these tasks that holders get."""
        ...

    def content_size(self, seqs: Collection[int]) -> int:
        """Return the total bytes of the payloads and the progress of these tasks."""
        ...

    def limits(self, seqs: Collection[int]) -> dict[int, Limits]:
        """Return how often these tasks may fail, and their retry policies."""
        ...

    def save(self, triggers: Sequence[Trigger]) -> None:
        """Write the new states of these tasks."""
        ...

    def set_due_times(self, due_at: Mapping[int, float]) -> None:
        """Replace when these tasks were to be due, as `due_times` returns it."""
        ...

    def replace_payloads(self, payloads: Mapping[int, tuple[bytes, bytes]]) -> None:
        """Replace the digests and the payloads of these tasks."""
        ...

    def move(self, seqs: Collection[int], *, priority: int) -> None:
        """Put waiting tasks into the lane of this priority; `save` of their new states must follow."""
        ...

    def renew(self, seqs: Collection[int], status: Status, *, now: float, at: float) -> None:
        """Set these tasks to `status`; move the ends of their leases to `now` plus `heartbeat_timeout`, never back.

        `now` is the moment by the clock of leases; `at`, the same moment by the store's time, is noted.
        """
        ...

    def end(self, seqs: Collection[int], status: Status, *, now: float) -> None:
        """Set these tasks to the final `status`, without holder, token and next trigger time. Counts stay."""
        ...

    def remove(self, seqs: Collection[int]) -> None:
        """Delete these tasks with their runs, checkpoints and tags, and the dedupe keys whose first tasks they are."""
        ...

    def give_back(self, *, most: int) -> None:
        """Shorten the file by up to `most` bytes of its free space."""
        ...

    def ready(self, lane: Lane, *, now: float, after: tuple[float, int], limit: int) -> list[Trigger]:
        """Return up to `limit` due tasks of a lane, sorted by (next_trigger_at, seq), those after `after` only.

        The lane is one of tasks without keys.
        """
        ...

    def active_shares(self, lane: Lane, *, after: Share, limit: int) -> list[Share]:
        """Return the first `limit` shares of a lane behind this one, sorted, that have joined for their due tasks."""
        ...

    def joining_shares(self, lane: Lane, *, now: float, limit: int) -> list[Share]:
        """Return about `limit` shares of a lane that have due tasks and have not joined; some of them perhaps have."""
        ...

    def share(self, lane: Lane, key: str) -> Share:
        """Return the share of a key; one that is not known has taken nothing."""
        ...

    def queued(
        self, lane: Lane, after: Mapping[str, tuple[float, int]], *, now: float, limit: int
    ) -> dict[str, list[Trigger]]:
        """Return up to `limit` due tasks of each of these keys, sorted like those of `ready`, those after `after`."""
        ...

    def charge(self, lane: Lane, taken: Mapping[str, int], *, base: float, now: float) -> None:
        """Count tasks as taken from these keys. A key joins at `base` if it is behind, and owes one task at most.

        It stays as long as it has due tasks.
        """
        ...

    def leave(self, lane: Lane, until: Mapping[str, float | None], *, most: int) -> None:
        """Take keys out of a lane until a moment, or (None) as long as `most` of their tasks run.

        They come back sooner when they are freed, or when their queues change. A key of which another writer has ended
        a run meanwhile stays.
        """
        ...

    def free_keys(self, seqs: Collection[int]) -> list[Lane]:
        """Put the keys of these tasks back into the lanes that they have left; return these, as they are then.

        Keys that come back at a moment wait for that.
        """
        ...

    def free_keys_of(self, kinds: Collection[str], *, at_moments: bool = True) -> list[Lane]:
        """Put all keys of these kinds back into the lanes that the keys have left, and return these lanes.

        Without `at_moments`, keys that come back at a known moment still wait for that moment.
        """
        ...

    def tend_shares(self, *, limit: int) -> None:
        """Do a bounded part of the upkeep: forget keys without tasks that owe nothing, and mend what is damaged."""
        ...

    def expired(self, *, now: float, limit: int) -> list[Trigger]:
        """Return up to `limit` tasks whose leases have ended, the oldest end first."""
        ...

    def follow_leases(self, *, now: float, limit: int) -> None:
        """Sort up to `limit` renewed leases by their ends again, if the store leaves this to its consumer."""
        ...

    def restart_leases(self, *, now: float, shift: float | None) -> None:
        """Make every lease end at `now` plus the longer of its two ttls: no holder can trust it for longer.

        The ends are spread over a tenth more, so that not all leases end at once. A lease that was extended before, and
        not renewed since, only moves by `shift`, like the ends of runs that are not over. If `shift` is None, the ends
        of runs are dropped, and set anew by the next beat.
        """
        ...

    def anchor(self) -> Anchor | None:
        """Return the last anchor; None if there is none, or it cannot be read."""
        ...

    def set_anchor(self, anchor: Anchor) -> None:
        """Write this anchor if the transaction changes anything else."""
        ...

    def progress_marks(self, seqs: Collection[int]) -> dict[int, tuple[int, int]]:
        """Return the fence and the number of the checkpoints of these tasks; tasks without one are left out."""
        ...

    def set_progress(self, values: Mapping[int, Checkpoint]) -> None:
        """Replace the checkpoints of these tasks."""
        ...

    def add_runs(self, runs: Sequence[Run]) -> None:
        """Insert ended runs."""
        ...

    def forget_runs(self, keys: Sequence[tuple[int, int]]) -> None:
        """Delete the runs with these (seq, fence): their expired leases were settled after all."""
        ...

    def runs(self, seqs: Collection[int]) -> list[Run]:
        """Return the runs of these tasks, without results and errors."""
        ...

    def set_dedupes(self, dedupes: Sequence[Dedupe]) -> None:
        """Insert the first tasks of their (kind, key), or replace those that this transaction has read or written."""
        ...

    def claim_memories(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], ClaimMemory]:
        """Return the answers of these claims (worker, claim_id); claims without an answer are left out."""
        ...

    def remember_claims(self, claims: Sequence[ClaimMemory]) -> None:
        """Insert the answers of claims."""
        ...

    def forget_claims(self, *, before: float, limit: int) -> int:
        """Delete up to `limit` answers of claims from before this time, and return how many were deleted."""
        ...

    def last_kind_change(self) -> int:
        """Return the number of the last change of the settings of any kind, or of a gate; zero if there was none."""
        ...

    def set_kind(self, name: str, settings: bytes | None, *, at: float, by: str | None) -> None:
        """Replace the settings of a kind, under the next number of a change. Raises `Refused` if there is no room."""
        ...

    def begin_change(self) -> None:
        """Wait for the end of the other writers' transactions, and keep new ones from beginning until this one ends.

        So no transaction that was judged before a change of kinds or gates ends after it.
        """
        ...

    def set_gate(self, row: GateRow) -> None:
        """Add or replace a gate, and count a change. Raises `Refused` if there is no room."""
        ...

    def remove_gate(self, scope: str, name: str) -> None:
        """Remove a gate, and count a change."""
        ...

    def next_deadline(self) -> float | None:
        """Return the first start deadline of any task."""
        ...

    def passed_deadlines(self, *, now: float, limit: int) -> list[int]:
        """Return the first `limit` tasks whose start deadlines have passed."""
        ...

    def set_deadlines(self, deadlines: Mapping[int, Deadline]) -> None:
        """Note by when these tasks must have begun, in place of what was noted."""
        ...

    def drop_deadlines(self, seqs: Collection[int]) -> None:
        """Forget the start deadlines of these tasks."""
        ...

    def next_firing(self) -> float | None:
        """Return when the next periodic task fires."""
        ...

    def due_periodics(self, *, now: float, limit: int) -> list[PeriodicRow]:
        """Return up to `limit` periodic tasks that fire by now, the longest due first.

        Other writers of these rows wait until this transaction ends. Rows that another writer has locked are left out.
        """
        ...

    def set_periodic(self, row: PeriodicRow) -> None:
        """Add a periodic task, or replace the version before this one. Raises `Contended` if that is not there.

        Version 1 is added. Raises `Refused` if there is no room.
        """
        ...

    def remove_periodic(self, name: str) -> None:
        """Remove a periodic task."""
        ...

    def set_tokens(self, rows: Sequence[TokenRow]) -> None:
        """Add access tokens, or replace those with the same ids. `begin_change` must have been called."""
        ...

    def use_tokens(self, used_at: Mapping[str, float]) -> None:
        """Note when access tokens were used, by their ids."""
        ...

    def remove_tokens(self, ids: Collection[str]) -> None:
        """Remove access tokens."""
        ...

    def add_audit(self, rows: Sequence[AuditRow]) -> None:
        """Add acts of operators to the audit log, if the store has one."""
        ...

    def forget_audit(self, *, before: float, limit: int) -> int:
        """Delete up to `limit` acts from before this time, and return how many were deleted."""
        ...

    def collections(self, seqs: Collection[int]) -> dict[int, str]:
        """Return the collections of these tasks; tasks without one are left out."""
        ...

    def parked(self, collection: str, *, limit: int) -> list[tuple[float, int]]:
        """Return when the first parked tasks of a collection were due, and their `seq`s, in this order."""
        ...

    def park(self, tasks: Sequence[tuple[str, float, int]]) -> None:
        """Note that these tasks are parked: their collections, when they were due, and their `seq`s."""
        ...

    def unpark(self, seqs: Collection[int]) -> None:
        """Remove the notes that these tasks are parked."""
        ...

    def begin_starts(self, kinds: Collection[str]) -> Collection[str]:
        """Keep other writers from starting tasks of these kinds with limits until this transaction ends.

        Return the kinds of which no other writer starts tasks now. Later reads see all that such writers have written.
        """
        ...

    def buckets(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], float]:
        """Return when these token buckets (kind, key) are full again; those that are not kept are left out."""
        ...

    def set_buckets(self, full_at: Mapping[tuple[str, str], float]) -> None:
        """Add token buckets, or replace those that this transaction has read or written."""
        ...

    def fill_buckets(self, kind: str, *, full_by: float, of_keys: bool = False) -> None:
        """Let the token bucket of a kind, or those of its keys, be full at this moment at the latest."""
        ...

    def forget_buckets(self, kinds: Collection[str], *, now: float, limit: int) -> None:
        """Remove up to `limit` token buckets of keys of these kinds that are full; none is as good."""
        ...

    def has_waits(self) -> bool:
        """Return whether tasks wait for others; also True if they once did."""
        ...

    def waits(self, awaited: Collection[str], *, limit: int, after: str = "") -> list[tuple[str, str]]:
        """Return the first `limit` waits for these tasks, sorted: pairs of an awaited task and one that waits for it.

        Only tasks that wait whose ids come after `after` are in it.
        """
        ...

    def awaited(self, ids: Collection[str]) -> set[str]:
        """Return those of these ids that any task waits for."""
        ...

    def add_waits(self, waits: Collection[tuple[str, str]]) -> None:
        """Note what tasks wait for: pairs of an awaited and a waiting task. Raises `Refused` if there is no room."""
        ...

    def drop_waits(self, waits: Collection[tuple[str, str]]) -> None:
        """Remove these waits."""
        ...

    def drop_waits_of(self, ids: Collection[str]) -> None:
        """Remove all waits of these tasks."""
        ...

    def wakes(self, *, limit: int) -> list[tuple[str, str]]:
        """Return the first awaited tasks that must be looked at, without those that another writer looks at.

        Each comes with the id up to which the tasks that wait for it know of its end.
        """
        ...

    def wakes_for(self, awaited: Collection[str]) -> set[str]:
        """Return those of these tasks that must be looked at."""
        ...

    def set_wakes(self, wakes: Mapping[str, str | None]) -> None:
        """Note that awaited tasks must be looked at, and up to which id is done already; None: no longer."""
        ...

    def has_chains(self) -> bool:
        """Return whether the store has room for chains."""
        return True

    def has_inbox(self) -> bool:
        """Return whether applications have put tasks into the inbox, if the store has one."""
        return False

    def add_to_chains(self, tasks: Sequence[tuple[int, str, str]]) -> None:
        """Note the parents and the roots of these tasks."""
        ...

    def cancelled_chains(self, roots: Collection[str]) -> set[str]:
        """Return those of these roots whose chains were cancelled."""
        ...

    def cancel_chains(self, roots: Collection[str], *, at: float) -> None:
        """Note that the chains of these roots are cancelled, for as long as their first tasks are kept."""
        ...

    def add_minutes(self, rows: Sequence[MinuteRow]) -> None:
        """Insert what happened in a minute that is over, in place of what this node has written of it."""
        ...

    def forget_minutes(self, *, before: int, limit: int) -> None:
        """Delete up to about `limit` rows of minutes before this one."""
        ...

    def latest_time(self) -> float:
        """Return the latest known time at which a task was accepted, claimed or put back; zero if there is none."""
        ...

    def probe_write(self) -> None:
        """Write without a change of data, which fails if the store cannot be written."""
        ...


class Store(Protocol):
    """The storage of one engine's tasks."""

    id: str = ""
    """The identity of this store, which no other has; known once the store is open."""
    url: str | None = None
    """The URL of this store, valid in any working directory; None: the store exists in this process only."""
    retention: float = RETENTION
    """Seconds for which ended tasks are kept."""
    is_new: bool = False
    """Whether `open` has created the file of this store."""
    damage: str | None = None
    """The damage that a read or a write has met since `open`; None: it has met none."""

    def open(self) -> None:
        """Open the store, in the thread that will write. Raises `StoreLocked` if another engine has it open."""
        ...

    def transaction(self) -> AbstractContextManager[Tx]:
        """Begin a transaction: durable when the block ends, undone if it raises. Raises `Unavailable`."""
        ...

    def view(self) -> AbstractContextManager[View]:
        """Open a snapshot of the store, from any thread, without delaying the writer."""
        ...

    def counts(self) -> dict[str, dict[str, int]]:
        """Count the tasks of each kind in each status, from any thread, without a scan if the store keeps counts."""
        with self.view() as view:
            return view.counts()

    def space(self) -> Space | None:
        """Return the space that the store takes; None: it has no file, or this cannot be told. Any thread."""
        return None

    def cramped(self) -> str | None:
        """Return why no new tasks should be accepted, so that existing tasks can go on; None: there is room."""
        return None

    def close(self) -> None:
        """Close the store, in the thread that wrote."""
        ...


class SharedTx(Tx, Protocol):
    """A transaction of one of several writers. The rows that it reads are locked until it ends.

    Each method may raise `Contended`.
    """

    @property
    def reading(self) -> Reading:
        """The clock of the database, read when the transaction began."""
        ...

    def correct_clock(self, correction: float, gained: float) -> None:
        """Replace the correction that was read. Raises `Contended` if another node has replaced it."""
        ...

    def sign_in(self, sign: Anchor) -> None:
        """Note that this node was alive at this moment."""
        ...

    def forget_nodes(self, before: float) -> None:
        """Remove nodes that were seen last before this moment, by the clock of leases."""
        ...

    def inbox(self, *, limit: int, most_bytes: int, largest: int, numbers: Sequence[int] | None) -> list[InboxRow]:
        """Return the first `limit` rows of the inbox (of `numbers`, unless None), up to `most_bytes` in all.

        Rows that another writer has locked, or that were set aside, are left out. A first row that is longer than
        `most_bytes` is returned alone.
        """
        ...

    def leave_inbox(self, numbers: Collection[int]) -> None:
        """Remove these rows of the inbox."""
        ...

    def set_aside(self, refused: Mapping[int, str]) -> None:
        """Note why these rows of the inbox cannot become tasks."""
        ...


@runtime_checkable
class SharedStore(Store, Protocol):
    """The storage of tasks that several engines, the nodes, have open at once, on any machines."""

    wall: Callable[[], float] | None
    """A clock in place of the database's; None: there is none."""
    boot: Callable[[], float]
    """The boot clock of this machine."""
    node: Node
    """This node. What is written here is in its next sign."""
    tables: int
    """The version of the tables that this leasekit needs."""

    def transaction(self) -> AbstractContextManager[SharedTx]:
        """Begin a transaction; see `Store.transaction`."""
        ...

    def lacks(self) -> list[int]:
        """Return the versions of the tables that a migration would make."""
        ...

    def migrate(self) -> list[int]:
        """Create the tables, or bring them up to date; return the versions that were made."""
        ...

    def announce(self, messages: Sequence[str]) -> None:
        """Send messages of at most `MESSAGE` bytes to the other nodes. They may get lost. Any thread."""
        ...

    def listen(self, heard: Callable[[str], None]) -> Callable[[], None]:
        """Call `heard` with messages of other nodes, in a thread of its own; return a function that ends this."""
        ...

    def company(self) -> Company:
        """Return the nodes that were seen lately. Any thread."""
        ...

    def workers(self, since: float) -> list[bytes]:
        """Return `workers` of the other nodes that were seen since then and have not left. Any thread."""
        ...
