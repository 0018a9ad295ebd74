"""Long polls that outlive the claims that wait for them.

A service's long poll takes up to a minute and cannot be cancelled: it may bring a task after its claim was given up.
Such a task must not wait until its lease expires.

Rule 1: a poll goes on when its claim has ended, and the next claim waits for that poll instead of starting another.
Rule 2: a task that no claim waits for is kept for `keep` seconds for the next claim of its kind, and then released.
Rule 3: a task that comes after closing is released by the thread that received it.
Rule 4: if a poll began after the claim that takes its task, then so did the lease, and trust may count from the claim.
        When the task of an earlier poll was granted is unknown.

Not covered: a process that ends while a poll is under way. A task that is granted to that poll waits for its timeout.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from leasekit.backend import cancel_all
from leasekit.errors import ProtocolError
from leasekit.task import Task
from leasekit_aws.daemon_threads import in_thread

logger = logging.getLogger("leasekit")

Answer = Mapping[str, Any]

_GLANCE = 1.0  # seconds that the service has to answer a claim that does not wait
_MOST_KEPT = 10
_HASTY = 0.2  # seconds that a long poll takes at least, so that empty answers are not repeated in a busy loop


class _Kept(NamedTuple):
    """A task that has come and that no claim has taken yet."""

    task: Task
    answer: Answer
    asked_at: float  # when its poll began, before the request left
    timer: asyncio.TimerHandle


class Polls:
    """The polls of one connection, for use in one event loop.

    `ask` makes a blocking long poll of a source, `read` returns the task in its answer, `give_back` blocks while it
    releases the task in an answer, and raises nothing.
    """

    def __init__(
        self,
        *,
        ask: Callable[[str | None], Answer],
        read: Callable[[str | None, Answer], Task | None],
        give_back: Callable[[Answer], None],
        keep: float,
    ) -> None:
        self._ask = ask
        self._read = read
        self._give_back = give_back
        self._keep = keep
        self._running: dict[str | None, set[asyncio.Task[None]]] = {}
        self._waiting: dict[str | None, int] = {}
        self._kept: dict[str, _Kept] = {}
        self._returning: set[asyncio.Future[None]] = set()

    async def take(
        self, kinds: Collection[str], sources: Collection[str | None], *, wait: float
    ) -> tuple[Task, bool] | None:
        """Wait up to `wait` seconds for a task of these kinds; return it, and whether it was granted since the call."""
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        ends_at = began_at + max(wait, _GLANCE)
        for source in sources:
            self._waiting[source] = self._waiting.get(source, 0) + 1
        try:
            while True:
                if (kept := self._take_kept(kinds)) is not None:
                    return kept.task, kept.asked_at >= began_at
                left = ends_at - loop.time()
                if left <= 0:
                    return None
                polls = [poll for source in sources for poll in self._ensure_polls(source)]
                if not polls:
                    await asyncio.sleep(min(left, _HASTY))
                    continue
                done, _ = await asyncio.wait(polls, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                for poll in done:
                    poll.result()
                if (
                    done and not wait and not any(kept.task.kind in kinds for kept in self._kept.values())
                ):  # the answer has no task
                    return None
        finally:
            for source in sources:
                self._waiting[source] -= 1

    def _take_kept(self, kinds: Collection[str]) -> _Kept | None:
        for token, kept in self._kept.items():
            if kept.task.kind in kinds:
                kept.timer.cancel()
                return self._kept.pop(token)
        return None

    def _ensure_polls(self, source: str | None) -> Iterable[asyncio.Task[None]]:
        """Begin polls of a source until each claim that waits for it has one; return all that run.

        No poll is begun while many tasks are kept: a worker that does not know the kinds of the tasks must not drain
        their queue.
        """
        running = self._running.setdefault(source, set())
        while len(running) < self._waiting[source] and len(self._kept) < _MOST_KEPT:
            poll = asyncio.create_task(self._poll(source))
            running.add(poll)
            poll.add_done_callback(running.discard)
            poll.add_done_callback(_retrieve_error)
        return running

    async def _poll(self, source: str | None) -> None:
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        call = in_thread(partial(self._ask, source), missed=self._give_back)
        try:
            answer = await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            if not call.cancel() and call.exception() is None:  # the answer came at the same moment
                self._begin_give_back(call.result())
            raise
        try:
            task = self._read(source, answer)
        except ProtocolError:
            self._begin_give_back(answer)
            raise
        if task is not None:
            if (twice := self._kept.get(task.token)) is not None:
                twice.timer.cancel()
            timer = loop.call_later(self._keep, self._release_kept, task.token)
            self._kept[task.token] = _Kept(task, answer, asked_at, timer)
        else:
            await asyncio.sleep(max(0.0, asked_at + _HASTY - loop.time()))

    def _release_kept(self, token: str) -> None:
        task, answer, _, _ = self._kept.pop(token)
        logger.warning("task %s is released: this process has not claimed kind %s", task.id, task.kind)
        self._begin_give_back(answer)

    def _begin_give_back(self, answer: Answer) -> None:
        returning = asyncio.wrap_future(in_thread(partial(self._give_back, answer)))
        self._returning.add(returning)
        returning.add_done_callback(self._returning.discard)

    async def aclose(self, *, within: float) -> None:
        """End all polls; release the kept tasks within `within` seconds, and later tasks when they come."""
        polls = [poll for running in self._running.values() for poll in running]
        await cancel_all(polls)
        for token, kept in list(self._kept.items()):
            kept.timer.cancel()
            self._release_kept(token)
        if self._returning:
            await asyncio.wait(list(self._returning), timeout=within)


def _retrieve_error(poll: asyncio.Task[None]) -> None:
    """Retrieve the error of a poll that no claim waits for, so that asyncio does not log it."""
    with contextlib.suppress(asyncio.CancelledError):
        poll.exception()
