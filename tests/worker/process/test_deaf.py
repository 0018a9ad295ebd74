"""An executor that cannot hear its worker any more ends: no task waits in it for ever."""

import asyncio
import threading
import time

import leasekit
from leasekit._worker.process import child


class _NoMemory(child.Channel):
    """What any allocation may meet once a body has used up all memory."""

    def wait(self, seconds: float | None = None) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError
        super().wait(seconds)


def deafen(first: bool, held: leasekit.Lease) -> None:
    """The first run in a process has its listener meet the end of memory, and ends well itself."""
    if first and held.fence == 1:
        child.Channel.wait = _NoMemory.wait  # type: ignore[method-assign, assignment]
        time.sleep(1.5)


def test_the_task_after_one_that_used_up_all_memory_is_run() -> None:
    with leasekit.connect("memory://") as client:
        worker = leasekit.Worker(client, concurrency=1)
        worker.handler("job", run="process")(deafen)
        ids = [client.schedule("job", first).id for first in (True, False)]

        def ended() -> bool:
            return all((info := client.get(task_id)) is not None and info.status.ended for task_id in ids)

        async def serve() -> None:
            serving = asyncio.create_task(worker.serve())
            until = time.monotonic() + 30
            while not ended() and time.monotonic() < until:  # noqa: ASYNC110 - tasks end in other processes
                await asyncio.sleep(0.1)
            over = ended()
            worker.stop()
            if not over:
                serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            assert over

        asyncio.run(serve())
