"""From the driver's thread back into whichever event loop the user has: asyncio or trio."""

import asyncio
import contextlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import anyio

from leasekit._driver.answer import Answer

__all__ = ["call_soon_here", "outcome", "ring"]

T = TypeVar("T")


def call_soon_here() -> Callable[..., object]:
    """A function that any thread may call to have something called soon in the event loop that runs here.

    Raises `RuntimeError` where none runs.
    """
    try:
        return asyncio.get_running_loop().call_soon_threadsafe
    except RuntimeError:
        if (trio := sys.modules.get("trio")) is None:
            raise
        call_soon: Callable[..., object] = trio.lowlevel.current_trio_token().run_sync_soon
        return call_soon


async def outcome(answer: Answer[T], *, keep: bool = False) -> T:
    """Wait for an answer of another thread. Being cancelled meanwhile cancels its work, unless `keep`."""
    done = anyio.Event()
    call_soon = call_soon_here()
    answer.add_done_callback(lambda _: ring(call_soon, done.set))
    try:
        await done.wait()
    except BaseException:
        if not keep:
            answer.cancel()
        raise
    return answer.result()


def ring(call_soon: Callable[..., object], call: Callable[[], Any]) -> None:
    """Have something called in another loop, which may have ended."""
    with contextlib.suppress(RuntimeError):  # that loop has ended: nobody waits any more
        call_soon(call)
