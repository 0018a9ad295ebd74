"""Costs of what a task may ask for, in CPU time: where tasks of the kind use it, and where only another kind does.

A life is a schedule, a claim and a settlement, in batches of 100, on an SQLite file in this process.
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from itertools import count as numbers
from typing import Any

from _common import Bench, cpu_seconds, stored_in
from leasekit.server.embedded import EmbeddedBackend
from leasekit.server.engine import Engine
from leasekit.server.store.urls import open_store
from leasekit.task import NewTask, Settlement

_BATCH = 100
_USES: Mapping[str, Mapping[str, Any]] = {
    "tags": {"tags": ["customer", "csv"]},
    "required labels": {"requires": {"gpu": "a100"}},
    "preferred labels": {"prefers": {"gpu": "a100"}},
    "a start deadline": {"start_deadline": 3600},
    "a dedupe key": {"dedupe_key": ""},
    "a task to run after": {"after": ["first"]},
}


def main() -> None:
    bench = Bench("features")
    count = 1_000 if bench.quick else 10_000
    cases: dict[str, tuple[str, Mapping[str, Any]]] = {"nothing": ("k", {}), "nothing, again": ("k", {})}
    for name, options in _USES.items():
        cases |= {f"another kind's tasks have {name}": ("other", options), f"the tasks have {name}": ("k", options)}
    bench.compare({case: partial(_run, count, *used) for case, used in cases.items()})
    bench.close()


def _run(count: int, kind: str, options: Mapping[str, Any]) -> float:
    return asyncio.run(_life(count, kind, options))


async def _life(count: int, kind: str, options: Mapping[str, Any]) -> float:
    """Return the CPU in µs of the life of a task of the kind `k`, where tasks of `kind` have these options."""
    with stored_in() as url:
        engine, number = Engine(open_store(url)), numbers()
        backend = EmbeddedBackend(lambda: engine, worker="w")

        def batch(of: str) -> list[NewTask]:
            mine = options if of == kind else {}
            if "dedupe_key" in mine:
                return [NewTask(kind=of, dedupe_key=f"d{next(number)}") for _ in range(_BATCH)]
            return [NewTask(kind=of, **mine) for _ in range(_BATCH)]

        async def claimed(of: str, claim_id: str) -> list[Settlement]:
            answer = await backend.claim([of], limit=_BATCH, wait=0, claim_id=claim_id, labels={"gpu": "a100"})
            return [Settlement(id=task.id, token=task.token, outcome="success") for task in answer.tasks]

        try:
            await backend.schedule([NewTask(kind="before", id="first")])
            if kind == "k":
                await backend.settle(await claimed("before", "before"))
            else:
                await backend.schedule(batch(kind))
            began = cpu_seconds()
            for start in range(0, count, _BATCH):
                await backend.schedule(batch("k"))
                ends = await claimed("k", str(start))
                assert len(ends) == _BATCH
                await backend.settle(ends)
            return 1e6 * (cpu_seconds() - began) / count
        finally:
            await backend.aclose()


if __name__ == "__main__":
    main()
