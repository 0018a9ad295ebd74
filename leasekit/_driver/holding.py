"""What the driver knows of one lease: the task, the trust in it, and what its body has been told."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from msgspec import UNSET

from leasekit._core.term import Term
from leasekit._driver.clock import Clock
from leasekit._driver.ledger import Ledger
from leasekit._driver.recorder import Story
from leasekit._driver.watchdog import UNGUARDED, Watchdog
from leasekit.backend import Traits
from leasekit.config import Beats
from leasekit.errors import Cancelled, Draining, LeaseError, LeaseLost, NotHeld
from leasekit.task import Beat, Task

__all__ = ["Holding"]

# A body may begin in one thread while another gives back what has not begun, or loses it: exactly one of them wins.
_beginning = threading.Lock()


def _forget() -> None:
    """In a forked child the lock may be held by a thread that is not here."""
    global _beginning  # noqa: PLW0603 - one for each process
    _beginning = threading.Lock()


os.register_at_fork(after_in_child=_forget)


def _unexplained(term: Term) -> Story:
    return Story(f"no beat was acknowledged within {term.beats.slack:g} s")


class Holding:
    """One lease in this process. Written by the driver's thread, read by any."""

    __slots__ = (
        "_acknowledged", "_expired", "_plain", "body_runs", "clock", "confirmed", "entry", "idle_at", "idle_timeout",
        "ledger", "listener", "lost_at", "pid", "progress", "reason", "reserved", "settling", "stop", "story", "task",
        "term", "told_idle", "watchdog",
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
        watchdog: Watchdog = UNGUARDED,
        expired: Callable[[Term], Story] = _unexplained,
    ) -> None:
        self.task = task
        self.term = Term(self, beats, granted_at=granted_at, confirmed=confirmed)
        self.clock = clock
        self.watchdog = watchdog
        self._expired = expired  # says why a lease is over that nobody has found lost
        self.pid = os.getpid()
        self._plain = Beat(id=task.id, token=task.token, started=started)  # what a beat without progress says
        self.progress: Any = UNSET  # the latest; always goes with the settlement
        self._acknowledged: Any = UNSET  # the latest that a beat has brought there
        self.confirmed: Future[None] | None = None if confirmed else Future()
        self.reserved = False  # somebody has made a Lease of it, and will begin it
        self.body_runs = False
        self.settling = False
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

    @property
    def lost(self) -> bool:
        """Judged by the clock too: the driver's thread may not have had its turn."""
        return self.reason is not None or (self.term.confirmed and self.clock.now() >= self.term.lost_at)

    def check(self) -> None:
        """Raise what the body has to know: `LeaseLost`, `Cancelled`, `Draining`, `IdleTimeout`, `NotHeld` in a fork."""
        if self.pid != os.getpid():
            raise NotHeld(f"task {self.task.id} is held by process {self.pid}; this is a fork of it, and holds nothing")
        if self.lost:
            raise self.loss()
        if self.stop is Cancelled:
            raise Cancelled(f"task {self.task.id} was cancelled: wind down, the lease is kept meanwhile")
        if self.stop is Draining:
            raise Draining(f"task {self.task.id} is given back: the worker stops, the lease is kept meanwhile")
        if self.stop is not None:
            raise self.stop(f"task {self.task.id} reported no progress for {self.idle_timeout:g} s")

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
        late beat (SYSTEMS C9), and the service refuses it if it comes too late.
        """
        if not self.lost:
            return True
        # A hung body has had its say; but who is dead gives back what is not over at the service.
        ours = self.reason in (None, "expired", "strikes") or (crashed and self.reason == "idle")
        return ours and traits.refuses_stale

    def begin(self, idle_timeout: float | None) -> None:
        """Its body starts. Raises `NotHeld` where it was given back, settled or begun before, `LeaseLost`."""
        with _beginning:
            if self.body_runs or self.settling or self.pid != os.getpid():
                raise NotHeld(f"task {self.task.id} was begun, settled or given back before: claim it again")
            if self.lost:
                raise self.loss()
            self.watchdog.begins(self.term)  # in here: a loss comes before, and was raised, or after, and is seen
            if self.ledger is not None:
                self.ledger.begins(self.entry, elsewhere=self.watchdog.elsewhere)
            self.body_runs = True
        self._plain = Beat(id=self.task.id, token=self.task.token)
        self.idle_timeout = idle_timeout
        self.touch()

    def withdraw(self) -> bool:
        """True where its body has not begun, and from now on never will."""
        with _beginning:
            if self.body_runs or self.settling:
                return False
            self.settling = True
        if self.confirmed is not None and not self.confirmed.done():
            self.confirmed.set_exception(NotHeld(f"task {self.task.id} was given back before it could begin"))
        return True

    @property
    def beat(self) -> Beat:
        """What the next beat says: with it goes the latest progress, until it was acknowledged."""
        # Bodies write one of the two and the driver the other, so that no report slips between a check and a write.
        progress = self.progress
        if progress is self._acknowledged:
            return self._plain
        return Beat(id=self.task.id, token=self.task.token, progress=progress)

    def report(self, progress: Any) -> None:
        """Record progress: the latest wins, and goes with the next beat. Who was told to end gains no time by it."""
        self.progress = progress
        if self.stop is None:
            self.touch()

    def reported(self, beat: Beat) -> None:
        """`beat` was acknowledged: its progress need not be sent again, unless there is a newer one."""
        if beat.progress is not UNSET:
            self._acknowledged = beat.progress

    def touch(self) -> None:
        """The body moved. Idleness is judged by absolute time, never by a count of checks (SYSTEMS C8)."""
        if self.idle_timeout is not None:
            self.idle_at = self.clock.now() + self.idle_timeout

    def tell(self, stop: type[LeaseError]) -> None:
        """The body has to end; the lease is kept meanwhile."""
        if self.stop is None and self.reason is None:
            self.stop = stop
            self._notify()

    def lose(self, reason: str, story: Story, now: float) -> None:
        """The lease is over."""
        with _beginning:
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
