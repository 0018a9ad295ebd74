"""Claims: who gets which task (DESIGN §6, Claim again). Part of the HSC, in a file of its own."""

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import Raw
from msgspec.structs import replace

from leasekit.server.consumer import reap
from leasekit.server.ids import tokens
from leasekit.server.states import LEASED, Event, next_trigger, step
from leasekit.server.store import ClaimMemory, Content, Lane, Trigger
from leasekit.server.turn import Turn
from leasekit.task import Claimed, Task

__all__ = ["Answer", "Asked", "claim"]

_CHUNK = 1000  # rows of a lane that are read at once, at most
_LEAST_CHUNK = 8
_LOOK_AGAIN = 1.0  # seconds
_NULL = Raw(b"null")


@dataclass(slots=True, eq=False)
class Asked:
    """A claim that someone waits for."""

    number: int  # claims are served in the order in which they came
    worker: str
    claim_id: str
    kinds: Sequence[str]
    limit: int
    arrived_at: float  # by the clock of Turn.instant
    is_new: bool = True  # False: it was tried before, and not answered
    is_gone: bool = False  # whoever waited for it has left: nothing may be granted any more


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a claim: tasks, or when to look again (None: once something becomes ready)."""

    claimed: Claimed | None
    look_at: float | None = None


def claim(turn: Turn, asked: Sequence[Asked]) -> list[Answer]:
    """Hand out tasks that are due: to the first claims first, the most urgent first, then the longest due."""
    present = [one for one in asked if not one.is_gone]
    answers = _repeated(turn, [one for one in present if one.is_new])
    waiting = sorted((one for one in present if id(one) not in answers), key=lambda one: one.number)
    if waiting:
        reap(turn)
        answers.update(_served(turn, waiting))
    return [answers.get(id(one)) or Answer(None) for one in asked]


# Claims that were answered before -----------------------------------------------------------------------------


def _repeated(turn: Turn, asked: Sequence[Asked]) -> dict[int, Answer]:
    """Answers to those that were answered before: what of it is still live, with the same tokens and `waited`."""
    memories = turn.tx.remembered({(one.worker, one.claim_id) for one in asked}) if asked else {}
    answers: dict[int, Answer] = {}
    for one in asked:
        memory = memories.get((one.worker, one.claim_id))
        if memory is not None:
            answers[id(one)] = Answer(Claimed(tasks=_still_held(turn, memory), waited=memory.waited))
    return answers


def _still_held(turn: Turn, memory: ClaimMemory) -> list[Task]:
    rows = turn.tx.triggers_of([seq for seq, _ in memory.grants])
    live = [rows[seq] for seq, granted in memory.grants if seq in rows and _is_live(rows[seq], granted, turn.now)]
    return _tasks(live, turn.tx.contents([row.seq for row in live]))


def _is_live(row: Trigger, granted: str, now: float) -> bool:
    return (
        row.token == granted and row.status in LEASED and row.next_trigger_at is not None and row.next_trigger_at > now
    )


# Claims that are served now -----------------------------------------------------------------------------------


def _served(turn: Turn, asked: Sequence[Asked]) -> dict[int, Answer]:
    stock = _Stock(turn, asked)
    granted: dict[int, list[Trigger]] = {}
    for one in asked:
        rows = stock.take(one.kinds, one.limit)
        if rows:
            named = zip(rows, tokens(len(rows)), strict=True)
            granted[id(one)] = [_grant(row, one.worker, token, now=turn.now) for row, token in named]
    everything = [row for rows in granted.values() for row in rows]
    if not everything:
        return {id(one): Answer(None, stock.look_at(one.kinds)) for one in asked}
    turn.tx.save(everything)
    contents = turn.tx.contents([row.seq for row in everything])
    answers: dict[int, Answer] = {}
    memories: list[ClaimMemory] = []
    for one in asked:
        rows = granted.get(id(one), [])
        if not rows:
            answers[id(one)] = Answer(None, stock.look_at(one.kinds))
            continue
        waited = max(0.0, turn.instant - one.arrived_at)
        answers[id(one)] = Answer(Claimed(tasks=_tasks(rows, contents), waited=waited))
        grants = [(row.seq, row.token or "") for row in rows]
        memories.append(ClaimMemory(one.worker, one.claim_id, turn.now, waited, grants))
    turn.tx.remember(memories)
    return answers


def _grant(row: Trigger, worker: str, token: str, *, now: float) -> Trigger:
    status = step(row.status, Event.CLAIM)
    return replace(
        row,
        status=status,
        fence=row.fence + 1,
        attempt=row.attempt + 1,
        owner=worker,
        token=token,
        next_trigger_at=next_trigger(status, now=now, after=row.claim_timeout),
    )


def _tasks(rows: Iterable[Trigger], contents: Mapping[int, Content]) -> list[Task]:
    return [_task(row, contents[row.seq]) for row in rows]


def _task(row: Trigger, content: Content) -> Task:
    return Task(
        id=row.id,
        kind=row.kind,
        token=row.token or "",
        ttl=row.claim_timeout,
        fence=row.fence,
        attempt=row.attempt,
        payload=Raw(content.payload),
        collection=content.collection,
        priority=row.priority,
        progress=_NULL if content.progress is None else Raw(content.progress),
        traceparent=content.traceparent,
    )


class _Stock:
    """What is due, lane by lane, read as it is asked for; every task is given out once."""

    def __init__(self, turn: Turn, asked: Sequence[Asked]) -> None:
        self._turn = turn
        self._wanted = sum(one.limit for one in asked)
        self._lanes: dict[str, list[_Shelf]] = {}
        self._next_due: dict[str, float] = {}
        lanes = turn.tx.lanes({kind for one in asked for kind in one.kinds})
        due = [lane for lane in lanes if lane.due_at <= turn.now]
        chunk = max(_LEAST_CHUNK, min(self._wanted, _CHUNK) // max(1, len(due)))
        for lane in lanes:
            if lane.due_at <= turn.now:
                self._lanes.setdefault(lane.kind, []).append(_Shelf(turn, lane, chunk))
            else:
                known = self._next_due.get(lane.kind, lane.due_at)
                self._next_due[lane.kind] = min(known, lane.due_at)

    def take(self, kinds: Sequence[str], limit: int) -> list[Trigger]:
        """Up to `limit` tasks of these kinds: the lowest priority number first, then the longest due."""
        shelves = [shelf for kind in dict.fromkeys(kinds) for shelf in self._lanes.get(kind, ())]
        shelves.sort(key=lambda shelf: shelf.priority)
        taken: list[Trigger] = []
        for _, level in itertools.groupby(shelves, key=lambda shelf: shelf.priority):
            taken += _oldest(list(level), limit - len(taken))
            if len(taken) >= limit:
                break
        return taken

    def look_at(self, kinds: Sequence[str]) -> float | None:
        """When something of these kinds is due that is not yet."""
        times = [self._next_due[kind] for kind in kinds if kind in self._next_due]
        if any(kind in self._lanes for kind in kinds):
            # Others took what was due; when the next one behind it is due was not read.
            times.append(self._turn.now + _LOOK_AGAIN)
        return min(times, default=None)


class _Shelf:
    """The due tasks of one lane, the longest due first."""

    def __init__(self, turn: Turn, lane: Lane, chunk: int) -> None:
        self.priority = lane.priority
        self._turn = turn
        self._lane = lane
        self._chunk = chunk
        self._rows: deque[Trigger] = deque()
        self._after: tuple[float, int] | None = (-1.0, -1)  # None: everything was read

    def head(self) -> tuple[float, int] | None:
        """When the first one was due, and its `seq`; None: there is none left."""
        if not self._rows and self._after is not None:
            rows = self._turn.tx.ready(self._lane, now=self._turn.now, after=self._after, limit=self._chunk)
            self._rows.extend(rows)
            self._after = _key(rows[-1]) if len(rows) == self._chunk else None
        return _key(self._rows[0]) if self._rows else None

    def pop(self) -> Trigger:
        return self._rows.popleft()

    def take(self, limit: int) -> list[Trigger]:
        taken: list[Trigger] = []
        while len(taken) < limit and self.head() is not None:
            taken += [self._rows.popleft() for _ in range(min(limit - len(taken), len(self._rows)))]
        return taken


def _key(row: Trigger) -> tuple[float, int]:
    return (row.next_trigger_at or 0.0, row.seq)


def _oldest(shelves: Sequence[_Shelf], limit: int) -> list[Trigger]:
    if len(shelves) == 1:
        return shelves[0].take(limit)
    heads = [(head, number) for number, shelf in enumerate(shelves) if (head := shelf.head()) is not None]
    heapq.heapify(heads)
    taken: list[Trigger] = []
    while heads and len(taken) < limit:
        _, number = heads[0]
        taken.append(shelves[number].pop())
        head = shelves[number].head() if len(taken) < limit else None
        if head is None:
            heapq.heappop(heads)
        else:
            heapq.heapreplace(heads, (head, number))
    return taken
