"""What a run called into its event loop with its last line has come to an end before the run is settled."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

import leasekit


async def _break_off_a_generator(ended: Callable[[], Awaitable[None]]) -> None:
    async def rows() -> AsyncGenerator[int]:
        try:
            yield 1
            yield 2
        finally:
            await ended()

    async for _ in rows():
        break


async def _start_from_a_thread(ended: Callable[[], Awaitable[None]]) -> None:
    loop = asyncio.get_running_loop()
    loop.run_in_executor(None, lambda: asyncio.run_coroutine_threadsafe(_call(ended), loop))
    time.sleep(0.2)  # noqa: ASYNC251 - the thread has ended before this loop has its next turn


async def _call(ended: Callable[[], Awaitable[None]]) -> None:
    await ended()


@pytest.mark.parametrize("body", [_break_off_a_generator, _start_from_a_thread])
def test_a_run_is_settled_after_what_its_last_line_has_called_into_the_loop(
    body: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]],
) -> None:
    order: list[str] = []

    async def ended() -> None:
        await asyncio.sleep(0.3)
        order.append("ended")

    def hear(event: object) -> None:
        if isinstance(event, leasekit.hooks.Settled):
            order.append("settled")
            worker.stop()

    with leasekit.connect("memory://") as client:
        worker = leasekit.Worker(client, concurrency=1)
        client.listen(hear)

        @worker.handler("job")
        async def job(payload: None) -> None:
            await body(ended)

        client.schedule("job")

        async def serve() -> None:
            async with asyncio.timeout(20):
                await worker.serve()

        asyncio.run(serve())
    assert order[:2] == ["ended", "settled"]
