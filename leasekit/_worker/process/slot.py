"""Slot: keep one executor alive, and run one task after another in it, each up to its settlement.

Rule 1: no handler begins before the guard is armed with the end of its lease.
Rule 2: no task is settled before its handler has ended, or its executor is known to be dead.
Rule 3: the end of an executor, of whatever cause, affects one task, and another executor starts soon.
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
from msgspec import structs

from leasekit._core.backoff import Backoff
from leasekit._driver.keeping.held_lease import HeldLease
from leasekit._leased_run import LeasedRun
from leasekit._worker.claimed_task import ClaimedTask
from leasekit._worker.process import messages
from leasekit._worker.process.guard import AHEAD
from leasekit._worker.process.guarded_process import GuardedProcess
from leasekit.errors import Cancelled, ConfigError, Draining, IdleTimeout, LeaseError
from leasekit.task import Outcome, Settlement

logger = logging.getLogger("leasekit")

_LOOK = 1.0  # seconds: check at least this often
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 10.0  # seconds between executors that die before they are ready
_GOODBYE = 2.0  # seconds for an executor without a task to end by itself


class ExecutorDied(Exception):
    """The process that ran a handler is dead."""


class HandlerFailed(Exception):
    """A handler in an executor raised this error."""


class Bell:
    """Wakes a slot. Any thread may `ring`, also after `close`; the rest is for the slot's thread."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._closed = False

    def ring(self) -> None:
        with self._lock:  # a descriptor that is closed may soon be another file
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def wait(self, seconds: float) -> None:
        if select.select([self.fd], [], [], seconds)[0]:
            os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self.fd)


@dataclass(frozen=True, slots=True)
class _KillPlan:
    """The instant at which an executor is killed, and the reason."""

    at: float
    why: str
    outcome: Outcome = "crash"


_TOLD: dict[type[LeaseError], tuple[str, Outcome]] = {
    Cancelled: ("it was cancelled, and its handler did not end when told to", "cancelled"),
    IdleTimeout: ("its handler reported no progress for {} s, and did not end when told to", "crash"),
    Draining: ("the worker stops, and its handler did not end when told to", "release"),
}


class _Run:
    """A run in an executor: what the executor was told, and what was done about it."""

    def __init__(self, executor: GuardedProcess, work: ClaimedTask, number: int) -> None:
        self.work = work
        self.number = number
        self.stopped_at: float | None = None  # when the slot saw that the handler was told to stop
        self.executed: _KillPlan | None = None
        self._executor = executor
        self._task = work.held.task
        self._lease_state: messages.LeaseState = _lease_state(work.held)
        self._stacks_shown = False

    def begin(self) -> None:
        """Have the executor run the handler. Raises TypeError or ValueError if the payload is not JSON."""
        self._executor.send(messages.Run(number=self.number, task=self._task, state=self._lease_state))

    def tell_changes(self, now: float) -> None:
        held = self.work.held  # another lease, if the task was delivered again
        held.listener = self._executor.ring
        if self.stopped_at is None and held.stop is not None:
            self.stopped_at = now
        task, state = held.task, _lease_state(held)
        if task is not self._task:
            self._executor.send(messages.LeaseReplaced(task=task, state=state))
        elif state != self._lease_state:
            self._executor.send(state)
        self._task, self._lease_state = task, state

    def execute(self, plan: _KillPlan | None, now: float) -> float:
        """Show the stacks, or kill the executor, when `plan` says so; return the instant of the next step."""
        if plan is None or self.executed is not None:
            return math.inf
        show_at = plan.at - min(1.0, self.work.held.term.heartbeats.grace / 2)
        if not self._stacks_shown and now >= show_at:
            self._stacks_shown = True
            self._executor.show_stacks()
        if now >= plan.at:
            self.executed = plan
            self._executor.kill()
            return math.inf
        return plan.at if self._stacks_shown else show_at


class Slot:
    """Run one task at a time, in the slot's own thread. Any thread may call `close`, `end` and `ready`."""

    def __init__(self, setup: messages.Setup, now: Callable[[], float]) -> None:
        self._setup = setup
        self._now = now
        self._bell = Bell()
        self._executor: GuardedProcess | None = None
        self._runs = 0
        self._ends_at: float | None = None  # of all handlers, set by the worker
        self._closed = False
        self._backoff = Backoff(_FIRST_WAIT, _LONGEST_WAIT, random=random.SystemRandom().random)

    def close(self) -> None:
        """Stop running tasks, and let the executor end."""
        self._closed = True
        self._bell.ring()

    def end(self, at: float) -> None:
        """Kill the executor at `at` if a handler runs in it, and give its task back with the latest progress."""
        self._ends_at = at
        self._bell.ring()

    @property
    def ready(self) -> bool:
        """Whether there is an executor that lives, with a running handler or without."""
        return (executor := self._executor) is not None and executor.usable

    def start(self) -> bool:
        """Start an executor if there is none; False: try again later. Raises `ConfigError` if none will ever start."""
        if self._executor is not None:
            self._executor.step(0)
            if self._executor.usable:
                return True
            executor, self._executor = self._executor, None
            logger.warning("an executor without a task %s; there will be another", _end_executor(executor, within=0))
            self.pause()
        try:
            executor = GuardedProcess(self._bell.ring, self._bell.fd, self._now)
        except OSError as error:
            logger.error("no executor can be started, it is tried again: %s", error)
            self.pause()
            return False
        if not self._becomes_ready(executor):
            how = _end_executor(executor, within=0)
            if not self._closed:
                logger.error("an executor %s before it was ready; it is tried again", how)
                self.pause()
            return False
        self._executor = executor
        return True

    def _becomes_ready(self, executor: GuardedProcess) -> bool:
        try:
            executor.wait_started()
            executor.send(self._setup)
            return self._wait_until_ready(executor)
        except OSError as error:
            logger.error("no executor can be started, it is tried again: %s", error)
            return False
        except BaseException:
            _end_executor(executor, within=0)
            raise

    def _wait_until_ready(self, executor: GuardedProcess) -> bool:
        while not self._closed and not executor.over:
            for message in executor.step(_LOOK):
                match message:
                    case messages.Ready():
                        return True
                    case messages.StartupFailed(why=why):
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

    def finish(self) -> None:
        """End the executor and close the slot. Call this in its thread, after the last task."""
        if self._executor is not None:
            executor, self._executor = self._executor, None
            _end_executor(executor, within=_GOODBYE)
        self._bell.close()

    def run(self, work: ClaimedTask) -> bool:
        """Run one task up to its settlement. Return False, without effect, if the executor is gone before."""
        executor = self._executor
        assert executor is not None  # noqa: S101 - `start` was true
        executor.step(0)
        if not executor.usable:
            return False
        self._run(executor, work)
        return True

    def _run(self, executor: GuardedProcess, work: ClaimedTask) -> None:
        work.held.watchdog = executor.watchdog
        if (leased := work.begin()) is None:
            return
        try:
            self._runs += 1
            run = _Run(executor, work, self._runs)
            if self._ends_at is not None or not executor.confirm_guarded():
                self._give_back(work, leased)
                return
            run.begin()
            self._backoff.reset()  # not when it was ready: an executor that dies soon after that is no better
        except (TypeError, ValueError) as error:  # the payload of a backend in memory may not be JSON
            work.end(leased, error)
            return
        try:
            ended = self._serve_until_ended(executor, run)
        except Exception:
            logger.exception("error in a slot, during task %s", work.task_id)
            executor.shutdown(0)
            ended = None
        if ended is not None:
            self._settle(work, leased, ended)
        else:
            self._settle_crash(work, leased, run.executed)

    def _give_back(self, work: ClaimedTask, leased: LeasedRun) -> None:
        """Release a task whose handler was not started, and end the executor if its guard does not answer."""
        if self._ends_at is None and self._executor is not None:
            logger.error("the guard of an executor does not answer: task %s is given back", work.task_id)
            executor, self._executor = self._executor, None
            _end_executor(executor, within=0)
        work.settle(leased, _settlement(work.held, "release"))

    def _serve_until_ended(self, executor: GuardedProcess, run: _Run) -> messages.Ended | None:
        """Return how the run ended; None if its executor is dead."""
        while True:
            now = self._now()
            run.tell_changes(now)
            until = min(now + _LOOK, run.execute(self._kill_plan(run), now))
            for message in executor.step(until - now):
                match message:
                    case messages.Progress(run=run.number, value=value):
                        run.work.held.report(value)
                    case messages.Ended():
                        return message
                    case _:
                        pass
            if executor.over:
                return None

    def _kill_plan(self, run: _Run) -> _KillPlan | None:
        """Plan when to kill a handler that must end: a little before the guard does, so that the reason is reported."""
        held = run.work.held
        grace = held.term.heartbeats.grace
        early = AHEAD + min(0.02, grace / 5)
        found: list[_KillPlan] = []
        if self._ends_at is not None:
            found.append(_KillPlan(self._ends_at, "the worker ended before its handler had", "release"))
        if held.lost:
            at = held.ends_at if held.reason is not None else held.term.trusted_until
            found.append(_KillPlan(at - early, f"{held.loss()}; its handler did not end in time"))
        if run.stopped_at is not None and held.stop is not None:
            why, outcome = _TOLD[held.stop]
            found.append(_KillPlan(run.stopped_at + grace - early, why.format(held.idle_timeout), outcome))
        return min(found, key=lambda plan: plan.at, default=None)

    def _settle(self, work: ClaimedTask, leased: LeasedRun, ended: messages.Ended) -> None:
        error = _error_of(ended) if ended.raised else None
        why = ended.stopped or ("" if error is None else str(error))
        settlement, task = ended.settlement, leased.task
        if settlement is not None:  # the task may have been delivered again as the run ended
            settlement = structs.replace(settlement, id=task.id, token=task.token)
        work.settle(leased, settlement, error, why=why)

    def _settle_crash(self, work: ClaimedTask, leased: LeasedRun, plan: _KillPlan | None) -> None:
        assert self._executor is not None  # noqa: S101 - an executor is lost once
        executor, self._executor = self._executor, None
        how = executor.reap()
        held = work.held
        why = f"its executor {how}" if plan is None else f"its executor was killed: {plan.why}"
        outcome: Outcome = "crash" if plan is None else plan.outcome
        if held.stop is Cancelled and outcome == "crash":
            outcome = "cancelled"
        error = ExecutorDied(why if held.story is None else f"{why}; its lease was lost: {held.story.why}")
        work.settle(leased, _settlement(held, outcome, error), error, why=why)


class _Described(msgspec.Struct):
    message: str
    traceback: str = ""


def _end_executor(executor: GuardedProcess, *, within: float) -> str:
    executor.shutdown(within)
    return executor.reap()


def _lease_state(held: HeldLease) -> messages.LeaseState:
    term, stop, reason = held.term, held.stop, held.reason
    why = "" if reason is None or held.story is None else held.story.why
    return messages.LeaseState(
        granted_at=term.granted_at,
        heartbeats=term.heartbeats,
        run_until=held.run_until,
        stop=None if stop is None else stop.__name__,
        reason=reason,
        why=why,
    )


def _settlement(held: HeldLease, outcome: Outcome, error: ExecutorDied | None = None) -> Settlement:
    task = held.task
    described = None if error is None or outcome != "crash" else {"type": type(error).__name__, "message": str(error)}
    return Settlement(id=task.id, token=task.token, outcome=outcome, error=described, progress=held.progress)


def _error_of(ended: messages.Ended) -> Exception:
    if ended.settlement is None or not (error := ended.settlement.error):
        return HandlerFailed(ended.stopped or "")
    try:
        described = msgspec.json.decode(error, type=_Described)
    except msgspec.ValidationError:  # an error in a form of its own
        return HandlerFailed(bytes(error).decode(errors="replace"))
    return HandlerFailed(described.traceback or described.message)
