"""`leasekit flow`: list, show, cancel, resume and draw flows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from leasekit.cli import options, output, target
from leasekit.cli.errors import spoken
from leasekit.cli.service import connected
from leasekit.client import Client
from leasekit.errors import LeasekitError
from leasekit.flows import Flow, FlowInfo, StepInfo

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLES = """\b
  leasekit flow list NAME         the flows of this name, the newest first
  leasekit flow show ID           where a flow is, and its steps
  leasekit flow cancel ID         cancel a flow; nothing is rolled back
  leasekit flow resume ID         go on from the step that failed
  leasekit flow draw MODULE:FLOW  draw the graph of a flow

\b
The list has, in a pipe, a line for each flow: id, status, present steps,
executions, start, end; - for an empty field. show prints a line for each
step: step, status, executions, edge and next step, error. With --json, JSON
lines.

\b
Examples:
  leasekit flow show web-1
  leasekit tasks --kind flow:create-vm --status fatal_failure
  leasekit flow draw vms:flow --mermaid > flow.mmd
"""

_ACTIONS = ("list", "show", "cancel", "resume", "draw")
_NAMES = {"list": "NAME", "draw": "MODULE:FLOW"}
_MOST_TASKS = 10_000  # tasks of steps among which flows are looked for

What = Annotated[str, typer.Argument(metavar="ACTION", help="list, show, cancel, resume or draw.", show_default=False)]
Of = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="With list: the name of flows; with draw: module:flow; else an id.", show_default=False
    ),
]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="With list: at most this number of flows.")]
Mermaid = Annotated[bool, typer.Option("--mermaid", help="With draw: for Mermaid, in place of text.")]


@spoken
def flow(
    what: What,
    of: Of,
    *,
    service: options.Service,
    limit: Limit = 20,
    mermaid: Mermaid = False,
    as_json: options.Json = False,
) -> None:
    """List, show, cancel, resume and draw flows.

    A flow is a graph of steps, each of which is a task of the kind flow:NAME.
    """
    _check(what, mermaid=mermaid)
    if what == "draw":
        typer.echo(target.load(of, Flow).draw("mermaid" if mermaid else "text"))
        return
    with connected(service) as client:
        match what:
            case "list":
                _print_list(_newest(client, of, limit), as_json=as_json)
            case "show":
                _print_one(_found(client, of), as_json=as_json)
            case "cancel":
                client.cancel_flow(of)
                _say(_found(client, of), as_json=as_json)
            case _:
                client.resume_flow(of)
                _say(_found(client, of), as_json=as_json)


def _check(what: str, *, mermaid: bool) -> None:
    """Raise for an action that does not exist, or that the option does not go with."""
    if what not in _ACTIONS:
        raise typer.BadParameter(f"{what!r} is no action: use {', '.join(_ACTIONS)}", param_hint="ACTION")
    if mermaid and what != "draw":
        raise typer.BadParameter("it goes with draw", param_hint="--mermaid")


def _newest(client: Client, name: str, limit: int) -> list[FlowInfo]:
    found, cursor, looked = list[FlowInfo](), None, 0
    while len(found) < limit and looked < _MOST_TASKS:
        page, cursor = client.flows(name, cursor=cursor, limit=100)
        found += page
        looked += 100
        if cursor is None:
            break
    return found[:limit]


def _found(client: Client, flow_id: str) -> FlowInfo:
    if (info := client.flow(flow_id)) is None:
        raise LeasekitError(f"there is no flow {flow_id!r}: it was never started, or was deleted after its end")
    return info


def _say(info: FlowInfo, *, as_json: bool) -> None:
    if as_json:
        output.print_json(info)
    at = f" at {', '.join(info.steps)}" if info.steps else ""
    executions = f"{info.workload} execution{'s' * (info.workload != 1)} of steps"
    typer.echo(output.plain(f"leasekit flow: {info.id!r} ({info.name}) is {info.status}{at}, {executions}"), err=True)


def _print_list(found: Sequence[FlowInfo], *, as_json: bool) -> None:
    if not as_json and output.on_terminal():
        output.console().print(_table(found) if found else "no flows of this name")
        return
    for info in found:
        if as_json:
            output.print_json(info)
        else:
            at, ended = output.moment(info.started_at), output.moment(info.ended_at)
            output.print_line([info.id, info.status, ", ".join(info.steps), info.workload, at, ended])


def _table(found: Sequence[FlowInfo]) -> "Table":
    lines = output.table("id", "status", "steps", "executions", "started")
    for info in found:
        started = output.ago(info.started_at) if info.started_at else "-"
        cells = info.id, info.status, ", ".join(info.steps), info.workload, started
        lines.add_row(*map(output.styled, cells))
    return lines


def _print_one(info: FlowInfo, *, as_json: bool) -> None:
    if as_json:
        output.print_json(info)
        return
    for step in info.history:
        name = step.step if step.item is None else f"{step.step} [{step.item}]"
        error = output.error_text(step.error) or step.reason or ""
        output.print_line([name, step.status, step.executions, _edge(step), error])
    _say(info, as_json=False)


def _edge(step: StepInfo) -> str:
    if step.edge is None:
        return ""
    return f"{step.edge}: {step.to}" if step.to else step.edge
