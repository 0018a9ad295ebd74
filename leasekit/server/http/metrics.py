"""`/metrics`: what a server is about, in the text format of Prometheus.

Numbers are read when they are asked for; only answers are counted as they leave. No label has more values than is known
beforehand, whatever strangers send: kinds past the first hundred are *other*.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from litestar.types import Message, Scope
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from leasekit.errors import BackendError
from leasekit.server.histogram import Histogram

if TYPE_CHECKING:
    from leasekit.server.engine import Engine

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = CONTENT_TYPE_LATEST
_KINDS = 100
_OTHER = "other"
_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS"})


class Metrics:
    """The numbers of one server over one engine."""

    def __init__(self, engine: "Engine") -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._engine = _EngineCollector(engine)
        self._requests = _RequestCollector()
        for collector in (self._engine, self._requests):
            self._registry.register(collector)
        ProcessCollector(registry=self._registry)

    async def exposition(self) -> bytes:
        """All of it, as text."""
        await self._engine.look()
        return await asyncio.to_thread(generate_latest, self._registry)

    async def before_send(self, message: Message, scope: Scope) -> None:
        """Count an answer when it begins to leave."""
        if message["type"] == "http.response.start":
            asked = cast("dict[str, Any]", scope)
            # Of what is no route the path is the stranger's own.
            route = asked.get("path_template") if asked.get("route_handler") is not None else None
            self._requests.count(str(route or _OTHER), str(asked.get("method")), message["status"])


class _RequestCollector(Collector):
    """The answers of this server."""

    def __init__(self) -> None:
        self._answered = Counter[tuple[str, str, int]]()

    def count(self, route: str, method: str, status: int) -> None:
        self._answered[route, method if method in _METHODS else _OTHER, status] += 1

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "leasekit_http_requests",
            "Requests that were answered, by route, method and status.",
            labels=["route", "method", "status"],
        )
        for (route, method, status), count in list(self._answered.items()):
            requests.add_metric([route, method, str(status)], count)
        yield requests


class _EngineCollector(Collector):
    """Reads an engine: its tasks when `look` was called last, the rest as it is."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._tasks: dict[str, dict[str, int]] | None = None
        self._kinds: set[str] = set()  # with a name of their own; it only grows, so that no series comes and goes

    async def look(self) -> None:
        """Count the tasks. Where the store does not answer, there are no numbers of them, but all others."""
        try:
            stats: dict[str, dict[str, int]] = (await self._engine.stats()).kinds
        except BackendError:
            self._tasks = None
            return
        by_size = sorted(stats.keys() - self._kinds, key=lambda kind: (-sum(stats[kind].values()), kind))
        self._kinds.update(by_size[: _KINDS - len(self._kinds)])
        tasks: dict[str, dict[str, int]] = {}
        for kind, counts in stats.items():
            into = tasks.setdefault(kind if kind in self._kinds else _OTHER, {})
            for status, count in counts.items():
                into[status] = into.get(status, 0) + count
        self._tasks = tasks

    def collect(self) -> Iterable[Metric]:
        """What Prometheus asks for; in a thread of its own."""
        engine = self._engine
        if self._tasks is not None:
            tasks = GaugeMetricFamily("leasekit_tasks", "Tasks, by kind and status.", labels=["kind", "status"])
            for kind, counts in self._tasks.items():
                for status, count in counts.items():
                    tasks.add_metric([kind, status], count)
            yield tasks
        yield GaugeMetricFamily("leasekit_store_up", "1 while the store answers.", self._tasks is not None)
        yield GaugeMetricFamily("leasekit_claims_waiting", "Claims that wait for a task.", engine.claims_waiting)
        yield GaugeMetricFamily("leasekit_workers", "Workers heard of in the last ten minutes.", engine.workers_heard)
        backlog = GaugeMetricFamily("leasekit_commit_backlog", "Items that wait to be written.", labels=["class"])
        for rank, waiting in engine.backlog.items():
            backlog.add_metric([rank], waiting)
        yield backlog
        yield _histogram("leasekit_commit_batch_size", "Items written in one transaction.", engine.batch_sizes)
        yield _histogram("leasekit_commit_seconds", "How long transactions took.", engine.commit_seconds)
        yield CounterMetricFamily("leasekit_leases_expired", "Leases that ran out and were taken back.", engine.expired)
        yield GaugeMetricFamily("leasekit_event_readers", "Who follows /v1/events.", len(engine.feed))
        yield CounterMetricFamily("leasekit_event_readers_dropped", "Readers too slow to follow.", engine.feed.dropped)


def _histogram(name: str, description: str, histogram: Histogram) -> Metric:
    counts = histogram.cumulated()
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return HistogramMetricFamily(name, description, list(zip(bounds, counts, strict=True)), histogram.sum)
