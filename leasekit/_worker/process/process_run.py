"""Process run: one run in an executor: what the executor was told, when it must be killed, how the run is settled."""

import logging
import math
from dataclasses import dataclass

import msgspec
from msgspec import Raw, structs

from leasekit._driver.keeping.held_lease import HeldLease
from leasekit._driver.reporting import encoding
from leasekit._leased_run import LeasedRun
from leasekit._worker.claimed_task import ClaimedTask
from leasekit._worker.process import messages
from leasekit._worker.process.guard import AHEAD
from leasekit._worker.process.guarded_process import GuardedProcess
from leasekit.errors import Cancelled, Draining, IdleTimeout, LeaseError, NotYet
from leasekit.task import Outcome, Settlement

logger = logging.getLogger("leasekit")


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
        self._task = leased.task  # as the handler sees it
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
            run = messages.Run(
                number=self.number, executions=self._leased.executions, task=self._leased.task, state=self._lease_state
            )
            self._executor.send(run)
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
        """Send the executor what is new of the task and its lease, and note when the run was first told to stop."""
        held = self.held  # another lease, if the task was delivered again
        held.listener = self._executor.ring
        if self._stopped_at is None and held.stop is not None:
            self._stopped_at = now
        task, state = self._leased.task, _lease_state(held)
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

    def report(self, progress: Raw) -> None:
        """Record a checkpoint. The executor has no codec: one that does not fit once it is encoded is left out."""
        connection = self._leased.connection
        assert connection is not None  # noqa: S101 - it came with the held lease
        try:
            coded = encoding.progress(progress, at_most=connection.max_progress, coding=connection.coding)
        except Exception as error:  # noqa: BLE001 - the handler goes on, and so must its process
            logger.warning("a checkpoint of task %s is not reported: %s", self.task_id, error)
        else:
            self.held.report(coded)

    def give_back(self) -> None:
        """Release a task whose handler was not started."""
        self._work.settle(self._leased, _settlement(self.held, "release"))

    def settle(self, ended: messages.Ended) -> None:
        if ended.not_yet is not None:
            message, after = ended.not_yet
            self._work.end(self._leased, NotYet(message, after=after))
            return
        error = _error_of(ended) if ended.raised else None
        why = ended.stopped or ("" if error is None else str(error))
        settlement: Settlement | None = None
        if ended.settlement is not None:
            settlement = self._coded(ended.settlement)
        self._work.settle(self._leased, settlement, error, why=why)

    def _coded(self, settlement: Settlement) -> Settlement:
        """Return a settlement of the executor as it is sent; one that cannot be encoded is a failure."""
        connection, task = self._leased.connection, self._leased.task
        assert connection is not None  # noqa: S101 - it came with the held lease
        try:
            settlement = encoding.from_executor(settlement, connection.coding)
        except Exception as error:  # noqa: BLE001 - of a codec; the run must be settled all the same
            described = encoding.described(error)
            settlement = Settlement(id=task.id, token=task.token, outcome="retry", error=described)
        # The task may have been delivered again as the run ended; a checkpoint was encoded when it came.
        return structs.replace(settlement, id=task.id, token=task.token, progress=self.held.progress)

    def settle_crash(self, how: str, culprit: "ProcessRun | None") -> None:
        """Settle a run whose executor has died: as planned if it was killed for this run, else as a crash.

        `culprit` is the run for which the executor was killed, this one or another; None: it died by itself, and `how`
        says how.
        """
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
