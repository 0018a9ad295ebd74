"""Wait for tasks to end by polling, at growing intervals: no service needs to push notifications."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from leasekit._driver.clock import Clock
from leasekit.config import check_number
from leasekit.errors import LeasekitError
from leasekit.task import TaskInfo

_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0  # seconds between two polls
_NAMED = 10  # ids in a message

Poll = Callable[[str], Awaitable[TaskInfo | None]]


async def all_ended(poll: Poll, task_ids: Sequence[str], *, clock: Clock, timeout: float | None) -> list[TaskInfo]:
    """Return the information on these tasks, in this order, once all have ended.

    One task is polled at a time, whatever their number: all must end, so the order does not matter. Raises TimeoutError
    that names the tasks that have not ended, and `LeasekitError` for an unknown id.
    """
    check_number("timeout", timeout, or_infinity=True, or_none=True)
    until = None if timeout is None else clock.now() + timeout
    never = asyncio.Event()
    wait = _FIRST_WAIT
    ended: dict[str, TaskInfo] = {}
    left = await _unfinished(poll, dict.fromkeys(task_ids), ended)
    while left:
        now = clock.now()
        if until is not None and now >= until:
            if not (left := await _unfinished(poll, left, ended)):
                break
            more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
            raise TimeoutError(f"after {timeout:g} s these tasks have not ended: {', '.join(left[:_NAMED])}{more}")
        await clock.wait(never, now + wait if until is None else min(now + wait, until))
        wait = min(wait * 2, _LONGEST_WAIT)
        while left and not await _unfinished(poll, left[:1], ended):
            left = left[1:]
    return [ended[task_id] for task_id in task_ids]


async def _unfinished(poll: Poll, task_ids: Iterable[str], ended: dict[str, TaskInfo]) -> list[str]:
    """Return the ids of tasks that have not ended, and add the other tasks to `ended`."""
    left: list[str] = []
    for task_id in task_ids:
        info = await poll(task_id)
        if info is None:
            raise LeasekitError(f"there is no task {task_id!r}: it was never scheduled here, or is no longer kept")
        if info.status.ended:
            ended[task_id] = info
        else:
            left.append(task_id)
    return left
