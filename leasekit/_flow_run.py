"""Run of a step: what comes before and after the function of a step, in a worker.

The moves are decided in `_flows`. This module calls the function, reads the clock, and settles the task.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, Unpack

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from leasekit._driver.reporting import encoding
from leasekit._driver.retrying import repeat_until_answered
from leasekit._flows import moves
from leasekit._flows.graph import Graph, Node
from leasekit._flows.moves import Move, Planned
from leasekit._flows.records import KIND, Call, Failure, Mark, Record
from leasekit._leased_run import log_run
from leasekit.errors import Fatal, LeaseError, NotYet
from leasekit.ids import uuid7s
from leasekit.lease import Lease
from leasekit.task import NewTask, Task, TaskInfo, TaskOptions

S = TypeVar("S")

_ELSEWHERE = 15.0  # seconds until a step that this worker does not know is claimed again, by a newer worker perhaps
_AT_ONCE = 20  # branches whose results are asked for at once
COUNTLESS: dict[str, Any] = {"max_attempts": 1_000_000, "max_crashes": 1_000_000}  # the flow counts
"""Options of the task of a step, so that the service ends none by itself."""


class Goto(Struct, Generic[S], frozen=True):
    """The choice of a step: see `Flow.goto`."""

    step: str
    """The name of the step that is next."""
    state: S
    """Its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredStep:
    """A step as it was declared: its place in the graph, and its function."""

    node: Node
    function: Callable[..., Any]
    schema: Any
    takes_step: bool
    is_async: bool
    each: Callable[[Any], Iterable[Any]] | None
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a flow that is declared in full."""

    graph: Graph
    declared: Mapping[str, DeclaredStep]
    schema: Any


class Step:
    """The run of a step: what it knows of the flow besides the state, and its lease."""

    def __init__(self, call: Call, mark: Mark, held: Lease, results: Sequence[Any]) -> None:
        self._call, self._mark, self._held = call, mark, held
        self.results = list(results)
        """Of a step that joins branches: the values that these returned, in the order of the items, as JSON."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._call.step!r} of flow {self.flow_id!r}>"

    @property
    def flow_id(self) -> str:
        """The id of the flow."""
        return self._call.flow or self.task.id

    @property
    def task(self) -> Task:
        """The leased task of this step. A step that the flow comes to twice has a task of its own each time."""
        return self._held.task

    @property
    def fence(self) -> int:
        """A number that grows with every claim of this task: systems downstream refuse writes with a smaller one."""
        return self._held.fence

    @property
    def execution(self) -> int:
        """1 for the first call of the function, and one more for each later one: after `NotYet`, a failure, a crash."""
        return self._held.attempt + self._mark.waits

    @property
    def failure(self) -> Failure | None:
        """The failure that led here, with the `step` and its `error`; None on the way forward."""
        return self._call.failure

    @property
    def checkpoint(self) -> Any:
        """The value that an earlier execution reported with `progress`; None if there is none."""
        return self._mark.value

    def progress(self, value: Any) -> None:
        """Record how far the step is: the `checkpoint` of its next execution. Raises what `Lease.progress` raises."""
        self._mark = replace(self._mark, value=value)
        self._held.progress(self._mark)

    def check(self) -> None:
        """Return at once while all is well. Call it before each side effect: `Lease.check` says what it raises."""
        self._held.check()

    def remaining(self) -> float:
        """Return the seconds until the lease is lost if no further heartbeat gets through; never below zero."""
        return self._held.remaining()

    def then(self, kind: str, payload: Any = None, **options: Unpack[TaskOptions]) -> None:
        """Have a task beside the flow scheduled, in the transaction that ends this step: see `Lease.then`."""
        self._held.then(kind, payload, **options)


class _Visit:
    """A run of a step: decide whether its function is called, and where the flow goes then."""

    def __init__(self, steps: Steps, call: Call, held: Lease) -> None:
        self.step = steps.declared[call.step]
        self._steps, self._call, self._held = steps, call, held
        self._began_at = time.time()
        self._mark = _latest_mark(held)
        self._results: Sequence[Any] = ()

    def begins(self) -> bool:
        """Return whether the step has an attempt left; if not, the flow takes the edge of its failure."""
        if not moves.has_crashed_too_often(self.step.node, self._mark, self._held.attempt):
            return True
        most = self.step.node.max_attempts
        self._end(
            Fatal(f"step {self._call.step!r} was begun {most} times, and its worker vanished: {most} is the most"),
            is_skipped=True,
        )
        return False

    def join(self, results: Sequence[Any]) -> bool:
        """Take the results of the branches, as the service has them; return whether the step runs: none has failed."""
        coding = self._held.__connection__.coding
        records = [msgspec.convert(coding.clear(result, "the result of a branch"), Record) for result in results]
        found = moves.join(self._steps.graph, self._call, records)
        if isinstance(found, Move):
            self._go(found)
            return False
        self._results = found
        return True

    def arguments(self) -> tuple[Any, ...] | None:
        """Return the arguments of the function; None: the state does not fit, and the flow is stuck."""
        try:
            state = _of_type(self._call.state, self.step.schema)
        except msgspec.ValidationError as error:
            message = f"the state does not fit step {self._call.step!r}: {error}"
            self._stop({"type": "ValidationError", "message": message})
            return None
        self._state = state
        if not self.step.takes_step:
            return (state,)
        return (state, Step(self._call, self._mark, self._held, self._results))

    def returned(self, value: Any) -> None:
        """Have the flow go on with what the function returned."""
        try:
            self._go(self._move_after(value))
        except Exception as error:  # noqa: BLE001 - of `each`, or a state that is not JSON: the next run would end so too
            self._end(error)

    def raised(self, error: Exception) -> None:
        """Decide on an error of the function; raise it unless the flow has an edge for it."""
        if isinstance(error, LeaseError):
            raise error
        if isinstance(error, NotYet):
            self._wait(error)
        elif any(encoding.each(error, Fatal)) or moves.is_last(self.step.node, self._mark, self._held.attempt):
            if not self._end(error):
                raise error
        else:
            raise error

    def _move_after(self, value: Any) -> Move:
        choice = None
        if isinstance(value, Goto):
            chosen: Goto[Any] = value  # pyright: ignore[reportUnknownVariableType]
            choice, value = chosen.step, chosen.state
            if choice not in self.step.node.choices:
                raise Fatal(f"step {self._call.step!r} chose {choice!r}: declare it, choices=[{choice!r}]")
        if self._call.item is None:
            value = self._checked(self._state if value is None else value)
        return moves.succeed(self._steps.graph, self._call, value, choice=choice)

    def _checked(self, state: Any) -> Any:
        raw = encoding.encoded(state, f"state, which step {self._call.step!r} returned,")
        try:
            msgspec.json.decode(bytes(raw), type=self._steps.schema)
        except msgspec.ValidationError as error:
            raise Fatal(f"step {self._call.step!r} returned a state that does not fit: {error}") from error
        return raw

    def _wait(self, error: NotYet) -> None:
        """Have the step called again in a while, or fail if `retry_until` is over by then."""
        node = self.step.node
        mark, seconds = moves.wait(node, self._mark, asked=error.after, began_at=self._began_at, now=time.time())
        if seconds is None:
            until = f"within {node.retry_until:g} s" if node.retry_until is not None else "in time"
            self._mark = mark
            self._end(Fatal(f"step {self._call.step!r} was not ready {until}, {mark.waits} executions: {error}"))
            return
        mark = replace(mark, value=_latest_mark(self._held).value)
        self._held.progress(mark)
        raise NotYet(str(error), after=seconds) from None

    def _end(self, error: Exception, *, is_skipped: bool = False) -> bool:
        """Take the edge of a failure for good; return False if there is none, and the flow is stuck."""
        described = encoding.described(error)
        move = moves.fail(self._steps.graph, self._call, described)
        if move.record is None:
            self._stop(described)
            return False
        move = move._replace(record=replace(move.record, is_skipped=is_skipped))
        where = "the other branches are over first" if move.call is None else f"the flow goes to {move.call.step!r}"
        log_run(self._held.__connection__, self._held.task, logging.WARNING, f"failed for good: {where}", error)
        try:
            self._go(move)
        except Exception as unsent:  # noqa: BLE001 - a state that has become too large, say
            self._stop(encoding.described(unsent))
        return True

    def _stop(self, error: Any) -> None:
        """Fail the task: the flow is stuck here until it is resumed, with as many attempts as at first."""
        with suppress(LeaseError):
            self._held.progress(replace(self._mark, spent=self._held.attempt))
        self._held.fail(error, retry=False)

    def _go(self, move: Move) -> None:
        if move.call is not None:
            self._held.__then__([self._task(planned) for planned in self._planned(move.call)])
        self._held.complete(move.record)

    def _planned(self, call: Call) -> list[Planned]:
        call = replace(call, flow=self._call.flow or self._held.task.id)
        if (each := self._steps.declared[call.step].each) is None:
            return [Planned(call)]
        items = list(each(_of_type(call.state, self._steps.schema)))
        if len(items) > moves.LIMIT:
            raise Fatal(
                f"`each` of step {call.step!r} gave {len(items):,} items, {moves.LIMIT} is the most: group them"
            )
        return moves.fan_out(self._steps.graph, call, items, list(uuid7s(len(items) + 10, time.time())))

    def _task(self, planned: Planned) -> NewTask:
        call = planned.call
        of_step: Mapping[str, Any] = {} if call.is_meeting else self._steps.declared[call.step].options
        options: dict[str, Any] = {
            **call.options,
            **of_step,
            **COUNTLESS,
            "id": planned.id,
            "after": list(planned.after),
        }
        return NewTask(kind=KIND + self._steps.graph.flow, payload=call, **options)

    async def results(self) -> list[Any]:
        """Return the results of the branches that this step joins. For the driver's loop."""
        ids, results = self._call.branches, list[Any]()
        for start in range(0, len(ids), _AT_ONCE):
            part = ids[start : start + _AT_ONCE]
            results += await asyncio.gather(*(self._result(task_id) for task_id in part))
        return results

    async def _result(self, task_id: str) -> Any:
        backend: Any = self._held.__connection__.backend
        call: Callable[[], Coroutine[Any, Any, TaskInfo | None]] = partial(backend.get, task_id)
        info = await repeat_until_answered(call, None)
        if info is None:
            raise Fatal(f"branch {task_id!r} of step {self._call.joins!r} is gone: its task was deleted")
        return info.result


def run_step(steps: Steps, call: Call, held: Lease) -> None:
    """Run a step whose function is not `async`."""
    if (visit := _visit(steps, call, held)) is None:
        return
    try:
        if call.joins is not None and not visit.join(held.__connection__.run(visit.results())):
            return
        if (arguments := visit.arguments()) is None:
            return
        value = visit.step.function(*arguments)
    except Exception as error:  # noqa: BLE001 - raised again where the flow has no edge for it
        visit.raised(error)
    else:
        visit.returned(value)


async def run_async_step(steps: Steps, call: Call, held: Lease) -> None:
    """Run a step whose function is `async`."""
    if (visit := _visit(steps, call, held)) is None:
        return
    try:
        if call.joins is not None and not visit.join(await held.__connection__.arun(visit.results())):
            return
        if (arguments := visit.arguments()) is None:
            return
        value = await visit.step.function(*arguments)
    except Exception as error:  # noqa: BLE001 - raised again where the flow has no edge for it
        visit.raised(error)
    else:
        visit.returned(value)


def _visit(steps: Steps, call: Call, held: Lease) -> _Visit | None:
    """Return the visit whose function is to be called; None if the task is settled without it."""
    if call.is_meeting:
        held.complete(Record(edge="meeting"))
        return None
    if call.step not in steps.declared:
        # A worker of another version may know the step: a flow must not fail because a deploy goes on.
        text = f"is for step {call.step!r}, which flow {steps.graph.flow!r} of this worker does not have: given back"
        log_run(held.__connection__, held.task, logging.ERROR, text)
        held.release(after=_ELSEWHERE)
        return None
    visit = _Visit(steps, call, held)
    return visit if visit.begins() else None


def _of_type(state: Any, schema: Any) -> Any:
    """Return a state as a value of its own of this type: a step that changes it changes no other execution's."""
    return msgspec.json.decode(msgspec.json.encode(state), type=schema)


def _latest_mark(held: Lease) -> Mark:
    """Return what the last execution left, which may have been in this very process."""
    value = held.__latest__
    return Mark() if value is None else msgspec.convert(value, Mark)
