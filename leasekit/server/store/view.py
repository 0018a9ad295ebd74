"""Reads of a store, in a snapshot that its writer does not wait for."""

from collections.abc import Collection, Sequence
from typing import Protocol

from leasekit._lifecycle.rows import Trigger
from leasekit.server.store.rows import (
    AuditRow,
    Checkpoint,
    Deadline,
    Dedupe,
    DrainRow,
    Ending,
    Entity,
    Filter,
    GateRow,
    Holding,
    KindRow,
    Lane,
    MinuteRow,
    PeriodicRow,
    Run,
    SessionRow,
    Tagged,
    TokenRow,
)


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

    def last_runs(self, seqs: Collection[int], *, limit: int) -> dict[int, list[Run]]:
        """Return the latest `limit` runs of each of these tasks with results and errors, the oldest first.

        Tasks without one are left out.
        """
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
        the tags of `wanted`; None: it has no tags, and no root.
        """
        ...

    def chained(self, root: str, *, after: int, newest: bool, limit: int) -> list[int]:
        """Return the `seq` of the next tasks of a chain, its root among them, after this one, in order."""
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

    def held_by(self, worker: str) -> list[int]:
        """Return the tasks that a worker has leases of, by `seq`."""
        ...

    def drains(self) -> list[DrainRow]:
        """Return the workers that take no new tasks, sorted by name."""
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

    def names_due(self, *, now: float, limit: int) -> list[str]:
        """Return the names of up to `limit` periodic tasks that fire by now, in turns of those who changed them last.

        The first of each come first, then the second of each; those of one are in the order in which they are due.
        """
        ...

    def tokens(self) -> list[TokenRow]:
        """Return all access tokens, also those that are revoked, the oldest first."""
        ...

    def session(self, digest: bytes) -> SessionRow | None:
        """Return a session of the console, by the digest of its cookie, also one whose time is over."""
        ...

    def sessions(self) -> list[SessionRow]:
        """Return all sessions of the console, the one that ends first at the beginning."""
        ...

    def audit(self, *, before: str, limit: int) -> list[AuditRow]:
        """Return up to `limit` acts of operators whose ids come before `before` (empty: all do), the latest first."""
        ...

    def running(self, kinds: Collection[str]) -> dict[str, int]:
        """Count the leased tasks of each of these kinds; kinds without any are left out."""
        ...

    def running_of_keys(self, kind: str, keys: Collection[str]) -> dict[str, int]:
        """Count the tasks of each of these keys of a kind that are leased, or keep a place; other keys are left out."""
        ...

    def full_keys(self, kinds: Collection[str], *, now: float, limit: int) -> list[tuple[Lane, str]]:
        """Return up to `limit` keys that have left their lanes and come back later than now.

        Each comes with its lane, as it is with the key.
        """
        ...

    def waits_of(self, ids: Collection[str], *, limit: int | None = None) -> list[tuple[str, str]]:
        """Return what these tasks still wait for: pairs of an awaited task and one of these, sorted by the latter.

        With a `limit`, these are any of them, as many as that at most.
        """
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

    def creation_times(self, seqs: Collection[int]) -> dict[int, float]:
        """Return when these tasks were scheduled."""
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
