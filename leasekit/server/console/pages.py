"""The pages: what each asks the engine, and which template shows it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from leasekit.errors import Refused
from leasekit.server.console import chain_picture, flow_rows, plots, timeline
from leasekit.server.console.fleet import fleet
from leasekit.server.console.kind_rows import kind_rows, totals
from leasekit.server.console.rendering import query
from leasekit.server.console.visit import Visit
from leasekit.task import DEFAULTS, KindSettings, Name, Status, TaskInfo, effective
from leasekit.task import Page as ListPage
from leasekit.task.words import REDRIVABLE
from leasekit.wire import OneKind, TaskFilters

_TASKS = 50  # of one page
_CHAIN = 200  # tasks of a chain that are drawn
_PATIENCE = 0.06  # seconds for which a page looks for tasks that match; the next page goes on from there
_PERIODICS = 100
_NO_TASKS = ListPage(tasks=[], cursor=None)
_NAMES = 100  # of flows

_Values = Mapping[str, Any] | Response


@dataclass(frozen=True)
class Page:
    """A page: its name is the last part of its path."""

    name: str
    title: str
    template: str
    run: Callable[[Visit], Awaitable[_Values]]
    is_live: bool = True
    """Whether an open page is kept up to date."""
    needs_operate: bool = False
    """Whether the page is for operators only."""


class OneTask(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameter of the page of a task."""

    id: Name


class Sought(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The name that is looked for."""

    q: Name


class EventsSought(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The filters of the live page."""

    kind: Name | None = None
    task: Name | None = None


async def overview(visit: Visit) -> _Values:
    engine = visit.engine
    rows, here, gates, history = await asyncio.gather(
        kind_rows(engine), fleet(visit), engine.queries.gates(), engine.queries.history()
    )
    minutes, minute = plots.together(history.values()), int(engine.clock.peek() // 60)
    return {
        "rows": rows,
        "sums": totals(rows),
        "fleet": here,
        "gates": [gate for gate in gates if gate.kind is None],
        "faults": [fault for fault in (engine.room.lack, engine.commit.fault) if fault],
        "plot": plots.hour(minutes, minute),
        "recent": plots.recent(minutes, minute),
    }


async def tasks(visit: Visit) -> _Values:
    return await _listed(visit, {})


async def dead(visit: Visit) -> _Values:
    counts = await visit.engine.queries.counts()
    ended = {kind: {s: n for s, n in of.items() if s in REDRIVABLE} for kind, of in counts.items()}
    return {
        **await _listed(visit, {"status": "dead"}),
        "counts": sorted((kind, of) for kind, of in ended.items() if of),
    }


async def _listed(visit: Visit, presets: Mapping[str, str]) -> Mapping[str, Any]:
    """Return a page of tasks, the newest first unless the filters say otherwise; and whether more may follow."""
    given = {"newest": "true"} | dict(presets) | dict(visit.given)
    wanted, fault = TaskFilters(newest=True), None
    try:
        wanted = replace(visit, given=given).params(TaskFilters)
    except Refused as error:
        fault = str(error)
    filters = {name: getattr(wanted, name) for name in wanted.__struct_fields__}
    filters = {name: value for name, value in filters.items() if value is not UNSET}
    filters["limit"] = min(filters["limit"], _TASKS) if "limit" in visit.given else _TASKS
    counts = await visit.engine.queries.counts()
    is_none = wanted.status is not UNSET and not any(
        of.get(wanted.status) for kind, of in counts.items() if wanted.kind in (UNSET, kind)
    )
    page = (
        None
        if fault
        else _NO_TASKS
        if is_none
        else await visit.engine.queries.list_tasks(**filters, patience=_PATIENCE)
    )
    narrow = {name: given[name] for name in given if name not in {"cursor", "newest", "limit"}}
    return {
        "page": page,
        "fault": fault,
        "filters": dict.fromkeys(TaskFilters.__struct_encode_fields__, "") | given,
        "narrow": narrow,
        "kinds": sorted(counts)[:500],
        "statuses": list(Status),
        "is_waiting": wanted.status is UNSET or not wanted.status.ended,
        "is_ended": wanted.status is UNSET or wanted.status.ended,
        "is_redrivable": wanted.status in REDRIVABLE,
    }


async def task(visit: Visit) -> _Values:
    wanted = visit.params(OneTask)
    if (info := await visit.engine.queries.get(wanted.id)) is None:
        raise HTTPException(404, f"there is no task {wanted.id!r}: it was never scheduled, or its retention is over")
    of_chain = await _chain(visit, info)
    flow = flow_rows.flow_of(of_chain)
    steps = {} if flow is None else {step.task_id: step.step for step in flow.history}
    return {
        "title": info.id,
        "task": info,
        "life": timeline.drawn(info, visit.now),
        "chain": chain_picture.drawn(of_chain, info.id, names=steps) if len(of_chain) > 1 else None,
        "flow": flow,
        "is_redrivable": info.status in REDRIVABLE,
        "unhandled": await _is_unhandled(visit, info),
    }


async def _chain(visit: Visit, info: TaskInfo) -> Sequence[TaskInfo]:
    if info.root is None:
        return [info]
    return (await visit.engine.queries.list_tasks(root=info.root, limit=_CHAIN)).tasks


async def _is_unhandled(visit: Visit, info: TaskInfo) -> bool:
    """Return whether a task waits, and no worker is known that runs tasks of its kind."""
    if info.status.ended or (info.worker is not None and info.lease_until is not None):
        return False
    return not await visit.engine.fleet.is_handled(info.kind)


async def kind(visit: Visit) -> _Values:
    name, engine = visit.params(OneKind).kind, visit.engine
    rows, kinds, gates, here, history = await asyncio.gather(
        kind_rows(engine, only=name),
        engine.queries.kinds(),
        engine.queries.gates(),
        fleet(visit),
        engine.queries.history(minutes=1440, kind=name),
    )
    info = next((each for each in kinds if each.kind == name), None)
    settings = KindSettings() if info is None else info.settings
    complete = effective(settings, DEFAULTS)
    return {
        "title": name,
        "row": rows[0],
        "day": plots.day(history.get(name, {}), int(engine.clock.peek() // 60)),
        "info": info,
        "settings": _settings(settings, complete),
        "gate": next((gate for gate in gates if gate.kind == name), None),
        "workers": [each for each in here.workers if each.kinds is None or name in each.kinds],
    }


def _settings(settings: KindSettings, complete: Any) -> list[tuple[str, Any, bool]]:
    """Return each setting: its name, its value, and whether the kind sets it."""
    found: list[tuple[str, Any, bool]] = []
    for name in KindSettings.__struct_fields__:
        value, is_own = getattr(settings, name), getattr(settings, name) is not UNSET
        found.append((name, value if is_own else getattr(complete, name, None), is_own))
    return found


async def workers(visit: Visit) -> _Values:
    return {"fleet": await fleet(visit)}


async def periodic(visit: Visit) -> _Values:
    found = await visit.engine.queries.periodics(limit=_PERIODICS)
    details = await asyncio.gather(*(visit.engine.queries.periodic(each.name) for each in found))
    return {"periodics": [each for each in details if each is not None], "most": _PERIODICS}


async def live(visit: Visit) -> _Values:
    return {"wanted": visit.params(EventsSought)}


class FlowsSought(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameter of the page of flows."""

    name: Name | None = None


async def flows(visit: Visit) -> _Values:
    counts = await visit.engine.queries.counts()
    names = sorted(kind.removeprefix(flow_rows.KIND) for kind in counts if kind.startswith(flow_rows.KIND))
    name = visit.params(FlowsSought).name or next(iter(names), None)
    found = [] if name is None else await flow_rows.newest(visit.engine, name)
    return {"names": names[:_NAMES], "name": name, "flows": found}


class AuditPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameter of a page of the audit log."""

    cursor: Annotated[str, Meta(max_length=64, pattern=r"^[0-9a-f-]+\Z")] | None = None


async def audit(visit: Visit) -> _Values:
    part = visit.params(AuditPart)
    return {"page": await visit.engine.queries.audit(cursor=part.cursor, limit=100), "cursor": part.cursor}


async def find(visit: Visit) -> _Values:
    """Lead to what has this name: a task, a kind, a worker, or a periodic task."""
    text, engine = visit.params(Sought).q.strip(), visit.engine
    if await engine.queries.get(text) is not None:
        return RedirectResponse(f"task{query(id=text)}", 303)
    if text in await engine.queries.counts():
        return RedirectResponse(f"kind{query(kind=text)}", 303)
    if await engine.fleet.worker(text) is not None:
        return RedirectResponse(f"tasks{query(worker=text)}", 303)
    if text.isascii() and len(text) <= 100 and await engine.queries.periodic(text) is not None:
        return RedirectResponse("periodic", 303)
    return {"text": text}


NAV = (
    ("", "Overview"), ("tasks", "Tasks"), ("dead", "Dead letters"), ("workers", "Workers"), ("periodic", "Periodic"),
    ("flows", "Flows"), ("live", "Live"), ("audit", "Audit"),
)  # fmt: skip
"""The pages that each page leads to, and what they are called there."""

_ALL = (
    Page("", "Overview", "overview.html", overview),
    Page("tasks", "Tasks", "tasks.html", tasks),
    Page("task", "Task", "task.html", task),
    Page("kind", "Kind", "kind.html", kind),
    Page("dead", "Dead letters", "dead.html", dead),
    Page("workers", "Workers and nodes", "workers.html", workers),
    Page("periodic", "Periodic tasks", "periodic.html", periodic),
    Page("flows", "Flows", "flows.html", flows),
    Page("live", "Live", "live.html", live, is_live=False),
    Page("audit", "Audit log", "audit.html", audit, needs_operate=True),
    Page("find", "Not found", "find.html", find, is_live=False),
)
PAGES: Mapping[str, Page] = {page.name: page for page in _ALL}
"""All pages, by their names."""
