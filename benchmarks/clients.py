"""Costs of what clients and workers do around a task, in CPU time: where it is used, and where only others use it.

A life is a schedule, a claim, a run in a thread and a settlement, by a worker in this process, on `memory://`.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import leasekit
from _common import Bench, cpu_seconds
from leasekit.codecs import Codecs, Compressed

_BATCH = 100
_PAYLOAD = {"order": 4711, "items": ["cup", "plate"], "note": 10 * "as it comes "}
_Prepare = Callable[[leasekit.Client, leasekit.Worker], None]


def main() -> None:
    bench = Bench("clients")
    count = 300 if bench.quick else 5_000
    cases: Mapping[str, Mapping[str, Any]] = {
        "nothing": {},
        "nothing, again": {},
        "code around runs of another kind": {"prepare": partial(_surround, kind="other")},
        "code around the runs": {"prepare": partial(_surround, kind="k")},
        "another kind has periodic tasks": {"prepare": _repeat},
        "each batch is waited for": {"waits": True},
        "payloads and results are compressed": {"codec": Compressed()},
    }
    bench.compare({case: partial(_life, count, **options) for case, options in cases.items()})
    bench.close()


def _surround(client: leasekit.Client, worker: leasekit.Worker, *, kind: str) -> None:
    @worker.around(kind)
    def around(held: leasekit.Lease) -> Iterator[None]:
        yield


def _repeat(client: leasekit.Client, worker: leasekit.Worker) -> None:
    for number in range(100):
        client.set_periodic(f"p{number}", leasekit.PeriodicTask(kind="other", every=3600))


def _life(count: int, *, prepare: _Prepare | None = None, waits: bool = False, codec: Codecs = None) -> float:
    """Return the CPU in µs of the life of a task of the kind `k`."""
    with leasekit.connect("memory://", codec=codec) as client:
        worker = leasekit.Worker(client)

        @worker.handler("k")
        def handled(payload: dict[str, Any]) -> dict[str, Any]:
            return payload

        @worker.handler("other")
        def other(payload: None) -> None: ...

        if prepare is not None:
            prepare(client, worker)
        worker.drain()
        began = cpu_seconds()
        for _ in range(0, count, _BATCH):
            ids = [it.id for it in client.schedule_all([leasekit.NewTask(kind="k", payload=_PAYLOAD)] * _BATCH)]
            worker.drain()
            if waits:
                ends = client.wait_tasks(*ids, timeout=60)
                assert {end.status for end in ends} == {leasekit.Status.SUCCESS}
        return 1e6 * (cpu_seconds() - began) / count


if __name__ == "__main__":
    main()
