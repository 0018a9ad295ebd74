"""What the driver knows of one lease: the task, the trust in it, and what its body has been told."""

import itertools
import os
import weakref
from collections.abc import Callable
from typing import Any

from msgspec import UNSET

from leasekit._core.term import Term
from leasekit._driver.answer import Answer
from leasekit._driver.clock import Clock
from leasekit._driver.ledger import Ledger
from leasekit._driver.recorder import Story
from leasekit._driver.watchdog import UNGUARDED, Watchdog
from leasekit.backend import Traits
from leasekit.config import Beats
from leasekit.errors import Cancelled, Draining, LeaseError, LeaseLost, NotHeld
from leasekit.task import Beat, Task

__all__ = ["Holding", "Owner"]

Owner = weakref.ref[Any]
"""An object that lives as long as somebody can still begin, or is within, a block."""

_NOBODY: Owner = weakref.ref(object)  # alive, and no block: the task was given back


def _unexplained(term: Term) -> Story:
    return Story(f"no beat was acknowledged within {term.beats.slack:g} s")


class Holding:
    """One lease in this process. Written by the driver's thread, read by any.

    Exactly one of all that try to begin it or to give it back comes first (`_takers`), without a lock: a thread that
    is interrupted may leave a lock held, and the driver's thread would wait for it.
    """

    __slots__ = (
        "_acknowledged", "_expired", "_latest", "_numbers", "_on_news", "_plain", "_takers", "announced", "body_runs",
        "checkpoint", "clock",
        "confirmed", "entry", "idle_at", "idle_timeout", "ledger", "listener", "lost_at", "pid", "reason",
        "report_due", "reserved", "settling", "stop", "story", "task", "term", "told_idle", "wanted_by", "watchdog",
    )  # fmt: skip

    def __init__(
        self,
        task: Task,
        beats: Beats,
        clock: Clock,
        *,
        granted_at: float,
        confirmed: bool,
        started: bool,
        claimed: bool = True,
        watchdog: Watchdog = UNGUARDED,
        expired: Callable[[Term], Story] = _unexplained,
        on_news: Callable[["Holding"], object] | None = None,
    ) -> None:
        self.task = task
        self._on_news = on_news  # tells the keeper, from any thread, that the service should soon hear of this lease …
        self.announced = False  # … and that is on its way
        self.term = Term(self, beats, granted_at=granted_at, confirmed=confirmed)
        self.clock = clock
        self.watchdog = watchdog
        self._expired = expired  # says why a lease is over that nobody has found lost
        self.pid = os.getpid()
        self._plain = Beat(id=task.id, token=task.token, started=started)  # what a beat without progress says
        # Only what one process reports of a claim has an order: whoever adopts a task does not know where that stands.
        self._numbers = itertools.count(1) if claimed else None
        self._latest: tuple[int | None, Any] = (None, UNSET)  # in one write, for the driver reads it at any moment
        self._acknowledged: Any = UNSET  # the latest that a beat has brought there
        self.confirmed: Answer[None] | None = None if confirmed else Answer()
        self.reserved = False  # somebody has made a Lease of it, and will begin it
        self.wanted_by: Owner | None = None  # who may begin it; None: the worker, or nobody has seen it yet
        self._takers: list[tuple[Owner | None]] = []  # the first has it: a block, a worker (None), `_NOBODY`
        self.body_runs = False
        self.settling = False
        self.report_due: Any = None  # the delivery that its block ended with
        self.stop: type[LeaseError] | None = None  # what the body was told, while the lease is kept
        self.reason: str | None = None  # why it was lost, in one word …
        self.story: Story | None = None  # … and in one sentence
        self.lost_at = 0.0
        self.idle_timeout: float | None = None
        self.idle_at = 0.0
        self.told_idle = False
        # Called in the driver's thread when there is something to be told.
        self.listener: Callable[[], None] | None = None
        self.ledger: Ledger | None = None  # where a supervisor reads that it is held …
        self.entry = 0  # … and where in it that is
        self.checkpoint = 0  # and where its latest progress is, until the service has that

    @property
    def lost(self) -> bool:
        """Judged by the clock too: the driver's thread may not have had its turn."""
        return self.reason is not None or (self.term.confirmed and self.clock.now() >= self.term.lost_at)

    def check(self) -> None:
        """Raise what the body has to know: `LeaseLost`, `Cancelled`, `Draining`, `IdleTimeout`, `NotHeld` in a fork."""
        self.check_process()
        if self.lost:
            raise self.loss()
        if self.stop is Cancelled:
            raise Cancelled(f"task {self.task.id} was cancelled: wind down, the lease is kept meanwhile")
        if self.stop is Draining:
            raise Draining(f"task {self.task.id} is given back: the worker stops, the lease is kept meanwhile")
        if self.stop is not None:
            raise self.stop(f"task {self.task.id} reported no progress for {self.idle_timeout:g} s")

    def check_process(self) -> None:
        """Raise `NotHeld` in a fork of the process that holds the lease."""
        if self.pid != os.getpid():
            raise NotHeld(f"task {self.task.id} is held by process {self.pid}; this is a fork of it, and holds nothing")

    def loss(self) -> LeaseLost:
        """The exception that says why."""
        story = self.explained
        message = f"lost task {self.task.id}: {story.why}"
        return LeaseLost(message, task_id=self.task.id, reason=self.reason or "expired", events=story.events)

    @property
    def explained(self) -> Story:
        """Why it was lost; where only the clock says so, as far as that can be known by now."""
        return self.story or self._expired(self.term)

    def reportable(self, traits: Traits, *, crashed: bool = False) -> bool:
        """Whether the result of a finished body may be reported, or that its process has `crashed`.

        Also after the lease was lost, as long as nobody said that the task has gone to another: a result outranks a
        late beat, and the service refuses it if it comes too late.
        """
        if not self.lost:
            return True
        # A hung body has had its say; but who is dead gives back what is not over at the service.
        ours = self.reason in (None, "expired", "strikes") or (crashed and self.reason == "idle")
        return ours and traits.refuses_stale

    def begin(self, idle_timeout: float | None, owner: Owner | None = None) -> None:
        """Start the body. Raises `NotHeld` if the task was given back, settled or begun before, and `LeaseLost`.

        `owner` dies when the block is over; None: a worker sees to the end of the body.
        """
        if self._takers or self.settling or self.pid != os.getpid():
            raise self._too_late()
        self._refuse_lost()
        if not self._take(owner):
            raise self._too_late()
        self.watchdog.begins(self.term)
        if self.ledger is not None:
            self.ledger.begins(self.entry, elsewhere=self.watchdog.elsewhere)
        self.body_runs = True
        try:
            self._refuse_lost()  # once more: the keeper may have looked for a body just before there was one
        except LeaseLost:
            self.body_runs = False
            self.watchdog.ended(self.term)
            raise
        if not self._plain.started:
            self._plain = Beat(id=self.task.id, token=self.task.token)
            self._announce()
        self.idle_timeout = idle_timeout
        self.touch()

    def _refuse_lost(self) -> None:
        if self.lost:
            raise self.loss()

    def _take(self, owner: Owner | None) -> bool:
        taker = (owner,)
        self._takers.append(taker)  # one call into C: nobody is interrupted in it
        return self._takers[0] is taker

    def _too_late(self) -> NotHeld:
        return NotHeld(f"task {self.task.id} was begun, settled or given back before: claim it again")

    @property
    def owner(self) -> Owner | None:
        """The object that must live for this lease to be kept: whose block runs, or who may begin one."""
        return self._takers[0][0] if self._takers else self.wanted_by

    def hand_over(self, owner: Owner | None) -> None:
        """From now on `owner` is what must live for this lease to be kept."""
        if self._takers:
            self._takers[0] = (owner,)
        else:
            self.wanted_by = owner

    @property
    def begun(self) -> bool:
        """True once a body has begun, or is about to, also after its end."""
        return bool(self._takers) and self._takers[0][0] is not _NOBODY

    def withdraw(self) -> bool:
        """Return True if the body has not begun, and make sure that it never will."""
        if self._takers or self.settling or not self._take(_NOBODY):
            return False
        self.settling = True
        if self.confirmed is not None and not self.confirmed.done():
            self.confirmed.set_exception(NotHeld(f"task {self.task.id} was given back before it could begin"))
        return True

    @property
    def beat(self) -> Beat:
        """What the next beat says: with it goes the latest progress, until it was acknowledged."""
        # Bodies write one of the two and the driver the other, so that no report slips between a check and a write.
        if (unsent := self.unsent) is None:
            return self._plain
        number, progress = unsent
        return Beat(id=self.task.id, token=self.task.token, progress=progress, progress_seq=number)

    @property
    def progress(self) -> Any:
        """The latest, or UNSET; always goes with the settlement."""
        return self._latest[1]

    def report(self, progress: Any) -> None:
        """Record progress: the latest wins, and goes with an early beat. Who was told to end gains no time by it."""
        self._latest = next(self._numbers) if self._numbers is not None else None, progress
        if self.stop is None:
            self.touch()
        self._announce()

    def _announce(self) -> None:
        # What is written before this look is seen by the keeper, which takes the mark away before it reads.
        if not self.announced and self._on_news is not None:
            self.announced = True
            self._on_news(self)

    @property
    def unsent(self) -> tuple[int | None, Any] | None:
        """The latest progress with its number, as long as the service has not acknowledged it."""
        latest = self._latest
        return None if latest[1] is self._acknowledged else latest

    def reported(self, beat: Beat) -> None:
        """`beat` was acknowledged: its progress need not be sent again, unless there is a newer one."""
        if beat.progress is not UNSET:
            self._acknowledged = beat.progress

    def touch(self) -> None:
        """The body moved. Idleness is judged by absolute time, never by a count of checks."""
        if self.idle_timeout is not None:
            self.idle_at = self.clock.now() + self.idle_timeout

    def tell(self, stop: type[LeaseError]) -> None:
        """The body has to end; the lease is kept meanwhile."""
        if self.stop is None and self.reason is None:
            self.stop = stop
            self._notify()

    def lose(self, reason: str, story: Story, now: float) -> None:
        """The lease is over."""
        if self.reason is not None:
            return
        self.lost_at = now
        self.story = story
        self.reason = reason
        if self.confirmed is not None and not self.confirmed.done():
            self.confirmed.set_exception(self.loss())
        self._notify()

    @property
    def ends_at(self) -> float:
        """By when the body of a lost lease must have ended."""
        return min(self.term.trusted_until, self.lost_at + self.term.beats.grace)

    def _notify(self) -> None:
        if self.listener is not None:
            self.listener()
