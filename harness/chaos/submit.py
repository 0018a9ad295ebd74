"""Schedule tasks in batches, repeat each batch until it is acknowledged, and end.

python -m harness.chaos.submit URL PREFIX KIND COUNT SECONDS TTL BATCH RATE

Claims of a task grant TTL and its beats twice that, or the other way round; both grant TTL for a few tasks.
With a RATE, so many tasks are scheduled each second, whether or not those before them were answered (but at most 100
calls wait for their answers); without one (0), a batch follows the answer to the last one.
"""

import asyncio
import random
import sys
import time
from collections.abc import Iterator, Sequence

import leasekit
from leasekit import BackendError, NewTask
from leasekit.task import FixedDelays

_CALLS = 100  # that wait for their answers, at most


def main() -> None:
    url, prefix, kind, count, seconds, ttl, batch, rate = sys.argv[1:]
    tasks = list(_tasks(prefix, kind, int(count), seconds=float(seconds), ttl=float(ttl)))
    batches = [tasks[at : at + int(batch)] for at in range(0, len(tasks), int(batch))]
    asyncio.run(_schedule(url, batches, every=int(batch) / float(rate) if float(rate) else 0.0))


def _tasks(prefix: str, kind: str, count: int, *, seconds: float, ttl: float) -> Iterator[NewTask]:
    chance = random.Random(prefix)
    ttls = chance.choices([(ttl, 2 * ttl), (2 * ttl, ttl), (ttl, ttl)], [4, 4, 1], k=count)
    for number, (of_claims, of_beats) in enumerate(ttls):
        yield NewTask(
            id=f"{prefix}-{number}",
            kind=kind,
            payload={"seconds": seconds},
            claim_timeout=of_claims,
            heartbeat_timeout=of_beats,
            max_attempts=None,
            retry=FixedDelays(waits=[0.1]),
        )


async def _schedule(url: str, batches: Sequence[Sequence[NewTask]], *, every: float) -> None:
    """Schedule a batch `every` so many seconds; 0: once the last one is acknowledged."""
    began_at, room = time.monotonic(), asyncio.Semaphore(_CALLS if every else 1)
    async with leasekit.connect(url) as client, asyncio.TaskGroup() as calls:
        for number, batch in enumerate(batches):
            await asyncio.sleep(began_at + number * every - time.monotonic() if every else 0)
            await room.acquire()
            calls.create_task(_until_acknowledged(client, batch)).add_done_callback(lambda _: room.release())


async def _until_acknowledged(client: leasekit.Client, batch: Sequence[NewTask]) -> None:
    while True:
        try:
            await client.aschedule_all(batch)
            return
        except BackendError:
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    main()
