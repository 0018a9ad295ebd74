"""The due tasks of one transaction, read from the store lane by lane as claims need them."""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence

from leasekit.server.fair_lane import FairLane
from leasekit.server.kind_queue import LaneReader, View, levels
from leasekit.server.roles import start_deadlines
from leasekit.server.rooms import Rooms
from leasekit.server.store import GateRow, Lane, Trigger
from leasekit.server.store.gates import COLLECTION
from leasekit.server.store.kind_rules import NO_RULES
from leasekit.server.store.routes import NO_LABELS, fits, hold_back, is_route, kind_of
from leasekit.server.unit_of_work import UnitOfWork

_MOST = 1000  # rows of a lane that are read at once
_LEAST = 8
_SHUT_OUT = 1000  # tasks of closed collections that one transaction reads, about


class DueTasks:
    """The due tasks of some kinds, each taken once. At most `wanted` will be taken, which bounds reading ahead.

    Lanes of kinds that are closed or at a limit are not read, nor those in `without` (kind and priority); `rooms` knows
    the limits. Tasks of closed collections are left out, and are in `sieve.shut_out`; so are those whose start deadline
    has passed, in `sieve.late`. Tasks that require or prefer labels are included if one of `workers` (labels) gets them
    by now.
    """

    def __init__(
        self,
        turn: UnitOfWork,
        kinds: Collection[str],
        *,
        wanted: int,
        without: Collection[tuple[str, int]] = (),
        workers: Collection[frozenset[str]] = (),
    ) -> None:
        due = [lane for lane in turn.lanes(kinds, workers) if _is_open(lane, workers, turn.now)]
        due = [lane for lane in due if (lane.kind, lane.priority) not in without] if without else due
        self.rooms = Rooms(turn, {lane.kind for lane in due})
        due = [lane for lane in due if self.rooms.left(lane.kind) > 0]
        self.sieve = Sieve(turn)
        self._turn = turn
        chunk = max(_LEAST, min(wanted, _MOST) // max(1, len(due)))
        lanes_of = Counter(lane.priority for lane in due)
        readers: dict[tuple[int, str], LaneReader] = {}
        self._fair: list[FairLane] = []
        for lane in sorted(due, key=lambda lane: lane.has_keys):
            if not lane.has_keys:
                readers[lane[:2]] = _LaneReader(turn, lane, chunk, self.sieve)
                continue
            unkeyed, keys = readers.get(lane[:2]), self.rooms.of_keys(lane.kind)
            share = math.ceil(wanted / lanes_of[lane.priority])  # lanes of one priority take turns
            fair = FairLane(turn, lane, wanted=share, sieve=self.sieve, unkeyed=unkeyed, keys=keys)
            readers[lane[:2]] = fair
            self._fair.append(fair)
        self._readers: dict[str, list[LaneReader]] = {}
        self._has_routes = False
        for (_, name), reader in readers.items():
            self._readers.setdefault(kind_of(name), []).append(reader)
            self._has_routes |= is_route(name)

    def take(self, kinds: Iterable[str], limit: int, *, labels: frozenset[str] = NO_LABELS) -> list[Trigger]:
        """Take up to `limit` tasks of these kinds: the lowest priority number first, then the longest due.

        Kinds that have due tasks of the same priority take turns. Of tasks that require labels, only those are taken
        that a worker with these `labels` may have.
        """
        turn, rules = self._turn, self._turn.rules
        found = [
            (kind, rules.get(kind, NO_RULES), self._fitting(kind, labels)) for kind in kinds if kind in self._readers
        ]
        taken: list[Trigger] = []
        for level, queues in levels(found, self.rooms, now=turn.now):
            left = limit - len(taken)
            taken += queues[0].take(left) if len(queues) == 1 else turn.kinds.clock.take(level, queues, left)
            if len(taken) >= limit:
                break
        return taken

    def take_of_each(self, limit: int, *, together: int) -> list[Trigger]:
        """Take up to `limit` tasks of each lane, the longest due first, and about `together` in all, of any lanes."""
        lanes = [(kind, reader) for kind, readers in self._readers.items() for reader in readers]
        self._turn.random.shuffle(lanes)
        taken: list[Trigger] = []
        for kind, reader in lanes:
            if len(taken) >= together:
                break
            rows = reader.take(min(limit, self.rooms.left(kind)))
            self.rooms.start(kind, len(rows))
            taken += rows
        return taken

    def put_back(self, rows: Sequence[Trigger]) -> None:
        """Undo the last `take` for these tasks: they come first again."""
        for row in reversed(rows):
            self._reader(row).put_back(row)
            self.rooms.start(row.kind, -1)

    def drop(self, rows: Iterable[Trigger]) -> None:
        """Note that tasks that were taken do not run after all."""
        for row in rows:
            if isinstance(reader := self._reader(row), FairLane):
                reader.drop(row)

    def _fitting(self, kind: str, labels: frozenset[str]) -> Sequence[View]:
        """Return the lanes of a kind from which a worker gets tasks, and for how long these must have been due."""
        readers = self._readers[kind]
        if not self._has_routes:
            return [(reader, 0.0) for reader in readers]
        held = [(reader, hold_back(reader.name, labels)) for reader in readers if fits(reader.name, labels)]
        return [(reader, seconds) for reader, seconds in held if reader.due_at + seconds <= self._turn.now]

    def _reader(self, row: Trigger) -> LaneReader:
        readers = [reader for reader in self._readers[row.kind] if reader.priority == row.priority]
        took = (reader for reader in readers if isinstance(reader, FairLane) and reader.has_taken(row))
        return readers[0] if len(readers) == 1 else next(took, readers[0])

    def close(self) -> None:
        """Charge the keys of the tasks that were taken; call this after these were saved."""
        for lane in self._fair:
            lane.close()


def _is_open(lane: Lane, workers: Collection[frozenset[str]], now: float) -> bool:
    """Return whether the first task of a lane is due, and for one of these workers that fit if it has a route."""
    if lane.due_at > now or not is_route(lane.name):
        return lane.due_at <= now
    return any(fits(lane.name, labels) and lane.due_at + hold_back(lane.name, labels) <= now for labels in workers)


class Sieve:
    """The tasks among those that were read that must not start: of closed collections, or too late."""

    def __init__(self, turn: UnitOfWork) -> None:
        self._turn = turn
        self._closed = turn.gates.holding(COLLECTION, turn.now)
        self._has_deadlines = start_deadlines.is_watched(turn)
        self.shut_out: list[tuple[Trigger, GateRow]] = []
        self.late: list[Trigger] = []

    @property
    def is_full(self) -> bool:
        """Return whether this transaction has left out as many tasks as it may."""
        return len(self.shut_out) + len(self.late) >= _SHUT_OUT

    def sift(self, rows: Sequence[Trigger]) -> Sequence[Trigger]:
        """Return the tasks whose collections are open and whose start deadlines have not passed; note the others."""
        if self._has_deadlines and rows:
            late = {row.seq: row for row in start_deadlines.late_ones(self._turn, rows)}
            self.late += late.values()
            rows = [row for row in rows if row.seq not in late] if late else rows
        if not self._closed or not rows:
            return rows
        of = self._turn.tx.collections([row.seq for row in rows])
        self.shut_out += [(row, self._closed[of[row.seq]]) for row in rows if of.get(row.seq) in self._closed]
        return [row for row in rows if of.get(row.seq) not in self._closed]


class _LaneReader:
    """The due tasks of one lane, the longest due first."""

    def __init__(self, turn: UnitOfWork, lane: Lane, chunk: int, sieve: Sieve) -> None:
        self._sieve = sieve
        self.priority = lane.priority
        self.name = lane.name
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
