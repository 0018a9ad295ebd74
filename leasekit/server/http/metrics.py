"""`/metrics`: the state of a server, in the text format of Prometheus.

Numbers are read when Prometheus asks; answers are counted as they leave, and what happens to tasks as it is committed.
Nothing here scans the store. Every label has a bounded number of values, whatever clients send: a hundred kinds have a
label of their own, and the rest are *other*.
"""

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from leasekit.errors import BackendError
from leasekit.named import PREFIXES
from leasekit.server.enqueuer import Enqueuer
from leasekit.server.histogram import Histogram
from leasekit.server.roles.backlog import Backlog, count_waiting
from leasekit.server.roles.unmet import waiting
from leasekit.server.tally import OTHER

if TYPE_CHECKING:
    from leasekit.server.engine import Engine

CONTENT_TYPE = CONTENT_TYPE_LATEST
_KINDS = 100
_LOOKED_AT = 1000  # kinds for a label: those with most tasks
_OTHERS = 900  # kinds without a label that are looked at for unmet requirements: those of which most tasks wait
_IDLE = 3600.0  # seconds without a change of its counts, after which a kind may lose its label
_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS"})
_DURATIONS = (
    ("wait", "How long tasks that were due waited for a claim.", attrgetter("waits")),
    ("start", "How long tasks that were due waited until their handlers began.", attrgetter("starts")),
    ("run", "How long runs took, from claim to end.", attrgetter("runs")),
    ("handler", "How long runs took, from the begin of their handlers to their end.", attrgetter("handlers")),
)


class Metrics:
    """The metrics of one server over one engine."""

    def __init__(self, engine: "Engine", *, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._engine = _EngineCollector(engine, clock)
        self._requests = _RequestCollector()
        for collector in (self._engine, self._requests):
            self._registry.register(collector)
        ProcessCollector(registry=self._registry)

    async def exposition(self) -> bytes:
        await self._engine.look()
        return await asyncio.to_thread(generate_latest, self._registry)

    def refuse(self, reason: str) -> None:
        """Count a request without a valid access token."""
        self._requests.refuse(reason)

    def count(self, route: str | None, method: str, status: int) -> None:
        """Count an answer; `route` is None for unknown paths, which must not become labels: clients choose them."""
        self._requests.count(route or OTHER, method, status)


class _RequestCollector(Collector):
    """Counts the answers of this server by route, method (unusual methods together) and status."""

    def __init__(self) -> None:
        self._answered = Counter[tuple[str, str, int]]()
        self._refused = Counter[str]({"missing": 0, "invalid": 0, "locked": 0})

    def refuse(self, reason: str) -> None:
        self._refused[reason] += 1

    def count(self, route: str, method: str, status: int) -> None:
        self._answered[route, method if method in _METHODS else OTHER, status] += 1

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "leasekit_http_requests",
            "Requests that were answered, by route, method and status.",
            labels=["route", "method", "status"],
        )
        for (route, method, status), count in list(self._answered.items()):
            requests.add_metric([route, method, str(status)], count)
        yield requests
        refused = CounterMetricFamily(
            "leasekit_access_tokens_refused",
            "Requests without a valid access token, by reason; locked: from an address that had sent too many.",
            labels=["reason"],
        )
        for reason, count in list(self._refused.items()):
            refused.add_metric([reason], count)
        yield refused


class _KindLabels:
    """The kinds that have a label of their own, at most a hundred.

    A kind without one gets the label of the kind whose counts have stayed the same for longest, an hour at least: so
    series end seldom, and their number in a day is bounded too.
    """

    def __init__(self) -> None:
        self._changed_at: dict[str, float] = {}  # of each kind with a label
        self._before: dict[str, dict[str, int]] = {}

    def choose(self, stats: dict[str, dict[str, int]], now: float) -> Container[str]:
        """Return the kinds with a label, given the counts of all kinds, of which there may be a million."""
        labels = {kind: at for kind, at in self._changed_at.items() if kind in stats}
        largest = heapq.nlargest(_LOOKED_AT, stats, key=lambda kind: (sum(stats[kind].values()), kind))
        looked_at = {kind: stats[kind] for kind in (*labels, *largest)}
        changed = [kind for kind, counts in looked_at.items() if counts != self._before.get(kind)]
        self._before = looked_at
        labels.update({kind: now for kind in changed if kind in labels})
        idle = sorted((kind for kind, at in labels.items() if now - at >= _IDLE), key=labels.__getitem__, reverse=True)
        for kind in sorted(set(changed) - labels.keys(), key=lambda kind: (-sum(stats[kind].values()), kind)):
            if len(labels) >= _KINDS:
                if not idle:
                    break
                del labels[idle.pop()]
            labels[kind] = now
        self._changed_at = labels
        return labels


class _EngineCollector(Collector):
    """Reads an engine: the counts of its tasks as of the last `look`, all other numbers as they are."""

    def __init__(self, engine: "Engine", clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._tasks: dict[str, dict[str, int]] | None = None
        self._is_ready = False
        self._backlogs: dict[str, Backlog] = {}
        self._unmet = Counter[str]()
        self._labels = _KindLabels()

    async def look(self) -> None:
        """Count the tasks, and probe the store; if it cannot be read, only the metrics of tasks are left out."""
        self._is_ready = await self._engine.ready() is None
        try:
            counts = await self._engine.queries.counts()
            tasks, others = await asyncio.to_thread(self._by_label, counts)  # they may be a million
            waits = {
                kind: count
                for kind, count in count_waiting(tasks).items()
                if kind != OTHER and not kind.startswith(PREFIXES)  # a free name waits for nobody
            }
            self._backlogs = await self._engine.queries.backlogs(waits)
            unmet = await self._engine.queries.unmet([*waits, *others])
        except BackendError:
            self._tasks, self._backlogs = None, {}
            return
        self._unmet = Counter(dict.fromkeys(waits, 0))
        for kind, requirements in unmet.items():
            self._unmet[kind if kind in tasks else OTHER] += len(requirements)
        self._tasks = tasks

    def _by_label(self, stats: dict[str, dict[str, int]]) -> tuple[dict[str, dict[str, int]], list[str]]:
        """Return the counts of the kinds with a label, and of the others together; and those of which most wait."""
        labels = self._labels.choose(stats, self._clock())
        tasks: dict[str, dict[str, int]] = {}
        for kind, counts in stats.items():
            into = tasks.setdefault(kind if kind in labels else OTHER, {})
            for status, count in counts.items():
                into[status] = into.get(status, 0) + count
        waits = {kind: count for kind, count in waiting(stats).items() if kind not in labels}
        return tasks, heapq.nlargest(_OTHERS, waits, key=waits.__getitem__)

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics; called in a thread other than the event loop's."""
        engine = self._engine
        if self._tasks is not None:
            tasks = [((kind, status), n) for kind, counts in self._tasks.items() for status, n in counts.items()]
            yield _gauge("leasekit_tasks", "Tasks, by kind and status.", ["kind", "status"], tasks)
        is_up = self._is_ready and self._tasks is not None
        yield GaugeMetricFamily("leasekit_store_up", "1 while the store can be read and written.", is_up)
        roles = [((role,), 1) for role in sorted(engine.roles)]
        yield _gauge("leasekit_role", "1 for each role of this server.", ["role"], roles)
        yield GaugeMetricFamily("leasekit_claims_waiting", "Claims that wait for a task.", engine.claims_waiting)
        yield GaugeMetricFamily("leasekit_ends_awaited", "Tasks for whose ends requests wait.", engine.ends_awaited)
        yield GaugeMetricFamily("leasekit_workers", "Workers heard from in the last ten minutes.", len(engine.fleet))
        draining = engine.queries.draining_here
        yield GaugeMetricFamily("leasekit_workers_draining", "Workers that are to finish, and to stop.", draining)
        backlog = [((rank,), waiting) for rank, waiting in engine.commit.backlog.items()]
        yield _gauge("leasekit_commit_backlog", "Items that wait to be written.", ["class"], backlog)
        yield _histogram("leasekit_commit_batch_size", "Items written in one transaction.", engine.commit.sizes)
        yield _histogram("leasekit_commit_seconds", "How long transactions took.", engine.commit.seconds)
        yield GaugeMetricFamily("leasekit_event_readers", "Readers of /v1/events.", len(engine.feed))
        yield CounterMetricFamily("leasekit_event_readers_dropped", "Readers dropped as too slow.", engine.feed.dropped)
        gates = [((gate.kind or "", gate.collection or "", gate.mode), 1) for gate in engine.queries.gates_here]
        yield _gauge("leasekit_gate", "1 for each closed gate.", ["kind", "collection", "mode"], gates)
        if engine.enqueuer is not None:
            yield from self._queued(engine.enqueuer)
        yield from self._waiting()
        yield from self._happened()
        yield from self._stored()

    def _queued(self, enqueuer: Enqueuer) -> Iterable[Metric]:
        labels = ["kind", "priority"]
        depth = GaugeMetricFamily("leasekit_queue_depth", "Messages of a queue when it was last asked.", labels=labels)
        for name, messages in enqueuer.depths.items():
            if name.kind in self._backlogs:
                depth.add_metric([name.kind, str(name.priority)], messages)
        yield depth
        failing = len(enqueuer.failing)
        yield GaugeMetricFamily("leasekit_queues_failing", "Queues that take no messages at present.", failing)

    def _waiting(self) -> Iterable[Metric]:
        age = GaugeMetricFamily(
            "leasekit_oldest_due_seconds", "How long the oldest task that is due has waited.", labels=["kind"]
        )
        due = GaugeMetricFamily("leasekit_tasks_due", "Tasks that wait and are due.", labels=["kind"])
        later = GaugeMetricFamily("leasekit_tasks_later", "Tasks that wait and are not due yet.", labels=["kind"])
        keys = GaugeMetricFamily("leasekit_keys_due", "Keys that have due tasks.", labels=["kind"])
        awaiting = GaugeMetricFamily("leasekit_tasks_awaiting", "Tasks that wait for other tasks.", labels=["kind"])
        metrics = (age, due, later, keys, awaiting)
        for kind, backlog in self._backlogs.items():
            for metric, value in zip(metrics, backlog, strict=True):
                metric.add_metric([kind], value)
        yield from metrics
        unmet = GaugeMetricFamily(
            "leasekit_requirements_unmet",
            "Sets of labels (none is one too) that due tasks require and no worker known has.",
            labels=["kind"],
        )
        for kind, count in self._unmet.items() if self._tasks is not None else ():
            unmet.add_metric([kind], count)
        yield unmet

    def _happened(self) -> Iterable[Metric]:
        kinds = list(self._engine.commit.tally.kinds.items())
        for event, (name, description, label) in _EVENTS.items():
            counter = CounterMetricFamily(name, description, labels=["kind", label] if label else ["kind"])
            for kind, numbers in kinds:
                if not label:
                    counter.add_metric([kind], numbers.events[event, ""])
                    continue
                for (happened, detail), count in list(numbers.events.items()):
                    if happened == event:
                        counter.add_metric([kind, detail], count)
            yield counter
        for name, what, histogram_of in _DURATIONS:
            durations = HistogramMetricFamily(f"leasekit_{name}_seconds", what, labels=["kind"])
            for kind, numbers in kinds:
                histogram = histogram_of(numbers)
                durations.add_metric([kind], _buckets(histogram), histogram.sum)
            yield durations

    def _stored(self) -> Iterable[Metric]:
        engine = self._engine
        if (since := engine.since_commit) is not None:
            yield GaugeMetricFamily("leasekit_last_commit_age_seconds", "Since the last transaction.", since)
        steps = engine.clock.steps
        yield CounterMetricFamily(
            "leasekit_clock_steps", "Steps of the wall clock, or corrections of a shared one.", steps
        )
        if engine.neighbours is not None:
            alive = len(engine.neighbours.alive)
            yield GaugeMetricFamily("leasekit_nodes", "Servers and others that have the database open.", alive)
            retries = engine.commit.retries
            yield CounterMetricFamily("leasekit_contention_retries", "Transactions repeated for others.", retries)
        stalls = engine.clock.stalls
        yield CounterMetricFamily("leasekit_stalls", "Gaps of some seconds in which the server did not run.", stalls)
        if (space := engine.queries.space()) is not None:
            yield GaugeMetricFamily("leasekit_store_bytes", "Size of the store's file.", space.file)
            yield GaugeMetricFamily("leasekit_store_wal_bytes", "Size of its write-ahead log.", space.log)
            yield GaugeMetricFamily("leasekit_store_disk_free_bytes", "Free space of its disk.", space.free)


_EVENTS = {  # event → metric, description, and the label that says more
    "scheduled": ("leasekit_tasks_scheduled", "Tasks that were scheduled.", None),
    "enqueued": ("leasekit_tasks_enqueued", "Tasks that were moved to queues.", None),
    "unsent": ("leasekit_queue_failures", "Messages that a queue has not taken: their tasks are put back.", None),
    "settled": ("leasekit_settlements", "Runs that their holders, or supervisors, have ended, by outcome.", "outcome"),
    "expired": ("leasekit_leases_expired", "Leases that have expired.", None),
    "dead": ("leasekit_tasks_died", "Tasks that have failed or crashed too often.", None),
    "dropped": ("leasekit_tasks_dropped", "Due tasks that ended because their kind or collection is closed.", None),
    "late": ("leasekit_start_deadlines_missed", "Tasks that were dropped: they had not begun in time.", None),
    "redriven": ("leasekit_redrives", "Tasks that were given a new life.", None),
    "rescheduled": ("leasekit_reschedules", "Waiting tasks that were given another due time or priority.", None),
    "replaced": ("leasekit_tasks_replaced", "Waiting tasks whose payload and due time were replaced (debounce).", None),
    "limited": ("leasekit_limited", "Times that due tasks were left because their kind was at a limit.", "limit"),
    "firing": ("leasekit_firings", "Firings of periodic tasks, by what became of them.", "outcome"),
    "removed": ("leasekit_tasks_removed", "Tasks that were deleted, by a purge or by retention.", "by"),
}


def _gauge(name: str, description: str, labels: list[str], values: Iterable[tuple[Sequence[str], float]]) -> Metric:
    gauge = GaugeMetricFamily(name, description, labels=labels)
    for label_values, value in values:
        gauge.add_metric(label_values, value)
    return gauge


def _histogram(name: str, description: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(name, description, _buckets(histogram), histogram.sum)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    return list(zip([*map(str, histogram.bounds), "+Inf"], histogram.cumulated(), strict=True))
