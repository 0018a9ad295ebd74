"""Transactions of a store: what they write, and read before that, by subject; `Tx` has all of it."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from leasekit._lifecycle.rows import Limits, Trigger
from leasekit.server.store.rows import (
    NOT_DECLARED,
    Anchor,
    AuditRow,
    Checkpoint,
    ClaimMemory,
    Content,
    Deadline,
    Dedupe,
    DrainRow,
    Entity,
    GateRow,
    KindDeclaration,
    Lane,
    MinuteRow,
    PeriodicRow,
    Run,
    SessionRow,
    Share,
    TokenRow,
)
from leasekit.server.store.view import View
from leasekit.task import Status


class TaskWrites(View, Protocol):
    """The tasks of a store, and their states."""

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

    def add_tags(self, tags: Sequence[tuple[str, int]]) -> None:
        """Insert the tags of new tasks: pairs of a tag and a `seq`. Raises `Refused` if there is no room for tags."""
        ...

    def queued_routes(self) -> Mapping[str, Sequence[float]]:
        """Return the routes in which this transaction has queued tasks, and when these are due."""
        ...

    def unlocked_triggers(self, ids: Collection[str]) -> tuple[dict[str, Trigger], Collection[str]]:
        """Lock those of these tasks that no other writer has locked; return their states, and the ids of the others.

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

    def collections(self, seqs: Collection[int]) -> dict[int, str]:
        """Return the collections of these tasks; tasks without one are left out."""
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


class LeaseWrites(Protocol):
    """Leases, and what runs leave: progress, runs that have ended, answers of claims."""

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


class ShareWrites(Protocol):
    """Writes of what claims take, by the shares and the limits of keys."""

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

    def keep_places(self, seqs: Collection[int]) -> None:
        """Let these waiting tasks keep the places of their keys, as if they ran, until they have ended.

        They were saved; from now on they wait like tasks without a key. Tasks that require labels are left as they are,
        and so are tasks of whose keys another one runs or keeps a place.
        """
        ...

    def drop_places_of(self, kind: str) -> None:
        """Take the places from all tasks of this kind that keep one, and put those that wait into their queues."""
        ...

    def drop_places(self, seqs: Collection[int]) -> bool:
        """Take the places from those of these tasks that keep one; return whether any did."""
        ...

    def kept_places(self, seqs: Collection[int]) -> set[int]:
        """Return those of these tasks that keep the places of their keys."""
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


class RuleWrites(Protocol):
    """Writes of what operators set: kinds, gates, drains, tokens, the audit log; and the minutes of the history."""

    def last_kind_change(self) -> int:
        """Return the number of the last change of a kind's settings, a gate or a drain; zero if there was none."""
        ...

    def set_kind(
        self,
        name: str,
        settings: bytes | None,
        *,
        at: float,
        by: str | None,
        declaration: KindDeclaration = NOT_DECLARED,
    ) -> None:
        """Replace the settings of a kind, under the next number of a change. Raises `Refused` if there is no room."""
        ...

    def note_kind(self, name: str, digests: str, *, at: float) -> None:
        """Note when code declared the settings of a kind last, if these digests are still those of its row."""
        ...

    def begin_change(self) -> None:
        """Wait for the end of the other writers' transactions, and keep new ones from beginning until this one ends.

        So no transaction that was judged before a change of kinds, gates or drains ends after it.
        """
        ...

    def set_gate(self, row: GateRow) -> None:
        """Add or replace a gate, and count a change. Raises `Refused` if there is no room."""
        ...

    def remove_gate(self, scope: str, name: str) -> None:
        """Remove a gate, and count a change."""
        ...

    def set_drain(self, row: DrainRow) -> None:
        """Add or replace the mark of a worker that takes no new tasks, and count a change."""
        ...

    def remove_drain(self, worker: str) -> None:
        """Remove the mark of a worker, and count a change; an unknown one is ignored."""
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

    def set_tokens(self, rows: Sequence[TokenRow]) -> None:
        """Add access tokens, or replace those with the same ids. `begin_change` must have been called."""
        ...

    def use_tokens(self, used_at: Mapping[str, float]) -> None:
        """Note when access tokens were used, by their ids."""
        ...

    def remove_tokens(self, ids: Collection[str]) -> None:
        """Remove access tokens."""
        ...

    def add_sessions(self, rows: Sequence[SessionRow]) -> None:
        """Add sessions of the console. Raises `Refused` if there is no room."""
        ...

    def remove_sessions(self, digests: Collection[bytes]) -> None:
        """Remove sessions of the console; unknown ones are ignored."""
        ...

    def add_audit(self, rows: Sequence[AuditRow]) -> None:
        """Add acts of operators to the audit log, if the store has one."""
        ...

    def forget_audit(self, *, before: float, limit: int) -> int:
        """Delete up to `limit` acts from before this time, and return how many were deleted."""
        ...

    def add_minutes(self, rows: Sequence[MinuteRow]) -> None:
        """Insert what happened in a minute that is over, in place of what this node has written of it."""
        ...

    def forget_minutes(self, *, before: int, limit: int) -> None:
        """Delete up to about `limit` rows of minutes before this one."""
        ...


class LaterWrites(Protocol):
    """Writes of what happens later by itself: start deadlines, firings, tasks after others, chains, the inbox."""

    def next_deadline(self) -> float | None:
        """Return the first start deadline of any task; None: there is none, and no other writer adds one."""
        ...

    def passed_deadlines(self, *, now: float, limit: int) -> list[int]:
        """Return the first `limit` tasks whose start deadlines have passed, but for those in the buffer of a worker."""
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

    def due_periodics(self, names: Collection[str], *, now: float) -> list[PeriodicRow]:
        """Return those of these periodic tasks that fire by now.

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

    def add_to_chains(self, tasks: Sequence[tuple[int, str, str]]) -> None:
        """Note the parents and the roots of these tasks."""
        ...

    def cancelled_chains(self, roots: Collection[str]) -> set[str]:
        """Return those of these roots whose chains were cancelled."""
        ...

    def cancel_chains(self, roots: Collection[str], *, at: float) -> None:
        """Note that the chains of these roots are cancelled, for as long as their first tasks are kept."""
        ...

    def has_inbox(self) -> bool:
        """Return whether applications have put tasks into the inbox, if the store has one."""
        return False


class Tx(TaskWrites, LeaseWrites, ShareWrites, RuleWrites, LaterWrites, Protocol):
    """A transaction of the writer. Readers see its changes only after it has committed."""

    def latest_time(self) -> float:
        """Return the latest known time at which a task was accepted, claimed or put back; zero if there is none."""
        ...

    def probe_write(self) -> None:
        """Write without a change of data, which fails if the store cannot be written."""
        ...
