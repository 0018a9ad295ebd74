"""Claims that wait for something to become ready: long polls, first come, first served.

A claim is tried by the writer; where nothing is due it is parked here, and tried again when a task of its kinds
becomes ready or due. As many are tried as there are tasks, so that a thousand who wait cost no more than one; what they
leave, the writer tells as ready again. A claim of which no kind has become due is not tried again, however many wait.
Everything in here runs in the event loop; none of it decides who gets which task.
"""

import asyncio
import bisect
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from leasekit.errors import Throttled
from leasekit.server.clock import StoreClock
from leasekit.server.commit import Done
from leasekit.server.roles.claims import Answer, Asked
from leasekit.server.unit_of_work import NewlyDue
from leasekit.task import Claimed

__all__ = ["LongPolls"]

_MOST = 10_000  # claims that may wait
_SOONEST = 0.001  # seconds between two looks
_SLACK = 1000
_PAUSE = 1.0  # seconds until those may come again for whom there was no room


@dataclass(slots=True, eq=False)
class _Poll:
    asked: Asked
    answer: "asyncio.Future[Claimed]"
    callers: int = 0
    has_time: bool = True  # False: it answers empty where nothing is due
    is_parked: bool = False
    timeout: asyncio.TimerHandle | None = None

    @property
    def key(self) -> tuple[str, str]:
        return (self.asked.worker, self.asked.claim_id)


def _number(poll: _Poll) -> int:
    return poll.asked.number


class LongPolls:
    """The claims of one engine, from arrival to answer. `attempt(asked, done)` has the writer try one."""

    def __init__(self, attempt: Callable[[Asked, Done], None], clock: StoreClock) -> None:
        self._attempt = attempt
        self._clock = clock
        self._count = 0
        self._polls: dict[tuple[str, str], _Poll] = {}
        self._parked: dict[str, list[_Poll]] = {}  # by kind, in the order in which they came
        self._due: dict[str, float] = {}  # kind → when something of it is due next, as far as is known
        self._agenda: list[tuple[float, str]] = []  # a heap of all that stands or stood in `_due`
        self._missed: set[str] = set()  # kinds of claims whose turn was lost: what they were woken for is still there
        self._timer: asyncio.TimerHandle | None = None
        self._has_ended = False

    def __len__(self) -> int:
        """How many wait."""
        return len(self._polls)

    async def claim(self, *, worker: str, claim_id: str, kinds: Sequence[str], limit: int, wait: float) -> Claimed:
        """Tasks, or none once `wait` seconds are over. A repeat joins the claim that waits, and may cut its wait.

        A repeat with `limit` 0 ends the claim that waits: that is answered at once, with nothing.

        Nothing is granted any more once everyone who waited for it was cancelled. Raises `Throttled`.
        """
        poll = self._polls.get((worker, claim_id))
        while poll is not None and limit and not poll.asked.limit:
            # The answer to the call that ends the claim has no payloads: it is not for this one.
            await asyncio.wait([poll.answer])
            poll = self._polls.get((worker, claim_id))
        if poll is not None and poll.asked.limit and not limit:
            # What the writer grants it all the same, because it has begun, is found by the call that ends it.
            self._give_up(poll)
            poll = None
        if poll is None:
            self._count += 1
            asked = Asked(self._count, worker, claim_id, tuple(dict.fromkeys(kinds)), limit, self._clock.instant())
            poll = self._begin(asked, 0.0 if self._has_ended or not limit else wait)
        else:
            self._wait_no_longer(poll, wait)
        poll.callers += 1
        try:
            return await asyncio.shield(poll.answer)
        finally:
            poll.callers -= 1
            if not poll.callers and not poll.answer.done():
                self._give_up(poll)

    def ready(self, readied: Mapping[str, NewlyDue]) -> None:
        """Tasks have become ready, or will be: have as many tried again as there are tasks."""
        for kind, what in readied.items():
            self._wake(kind, what.number)
            # Who is tried now, or comes later, is told again what is due next.
            if what.next_at is not None and kind in self._parked:
                self._expect_at(kind, what.next_at)
        self._set_timer()

    def expect(self, arriving: Mapping[str, int]) -> None:
        """So many tasks of these kinds are about to be written: have as many tried together with them."""
        for kind, number in arriving.items():
            self._wake(kind, number)

    def look(self) -> None:
        """Have one claim tried again for each kind that has become due, or for which a turn was lost."""
        missed, self._missed = self._missed, set()
        for kind in missed:
            self._wake(kind, 1)
        self._time_has_come()

    def end(self) -> None:
        """Let nobody wait any more. What the writer has already may still get something, and is told so."""
        self._has_ended = True
        for poll in list(self._polls.values()):
            self._time_is_up(poll)

    def close(self) -> None:
        """Answer all that wait, with nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for poll in list(self._polls.values()):
            self._give_up(poll)

    def _begin(self, asked: Asked, wait: float) -> _Poll:
        if wait > 0 and len(self._polls) >= _MOST:
            raise Throttled(f"{_MOST} claims wait already", retry_after=_PAUSE)
        loop = asyncio.get_running_loop()
        poll = _Poll(asked, loop.create_future(), has_time=wait > 0)
        self._attempt(asked, lambda answer: self._tried(poll, answer))
        self._polls[poll.key] = poll
        if poll.has_time:
            poll.timeout = loop.call_later(wait, self._time_is_up, poll)
        return poll

    def _try(self, poll: _Poll) -> None:
        self._unpark(poll)
        try:
            self._attempt(poll.asked, lambda answer: self._tried(poll, answer))
        except Throttled as error:
            self._missed.update(poll.asked.kinds)
            if poll.has_time:
                self._park(poll)
            else:
                self._finish(poll, error)

    def _tried(self, poll: _Poll, answer: Answer | BaseException) -> None:
        if not (isinstance(answer, Answer) and answer.again):  # its turn did not come, not even to be looked up
            poll.asked.is_new = False
        if isinstance(answer, BaseException):
            self._missed.update(poll.asked.kinds)
            self._finish(poll, answer)
        elif answer.claimed is not None:
            self._finish(poll, answer.claimed)
        elif poll.answer.done():
            pass
        elif answer.again:
            self._try(poll)
        elif not poll.has_time:
            self._finish(poll, self._nothing(poll))
        else:
            self._park(poll)

    def _wait_no_longer(self, poll: _Poll, wait: float) -> None:
        """Who asks again has given up the call that waits: what counts is how long this one is willing to."""
        loop = asyncio.get_running_loop()
        if poll.timeout is not None and loop.time() + wait < poll.timeout.when():
            poll.timeout.cancel()
            poll.timeout = loop.call_later(wait, self._time_is_up, poll)

    def _time_is_up(self, poll: _Poll) -> None:
        # While the writer has it, it may still get something: then its answer ends it.
        poll.has_time = False
        if poll.is_parked:
            self._finish(poll, self._nothing(poll))

    def _nothing(self, poll: _Poll) -> Claimed:
        return Claimed(tasks=[], waited=max(0.0, self._clock.instant() - poll.asked.arrived_at))

    def _finish(self, poll: _Poll, result: Claimed | BaseException) -> None:
        self._unpark(poll)
        if self._polls.get(poll.key) is poll:
            del self._polls[poll.key]
        if poll.timeout is not None:
            poll.timeout.cancel()
        if poll.answer.done():
            return
        if isinstance(result, BaseException):
            poll.answer.set_exception(result)
        else:
            poll.answer.set_result(result)

    def _give_up(self, poll: _Poll) -> None:
        """Answer it with nothing, and have nothing granted to it from now on."""
        poll.asked.is_gone = True
        self._finish(poll, Claimed(tasks=[]))

    def _park(self, poll: _Poll) -> None:
        poll.is_parked = True
        for kind in poll.asked.kinds:
            bisect.insort(self._parked.setdefault(kind, []), poll, key=_number)

    def _unpark(self, poll: _Poll) -> None:
        if not poll.is_parked:
            return
        poll.is_parked = False
        for kind in poll.asked.kinds:
            parked = self._parked[kind]
            del parked[bisect.bisect_left(parked, _number(poll), key=_number)]
            if not parked:
                del self._parked[kind]
                self._due.pop(kind, None)

    def _wake(self, kind: str, count: int) -> None:
        for poll in self._parked.get(kind, [])[:count]:
            self._try(poll)

    def _expect_at(self, kind: str, due_at: float) -> None:
        if due_at < self._due.get(kind, math.inf):
            self._due[kind] = due_at
            heapq.heappush(self._agenda, (due_at, kind))
        if len(self._agenda) > 2 * len(self._due) + _SLACK:  # most of it stands there in vain
            self._agenda = [(at, one) for one, at in self._due.items()]
            heapq.heapify(self._agenda)

    def _next_due(self) -> float | None:
        """When the first of the kinds is due that somebody waits for."""
        while self._agenda and self._due.get(self._agenda[0][1]) != self._agenda[0][0]:
            heapq.heappop(self._agenda)  # nobody waits for it any more, or it is due earlier
        return self._agenda[0][0] if self._agenda else None

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_at = self._next_due()
        if due_at is not None:
            delay = max(_SOONEST, due_at - self._clock.peek())
            self._timer = asyncio.get_running_loop().call_later(delay, self._time_has_come)

    def _time_has_come(self) -> None:
        now = self._clock.peek()
        due: list[str] = []
        while (due_at := self._next_due()) is not None and due_at <= now:
            _, kind = heapq.heappop(self._agenda)
            del self._due[kind]
            due.append(kind)
        for kind in due:  # one that is woken for the first may have waited for the others too
            self._wake(kind, 1)
        self._set_timer()
