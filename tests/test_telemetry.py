"""What is told to OpenTelemetry: one trace from scheduling to settling, numbers that add up, and nothing secret."""

import asyncio
import contextvars
import json
import logging
import re
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.lowlevel
import httpx
import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import leasekit
from leasekit import telemetry
from leasekit.client import Client
from leasekit.hooks import Answered, AtRisk, Claimed, Event, Hook, Hooks, Lost, ReportDelayed, Sent
from leasekit.server.engine import Engine
from leasekit.server.http.app import Api
from leasekit.server.store.urls import open_store
from leasekit.testing import faults
from leasekit.testing.faults import Faulty
from leasekit.testing.memory import MemoryBackend, MemoryService
from tests.sampling import slow_after
from tests.waiting import eventually

PATIENCE = 30.0
REMOTE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Recorder:
    """An SDK of a test's own: its spans and metrics stay in memory."""

    def __init__(self) -> None:
        self.spans = InMemorySpanExporter()
        self.reader = InMemoryMetricReader()
        self.tracer_provider = TracerProvider()
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self.meter_provider = MeterProvider([self.reader])
        self.hook = telemetry.hook(tracer_provider=self.tracer_provider, meter_provider=self.meter_provider)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans.get_finished_spans() if span.name == name]

    def when(self, name: str) -> ReadableSpan:
        """The span of this name, as soon as it has ended."""
        eventually(lambda: self.named(name))
        (span,) = self.named(name)
        return span

    def points(self, name: str) -> list[Any]:
        """The data points of a metric, as they are now."""
        data = self.reader.get_metrics_data()
        return [
            point
            for resource in (data.resource_metrics if data is not None else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]

    def value(self, name: str, **attributes: str) -> float:
        """The sum over the points that have these attributes; of a histogram, how many were recorded."""
        wanted = {f"leasekit.{key}": value for key, value in attributes.items()}
        points = [point for point in self.points(name) if wanted.items() <= point.attributes.items()]
        return float(sum(point.count if hasattr(point, "count") else point.value for point in points))


def attributes(span: ReadableSpan) -> Mapping[str, Any]:
    assert span.attributes is not None
    return span.attributes


def is_part_of(span: ReadableSpan, other: ReadableSpan) -> bool:
    """A child of it, in the same trace."""
    return (
        span.parent is not None
        and other.context is not None
        and (span.parent.trace_id, span.parent.span_id) == (other.context.trace_id, other.context.span_id)
    )


def links(span: ReadableSpan) -> set[int]:
    return {link.context.span_id for link in span.links}


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def service() -> MemoryService:
    return MemoryService()


@pytest.fixture
def client(service: MemoryService, recorder: Recorder) -> Iterator[Client]:
    with Client(MemoryBackend(service, worker="w"), hooks=[recorder.hook]) as client:
        yield client


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a server in a process of its own."""
    command = [sys.executable, "-m", "leasekit", "serve", "--port", "0", "--store", f"sqlite:///{tmp_path}/tasks.db"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found
            yield found[0]
        finally:
            process.kill()


def run_one(client: Client, kind: str = "k") -> leasekit.Task:
    """Lease the next task of a kind, with an empty body."""
    task = next(client.tasks(kind))
    with leasekit.lease(task):
        pass
    return task


# One trace ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", slow_after(1, ["thread", "async", "lease"]))
def test_one_trace_goes_from_schedule_through_the_server_and_the_worker_to_settle(
    server: str, recorder: Recorder, style: str
) -> None:
    inside: list[trace.SpanContext] = []

    def sync_body(payload: Any) -> None:
        inside.append(trace.get_current_span().get_span_context())

    async def async_body(payload: Any) -> None:
        await asyncio.sleep(0)
        inside.append(trace.get_current_span().get_span_context())

    with leasekit.connect(server, hooks=[recorder.hook], worker="tester") as client:
        client.schedule("thumbnail", {"page": 1}, id="t1")
        if style == "lease":
            with leasekit.lease(next(client.tasks("thumbnail"))):
                sync_body(None)
        else:
            worker = leasekit.Worker(client)
            worker.handler("thumbnail")(sync_body if style == "thread" else async_body)
            thread = threading.Thread(target=worker.run)
            thread.start()
            recorder.when("settle thumbnail")
            worker.stop()
            thread.join(PATIENCE)
        settle, run = recorder.when("settle thumbnail"), recorder.when("run thumbnail")
        schedule, claim = recorder.when("schedule thumbnail"), recorder.when("claim thumbnail")
        stored = client.get("t1")

    assert stored is not None
    assert stored.status == "success"
    assert schedule.parent is None
    assert is_part_of(run, schedule)
    assert is_part_of(settle, run)
    assert span_id(claim) in links(run)
    assert links(claim) == {span_id(schedule)}
    assert [one.span_id for one in inside] == [span_id(run)]
    kinds = {
        "schedule": SpanKind.PRODUCER,
        "claim": SpanKind.CLIENT,
        "run": SpanKind.CONSUMER,
        "settle": SpanKind.CLIENT,
    }
    types = {"schedule": "send", "claim": "receive", "run": "process", "settle": "settle"}
    for span in (schedule, claim, run, settle):
        name = span.name.partition(" ")[0]
        assert span.kind is kinds[name], name
        assert attributes(span)["messaging.system"] == "leasekit"
        assert attributes(span)["messaging.operation.name"] == name
        assert attributes(span)["messaging.operation.type"] == types[name]
        assert attributes(span)["messaging.destination.name"] == "thumbnail"
        assert attributes(span)["messaging.message.id"] == "t1"
        assert span.status.status_code is StatusCode.UNSET
    assert attributes(run)["leasekit.outcome"] == "success"
    assert schedule.end_time is not None
    assert run.end_time is not None
    assert run.start_time is not None
    assert settle.start_time is not None
    assert run.start_time <= run.end_time <= settle.start_time + 10_000_000


def test_what_the_body_records_is_a_part_of_its_run(client: Client, recorder: Recorder) -> None:
    tracer = recorder.tracer_provider.get_tracer("test")
    client.schedule("k")
    with leasekit.lease(next(client.tasks("k"))), tracer.start_as_current_span("inner"):
        pass
    assert is_part_of(recorder.when("inner"), recorder.when("run k"))


def test_after_the_block_its_span_is_no_longer_the_current_one(client: Client) -> None:
    client.schedule("k")
    run_one(client)
    assert not trace.get_current_span().get_span_context().is_valid


def test_a_block_in_a_span_is_linked_with_it(client: Client, recorder: Recorder) -> None:
    client.schedule("k")
    task = next(client.tasks("k"))
    with recorder.tracer_provider.get_tracer("test").start_as_current_span("outer"), leasekit.lease(task):
        pass
    assert span_id(recorder.when("outer")) in links(recorder.when("run k"))


def test_scheduling_in_a_span_is_a_part_of_it(client: Client, recorder: Recorder) -> None:
    with recorder.tracer_provider.get_tracer("test").start_as_current_span("outer"):
        client.schedule("k")
    assert is_part_of(recorder.when("schedule k"), recorder.when("outer"))


def test_a_block_that_is_left_in_another_context_harms_nobody(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    client.schedule("k")
    block = leasekit.lease(next(client.tasks("k")))
    contextvars.copy_context().run(block.__enter__)
    contextvars.copy_context().run(block.__exit__, None, None, None)
    assert not caplog.records
    assert context.get_current() == {}


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.anyio
async def test_the_async_doors_record_the_same(service: MemoryService, recorder: Recorder, anyio_backend: str) -> None:
    async with Client(MemoryBackend(service, worker="w"), hooks=[recorder.hook]) as client:
        await client.aschedule("k")
        async for task in client.tasks("k"):
            async with leasekit.lease(task):
                await anyio.lowlevel.checkpoint()
                inside = trace.get_current_span().get_span_context()
            break
        await anyio.to_thread.run_sync(recorder.when, "settle k")
    run = recorder.when("run k")
    assert inside.span_id == span_id(run)
    assert is_part_of(run, recorder.when("schedule k"))
    assert is_part_of(recorder.when("settle k"), run)


@pytest.mark.parametrize("prefix", ["named", "once"])
def test_named_leases_are_one_series_however_many_names_there_are(
    prefix: str, client: Client, recorder: Recorder
) -> None:
    make = client.named if prefix == "named" else client.once
    for number in range(2):
        with leasekit.lease(make(f"report {number}")):
            pass
    template = f"{prefix}:{{name}}"
    eventually(lambda: len(recorder.named(f"run {template}")) == 2)
    runs = [attributes(run) for run in recorder.named(f"run {template}")]
    assert [run["messaging.destination.name"] for run in runs] == [f"{prefix}:report {number}" for number in range(2)]
    assert {run["messaging.destination.template"] for run in runs} == {template}
    for metric in (
        "messaging.client.sent.messages",
        "messaging.client.consumed.messages",
        "messaging.process.duration",
    ):
        places = [dict(point.attributes) for point in recorder.points(metric)]
        assert [place.get("messaging.destination.template") for place in places] == [template], metric
        assert not any("messaging.destination.name" in place for place in places)


def test_a_batch_is_one_span_for_all(client: Client, recorder: Recorder) -> None:
    client.schedule_all([leasekit.NewTask(kind="a"), leasekit.NewTask(kind="b")])
    schedule = recorder.when("schedule")
    assert attributes(schedule)["messaging.batch.message_count"] == 2
    assert "messaging.destination.name" not in attributes(schedule)
    run_one(client, "b")
    assert is_part_of(recorder.when("run b"), schedule)


# Where a trace comes from ---------------------------------------------------------------------------------------


def test_a_traceparent_of_its_scheduler_is_kept(client: Client, recorder: Recorder) -> None:
    client.schedule("k", traceparent=REMOTE)
    assert run_one(client).traceparent == REMOTE
    run = recorder.when("run k")
    assert run.parent is not None
    assert f"{run.parent.trace_id:032x}-{run.parent.span_id:016x}" == REMOTE[3:-3]
    assert run.parent.is_remote


BAD = [
    "",
    "nonsense",
    REMOTE[:-1],
    REMOTE.upper(),
    REMOTE + "-more",
    f"00-{'0' * 32}-{'1' * 16}-01",
    f"ff{REMOTE[2:]}",
    "é",
]


@pytest.mark.parametrize("bad", BAD)
def test_a_traceparent_that_is_none_is_replaced_when_scheduling(client: Client, recorder: Recorder, bad: str) -> None:
    client.schedule("k", traceparent=bad)
    run_one(client)
    assert is_part_of(recorder.when("run k"), recorder.when("schedule k"))


@pytest.mark.parametrize("bad", BAD)
def test_a_traceparent_that_is_none_is_dropped_on_arrival(service: MemoryService, recorder: Recorder, bad: str) -> None:
    with Client(MemoryBackend(service, worker="other")) as other, pytest.MonkeyPatch.context():
        other.schedule("k", traceparent=bad)
        with Client(MemoryBackend(service, worker="w"), hooks=[recorder.hook]) as client:
            run_one(client)
    assert recorder.when("run k").parent is None


def test_without_telemetry_the_traceparent_travels_all_the_same(service: MemoryService) -> None:
    with Client(MemoryBackend(service, worker="w")) as client:
        client.schedule("k", traceparent=REMOTE)
        assert run_one(client).traceparent == REMOTE


# How runs end ---------------------------------------------------------------------------------------------------


def failing(client: Client, error: BaseException) -> None:
    client.schedule("k")
    with pytest.raises(type(error)), leasekit.lease(next(client.tasks("k"))):
        raise error


@pytest.mark.parametrize(("error", "outcome"), [(ValueError("why"), "retry"), (leasekit.Fatal("why"), "fatal")])
def test_an_exception_is_recorded(client: Client, recorder: Recorder, error: Exception, outcome: str) -> None:
    failing(client, error)
    run = recorder.when("run k")
    assert run.status.status_code is StatusCode.ERROR
    assert attributes(run)["error.type"] == type(error).__name__
    assert attributes(run)["leasekit.outcome"] == outcome
    (recorded,) = run.events
    assert recorded.name == "exception"
    assert recorder.when("settle k").status.status_code is StatusCode.UNSET


def test_a_failure_that_the_body_declares_is_an_error(client: Client, recorder: Recorder) -> None:
    client.schedule("k")
    with leasekit.lease(next(client.tasks("k"))) as held:
        held.fail("why", retry=False)
    run = recorder.when("run k")
    assert run.status.status_code is StatusCode.ERROR
    assert attributes(run)["error.type"] == "fatal"


def test_a_task_given_back_is_no_error(client: Client, recorder: Recorder) -> None:
    client.schedule("k")
    with leasekit.lease(next(client.tasks("k"))) as held:
        held.release()
    assert recorder.when("run k").status.status_code is StatusCode.UNSET


def test_a_refused_schedule_is_an_error_and_raised(client: Client, recorder: Recorder) -> None:
    with pytest.raises(leasekit.Refused):
        client.schedule("a/b")
    assert recorder.when("schedule a/b").status.status_code is StatusCode.ERROR


# Turning it on --------------------------------------------------------------------------------------------------


def test_instrument_records_a_client_that_is_there_already(service: MemoryService, recorder: Recorder) -> None:
    with Client(MemoryBackend(service, worker="w")) as client:
        client.schedule("before")
        telemetry.instrument(client, tracer_provider=recorder.tracer_provider, meter_provider=recorder.meter_provider)
        client.schedule("after")
    assert [span.name for span in recorder.spans.get_finished_spans()] == ["schedule after"]


def test_instrument_without_a_client_records_the_whole_process_until_uninstrument(
    service: MemoryService, recorder: Recorder
) -> None:
    providers = {"tracer_provider": recorder.tracer_provider, "meter_provider": recorder.meter_provider}
    with Client(MemoryBackend(service, worker="w")) as client:
        telemetry.instrument(**providers)  # type: ignore[arg-type]
        client.schedule("during")
        telemetry.uninstrument(**providers)  # type: ignore[arg-type]
        client.schedule("after")
    assert [span.name for span in recorder.spans.get_finished_spans()] == ["schedule during"]


def test_twice_is_the_same_as_once(service: MemoryService, recorder: Recorder) -> None:
    providers = {"tracer_provider": recorder.tracer_provider, "meter_provider": recorder.meter_provider}
    with Client(MemoryBackend(service, worker="w"), hooks=[recorder.hook]) as client:
        telemetry.instrument(client, **providers)  # type: ignore[arg-type]
        telemetry.instrument(**providers)  # type: ignore[arg-type]
        client.schedule("k")
        run_one(client)
        recorder.when("settle k")
        telemetry.uninstrument(**providers)  # type: ignore[arg-type]
    names = sorted(span.name for span in recorder.spans.get_finished_spans())
    assert names == ["claim k", "run k", "schedule k", "settle k"]
    assert recorder.value("messaging.client.sent.messages") == 1


def test_a_worker_is_instrumented_from_its_next_run_on(recorder: Recorder) -> None:
    worker = leasekit.Worker("memory://instrumented")
    telemetry.instrument(worker, tracer_provider=recorder.tracer_provider, meter_provider=recorder.meter_provider)
    worker.handler("k")(lambda payload: worker.stop())
    with leasekit.connect("memory://instrumented") as client:
        client.schedule("k")
        worker.run()
    assert recorder.named("run k")


def test_while_no_provider_is_set_up_nobody_listens() -> None:
    assert not Hooks([telemetry.hook()]).active


def test_a_provider_of_its_own_is_listened_for(recorder: Recorder) -> None:
    assert Hooks([recorder.hook]).active


def test_a_provider_that_is_set_up_later_is_noticed() -> None:
    script = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
import leasekit.telemetry
leasekit.telemetry.instrument()
with leasekit.connect("memory://") as client:
    client.schedule("before")
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    while not leasekit.telemetry.hook().listening:
        pass
    client.schedule("after")
print(*[span.name for span in exporter.get_finished_spans()], sep=",")
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "schedule after"


def test_importing_leasekit_loads_no_telemetry() -> None:
    command = [sys.executable, "-c", "import sys, leasekit; print(*sys.modules)"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert not [name for name in loaded if name.startswith("opentelemetry") or name == "leasekit.telemetry"]


# Metrics --------------------------------------------------------------------------------------------------------


def test_a_life_is_counted(client: Client, recorder: Recorder) -> None:
    client.schedule("k")
    run_one(client)
    recorder.when("settle k")
    assert recorder.value("messaging.client.sent.messages") == 1
    assert recorder.value("messaging.client.consumed.messages") == 1
    assert recorder.value("messaging.process.duration", outcome="success") == 1
    assert recorder.value("leasekit.start.latency") == 1
    assert recorder.value("leasekit.settlements", outcome="success", verdict="settled") == 1


def test_beats_are_measured(client: Client, recorder: Recorder) -> None:
    client.schedule("k")
    with leasekit.lease(next(client.tasks("k"))):
        eventually(lambda: recorder.value("leasekit.beat.verdicts", verdict="renewed"))
    assert recorder.value("leasekit.beat.round_trip") >= 1
    assert recorder.value("leasekit.beat.lateness") >= 1


def test_leases_held_go_up_and_down(client: Client, recorder: Recorder) -> None:
    client.schedule("k")
    with leasekit.lease(next(client.tasks("k"))):
        assert recorder.value("leasekit.leases.held") == 1
        assert recorder.value("leasekit.leases.capacity") == client.__connection__().keeper.capacity
    eventually(lambda: recorder.value("leasekit.leases.held") == 0)


def test_leases_of_all_clients_are_added_up(client: Client, service: MemoryService, recorder: Recorder) -> None:
    with Client(MemoryBackend(service, worker="second"), hooks=[recorder.hook]) as second:
        for one in (client, second):
            one.schedule("k")
        with leasekit.lease(next(client.tasks("k"))), leasekit.lease(next(second.tasks("k"))):
            assert recorder.value("leasekit.leases.held") == 2


def test_leases_of_a_client_that_is_not_instrumented_are_not_counted(client: Client, recorder: Recorder) -> None:
    with leasekit.connect("memory://") as other:
        other.schedule("k")
        with leasekit.lease(next(other.tasks("k"))):
            client.__connection__()
            assert recorder.value("leasekit.leases.held") == 0


def test_the_slots_of_a_worker_are_shown(client: Client, recorder: Recorder) -> None:
    worker = leasekit.Worker(client, concurrency=3)
    go = threading.Event()
    worker.handler("k")(lambda payload: go.wait(PATIENCE))
    client.schedule("k")
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        eventually(lambda: recorder.value("leasekit.worker.running") == 1)
        assert recorder.value("leasekit.worker.slots") == 3
        assert recorder.value("leasekit.worker.buffered") == 0
        eventually(lambda: recorder.value("leasekit.worker.window") == 2)
    finally:
        go.set()
        worker.stop()
        thread.join(PATIENCE)
    assert not recorder.points("leasekit.worker.slots")


@pytest.mark.parametrize(
    ("event", "name", "which"),
    [
        (AtRisk(at=0, task_id="a", token="t", why="500"), "leasekit.lease.strikes", {}),
        (Lost(at=0, task_id="a", token="t", reason="taken", why=""), "leasekit.lease.lost", {"reason": "taken"}),
        (ReportDelayed(at=0, task_ids=["a"], why=""), "leasekit.settlements.put_off", {}),
        (Sent(at=0, task_ids=["a"], late=0.5), "leasekit.beat.lateness", {}),
        (Answered(at=0, round_trip=0.1, verdicts={"gone": 1}), "leasekit.beat.verdicts", {"verdict": "gone"}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Event) else "",
)
def test_what_goes_wrong_is_counted(recorder: Recorder, event: Event, name: str, which: dict[str, str]) -> None:
    recorder.hook(event)
    assert recorder.value(name, **which) == 1


# Nothing secret, anywhere ---------------------------------------------------------------------------------------

CANARY = "canary-5e1f"


class Gathered:
    """All that anybody may read of what went on: log records in full, events, and the tokens that must not be there."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        self._caplog = caplog
        self.events: list[str] = []
        self.tokens: dict[str, str] = {}  # by task

    def hear(self, event: Event) -> None:
        self.events.append(repr(event))
        if isinstance(event, Claimed):
            self.tokens.update((task.id, task.token) for task in event.tasks)

    @property
    def records(self) -> list[logging.LogRecord]:
        return [record for record in self._caplog.records if record.name.startswith("leasekit")]

    @property
    def text(self) -> str:
        shown = logging.Formatter("%(message)s")
        # All but what the test's own client says of the addresses that it asks.
        records = [record for record in self._caplog.records if not record.name.startswith("httpx")]
        logs = [f"{shown.format(record)} {vars(record)}" for record in records]
        return "\n".join([*logs, *self.events])


@pytest.fixture
def gathered(caplog: pytest.LogCaptureFixture) -> Gathered:
    return Gathered(caplog)


def assert_no_canary(text: str, tokens: Mapping[str, str]) -> None:
    assert CANARY not in text
    assert not [task_id for task_id, token in tokens.items() if token[:7] in text]


def live_and_fail(worker: leasekit.Worker, client: Client) -> list[str]:
    """Declare handlers that end in every way, and schedule a task for each; all of them are full of secrets."""

    def succeed(payload: Any, held: leasekit.Lease) -> str:
        held.progress(CANARY)
        return CANARY

    def fail(payload: Any, held: leasekit.Lease) -> None:
        held.complete(CANARY)
        raise ValueError("for a reason")

    def give_up(payload: Any) -> None:
        raise leasekit.Fatal("for good")

    def misfit(payload: Literal["fits"]) -> None:
        raise AssertionError("is not run")

    def too_big(payload: Any) -> str:
        return CANARY * 200_000

    def no_json(payload: Any) -> object:
        return {CANARY: object()}

    def release(payload: Any, held: leasekit.Lease) -> None:
        if held.fence == 1:
            held.release()
        else:
            held.fail(CANARY)

    async def wait(payload: Any, held: leasekit.Lease) -> None:
        await anyio.sleep(PATIENCE)

    for handler in (succeed, fail, give_up, misfit, too_big, no_json, release, wait):
        worker.handler(handler.__name__)(handler)
        client.schedule(
            handler.__name__,
            {CANARY: CANARY},
            id=handler.__name__,
            dedupe_key=CANARY,
            max_attempts=1,
            claim_timeout=6,  # so that a cancel request comes within seconds
            heartbeat_timeout=6,
        )
    return ["succeed", "fail", "give_up", "misfit", "too_big", "no_json", "release", "wait"]


def test_no_payload_and_no_token_is_logged_measured_or_traced(
    service: MemoryService, recorder: Recorder, gathered: Gathered
) -> None:
    faulty = Faulty(MemoryBackend(service, worker="w"))
    hooks: list[Hook] = [recorder.hook, gathered.hear]
    with Client(faulty, hooks=hooks) as client, Client(MemoryBackend(service, worker="s")) as other:
        worker = leasekit.Worker(client)
        ids = live_and_fail(worker, other)
        faulty.script("claim", faults.lose_answer)
        faulty.script("beat", faults.lose_answer, faults.garble)
        faulty.script("settle", faults.lose_answer, faults.throttle(0.01))
        thread = threading.Thread(target=worker.run)
        thread.start()

        def has_ended(task_id: str) -> bool:
            info = other.get(task_id)
            return info is not None and info.status.ended

        eventually(lambda: worker.running == 1 and all(has_ended(one) for one in ids if one != "wait"))
        other.cancel("wait")
        worker.stop()
        thread.join(PATIENCE)
    assert len(gathered.tokens) == len(ids)
    spans = "".join(span.to_json() for span in recorder.spans.get_finished_spans())
    data = recorder.reader.get_metrics_data()
    assert data is not None
    assert len(gathered.records) >= 5
    assert "ValueError" in spans
    assert_no_canary(gathered.text + spans + data.to_json(), gathered.tokens)


def test_a_record_about_a_lease_carries_its_task_and_the_beginning_of_its_token(
    service: MemoryService, gathered: Gathered
) -> None:
    with Client(MemoryBackend(service, worker="w"), hooks=[gathered.hear]) as client:
        worker = leasekit.Worker(client)
        live_and_fail(worker, client)
        thread = threading.Thread(target=worker.run)
        thread.start()
        eventually(lambda: len(gathered.tokens) == 8 and worker.running == 1)
        client.cancel("wait")
        worker.stop()
        thread.join(PATIENCE)
    about = [record for record in gathered.records if re.search(r"\btask (\w+)", record.getMessage())]
    assert len(about) >= 4
    for record in about:
        fields = vars(record)
        assert fields["task_id"] in record.getMessage()
        assert len(fields["token_start"]) == 6


@pytest.mark.parametrize(
    "event",
    [
        Lost(at=0, task_id="a", token="abcdefgh", reason="taken", why="why"),
        AtRisk(at=0, task_id="a", token="abcdefgh", why="why"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_the_log_of_a_lease_in_trouble_carries_the_same(event: Event, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    Hooks()(event)
    (record,) = caplog.records
    fields = vars(record)
    assert (fields["task_id"], fields["token_start"]) == ("a", "abcdef")
    assert "abcdefg" not in repr(event)


@pytest.mark.parametrize(
    "open_it",
    [
        lambda: leasekit.connect(f"nosuch://user:{CANARY}@host/db"),
        lambda: leasekit.connect(f"http://user:{CANARY}@host"),
        lambda: leasekit.connect(f"memory://user:{CANARY}@host"),
        lambda: open_store(f"nosuch://user:{CANARY}@host/db"),
        lambda: open_store(f"postgresql://user:{CANARY}@127.0.0.1:1/db").open(),
        lambda: open_store(f"postgresql://user:{CANARY}@127.0.0.1:port/db").open(),
        lambda: open_store(f"postgresql://user:{CANARY}@host/db?colour=red"),
    ],
)
def test_a_password_in_an_address_is_not_repeated(open_it: Callable[[], Any], gathered: Gathered) -> None:
    with pytest.raises(leasekit.LeasekitError) as refused:
        open_it()
    assert CANARY not in str(refused.value) + gathered.text


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.anyio
async def test_the_server_tells_nobody_what_it_was_sent(tmp_path: Path, gathered: Gathered, anyio_backend: str) -> None:
    store = tmp_path / "tasks.db"
    async with Engine(open_store(f"sqlite:///{store}")) as engine:
        app: Any = Api(engine)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        stream = engine.feed.follow()
        told = await anext(stream)

        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:

            async def post(path: str, **body: Any) -> Any:
                return (await http.post(path, json=body)).json()

            task = {"id": "t", "kind": "k", "payload": CANARY, "dedupe_key": CANARY, "traceparent": CANARY}
            await post("/v1/tasks", tasks=[task])
            claimed = await post("/v1/claims", worker="w", kinds=["k"], claim_id="c")
            token = claimed["tasks"][0]["token"]
            assert claimed["tasks"][0]["traceparent"] is None
            tokens = {"t": token}
            await post("/v1/heartbeats", worker="w", beats=[{"id": "t", "token": token, "progress": CANARY}])
            result = {"id": "t", "token": token, "outcome": "retry", "error": CANARY, "result": CANARY}
            await post("/v1/results", worker="w", results=[{**result, "outcome": CANARY}])
            await post("/v1/results", worker="w", results=[result])
            await http.get(f"/v1/tasks?cursor={CANARY}")
            await http.get(f"/v1/{CANARY}?token={CANARY}")
            told += await anext(stream)
            # A mistake of ours, in the middle of a write that has all of it in its hands.
            _spoil(store)
            broken = await post("/v1/tasks", tasks=[{**task, "id": "u", "dedupe_key": None}])
            assert broken["status"] >= 500
            metrics = (await http.get("/metrics")).text
        await stream.aclose()
    assert gathered.records
    assert "leasekit_store_up" in metrics
    assert_no_canary(gathered.text + metrics + told.decode() + json.dumps(broken), tokens)


def _spoil(store: Path) -> None:
    with closing(sqlite3.connect(store)) as connection:
        connection.execute("CREATE UNIQUE INDEX spoiled ON task (kind)")
        connection.commit()
