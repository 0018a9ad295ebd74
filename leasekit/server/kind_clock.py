"""A clock of kinds: those with due tasks of one priority take turns, by their weights.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): each task of a kind takes 1 / weight of virtual time, and the
kind whose next task starts first by that time has its turn. A kind that was away for a while starts with the others: it
has no credit. The clock is in the memory of a node: after a restart all kinds start together.
"""

import heapq
from collections.abc import Sequence
from typing import Protocol

from leasekit.server.store import Trigger

_MOST = 10_000  # kinds that are remembered


class Queue(Protocol):
    """The due tasks of one kind that compete at one level, in order."""

    kind: str
    weight: float

    @property
    def due_at(self) -> float:
        """When the first task was due, as far as is known without a look."""
        ...

    def pop(self) -> Trigger | None:
        """Take the first task; None: no task is left that may start."""
        ...


class KindClock:
    """The virtual time of each kind at each level (0 is the most urgent)."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, str], float] = {}  # when the last task of a kind ends

    def take(self, level: int, queues: Sequence[Queue], limit: int) -> list[Trigger]:
        """Take up to `limit` tasks from queues of different kinds; of those whose turn it is, the longest due first."""
        turns = [(start, queues[at].due_at, at) for at, start in enumerate(self._starts(level, queues))]
        heapq.heapify(turns)
        taken: list[Trigger] = []
        while turns and len(taken) < limit:
            start, _, at = turns[0]
            queue = queues[at]
            if (row := queue.pop()) is None:
                heapq.heappop(turns)
                continue
            taken.append(row)
            self._ends[level, queue.kind] = end = start + 1 / queue.weight
            heapq.heapreplace(turns, (end, row.next_trigger_at or 0.0, at))
        return taken

    def _starts(self, level: int, queues: Sequence[Queue]) -> list[float]:
        """Return when the next task of each kind starts: no kind is behind the last start of another."""
        if len(self._ends) > _MOST:
            self._ends.clear()
        ends = [self._ends.get((level, queue.kind), 0.0) for queue in queues]
        now = max(end - 1 / queue.weight for end, queue in zip(ends, queues, strict=True))
        return [max(end, now) for end in ends]
