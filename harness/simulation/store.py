"""A store that logs each lease as it is committed, and that fails on demand."""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from harness.history import (
    Closed,
    DrainChanged,
    Event,
    Extended,
    GateChanged,
    Issued,
    KindChanged,
    Redriven,
    Replaced,
    Rescheduled,
)
from harness.recording import digest_of
from harness.simulation.world import World
from leasekit._lifecycle.states import LEASED, RESCHEDULED
from leasekit.errors import Unavailable
from leasekit.server.store import (
    NOT_DECLARED,
    ClaimMemory,
    DrainRow,
    Entity,
    GateRow,
    KindDeclaration,
    Run,
    Store,
    Trigger,
)
from leasekit.server.store.kind_rules import rules_of
from leasekit.task import KindSettings, Status

_NEVER = 1e12  # seconds: later than any lease ends


class Committed:
    """The states that the transactions of all nodes have left."""

    def __init__(self) -> None:
        self.rows: dict[int, Trigger] = {}  # as of their last commits
        self.fences: dict[str, tuple[str, int]] = {}  # every token → task and fence


class WatchedStore:
    """A `Store` around another store."""

    def __init__(self, inner: Store, world: World, committed: Committed) -> None:
        self._inner = inner
        self._world = world
        self._rows = committed.rows
        self.fences = committed.fences
        self.now: Callable[[], float] = lambda: 0.0  # by the clock of the server that has it open
        self.fails = False  # commits are refused
        self.lies = False  # commits take effect, and raise an error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @contextmanager
    def transaction(self) -> Generator[Any]:
        with self._inner.transaction() as tx:
            watched = _Watched(tx)
            yield watched
            self._before_commit()
            has_written = watched.steps or watched.changes
            if self.fails and has_written:
                self._world.fired["store_error"] += 1
                raise Unavailable("the disk is full")
        # Sorted by task: the order within a batch may depend on the order of a set, and has no meaning.
        for row in sorted(watched.steps, key=lambda row: row.seq):
            claim = watched.claims.get(row.token or "", "")
            before = self._rows.get(row.seq)
            ends = before is not None and before.status in LEASED and row.status not in LEASED
            # A task that is rescheduled in the transaction that ends its lease has a fence of its own by then.
            fence = before.fence if ends and before is not None else row.fence
            outcome = watched.outcomes.get((row.seq, fence))
            self._note(before, row, fence, outcome=outcome, claim=claim)
            self._rows[row.seq] = row
        for event, fields in watched.changes:
            self._world.log(event, "store", **fields)
        if self.lies and has_written:
            self._world.fired["store_ambiguous"] += 1
            raise Unavailable("the connection was lost while it was committed")

    def _before_commit(self) -> None:
        """Do nothing; a store that several nodes have open may stand still here."""

    def crash(self) -> None:
        """Close the store as the end of its process does."""
        self._inner.close()

    def _note(self, before: Trigger | None, after: Trigger, fence: int, *, outcome: str | None, claim: str) -> None:
        """Log what has become of a task; `fence` is that of the lease that it is about."""
        lease = {"task": after.id, "fence": fence}
        is_leased, was_leased = after.status in LEASED, before is not None and before.status in LEASED
        if is_leased and after.token is not None and (before is None or after.token != before.token):
            self.fences[after.token] = (after.id, after.fence)
            self._world.log(
                Issued, "store", **lease, token=after.token[:6], attempt=after.attempt, ttl=after.claim_timeout,
                holder=after.owner or "", claim=claim, kind=after.kind, by_store=after.claimed_at,
            )  # fmt: skip
        elif before is None:
            if after.status.ended:
                self._world.log(Closed, "store", **lease, status=after.status.value, ended=True)
        elif is_leased and was_leased:
            if (after.next_trigger_at or 0.0) > (before.next_trigger_at or 0.0):
                self._world.log(Extended, "store", **lease, ttl=(after.next_trigger_at or 0.0) - self.now())
        elif before.status.ended:
            self._world.log(Redriven, "store", **lease)
        # An expired lease may still be settled.
        elif was_leased or after.status.ended or outcome is not None:
            expired, status = outcome == "expired", after.status
            why = {"reason": after.reason or ""} if status is Status.CANCELLED else {}
            self._world.log(Closed, "store", **lease, status=status.value, expired=expired, ended=status.ended, **why)


class _Watched:
    """A transaction that records its changes in order."""

    def __init__(self, tx: Any) -> None:
        self._tx = tx
        self.steps: list[Trigger] = []
        self.outcomes: dict[tuple[int, int], str] = {}  # of the runs that ended
        self.claims: dict[str, str] = {}  # token → the claim that granted it
        self.changes: list[tuple[type[Event], dict[str, Any]]] = []  # other than of leases: events, and their fields

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tx, name)

    def add(self, entities: Sequence[Entity], triggers: Sequence[Trigger], *beside: Any) -> None:
        self._tx.add(entities, triggers, *beside)
        self.steps += triggers

    def save(self, triggers: Sequence[Trigger]) -> None:
        self._tx.save(triggers)
        self.steps += triggers

    def renew(self, seqs: Collection[int], status: Status, *, now: float, at: float) -> None:
        if seqs:
            self._tx.renew(seqs, status, now=now, at=at)
            self.steps += self._tx.triggers_of(seqs).values()

    def end(self, seqs: Collection[int], status: Status, *, now: float) -> None:
        self._tx.end(seqs, status, now=now)
        self.steps += self._tx.triggers_of(seqs).values()

    def restart_leases(self, *, now: float, shift: float | None) -> None:
        self._tx.restart_leases(now=now, shift=shift)
        self.steps += self._tx.expired(now=_NEVER, limit=1_000_000)

    def remember_claims(self, claims: Sequence[ClaimMemory]) -> None:
        self.claims.update((token, claim.claim_id) for claim in claims for _, token in claim.grants)
        self._tx.remember_claims(claims)

    def replace_payloads(self, payloads: Mapping[int, tuple[bytes, bytes]]) -> None:
        self._tx.replace_payloads(payloads)
        for entity in self._tx.entities(payloads).values():
            details = {"payload": digest_of(msgspec.Raw(entity.payload)), "due_by_store": entity.at}
            self.changes.append((Replaced, {"task": entity.id, "put_off": entity.at - entity.created_at, **details}))

    def set_gate(self, row: GateRow) -> None:
        self._tx.set_gate(row)
        self.changes.append((GateChanged, {name: getattr(row, name) for name in ("scope", "name", "mode", "until")}))

    def remove_gate(self, scope: str, name: str) -> None:
        self._tx.remove_gate(scope, name)
        self.changes.append((GateChanged, {"scope": scope, "name": name, "mode": "open"}))

    def set_drain(self, row: DrainRow) -> None:
        self._tx.set_drain(row)
        self.changes.append((DrainChanged, {"worker": row.worker}))

    def remove_drain(self, worker: str) -> None:
        self._tx.remove_drain(worker)
        self.changes.append((DrainChanged, {"worker": worker, "is_draining": False}))

    def set_kind(
        self,
        name: str,
        settings: bytes | None,
        *,
        at: float,
        by: str | None,
        declaration: KindDeclaration = NOT_DECLARED,
    ) -> None:
        self._tx.set_kind(name, settings, at=at, by=by, declaration=declaration)
        rules = rules_of(KindSettings() if settings is None else msgspec.json.decode(settings, type=KindSettings))
        names = ("concurrency", "rate", "burst", "key_concurrency", "key_rate", "key_burst", "ordered")
        limits = {name: getattr(rules, name) for name in names}
        self.changes.append((KindChanged, {"kind": name, **limits}))

    def add_runs(self, runs: Sequence[Run]) -> None:
        self.outcomes.update(((run.seq, run.fence), run.outcome) for run in runs)
        self._tx.add_runs(runs)
        requests = {run.seq: run.token for run in runs if run.outcome == RESCHEDULED}
        for seq, row in self._tx.triggers_of(requests).items() if requests else ():
            self.changes.append((Rescheduled, {"task": row.id, "request": requests[seq]}))
