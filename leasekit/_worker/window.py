"""Window: how many tasks to hold, and so how many to claim. This module reads no clock: `now` is an argument.

A task whose handler says `NotYet` needs a slot for the cost of each call, and none in the interval between two. So

    n = (interval / cost + 1) × slots

tasks keep all slots busy, and each finds a slot when it is due. With more, all take longer; with fewer, slots are idle.

Rule 1: what is held (running, waiting and in the buffer) counts, and stays within a window that the user has set.
Rule 2: without such a number the window follows what was measured: `n`, or all that runs in `ahead` seconds; and no
        slot stays idle for long because of runs that wait.
Rule 3: a kind that no longer comes is forgotten: all that was measured fades with each call of any kind.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

from leasekit._arguments import check_concurrency
from leasekit.config import check_number
from leasekit.errors import ConfigError

_MEMORY = 0.5  # seconds over which the pace is averaged
_SAMPLE = 0.05  # seconds: a shorter time says nothing about the pace
_CALLS = 256  # calls of handlers over which cost and interval are averaged
_GROWTH = 1 / (1 - 1 / _CALLS)
_LARGE = 1e200  # a weight: above, all are scaled down
_SPARE = 0.5  # tasks for each slot, at most, in place of those whose run has ended: calls do not come evenly
_IDLE = 1.0  # seconds for which a slot may be idle while runs wait
_LEAST_COST = 1e-6  # seconds
_PATIENCE = 1.0  # seconds for which a task may always wait for a slot …
_PATIENCE_UNKNOWN = 10.0  # … in a window that the user has set, until a call has ended …
_LAPS = 2.0  # … and how often all that is held may run meanwhile
_TIMES_AHEAD = 4  # the same for what is claimed ahead

WindowSize = int | Literal["auto"]

MOST_HELD = 1_000_000  # tasks that a window may hold


def check_window(window: object, *, owner: str = "") -> None:
    """Raise `ConfigError` if this is no window: "auto", or how many tasks may be held."""
    if window == "auto":
        return
    if isinstance(window, str):
        raise ConfigError(f'{owner}window must be "auto" or a number of tasks, got {window!r:.100}')
    check_number(f"{owner}window", window, unit=" of tasks", least=1, most=MOST_HELD, whole=True)


class Pace(NamedTuple):
    """How much a worker does at once."""

    concurrency: int
    """Slots of each executor, unless a handler has its own number."""
    window: WindowSize = "auto"
    """Tasks to hold, at most, unless a handler has its own number."""
    ahead: float = 0.25
    """Seconds of work to claim beyond the slots."""

    def checked(self) -> Self:
        """Return the pace. Raises `ConfigError` for a number that it cannot have."""
        check_concurrency(self.concurrency)
        check_window(self.window)
        check_number("ahead", self.ahead)
        return self

    def but(self, *, concurrency: int | None, window: WindowSize | None) -> Self:
        """Return this pace with those of the two that are given. Raises `ConfigError`."""
        return type(self)(
            self.concurrency if concurrency is None else concurrency,
            self.window if window is None else window,
            self.ahead,
        ).checked()


@dataclass(slots=True)
class Rhythm:
    """Measured sums of the calls of one kind's handler; weights grow, so that older calls count for less."""

    calls: float = 0.0
    waits: float = 0.0  # of these calls: those after which the run waits
    cost: float = 0.0
    waited: float = 0.0

    def add(self, calls: float, waits: float, cost: float, waited: float) -> None:
        self.calls += calls
        self.waits += waits
        self.cost += cost
        self.waited += waited

    def scale(self, factor: float) -> None:
        self.calls *= factor
        self.waits *= factor
        self.cost *= factor
        self.waited *= factor

    @property
    def mean_cost(self) -> float:
        return self.cost / self.calls if self.calls else 0.0

    @property
    def mean_wait(self) -> float:
        """The mean of all calls, also of those that have ended the run."""
        return self.waited / self.calls if self.calls else 0.0


class Calls:
    """Calls of handlers that have ended since the window was last told of them."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[int, int, float, float]] = {}

    def add(self, kind: str, cost: float, wait: float) -> None:
        """Add a call: for how long it held its slot, and for how long its run waits after it (0: the run has ended)."""
        calls, waits, costs, waited = self._kinds.get(kind, (0, 0, 0.0, 0.0))
        self._kinds[kind] = calls + 1, waits + (wait > 0), costs + cost, waited + wait

    def count_in(self, window: "Window") -> None:
        for kind, (calls, waits, cost, waited) in self._kinds.items():
            window.called(kind, calls, waits, cost, waited)


class Window:
    """Compute the sliding window: `n − running − waiting − buffered`.

    For tasks that never wait, `n` is the number of slots, plus the runs that end in `ahead` seconds at the present
    pace. So slots whose runs take minutes claim nothing that they could not begin at once, and slots whose runs take
    microseconds never wait.
    `most` is what may be held at all: the capacity of heartbeats.
    """

    def __init__(self, slots: int, ahead: float, *, size: WindowSize = "auto", most: float = math.inf) -> None:
        self.slots = slots
        self.ahead = ahead
        self.out = 0  # claimed tasks whose runs have not ended: running, waiting and buffered
        self.waiting = 0  # of these, the runs that wait for the next call of their handler
        self._set = None if size == "auto" else size
        self._most = most
        self._pace = 0.0  # ends per second
        self._ends = 0  # ends since …
        self._looked_at = -math.inf
        self._stalled = False
        self._idle_since: float | None = None  # a slot is idle
        self._idles = False  # and has been for a while
        self._weight = 1.0
        self._all = Rhythm()
        self._kinds: dict[str, Rhythm] = {}

    def ended(self, count: int) -> None:
        self.out -= count
        self._ends += count

    def called(self, kind: str, calls: int, waits: int, cost: float, waited: float) -> None:
        """Record calls of a handler, after some of which their runs wait; the others have ended.

        `cost` is for how long all of these calls held their slots, `waited` for how long the runs wait.
        """
        self._stalled = False
        self._weight *= _GROWTH**calls
        weighted = [number * self._weight for number in (calls, waits, cost, waited)]
        self._kinds.setdefault(kind, Rhythm()).add(*weighted)
        self._all.add(*weighted)
        if self._weight > _LARGE:
            for rhythm in (self._all, *self._kinds.values()):
                rhythm.scale(1 / self._weight)
            self._weight = 1.0

    def rhythm(self, kind: str) -> tuple[float, float]:
        """Return cost and interval of a kind's calls, in seconds, as far as they were measured."""
        rhythm = self._kinds.get(kind, Rhythm())
        return rhythm.mean_cost, rhythm.mean_wait

    def stalled(self) -> None:
        """Claim only for free slots until handlers end again, because tasks claimed ahead could not begin."""
        self._pace, self._ends, self._stalled = 0.0, 0, True

    @property
    def bound(self) -> int:
        """How many tasks may be held at present: none without a slot."""
        if not self.slots:
            return 0
        busy = self.slots + (self.waiting if self._idles else 0)
        measured = self.slots + max(self._waiting_beside(), self._in_time_ahead())
        bound = busy if self._stalled else max(busy, measured)
        if self._set is not None:
            bound = min(self._set, busy) if self._stalled else self._set
        return math.ceil(min(bound, self._most))

    @property
    def patience(self) -> float:
        """For how many seconds a task may wait for a slot: longer where more is held than runs at once."""
        base, beyond = max(_PATIENCE, _TIMES_AHEAD * self.ahead), max(0, self.bound - self.slots)
        if self._set is not None and beyond and not self._all.calls:
            return max(base, _PATIENCE_UNKNOWN)
        return max(base, _LAPS * self._all.mean_cost * beyond / max(1, self.slots))

    def size(self, now: float) -> int:
        """Return how many to claim at `now`; 0 while half of the tasks ahead are left: claims come in batches."""
        passed = now - self._looked_at
        if passed >= _SAMPLE:
            self._pace += (self._ends / passed - self._pace) * (1 - math.exp(-passed / _MEMORY))
            self._ends, self._looked_at = 0, now
        self._look_for_idle_slots(now)
        bound = self.bound
        free = bound - self.out
        ahead = min(self._in_time_ahead(), bound - self.slots)
        return free if free >= max(1, ahead // 2) else 0

    def _look_for_idle_slots(self, now: float) -> None:
        if self.out - self.waiting >= self.slots:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        self._idles = self._idle_since is not None and now - self._idle_since >= _IDLE

    def _in_time_ahead(self) -> int:
        return int(self._pace * self.ahead)

    def _waiting_beside(self) -> float:
        """Return how many tasks may wait while all slots are busy, and some more where runs end beside those that wait.

        Never more than if each call were followed by a wait: the interval, by the cost of a call.
        """
        measured = self._all
        if not measured.waits:
            return 0.0
        cost = max(measured.cost / measured.calls, _LEAST_COST)
        every_call_waits, part = measured.waited / measured.waits / cost, measured.waits / measured.calls
        return self.slots * (part * every_call_waits + min(_SPARE, (1 - part) * every_call_waits))
