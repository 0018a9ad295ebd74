"""Held lease: one lease in this process, with its task, the trust in it, and what its handler has been told."""

import itertools
import os
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any, get_args

from msgspec import UNSET

from leasekit._core.term import Term
from leasekit._driver.answer import Answer
from leasekit._driver.clock import Clock
from leasekit._driver.explaining.recorder import Story
from leasekit._driver.guarding.watchdog import UNGUARDED, Watchdog
from leasekit._driver.reporting.ledger import Ledger
from leasekit.backend import Capabilities
from leasekit.config import Heartbeats
from leasekit.errors import Cancelled, ConfigError, Draining, LeaseError, LeaseLost, LossReason, NotHeld
from leasekit.task import Beat, Settlement, Task

Owner = weakref.ref[Any]
"""A weak reference to an object that lives as long as code is in the `with` block of a lease, or can enter it."""

_MISTAKE = "ConfigError: "  # begins a loss that the settings of the block are to blame for
_NOBODY: Owner = weakref.ref(object)  # alive, and without a block: the task was given back


def loss_reason(word: str | None) -> LossReason:
    """Return `word` as a loss reason; `unknown` for a word that only this service uses."""
    return next((reason for reason in get_args(LossReason) if reason == word), "unknown")


class HeldLease:
    """A lease in this process, read by any thread. `__init__` says which thread writes which fields.

    "The driver" is the driver's thread; in an executor's process, the thread that holds the executor's lock. "The code"
    is any thread that begins, runs or ends the code under this lease; with `run="process"`, the thread of its place.

    Of all threads that try to begin the task or to give it back, exactly one wins (`_takers`). No lock decides, because
    an interrupted thread may leave a lock held, and the driver's thread would wait for it.
    """

    __slots__ = (
        "_acknowledged", "_expired", "_latest", "_numbers", "_on_news", "_plain", "_takers", "announced",
        "awaits_block", "checkpoint", "clock", "confirmed", "coroutine", "ended", "entry", "handler_runs", "idle_at",
        "idle_timeout", "ledger", "listener", "lost_at", "pid", "reason", "report_due", "reserved", "run_until",
        "settling", "stop", "story", "task", "term", "thread", "told_idle", "wanted_by", "watchdog",
    )  # fmt: skip

    def __init__(
        self,
        task: Task,
        heartbeats: Heartbeats,
        clock: Clock,
        *,
        granted_at: float,
        confirmed: bool,
        started: bool,
        claimed: bool = True,
        watchdog: Watchdog = UNGUARDED,
        expired: Callable[[Term], Story] = lambda term: Story(
            f"no beat was acknowledged in {term.heartbeats.slack:g} s"
        ),
        on_news: Callable[["HeldLease"], object] | None = None,
    ) -> None:
        # Never written again.
        self.task = task
        self.clock = clock
        self.pid = os.getpid()
        self.confirmed: Answer[None] | None = None if confirmed else Answer()  # answered by the driver
        self._expired = expired  # explains why a lease is over that the keeper has not found lost
        self._on_news = on_news  # tells the keeper, from any thread, that the service should soon hear of this lease
        # Progress is numbered only within one process: a process that adopts a task does not know the last number.
        self._numbers = itertools.count(1) if claimed else None
        # Written by the driver.
        self.term = Term(self, heartbeats, granted_at=granted_at, confirmed=confirmed)
        self.stop: type[LeaseError] | None = None  # what the handler was told, while the lease is kept
        self.told_idle = False
        self.reason: LossReason | None = None  # why the lease was lost, in one word …
        self.story: Story | None = None  # … and in one sentence
        self.lost_at = 0.0
        self.settling = False
        self.run_until: float | None = None  # when `max_runtime` is over, as far as the service has said
        self._acknowledged: Any = UNSET  # the latest progress that a heartbeat has brought to the service
        self.ledger: Ledger | None = None  # where a supervisor reads that this lease is held …
        self.entry = 0  # … the position of its entry there …
        self.checkpoint = 0  # … and of the entry with its latest progress, until the service has acknowledged that
        # Written by the code; by the driver where it moves a run to a newer lease (`LeasedRun.move`).
        self.watchdog = watchdog
        self._plain = Beat(id=task.id, token=task.token, started=started)  # a heartbeat without progress
        self.idle_timeout: float | None = None
        self.thread = 0  # in which the code began …
        self.coroutine: weakref.ref[Any] | None = None  # … and the coroutine there, of async code
        self.listener: Callable[[], None] | None = None  # called in the driver when the handler must be told something
        self.report_due: Any = None  # the delivery that its block ended with
        self.ended = False  # none of the handler's code runs, at an end of which the driver hears later, or in a pause
        self._latest: tuple[int | None, Any] = (None, UNSET)  # in one write: the driver reads it at any moment
        self.idle_at = 0.0
        # Set by the code, reset by the driver.
        self.announced = False  # the keeper has been told that there are news, but has not read them
        self.handler_runs = False  # also in a pause; a begin that fails resets it too
        # Written by the code, by threads that make a Lease or enter or leave its block, and by the driver.
        self.reserved = False  # a Lease was made of it, whose block will begin
        self.awaits_block = False  # a Lease was made of it, and no block of that is about to begin
        self.wanted_by: Owner | None = None  # what may begin it; None: the worker, or not handed out yet
        self._takers: list[tuple[Owner | None]] = []  # the first wins: a block's owner, a worker (None), `_NOBODY`

    @property
    def lost(self) -> bool:
        """Whether the lease is lost. The clock counts too, because the driver's thread may not have had its turn."""
        return self.reason is not None or (self.term.confirmed and self.clock.now() >= self.term.lost_at)

    def check(self) -> None:
        """Raise what the code must know: `LeaseLost`, `Cancelled`, `Draining`, `IdleTimeout`, `NotHeld` in a fork."""
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
        if self.pid != os.getpid():
            raise NotHeld(f"task {self.task.id} is held by process {self.pid}; this is a fork of it, and holds nothing")

    def loss(self) -> LeaseLost:
        story = self.explained
        message = f"lost task {self.task.id}: {story.why}"
        return LeaseLost(message, task_id=self.task.id, reason=self.reason or "expired", events=story.events)

    @property
    def explained(self) -> Story:
        """Why the lease was lost; before the keeper has found the loss, the reason as far as it is known by now."""
        return self.story or self._expired(self.term)

    def reportable(self, capabilities: Capabilities, *, crashed: bool = False) -> bool:
        """Return whether the result of an ended handler, or that its process has `crashed`, may be reported.

        A lost lease may still be reported until the service says that another worker holds the task: a result matters
        more than a late heartbeat, and the service refuses it if it comes too late.
        """
        if not self.lost:
            return True
        # A hung handler may not report; but its crash is reported, as far as the service still knows the lease.
        ours = self.reason in (None, "expired", "strikes", "overdue") or (crashed and self.reason == "idle")
        return ours and capabilities.refuses_stale

    def begin(self, idle_timeout: float | None, owner: Owner | None = None) -> None:
        """Guard and note the handler, which the caller then calls. Raises `LeaseLost`; `NotHeld` if the task was taken.

        `owner` dies when the `with` block is over; None: a worker waits for the handler's end.
        """
        if self._takers or self.settling or self.pid != os.getpid():
            raise self._too_late()
        self._refuse_lost()
        if not self._try_to_take(owner):
            raise self._too_late()
        self._guard()
        if not self._plain.started:
            self._plain = Beat(id=self.task.id, token=self.task.token)
            self._announce()
        self.idle_timeout = idle_timeout
        self.thread = get_ident()
        self.touch()

    def pause(self) -> None:
        """Record that none of the handler's code runs until `resume`; the lease is kept, and the run goes on.

        The run is not to blame if this process dies meanwhile, and the kernel's timer does not guard it.
        """
        self.listener = None
        if (ledger := self.ledger) is not None:
            ledger.pauses(self.entry)
        self.end()

    def end(self) -> None:
        """Record, in the code's own thread, that none of the handler's code runs."""
        self.ended = True
        self.unguard()

    def resume(self) -> None:
        """Guard and note the handler again, which the caller then calls once more. Raises `LeaseLost`."""
        self._refuse_lost()
        self.listener = None
        self.ended = False
        self._guard()
        self.thread, self.coroutine = get_ident(), None

    def _guard(self) -> None:
        """Guard and note the handler that is about to run. Raises `LeaseLost`, and guards nothing then."""
        self.watchdog.begins(self.term)
        if (ledger := self.ledger) is not None:  # read once: the driver sets it to None when the lease ends
            ledger.begins(self.entry, elsewhere=self.watchdog.elsewhere)
        self.handler_runs = True
        try:
            self._refuse_lost()  # again: the keeper may have looked for a running handler just before
        except LeaseLost:
            self.handler_runs = False
            self.unguard(ledger)  # in which the entry may have been noted as begun after its removal
            raise

    def unguard(self, ledger: Ledger | None = None) -> None:
        """Guard the handler no longer; a supervisor must not see a lease as guarded that may have expired."""
        if (ledger := ledger or self.ledger) is not None:  # read once, as in `_guard`
            ledger.ends(self.entry)
        self.watchdog.ended(self.term)

    def _refuse_lost(self) -> None:
        if self.lost:
            raise self.loss()

    def _try_to_take(self, owner: Owner | None) -> bool:
        taker = (owner,)
        self._takers.append(taker)  # one call into C, which no signal handler interrupts
        return self._takers[0] is taker

    def _too_late(self) -> NotHeld:
        return NotHeld(f"task {self.task.id} was begun, settled or given back before: claim it again")

    @property
    def owner(self) -> Owner | None:
        """The object that must live for this lease to be kept: it runs the `with` block, or may begin one."""
        return self._takers[0][0] if self._takers else self.wanted_by

    def hand_over(self, owner: Owner | None) -> None:
        """Make `owner` the object that must live for this lease to be kept."""
        if self._takers:
            self._takers[0] = (owner,)
        else:
            self.wanted_by = owner

    @property
    def begun(self) -> bool:
        """Whether the handler was begun, or is about to begin; it stays true after the handler's end."""
        return bool(self._takers) and self._takers[0][0] is not _NOBODY

    def withdraw(self) -> bool:
        """Return True if the handler has not begun, and make sure that it never will."""
        if self._takers or self.settling or not self._try_to_take(_NOBODY):
            return False
        self.settling = True
        if self.confirmed is not None and not self.confirmed.done():
            self.confirmed.set_exception(NotHeld(f"task {self.task.id} was given back before it could begin"))
        return True

    @property
    def beat(self) -> Beat:
        """The content of the next heartbeat, with the latest progress until that is acknowledged."""
        # Handlers write `_latest` and the driver `_acknowledged`, so no report is lost between a check and a write.
        if (unsent := self.unsent) is None:
            return self._plain
        number, progress = unsent
        return Beat(id=self.task.id, token=self.task.token, progress=progress, progress_seq=number)

    @property
    def progress(self) -> Any:
        """The latest progress, or UNSET; it always goes with the settlement."""
        return self._latest[1]

    def report(self, progress: Any) -> None:
        """Record progress for an early heartbeat; the latest wins. Until `tell`, this restarts the idle timeout."""
        self._latest = next(self._numbers) if self._numbers is not None else None, progress
        if self.stop is None:
            self.touch()
        self._announce()

    def _announce(self) -> None:
        # News written before this check are seen by the keeper, which resets `announced` before it reads them.
        if not self.announced and self._on_news is not None:
            self.announced = True
            self._on_news(self)

    @property
    def unsent(self) -> tuple[int | None, Any] | None:
        """The latest progress with its number, until the service has acknowledged it; then None."""
        latest = self._latest
        return None if latest[1] is self._acknowledged else latest

    def reported(self, beat: Beat) -> None:
        """Record that `beat` was acknowledged: no heartbeat and no supervisor reports its progress again."""
        self.forget_progress(beat)
        if self.checkpoint and self.unsent is None and self.ledger is not None:
            self.ledger.remove(self.checkpoint)
            self.checkpoint = 0

    def forget_progress(self, beat: Beat) -> None:
        if beat.progress is not UNSET:
            self._acknowledged = beat.progress

    def touch(self) -> None:
        """Record activity of the handler. Idleness is judged by absolute time, never by a count of checks."""
        if self.idle_timeout is not None:
            self.idle_at = self.clock.now() + self.idle_timeout

    def tell(self, stop: type[LeaseError]) -> None:
        """Tell the handler that it must end, with the exception `stop`; the lease is kept meanwhile."""
        if self.stop is None and self.reason is None:
            self.stop = stop
            self._notify()

    def lose(self, reason: str, story: Story, now: float) -> None:
        if self.reason is not None:
            return
        self.lost_at = now
        self.story = story
        self.reason = loss_reason(reason)
        if self.confirmed is not None and not self.confirmed.done():
            is_mistake = reason.startswith(_MISTAKE)
            self.confirmed.set_exception(ConfigError(reason[len(_MISTAKE) :]) if is_mistake else self.loss())
        self._notify()

    def may_begin(self) -> None:
        """Tell the code that waits for the first acknowledged heartbeat that it has come."""
        if self.confirmed is not None and not self.confirmed.done():
            self.confirmed.set_result(None)

    @property
    def remaining_runtime(self) -> float | None:
        """Seconds until the `max_runtime` of the run is over, zero or more; None: there is no limit."""
        if self.run_until is None:
            return self.task.max_runtime
        return max(0.0, self.run_until - self.clock.now())

    @property
    def ends_at(self) -> float:
        """The instant by which the handler of a lost lease must have ended."""
        return min(self.term.trusted_until, self.lost_at + self.term.heartbeats.grace)

    def _notify(self) -> None:
        if self.listener is not None:
            self.listener()

    def enter(self, ledger: Ledger) -> None:
        self.ledger, self.entry = ledger, ledger.add(self.task.id, self.task.token)

    def note_progress(self, progress: tuple[int | None, Any]) -> None:
        """Note numbered progress in the ledger: the supervisor reports it if this process dies before."""
        if self.ledger is not None:
            number, value = progress
            self.checkpoint = self.ledger.progress(
                self.checkpoint, self.task.id, self.task.token, value, number=number or 0
            )

    def report_on_exit(self, settlement: Settlement) -> None:
        """Have the supervisor report `settlement`, for a handler that goes on, once this process has ended."""
        if self.ledger is not None:
            self.entry = self.ledger.record_settlement(self.entry, settlement)

    def leave_ledger(self) -> None:
        """Remove the lease from the ledger: a supervisor does not hand it back when this process ends."""
        if self.ledger is not None:
            self.ledger.remove(self.entry)
            self.ledger.remove(self.checkpoint)
            self.ledger = None
