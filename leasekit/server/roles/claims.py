"""Claims: who gets which task. Part of the HSC, in a file of its own."""

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import Raw
from msgspec.structs import replace

from leasekit._lifecycle.transitions import grant, is_held
from leasekit.server.due_tasks import DueTasks
from leasekit.server.ids import tokens
from leasekit.server.roles.consumer import reap
from leasekit.server.store import ClaimMemory, Content, Trigger
from leasekit.server.store.damage import content_fault, log, set_aside
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import Claimed, Task
from leasekit.wire import MAX_PAYLOAD, MAX_PROGRESS

__all__ = ["Answer", "Asked", "claim", "grant_all", "tasks_of"]

_MOST = 5000  # tasks that are granted in one turn: heartbeats must not have to wait longer
_ANSWER = 8 * 1024 * 1024
"""Bytes of users' values in one answer, about: a claim of many big tasks must not exhaust memory, here or there.

All answers of one turn have about as many, or twice that: heartbeats must not have to wait while more is read.
"""

_ALWAYS_FIT = _ANSWER // (MAX_PAYLOAD + MAX_PROGRESS)
_NULL = Raw(b"null")


@dataclass(slots=True, eq=False)
class Asked:
    """A claim that someone waits for."""

    number: int  # claims are served in the order in which they came
    worker: str
    claim_id: str
    kinds: Sequence[str]
    limit: int  # 0: it ends the claim, so that nothing is granted to it later
    arrived_at: float  # by the clock of UnitOfWork.instant
    is_new: bool = True  # False: it was tried before, and not answered
    is_gone: bool = False  # whoever waited for it has left: nothing may be granted any more


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a claim: tasks; or `again`, where its turn did not come; or nothing."""

    claimed: Claimed | None = None
    again: bool = False


_NOTHING = Answer()


def claim(turn: UnitOfWork, asked: Sequence[Asked]) -> list[Answer]:
    """Hand out tasks that are due: to the first claims first, the most urgent first, then the longest due.

    What they leave, and what is due next, is told as ready: for those who wait besides.
    """
    answers = _repeated(turn, [one for one in asked if (one.is_new or turn.is_repeated) and not one.is_gone])
    answers.update(_ended(turn, [one for one in asked if not (one.limit or one.is_gone or id(one) in answers)]))
    waiting = [one for one in asked if id(one) not in answers]
    present = sorted((one for one in waiting if not one.is_gone), key=lambda one: one.number)
    if present:
        reap(turn)
        answers.update(_served(turn, present))
    if waiting:
        _tell_what_is_left(turn, {kind for one in waiting for kind in one.kinds}, tried=len(asked))
    return [answers.get(id(one), _NOTHING) for one in asked]


def _tell_what_is_left(turn: UnitOfWork, kinds: set[str], *, tried: int) -> None:
    lanes = turn.tx.lanes(kinds)
    for kind in kinds.difference(lane.kind for lane in lanes if lane.due_at <= turn.now):
        turn.taken(kind)
    for lane in lanes:
        turn.ready(lane.kind, lane.due_at, count=2 * tried)


# Claims that were answered before -----------------------------------------------------------------------------


def _repeated(turn: UnitOfWork, asked: Sequence[Asked]) -> dict[int, Answer]:
    """Answers to those that were answered before: what of it is still live, with the same tokens and `waited`."""
    memories = turn.tx.remembered({(one.worker, one.claim_id) for one in asked}) if asked else {}
    answers: dict[int, Answer] = {}
    room = _ANSWER
    for one in asked:
        memory = memories.get((one.worker, one.claim_id))
        if memory is None:
            continue
        if not one.limit:  # its tasks are to be released only: their values are not even read
            answers[id(one)] = Answer(Claimed(tasks=_to_release(turn, memory), waited=memory.waited))
            continue
        if room <= 0:
            answers[id(one)] = Answer(again=True)
            continue
        tasks = _still_held(turn, memory)
        room -= sum(len(memoryview(value)) for task in tasks for value in (task.payload, task.progress))
        answers[id(one)] = Answer(Claimed(tasks=tasks, waited=memory.waited))
    return answers


def _still_held(turn: UnitOfWork, memory: ClaimMemory) -> list[Task]:
    live = _live(turn, memory)
    contents = turn.tx.contents([row.seq for row in live])
    return tasks_of(_whole(turn, live, contents), contents)


def _to_release(turn: UnitOfWork, memory: ClaimMemory) -> list[Task]:
    return [
        Task(
            id=row.id,
            kind=row.kind,
            token=row.token or "",
            ttl=row.claim_timeout,
            fence=row.fence,
            attempt=row.attempt,
            payload=_NULL,
            progress=_NULL,
        )
        for row in _live(turn, memory)
    ]


def _live(turn: UnitOfWork, memory: ClaimMemory) -> list[Trigger]:
    rows = turn.tx.triggers_of([seq for seq, _ in memory.grants])
    return [rows[seq] for seq, granted in memory.grants if seq in rows and is_held(rows[seq], granted, turn.instant)]


def _ended(turn: UnitOfWork, asked: Sequence[Asked]) -> dict[int, Answer]:
    """Note that these claims were answered with nothing: so is every later call with their ids."""
    turn.tx.remember([ClaimMemory(one.worker, one.claim_id, turn.now, 0.0, ()) for one in asked])
    return {id(one): Answer(Claimed(tasks=[], waited=0.0)) for one in asked}


# Claims that are served now -----------------------------------------------------------------------------------


def _served(turn: UnitOfWork, asked: Sequence[Asked]) -> dict[int, Answer]:
    granted, skipped = _granted(turn, asked)
    answers = {id(one): Answer(again=True) for one in skipped}
    contents = turn.tx.contents([row.seq for _, rows in granted for row in rows]) if granted else {}
    granted = [(one, _whole(turn, rows, contents)) for one, rows in granted]
    everything = [row for _, rows in granted for row in rows]
    turn.tx.save(everything)
    for row in everything if turn.happened is not None else ():
        turn.tell("claimed", row)
    memories: list[ClaimMemory] = []
    for one, rows in granted:
        if not rows:  # all that it was to get is damaged: there may be more behind it
            answers[id(one)] = Answer(again=True)
            continue
        waited = max(0.0, turn.instant - one.arrived_at)
        answers[id(one)] = Answer(Claimed(tasks=tasks_of(rows, contents), waited=waited))
        grants = [(row.seq, row.token or "") for row in rows]
        memories.append(ClaimMemory(one.worker, one.claim_id, turn.now, waited, grants))
    turn.tx.remember(memories)
    return answers


def _granted(turn: UnitOfWork, asked: Sequence[Asked]) -> tuple[list[tuple[Asked, list[Trigger]]], Sequence[Asked]]:
    """Who gets what, and those whose turn does not come in this transaction."""
    due_tasks = DueTasks(turn, {kind for one in asked for kind in one.kinds}, wanted=sum(one.limit for one in asked))
    granted: list[tuple[Asked, list[Trigger]]] = []
    room, bytes_left, unsized = _MOST, _ANSWER, list[int]()
    for at, one in enumerate(asked):
        if room <= 0 or bytes_left <= 0:
            return granted, asked[at:]
        rows = _fitting(turn, due_tasks, due_tasks.take(one.kinds, one.limit))
        room -= len(rows)
        unsized += [row.seq for row in rows]
        if len(unsized) > _ALWAYS_FIT:
            bytes_left -= turn.tx.size(unsized)
            unsized.clear()
        if rows:
            granted.append((one, grant_all(turn, rows, one.worker)))
    return granted, ()


def grant_all(turn: UnitOfWork, rows: Sequence[Trigger], worker: str) -> list[Trigger]:
    """Where these tasks stand once they are granted to a worker. Saves none."""
    named = zip(rows, tokens(len(rows), turn.random), strict=True)
    return [grant(row, worker, token, now=turn.instant) for row, token in named]


def _fitting(turn: UnitOfWork, due_tasks: DueTasks, rows: list[Trigger]) -> list[Trigger]:
    """As many of the first as make an answer of bounded size, one at least; the others stay where they were."""
    if len(rows) <= _ALWAYS_FIT:
        return rows
    seqs = [row.seq for row in rows]
    if turn.tx.size(seqs) <= _ANSWER:
        return rows
    fit = bisect.bisect_right(range(1, len(rows)), _ANSWER, key=lambda count: turn.tx.size(seqs[:count]))
    due_tasks.put_back(rows[max(fit, 1) :])
    return rows[: max(fit, 1)]


def _whole(turn: UnitOfWork, rows: list[Trigger], contents: Mapping[int, Content]) -> list[Trigger]:
    """Those of these grants that can be handed out; the others are set aside, as if they had not been granted."""
    faults = {row.seq: fault for row in rows if (fault := content_fault(contents.get(row.seq))) is not None}
    if not faults:
        return rows
    damaged = [set_aside(replace(row, attempt=row.attempt - 1), faults[row.seq]) for row in rows if row.seq in faults]
    turn.tx.save(damaged)
    log(damaged)
    return [row for row in rows if row.seq not in faults]


def tasks_of(rows: Iterable[Trigger], contents: Mapping[int, Content]) -> list[Task]:
    """What holders are given of these tasks."""
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
