"""Costs of kinds, gates, limits, keys and queues for a task, in CPU time: where they are used, and where others are.

A life is a schedule, a claim and a settlement, in batches of 100, on an SQLite file in this process.
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from _common import Bench, cpu_seconds, stored_in
from leasekit.queues import QueueName
from leasekit.server.embedded import EmbeddedBackend
from leasekit.server.engine import Engine
from leasekit.server.enqueuer import MOVE
from leasekit.server.roles.enqueueing import Due
from leasekit.server.store.urls import open_store
from leasekit.task import KindSettings, NewTask, Settlement, Ticket
from leasekit.testing.queues import MemoryQueues

_BATCH = 100
_CASES: Mapping[str, Mapping[str, Any]] = {
    "nothing set": {},
    "nothing set, again": {},
    "another kind has settings and limits": {"other": KindSettings(max_attempts=3, concurrency=4, key_concurrency=1)},
    "another kind and another collection are paused": {"paused": "elsewhere"},
    "tasks of another kind have keys": {"keyed": "other"},
    "another kind has queues": {"queued": "other"},
    "the kind has settings": {"k": KindSettings(max_attempts=3, priority=1, retention=86_400)},
    "the kind has a concurrency": {"k": KindSettings(concurrency=10_000)},
    "the kind has a rate": {"k": KindSettings(rate=10_000, burst=1_000_000)},
    "the kind has a weight and ages": {"k": KindSettings(weight=3, aging=60)},
    "the kind is paused and opened again, once a batch": {"paused": "k"},
    "the tasks have keys": {"keyed": "k"},
    "keys have a concurrency": {"keyed": "k", "k": KindSettings(key_concurrency=10_000)},
    "keys are ordered": {"keyed": "k", "k": KindSettings(ordered=True)},
    "keys have a rate": {"keyed": "k", "k": KindSettings(key_rate=10_000, key_burst=1_000_000)},
    "the tasks come through queues in memory": {"queued": "k"},
}


def main() -> None:
    bench = Bench("rules")
    count = 1_000 if bench.quick else 10_000
    bench.compare({case: partial(_run, count, options) for case, options in _CASES.items()})
    bench.close()


def _run(count: int, options: Mapping[str, Any]) -> float:
    return asyncio.run(_life(count, **options))


async def _life(
    count: int, *, paused: str | None = None, keyed: str | None = None, queued: str | None = None, **kinds: KindSettings
) -> float:
    """Return the CPU in µs of the life of a task of the kind `k`."""
    with stored_in() as url:
        engine = Engine(open_store(url))
        backend = EmbeddedBackend(lambda: engine, worker="w")
        try:
            for kind, settings in kinds.items():
                await backend.set_kind(kind, settings)
            if paused == "elsewhere":
                await backend.set_gate(kind="other", mode="pause")
                await backend.set_gate(collection=paused, mode="pause")
            if keyed == "other":
                await backend.schedule([NewTask(kind="other", key=f"t{number}") for number in range(_BATCH)])
            await backend.stats()  # opens the file
            queues = None if queued is None else _Queues(engine, queued)
            began = cpu_seconds()
            for start in range(0, count, _BATCH):
                keys = [f"t{number}" if keyed == "k" else None for number in range(_BATCH)]
                if paused == "k":
                    await backend.set_gate(kind="k", mode="pause")
                await backend.schedule([NewTask(kind="k", key=key) for key in keys])
                if paused == "k":
                    await backend.open_gate(kind="k")
                tickets = [] if queues is None else await queues.move()
                if queued == "k":
                    claimed = await backend.claim_tickets(["k"], tickets, limit=_BATCH, claim_id=str(start))
                else:
                    claimed = await backend.claim(["k"], limit=_BATCH, wait=0, claim_id=str(start))
                ends = [Settlement(id=task.id, token=task.token, outcome="success") for task in claimed.tasks]
                assert len(ends) == _BATCH
                await backend.settle(ends)
            return 1e6 * (cpu_seconds() - began) / count
        finally:
            await backend.aclose()


class _Queues:
    """Queues in memory, and the consumer that moves the due tasks of one kind to them."""

    def __init__(self, engine: Engine, kind: str) -> None:
        self._engine, self._kind, self._queues = engine, kind, MemoryQueues()

    async def move(self) -> list[Ticket]:
        """Move a batch; return what a worker receives, and deletes."""
        moved = await self._engine.commit.ask(MOVE, Due([self._kind], _BATCH, ()), size=_BATCH)
        tickets = [Ticket(id=task.id, fence=task.fence) for task in moved]
        await self._queues.send(QueueName(self._kind, 2), tickets)
        messages = await self._queues.receive([self._kind], limit=_BATCH, wait=0)
        await self._queues.delete(messages)
        return [message.ticket for message in messages]


if __name__ == "__main__":
    main()
