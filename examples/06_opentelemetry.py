"""OpenTelemetry: a trace from the schedule of a task to the worker that runs it, and metrics about leases.

leasekit needs only `telemetry.instrument()` (the extra `otel`); the rest is the set-up of the SDK
(`pip install opentelemetry-sdk`), which an application does once. Here spans and metrics are printed; an exporter would
send them to a collector.
"""

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import leasekit
from leasekit import telemetry

resource = Resource.create({"service.name": "thumbnails"})
spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
tracing = TracerProvider(resource=resource)
tracing.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(tracing)
metrics.set_meter_provider(MeterProvider([reader], resource=resource))

telemetry.instrument()  # all clients and workers of this process
tracer = trace.get_tracer("example")

with leasekit.connect("sqlite:///tasks.db") as client:
    with tracer.start_as_current_span("upload"):
        client.schedule("thumbnail", {"image": 42}, id="image-42")
    for task in client.tasks("thumbnail", until_idle=0.5):
        with leasekit.lease(task) as held, tracer.start_as_current_span("resize"):  # a part of "run thumbnail"
            held.complete("42.png")

finished = [(span, span.context) for span in spans.get_finished_spans() if span.context is not None]
names = {context.span_id: span.name for span, context in finished}
for span, context in finished:
    parent = names.get(span.parent.span_id) if span.parent is not None else None
    print(f"{context.trace_id:032x}  {span.name:18} of {parent or '-':18} {span.kind.name}")
assert len({context.trace_id for span, context in finished if span.name != "claim thumbnail"}) == 1

data = reader.get_metrics_data()
assert data is not None
for metric in data.resource_metrics[0].scope_metrics[0].metrics:
    print(metric.name, metric.unit)
