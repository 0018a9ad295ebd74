"""Acts: what the console changes, each with a page before it that says what will happen, and counts first.

Rule 1: a page never acts. An act is a form that is sent (POST) from the console's own pages, and is judged again then.
Rule 2: an act on many tasks goes in steps of bounded time. A page between them says how far it has come, and goes on.
Rule 3: an act that is sent twice is done once, where the service can tell: the form has the id of the act.
"""

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Struct
from starlette.exceptions import HTTPException

from leasekit.errors import Refused
from leasekit.periodic import PeriodicInfo, PeriodicName
from leasekit.server.console.kind_rows import kind_rows
from leasekit.server.console.rendering import number, query
from leasekit.server.console.visit import Visit
from leasekit.server.roles import periodic
from leasekit.server.roles.gates import Gated
from leasekit.task import Name, Scheduled, TaskInfo
from leasekit.wire import ChainRequest, GateRequest, RedriveRequest, RescheduleRequest

_DURATIONS = (("", "until it is resumed"), ("600", "10 minutes"), ("3600", "an hour"), ("14400", "4 hours"),
              ("86400", "a day"))  # fmt: skip


class Field(NamedTuple):
    """A field of the form of an act."""

    name: str
    label: str
    value: str = ""
    choices: Sequence[tuple[str, str]] = ()
    hint: str = ""


class Plan(NamedTuple):
    """The announcement of an act: what it will do, and what must be filled in."""

    title: str
    will: Sequence[str]
    """Sentences that say what will happen."""
    button: str
    back: str
    """The page to which the way leads back."""
    fields: Sequence[Field] = ()
    hidden: Mapping[str, str] = {}
    """Fields that the form sends besides those of the request."""
    is_possible: bool = True
    is_danger: bool = False
    is_form: bool = False
    """Whether the fields come first, and are sent to a page that says what will happen."""


class Done(NamedTuple):
    """The outcome of an act."""

    page: str
    """The page that shows it."""
    said: str
    """A word of `SAID`."""
    tasks: int | None = None


class Unfinished(NamedTuple):
    """A part of an act on many tasks, and what the form of the next part says."""

    title: str
    tasks: int
    form: Mapping[str, str]


SAID = {
    "cancelled": "Cancelled: a task that runs was asked to stop.",
    "redriven": "Redriven: a new life begins.",
    "due-now": "Due now.",
    "paused": "Paused.",
    "opened": "Open again.",
    "set": "Changed.",
    "triggered": "Triggered.",
    "resumed": "Resumed.",
    "draining": "It drains: it finishes what it holds, and stops.",
    "undrained": "Its drain is taken back.",
    "many-cancelled": "tasks were cancelled, or asked to stop.",
    "many-redriven": "tasks were redriven.",
    "many-purged": "tasks were purged.",
    "many-due-now": "tasks are due now.",
}
"""What the page after an act says, by a word in its address: no text comes from there."""


class Act(NamedTuple):
    """An act: the class of its parameters, what it will do, and how it is done."""

    params: type[Struct]
    plan: Callable[[Visit, Any], Awaitable[Plan]]
    run: Callable[[Visit, Any], Awaitable[Done | Unfinished]]
    kind: Callable[[Visit, Any], Awaitable[str | None]]
    """The kind whose tasks are changed; None: any kind's."""


class OneTask(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: Name
    act_id: Name | None = None


class PausedGate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: Name | None = None
    collection: Name | None = None
    duration: Annotated[float, Meta(ge=1, le=365 * 86400)] | None = None
    reason: Annotated[str, Meta(max_length=500, pattern=r"^[^\x00-\x1f\x7f]*\Z")] | None = None


class OpenedGate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: Name | None = None
    collection: Name | None = None


class OneWorker(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Name


class OnePeriodic(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: PeriodicName
    at: Annotated[datetime, Meta(tz=True)] | None = None


async def _task(visit: Visit, wanted: OneTask) -> TaskInfo:
    info = await visit.engine.queries.get(wanted.id)
    if info is None:
        raise HTTPException(404, f"there is no task {wanted.id!r}")
    return info


async def _kind_of_task(visit: Visit, wanted: OneTask) -> str | None:
    return (await _task(visit, wanted)).kind


async def _kind_given(visit: Visit, wanted: Any) -> str | None:
    kind: str | None = wanted.kind
    return kind


async def _any_kind(visit: Visit, wanted: Any) -> None:
    return None


async def _kind_of_periodic(visit: Visit, wanted: OnePeriodic) -> str | None:
    return (await _periodic(visit, wanted)).task.kind


def _page_of(wanted: OneTask) -> str:
    return f"task{query(id=wanted.id)}"


async def plan_cancel(visit: Visit, wanted: OneTask) -> Plan:
    info = await _task(visit, wanted)
    will = ["It has ended: there is nothing to cancel."]
    if not info.status.ended:
        will = ["It waits: it ends at once, and never runs."]
        if info.lease_until is not None:
            will = [f"It runs in worker {info.worker!r}, which is asked to stop it, and learns of it within seconds."]
    return Plan(f"Cancel {info.id}?", will, "Cancel the task", _page_of(wanted), is_possible=not info.status.ended)


async def cancel(visit: Visit, wanted: OneTask) -> Done:
    (verdict,) = await visit.engine.cancel([wanted.id], note=visit.note("tasks.cancel", target=wanted.id))
    if verdict.verdict == "gone":
        raise Refused(f"the task {wanted.id!r} has ended by now, or is unknown: load its page again")
    return Done(_page_of(wanted), "cancelled")


async def plan_run_now(visit: Visit, wanted: OneTask) -> Plan:
    info = await _task(visit, wanted)
    waits = not info.status.ended and info.lease_until is None
    will = ["It is due at once. Gates, limits, and other tasks for which it waits hold as before."]
    if not waits:
        will = [f"It is {info.status}: only a task that waits can be made due."]
    hidden = {"act_id": uuid.uuid4().hex}
    return Plan(f"Run {info.id} now?", will, "Make it due", _page_of(wanted), hidden=hidden, is_possible=waits)


async def run_now(visit: Visit, wanted: OneTask) -> Done:
    request = RescheduleRequest(delay=0, request_id=wanted.act_id)
    note = visit.note("task.reschedule", target=wanted.id, fields=request)
    if await visit.engine.operations.reschedule(wanted.id, request, by=visit.by, note=note) is None:
        raise HTTPException(404, f"there is no task {wanted.id!r}")
    return Done(_page_of(wanted), "due-now")


async def plan_redrive(visit: Visit, wanted: OneTask) -> Plan:
    dry = await visit.engine.operations.redrive(RedriveRequest(ids=[wanted.id], dry_run=True))
    verdict = dry.tasks[0]
    can = verdict.verdict == "redrivable"
    will = ["Its attempts and crashes begin anew, and it is due at once. Its history stays."]
    if not can:
        will = [f"It cannot be redriven: {verdict.reason or verdict.verdict}."]
    hidden = {"act_id": uuid.uuid4().hex}
    return Plan(f"Redrive {wanted.id}?", will, "Redrive", _page_of(wanted), hidden=hidden, is_possible=can)


async def redrive(visit: Visit, wanted: OneTask) -> Done:
    request = RedriveRequest(ids=[wanted.id], redrive_id=wanted.act_id, worker=visit.by)
    note = visit.note("tasks.redrive", target=wanted.id, fields=request)
    (verdict,) = (await visit.engine.operations.redrive(request, note=note)).tasks
    if verdict.verdict != "redriven":
        raise Refused(f"the task {wanted.id!r} cannot be redriven: {verdict.reason or verdict.verdict}")
    return Done(_page_of(wanted), "redriven")


async def plan_cancel_chain(visit: Visit, wanted: OneTask) -> Plan:
    info = await _task(visit, wanted)
    page = await visit.engine.queries.list_tasks(root=info.root, limit=1000)
    left = sum(not task.status.ended for task in page.tasks)
    more = ", or more" if page.cursor else ""
    will = [
        f"{number(left)}{more} of its tasks have not ended.",
        "Those that wait end at once, and those that run are asked to stop.",
        "No task is added to the chain any longer.",
    ]
    return Plan(f"Cancel the chain of {info.root}?", will, "Cancel the chain", _page_of(wanted), is_danger=True)


async def cancel_chain(visit: Visit, wanted: OneTask) -> Done:
    cursor, count = None, 0
    while True:
        note = visit.note("chain.cancel", target=wanted.id)
        answer = await visit.engine.cancel_chain(ChainRequest(id=wanted.id, cursor=cursor), note=note)
        count += len(answer.tasks)
        if (cursor := answer.cursor) is None:
            return Done(_page_of(wanted), "many-cancelled", count)


def _page_of_gate(wanted: PausedGate | OpenedGate) -> str:
    return f"kind{query(kind=wanted.kind)}" if wanted.kind is not None else "./"


async def plan_pause(visit: Visit, wanted: PausedGate) -> Plan:
    gated = Gated.one_of(wanted.kind, wanted.collection)
    will = ["From now on, its tasks are not started. They keep their order, and spend no attempt."]
    if wanted.kind is not None:
        (row,) = await kind_rows(visit.engine, only=wanted.kind)
        will += [
            f"{number(row.waiting)} wait, {number(row.backlog.due)} of them due: they go on waiting.",
            f"{number(row.running)} run: they are left alone.",
        ]
    fields = [
        Field("duration", "For how long", f"{wanted.duration:g}" if wanted.duration else "", _DURATIONS),
        Field("reason", "Why, for those who ask what the tasks wait for", wanted.reason or ""),
    ]
    title = f"Pause the {gated.scope} {gated.name}?"
    return Plan(title, will, f"Pause the {gated.scope}", _page_of_gate(wanted), fields)


async def pause(visit: Visit, wanted: PausedGate) -> Done:
    gated = Gated.one_of(wanted.kind, wanted.collection)
    request = GateRequest(duration=wanted.duration, reason=wanted.reason)
    note = visit.note(f"{gated.scope}.pause", target=gated.name, fields=request)
    await visit.engine.operations.set_gate(gated.closed(request, visit.by), note=note)
    return Done(_page_of_gate(wanted), "paused")


async def plan_open(visit: Visit, wanted: OpenedGate) -> Plan:
    gated = Gated.one_of(wanted.kind, wanted.collection)
    will = ["Its due tasks are started again, the oldest first."]
    if wanted.kind is not None:
        (row,) = await kind_rows(visit.engine, only=wanted.kind)
        will.append(f"{number(row.backlog.due)} are due.")
    return Plan(f"Resume the {gated.scope} {gated.name}?", will, "Resume", _page_of_gate(wanted))


async def open_gate(visit: Visit, wanted: OpenedGate) -> Done:
    gated = Gated.one_of(wanted.kind, wanted.collection)
    note = visit.note(f"{gated.scope}.open", target=gated.name)
    await visit.engine.operations.set_gate(gated.opened(visit.by), note=note)
    return Done(_page_of_gate(wanted), "opened")


async def plan_drain(visit: Visit, wanted: OneWorker) -> Plan:
    worker = await visit.engine.fleet.worker(wanted.name)
    if worker is None:
        raise HTTPException(404, f"there is no worker {wanted.name!r}: it holds nothing, and has not called lately")
    count = f"{number(worker.running)} {'task' if worker.running == 1 else 'tasks'}"
    will = [
        "From now on, it is granted no task. The others of its kinds go on.",
        f"It holds {count}: those that run go on to their ends, however long that takes, and the others are given back."
        if worker.running
        else "It holds no task.",
        "Then it stops, with exit code 0. What restarts whatever has ended starts a new one, which is not drained.",
    ]
    return Plan(f"Drain {wanted.name}?", will, "Drain the worker", "workers")


async def drain(visit: Visit, wanted: OneWorker) -> Done:
    note = visit.note("worker.drain", target=wanted.name)
    if await visit.engine.operations.drain(wanted.name, by=visit.by, note=note) is None:
        raise HTTPException(404, f"there is no worker {wanted.name!r}: it holds nothing, and has not called lately")
    return Done("workers", "draining")


async def plan_undrain(visit: Visit, wanted: OneWorker) -> Plan:
    will = ["It is granted tasks again. If it has heard of its drain, it stops nevertheless."]
    return Plan(f"Take the drain of {wanted.name} back?", will, "Take it back", "workers")


async def undrain(visit: Visit, wanted: OneWorker) -> Done:
    note = visit.note("worker.undrain", target=wanted.name)
    await visit.engine.operations.undrain(wanted.name, by=visit.by, note=note)
    return Done("workers", "undrained")


async def _periodic(visit: Visit, wanted: OnePeriodic) -> PeriodicInfo:
    info = await visit.engine.queries.periodic(wanted.name)
    if info is None:
        raise HTTPException(404, f"there is no periodic task {wanted.name!r}")
    return info


async def plan_pause_periodic(visit: Visit, wanted: OnePeriodic) -> Plan:
    info = await _periodic(visit, wanted)
    will = ["It fires only on request, until it is resumed. What falls into the pause is not made up for."]
    will += ["It is paused already."] if info.is_paused else []
    return Plan(f"Pause {wanted.name}?", will, "Pause", "periodic")


async def pause_periodic(visit: Visit, wanted: OnePeriodic) -> Done:
    return await _change(visit, periodic.Pause(wanted.name, True, visit.by), "pause", "paused")  # noqa: FBT003 - a field


async def plan_resume_periodic(visit: Visit, wanted: OnePeriodic) -> Plan:
    await _periodic(visit, wanted)
    return Plan(f"Resume {wanted.name}?", ["It fires by itself again, from its next instant on."], "Resume", "periodic")


async def resume_periodic(visit: Visit, wanted: OnePeriodic) -> Done:
    return await _change(visit, periodic.Pause(wanted.name, False, visit.by), "resume", "resumed")  # noqa: FBT003 - a field


async def plan_trigger(visit: Visit, wanted: OnePeriodic) -> Plan:
    info = await _periodic(visit, wanted)
    will = [f"A task of the kind {info.task.kind} is scheduled now, whatever the overlap policy says."]
    will += ["It is paused, and stays so."] if info.is_paused else []
    hidden = {"at": visit.now.isoformat()}  # a form that is sent twice makes one task
    return Plan(f"Trigger {wanted.name} now?", will, "Trigger", "periodic", hidden=hidden)


async def trigger(visit: Visit, wanted: OnePeriodic) -> Done:
    at = None if wanted.at is None else wanted.at.timestamp()
    return await _change(visit, periodic.Trigger(wanted.name, at, visit.by), "trigger", "triggered")


async def _change(visit: Visit, change: periodic.Change, act: str, said: str) -> Done:
    note = visit.note(f"periodic.{act}", target=change.name)
    answer = await visit.engine.operations.change_periodic(change, note=note)
    if answer is None:
        raise HTTPException(404, f"there is no periodic task {change.name!r}")
    return Done(f"task{query(id=answer.id)}" if isinstance(answer, Scheduled) else "periodic", said)


ACTS: Mapping[str, Act] = {
    "cancel": Act(OneTask, plan_cancel, cancel, _kind_of_task),
    "run-now": Act(OneTask, plan_run_now, run_now, _kind_of_task),
    "redrive": Act(OneTask, plan_redrive, redrive, _kind_of_task),
    "cancel-chain": Act(OneTask, plan_cancel_chain, cancel_chain, _kind_of_task),
    "pause": Act(PausedGate, plan_pause, pause, _kind_given),
    "open": Act(OpenedGate, plan_open, open_gate, _kind_given),
    "drain": Act(OneWorker, plan_drain, drain, _any_kind),
    "undrain": Act(OneWorker, plan_undrain, undrain, _any_kind),
    "pause-periodic": Act(OnePeriodic, plan_pause_periodic, pause_periodic, _kind_of_periodic),
    "resume-periodic": Act(OnePeriodic, plan_resume_periodic, resume_periodic, _kind_of_periodic),
    "trigger-periodic": Act(OnePeriodic, plan_trigger, trigger, _kind_of_periodic),
}
"""The acts on one task, kind, collection, worker or periodic task, by their names in addresses."""
