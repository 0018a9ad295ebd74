"""The chain of a task as a picture: each task to the right of the one that it came from."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from leasekit.server.console.rendering import MARKS
from leasekit.task import TaskInfo

_WIDE, _HIGH = 176, 40  # of a task
_GAP_X, _GAP_Y = 36, 12
_KIND, _ID = 22, 24  # characters that fit


class Node(NamedTuple):
    """A task of the chain."""

    id: str
    kind: str
    short: str
    status: str
    tone: str
    sign: str
    x: int
    y: int
    is_current: bool


class Edge(NamedTuple):
    """A line from a task to one that came from it."""

    path: str


class ChainPicture(NamedTuple):
    """The tasks, and the lines between them."""

    nodes: Sequence[Node]
    edges: Sequence[Edge]
    width: int
    height: int


def drawn(tasks: Sequence[TaskInfo], current: str, *, names: Mapping[str, str] | None = None) -> ChainPicture:
    """Draw these tasks of one chain; a parent that is not among them has no line.

    `names` are those of tasks that are not called by their kind, such as the steps of a flow.
    """
    places = _places(tasks)
    names = names or {}
    nodes = [
        _node(task, names.get(task.id, task.kind), *places[task.id], is_current=task.id == current) for task in tasks
    ]
    by_id = {node.id: node for node in nodes}
    edges = [
        _edge(by_id[task.parent], by_id[task.id])
        for task in tasks
        if task.parent in by_id and places[task.parent][0] < places[task.id][0]
    ]
    width = max(node.x for node in nodes) + _WIDE + 2
    height = max(node.y for node in nodes) + _HIGH + 2
    return ChainPicture(nodes, edges, width, height)


def _places(tasks: Sequence[TaskInfo]) -> dict[str, tuple[int, int]]:
    """Return column and row of each task: a task's first child goes on in its row, others begin rows below."""
    known = {task.id for task in tasks}
    below: dict[str | None, list[str]] = {}
    for task in tasks:
        is_below = task.parent in known and task.id not in (task.root, task.parent)
        below.setdefault(task.parent if is_below else None, []).append(task.id)
    places: dict[str, tuple[int, int]] = {}
    row = -1
    todo = [(task_id, 0, True) for task_id in reversed(below.get(None, []))]
    while todo:
        task_id, column, begins_row = todo.pop()
        row += begins_row
        places[task_id] = column, row
        children = below.pop(task_id, [])
        todo += [(child, column + 1, child != children[0]) for child in reversed(children)]
    for task in tasks:  # in a circle, which only a damaged store has
        places.setdefault(task.id, (0, row := row + 1))
    return places


def _node(task: TaskInfo, name: str, column: int, row: int, *, is_current: bool) -> Node:
    tone, sign = MARKS[task.status]
    x, y = 1 + column * (_WIDE + _GAP_X), 1 + row * (_HIGH + _GAP_Y)
    kind = name if len(name) <= _KIND else name[: _KIND - 1] + "…"
    short = task.id if len(task.id) <= _ID else "…" + task.id[1 - _ID :]
    return Node(task.id, kind, short, task.status, tone, sign, x, y, is_current)


def _edge(parent: Node, child: Node) -> Edge:
    start_x, start_y = parent.x + _WIDE, parent.y + _HIGH // 2
    end_x, end_y = child.x, child.y + _HIGH // 2
    middle = end_x - _GAP_X // 2
    return Edge(f"M{start_x} {start_y}H{middle}V{end_y}H{end_x}")
