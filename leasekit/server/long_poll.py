"""Long polls: claims that wait until a task is ready, first come, first served.

The writer tries each claim. If no task is due, the claim is parked here, and tried again when a task of its kinds
becomes ready or due that its worker may have. As many claims are tried as there are tasks, so that a thousand waiting
claims cost as much as one; the writer reports tasks that they leave as ready again. A claim is not tried while no task
of its kinds is due.
Everything in this module runs in the event loop; none of it decides which claim gets which task.
"""

import asyncio
import bisect
import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from leasekit.errors import Throttled
from leasekit.server.clock import Clock
from leasekit.server.commit import Done, resolve
from leasekit.server.fair_bound import FairBound, FairNames, caller_of
from leasekit.server.roles.claims import Answer, WaitingClaim
from leasekit.server.store.routes import NO_LABELS, gets_at_once, kind_of
from leasekit.server.unit_of_work import NewlyDue
from leasekit.task import Claimed, Ticket

_MOST = 10_000  # claims that may wait …
_KINDS = 50_000  # … and kinds that they wait for: each node of a database looks at all of its own in each period
_SOONEST = 0.001  # seconds between two looks
_SLACK = 1000
_PAUSE = 1.0  # seconds until a refused claim may be repeated


@dataclass(slots=True, eq=False)
class _Poll:
    """A claim from its arrival to its answer; it is parked while no task of its kinds is due."""

    claim: WaitingClaim
    answer: "asyncio.Future[Claimed]"
    callers: int = 0
    has_time: bool = True  # False: the answer is empty if no task is due
    is_parked: bool = False
    timeout: asyncio.TimerHandle | None = None

    @property
    def key(self) -> tuple[str, str]:
        return (self.claim.worker, self.claim.claim_id)


def _number(poll: _Poll) -> int:
    return poll.claim.number


class LongPolls:
    """The claims of one engine, from arrival to answer. `attempt(request, done)` makes the writer try a claim."""

    def __init__(self, attempt: Callable[[WaitingClaim, Done], None], clock: Clock) -> None:
        self._attempt = attempt
        self._clock = clock
        self._count = 0
        self._polls: dict[tuple[str, str], _Poll] = {}
        self._of_callers = FairBound()  # their number
        self._kinds = FairNames()  # those that they wait for, unless they had no time from the start
        # kind → labels of workers → claims, in order of arrival
        self._parked: dict[str, dict[frozenset[str], list[_Poll]]] = {}
        self._due: dict[str, float] = {}  # kind or route → when its next task is due, as far as is known
        self._agenda: list[tuple[float, str]] = []  # a heap of the items of `_due`, and of stale ones
        self._full: set[str] = set()  # kinds at a limit: their claims are woken when a place is free, or at a time
        self._missed: set[str] = set()  # kinds of claims that were woken but not served: their tasks are still there
        self._timer: asyncio.TimerHandle | None = None
        self._has_ended = False

    def __len__(self) -> int:
        return len(self._polls)

    async def claim(
        self,
        *,
        worker: str,
        claim_id: str,
        kinds: Sequence[str],
        limit: int,
        wait: float,
        tickets: Sequence[Ticket] = (),
        labels: frozenset[str] = NO_LABELS,
        since: float | None = None,
    ) -> Claimed:
        """Claim tasks; wait up to `wait` seconds for the first. A repeat joins the waiting claim, and may cut its wait.

        A repeat with `limit` 0 ends the waiting claim, which is answered at once, without tasks. Once all callers of a
        claim are cancelled, nothing is granted to it. Raises `Throttled`.
        """
        poll = self._polls.get((worker, claim_id))
        while poll is not None and limit and not poll.claim.limit:
            # The answer to the call that ends the claim has no payloads: this call needs an answer of its own.
            await asyncio.wait([poll.answer])
            poll = self._polls.get((worker, claim_id))
        if poll is not None and poll.claim.limit and not limit:
            # The writer may have begun to grant it tasks: the call that ends the claim finds these.
            self._give_up(poll)
            poll = None
        if poll is None:
            self._count += 1
            distinct, now = tuple(dict.fromkeys(kinds)), self._clock.instant()
            request = WaitingClaim(
                *(self._count, worker, claim_id, distinct, limit, now), tickets=tickets, labels=labels, since=since
            )
            poll = self._begin(request, 0.0 if self._has_ended or not limit else wait)
        else:
            self._shorten_wait(poll, wait)
        poll.callers += 1
        try:
            return await asyncio.shield(poll.answer)
        finally:
            poll.callers -= 1
            if not poll.callers and not poll.answer.done():
                self._give_up(poll)

    def ready(self, readied: Mapping[str, NewlyDue]) -> None:
        """Try a waiting claim for each task that has become ready, by kind or route, and note when the next are due.

        Tasks that prefer labels are ready under two names: for workers that have these, and later for all that fit.
        """
        for name, due in readied.items():
            may_start = kind_of(name) in self._full or due.number > 0
            if due.freed and may_start and len(self._parked.get(name, ())) > 1:  # which task can is not known here
                self._wake_each(name)
            self._wake(name, self._startable(name, due))
            if due.is_full and kind_of(name) in self._parked:
                self._full.add(kind_of(name))
            # For a claim that is tried now or arrives later, the writer reports the next due time again.
            if due.next_at is not None and any(self._candidates(name)):
                self._note_due(name, due.next_at)
        self._set_timer()

    def expect(self, arriving: Mapping[str, int]) -> None:
        """Try a waiting claim for each task that is about to be written, so that one transaction writes and claims it.

        `arriving`: the number of these tasks by kind or route.
        """
        for name, number in arriving.items():
            if kind_of(name) not in self._full:
                self._wake(name, number)

    def kinds(self) -> list[str]:
        """Return the kinds that parked claims wait for."""
        return list(self._parked)

    def drain(self, workers: Collection[str]) -> None:
        """Try the parked claims of workers that take no new tasks: the writer answers them."""
        for poll in [poll for poll in self._polls.values() if poll.is_parked and poll.claim.worker in workers]:
            self._try_again(poll)

    def look(self) -> None:
        """Try one claim for each kind that has become due, or of which a claim was woken but not served."""
        missed, self._missed = self._missed, set()
        for kind in missed:
            self._wake_each(kind)
        self._wake_due()

    def end(self) -> None:
        """Answer all parked claims, and every later claim without a wait; a claim at the writer may still get tasks."""
        self._has_ended = True
        for poll in list(self._polls.values()):
            self._time_is_up(poll)

    def close(self) -> None:
        """Answer all waiting claims, without tasks."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for poll in list(self._polls.values()):
            self._give_up(poll)

    def _begin(self, request: WaitingClaim, wait: float) -> _Poll:
        if wait > 0:
            self._check_room(request)
        loop = asyncio.get_running_loop()
        poll = _Poll(request, loop.create_future(), has_time=wait > 0)
        self._attempt(request, lambda answer: self._after_attempt(poll, answer))
        self._polls[poll.key] = poll
        self._of_callers.add(caller_of(request.claim_id), 1)
        if poll.has_time:
            poll.timeout = loop.call_later(wait, self._time_is_up, poll)
            self._kinds.add(caller_of(request.claim_id), request.kinds)
        return poll

    def _check_room(self, request: WaitingClaim) -> None:
        """Raise `Throttled` if too many claims wait, or for too many kinds and this one has others; callers share."""
        caller = caller_of(request.claim_id)
        if self._of_callers.is_reached(caller, _MOST):
            raise Throttled(f"{_MOST} claims wait already", retry_after=_PAUSE)
        if self._kinds.is_reached(caller, _KINDS, request.kinds):
            raise Throttled(f"claims wait for {_KINDS} kinds already", retry_after=_PAUSE)

    def _try_again(self, poll: _Poll) -> None:
        self._unpark(poll)
        try:
            self._attempt(poll.claim, lambda answer: self._after_attempt(poll, answer))
        except Throttled as error:
            self._missed.update(poll.claim.kinds)
            if poll.has_time:
                self._park(poll)
            else:
                self._finish(poll, error)

    def _after_attempt(self, poll: _Poll, answer: Answer | BaseException) -> None:
        if not (isinstance(answer, Answer) and answer.again):  # `again`: not even an earlier answer was looked up
            poll.claim.is_new = False
        if isinstance(answer, BaseException):
            self._missed.update(poll.claim.kinds)
            self._finish(poll, answer)
        elif answer.claimed is not None:
            self._finish(poll, answer.claimed)
        elif poll.answer.done():
            if answer.again:  # a task may have woken this claim in place of another
                self._missed.update(kind for kind in poll.claim.kinds if kind in self._parked)
        elif answer.again:
            self._try_again(poll)
        elif not poll.has_time:
            self._finish(poll, self._empty_answer(poll))
        else:
            self._park(poll)

    def _shorten_wait(self, poll: _Poll, wait: float) -> None:
        """Shorten the wait to that of a repeated call, never lengthen it: its client has given up the earlier call."""
        loop = asyncio.get_running_loop()
        if poll.timeout is not None and loop.time() + wait < poll.timeout.when():
            poll.timeout.cancel()
            poll.timeout = loop.call_later(wait, self._time_is_up, poll)

    def _time_is_up(self, poll: _Poll) -> None:
        # A claim at the writer may still get tasks: then the writer's answer finishes it.
        poll.has_time = False
        if poll.is_parked:
            self._finish(poll, self._empty_answer(poll))

    def _empty_answer(self, poll: _Poll) -> Claimed:
        return Claimed(tasks=[], waited=max(0.0, self._clock.instant() - poll.claim.arrived_at))

    def _finish(self, poll: _Poll, result: Claimed | BaseException) -> None:
        self._unpark(poll)
        if self._polls.get(poll.key) is poll:
            del self._polls[poll.key]
            self._of_callers.add(caller_of(poll.claim.claim_id), -1)
            if poll.timeout is not None:
                self._kinds.remove(caller_of(poll.claim.claim_id), poll.claim.kinds)
        if poll.timeout is not None:
            poll.timeout.cancel()
        resolve(poll.answer, result)

    def _give_up(self, poll: _Poll) -> None:
        """Answer a claim without tasks, and let nothing be granted to it from now on."""
        poll.claim.is_gone = True
        self._finish(poll, Claimed(tasks=[]))

    def _park(self, poll: _Poll) -> None:
        poll.is_parked = True
        for kind in poll.claim.kinds:
            bisect.insort(self._parked.setdefault(kind, {}).setdefault(poll.claim.labels, []), poll, key=_number)

    def _unpark(self, poll: _Poll) -> None:
        if not poll.is_parked:
            return
        poll.is_parked = False
        for kind in poll.claim.kinds:
            pools, labels = self._parked[kind], poll.claim.labels
            parked = pools[labels]
            del parked[bisect.bisect_left(parked, _number(poll), key=_number)]
            if not parked:
                del pools[labels]
            if not pools:
                del self._parked[kind]
                self._due.pop(kind, None)
                self._full.discard(kind)

    def _startable(self, name: str, due: NewlyDue) -> int:
        """Return how many claims of a kind or route to try: of a kind at a limit, as many as places are free."""
        if (kind := kind_of(name)) not in self._full:
            return due.number
        if due.freed:
            self._full.discard(kind)
        return due.freed

    def _wake(self, name: str, count: int) -> None:
        """Try the first claims whose workers may have the tasks of a kind or route."""
        for poll in list(islice(self._candidates(name), count)) if count else ():
            self._try_again(poll)

    def _wake_each(self, kind: str) -> None:
        """Try the first claim of each pool of workers with the same labels."""
        for poll in [polls[0] for polls in self._parked.get(kind, {}).values()]:
            self._try_again(poll)

    def _candidates(self, name: str) -> Iterable[_Poll]:
        """Return the parked claims whose workers get due tasks of a kind or route at once, in order of arrival."""
        pools = [polls for labels, polls in self._parked.get(kind_of(name), {}).items() if gets_at_once(name, labels)]
        return pools[0] if len(pools) == 1 else heapq.merge(*pools, key=_number)

    def _note_due(self, kind: str, due_at: float) -> None:
        if due_at < self._due.get(kind, math.inf):
            self._due[kind] = due_at
            heapq.heappush(self._agenda, (due_at, kind))
        if len(self._agenda) > 2 * len(self._due) + _SLACK:  # most items are stale
            self._agenda = [(at, kind) for kind, at in self._due.items()]
            heapq.heapify(self._agenda)

    def _next_due(self) -> float | None:
        """Return when the first task is due of the kinds that claims wait for; drop stale items of the heap."""
        while self._agenda and self._due.get(self._agenda[0][1]) != self._agenda[0][0]:
            heapq.heappop(self._agenda)  # no claim waits for this kind, or its due time has changed
        return self._agenda[0][0] if self._agenda else None

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_at = self._next_due()
        if due_at is not None:
            delay = max(_SOONEST, due_at - self._clock.peek())
            self._timer = asyncio.get_running_loop().call_later(delay, self._wake_due)

    def _wake_due(self) -> None:
        now = self._clock.peek()
        due: list[str] = []
        while (due_at := self._next_due()) is not None and due_at <= now:
            _, name = heapq.heappop(self._agenda)
            del self._due[name]
            self._full.discard(kind_of(name))
            due.append(name)
        for name in due:  # a claim that is woken for the first kind may have waited for the others too
            self._wake(name, 1)
        self._set_timer()
