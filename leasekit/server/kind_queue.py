"""The due tasks of one kind that compete with those of other kinds for the same claims."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from leasekit.server.rooms import Rooms
from leasekit.server.store import Trigger
from leasekit.server.store.kind_rules import KindRules


class LaneReader(Protocol):
    """The due tasks of one lane, in order."""

    priority: int
    name: str
    """The kind, or the name of a route."""
    due_at: float
    """When the first task was due, as far as is known without a look."""

    def head(self) -> tuple[float, int] | None:
        """Return when the first task was due, and its `seq`; None if no task is left."""
        ...

    def pop(self) -> Trigger:
        """Take the first task."""
        ...

    def take(self, limit: int) -> list[Trigger]:
        """Take up to `limit` tasks."""
        ...

    def put_back(self, row: Trigger) -> None:
        """Return a task that was taken to the queue, where it is the first again."""
        ...


class Part(NamedTuple):
    """A lane, as far as its tasks compete at one level: those that were due by `until`, and for `held` seconds."""

    reader: LaneReader
    until: float = math.inf
    held: float = 0.0


View = tuple[LaneReader, float]
"""A lane, and for how many seconds its tasks must have been due for a worker to get them."""


class KindQueue:
    """The tasks of a kind at one level, the longest due first, as many as its limits leave."""

    def __init__(self, kind: str, rules: KindRules, rooms: Rooms, *, now: float) -> None:
        self.kind = kind
        self._now = now
        self.weight = rules.weight
        self._rooms = rooms
        self._parts: list[Part] = []

    @property
    def due_at(self) -> float:
        """When the first task was due, as far as is known without a look."""
        return min(part.reader.due_at for part in self._parts)

    def add(self, part: Part) -> None:
        self._parts.append(part)

    def pop(self) -> Trigger | None:
        """Take the first task; None: no task is left that may start."""
        if self._rooms.left(self.kind) <= 0:
            return None
        heads = [(head, at) for at, part in enumerate(self._parts) if (head := part.reader.head()) is not None]
        heads = [(head, at) for head, at in heads if self._admits(self._parts[at], head[0])]
        if not heads:
            return None
        self._rooms.start(self.kind)
        return self._parts[min(heads)[1]].reader.pop()

    def take(self, limit: int) -> list[Trigger]:
        """Take up to `limit` tasks."""
        rows: list[Trigger] = []
        if len(self._parts) == 1 and self._parts[0][1:] == (math.inf, 0.0):
            rows += self._parts[0].reader.take(min(limit, self._rooms.left(self.kind)))
            self._rooms.start(self.kind, len(rows))
            return rows
        while len(rows) < limit and (row := self.pop()) is not None:
            rows.append(row)
        return rows

    def _admits(self, part: Part, due_at: float) -> bool:
        return due_at <= part.until and due_at + part.held <= self._now


def levels(
    kinds: Sequence[tuple[str, KindRules, Sequence[View]]], rooms: Rooms, *, now: float
) -> list[tuple[int, list[KindQueue]]]:
    """Return the levels at which these kinds compete, the most urgent first: priorities, and 0 for what has aged."""
    found: dict[int, dict[str, KindQueue]] = {}
    for kind, rules, readers in kinds:
        for reader, held in readers:
            parts = [(reader.priority, Part(reader, held=held))]
            if reader.priority and reader.due_at <= now - rules.aging:
                parts.append((0, Part(reader, now - rules.aging, held)))
            for level, part in parts:
                found.setdefault(level, {}).setdefault(kind, KindQueue(kind, rules, rooms, now=now)).add(part)
    return [(level, list(queues.values())) for level, queues in sorted(found.items())]
