"""Rooms: how many more tasks of kinds with a limit one transaction may start.

Rule 1: live leases are counted in each transaction that starts tasks. No counter of them is kept: counters drift.
Rule 2: a start takes a token, whatever becomes of the task. Time is that of the store, never that of a node.
Rule 3: of the nodes of a database, one at a time starts tasks of a limited kind; the others come back a moment later.
Rule 4: only kinds with a limit and due tasks are looked at; the others pay nothing.
"""

import sys
from collections.abc import Collection, Mapping
from typing import Literal, TypeAlias

from leasekit.server.key_rooms import KeyRooms
from leasekit.server.store.kind_rules import KindRules
from leasekit.server.token_bucket import Bucket
from leasekit.server.unit_of_work import UnitOfWork

Why: TypeAlias = Literal["concurrency", "rate", "node"]
"""What keeps the tasks of a kind from starting: a limit, or another node that starts some at this moment."""

_WHOLE = ""  # the key of a bucket that is that of a whole kind
_LOCKED = 0.25  # seconds until a kind is looked at again of which another node starts tasks
_LOOK = 1.0  # the same for a kind without a free place, in case that nobody tells that one is free


class Room:
    """A kind with a limit: how many of its tasks may still start."""

    def __init__(self, now: float, *, places: int, bucket: Bucket | None) -> None:
        self._now = now
        self._places = places
        self.bucket = bucket

    @property
    def left(self) -> int:
        """How many tasks may still start."""
        return self._places if self.bucket is None else min(self._places, self.bucket.tokens(self._now))

    def start(self, count: int) -> None:
        self._places -= count
        if self.bucket is not None:
            self.bucket = self.bucket.less(count, self._now)

    def again(self) -> tuple[float, Why]:
        """Return when to look again now that nothing is left, and why nothing is."""
        if self._places > 0 and self.bucket is not None:
            return self.bucket.next_at, "rate"
        return self._now + _LOOK, "concurrency"


class _OfAnotherNode(Room):
    """A kind of which another node starts tasks at this moment."""

    def __init__(self, now: float) -> None:
        super().__init__(now, places=0, bucket=None)

    def again(self) -> tuple[float, Why]:
        return self._now + _LOCKED, "node"


class Rooms:
    """The kinds with a limit of one transaction."""

    def __init__(self, turn: UnitOfWork, kinds: Collection[str]) -> None:
        self._tx = turn.tx
        limited = {kind: rules for kind in kinds if (rules := turn.rules.get(kind)) and rules.is_limited}
        self._of_keys = {
            kind: KeyRooms(turn.tx, kind, rules, turn.now) for kind, rules in limited.items() if rules.limits_keys
        }
        self._kept: dict[tuple[str, str], float] = {}  # when buckets are full again, as it is stored
        self._rooms = self._measured(limited, turn.now) if limited else {}

    def left(self, kind: str) -> int:
        """Return how many tasks of a kind may still start."""
        return self._rooms[kind].left if kind in self._rooms else sys.maxsize

    def of_keys(self, kind: str) -> KeyRooms | None:
        """Return the rooms of the keys of a kind; None: its keys have no limit."""
        return self._of_keys.get(kind)

    def start(self, kind: str, count: int = 1) -> None:
        """Count starts of a kind; fewer than none: tasks that do not start after all."""
        if kind in self._rooms:
            self._rooms[kind].start(count)

    def full(self) -> dict[str, tuple[float, Why]]:
        """Return the kinds of which no task may start now, with when to look again, and why."""
        return {kind: room.again() for kind, room in self._rooms.items() if room.left <= 0}

    def save(self) -> None:
        """Write what has been taken from buckets."""
        buckets = {(kind, _WHOLE): room.bucket.full_at for kind, room in self._rooms.items() if room.bucket}
        changed = {key: full_at for key, full_at in buckets.items() if full_at != self._kept.get(key)}
        for keys in self._of_keys.values():
            changed |= keys.buckets()
        if changed:
            self._tx.set_buckets(changed)

    @staticmethod
    def refit(turn: UnitOfWork, kind: str, rules: KindRules) -> None:
        """Fit what is kept of a kind's buckets to new rates, which count from now on: none is more than empty."""
        if rules.rate is not None:
            turn.tx.fill_buckets(kind, full_by=turn.now + rules.burst / rules.rate)
        if rules.key_rate is not None:
            turn.tx.fill_buckets(kind, full_by=turn.now + rules.key_burst / rules.key_rate, of_keys=True)

    def _measured(self, limited: Mapping[str, KindRules], now: float) -> dict[str, Room]:
        ours = self._tx.begin_starts(limited)
        counted = [kind for kind in ours if limited[kind].concurrency is not None]
        running = self._tx.running(counted) if counted else {}
        rated = [(kind, _WHOLE) for kind in ours if limited[kind].rate is not None]
        self._kept = self._tx.buckets(rated) if rated else {}
        rooms: dict[str, Room] = {kind: _OfAnotherNode(now) for kind in limited}
        for kind in ours:
            rules, bucket = limited[kind], None
            if rules.rate is not None:
                full_at = self._kept.get((kind, _WHOLE), 0.0)
                bucket = Bucket.kept(rules.rate, rules.burst, full_at, now=now)
            places = sys.maxsize if rules.concurrency is None else rules.concurrency - running.get(kind, 0)
            rooms[kind] = Room(now, places=places, bucket=bucket)
        return rooms
