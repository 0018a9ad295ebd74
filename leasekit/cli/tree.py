"""`leasekit tree`: draw a chain of tasks, each below the task that it came from."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Annotated

import typer

from leasekit.cli import options, output
from leasekit.cli.errors import spoken
from leasekit.cli.service import connected
from leasekit.cli.tasks import all_tasks
from leasekit.errors import LeasekitError
from leasekit.task import Page, TaskInfo

EXAMPLES = """\b
A line for each task: id, kind, status, and the reason, if there is one.
With --json, a JSON line for each, with parent and root.

\b
Examples:
  leasekit tree order-7
  leasekit tree order-7 --json | jq -r 'select(.status == "dead").id'
  leasekit cancel --chain order-7
"""

_DEEPEST = 40  # levels that are drawn; what is below stands at the last one
_ONE, _LAST, _BAR = "├─ ", "└─ ", "│  "


@spoken
def tree(
    task_id: Annotated[str, typer.Argument(metavar="ID", help="A task of the chain, whichever.")],
    *,
    service: options.Service,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="At most this number of tasks; 0: all.")] = 1000,
    as_json: options.Json = False,
) -> None:
    """Draw a chain of tasks, each below the one it came from.

    A task comes from another if its run has scheduled it, with or without the settlement, or if it runs after it.
    """
    with connected(service) as client:
        info = client.get(task_id)
        if info is None or info.root is None:
            why = "there is no task" if info is None else "the service knows no chains, and nothing of the one of"
            raise LeasekitError(f"{why} {task_id!r}: look for it with 'leasekit tasks'")
        listed = partial(client.list_tasks, root=info.root)
        found = all_tasks(lambda cursor, size: _page(listed, cursor, size))
        tasks = list(found if limit == 0 else islice(found, limit))
        has_more = next(found, None) is not None
    for task, line in zip(*_in_order(tasks), strict=True):
        if as_json:
            output.print_json(task)
        else:
            typer.echo(line)
    if has_more:
        typer.echo("leasekit tree: there are more: raise --limit; 0 shows all", err=True)


def _page(listed: "partial[Page]", cursor: str | None, size: int) -> Page:
    return listed(cursor=cursor, limit=size)


def _in_order(tasks: Sequence[TaskInfo]) -> tuple[list[TaskInfo], list[str]]:
    """Return the tasks with each below its parent, and a line for each."""
    placed = list(_placed(tasks))
    columns = list(zip(*(fields for _, fields in placed), strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines = ["  ".join(map(str.ljust, fields, widths)).rstrip() for _, fields in placed]
    return [task for task, _ in placed], lines


def _placed(tasks: Sequence[TaskInfo]) -> Iterator[tuple[TaskInfo, list[str]]]:
    known = {task.id for task in tasks}
    below: dict[str | None, list[TaskInfo]] = {}
    for task in tasks:
        is_below = task.parent in known and task.id != task.root
        below.setdefault(task.parent if is_below else None, []).append(task)
    todo = [(task, "", "") for task in reversed(below.get(None, []))]
    while todo:
        task, first, others = todo.pop()
        yield task, [output.plain(text) for text in (first + task.id, task.kind, task.status, task.reason or "")]
        children = below.pop(task.id, [])
        others = others[: _DEEPEST * len(_BAR)]
        for child in reversed(children):
            mark, bar = (_LAST, "   ") if child is children[-1] else (_ONE, _BAR)
            todo.append((child, others + mark, others + bar))
