"""Flows, as the pages show them: from the tasks of their steps."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from leasekit.errors import Refused
from leasekit.flow_info import FlowInfo, flow_info
from leasekit.server.engine import Engine
from leasekit.task import TaskInfo
from leasekit.wire import decode_value

KIND = "flow:"
"""How the kinds of steps begin."""
_STEPS = 30  # of the newest steps of a flow: their flows are listed
_LONGEST = 200  # steps of one flow that are looked at


async def newest(engine: Engine, name: str) -> list[FlowInfo]:
    """Return the flows of the newest steps of this name, the newest first."""
    page = await engine.queries.list_tasks(kind=KIND + name, newest=True, limit=_STEPS, patience=1.0)
    roots = list(dict.fromkeys(task.root or task.id for task in page.tasks))
    pages = await asyncio.gather(*(engine.queries.list_tasks(root=root, limit=_LONGEST) for root in roots))
    return [info for chain in pages if (info := flow_of(chain.tasks)) is not None]


def flow_of(tasks: Sequence[TaskInfo]) -> FlowInfo | None:
    """Return the flow of these tasks; None: they are of no flow, or its values cannot be read."""
    if not tasks or not tasks[0].kind.startswith(KIND):
        return None
    try:
        return flow_info([_decoded(task) for task in tasks if task.kind == tasks[0].kind], root=tasks[0].id)
    except (msgspec.MsgspecError, Refused, ValueError, KeyError, TypeError):  # values that no flow has written
        return None


def _decoded(task: TaskInfo) -> TaskInfo:
    names = ("payload", "progress", "result", "error")
    return replace(task, **{name: _value(getattr(task, name)) for name in names})


def _value(value: Any) -> Any:
    return decode_value(value) if isinstance(value, Raw) else value
