"""Claims: grant due tasks to workers. A part of the heartbeat and status controller (`hsc`), in a file of its own."""

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import Raw
from msgspec.structs import replace

from leasekit._lifecycle.transitions import grant, is_held
from leasekit.server.due_tasks import DueTasks
from leasekit.server.fair_bound import caller_of
from leasekit.server.ids import tokens
from leasekit.server.roles import drains, gates, start_deadlines
from leasekit.server.roles.consumer import reap
from leasekit.server.roles.tickets import TicketTasks
from leasekit.server.rooms import Why
from leasekit.server.store import ClaimMemory, Content, Trigger
from leasekit.server.store.damage import content_fault, log, set_aside
from leasekit.server.store.gates import KIND
from leasekit.server.store.routes import MOST, NO_LABELS, fits, fitting, gets_at_once, is_route, kind_of, ready_after
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import Claimed, Task, Ticket
from leasekit.wire import MAX_PAYLOAD, MAX_PROGRESS

_MOST = 1000  # tasks that are granted in one transaction, which heartbeats may have to wait for
_ANSWER = 8 * 1024 * 1024
"""Bytes of users' values in one answer, about: many big tasks must not exhaust the memory of the server or a client.

All answers of one transaction together have at most about twice as many, because heartbeats wait while values are read.
"""

_KINDS = 3000
"""Different kinds that the claims of one transaction look at, about."""

_ROUTES = 3000
"""Routes of kinds that the claims of one transaction look at, about, each counted for each claim."""

_ALWAYS_FIT = _ANSWER // (MAX_PAYLOAD + MAX_PROGRESS)
_NULL = Raw(b"null")
_WITHOUT_CONTENT = Content(payload=b"null", collection=None, traceparent=None, progress=None)


@dataclass(slots=True, eq=False)
class WaitingClaim:
    """A claim whose caller waits for an answer."""

    number: int  # the position in order of arrival, in which claims of one caller are served
    worker: str
    claim_id: str
    kinds: Sequence[str]
    limit: int  # the number of tasks; 0 ends the claim, so that nothing is granted to it later
    arrived_at: float  # when the claim arrived, by the clock of `UnitOfWork.instant`
    is_new: bool = True  # whether the claim has not been tried before
    is_gone: bool = False  # whether all callers have left: nothing may be granted to the claim
    tickets: Sequence[Ticket] = ()  # the only tasks that may be granted, if any are given
    labels: frozenset[str] = NO_LABELS  # of the worker, as in a route
    since: float | None = None  # when the worker's process started, by the store's time; None: it has not said

    @property
    def needs_nothing(self) -> bool:
        """Whether all callers have left before the claim was tried, so that no task has woken the claim."""
        return self.is_gone and self.is_new


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of trying a claim: tasks; or `again`, if its turn did not come; or neither, if no task is due."""

    claimed: Claimed | None = None
    again: bool = False


_NOTHING = Answer()

_LOCKED = 0.25  # seconds until tasks that another node has locked are looked at again


def claim(turn: UnitOfWork, requests: Sequence[WaitingClaim]) -> list[Answer]:
    """Grant due tasks to claims: the most urgent first, of these each kind its share.

    Claims are served in order of arrival, but callers take turns: one with many claims holds up no other by them.
    Where tasks have keys, those of one kind and priority are granted one of each key in turn.

    Tasks that are left, and the times when the next ones are due, are noted as ready, for the claims that are parked.
    """
    answers = _repeated(turn, [item for item in requests if (item.is_new or turn.is_repeated) and not item.is_gone])
    answers.update(_ended(turn, [item for item in requests if not (item.limit or item.is_gone or id(item) in answers)]))
    left = [item for item in requests if id(item) not in answers and not item.needs_nothing]
    waiting = _in_turns(left, turn.kinds.served)
    later = _out_of_reach(turn, [item for item in waiting if not item.tickets])
    answers.update((id(item), Answer(again=True)) for item in later)
    waiting = [item for item in waiting if item not in later] if later else waiting
    answers.update(_drained(turn, waiting))
    present = [item for item in waiting if not (item.is_gone or id(item) in answers)]
    full: dict[str, tuple[float, Why]] = {}
    if any(item.tickets for item in waiting):
        answers.update(_by_tickets(turn, [item for item in present if item.tickets]))
        waiting = [item for item in waiting if not item.tickets]
        present = [item for item in present if not item.tickets]
    if present:
        reap(turn)
        due_tasks = _due_tasks(turn, present)
        answers.update(_served(turn, present, due_tasks))
        turn.kinds.served = _served_last(turn.kinds.served, present, answers)
        full = due_tasks.rooms.full()
    if waiting:
        emptied = [item for item in present if _took_all(item, answers.get(id(item)))]
        _note_what_is_left(turn, waiting, emptied, full, tried=len(requests))
    return [answers.get(id(item), _NOTHING) for item in requests]


def _out_of_reach(turn: UnitOfWork, requests: Sequence[WaitingClaim]) -> set[WaitingClaim]:
    """Return the claims that are left to a later transaction: this one has many kinds, or routes, to look at.

    The others look at `_KINDS` kinds and `_ROUTES` routes together at most; a claim that adds none is always among
    them, and so is the first one of all.
    """
    later: set[WaitingClaim] = set()
    kinds = {kind for request in requests for kind in request.kinds}
    if len(kinds) > _KINDS:
        kinds, later = _first_kinds(requests)
    near = [request for request in requests if request not in later] if later else requests
    if len(near) > 1 and sum(len(request.kinds) for request in near) * MOST > _ROUTES:
        routes = Counter(map(kind_of, turn.tx.routes(kinds)))
        later |= _beyond_routes(near, routes)
    return later


def _first_kinds(requests: Iterable[WaitingClaim]) -> tuple[set[str], set[WaitingClaim]]:
    """Return the kinds of the first claims, `_KINDS` at most, and the claims that have others."""
    kinds: set[str] = set()
    later: set[WaitingClaim] = set()
    for request in requests:
        new = [kind for kind in request.kinds if kind not in kinds]
        if new and kinds and len(kinds) + len(new) > _KINDS:
            later.add(request)
        else:
            kinds.update(new)
    return kinds, later


def _beyond_routes(requests: Iterable[WaitingClaim], routes: Mapping[str, int]) -> set[WaitingClaim]:
    """Return the claims that are beyond `_ROUTES` with those before them; `routes`: how many each kind has."""
    later: set[WaitingClaim] = set()
    room = _ROUTES
    for number, request in enumerate(requests):
        looks = sum(routes[kind] for kind in request.kinds)
        if looks > room and number:
            later.add(request)
        else:
            room = max(0, room - looks)  # claims that look at none are served in any case
    return later


def _in_turns(requests: Sequence[WaitingClaim], served: Mapping[str, int]) -> list[WaitingClaim]:
    """Return the first claim of each caller, then the second ones, and so on.

    Of the first ones, those come last whose callers were served last: a transaction may have no room for all.
    """
    counts: Counter[str] = Counter()
    turns: dict[int, tuple[int, int, int]] = {}
    for request in sorted(requests, key=lambda request: request.number):
        caller = caller_of(request.claim_id)
        counts[caller] += 1
        turns[id(request)] = (counts[caller], served.get(caller, 0), request.number)
    return sorted(requests, key=lambda request: turns[id(request)])


def _served_last(
    served: Mapping[str, int], requests: Sequence[WaitingClaim], answers: Mapping[int, Answer]
) -> dict[str, int]:
    """Return in which transaction each caller of these claims was last granted tasks; this one is the last of all."""
    this = max(served.values(), default=0) + 1
    lately: dict[str, int] = {}
    for request in requests:
        caller, answer = caller_of(request.claim_id), answers.get(id(request))
        is_granted = answer is not None and answer.claimed is not None
        lately[caller] = this if is_granted else max(lately.get(caller, 0), served.get(caller, 0))
    return lately


def _took_all(request: WaitingClaim, answer: Answer | None) -> bool:
    """Return whether a claim was granted fewer tasks than it asked for, and so took all that it could."""
    return answer is None or (answer.claimed is not None and len(answer.claimed.tasks) < request.limit)


def _due_tasks(turn: UnitOfWork, requests: Sequence[WaitingClaim]) -> DueTasks:
    kinds = {kind for request in requests for kind in request.kinds}
    workers = {request.labels for request in requests}
    wanted = min(_MOST, sum(request.limit for request in requests))
    return DueTasks(turn, kinds, wanted=wanted, workers=workers)


def _note_what_is_left(
    turn: UnitOfWork,
    requests: Sequence[WaitingClaim],
    emptied: Sequence[WaitingClaim],
    full: Mapping[str, tuple[float, Why]],
    *,
    tried: int,
) -> None:
    """Note which kinds of these claims still have due tasks, or when they will, so that parked claims are woken.

    Tasks of kinds that are `full` cannot start now.

    Due tasks that `emptied` claims were not granted are locked by another node. They are looked at again a little
    later: a claim that was woken at once would find them locked again, and so on without an end.
    """
    kinds = {kind for item in requests for kind in item.kinds}
    workers = {item.labels for item in requests}
    lanes = turn.lanes(kinds, workers)
    emptied_kinds = {kind for item in emptied for kind in item.kinds}
    looked_at = kinds.union(name for name in turn.tx.queued_routes() if any(fits(name, worker) for worker in workers))
    for name in looked_at.difference(lane.name for lane in lanes if lane.due_at <= turn.now):
        turn.taken(name)
    ready = [(name, lane.due_at + kept_for) for lane in lanes for name, kept_for in ready_after(lane.name)]
    for name, due_at in ready:
        kind = kind_of(name)
        if due_at <= turn.now and kind in full:
            again_at, why = full[kind]
            turn.full(name, again_at)
            turn.counted[kind, "limited", why] = 1
        elif due_at <= turn.now and kind in emptied_kinds and _has_emptied(emptied, name):
            turn.taken(name)
            turn.ready(name, turn.now + _LOCKED)
        else:
            turn.ready(name, due_at, count=2 * tried)
    for kind, gate in turn.gates.holding(KIND, turn.now).items() if turn.gates.rows else ():
        if kind in kinds and gate.until is not None:
            for name in (kind, *fitting(turn.tx.routes([kind]), workers)):
                turn.ready(name, gate.until)


def _has_emptied(requests: Sequence[WaitingClaim], name: str) -> bool:
    """Return whether any of these claims took what is ready under a name as long as it found some."""
    return not is_route(name) or any(kind_of(name) in it.kinds and gets_at_once(name, it.labels) for it in requests)


def _repeated(turn: UnitOfWork, requests: Sequence[WaitingClaim]) -> dict[int, Answer]:
    """Return, by `id()` of the request, the answers of those that were answered before: the leases that still live."""
    memories = turn.tx.claim_memories({(request.worker, request.claim_id) for request in requests}) if requests else {}
    answers: dict[int, Answer] = {}
    room = _ANSWER
    for request in requests:
        memory = memories.get((request.worker, request.claim_id))
        if memory is None:
            continue
        if not request.limit:  # the tasks will only be released: their values are not read
            tasks = [_task(row, _WITHOUT_CONTENT) for row in _held_rows(turn, memory)]
            answers[id(request)] = Answer(Claimed(tasks=tasks, waited=memory.waited))
            continue
        if room <= 0:
            answers[id(request)] = Answer(again=True)
            continue
        tasks = _held_tasks(turn, memory)
        room -= _size(tasks)
        answers[id(request)] = Answer(Claimed(tasks=tasks, waited=memory.waited))
    return answers


def _size(tasks: Sequence[Task]) -> int:
    """Return the bytes of users' values."""
    return sum(len(memoryview(value)) for task in tasks for value in (task.payload, task.progress))


def _held_tasks(turn: UnitOfWork, memory: ClaimMemory) -> list[Task]:
    live = _held_rows(turn, memory)
    contents = turn.tx.contents([row.seq for row in live])
    return tasks_of(_whole(turn, live, contents), contents)


def _held_rows(turn: UnitOfWork, memory: ClaimMemory) -> list[Trigger]:
    rows = turn.tx.triggers_of([seq for seq, _ in memory.grants])
    return [rows[seq] for seq, granted in memory.grants if seq in rows and is_held(rows[seq], granted, turn.instant)]


def _ended(turn: UnitOfWork, requests: Sequence[WaitingClaim]) -> dict[int, Answer]:
    """Answer these claims without tasks, and remember that: every later call with their ids gets the same answer."""
    turn.tx.remember_claims([ClaimMemory(request.worker, request.claim_id, turn.now, 0.0, ()) for request in requests])
    return {id(request): Answer(Claimed(tasks=[], waited=0.0)) for request in requests}


def _drained(turn: UnitOfWork, requests: Sequence[WaitingClaim]) -> dict[int, Answer]:
    """Answer the claims of workers that drain: at once, and without tasks, which are left to the other claims."""
    return {
        id(request): Answer(Claimed(tasks=[], waited=max(0.0, turn.instant - request.arrived_at), draining=True))
        for request in requests
        if drains.holds(turn.drains, request)
    }


def _served(turn: UnitOfWork, requests: Sequence[WaitingClaim], due_tasks: DueTasks | TicketTasks) -> dict[int, Answer]:
    """Grant due tasks to these claims, and return the answers of those that get any or must be tried again."""
    granted, skipped = _granted(turn, requests, due_tasks)
    due_tasks.rooms.save()
    gates.shut_out(turn, due_tasks.sieve.shut_out)
    start_deadlines.drop(turn, due_tasks.sieve.late)
    if due_tasks.sieve.is_full:  # there may be open tasks behind those
        skipped = requests
    answers = {id(request): Answer(again=True) for request in skipped}
    contents = turn.tx.contents([row.seq for _, rows in granted for row in rows]) if granted else {}
    taken = [row for _, rows in granted for row in rows]
    granted = [(request, _whole(turn, rows, contents)) for request, rows in granted]
    everything = [row for _, rows in granted for row in rows]
    if len(everything) < len(taken):
        due_tasks.drop([row for row in taken if row not in everything])
    turn.tx.save(everything)
    for row in everything if turn.happened is not None else ():
        turn.tell("claimed", row)
    answers.update(_answered(turn, granted, contents))
    due_tasks.close()
    return answers


def _answered(
    turn: UnitOfWork, granted: Sequence[tuple[WaitingClaim, list[Trigger]]], contents: Mapping[int, Content]
) -> dict[int, Answer]:
    """Answer claims with the tasks that they are granted, and have these answers remembered."""
    answers: dict[int, Answer] = {}
    memories: list[ClaimMemory] = []
    for request, rows in granted:
        if not rows:  # all tasks for this claim are damaged: there may be whole ones behind them
            answers[id(request)] = Answer(again=True)
            continue
        waited = max(0.0, turn.instant - request.arrived_at)
        answers[id(request)] = Answer(Claimed(tasks=tasks_of(rows, contents), waited=waited))
        grants = [(row.seq, row.token or "") for row in rows]
        memories.append(ClaimMemory(request.worker, request.claim_id, turn.now, waited, grants))
    turn.tx.remember_claims(memories)
    return answers


def _by_tickets(turn: UnitOfWork, requests: Sequence[WaitingClaim]) -> dict[int, Answer]:
    """Grant the tasks of these claims' tickets, until all answers together are big: the others are tried again."""
    answers: dict[int, Answer] = {}
    room = _ANSWER
    for request in requests:
        if room <= 0:
            answers[id(request)] = Answer(again=True)
            continue
        answers.update(_served_by_tickets(turn, request))
        claimed = answers[id(request)].claimed
        room -= 0 if claimed is None else _size(claimed.tasks)
    return answers


def _served_by_tickets(turn: UnitOfWork, request: WaitingClaim) -> dict[int, Answer]:
    """Grant the tasks of a claim's tickets as far as they can be claimed; the answer says which tickets are of no use.

    Such a claim is answered at once in any case: it does not wait for tasks that can be claimed later.
    """
    tasks = TicketTasks(turn, request.tickets, request.kinds, labels=request.labels)
    answer = _served(turn, [request], tasks).get(id(request), _NOTHING)
    if answer.again:
        return {id(request): answer}
    waited = max(0.0, turn.instant - request.arrived_at)
    claimed = answer.claimed or Claimed(tasks=[], waited=waited)
    granted = {task.id for task in claimed.tasks}
    refused = [task_id for task_id in tasks.refused if task_id not in granted]
    return {id(request): Answer(replace(claimed, refused=refused))}


def _granted(
    turn: UnitOfWork, requests: Sequence[WaitingClaim], due_tasks: DueTasks | TicketTasks
) -> tuple[list[tuple[WaitingClaim, list[Trigger]]], Sequence[WaitingClaim]]:
    """Return the claims that get tasks, with the rows to be saved, and the claims whose turn does not come yet."""
    granted: list[tuple[WaitingClaim, list[Trigger]]] = []
    room, bytes_left, unsized = _MOST, _ANSWER, list[int]()
    for position, request in enumerate(requests):
        if room <= 0 or bytes_left <= 0:
            return granted, requests[position:]
        rows = _fitting(turn, due_tasks, due_tasks.take(request.kinds, request.limit, labels=request.labels))
        room -= len(rows)
        unsized += [row.seq for row in rows]
        if len(unsized) > _ALWAYS_FIT:
            bytes_left -= turn.tx.content_size(unsized)
            unsized.clear()
        if rows:
            granted.append((request, grant_all(turn, rows, request.worker)))
    return granted, ()


def grant_all(turn: UnitOfWork, rows: Sequence[Trigger], worker: str) -> list[Trigger]:
    """Return the rows of these tasks after a grant to `worker`; the caller saves them."""
    turn.granted += rows
    named = zip(rows, tokens(len(rows), turn.random), strict=True)
    return [grant(row, worker, token, now=turn.instant, at=turn.now) for row, token in named]


def _fitting(turn: UnitOfWork, due_tasks: DueTasks | TicketTasks, rows: list[Trigger]) -> list[Trigger]:
    """Return the first rows that make an answer of bounded size, at least one; put the others back."""
    if len(rows) <= _ALWAYS_FIT:
        return rows
    seqs = [row.seq for row in rows]
    if turn.tx.content_size(seqs) <= _ANSWER:
        return rows
    fit = bisect.bisect_right(range(1, len(rows)), _ANSWER, key=lambda count: turn.tx.content_size(seqs[:count]))
    due_tasks.put_back(rows[max(fit, 1) :])
    return rows[: max(fit, 1)]


def _whole(turn: UnitOfWork, rows: list[Trigger], contents: Mapping[int, Content]) -> list[Trigger]:
    """Return the granted rows whose contents are whole; set the others aside, without counting the attempt."""
    faults = {row.seq: fault for row in rows if (fault := content_fault(contents.get(row.seq))) is not None}
    if not faults:
        return rows
    damaged = [set_aside(replace(row, attempt=row.attempt - 1), faults[row.seq]) for row in rows if row.seq in faults]
    turn.tx.save(damaged)
    turn.over += damaged
    log(damaged)
    return [row for row in rows if row.seq not in faults]


def tasks_of(rows: Iterable[Trigger], contents: Mapping[int, Content]) -> list[Task]:
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
        max_runtime=row.max_runtime,
    )
