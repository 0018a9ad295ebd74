"""Coroutines of async actors: a thread of a worker goes on only when the coroutine that it waits for has ended.

Dramatiq cancels the coroutine of an actor that is interrupted, and waits for its end for a second. The middleware
would then release the lease, and a retry could run beside a coroutine that takes longer to clean up. If the interrupt
comes between Dramatiq's submission of the coroutine and its `try`, Dramatiq does not cancel the coroutine at all.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import wraps
from inspect import CORO_CLOSED, CORO_RUNNING, CORO_SUSPENDED, getcoroutinestate
from typing import Any

from dramatiq.asyncio import async_to_sync, get_event_loop_thread
from dramatiq.middleware import Interrupt

_LOOK = 0.05  # seconds between two looks at a coroutine


async def _nothing() -> None: ...


_CODE: Any = async_to_sync(_nothing).__code__


def waits_for_its_end(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs an async actor's function and waits for its end; a function of another kind as it is."""
    if getattr(function, "__code__", None) is not _CODE:
        return function
    function_of_user: Any = function.__wrapped__  # type: ignore[attr-defined]

    @wraps(function_of_user)
    def run(*args: Any, **kwargs: Any) -> Any:
        tasks: list[asyncio.Task[Any]] = []
        coroutine = _in_task(function_of_user(*args, **kwargs), tasks)
        try:
            return async_to_sync(lambda: coroutine)()
        except BaseException:
            _wait(coroutine, tasks)
            raise

    return run


async def _in_task(coroutine: Coroutine[Any, Any, Any], tasks: list[asyncio.Task[Any]]) -> Any:
    """Await a coroutine, and add the task that it runs in to `tasks`."""
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - Dramatiq's loop runs it in one
    tasks.append(task)
    return await coroutine


def _wait(coroutine: Coroutine[Any, Any, Any], tasks: list[asyncio.Task[Any]]) -> None:
    """Wait until a cancelled coroutine has ended, however often this thread is interrupted meanwhile."""
    thread = get_event_loop_thread()
    if getcoroutinestate(coroutine) == CORO_CLOSED or thread is None or not thread.loop.is_running():
        return
    cancelled = asyncio.run_coroutine_threadsafe(_cancel_once(tasks), thread.loop)
    while thread.loop.is_running() and not (cancelled.done() and _has_ended(coroutine)):
        with suppress(Interrupt):
            time.sleep(_LOOK)


async def _cancel_once(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel what Dramatiq has not cancelled: another cancel would interrupt the coroutine while it cleans up."""
    # It may be queued in a loop that is busy. After three turns of the loop it has begun, or never will, and a cancel
    # by Dramatiq has reached it.
    for _ in range(3):
        await asyncio.sleep(0)
    for task in tasks:
        if not task.cancelling():
            task.cancel()


def _has_ended(coroutine: Coroutine[Any, Any, Any]) -> bool:
    return getcoroutinestate(coroutine) not in (CORO_RUNNING, CORO_SUSPENDED)
