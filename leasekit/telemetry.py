"""Telemetry: traces and metrics of leases for OpenTelemetry, turned on by one line.

    leasekit.telemetry.instrument()            # all of this process; or of one client or worker: instrument(client)

This needs the API of OpenTelemetry only (the extra `otel`). The application sets up the SDK, before or
after, and decides where its records go. Until then nothing is recorded, at almost no cost.

Spans, by the semantic conventions of messaging, with the kind of a task as the destination and its id as the message's:

    schedule (PRODUCER) ◀── parent ── run (CONSUMER) ◀── parent ── settle (CLIENT)
         ▲                             │ link: claim, and the span in which the block was entered
         └─────────── link ─────── claim (CLIENT)

The context of *schedule* travels with the task as its `traceparent`. *run* is the handler's run: it is the current span
inside of handlers and `with lease(task)` blocks. No record holds a payload, a result, or a token.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

from msgspec.structs import replace

from leasekit import hooks
from leasekit.errors import MissingDependency
from leasekit.task import NewTask, Outcome, Task
from leasekit.wire import traceparent

try:
    from opentelemetry import context, metrics, trace
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    from leasekit._instruments import SYSTEM, Metrics
except ImportError as error:
    raise MissingDependency(
        "'opentelemetry-api' is not installed: install the extra otel of leasekit, for example "
        "pip install '/path/to/leasekit[otel]'"
    ) from error

__all__ = ["Listening", "Telemetry", "hook", "instrument", "uninstrument"]

_LOOK = 0.05  # seconds between two checks for providers, while there are none
_SCHEMA = "https://opentelemetry.io/schemas/1.30.0"
_NAMED = ("named:", "once:")  # prefixes of the kinds of `Client.named` and `Client.once`
_W3C = TraceContextTextMapPropagator()
_FAILED: frozenset[Outcome] = frozenset({"retry", "fatal", "crash"})


class Listening(Protocol):
    """A client or a worker, as far as hooks can be added to it."""

    def listen(self, hook: hooks.Hook) -> None:
        """Add a hook."""
        ...


def instrument(
    client_or_worker: Listening | None = None,
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> None:
    """Record a client or worker, or all of this process. Repeated calls have no effect.

    The providers are the global ones, unless others are given; it does not matter whether they are set up yet.
    """
    telemetry = hook(tracer_provider=tracer_provider, meter_provider=meter_provider)
    if client_or_worker is None:
        hooks.add_global_hook(telemetry)
    else:
        client_or_worker.listen(telemetry)


def uninstrument(*, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None) -> None:
    """Undo `instrument()`. A client or worker that is instrumented by itself goes on being recorded."""
    hooks.remove_global_hook(hook(tracer_provider=tracer_provider, meter_provider=meter_provider))


def hook(*, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None) -> "Telemetry":
    """Return the hook, for `connect(url, hooks=[telemetry.hook()])`. There is one for each pair of providers."""
    return _made(tracer_provider, meter_provider)


@functools.cache
def _made(tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None) -> "Telemetry":
    return Telemetry(tracer_provider, meter_provider)


class Telemetry(hooks.Tracer):
    """The hook that records; `hook` makes it."""

    def __init__(self, tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None) -> None:
        self._tracer_provider = tracer_provider
        self._meter_provider = meter_provider
        self._records = False
        self._look_at = 0.0
        release = version("leasekit")
        self._tracer = trace.get_tracer("leasekit", release, tracer_provider, schema_url=_SCHEMA)
        self._metrics = Metrics(
            metrics.get_meter("leasekit", release, meter_provider, schema_url=_SCHEMA), self._gauges
        )
        self._key = f"telemetry-{id(self)}"  # of the entry that is kept with a task

    @property
    def listening(self) -> bool:
        """Whether a provider records. A provider that was set up is noticed after a twentieth of a second at most."""
        # This check costs more than the rest of a heartbeat. Once there are providers, they stay.
        if not self._records and (now := time.monotonic()) >= self._look_at:
            self._look_at = now + _LOOK
            self._records = _records(self._tracer_provider or trace.get_tracer_provider()) or _records(
                self._meter_provider or metrics.get_meter_provider()
            )
        return self._records

    def __call__(self, event: hooks.Event) -> None:
        if not self.listening:
            return
        match event:
            case hooks.Claimed():
                self._claimed(event)
            case hooks.Settled():
                self._settled(event)
            case _:
                self._metrics.count(event)

    @contextlib.contextmanager
    def scheduling(self, tasks: Sequence[NewTask]) -> Generator[Sequence[NewTask]]:
        """Record a span around the call. Its context goes with tasks that have no valid context of their own."""
        kinds = {task.kind for task in tasks}
        attributes = _attributes("send", "schedule", kinds)
        if len(tasks) == 1 and tasks[0].id is not None:
            attributes["messaging.message.id"] = tasks[0].id
        else:
            attributes["messaging.batch.message_count"] = len(tasks)
        with self._tracer.start_as_current_span(
            _name("schedule", kinds), kind=SpanKind.PRODUCER, attributes=attributes, record_exception=False
        ) as span:
            carrier: dict[str, str] = {}
            _W3C.inject(carrier)
            ours = carrier.get("traceparent")
            try:
                yield [replace(task, traceparent=traceparent(task.traceparent) or ours) for task in tasks]
            except BaseException as error:
                _blame(span, error)
                raise
        for kind in kinds:
            count = sum(task.kind == kind for task in tasks)
            self._metrics.sent.add(count, _series(_attributes("send", "schedule", {kind})))

    def _claimed(self, event: hooks.Claimed) -> None:
        """Record a span for a claim that was granted tasks; empty claims would only be noise."""
        now = time.time_ns()
        kinds = {task.kind for task in event.tasks}
        attributes = _attributes("receive", "claim", kinds)
        if len(event.tasks) == 1:
            attributes["messaging.message.id"] = event.tasks[0].id
        else:
            attributes["messaging.batch.message_count"] = len(event.tasks)
        if event.waited is not None:
            attributes["leasekit.claim.waited"] = event.waited
        origins = [origin for task in event.tasks if (origin := _origin(task)) is not None]
        span = self._tracer.start_span(
            _name("claim", kinds),
            context.Context(),  # without a parent: its tasks were scheduled by many
            SpanKind.CLIENT,
            attributes,
            [Link(origin) for origin in origins],
            start_time=now - int(event.took * 1e9),
        )
        span.end(now)
        claimed = _Known(claimed_at=time.monotonic(), span=span.get_span_context())
        for task in event.tasks:
            vars(task)[self._key] = claimed
        for kind in kinds:
            count = sum(task.kind == kind for task in event.tasks)
            self._metrics.consumed.add(count, _series(_attributes("receive", "claim", {kind})))

    def running(self, task: Task) -> hooks.Running:
        """Start the span of a run. Its parent is the span that scheduled the task; claim and current span are links."""
        known = self._known(task)
        attributes = _attributes("process", "run", {task.kind})
        if known is not None:
            self._metrics.start_latency.record(time.monotonic() - known.claimed_at, _series(attributes))
        origin, around = _origin(task), trace.get_current_span().get_span_context()
        parent = context.get_current() if origin is None else _in_context(origin)
        links = [known.span] if known is not None else []
        if origin is not None:
            links.append(around)
        span = self._tracer.start_span(
            _name("run", {task.kind}),
            parent,
            SpanKind.CONSUMER,
            {
                **attributes,
                "messaging.message.id": task.id,
                "leasekit.task.attempt": task.attempt,
                "leasekit.task.fence": task.fence,
            },
            [Link(other) for other in links if other.is_valid],
        )
        return _Run(span, functools.partial(self._ran, _series(attributes), time.monotonic(), span))

    def _ran(self, attributes: dict[str, Any], began_at: float, span: Span, task: Task, outcome: str) -> None:
        """Count an ended run, and keep its span and end with the task, for the span of the settlement."""
        self._metrics.ran.record(time.monotonic() - began_at, {**attributes, "leasekit.outcome": outcome})
        vars(task)[self._key] = _Known(claimed_at=0.0, span=span.get_span_context(), ended_at=time.time_ns())

    def _settled(self, event: hooks.Settled) -> None:
        """Record a span from the end of the run until its report was answered, as a child of *run*."""
        self._metrics.settled.add(
            1, {**SYSTEM, "leasekit.outcome": event.outcome, "leasekit.verdict": event.reason or event.verdict}
        )
        task = event.task
        if task is None or (known := self._known(task)) is None or known.ended_at is None:
            return  # the task was given back before it began
        attributes = _attributes("settle", "settle", {task.kind})
        attributes["messaging.message.id"] = task.id
        attributes["leasekit.outcome"] = event.outcome
        attributes["leasekit.verdict"] = event.verdict
        span = self._tracer.start_span(
            _name("settle", {task.kind}),
            _in_context(known.span),
            SpanKind.CLIENT,
            attributes,
            start_time=known.ended_at,
        )
        if event.verdict != "settled":
            span.set_attribute("error.type", event.reason or event.verdict)
            span.set_status(Status(StatusCode.ERROR, f"the service refused it: {event.reason or event.verdict}"))
        span.end()

    def _known(self, task: Task) -> "_Known | None":
        return vars(task).get(self._key)

    def _gauges(self, name: str) -> float | None:
        """Return the sum over all sources that have this gauge; None if none has."""
        values = [gauges[name] for source in hooks.gauge_sources(self) if name in (gauges := source.gauges())]
        return sum(values) if values else None


@dataclass(frozen=True, slots=True)
class _Known:
    """The latest span of a task and its time, kept with the task object."""

    claimed_at: float  # by time.monotonic
    span: SpanContext
    ended_at: int | None = None  # of the run, by time.time_ns


_current: ContextVar["_Run | None"] = ContextVar("leasekit-run", default=None)


class _Run(hooks.Running):
    """A run as a span: the current one between `enter` and `leave`, and closed by `end`."""

    def __init__(self, span: Span, ended: Callable[[Task, str], None]) -> None:
        self._span = span
        self._ended = ended
        self._tokens: tuple[Token[_Run | None], Token[context.Context]] | None = None

    def enter(self) -> None:
        self._tokens = _current.set(self), context.attach(trace.set_span_in_context(self._span))

    def leave(self) -> None:
        if self._tokens is None:
            return
        ours, theirs = self._tokens
        try:
            _current.reset(ours)
        except (ValueError, RuntimeError):  # a block that is left in another context: this context has nothing to reset
            return
        context.detach(theirs)

    def end(self, task: Task, outcome: hooks.RunEnd | None, error: BaseException | None) -> None:
        span = self._span
        span.set_attribute("leasekit.outcome", outcome or "lost")
        if error is not None and (outcome is None or outcome in _FAILED):
            _blame(span, error)
        elif outcome in _FAILED:  # the handler reported the failure itself
            span.set_attribute("error.type", str(outcome))
            span.set_status(StatusCode.ERROR)
        span.end()
        self._ended(task, outcome or "lost")


def _name(verb: str, kinds: set[str]) -> str:
    if len(kinds) != 1:
        return verb
    (kind,) = kinds
    return f"{verb} {_template(kind) or kind}"


def _attributes(operation: str, name: str, kinds: set[str]) -> dict[str, Any]:
    attributes = {**SYSTEM, "messaging.operation.type": operation, "messaging.operation.name": name}
    if len(kinds) == 1:
        (kind,) = kinds
        attributes["messaging.destination.name"] = kind
        if template := _template(kind):
            attributes["messaging.destination.template"] = template
    return attributes


def _series(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes for a metric, without unbounded names, because each value is a series of its own."""
    if "messaging.destination.template" not in attributes:
        return attributes
    return {key: value for key, value in attributes.items() if key != "messaging.destination.name"}


def _template(kind: str) -> str | None:
    """Return the template for the kinds of named leases, because each name is a kind of its own."""
    return next((prefix + "{name}" for prefix in _NAMED if kind.startswith(prefix)), None)


def _origin(task: Task) -> SpanContext | None:
    if traceparent(task.traceparent) is None:
        return None
    carrier = {"traceparent": task.traceparent}
    origin = trace.get_current_span(_W3C.extract(carrier, context.Context())).get_span_context()
    return origin if origin.is_valid else None


def _in_context(span: SpanContext) -> context.Context:
    return trace.set_span_in_context(trace.NonRecordingSpan(span))


def _blame(span: Span, error: BaseException) -> None:
    span.record_exception(error)
    span.set_attribute("error.type", type(error).__qualname__)
    span.set_status(Status(StatusCode.ERROR, type(error).__qualname__))


def _records(provider: object) -> bool:
    # Providers of the API itself stand in until the application sets up its own.
    return not type(provider).__module__.startswith(("opentelemetry.trace", "opentelemetry.metrics"))
