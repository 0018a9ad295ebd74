"""One slot: it keeps an executor alive, and sees one body after another through to its settlement.

Rule 1: no body begins before the guard is armed with the end of its lease.
Rule 2: nothing is settled before the body has ended, or its executor is known to be dead.
Rule 3: whatever becomes of an executor, one task is hit, and there is another executor soon.
"""

import logging
import math
import os
import random
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from leasekit._core.backoff import Backoff
from leasekit._driver.holding import Holding
from leasekit.errors import Cancelled, ConfigError, Draining, IdleTimeout, LeaseError
from leasekit.hooks import about
from leasekit.lease import Lease
from leasekit.task import Outcome, Settlement
from leasekit.worker.process.guard import AHEAD
from leasekit.worker.process.guarded_process import GuardedProcess
from leasekit.worker.process.messages import Ended, Facts, Moved, Progress, Ready, Refused, Run, Setup
from leasekit.worker.work import Work

__all__ = ["Bell", "ExecutorDied", "HandlerFailed", "Slot"]

logger = logging.getLogger("leasekit")

_LOOK = 1.0  # seconds: look around at least this often
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 10.0  # seconds between executors that die before they are ready
_GOODBYE = 2.0  # seconds for an executor without a body to end by itself


class ExecutorDied(Exception):
    """The process that ran a body is dead."""


class HandlerFailed(Exception):
    """A body in an executor raised this."""


class Bell:
    """Wakes a slot. For any thread, also after it was closed."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._closed = False

    def ring(self) -> None:
        with self._lock:  # what is closed may soon be another file
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def wait(self, seconds: float) -> None:
        """Until it is rung, or so long."""
        if select.select([self.fd], [], [], seconds)[0]:
            os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self.fd)


@dataclass(frozen=True, slots=True)
class _Sentence:
    """When an executor is killed, and why."""

    at: float
    why: str
    outcome: Outcome = "crash"


_TOLD: dict[type[LeaseError], tuple[str, Outcome]] = {
    Cancelled: ("it was cancelled, and its body did not end when told to", "cancelled"),
    IdleTimeout: ("its body reported no progress for {} s, and did not end when told to", "crash"),
    Draining: ("the worker stops, and its body did not end when told to", "release"),
}


class _Run:
    """One body in an executor: what that was told, and what has been done about it."""

    def __init__(self, executor: GuardedProcess, work: Work, number: int) -> None:
        self.work = work
        self.number = number
        self.stopped_at: float | None = None  # when it was seen that the body was told to stop
        self.carried_out: _Sentence | None = None
        self._executor = executor
        self._task = work.holding.task
        self._facts: Facts = _facts(work.holding)
        self._stacks_shown = False

    def begin(self) -> None:
        """The executor runs the body. TypeError, ValueError where its payload cannot be said."""
        self._executor.send(Run(number=self.number, task=self._task, facts=self._facts))

    def look(self, now: float) -> None:
        """Tell the executor what is new."""
        holding = self.work.holding  # another, where the task was delivered again
        holding.listener = self._executor.ring
        if self.stopped_at is None and holding.stop is not None:
            self.stopped_at = now
        task, facts = holding.task, _facts(holding)
        if task is not self._task:
            self._executor.send(Moved(task=task, facts=facts))
        elif facts != self._facts:
            self._executor.send(facts)
        self._task, self._facts = task, facts

    def carry_out(self, sentence: _Sentence | None, now: float) -> float:
        """Do what is due, and return when there is something to do again."""
        if sentence is None or self.carried_out is not None:
            return math.inf
        show_at = sentence.at - min(1.0, self.work.holding.term.beats.grace / 2)
        if not self._stacks_shown and now >= show_at:
            self._stacks_shown = True
            self._executor.show_stacks()
        if now >= sentence.at:
            self.carried_out = sentence
            self._executor.kill()
            return math.inf
        return sentence.at if self._stacks_shown else show_at


class Slot:
    """One at a time. `serve` is its thread; all else may be called from any."""

    def __init__(self, setup: Setup, now: Callable[[], float]) -> None:
        self._setup = setup
        self._now = now
        self._bell = Bell()
        self._executor: GuardedProcess | None = None
        self._runs = 0
        self._ends_at: float | None = None  # of all bodies, by order of the worker
        self._closed = False
        self._backoff = Backoff(_FIRST_WAIT, _LONGEST_WAIT, random=random.SystemRandom().random)

    def close(self) -> None:
        """Run nothing any more, and let the executor end."""
        self._closed = True
        self._bell.ring()

    def end(self, at: float) -> None:
        """Kill the executor at that moment if a body runs in it, and give its task back with the latest progress."""
        self._ends_at = at
        self._bell.ring()

    @property
    def ready(self) -> bool:
        """True where a task could begin at once."""
        return (executor := self._executor) is not None and executor.usable

    # Its executor -------------------------------------------------------------------------------------------------

    def start(self) -> bool:
        """Have an executor, if there is none. False where there still is none: try again.

        Raises `ConfigError` where one will never be ready.
        """
        if self._executor is not None:
            self._executor.step(0)
            if self._executor.usable:
                return True
            executor, self._executor = self._executor, None
            logger.warning("an executor without a task %s; there will be another", _end(executor, within=0))
            self.pause()
        try:
            executor = GuardedProcess(self._bell.ring, self._bell.fd, self._now)
        except OSError as error:
            logger.error("no executor can be started, it is tried again: %s", error)
            self.pause()
            return False
        try:
            executor.wait_started()
            executor.send(self._setup)
            ready = self._until_ready(executor)
        except OSError as error:
            ready = False
            logger.error("no executor can be started, it is tried again: %s", error)
        except BaseException:
            _end(executor, within=0)
            raise
        if not ready:
            how = _end(executor, within=0)
            if not self._closed:
                logger.error("an executor %s before it was ready; it is tried again", how)
                self.pause()
            return False
        self._executor = executor
        return True

    def _until_ready(self, executor: GuardedProcess) -> bool:
        while not self._closed and not executor.over:
            for message in executor.step(_LOOK):
                match message:
                    case Ready():
                        return True
                    case Refused(why=why):
                        raise ConfigError(
                            f"run='process': an executor cannot import the handlers of this worker:\n{why}"
                        )
                    case _:
                        pass
        return False

    def pause(self) -> None:
        until = self._now() + self._backoff.wait()
        while not self._closed and (left := until - self._now()) > 0:
            self._bell.wait(left)

    def _lose_pair(self) -> str:
        assert self._executor is not None  # noqa: S101 - it is lost once
        executor, self._executor = self._executor, None
        return executor.reap()

    def finish(self) -> None:
        """The last of it: in its thread, when it serves no more."""
        if self._executor is not None:
            executor, self._executor = self._executor, None
            _end(executor, within=_GOODBYE)
        self._bell.close()

    # A body -------------------------------------------------------------------------------------------------------

    def run(self, work: Work) -> bool:
        """See one task through. The executor may be gone after that; where it is before, nothing is done: false."""
        executor = self._executor
        assert executor is not None  # noqa: S101 - `start` was true
        executor.step(0)
        if not executor.usable:
            return False
        self._run(executor, work)
        return True

    def _run(self, executor: GuardedProcess, work: Work) -> None:
        work.holding.watchdog = executor.watchdog
        if (lease := work.begin()) is None:
            return
        try:
            self._runs += 1
            run = _Run(executor, work, self._runs)
            if self._ends_at is not None or not executor.guarded():
                self._never_begun(work, lease)
                return
            run.begin()
            self._backoff.reset()  # not when it was ready: one that dies soon after that is no better
        except (TypeError, ValueError) as error:  # a backend in memory may hand out what is no JSON
            work.end(lease, error)
            return
        try:
            ended = self._until_ended(executor, run)
        except Exception:
            logger.exception("a slot stumbled over task %s", work.task_id)
            executor.shutdown(0)
            ended = None
        if ended is not None:
            self._settle(work, lease, ended)
        else:
            self._crashed(work, lease, run.carried_out)

    def _never_begun(self, work: Work, lease: Lease) -> None:
        if self._ends_at is None and self._executor is not None:
            logger.error("the guard of an executor does not answer: task %s is given back", work.task_id)
            executor, self._executor = self._executor, None
            _end(executor, within=0)
        work.settle(lease, _settlement(work.holding, "release"))

    def _until_ended(self, executor: GuardedProcess, run: _Run) -> Ended | None:
        """How the body ended; None where its executor is dead."""
        while True:
            now = self._now()
            run.look(now)
            until = min(now + _LOOK, run.carry_out(self._sentence(run), now))
            for message in executor.step(until - now):
                match message:
                    case Progress(run=run.number, value=value):
                        run.work.holding.report(value)
                    case Ended():
                        return message
                    case _:
                        pass
            if executor.over:
                return None

    def _sentence(self, run: _Run) -> _Sentence | None:
        """When the body must have ended: a little earlier than the guard would see to that, so that it is said why."""
        holding = run.work.holding
        grace = holding.term.beats.grace
        early = AHEAD + min(0.02, grace / 5)
        found: list[_Sentence] = []
        if self._ends_at is not None:
            found.append(_Sentence(self._ends_at, "the worker ended before its body had", "release"))
        if holding.lost:
            at = holding.ends_at if holding.reason is not None else holding.term.trusted_until
            found.append(_Sentence(at - early, f"{holding.loss()}; its body did not end in time"))
        if run.stopped_at is not None and holding.stop is not None:
            why, outcome = _TOLD[holding.stop]
            found.append(_Sentence(run.stopped_at + grace - early, why.format(holding.idle_timeout), outcome))
        return min(found, key=lambda sentence: sentence.at, default=None)

    # The end of a body --------------------------------------------------------------------------------------------

    def _settle(self, work: Work, lease: Lease, ended: Ended) -> None:
        error = _raised(ended) if ended.raised else None
        work.settle(lease, ended.settlement(lease.task), error)
        extra = about(lease.task.id, lease.task.token)
        if ended.stopped is not None:
            logger.info("task %s (%s) was stopped: %s", lease.task.id, lease.task.kind, ended.stopped, extra=extra)
        elif error is not None:
            how = "for good" if ended.outcome == "fatal" else "and will be tried again"
            logger.warning("task %s (%s) failed, %s: %s", lease.task.id, lease.task.kind, how, error, extra=extra)

    def _crashed(self, work: Work, lease: Lease, sentence: _Sentence | None) -> None:
        how = self._lose_pair()
        holding = work.holding
        why = f"its executor {how}" if sentence is None else f"its executor was killed: {sentence.why}"
        outcome: Outcome = "crash" if sentence is None else sentence.outcome
        if holding.stop is Cancelled and outcome == "crash":
            outcome = "cancelled"
        error = ExecutorDied(why if holding.story is None else f"{why}; its lease was lost: {holding.story.why}")
        work.settle(lease, _settlement(holding, outcome, error), error)
        task = lease.task
        logger.warning("task %s (%s) ended: %s", task.id, task.kind, why, extra=about(task.id, task.token))


class _Described(msgspec.Struct):
    message: str
    traceback: str = ""


def _end(executor: GuardedProcess, *, within: float) -> str:
    executor.shutdown(within)
    return executor.reap()


def _facts(holding: Holding) -> Facts:
    term, stop, reason = holding.term, holding.stop, holding.reason
    why = "" if reason is None or holding.story is None else holding.story.why
    return Facts(
        granted_at=term.granted_at,
        beats=term.beats,
        stop=None if stop is None else stop.__name__,
        reason=reason,
        why=why,
    )


def _settlement(holding: Holding, outcome: Outcome, error: ExecutorDied | None = None) -> Settlement:
    task = holding.task
    described = None if error is None or outcome != "crash" else {"type": type(error).__name__, "message": str(error)}
    return Settlement(id=task.id, token=task.token, outcome=outcome, error=described, progress=holding.progress)


def _raised(ended: Ended) -> Exception:
    try:
        described = msgspec.json.decode(ended.error, type=_Described)
    except msgspec.ValidationError:  # in its own words
        return HandlerFailed(bytes(ended.error).decode(errors="replace"))
    return HandlerFailed(described.traceback or described.message)
