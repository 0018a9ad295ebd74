"""The due tasks of one transaction, read from the store lane by lane as claims need them."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from leasekit.server.fair_lane import FairLane
from leasekit.server.kind_queue import LaneReader, levels
from leasekit.server.rooms import Rooms
from leasekit.server.store import GateRow, Lane, Trigger
from leasekit.server.store.gates import COLLECTION
from leasekit.server.store.kind_rules import NO_RULES
from leasekit.server.unit_of_work import UnitOfWork

_MOST = 1000  # rows of a lane that are read at once
_LEAST = 8
_SHUT_OUT = 1000  # tasks of closed collections that one transaction reads, about


class DueTasks:
    """The due tasks of some kinds, each taken once. At most `wanted` will be taken, which bounds reading ahead.

    Lanes of kinds that are closed or at a limit are not read; `rooms` knows the limits. Tasks of closed collections are
    left out, and are in `sieve.shut_out`.
    """

    def __init__(self, turn: UnitOfWork, kinds: Collection[str], *, wanted: int) -> None:
        due = [lane for lane in turn.lanes(kinds) if lane.due_at <= turn.now]
        self.rooms = Rooms(turn, {lane.kind for lane in due})
        due = [lane for lane in due if self.rooms.left(lane.kind) > 0]
        self.sieve = _Sieve(turn)
        self._turn = turn
        chunk = max(_LEAST, min(wanted, _MOST) // max(1, len(due)))
        readers: dict[tuple[int, str], LaneReader] = {}
        self._fair: list[FairLane] = []
        for lane in sorted(due, key=lambda lane: lane.has_keys):
            if not lane.has_keys:
                readers[lane[:2]] = _LaneReader(turn, lane, chunk, self.sieve)
                continue
            fair = FairLane(turn, lane, wanted=wanted, sieve=self.sieve, unkeyed=readers.get(lane[:2]))
            readers[lane[:2]] = fair
            self._fair.append(fair)
        self._readers: dict[str, list[LaneReader]] = {}
        for (_, kind), reader in readers.items():
            self._readers.setdefault(kind, []).append(reader)

    def take(self, kinds: Iterable[str], limit: int) -> list[Trigger]:
        """Take up to `limit` tasks of these kinds: the lowest priority number first, then the longest due.

        Kinds that have due tasks of the same priority take turns.
        """
        turn, rules = self._turn, self._turn.rules
        found = [(kind, rules.get(kind, NO_RULES), self._readers[kind]) for kind in kinds if kind in self._readers]
        taken: list[Trigger] = []
        for level, queues in levels(found, self.rooms, now=turn.now):
            left = limit - len(taken)
            taken += queues[0].take(left) if len(queues) == 1 else turn.kinds.clock.take(level, queues, left)
            if len(taken) >= limit:
                break
        return taken

    def put_back(self, rows: Sequence[Trigger]) -> None:
        """Put the tasks that were taken last back, so that they come first again."""
        for row in reversed(rows):
            reader = next(reader for reader in self._readers[row.kind] if reader.priority == row.priority)
            reader.put_back(row)
            self.rooms.start(row.kind, -1)

    def close(self) -> None:
        """Charge the keys of the tasks that were taken; call this after these were saved."""
        for lane in self._fair:
            lane.close()


class _Sieve:
    """The tasks of closed collections among those that were read."""

    def __init__(self, turn: UnitOfWork) -> None:
        self._turn = turn
        self._closed = turn.gates.holding(COLLECTION, turn.now)
        self.shut_out: list[tuple[Trigger, GateRow]] = []

    @property
    def is_full(self) -> bool:
        """Return whether this transaction has left out as many tasks as it may."""
        return len(self.shut_out) >= _SHUT_OUT

    def sift(self, rows: Sequence[Trigger]) -> Sequence[Trigger]:
        """Return those of these tasks whose collections are open."""
        if not self._closed or not rows:
            return rows
        of = self._turn.tx.collections([row.seq for row in rows])
        self.shut_out += [(row, self._closed[of[row.seq]]) for row in rows if of.get(row.seq) in self._closed]
        return [row for row in rows if of.get(row.seq) not in self._closed]


class _LaneReader:
    """The due tasks of one lane, the longest due first."""

    def __init__(self, turn: UnitOfWork, lane: Lane, chunk: int, sieve: _Sieve) -> None:
        self._sieve = sieve
        self.priority = lane.priority
        self.due_at = lane.due_at
        self._turn = turn
        self._lane = lane
        self._chunk = chunk
        self._rows: deque[Trigger] = deque()
        self._after: tuple[float, int] | None = (-1.0, -1)  # None: the lane was read to its end

    def head(self) -> tuple[float, int] | None:
        """Return when the first task was due, and its `seq`; None if no task is left."""
        while not self._rows and self._after is not None and not self._sieve.is_full:
            rows = self._turn.tx.ready(self._lane, now=self._turn.now, after=self._after, limit=self._chunk)
            self._rows.extend(self._sieve.sift(rows))
            self._after = _due_and_seq(rows[-1]) if len(rows) == self._chunk else None
            if not self._rows:  # there may be many more of the same collection
                self._chunk = _MOST
        return _due_and_seq(self._rows[0]) if self._rows else None

    def pop(self) -> Trigger:
        return self._rows.popleft()

    def put_back(self, row: Trigger) -> None:
        self._rows.appendleft(row)

    def take(self, limit: int) -> list[Trigger]:
        taken: list[Trigger] = []
        while len(taken) < limit and self.head() is not None:
            taken += [self._rows.popleft() for _ in range(min(limit - len(taken), len(self._rows)))]
        return taken


def _due_and_seq(row: Trigger) -> tuple[float, int]:
    return (row.next_trigger_at or 0.0, row.seq)
