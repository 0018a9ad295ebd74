"""The seam between the server's rules and what keeps the tasks.

A store is opened by one engine and gives it transactions: batches of plain rows in, batches of plain rows out, no
rule in between. All methods are synchronous. One thread writes; reading goes beside it, on connections of its own.

Two halves make a task: its `Entity` is what it is, written once; its `Trigger` is where it stands, small
and hot. Times are seconds since the epoch, users' JSON values are bytes. Two clocks tell the time: the store's, which
follows the wall clock forward, and for the ends of leases one that has no steps (`leasekit.server.clock`).
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from msgspec import Struct

from leasekit._lifecycle.rows import Limits, Trigger
from leasekit.task import Status

__all__ = [
    "Anchor",
    "Checkpoint",
    "ClaimMemory",
    "Content",
    "Dedupe",
    "Entity",
    "Filter",
    "Lane",
    "Limits",
    "Run",
    "Store",
    "Trigger",
    "Tx",
    "View",
    "shifted",
]


class Entity(Struct, frozen=True, gc=False):
    """What a task is. The order of the fields is that of the table's columns."""

    seq: int  # the order in which tasks came in; the store's own key
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
    retry: bytes | None  # a RetryPolicy as JSON; None: the default
    dedupe_key: str | None
    traceparent: str | None
    digest: bytes  # of the payload, the same for each way to write the same JSON
    payload: bytes  # last: SQLite reads through a big value to get at what is behind it


def shifted(run_until: float | None, shift: float | None) -> float | None:
    """The end of a run where instants mean `shift` more; None: unknown. An end that is over stays so."""
    if run_until is None or run_until <= 0:
        return run_until
    return None if shift is None else run_until + shift


class Content(NamedTuple):
    """What a holder gets with its task."""

    payload: bytes
    collection: str | None
    traceparent: str | None
    progress: bytes | None  # what the last holder left


class Checkpoint(NamedTuple):
    """What a holder has reported of its progress."""

    value: bytes
    fence: int  # of its claim …
    number: int  # … and which of its reports it is

    @property
    def mark(self) -> tuple[int, int]:
        """Grows with every report on the task."""
        return self.fence, self.number


class Run(Struct, frozen=True, gc=False):
    """How one claim of a task ended. The order of the fields is that of the table's columns."""

    seq: int
    fence: int
    attempt: int
    outcome: str  # an Outcome, or *expired*
    at: float
    worker: str | None
    token: str
    digest: bytes | None  # of the report; None: there was none
    result: bytes | None
    error: bytes | None


class Dedupe(NamedTuple):
    """Which task was the first with a (kind, key), and until when that counts (None: as long as it is kept)."""

    kind: str
    key: str
    id: str
    until: float | None


class ClaimMemory(NamedTuple):
    """What a claim was answered."""

    worker: str
    claim_id: str
    granted_at: float
    waited: float
    grants: Sequence[tuple[int, str]]  # (seq, token)


class Anchor(NamedTuple):
    """One moment by two clocks."""

    boot_id: str
    """Which start of the machine `boot` counts from."""
    boot: float
    """CLOCK_BOOTTIME."""
    instant: float
    """The same moment by the clock of leases, as the process had it that wrote this."""


class Lane(NamedTuple):
    """The waiting tasks of one kind and priority, and when the first of them is due."""

    priority: int
    kind: str
    due_at: float


class Filter(NamedTuple):
    """What a listing asks for; None: anything."""

    kind: str | None = None
    status: Status | None = None
    collection: str | None = None
    worker: str | None = None


class Tx(Protocol):
    """One transaction of the writer. Nothing of it is seen before it ends, or ever, where it fails."""

    def allocate(self, count: int) -> int:
        """The first of `count` new, consecutive `seq`s, larger than all before."""
        ...

    def add(self, entities: Sequence[Entity], triggers: Sequence[Trigger]) -> None:
        """Keep new tasks."""
        ...

    def triggers(self, ids: Collection[str]) -> dict[str, Trigger]:
        """Where those of these tasks stand that there are."""
        ...

    def triggers_of(self, seqs: Collection[int]) -> dict[int, Trigger]:
        """Where these tasks stand."""
        ...

    def digests(self, seqs: Collection[int]) -> dict[int, bytes]:
        """The digests of these tasks' payloads."""
        ...

    def contents(self, seqs: Collection[int]) -> dict[int, Content]:
        """What holders get with these tasks."""
        ...

    def size(self, seqs: Collection[int]) -> int:
        """The bytes of users' values that holders get with these tasks: payloads and progress."""
        ...

    def limits(self, seqs: Collection[int]) -> dict[int, Limits]:
        """How often these tasks may fail."""
        ...

    def save(self, triggers: Sequence[Trigger]) -> None:
        """Keep where these tasks stand now."""
        ...

    def renew(self, seqs: Collection[int], status: Status, *, now: float) -> None:
        """Put these to `status`, and their ends to `now` plus their own `heartbeat_timeout`, unless they are later."""
        ...

    def end(self, seqs: Collection[int], status: Status) -> None:
        """Put these to `status`, which is an end: nobody holds them, nothing more is due. Counts stay."""
        ...

    def lanes(self, kinds: Collection[str]) -> list[Lane]:
        """The lanes of these kinds in which something waits, the most urgent first."""
        ...

    def ready(self, lane: Lane, *, now: float, after: tuple[float, int], limit: int) -> list[Trigger]:
        """The first tasks of a lane that are due, by (next_trigger_at, seq), behind the one given."""
        ...

    def expired(self, *, now: float, limit: int) -> list[Trigger]:
        """Leases that have ended, the oldest first."""
        ...

    def rebase(self, *, now: float, shift: float | None) -> None:
        """Have every lease end the longer of its two ttls after `now`: no holder can believe in it for longer.

        The ends are spread over a tenth more, so that they do not come all at once. The ends of runs that are still
        ahead move by `shift`; None: they are dropped, and set anew by the next beat.
        """
        ...

    def anchor(self) -> Anchor | None:
        """The last anchor; None: there is none, or it cannot be read."""
        ...

    def set_anchor(self, anchor: Anchor) -> None:
        """Keep this anchor, if the transaction changes anything else."""
        ...

    def progress_marks(self, seqs: Collection[int]) -> dict[int, tuple[int, int]]:
        """The fence and the number of the checkpoints of those of these tasks that have one."""
        ...

    def set_progress(self, values: Mapping[int, Checkpoint]) -> None:
        """Keep the latest checkpoints."""
        ...

    def add_runs(self, runs: Sequence[Run]) -> None:
        """Keep how runs ended."""
        ...

    def forget_runs(self, keys: Sequence[tuple[int, int]]) -> None:
        """Drop the runs of these (seq, fence): a lease that had expired was reported after all."""
        ...

    def runs(self, seqs: Collection[int]) -> list[Run]:
        """The runs of these tasks, without their values."""
        ...

    def dedupes(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], Dedupe]:
        """The first tasks of those of these (kind, key) that there are."""
        ...

    def set_dedupes(self, dedupes: Sequence[Dedupe]) -> None:
        """Keep who is the first now."""
        ...

    def remembered(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], ClaimMemory]:
        """What those of these claims (worker, claim_id) were answered that were."""
        ...

    def remember(self, claims: Sequence[ClaimMemory]) -> None:
        """Keep what claims were answered."""
        ...

    def forget_claims(self, *, before: float) -> None:
        """Drop what was answered before then."""
        ...

    def latest(self) -> float:
        """When a task last came in, or was claimed or put back, as far as that is remembered; or zero."""
        ...

    def touch(self) -> None:
        """Write something that changes nothing: fails where the store cannot be written."""
        ...


class View(Protocol):
    """One consistent look at the store, beside the writer."""

    def triggers(self, ids: Collection[str]) -> dict[str, Trigger]:
        """Where those of these tasks stand that there are."""
        ...

    def entities(self, seqs: Collection[int]) -> dict[int, Entity]:
        """What these tasks are."""
        ...

    def progress(self, seqs: Collection[int]) -> dict[int, bytes]:
        """The latest checkpoints of those of these tasks that have one."""
        ...

    def last_runs(self, seq: int, *, limit: int) -> list[Run]:
        """The latest runs of a task with their values, the oldest of them first."""
        ...

    def page(self, wanted: Filter, *, after: int, limit: int) -> list[Trigger]:
        """The first tasks that came in after the `seq` given and match, in that order."""
        ...

    def counts(self) -> dict[str, dict[str, int]]:
        """How many tasks of each kind are in which status."""
        ...

    def holders(self) -> dict[str, int]:
        """How many leases each worker holds."""
        ...


class Store(Protocol):
    """What keeps the tasks of one engine."""

    url: str | None = None
    """The URL that names this store in every working directory; None: this process alone has it."""

    def open(self) -> None:
        """Make it ready, in the thread that will write. Raises `StoreLocked` where another engine has it open."""
        ...

    def transaction(self) -> AbstractContextManager[Tx]:
        """A transaction that is durable when the block ends, and undone where it raises.

        Raises `Unavailable` where the store does not do its part.
        """
        ...

    def view(self) -> AbstractContextManager[View]:
        """A look at the store; from any thread, and without held up the writer."""
        ...

    def cramped(self) -> str | None:
        """Why no new task should be taken, so that what is held can go on; None: there is room."""
        return None

    def close(self) -> None:
        """Let go of it, in the thread that wrote."""
        ...
