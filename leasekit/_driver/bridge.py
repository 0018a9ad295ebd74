"""Bridge from the driver's thread back into the user's event loop, asyncio or trio."""

import asyncio
import contextlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import anyio

from leasekit._driver.answer import Answer

T = TypeVar("T")


def call_soon_here() -> Callable[..., object]:
    """Return a function with which any thread schedules calls in this thread's event loop.

    Raises `RuntimeError` if no loop runs in this thread; the function does so once the loop has ended.
    """
    try:
        return asyncio.get_running_loop().call_soon_threadsafe
    except RuntimeError:
        if (trio := sys.modules.get("trio")) is None:
            raise
        call_soon: Callable[..., object] = trio.lowlevel.current_trio_token().run_sync_soon
        return call_soon


async def outcome(answer: Answer[T], *, keep: bool = False) -> T:
    """Wait for an answer from another thread. Cancelling this coroutine cancels the answer's work, unless `keep`."""
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


async def whole(answer: Answer[T]) -> T:
    """Wait for an answer to its end, whatever cancels this call; after that, raise the cancel."""
    done = anyio.Event()
    call_soon = call_soon_here()
    answer.add_done_callback(lambda _: ring(call_soon, done.set))
    cancel: BaseException | None = None
    with anyio.CancelScope(shield=True):
        while not done.is_set():
            try:
                await done.wait()
            except anyio.get_cancelled_exc_class() as error:  # of asyncio: a scope does not keep it off
                cancel = error
    if cancel is not None:
        raise cancel
    return answer.result()


def ring(call_soon: Callable[..., object], call: Callable[[], Any]) -> None:
    """Schedule `call` in another event loop; do nothing if that loop has ended."""
    with contextlib.suppress(RuntimeError):  # the loop has ended, and with it all code that waits for the call
        call_soon(call)
