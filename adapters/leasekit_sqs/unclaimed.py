"""Tasks that came to one claim and are kept for another, because a worker may claim the kinds of one queue separately.

Rule 1: only tasks of kinds that were claimed lately are kept; messages of other kinds are left to other workers.
Rule 2: a task that no claim takes in time is released: its lease is not renewed here.
"""

import asyncio
from collections.abc import Callable, Collection

from leasekit.task import Task

_LATELY = 60.0


class Unclaimed:
    """Tasks that are kept for other claims of one connection for `keep` seconds; then `unwanted(task)` is called."""

    def __init__(self, unwanted: Callable[[Task], None], *, keep: float, clock: Callable[[], float]) -> None:
        self._unwanted = unwanted
        self._keep = keep
        self._clock = clock
        self._asked_at: dict[str, float] = {}
        self._kept: dict[str, tuple[Task, asyncio.TimerHandle]] = {}  # by token, oldest first
        self._waiting: dict[asyncio.Future[None], Collection[str]] = {}

    def serves(self, kind: str) -> bool:
        """Return whether a claim of this connection has asked for this kind lately."""
        return self._clock() - self._asked_at.get(kind, -_LATELY) < _LATELY

    def ask(self, kinds: Collection[str]) -> None:
        """Note that a claim asks for these kinds."""
        self._asked_at.update(dict.fromkeys(kinds, self._clock()))

    @property
    def known(self) -> Collection[str]:
        """The kinds that claims of this connection have ever asked for."""
        return self._asked_at.keys()

    def served(self) -> list[str]:
        """Return the kinds that claims of this connection have asked for lately."""
        return [kind for kind in self._asked_at if self.serves(kind)]

    def put(self, task: Task) -> None:
        """Keep a task for the next claim of its kind, and wake a claim that waits for that kind."""
        timer = asyncio.get_running_loop().call_later(self._keep, self._give_up, task.token)
        self._kept[task.token] = task, timer
        for waiter, kinds in list(self._waiting.items()):
            if task.kind in kinds and not waiter.done():
                waiter.set_result(None)
                return

    def take(self, kinds: Collection[str], limit: int) -> list[Task]:
        """Remove and return up to `limit` tasks of these kinds, and note that these kinds were claimed."""
        self.ask(kinds)
        taken = [task for task, _ in self._kept.values() if task.kind in kinds][:limit]
        for task in taken:
            _, timer = self._kept.pop(task.token)
            timer.cancel()
        return taken

    def expect(self, kinds: Collection[str]) -> "asyncio.Future[None]":
        """Return a future that is done when a task of these kinds is put. The caller cancels it in the end."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = kinds
        waiter.add_done_callback(lambda _: self._waiting.pop(waiter, None))
        return waiter

    def empty(self) -> None:
        """Stop keeping tasks: call `unwanted` for each."""
        for token in list(self._kept):
            self._kept[token][1].cancel()
            self._give_up(token)

    def _give_up(self, token: str) -> None:
        task, _ = self._kept.pop(token)
        self._unwanted(task)
