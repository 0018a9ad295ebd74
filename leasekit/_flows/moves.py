"""Moves: where a flow goes after each run of a step.

Rule 1: a run that ends the step has one move: the record, and the call of the next step, which are written in one
        transaction. So the steps of a flow follow one another, and none is lost or taken twice.
Rule 2: a failure for which the flow has an edge is part of its course, and the task of the step is a success. A task
        that has failed is where a flow is stuck: its redrive resumes the flow.
Rule 3: attempts are counted here, crashes among them, so that a step whose workers die also has its edge.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from leasekit._flows.graph import Graph, Node
from leasekit._flows.records import Call, Failure, Mark, Record
from leasekit.errors import Fatal

LIMIT = 900  # branches of a mapped step: all are scheduled in one settlement, which has room for 1,000 tasks
_MEET = 100  # tasks that one task can run after


class Move(NamedTuple):
    """The end of a step, as it is written; no `record`: the step has failed, and the flow is stuck."""

    record: Record | None
    call: Call | None = None


class Planned(NamedTuple):
    """A task to be scheduled, with an id where others run after it."""

    call: Call
    id: str | None = None
    after: Sequence[str] = ()


def succeed(graph: Graph, call: Call, value: Any, *, choice: str | None = None) -> Move:
    """Return the move after a step that returned `value`, its next state; `choice`: the step that it chose."""
    node = graph.nodes[call.step]
    if call.item is not None:
        return Move(Record(edge="success", state=value))
    failure = _left(call)
    to = choice or node.on_success
    if to is None:
        return Move(Record(edge="success", state=value, failure=failure))
    record = Record(edge="success" if choice is None else "choice", to=to)
    return Move(record, _next(call, to, state=value, failure=failure))


def fail(graph: Graph, call: Call, error: Any) -> Move:
    """Return the move after a step that failed for good."""
    node = graph.nodes[call.step]
    if node.on_failure is None:
        return Move(None)
    failure = Failure(step=call.step, error=error)
    if call.item is not None:  # the join takes the edge, when the other branches are over
        return Move(Record(edge="failure", failure=failure))
    return _back(call, node.on_failure, failure)


def join(graph: Graph, call: Call, records: Sequence[Record]) -> Move | list[Any]:
    """Return what the branches returned, for the join's own step; or the move if one of them has failed.

    Raises `Fatal` if one has failed and the edge of its failure is gone: the code was changed meanwhile.
    """
    failed = [(item, record.failure) for item, record in enumerate(records) if record.failure is not None]
    if not failed or call.joins is None:
        return [record.state for record in records]
    item, first = failed[0]
    message = f"{len(failed)} of {len(records)} branches failed; the first of them is that of item {item}"
    to = graph.nodes[call.joins].on_failure if call.joins in graph.nodes else None
    if to is None:
        raise Fatal(f"step {call.joins!r}: {message}, and this version of the flow has no on_failure for it")
    failure = Failure(step=call.joins, error={"type": "BranchFailed", "message": message, "first": first.error})
    move = _back(call, to, failure)
    return move._replace(record=None if move.record is None else replace(move.record, is_skipped=True))


def _back(call: Call, to: str, failure: Failure) -> Move:
    """Return the move along an edge of failure. The first failure of a flow is the one that it keeps."""
    record = Record(edge="failure", to=to, failure=failure)
    return Move(record, _next(call, to, state=call.state, failure=call.failure or failure))


def _left(call: Call) -> Failure | None:
    """Return the failure that led here, unless it is made good by a success of this step."""
    return None if call.failure is not None and call.failure.step == call.step else call.failure


def _next(call: Call, to: str, *, state: Any, failure: Failure | None) -> Call:
    return Call(step=to, state=state, flow=call.flow, failure=failure, options=call.options)


def fan_out(graph: Graph, call: Call, items: Sequence[Any], ids: Sequence[str]) -> list[Planned]:
    """Return the tasks in place of the call of a mapped step: one for each item, and the join.

    `ids` has `len(items)` ids for the branches, and some for where they meet.
    """
    to = graph.nodes[call.step].on_success
    assert to is not None  # noqa: S101 - the graph was checked
    branches, spare = list(ids[: len(items)]), list(ids[len(items) :])
    planned = [
        Planned(replace(call, state=item, item=position, failure=None), task_id)
        for position, (item, task_id) in enumerate(zip(items, branches, strict=True))
    ]
    after: Sequence[str] = branches
    if len(branches) > _MEET:
        groups = [branches[start : start + _MEET] for start in range(0, len(branches), _MEET)]
        meeting = Call(step=call.step, flow=call.flow, is_meeting=True)
        after = spare[: len(groups)]
        planned += [Planned(meeting, task_id, group) for task_id, group in zip(after, groups, strict=True)]
    joining = replace(call, step=to, joins=call.step, branches=branches, failure=_left(call))
    return [*planned, Planned(joining, after=after)]


def wait(node: Node, mark: Mark, *, asked: float | None, began_at: float, now: float) -> tuple[Mark, float | None]:
    """Return the mark after a run that raised `NotYet`, and after how many seconds the next run begins.

    `asked` is what the step said itself. None: the next run would begin after `retry_until`, so the step has failed.
    """
    since = began_at if mark.since is None else mark.since
    seconds = asked if asked is not None else node.retry_every or 0.0
    is_over = node.retry_until is not None and now + seconds > since + node.retry_until
    return replace(mark, waits=mark.waits + 1, since=since), None if is_over else seconds


def is_last(node: Node, mark: Mark, attempt: int) -> bool:
    """Return whether a failure of this attempt is the end of the step."""
    return node.max_attempts is not None and attempt - mark.spent >= node.max_attempts


def has_crashed_too_often(node: Node, mark: Mark, attempt: int) -> bool:
    """Return whether more attempts have begun than the step has: the last ones ended without a word."""
    return node.max_attempts is not None and attempt - mark.spent > node.max_attempts
