"""Tasks that came to one claim and are for another: of a queue with several kinds, a worker may ask for each apart.

Rule 1: only for kinds that were asked for lately; what is of any other kind is none of our business.
Rule 2: what nobody takes in time is given back: it is not beaten here.
"""

import asyncio
from collections.abc import Callable, Collection

from leasekit.task import Task

__all__ = ["Stash"]

_LATELY = 60.0


class Stash:
    """What is kept for other claims of one connection, `keep` seconds long; then `unwanted` hears of it."""

    def __init__(self, unwanted: Callable[[Task], None], *, keep: float, clock: Callable[[], float]) -> None:
        self._unwanted = unwanted
        self._keep = keep
        self._clock = clock
        self._asked_at: dict[str, float] = {}
        self._kept: dict[str, tuple[Task, asyncio.TimerHandle]] = {}  # by token, oldest first
        self._waiting: dict[asyncio.Future[None], Collection[str]] = {}

    def serves(self, kind: str) -> bool:
        """Whether somebody here has asked for this kind lately."""
        return self._clock() - self._asked_at.get(kind, -_LATELY) < _LATELY

    def put(self, task: Task) -> None:
        """Keep it for whoever asks for its kind, or waits for it now."""
        timer = asyncio.get_running_loop().call_later(self._keep, self._give_up, task.token)
        self._kept[task.token] = task, timer
        for waiter, kinds in list(self._waiting.items()):
            if task.kind in kinds and not waiter.done():
                waiter.set_result(None)
                return

    def take(self, kinds: Collection[str], limit: int) -> list[Task]:
        """Up to `limit` tasks of these kinds, which from now on count as asked for."""
        self._asked_at.update(dict.fromkeys(kinds, self._clock()))
        taken = [task for task, _ in self._kept.values() if task.kind in kinds][:limit]
        for task in taken:
            _, timer = self._kept.pop(task.token)
            timer.cancel()
        return taken

    def expect(self, kinds: Collection[str]) -> "asyncio.Future[None]":
        """A future that is done when something of these kinds is put. Cancel it in the end."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = kinds
        waiter.add_done_callback(lambda _: self._waiting.pop(waiter, None))
        return waiter

    def empty(self) -> None:
        """Give everything up."""
        for token in list(self._kept):
            self._kept[token][1].cancel()
            self._give_up(token)

    def _give_up(self, token: str) -> None:
        task, _ = self._kept.pop(token)
        self._unwanted(task)
