"""Rooms of keys: how many more tasks of each key of one kind a transaction may start.

Rule 1: running tasks are counted, and token buckets read, in each transaction that starts tasks, once for the keys
        that it meets.
Rule 2: where the keys of a kind are ordered, a task that waits for another run keeps the place of its key until it has
        ended, and takes no other for that run. It waits beside the queue of its key, like a task without a key.
Rule 3: a key without a free place is taken out of its lanes, so that no claim looks at it, until a run of one of its
        tasks has ended: what ends runs calls `release`, which puts the key back. A key without a token is taken out
        until it has one. Other changes of the queue of a key put it back too, and then the next claim looks again.
"""

import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, TypeAlias

from leasekit._lifecycle.states import WAITING
from leasekit.server.store import Lane, Trigger, Tx
from leasekit.server.store.kind_rules import KindRules
from leasekit.server.token_bucket import Bucket
from leasekit.server.unit_of_work import UnitOfWork

UNKEYED = ""
"""The key of tasks without one, which have no limit."""

WhyFull: TypeAlias = Literal["key_concurrency", "key_rate"]
"""The limit that keeps the tasks of a key from starting."""

_FORGOTTEN = 1000  # token buckets that one transaction removes because they are full, at most


class KeyRooms:
    """The free places and the tokens of the keys of one kind."""

    def __init__(self, tx: Tx, kind: str, rules: KindRules, now: float) -> None:
        self._tx = tx
        self._kind = kind
        self._rules = rules
        self._now = now
        self._most = sys.maxsize if rules.key_concurrency is None else rules.key_concurrency
        self._running: dict[str, int] = {}
        self._buckets: dict[str, Bucket] = {}
        self._used: set[str] = set()  # the keys whose buckets have changed

    @property
    def most(self) -> int:
        """How many tasks of a key may run at one time."""
        return self._most

    @property
    def at_once(self) -> int:
        """How many tasks of a key one transaction may start, at most."""
        return self._most if self._rules.key_rate is None else min(self._most, self._rules.key_burst)

    def look(self, keys: Iterable[str]) -> None:
        """Count the tasks of these keys that run or keep a place, and read the keys' token buckets, all at once."""
        new = [key for key in keys if key not in self._running and key != UNKEYED]
        if not new:
            return
        running = {} if self._rules.key_concurrency is None else self._tx.running_of_keys(self._kind, new)
        self._running.update((key, running.get(key, 0)) for key in new)
        if (rate := self._rules.key_rate) is not None:
            kept = self._tx.buckets([(self._kind, key) for key in new])
            for key in new:
                full_at = kept.get((self._kind, key), 0.0)
                self._buckets[key] = Bucket.kept(rate, self._rules.key_burst, full_at, now=self._now)

    def why_full(self, key: str) -> WhyFull | None:
        """Return the limit that this key has reached; None: another of its tasks may start."""
        if self._running.get(key, 0) >= self._most:
            return "key_concurrency"
        bucket = self._buckets.get(key)
        return "key_rate" if bucket is not None and bucket.tokens(self._now) <= 0 else None

    def again_at(self, key: str) -> float | None:
        """Return when a key that is full has a token; None: only the end of a run makes room."""
        return self._buckets[key].next_at if self.why_full(key) == "key_rate" else None

    def start(self, key: str, count: int = 1) -> None:
        """Count starts of tasks; fewer than none: tasks that were put back."""
        if key == UNKEYED:
            return
        self._running[key] = self._running.get(key, 0) + count
        if key in self._buckets:
            self._buckets[key] = self._buckets[key].less(count, self._now)
            self._used.add(key)

    def drop(self, key: str) -> None:
        """Note that a task that was started does not run after all. Its token stays spent."""
        if key != UNKEYED:
            self._running[key] -= 1

    def buckets(self) -> dict[tuple[str, str], float]:
        """Return when the token buckets that have changed are full again."""
        return {(self._kind, key): self._buckets[key].full_at for key in self._used}


def release(turn: UnitOfWork, rows: Collection[Trigger]) -> None:
    """Put the keys of these tasks, whose runs have ended, back into their lanes; the rows were saved.

    Keys that are ordered, and whose tasks will run again, stay as they are.
    """
    limited = _limited(turn) if rows else {}
    of_limited = [row for row in rows if row.kind in limited]
    again = {row.seq for row in of_limited if limited[row.kind].ordered and row.status in WAITING}
    if again:
        turn.tx.keep_places(again)
        again = turn.tx.kept_places(again)
    if seqs := [row.seq for row in of_limited if row.seq not in again]:
        _ready(turn, turn.tx.free_keys(seqs))


def let_go(turn: UnitOfWork) -> None:
    """Put the keys back whose places were kept by tasks that this transaction has ended while they waited."""
    limited = _limited(turn)
    seqs = [row.seq for row in turn.over if row.kind in limited]
    if seqs and turn.tx.drop_places(seqs):
        _ready(turn, turn.tx.free_keys(seqs))


def release_kinds(turn: UnitOfWork, kinds: Sequence[str]) -> None:
    """Put all keys of these kinds back into their lanes."""
    _ready(turn, turn.tx.free_keys_of([*kinds, *turn.tx.routes(kinds)]))


def tend(turn: UnitOfWork) -> None:
    """Do the regular work for keys with limits.

    Put the keys of kinds of which nothing runs back: the end of a run may have come from an older version. Remove token
    buckets that are full.
    """
    if limited := {kind for kind, rules in _limited(turn).items() if not rules.ordered}:
        idle = sorted(limited - turn.tx.running(limited).keys())
        _ready(turn, turn.tx.free_keys_of([*idle, *turn.tx.routes(idle)], at_moments=False))
    if rated := [kind for kind, rules in turn.rules.items() if rules.key_rate is not None]:
        turn.tx.forget_buckets(rated, now=turn.now, limit=_FORGOTTEN)


def _limited(turn: UnitOfWork) -> dict[str, KindRules]:
    return {kind: rules for kind, rules in turn.rules.items() if rules.key_concurrency is not None}


def _ready(turn: UnitOfWork, lanes: Iterable[Lane]) -> None:
    for lane in lanes:
        turn.ready(lane.name, lane.due_at)
