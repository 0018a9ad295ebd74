"""Wait for tasks to end: by what a service answers when some have ended, or else by polls at growing intervals."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence

from leasekit._driver.clock import Clock
from leasekit.config import check_number
from leasekit.errors import LeasekitError
from leasekit.task import Ended, TaskInfo

_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0  # seconds between two polls
_LONGEST_HOLD = 20.0  # seconds that a service may leave a request open, as it may that of a claim
_NAMED = 10  # ids in a message
_TOGETHER = 1000  # tasks in one question

Poll = Callable[[str], Awaitable[TaskInfo | None]]
Ask = Callable[[Sequence[str], float], Awaitable[Ended]]
"""Return those of some tasks that have ended, once one has, or after so many seconds, or less."""


async def all_ended(
    poll: Poll, task_ids: Sequence[str], *, clock: Clock, timeout: float | None, ask: Ask | None = None
) -> list[TaskInfo]:
    """Return the information on these tasks, in this order, once all have ended.

    A service that tells of ends (`ask`) is asked for all tasks at once. Others are polled for one task at a time,
    whatever the number: all must end, so the order does not matter. Raises TimeoutError that names the tasks that have
    not ended, and `LeasekitError` for an unknown id.
    """
    check_number("timeout", timeout, or_infinity=True, or_none=True)
    until = math.inf if timeout is None else clock.now() + timeout
    never = asyncio.Event()
    wait = _FIRST_WAIT
    ended: dict[str, TaskInfo] = {}
    left = list(dict.fromkeys(task_ids))
    if ask is None:
        left = await _unfinished(poll, left, ended)
    while left:
        now = clock.now()
        if ask is not None:
            before, left = left, await _not_told_of(ask, left, ended, hold=max(0.0, min(_LONGEST_HOLD, until - now)))
            if len(left) < len(before):
                wait = _FIRST_WAIT
                continue
        if now >= until and (ask is not None or (left := await _unfinished(poll, left, ended))):
            raise TimeoutError(f"after {timeout:g} s these tasks have not ended: {_named(left)}")
        if left and clock.now() < now + wait:  # else the service has waited
            await clock.wait(never, min(now + wait, until))
            wait = min(wait * 2, _LONGEST_WAIT)
        while ask is None and left and not await _unfinished(poll, left[:1], ended):
            left = left[1:]
    return [ended[task_id] for task_id in task_ids]


async def _not_told_of(ask: Ask, left: list[str], ended: dict[str, TaskInfo], *, hold: float) -> list[str]:
    """Ask which of these tasks have ended, add those to `ended`, and return the ids of the others."""
    found = await ask(left[:_TOGETHER], hold)
    for task_id in found.unknown:
        raise LeasekitError(_unknown(task_id))
    ended |= {info.id: info for info in found.tasks}
    return [task_id for task_id in left if task_id not in ended]


async def _unfinished(poll: Poll, task_ids: Iterable[str], ended: dict[str, TaskInfo]) -> list[str]:
    """Return the ids of tasks that have not ended, and add the other tasks to `ended`."""
    left: list[str] = []
    for task_id in task_ids:
        info = await poll(task_id)
        if info is None:
            raise LeasekitError(_unknown(task_id))
        if info.status.ended:
            ended[task_id] = info
        else:
            left.append(task_id)
    return left


def _named(task_ids: Sequence[str]) -> str:
    more = f" and {len(task_ids) - _NAMED} more" if len(task_ids) > _NAMED else ""
    return f"{', '.join(task_ids[:_NAMED])}{more}"


def _unknown(task_id: str) -> str:
    return f"there is no task {task_id!r}: it was never scheduled here, or is no longer kept"
