"""Tally: the events and durations of each kind since this server started, for `/metrics`.

The writer's thread adds each transaction once it has committed; any thread reads. Kinds are bounded: `_KINDS` have a
label at a time, the others are *other*. A kind without an event for an hour may lose its label, and its numbers with
it: to Prometheus that is a counter that ends.
"""

from collections import Counter

from leasekit.named import PREFIXES
from leasekit.server.histogram import Histogram
from leasekit.server.unit_of_work import UnitOfWork

OTHER = "other"
_KINDS = 100
_IDLE = 3600.0  # seconds without an event, after which a kind may lose its label
SECONDS = (0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 7200.0, 43200.0)
"""The bounds by which durations are counted."""


class KindTally:
    """The numbers of one label."""

    def __init__(self) -> None:
        self.used_at = 0.0
        self.events = Counter[tuple[str, str]]()
        self.waits = Histogram(SECONDS)  # from due to claim
        self.runs = Histogram(SECONDS)  # from claim to end
        self.starts = Histogram(SECONDS)  # from due to start
        self.handlers = Histogram(SECONDS)  # from start to end


class _Lease:
    """A live lease: when it was claimed and its handler began, by the clock of leases."""

    __slots__ = ("claimed_at", "started_at", "waited")

    def __init__(self, claimed_at: float, waited: float | None) -> None:
        self.claimed_at = claimed_at
        self.started_at: float | None = None
        self.waited = waited  # from due to claim; None: a name, which nobody waits for as long as it is free


class Tally:
    """The events and durations of one server."""

    def __init__(self) -> None:
        self.kinds: dict[str, KindTally] = {}
        self._leases: dict[int, _Lease] = {}  # by the `seq` of the task
        self._evict_at = 0.0  # no kind can lose its label before

    def add(self, turn: UnitOfWork) -> None:
        """Count what has happened in a transaction that has committed."""
        now = turn.instant
        for (kind, event, detail), count in turn.counted.items():
            self._of(kind, now).events[event, detail] += count
        for row in turn.started:
            if (lease := self._leases.get(row.seq)) is not None:
                self._start(self._of(row.kind, now), lease, now)
        for row in turn.ended:
            if (lease := self._leases.pop(row.seq, None)) is not None:
                numbers = self._of(row.kind, now)
                self._start(numbers, lease, lease.claimed_at)  # a short run ends before a heartbeat has told of it
                numbers.runs.add(now - lease.claimed_at)
                numbers.handlers.add(now - (lease.started_at or lease.claimed_at))
        for row in turn.granted:  # last: a run may have ended and a new one begun
            waited = None if row.kind.startswith(PREFIXES) else max(0.0, turn.now - (row.next_trigger_at or turn.now))
            self._leases[row.seq] = _Lease(now, waited)
            if waited is not None:
                self._of(row.kind, now).waits.add(waited)

    def _start(self, numbers: KindTally, lease: _Lease, at: float) -> None:
        if lease.started_at is None:
            lease.started_at = at
            if lease.waited is not None:
                numbers.starts.add(lease.waited + at - lease.claimed_at)

    def total(self, event: str) -> int:
        return sum(
            count for kind in list(self.kinds.values()) for (name, _), count in kind.events.items() if name == event
        )

    def _of(self, kind: str, now: float) -> KindTally:
        numbers = self.kinds.get(kind)
        if numbers is None:
            if len(self.kinds) >= _KINDS:
                kind = self._make_room(kind, now)
            numbers = self.kinds.setdefault(kind, KindTally())
        numbers.used_at = now
        return numbers

    def _make_room(self, kind: str, now: float) -> str:
        """Take the label of the kind that was idle for longest, and return `kind`; *other* if no kind was idle."""
        if now < self._evict_at:
            return OTHER
        oldest = min((kind for kind in self.kinds if kind != OTHER), key=lambda kind: self.kinds[kind].used_at)
        self._evict_at = self.kinds[oldest].used_at + _IDLE
        if now < self._evict_at:
            return OTHER
        del self.kinds[oldest]
        return kind
