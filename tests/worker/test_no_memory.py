"""A body that used up all memory has let go of it before its failure is reported."""

import asyncio
import gc
import weakref
from typing import Any

import leasekit


class _Much:
    """Stands for all that there is."""


def test_what_a_body_had_when_memory_ran_out_is_free_when_it_is_reported(monkeypatch: Any) -> None:
    held_then: list[bool] = []
    much: list[weakref.ref[_Much]] = []
    ended = leasekit.Lease.ended

    def look(lease: leasekit.Lease, error: BaseException | None, **options: Any) -> Any:
        held_then.append(much[0]() is not None)
        worker.stop()
        return ended(lease, error, **options)

    monkeypatch.setattr(leasekit.Lease, "ended", look)
    with leasekit.connect("memory://") as client:
        worker = leasekit.Worker(client, concurrency=1)

        @worker.handler("job")
        def job(payload: None) -> None:
            mine = _Much()
            much.append(weakref.ref(mine))
            raise MemoryError

        client.schedule("job", max_attempts=1)

        async def serve() -> None:
            async with asyncio.timeout(20):
                await worker.serve()

        gc.disable()
        try:
            asyncio.run(serve())
        finally:
            gc.enable()
    assert held_then == [False]


def test_an_error_whose_causes_go_round_in_a_circle_is_reported_all_the_same() -> None:
    def body(payload: None) -> None:
        error, cause = MemoryError(), ValueError()
        error.__cause__, cause.__cause__ = cause, error
        raise error

    with leasekit.connect("memory://") as client:
        worker = leasekit.Worker(client)
        worker.handler("job")(body)
        task = client.schedule("job", max_attempts=1)
        asyncio.run(_until_ended(worker, client, task.id))


async def _until_ended(worker: leasekit.Worker, client: leasekit.Client, task_id: str) -> None:
    serving = asyncio.create_task(worker.serve())
    await client.await_for(task_id, timeout=60)
    worker.stop()
    await serving
