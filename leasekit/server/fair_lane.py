"""The due tasks of one lane, taken one of each key in turn: start-time fair queueing, with a queue for each key.

Each key of a lane has a share, which counts the tasks that were taken from the key: its virtual time. The next task is
the first one of the key with the least. A key that gets due tasks joins at the least virtual time of the keys that
have some (`base`): it has no credit for the time in which it had none, and owes one task at most.
Tasks without a key have the share of the key ''.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from leasekit.server.kind_queue import LaneReader
from leasekit.server.store import Lane, Share, Trigger
from leasekit.server.unit_of_work import UnitOfWork

_MOST = 1000  # shares, or tasks, that are read at once
_LEAST = 16
_BEFORE_ALL = Share(-1.0, "")
_UNKEYED = ""

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
    """The due tasks of one lane in which tasks have keys. At most `wanted` are taken, which bounds reading ahead."""

    def __init__(
        self,
        turn: UnitOfWork,
        lane: Lane,
        *,
        wanted: int,
        sieve: Sieve | None = None,
        unkeyed: LaneReader | None = None,
    ) -> None:
        self.priority = lane.priority
        self.due_at = lane.due_at if unkeyed is None else min(lane.due_at, unkeyed.due_at)
        self._turn = turn
        self._lane = lane
        self._sieve = sieve
        self._wanted = min(wanted, _MOST)
        self._page = max(self._wanted, _LEAST)
        self._queues: dict[str, Queue] = {}
        self._taken: dict[str, int] = {}  # of the keys whose shares change
        self._key_of: dict[int, str] = {}
        # In this order: a share that another node lets join between the two reads is in both of them, not in none.
        joining = turn.tx.joining_shares(lane, now=turn.now, limit=2 * self._page)
        active = turn.tx.active_shares(lane, after=_BEFORE_ALL, limit=self._page)
        self._base = active[0].taken if active else 0.0
        self._last = active[-1] if len(active) == self._page else None  # None: all active shares have been read
        if unkeyed is not None:
            self._queues[_UNKEYED] = unkeyed
            joining.append(turn.tx.share(lane, _UNKEYED))
        self._known = {share.key for share in active}
        self._heap = [*active, *(self._joined(share) for share in joining if share.key not in self._known)]
        self._known.update(self._taken)
        heapq.heapify(self._heap)

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
        row = self._queues[key].pop()
        self._key_of[row.seq] = key
        return row

    def put_back(self, row: Trigger) -> None:
        key = self._key_of[row.seq]
        self._queues[key].put_back(row)
        self._taken[key] -= 1
        taken = next((share.taken for share in self._heap if share.key == key), self._base + 1)
        self._heap = [Share(taken - 1, key), *(share for share in self._heap if share.key != key)]
        heapq.heapify(self._heap)

    def take(self, limit: int) -> list[Trigger]:
        taken: list[Trigger] = []
        while len(taken) < limit and self.head() is not None:
            taken.append(self.pop())
        return taken

    def close(self) -> None:
        """Charge the keys for what was taken from them; call this after the tasks were saved."""
        self._turn.tx.charge(self._lane, self._taken, base=self._base, now=self._turn.now)

    def _least(self) -> Share | None:
        """Return the share that is next, after reading all that may be before it."""
        while self._last is not None and not (self._heap and self._heap[0] <= self._last):
            more = self._turn.tx.active_shares(self._lane, after=self._last, limit=self._page)
            self._last = more[-1] if len(more) == self._page else None
            for share in more:
                if share.key not in self._known:  # another node may have charged it between the two pages
                    self._known.add(share.key)
                    heapq.heappush(self._heap, share)
        return self._heap[0] if self._heap else None

    def _queue(self, key: str) -> Queue:
        """Return the queue of a key. Those of the keys that come next are read together with it."""
        if key not in self._queues:
            each = max(1, self._wanted // len(self._heap))
            nearest = heapq.nsmallest(max(1, self._wanted // each), self._heap)
            new = {share.key: _KeyQueue(self, share.key) for share in nearest if share.key not in self._queues}
            self._queues.update(new)
            self.read(new.values(), limit=each)
        return self._queues[key]

    def read(self, queues: "Iterable[_KeyQueue]", *, limit: int) -> None:
        """Read the next tasks of these queues."""
        of = {queue.key: queue for queue in queues}
        after = {key: queue.after or _FIRST for key, queue in of.items()}
        found = self._turn.tx.queued(self._lane, after, now=self._turn.now, limit=limit)
        for key, queue in of.items():
            rows = found.get(key, [])
            left = rows if self._sieve is None else self._sieve.sift(rows)
            queue.fill(left, after=_due_and_seq(rows[-1]) if len(rows) == limit else None)

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

    def fill(self, rows: Sequence[Trigger], *, after: DueAt | None) -> None:
        self._rows.extend(rows)
        self.after = after

    def head(self) -> DueAt | None:
        while not self._rows and self.after is not None and self._lane.has_room():
            self._more = min(2 * self._more, _MOST)
            self._lane.read([self], limit=self._more)
        return _due_and_seq(self._rows[0]) if self._rows else None

    def pop(self) -> Trigger:
        return self._rows.popleft()

    def put_back(self, row: Trigger) -> None:
        self._rows.appendleft(row)


def _due_and_seq(row: Trigger) -> DueAt:
    return (row.next_trigger_at or 0.0, row.seq)
