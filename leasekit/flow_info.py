"""Flow info: a flow as a service knows it, from the tasks of its steps."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from leasekit._flows.records import KIND, Call, Failure, Mark, Record
from leasekit.task import Status, TaskInfo
from leasekit.task.words import REDRIVABLE

__all__ = ["FlowInfo", "FlowStatus", "StepInfo", "flow_info"]

T = TypeVar("T")

FlowStatus = Literal["running", "succeeded", "rolled_back", "failed", "cancelled", "ended"]
"""Where a flow is: see `FlowInfo.status`."""


class StepInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step of a flow, as it was or will be run; a step that the flow came to twice is there twice."""

    step: str
    """The name of the step."""
    task_id: str
    """The id of its task."""
    status: Status
    """The stage in the life of its task. A step whose failure the flow has an edge for is a *success*."""
    executions: int
    """How often its function was called."""
    edge: str | None = None
    """The edge that the flow took after it: *success*, *choice* or *failure*; None: none yet."""
    to: str | None = None
    """The step to which that edge leads; None: the flow or the branch ends here, or goes on here."""
    item: int | None = None
    """Of a step with `each`: the position of its item in the list."""
    error: Any = None
    """The error of its failure, or of its last attempt."""
    reason: str | None = None
    """Why its task is not ready, was dropped or cancelled, or is dead."""
    scheduled_at: datetime | None = None
    """When the flow came to the step."""
    ended_at: datetime | None = None
    """When the step ended."""


class FlowInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A flow, from its first step to the present."""

    id: str
    """The id of the flow, which is that of the task of its first step."""
    name: str
    """The name of the `Flow`."""
    status: FlowStatus
    """*running*: a step runs, or waits for its turn. *succeeded*, *rolled_back*: a step ended that no other follows,
    and in the second case a failure had led there. *failed*: a step failed for which there is no edge; the flow can
    be resumed. *cancelled*: by a cancel. *ended*: it succeeded or rolled back, and which of them cannot be read: its
    values are encoded, and this client has no codec for them."""
    steps: list[str]
    """The names of the steps that run or wait. A failed flow: those that failed."""
    workload: int
    """How many executions of steps there were. After a process was killed, the last one of its steps may be missing."""
    state: Any = None
    """The latest state of the flow as a whole, as JSON. Of a flow that has ended: its result."""
    failure: Failure | None = None
    """The failure that led to the present step or to the end, or the last error of the step that failed."""
    started_at: datetime | None = None
    """When the flow was started."""
    ended_at: datetime | None = None
    """When its last step ended; None: it goes on, or has failed."""
    history: list[StepInfo] = []
    """The steps in the order in which the flow came to them."""


class _Visit(Struct, frozen=True):
    """A task of a flow, and what its values say."""

    task: TaskInfo
    call: Call
    mark: Mark
    record: Record | None

    @property
    def is_live(self) -> bool:
        return not self.task.status.ended

    @property
    def executions(self) -> int:
        runs = self.task.attempt + self.mark.waits
        return max(0, runs - 1) if self.record is not None and self.record.is_skipped else runs

    @property
    def failure(self) -> Failure | None:
        if self.record is not None and self.record.failure is not None:
            return self.record.failure
        if self.task.error is not None and self.task.status is not Status.SUCCESS:
            return Failure(step=self.call.step, error=self.task.error)
        return self.call.failure


def flow_info(tasks: Sequence[TaskInfo], *, root: str) -> FlowInfo:
    """Return the flow whose steps are these tasks; `tasks` are in the order in which they were scheduled."""
    visits = [_visit(task) for task in tasks]
    steps = [visit for visit in visits if not visit.call.is_meeting]
    live = [visit for visit in steps if visit.is_live]
    branches = {visit.call.step for visit in live if visit.call.item is not None}
    present = [visit for visit in live if visit.call.joins not in branches]
    stuck = [visit for visit in steps if visit.task.status in REDRIVABLE]
    trunk = [visit for visit in steps if visit.call.item is None]
    last = (trunk or steps)[-1]
    status = _status(visits, last)
    shown = present or [visit for visit in stuck if visit.task.status is not Status.DROPPED] or stuck
    has_ended = status not in ("running", "failed")
    return FlowInfo(
        id=root,
        name=tasks[0].kind.removeprefix(KIND),
        status=status,
        steps=[] if has_ended else list(dict.fromkeys(visit.call.step for visit in shown)),
        workload=sum(visit.executions for visit in steps),
        state=last.call.state if last.record is None or last.record.to is not None else last.record.state,
        failure=None if status == "succeeded" else (shown[0] if shown and status == "failed" else last).failure,
        started_at=tasks[0].scheduled_at,
        ended_at=max((at for task in tasks if (at := task.ended_at)), default=None) if has_ended else None,
        history=[_step_info(visit) for visit in steps],
    )


def _status(visits: Sequence[_Visit], last: _Visit) -> FlowStatus:
    statuses = {visit.task.status for visit in visits}
    if any(visit.is_live for visit in visits):
        return "running"
    if Status.CANCELLED in statuses:
        return "cancelled"
    if statuses & REDRIVABLE:
        return "failed"
    if last.record is None:
        return "ended"
    return "succeeded" if last.record.failure is None else "rolled_back"


def _step_info(visit: _Visit) -> StepInfo:
    task, record, failure = visit.task, visit.record, visit.failure
    is_own = failure is not None and (failure is not visit.call.failure)
    return StepInfo(
        step=visit.call.step,
        task_id=task.id,
        status=task.status,
        executions=visit.executions,
        edge=None if record is None else record.edge,
        to=None if record is None else record.to,
        item=visit.call.item,
        error=failure.error if failure is not None and is_own and failure.step == visit.call.step else None,
        reason=task.reason,
        scheduled_at=task.scheduled_at,
        ended_at=task.ended_at,
    )


def _visit(task: TaskInfo) -> _Visit:
    call = _converted(task.payload, Call) or Call(step="?")
    record = _converted(task.result, Record) if task.status is Status.SUCCESS else None
    return _Visit(task, call, _converted(task.progress, Mark) or Mark(), record)


def _converted(value: Any, type_: type[T]) -> T | None:
    """Return a value of a task; None if there is none, or if it was not written by a flow."""
    try:
        return None if value is None else msgspec.convert(value, type_)
    except msgspec.ValidationError:
        return None
