"""One transaction's worth of work: what the roles get instead of a clock, a store and a generator of chance.

Roles (`frontend`, `hsc`, `consumer`) are functions of a turn and a batch. They run in the writer's thread, know of no
other, and tell it what others wait for.
"""

import random as _random
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

from leasekit.server.store import Trigger, Tx
from leasekit.task import Status

__all__ = ["NewlyDue", "TaskEvent", "UnitOfWork", "to_bytes"]

_encode = msgspec.json.encode


class NewlyDue(NamedTuple):
    """How many tasks of a kind can be claimed that could not before, and when the next of them can."""

    number: int
    next_at: float | None

    def __add__(self, other: object) -> "NewlyDue":
        """What became ready in both of two transactions."""
        if not isinstance(other, NewlyDue):
            return NotImplemented
        times = [at for at in (self.next_at, other.next_at) if at is not None]
        return NewlyDue(self.number + other.number, min(times, default=None))


class TaskEvent(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Something that happened to a task, or to a worker."""

    event: str
    at: datetime
    id: str | None = None
    kind: str | None = None
    status: Status | None = None  # after it
    worker: str | None = None
    outcome: str | None = None  # of a run that was settled


class UnitOfWork:
    """A transaction, the moment at which all of it happens, and what became ready by it."""

    __slots__ = ("_at", "_due", "_later", "happened", "instant", "is_repeated", "lapsed", "now", "random", "tx")

    def __init__(
        self, tx: Tx, *, now: float, instant: float, random: _random.Random, is_repeated: bool = False
    ) -> None:
        self.tx = tx
        self.is_repeated = is_repeated  # its requests may have been applied before: nobody knows how that commit ended
        self.now = now  # the store's time, by which tasks are due
        self.instant = instant  # the same moment, by the clock without steps: of the ends of leases, and of waits
        self.random = random
        self.lapsed = 0  # leases that had run out, and were taken back
        self.happened: list[TaskEvent] | None = None  # None: nobody wants to know
        self._at: datetime | None = None
        self._due: dict[str, int] = {}
        self._later: dict[str, float] = {}

    def ready(self, kind: str, due_at: float, *, count: int = 1) -> None:
        """Note that so many tasks of this kind can be claimed from then on, or may be."""
        if due_at <= self.now:
            self._due[kind] = self._due.get(kind, 0) + count
        else:
            self._later[kind] = min(self._later.get(kind, due_at), due_at)

    def taken(self, kind: str) -> None:
        """Note that whatever had become ready of this kind was handed out in this very transaction."""
        self._due.pop(kind, None)

    def tell(self, event: str, row: Trigger, *, worker: str | None = None, outcome: str | None = None) -> None:
        """Note what has happened to a task that stands so now. `worker`: where it is no longer its owner."""
        if self.happened is None:
            return
        if self._at is None:
            self._at = datetime.fromtimestamp(self.now, UTC)
        self.happened.append(
            TaskEvent(
                event=event,
                at=self._at,
                id=row.id,
                kind=row.kind,
                status=row.status,
                worker=worker or row.owner,
                outcome=outcome,
            )
        )

    def readied(self) -> dict[str, NewlyDue]:
        """What became ready, by kind."""
        return {
            kind: NewlyDue(self._due.get(kind, 0), self._later.get(kind))
            for kind in self._due.keys() | self._later.keys()
        }


def to_bytes(value: Any) -> bytes:
    """A user's JSON value as the store keeps it: the bytes that came, or what the value encodes to."""
    return bytes(value) if type(value) is Raw else _encode(value)
