"""The cost of telemetry for the holder of leases: CPU time a life (claim, lease, beat, settle), on `memory://`.

The cases: no telemetry; instrumented while no SDK is set up, so that nothing records; an SDK that records everything
and exports nothing. They take turns within one process, so that changes of the machine's load hit all of them.
"""

import statistics
import time

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider

import leasekit
from _common import Bench
from leasekit import telemetry
from leasekit.client import Client
from leasekit.hooks import Hook
from leasekit.task import NewTask
from leasekit.testing.memory import MemoryBackend, MemoryService

_ROUNDS = 12  # of each case, in a run


def main() -> None:
    bench = Bench("telemetry")
    cases: dict[str, list[Hook]] = {
        "not instrumented": [],
        "instrumented, nothing records": [telemetry.hook()],
        "the SDK records all": [
            telemetry.hook(tracer_provider=TracerProvider(), meter_provider=MeterProvider([InMemoryMetricReader()]))
        ],
    }
    lives = 20 if bench.quick else 200
    took: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(bench.repeat * (1 if bench.quick else _ROUNDS)):
        for case, hooks in cases.items():
            took[case].append(1e6 * _round(hooks, lives) / lives)
    bare = took["not instrumented"]
    for case, values in took.items():
        if bench.wants(case):
            # Each round is compared with its neighbour in time.
            of_bare = statistics.median(value / without for value, without in zip(values, bare, strict=True))
            bench.note(case, cpu_us_per_life=round(statistics.median(values), 1), of_bare=round(of_bare, 3))
    bench.close()


def _round(hooks: list[Hook], lives: int) -> float:
    """Seconds of CPU, of all threads, for `lives` lives."""
    with Client(MemoryBackend(MemoryService(), worker="bench"), hooks=hooks) as client:
        client.schedule_all([NewTask(kind="k") for _ in range(lives)])
        began_at = time.process_time()
        for task in client.tasks("k", until_idle=0):
            with leasekit.lease(task) as held:
                held.progress(1)
        return time.process_time() - began_at


if __name__ == "__main__":
    main()
