"""Flows: graphs of steps, each of which is a task that a worker runs, and which can be killed at any moment.

    flow = leasekit.Flow("create-vm", state=Vm)

    @flow.step(on_success="verify", on_failure="roll_back")
    def create(vm: Vm) -> Vm: ...

    @flow.step(retry_every=3, retry_until=120, on_success="record", on_failure="roll_back")
    def verify(vm: Vm) -> Vm:
        if not ready(vm):
            raise leasekit.NotYet
        return vm

    worker.add(flow)
    flow.start(client, Vm(name="web-1"), id="web-1")
    client.flow("web-1")

A flow is data and functions. The task of the next step is scheduled in the transaction that settles the last one.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Generic, Literal, TypedDict, TypeVar, Unpack

import msgspec

from leasekit import _lineage
from leasekit._arguments import check_fields, check_names
from leasekit._batches import alone
from leasekit._driver.reporting import encoding
from leasekit._flow_run import COUNTLESS, DeclaredStep, Goto, Step, Steps, run_async_step, run_step
from leasekit._flows import drawing
from leasekit._flows.graph import Graph, Node
from leasekit._flows.records import KIND, Call, Failure
from leasekit._worker.handlers import is_async, signature
from leasekit.client import Client
from leasekit.config import check_number
from leasekit.errors import ConfigError
from leasekit.flow_info import FlowInfo, FlowStatus, StepInfo
from leasekit.lease import Lease
from leasekit.task import Name, NewTask, RetryPolicy, Scheduled
from leasekit.task.words import DedupeScope, Expiry

__all__ = [
    "Failure", "Flow", "FlowInfo", "FlowOptions", "FlowStatus", "Goto", "Step", "StepInfo", "StepOptions",
]  # fmt: skip

S = TypeVar("S")
F = TypeVar("F", bound=Callable[..., Any])


class StepOptions(TypedDict, total=False):
    """The options of the tasks of a step; `NewTask` has their meanings and bounds."""

    priority: int
    """0 is the most urgent."""
    max_runtime: float | None
    """Seconds that a run may take."""
    expiry: Expiry
    """No effect on the attempts of a step; with *retry* there is a wait after a timeout."""
    claim_timeout: float | None
    """The ttl that a claim grants."""
    heartbeat_timeout: float
    """The ttl that a heartbeat grants."""
    retry: RetryPolicy
    """How long to wait before the next attempt."""


class FlowOptions(TypedDict, total=False):
    """The options of a flow; `NewTask` has their meanings and bounds."""

    id: str
    """The id of the flow; a flow of the same id is started once."""
    at: datetime
    """The flow does not start before this instant."""
    delay: float | timedelta
    """Instead of `at`: the flow does not start before so many seconds have passed."""
    collection: str | None
    """The collection of all its tasks."""
    key: str | None
    """The key of all its tasks."""
    priority: int
    """The priority of all its tasks; that of a step wins."""
    dedupe_key: str | None
    """Of the first task: starting another flow with this key returns the first."""
    dedupe_window: float | None
    """Seconds for which the key counts."""
    dedupe_scope: DedupeScope
    """*live*: the key is free once the first step has ended, and not the flow."""


_OF_ALL_STEPS = ("collection", "key", "priority")


class Flow(Generic[S]):
    """A graph of steps, whose state is a value that each step gets and returns.

    Declare the steps, the first one first, and give the flow to the workers that run it (`Worker.add`). The graph is
    checked where the flow is first used.

    Args:
        name: Its name. The steps are tasks of the kind `flow:NAME`.
        state: The type of the state: a Struct, a dataclass, a TypedDict, or a type of JSON.
    """

    def __init__(self, name: str, *, state: type[S]) -> None:
        try:
            msgspec.convert(KIND + name, Name)
        except msgspec.ValidationError as error:
            raise ConfigError(f"flow {name!r}: this is not a valid name: {error}") from error
        self.name = name
        """The name of the flow."""
        self.kind = KIND + name
        """The kind of the tasks of its steps."""
        self._state: Any = state
        self._declared: dict[str, DeclaredStep] = {}
        self._steps: Steps | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {', '.join(self._declared) or 'no steps yet'}>"

    def step(
        self,
        *,
        name: str | None = None,
        on_success: str | None = None,
        on_failure: str | None = None,
        choices: Sequence[str] = (),
        each: Callable[[S], Iterable[Any]] | None = None,
        max_attempts: int | None = 5,
        retry_every: float | None = None,
        retry_until: float | None = None,
        **options: Unpack[StepOptions],
    ) -> Callable[[F], F]:
        """Declare a function as a step of the flow: `(state)` or `(state, step)`, with a `leasekit.flows.Step`.

        What it returns is the next state; None stands for the one that it got. An exception is a failure, after which
        it is tried again, `max_attempts` times in all; `Fatal` is the last one at once. `NotYet` is no failure: the
        step is called again after `retry_every` seconds.

        The name can be called as before.

        Args:
            name: The name of the step; None: that of the function.
            on_success: The step after this one; None: the flow ends.
            on_failure: The step after a failure for good; None: the flow stops here as *failed*, and can be resumed.
            choices: Further steps, of which the function can choose one: it returns `flow.goto("step", state)`.
            each: A function of the state that returns a list. The step runs for each item in parallel, with the item in
                place of the state, and `on_success` runs when all have ended, with what they returned as
                `step.results`. If one of them fails, `on_failure` runs when all others have ended. A list may be empty.
            max_attempts: The most attempts, of which those count that end in an error, in a timeout or with their
                worker; None: no limit.
            retry_every: Seconds from a `NotYet` to the next call.
            retry_until: Seconds from the first call on after which a `NotYet` is a failure for good; None: no limit.
            options: Options of its tasks: those of `StepOptions`.

        Raises `ConfigError` if the function cannot be a step, and TypeError for an unknown option.
        """
        check_names(options, StepOptions.__optional_keys__, "option of a step")

        def register(function: F) -> F:
            of = self._new_name(name or getattr(function, "__name__", None))
            what = f"flow {self.name!r}: step {of!r}"
            check_number(f"{what}: max_attempts", max_attempts, unit="", least=1, whole=True, or_none=True)
            check_number(f"{what}: retry_every", retry_every, or_none=True)
            check_number(f"{what}: retry_until", retry_until, or_none=True)
            schema, takes_step = signature(what, function, takes="state", held="step")
            node = Node(
                name=of,
                on_success=on_success,
                on_failure=on_failure,
                choices=tuple(choices),
                is_mapped=each is not None,
                max_attempts=max_attempts,
                retry_every=retry_every,
                retry_until=retry_until,
            )
            self._declared[of] = DeclaredStep(
                node=node,
                function=function,
                schema=self._state if schema is Any and each is None else schema,
                takes_step=takes_step,
                is_async=is_async(function),
                each=each,
                options=_checked_options(what, self.kind, options),
            )
            self._steps = None
            return function

        return register

    def _new_name(self, name: str | None) -> str:
        """Return the name of a step. Raises `ConfigError` if there is none, or if another step has it."""
        if not name:
            raise ConfigError(f"flow {self.name!r}: a step has no name: give one, @flow.step(name=…)")
        if name in self._declared:
            raise ConfigError(f"flow {self.name!r}: step {name!r} is declared twice: give one of them another name")
        return name

    def goto(self, step: str, state: S) -> Goto[S]:
        """Return, from a step, the step that is next, in place of its `on_success`; it must be one of its `choices`."""
        return Goto(step, state)

    def start(self, client: Client, state: S, **options: Unpack[FlowOptions]) -> Scheduled:
        """Start a flow with this state: when this returns it is durable, and will be run to an end. Its `id` is new.

        The flow is the first of a chain of its own, also if it is started in the run of a task. `collection`, `key` and
        `priority` hold for all steps. A flow with an id that exists is not started again.

        Raises `ConfigError` for a graph with a fault, ValueError for a state that does not fit, and what
        `Client.schedule` raises.
        """
        with alone():
            return self.start_all(client, [state], **options)[0]

    def start_all(self, client: Client, states: Sequence[S], **options: Unpack[FlowOptions]) -> list[Scheduled]:
        """Start a flow with each of these states, all with the same options; without `id` and `dedupe_key`, then."""
        tasks = [self._first(state, options) for state in states]
        with _lineage.outside():
            return client.schedule_all(tasks)

    async def astart(self, client: Client, state: S, **options: Unpack[FlowOptions]) -> Scheduled:
        """Do what `start` does, from an event loop."""
        with alone():
            return (await self.astart_all(client, [state], **options))[0]

    async def astart_all(self, client: Client, states: Sequence[S], **options: Unpack[FlowOptions]) -> list[Scheduled]:
        """Do what `start_all` does, from an event loop."""
        tasks = [self._first(state, options) for state in states]
        with _lineage.outside():
            return await client.aschedule_all(tasks)

    def draw(self, form: Literal["text", "mermaid"] = "text") -> str:
        """Return a picture of the graph, as text or for Mermaid. Raises `ConfigError` for a graph with a fault."""
        graph = self._checked().graph
        return drawing.mermaid(graph) if form == "mermaid" else drawing.text(graph)

    def __handler__(self) -> Callable[[Call, Lease], Any]:
        """Return the handler of the tasks of the flow, for `Worker.add`."""
        steps = self._checked()
        kinds = {step.is_async for step in steps.declared.values()}
        if len(kinds) > 1:
            names = ", ".join(repr(name) for name, step in steps.declared.items() if not step.is_async)
            raise ConfigError(f"flow {self.name!r}: some steps are `async def` and some are not ({names}): choose one")
        if kinds == {True}:

            async def run_async(call: Call, held: Lease) -> None:
                await run_async_step(steps, call, held)

            return run_async

        def run(call: Call, held: Lease) -> None:
            run_step(steps, call, held)

        return run

    def _checked(self) -> Steps:
        if self._steps is None:
            graph = Graph(self.name, {name: step.node for name, step in self._declared.items()})
            self._steps = Steps(graph, dict(self._declared), self._state)
        return self._steps

    def _first(self, state: S, options: FlowOptions) -> NewTask:
        """Return the task of the first step."""
        check_names(options, FlowOptions.__optional_keys__, "option of a flow")
        steps = self._checked()
        raw = encoding.encoded(state, f"state of flow {self.name!r}")
        try:
            msgspec.json.decode(bytes(raw), type=self._state)
        except msgspec.ValidationError as error:
            raise ValueError(f"this state of flow {self.name!r} does not fit: {error}") from error
        given: dict[str, Any] = {**options}
        if isinstance(delay := given.get("delay"), timedelta):
            given["delay"] = delay.total_seconds()
        shared = {name: given[name] for name in _OF_ALL_STEPS if given.get(name) is not None}
        first = steps.declared[steps.graph.first]
        call = Call(step=steps.graph.first, state=raw, options=shared)
        return NewTask(kind=self.kind, payload=call, **{**given, **first.options, **COUNTLESS})


def _checked_options(what: str, kind: str, options: StepOptions) -> StepOptions:
    """Return the options of a step. Raises `ConfigError` if no service would take such a task."""
    given: dict[str, Any] = {**options}
    task = NewTask(kind=kind, **given)
    try:
        check_fields([task])
        encoding.successor(task)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}: {error}") from error
    return options
