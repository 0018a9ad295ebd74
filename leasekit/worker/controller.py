"""A controller claims ahead for one executor, and hears of what has ended. It lives in the driver's loop.

    claim ──▶ (confirmed) ──▶ buffer ──▶ executor ──▶ ended ──▶ the keeper's outbox
                                 └─ lay there for too long, or the worker stops: given back

Rule 1: no error of a service or an adapter ends it: it waits, says so once, and tries again.
Rule 2: every delivery that it took ends in exactly one of: settled, given back, lost, joined to a run.
Rule 3: one body for each task id in this process, however often it is delivered.
"""

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

from msgspec import structs

from leasekit._core.backoff import Backoff
from leasekit._driver.answer import Answer
from leasekit._driver.connection import Connection
from leasekit._driver.holding import Holding
from leasekit._driver.outbox import Delivery
from leasekit.client import Client
from leasekit.errors import Closed, Draining
from leasekit.task import Settlement
from leasekit.worker.executor import Executor
from leasekit.worker.handlers import Handler
from leasekit.worker.window import Window
from leasekit.worker.work import Work

__all__ = ["Controller"]

logger = logging.getLogger("leasekit")

_POLL = 20.0  # seconds of one long poll
_LOOK = 1.0  # seconds: look around at least this often
_LONGEST_IN_BUFFER = 4  # times `ahead`; and at least `_LOOK`
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 5.0  # seconds between claims that fail


class Controller:
    """Keeps one executor in work, without claiming more than it can begin soon.

    `peers` are all controllers of the connection, itself among them: together they stay within its capacity. It looks
    around at least every `look` seconds, and lets a claim wait for `poll`.
    """

    def __init__(
        self,
        client: Client,
        connection: Connection,
        handlers: Mapping[str, Handler],
        executor: Executor,
        *,
        ahead: float,
        peers: Sequence["Controller"],
        chance: random.Random | None = None,
        look: float = _LOOK,
        poll: float = _POLL,
    ) -> None:
        self._client = client
        self._connection = connection
        self._keeper = connection.keeper
        self._clock = connection.clock
        self._handlers = handlers
        self._executor = executor
        self._peers = peers
        self.window = Window(executor.slots, ahead)
        self._look = look
        self._poll = poll
        self._patience = max(_LOOK, _LONGEST_IN_BUFFER * ahead)
        self._works: dict[str, Work] = {}  # by task id: buffered and running
        self._unconfirmed: dict[Work, None] = {}  # not begun before the service has acknowledged a beat
        self._ended: deque[tuple[Work, Settlement | None]] = deque()  # by executors, for the driver's thread
        self._rung = False
        self._claim: asyncio.Task[list[Holding]] | None = None
        self.asked = 0  # by the claim that is under way
        self.free = 0  # the window at the last look
        self._not_before = -math.inf
        self._backoff = Backoff(_FIRST_WAIT, _LONGEST_WAIT, random=(chance or random.SystemRandom()).random)
        self._failing = False
        self._stopping = False
        self._wake = asyncio.Event()

    def look_around(self) -> None:
        """Something has changed. In the driver's thread."""
        self._wake.set()

    async def run(self) -> None:
        """Until it was stopped, and no body runs any more."""
        while True:
            self._wake.clear()
            try:
                self._once(self._clock.now())
            except Exception:
                logger.exception("the controller stumbled; it goes on")
                self._not_before = self._clock.now() + self._backoff.wait()
            if self._stopping and self._claim is None and not self.window.out:
                return
            until = self._clock.now() + self._look
            if self._claim is None and self._not_before > self._clock.now():
                until = min(until, self._not_before)
            await self._clock.wait(self._wake, until)

    def stop(self) -> None:
        """Claim no more, and give back at once what has not begun."""
        self._stopping = True
        if self._claim is not None:
            self._claim.cancel()  # the keeper gives back what it may have been granted
        self._give_back(self._executor.buffer.take_back(math.inf))
        for work in list(self._unconfirmed):
            self._keeper.unless_begun(work.holding)
        self._wake.set()

    def hurry(self) -> int:
        """Tell the bodies that run to end, and give their tasks back; returns how many there are."""
        if (end_all := getattr(self._executor, "end_all", None)) is not None:
            end_all(self._clock.now())
        else:
            for work in self._works.values():
                work.holding.tell(Draining)
        return len(self._works)

    def bequeath(self) -> int:
        """The process ends with bodies in it: have them given back by who sees it end. Returns how many there are."""
        for work in self._works.values():
            task, progress = work.holding.task, work.holding.progress
            self._keeper.bequeath(
                work.holding, Settlement(id=task.id, token=task.token, outcome="release", progress=progress)
            )
        return len(self._works)

    @property
    def running(self) -> int:
        """Bodies that run."""
        return max(0, self.window.out - len(self._unconfirmed) - self.buffered)

    @property
    def buffered(self) -> int:
        """Tasks that are claimed and wait for a slot."""
        return len(self._executor.buffer)

    # Claiming -----------------------------------------------------------------------------------------------------

    def _once(self, now: float) -> None:
        """What is to be done at `now`."""
        self.window.slots = self._executor.slots  # processes come and go
        if stale := self._executor.buffer.take_back(now - self._patience):
            # They could run elsewhere: long bodies hold all slots here, or their loop is blocked.
            logger.debug("%d tasks are given back: no slot was free for %g s", len(stale), self._patience)
            self.window.stalled()
            self._give_back(stale)
        if self._claim is not None and self._claim.done():
            claim, self._claim, self.asked = self._claim, None, 0
            self._take_in(claim, now)
        if self._claim is None and not self._stopping and now >= self._not_before and (limit := self._limit(now)):
            self.asked = limit
            self._claim = asyncio.create_task(
                self._keeper.claim(
                    list(self._handlers), limit=limit, wait=self._poll, started=False, failing=self._note_failure
                )
            )
            self._claim.add_done_callback(lambda _: self._wake.set())

    def _limit(self, now: float) -> int:
        """The window, as far as heartbeats reach for all who claim on this connection."""
        window = self.free = self.window.size(now)
        left = self._keeper.capacity - len(self._keeper) - sum(peer.asked for peer in self._peers)
        share = math.ceil(max(0, left) / len(self._peers))
        return min(window, share, self._connection.backend.traits.max_claim)

    def _take_in(self, claim: "asyncio.Task[list[Holding]]", now: float) -> None:
        if claim.cancelled():
            return
        error = claim.exception()
        if isinstance(error, Closed):
            self.stop()
            return
        if error is not None:
            self._note_failure(error)
            self._not_before = now + self._backoff.wait()
            return
        self._backoff.reset()
        if self._failing:
            self._failing = False
            logger.info("claims of %s are answered again", self._kinds)
        self._deliver(claim.result(), now)

    def _note_failure(self, error: BaseException) -> None:
        if not self._failing and not self._stopping:
            self._failing = True
            logger.warning("claims of %s fail, and are tried again: %s: %s", self._kinds, type(error).__name__, error)

    @property
    def _kinds(self) -> str:
        return ", ".join(map(repr, self._handlers))

    # Handing over -------------------------------------------------------------------------------------------------

    def _deliver(self, holdings: Sequence[Holding], now: float) -> None:
        ready: list[Work] = []
        for holding in holdings:
            handler = self._handlers.get(holding.task.kind)
            if self._stopping or handler is None:
                self._keeper.unless_begun(holding)
                continue
            holding.task.bind(self._client)
            work = Work(holding, handler, self._connection, since=now, ended=self.over)
            self.window.out += 1
            if holding.confirmed is None:
                ready += self._arrived(work)
            else:
                self._unconfirmed[work] = None
                holding.confirmed.add_done_callback(partial(self._confirmed, work))
        if ready:
            self._executor.put(ready)

    def _confirmed(self, work: Work, answer: Answer[None]) -> None:
        """The service has said whether the lease was still ours when it came: if not, it is never begun."""
        self._unconfirmed.pop(work, None)
        if answer.exception() is not None:
            self._left(1)
            return
        work.since = self._clock.now()
        if ready := self._arrived(work):
            self._executor.put(ready)

    def _arrived(self, work: Work) -> list[Work]:
        """What is to be handed over: nothing, where the task is here already."""
        first = self._works.setdefault(work.task_id, work)
        if first is work:
            return [work]
        self._left(1)
        self._join(first, work.holding)
        return []

    def _join(self, first: Work, holding: Holding) -> None:
        """A task was delivered again: its older lease had ended at the service."""
        old = first.holding
        if holding in (old, first.again):
            return
        if first.again is not None and first.again.withdraw():
            self._keeper.forget(first.again)
            first.again = None
        if old.withdraw():  # it has not begun: whoever has it now finds it taken back, and then comes the newest
            self._keeper.forget(old)
        elif first.lease is not None and old.stop is None and not old.lost:
            first.lease.move(holding)
            first.holding = holding
            self._keeper.finish(old)
            return
        first.again = holding

    # The end of a body --------------------------------------------------------------------------------------------

    def over(self, work: Work, settlement: Settlement | None) -> None:
        """The body of this work has ended, or never began (None: nothing to report). From any thread."""
        self._ended.append((work, settlement))
        if not self._rung:  # one call for as many as end until it comes
            self._rung = True
            self._connection.driver.call_soon(self._collect)

    def _collect(self) -> None:
        self._rung = False
        count = 0
        while self._ended:
            work, settlement = self._ended.popleft()
            count += 1
            self._report(work, settlement)
        self._left(count)

    def _left(self, count: int) -> None:
        self.window.ended(count)
        if self._claim is None or self._stopping:
            self._wake.set()

    def _report(self, work: Work, settlement: Settlement | None) -> None:
        del self._works[work.task_id]
        holding, again = work.holding, work.again
        if again is not None:
            self._keeper.finish(holding)
            if settlement is None:  # it was stopped, or never began: now the newest is run
                self._deliver([again], self._clock.now())
                return
            again.withdraw()
            holding = again
        traits = self._connection.backend.traits
        if settlement is not None and holding.reportable(traits, crashed=settlement.outcome == "crash"):
            token = holding.task.token
            if settlement.token != token:
                settlement = structs.replace(settlement, token=token)
            self._keeper.settle(holding, Delivery(settlement))
        else:
            self._keeper.finish(holding)

    def _give_back(self, works: Sequence[Work]) -> None:
        for work in works:
            del self._works[work.task_id]
            self._keeper.unless_begun(work.holding)
            if work.again is not None:
                self._keeper.unless_begun(work.again)
        self.window.out -= len(works)
