"""The due tasks of one lane, taken one of each key in turn: start-time fair queueing, with a queue for each key.

Each key of a lane has a share, which counts the tasks that were taken from the key: its virtual time. The next task is
the first one of the key with the least. A key that gets due tasks joins at the least virtual time of the keys that
have some (`base`): it has no credit for the time in which it had none, and owes one task at most.
Tasks without a key have the share of the key ''.

A key of which no more tasks may run or start is full: it leaves the competition until a run of it has ended, or until
it has a token. Then it joins again, like a key that had no due tasks.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from leasekit.server.key_rooms import UNKEYED, KeyRooms
from leasekit.server.kind_queue import LaneReader
from leasekit.server.store import Lane, Share, Trigger
from leasekit.server.unit_of_work import UnitOfWork

_MOST = 1000  # shares, or tasks, that are read at once
_LEAST = 16
_BEFORE_ALL = Share(-1.0, "")

DueAt = tuple[float, int]  # when a task was due, and its `seq`
_FIRST: DueAt = (-1.0, -1)


class Queue(Protocol):
    """Due tasks, of which the longest due is the first."""

    def head(self) -> DueAt | None: ...

    def pop(self) -> Trigger: ...

    def put_back(self, row: Trigger) -> None: ...


class Sieve(Protocol):
    """A filter of tasks that must not start."""

    @property
    def is_full(self) -> bool: ...

    def sift(self, rows: Sequence[Trigger]) -> Sequence[Trigger]: ...


class FairLane:
    """The due tasks of one lane in which tasks have keys. About `wanted` will be taken: so many are read at once.

    The store is asked when the first task is looked for: a claim that finds urgent tasks does not read other lanes.
    """

    def __init__(
        self,
        turn: UnitOfWork,
        lane: Lane,
        *,
        wanted: int,
        sieve: Sieve | None = None,
        unkeyed: LaneReader | None = None,
        keys: KeyRooms | None = None,
    ) -> None:
        self.priority = lane.priority
        self.name = lane.name
        self.due_at = lane.due_at if unkeyed is None else min(lane.due_at, unkeyed.due_at)
        self._turn = turn
        self._lane = lane
        self._sieve = sieve
        self._keys = keys
        self._full: dict[str, float] = {}  # the keys that have left the competition, and their virtual times
        self._unkeyed = unkeyed
        self._wanted = min(wanted, _MOST)
        self._page = max(self._wanted, _LEAST)
        self._queues: dict[str, Queue] = {}
        self._taken: dict[str, int] = {}  # of the keys whose shares change
        self._key_of: dict[int, str] = {}
        self._known: set[str] = set()
        self._heap: list[Share] = []
        self._base = 0.0
        self._last: Share | None = None
        self._has_begun = False

    def _begin(self) -> None:
        """Read the first shares."""
        self._has_begun = True
        joining, active = self._first_shares()
        self._base = active[0].taken if active else 0.0
        self._last = active[-1] if len(active) == self._page else None  # None: all active shares have been read
        if self._unkeyed is not None:
            self._queues[UNKEYED] = self._unkeyed
            joining.append(self._turn.tx.share(self._lane, UNKEYED))
        self._known = {share.key for share in active}
        joined = [self._joined(share) for share in joining if share.key not in self._known]
        self._known.update(self._taken)
        self._compete([*active, *joined])

    def _first_shares(self) -> tuple[list[Share], list[Share]]:
        """Return the shares that join, and the first active ones.

        Those that join are all, or enough that those of keys with free places fill a page.
        """
        tx, limit = self._turn.tx, 2 * self._page
        while True:
            # In this order: a share that another node lets join between the two reads is in both of them, not in none.
            joining = tx.joining_shares(self._lane, now=self._turn.now, limit=limit)
            active = tx.active_shares(self._lane, after=_BEFORE_ALL, limit=self._page)
            if self._keys is None:
                return joining, active
            self._keys.look(share.key for share in (*joining, *active))
            if len(joining) < limit or sum(not self._is_full(share.key) for share in joining) >= self._page:
                return joining, active
            limit *= 4

    def _joined(self, share: Share) -> Share:
        self._taken[share.key] = 0
        return share._replace(taken=min(max(share.taken, self._base), self._base + 1))

    def head(self) -> DueAt | None:
        """Return when the next task was due, and its `seq`; None if no task is left."""
        while (share := self._least()) is not None:
            if (head := self._queue(share.key).head()) is not None:
                return head
            heapq.heappop(self._heap)
            self._taken.setdefault(share.key, 0)  # it may have no due tasks any longer
        return None

    def pop(self) -> Trigger:
        taken, key = self._heap[0]
        heapq.heapreplace(self._heap, Share(taken + 1, key))
        self._taken[key] = self._taken.get(key, 0) + 1
        if self._keys is not None:
            self._keys.start(key)
        row = self._queues[key].pop()
        self._key_of[row.seq] = key
        return row

    def put_back(self, row: Trigger) -> None:
        key = self._key_of[row.seq]
        self._queues[key].put_back(row)
        self._taken[key] -= 1
        if self._keys is not None:
            self._keys.start(key, -1)
        default = self._full.pop(key, self._base + 1)
        taken = next((share.taken for share in self._heap if share.key == key), default)
        self._heap = [Share(taken - 1, key), *(share for share in self._heap if share.key != key)]
        heapq.heapify(self._heap)

    def take(self, limit: int) -> list[Trigger]:
        taken: list[Trigger] = []
        while len(taken) < limit and self.head() is not None:
            taken.append(self.pop())
        return taken

    def close(self) -> None:
        """Charge the keys for what was taken from them; call this after the tasks were saved."""
        if not self._has_begun:
            return
        self._turn.tx.charge(self._lane, self._taken, base=self._base, now=self._turn.now)
        if self._keys is None:
            return
        full = {key: self._keys.again_at(key) for key in self._full if self._is_full(key)}
        self._turn.tx.leave(self._lane, full, most=self._keys.most)
        for again_at in full.values():
            if again_at is not None:
                self._turn.ready(self._lane.name, again_at)

    def has_taken(self, row: Trigger) -> bool:
        """Return whether a task was taken from this lane."""
        return row.seq in self._key_of

    def drop(self, row: Trigger) -> None:
        """Note that a task that was taken does not run after all."""
        if self._keys is not None:
            self._keys.drop(self._key_of[row.seq])

    def _least(self) -> Share | None:
        """Return the share that is next, after reading all that may be before it."""
        if not self._has_begun:
            self._begin()
        while True:
            while self._last is not None and not (self._heap and self._heap[0] <= self._last):
                more = self._turn.tx.active_shares(self._lane, after=self._last, limit=self._page)
                self._last = more[-1] if len(more) == self._page else None
                self._page = min(2 * self._page, _MOST)  # there may be thousands that are full
                new = [share for share in more if share.key not in self._known]  # another node may have charged one
                self._known.update(share.key for share in new)
                self._compete(new)
            if not self._heap or not self._is_full(self._heap[0].key):
                return self._heap[0] if self._heap else None
            self._leave(heapq.heappop(self._heap))

    def _compete(self, shares: Sequence[Share]) -> None:
        """Have these shares compete, but for those of full keys."""
        if self._keys is not None:
            self._keys.look(share.key for share in shares)
        for share in shares:
            if self._is_full(share.key):
                self._leave(share)
            else:
                heapq.heappush(self._heap, share)

    def _leave(self, share: Share) -> None:
        self._full[share.key] = share.taken
        queue = self._queues.get(share.key)
        if self._keys is not None and (not isinstance(queue, _KeyQueue) or queue.may_have_more):
            self._turn.counted[self._lane.kind, "limited", self._keys.why_full(share.key) or ""] = 1

    def _is_full(self, key: str) -> bool:
        return self._keys is not None and self._keys.why_full(key) is not None

    def _queue(self, key: str) -> Queue:
        """Return the queue of a key. Those of the keys that come next are read together with it."""
        if key not in self._queues:
            each = max(1, self._wanted // len(self._heap))
            each = each if self._keys is None else min(each, self._keys.at_once + 1)
            nearest = heapq.nsmallest(max(1, self._wanted // each), self._heap)
            new = {share.key: _KeyQueue(self, share.key) for share in nearest if share.key not in self._queues}
            self._queues.update(new)
            self.read(new.values(), limit=each)
        return self._queues[key]

    def refill(self, queue: "_KeyQueue") -> None:
        """Read the next tasks of a queue that is empty, and of those that come next and are empty too."""
        limit = queue.next_limit()
        nearest = heapq.nsmallest(max(1, self._wanted // limit), self._heap)
        others = (self._queues.get(share.key) for share in nearest)
        empty = [other for other in others if isinstance(other, _KeyQueue) and other.is_empty and other is not queue]
        self.read([queue, *empty], limit=limit)

    def read(self, queues: "Iterable[_KeyQueue]", *, limit: int) -> None:
        """Read the next tasks of these queues."""
        of = {queue.key: queue for queue in queues}
        after = {key: queue.after or _FIRST for key, queue in of.items()}
        found = self._turn.tx.queued(self._lane, after, now=self._turn.now, limit=limit)
        all_rows = [row for rows in found.values() for row in rows]
        left = {row.seq for row in (all_rows if self._sieve is None else self._sieve.sift(all_rows))}
        for key, queue in of.items():
            rows = found.get(key, [])
            after_last = _due_and_seq(rows[-1]) if len(rows) == limit else None
            queue.fill([row for row in rows if row.seq in left], after=after_last)

    def has_room(self) -> bool:
        return self._sieve is None or not self._sieve.is_full


class _KeyQueue:
    """The due tasks of one key."""

    def __init__(self, lane: FairLane, key: str) -> None:
        self.key = key
        self.after: DueAt | None = _FIRST  # None: the queue was read to its end
        self._lane = lane
        self._rows: deque[Trigger] = deque()
        self._more = 1

    @property
    def may_have_more(self) -> bool:
        return bool(self._rows) or self.after is not None

    @property
    def is_empty(self) -> bool:
        """Whether all that was read is taken, and there may be more."""
        return not self._rows and self.after is not None

    def next_limit(self) -> int:
        """Return how many tasks to read now: twice as many as the last time."""
        self._more = min(2 * self._more, _MOST)
        return self._more

    def fill(self, rows: Sequence[Trigger], *, after: DueAt | None) -> None:
        self._rows.extend(rows)
        self.after = after

    def head(self) -> DueAt | None:
        while self.is_empty and self._lane.has_room():
            self._lane.refill(self)
        return _due_and_seq(self._rows[0]) if self._rows else None

    def pop(self) -> Trigger:
        return self._rows.popleft()

    def put_back(self, row: Trigger) -> None:
        self._rows.appendleft(row)


def _due_and_seq(row: Trigger) -> DueAt:
    return (row.next_trigger_at or 0.0, row.seq)
