"""Process run: one run in an executor: what the executor was told, when it must be killed, how the run is settled."""

import math
from dataclasses import dataclass

import msgspec
from msgspec import structs

from leasekit._driver.keeping.held_lease import HeldLease
from leasekit._leased_run import LeasedRun
from leasekit._worker.claimed_task import ClaimedTask
from leasekit._worker.process import messages
from leasekit._worker.process.guard import AHEAD
from leasekit._worker.process.guarded_process import GuardedProcess
from leasekit.errors import Cancelled, Draining, IdleTimeout, LeaseError
from leasekit.task import Outcome, Settlement


class ExecutorDied(Exception):
    """The process that ran a handler is dead."""


class HandlerFailed(Exception):
    """A handler in an executor raised this error."""


@dataclass(frozen=True, slots=True)
class KillPlan:
    """The instant at which an executor is killed, and the reason."""

    at: float
    why: str
    outcome: Outcome = "crash"


_TOLD: dict[type[LeaseError], tuple[str, Outcome]] = {
    Cancelled: ("it was cancelled, and its handler did not end when told to", "cancelled"),
    IdleTimeout: ("its handler reported no progress for {} s, and did not end when told to", "crash"),
    Draining: ("the worker stops, and its handler did not end when told to", "release"),
}


class ProcessRun:
    """A run in an executor, whose guard is asked first. All is for the thread of its place."""

    def __init__(self, executor: GuardedProcess, work: ClaimedTask, leased: LeasedRun, now: float) -> None:
        self.number = executor.ask()
        self.asked_at = now
        self.begun = False  # the executor was told to run the handler
        self.executed: KillPlan | None = None
        self._stopped_at: float | None = None  # when the place saw that the handler was told to stop
        self._work = work
        self._leased = leased
        self._executor = executor
        self._task = work.held.task
        self._lease_state: messages.LeaseState = _lease_state(work.held)
        self._stacks_shown = False

    @property
    def task_id(self) -> str:
        return self._task.id

    @property
    def held(self) -> HeldLease:
        return self._work.held

    def begin(self) -> bool:
        """Have the executor run the handler. False: its payload is not JSON, and the run is settled."""
        try:
            self._executor.send(messages.Run(number=self.number, task=self._task, state=self._lease_state))
        except (TypeError, ValueError) as error:  # the payload of a backend in memory may not be JSON
            self._work.end(self._leased, error)
            return False
        self.begun = True
        return True

    def step(self, now: float, ends_at: float | None) -> float:
        """Tell the executor what has changed, and kill it if the handler must have ended. Return the next instant.

        `ends_at` is when the worker ends all its executors.
        """
        self._tell_changes(now)
        return self._execute(self._kill_plan(ends_at), now)

    def _tell_changes(self, now: float) -> None:
        held = self.held  # another lease, if the task was delivered again
        held.listener = self._executor.ring
        if self._stopped_at is None and held.stop is not None:
            self._stopped_at = now
        task, state = held.task, _lease_state(held)
        if task is not self._task:
            self._executor.send(messages.LeaseChanged(run=self.number, task=task, state=state))
        elif state != self._lease_state:
            self._executor.send(messages.LeaseChanged(run=self.number, state=state))
        self._task, self._lease_state = task, state

    def _execute(self, plan: KillPlan | None, now: float) -> float:
        """Show the stacks, or kill the executor, when `plan` says so; return the instant of the next step."""
        if plan is None or self.executed is not None:
            return math.inf
        show_at = plan.at - min(1.0, self.held.term.heartbeats.grace / 2)
        if not self._stacks_shown and now >= show_at:
            self._stacks_shown = True
            self._executor.show_stacks()
        if now >= plan.at:
            self.executed = plan
            self._executor.kill()
            return math.inf
        return plan.at if self._stacks_shown else show_at

    def _kill_plan(self, ends_at: float | None) -> KillPlan | None:
        """Plan when to kill a handler that must end: a little before the guard does, so that the reason is reported."""
        held = self.held
        grace = held.term.heartbeats.grace
        early = AHEAD + min(0.02, grace / 5)
        found: list[KillPlan] = []
        if ends_at is not None:
            found.append(KillPlan(ends_at, "the worker ended before its handler had", "release"))
        if held.lost:
            at = held.ends_at if held.reason is not None else held.term.trusted_until
            found.append(KillPlan(at - early, f"{held.loss()}; its handler did not end in time"))
        if self._stopped_at is not None and held.stop is not None:
            why, outcome = _TOLD[held.stop]
            found.append(KillPlan(self._stopped_at + grace - early, why.format(held.idle_timeout), outcome))
        return min(found, key=lambda plan: plan.at, default=None)

    def give_back(self) -> None:
        """Release a task whose handler was not started."""
        self._work.settle(self._leased, _settlement(self.held, "release"))

    def settle(self, ended: messages.Ended) -> None:
        error = _error_of(ended) if ended.raised else None
        why = ended.stopped or ("" if error is None else str(error))
        settlement, task = ended.settlement, self._leased.task
        if settlement is not None:  # the task may have been delivered again as the run ended
            settlement = structs.replace(settlement, id=task.id, token=task.token)
        self._work.settle(self._leased, settlement, error, why=why)

    def settle_crash(self, how: str, culprit: "ProcessRun | None") -> None:
        """Settle a run whose executor has died, which was killed for the run `culprit`, or by another cause."""
        held, plan = self.held, self.executed
        if plan is not None:
            why = f"its executor was killed: {plan.why}"
        elif culprit is not None and culprit.executed is not None:
            why = f"its executor was killed for another task in it, {culprit.task_id}: {culprit.executed.why}"
        else:
            why = f"its executor {how}"
        outcome: Outcome = "crash" if plan is None else plan.outcome
        if held.stop is Cancelled and outcome == "crash":
            outcome = "cancelled"
        error = ExecutorDied(why if held.story is None else f"{why}; its lease was lost: {held.story.why}")
        self._work.settle(self._leased, _settlement(held, outcome, error), error, why=why)


class _Described(msgspec.Struct):
    message: str
    traceback: str = ""


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
