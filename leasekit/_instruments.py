"""The instruments of `telemetry`: counters, histograms and gauges of one meter of OpenTelemetry."""

import functools
from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from leasekit.hooks import Answered, AtRisk, Event, Lost, ReportDelayed, Sent

SYSTEM = {"messaging.system": "leasekit"}
"""The attribute of every record."""

_FAST = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10]
_LONG = [0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3600, 14400]


class Metrics:
    """The instruments of one meter."""

    def __init__(self, meter: Meter, gauge: Callable[[str], float | None]) -> None:
        fast = functools.partial(meter.create_histogram, unit="s", explicit_bucket_boundaries_advisory=_FAST)
        self.sent = meter.create_counter("messaging.client.sent.messages", "{message}", "Tasks scheduled.")
        self.consumed = meter.create_counter("messaging.client.consumed.messages", "{message}", "Tasks claimed.")
        self.ran = meter.create_histogram(
            "messaging.process.duration", "s", "How long handlers ran.", explicit_bucket_boundaries_advisory=_LONG
        )
        self.start_latency = fast(
            "leasekit.start.latency", description="From the grant of a task until its handler began."
        )
        self._round_trip = fast("leasekit.beat.round_trip", description="From sending beats until their answer.")
        self._lateness = fast("leasekit.beat.lateness", description="How long after their time beats were sent.")
        self._verdicts = meter.create_counter(
            "leasekit.beat.verdicts", "{beat}", "Heartbeats, by how they were answered."
        )
        self._strikes = meter.create_counter("leasekit.lease.strikes", "{lease}", "Leases whose beats began to fail.")
        self._lost = meter.create_counter("leasekit.lease.lost", "{lease}", "Leases that were lost, by reason.")
        self.settled = meter.create_counter("leasekit.settlements", "{task}", "Runs reported, by outcome and verdict.")
        self._unreported = meter.create_counter(
            "leasekit.settlements.put_off", "{task}", "Reports that failed, and are sent again."
        )
        for name, unit, description in _GAUGES:
            meter.create_observable_gauge(name, [functools.partial(_observe, name, gauge)], unit, description)

    def count(self, event: Event) -> None:
        match event:
            case Sent():
                self._lateness.record(event.late, SYSTEM)
            case Answered():
                self._round_trip.record(event.round_trip, SYSTEM)
                for verdict, count in event.verdicts.items():
                    self._verdicts.add(count, {**SYSTEM, "leasekit.verdict": verdict})
            case AtRisk():
                self._strikes.add(1, SYSTEM)
            case Lost():
                self._lost.add(1, {**SYSTEM, "leasekit.reason": event.reason})
            case ReportDelayed():
                self._unreported.add(len(event.task_ids), SYSTEM)
            case _:
                pass


_GAUGES = [
    ("leasekit.leases.held", "{lease}", "Leases that are held."),
    ("leasekit.leases.capacity", "{lease}", "Leases that can beat in one cycle."),
    ("leasekit.settlements.pending", "{task}", "Reports that are not answered yet."),
    ("leasekit.worker.slots", "{slot}", "Handlers that can run at once."),
    ("leasekit.worker.running", "{task}", "Handlers that run."),
    ("leasekit.worker.buffered", "{task}", "Tasks that are claimed and wait for a slot: the worker's queue."),
    ("leasekit.worker.waiting", "{task}", "Tasks that wait, without a slot, for the next call of their handler."),
    ("leasekit.worker.window", "{task}", "Tasks that the worker would claim: the part of its window that is free."),
    ("leasekit.worker.window.size", "{task}", "Tasks that the worker may hold: the whole of its window."),
]


def _observe(name: str, gauge: Callable[[str], float | None], _: CallbackOptions) -> Iterable[Observation]:
    value = gauge(name)
    return [] if value is None else [Observation(value, SYSTEM)]
