"""The enqueuer: the part of the consumer that talks to queues. What is moved is decided in `roles.enqueueing`.

Rule 1: each queue has at most one call under way, and its own pauses. A queue that hangs, fails or is full keeps only
        its own tasks waiting; these stay due in the store meanwhile, where claims without queues find them.
Rule 2: an outage is one line in the log at its begin, and one at its end.
"""

import asyncio
import logging
import random as _random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from leasekit.backend import cancel_all
from leasekit.errors import BackendError
from leasekit.queues import QueueName, TaskQueues
from leasekit.server.commit import RequestClass
from leasekit.server.kind_leases import KindLeases
from leasekit.server.roles import enqueueing
from leasekit.server.roles.enqueueing import Due, Moved
from leasekit.task import Ticket

_T = TypeVar("_T")

logger = logging.getLogger("leasekit.server")

MOVE = RequestClass(  # last: claims of due tasks come first
    "enqueueings", lambda turn, dues: [enqueueing.move(turn, due) for due in dues], 2000, is_last=True
)
PUT_BACK = RequestClass(
    "returns", lambda turn, requests: [enqueueing.put_back(turn, tasks) for tasks in requests], 10_000
)
ENQUEUEING = (MOVE, PUT_BACK)

_BATCH = 100  # messages that are sent to one queue at once
_FULL = 1000  # messages of a queue from which on it gets no more: the rest waits in the store
_SOONEST = 0.01  # seconds between two looks
_TIMEOUT = 20.0  # seconds for the messages of one batch
_MEASURED_FOR = 10.0  # seconds for which the depth of a queue counts as known, …
_FULL_FOR = 1.0  # … and that of a full one
_LONGEST_PAUSE = 30.0


@dataclass(slots=True)
class _State:
    """A queue, as its last call has shown it."""

    depth: int | None = None  # None: not known, as the queue cannot be asked
    measured_at: float = 0.0  # by the event loop's time
    failures: int = 0  # in a row
    again_at: float = 0.0  # by the event loop's time


class Enqueuer:
    """Move due tasks to their queues, once in a `period` and whenever tasks become due.

    `commit` has the writer apply a request of a class, of a size; `kinds` returns the kinds of tasks that wait. Where
    several consumers share a store, `leases` say which kinds are moved here.
    """

    def __init__(
        self,
        queues: TaskQueues,
        commit: Callable[[RequestClass, Any, int], Awaitable[Any]],
        *,
        kinds: Callable[[], Awaitable[Iterable[str]]],
        random: _random.Random,
        leases: KindLeases | None = None,
    ) -> None:
        self._queues = queues
        self._commit = commit
        self._kinds_that_wait = kinds
        self._random = random
        self._leases = leases
        self._kinds: set[str] = set()
        self._states = defaultdict[QueueName, _State](_State)
        self._sending: dict[QueueName, asyncio.Task[None]] = {}
        self._bell = asyncio.Event()

    @property
    def depths(self) -> Mapping[QueueName, int]:
        """How many messages each queue had when it was last asked, within seconds; without those that do not answer."""
        return {name: state.depth for name, state in self._states.items() if state.depth is not None}

    @property
    def failing(self) -> list[QueueName]:
        """The queues whose last call has failed."""
        return [name for name, state in self._states.items() if state.failures]

    def ring(self, kinds: Iterable[str]) -> None:
        """Look soon: tasks of these kinds have become due."""
        self._kinds.update(kinds)
        self._bell.set()

    async def run(self, period: float) -> None:
        """Look again and again, until cancelled."""
        try:
            while True:
                try:
                    waiting = set(await self._kinds_that_wait())
                    if self._leases is not None:
                        await self._leases.look(self._kinds | waiting)
                    self._kinds = waiting
                    self._forget_others()
                    await self._look_for(period)
                except BackendError as error:  # of the store, which the consumer's own work says
                    logger.debug("no tasks were moved to queues: %s", error)
                    await asyncio.sleep(period)
        finally:
            await cancel_all(self._sending.values())
            if self._leases is not None:
                await self._leases.close()

    def _own_kinds(self) -> set[str]:
        return self._kinds if self._leases is None else self._kinds & self._leases.kinds

    def _forget_others(self) -> None:
        kinds = self._own_kinds()
        for name in [name for name in self._states if name.kind not in kinds and name not in self._sending]:
            del self._states[name]

    async def _look_for(self, period: float) -> None:
        time = asyncio.get_running_loop().time
        until = time() + period
        while (left := until - time()) > 0:
            self._bell.clear()
            await self.look()
            await asyncio.sleep(_SOONEST)
            try:
                async with asyncio.timeout(left):
                    await self._bell.wait()
            except TimeoutError:
                return
            if self._leases is not None and self._leases.is_new(self._kinds):
                return

    async def look(self) -> None:
        """Move the due tasks of queues that can take some, and begin to send their messages."""
        now = asyncio.get_running_loop().time()
        self._measure_again(now)
        paused = {name for name, state in self._states.items() if state.again_at > now or _is_full(state)}
        due = Due(self._own_kinds(), _BATCH, paused | self._sending.keys())
        moved: list[Moved] = await self._commit(MOVE, due, enqueueing.MOST)
        of_queue = defaultdict[QueueName, list[Moved]](list)
        for task in moved:
            of_queue[QueueName(task.kind, task.priority)].append(task)
        for name, tasks in of_queue.items():
            self._sending[name] = asyncio.create_task(self._send(name, tasks))

    async def settled(self) -> None:
        """Wait until no call is under way."""
        await asyncio.gather(*self._sending.values())

    def _measure_again(self, now: float) -> None:
        for name, state in self._states.items():
            known_for = _FULL_FOR if _is_full(state) else _MEASURED_FOR
            if name not in self._sending and now >= max(state.again_at, state.measured_at + known_for):
                self._sending[name] = asyncio.create_task(self._measure(name))

    async def _measure(self, name: QueueName) -> None:
        """Ask a queue for its depth, which changes also while it gets no messages."""
        state = self._states[name]
        was_full, state.measured_at = _is_full(state), asyncio.get_running_loop().time()
        try:
            state.depth = await _in_time(self._queues.depth(name))
        except Exception as error:  # noqa: BLE001 - whatever the queue's own library raises: sending says it in the log
            state.depth = None
            logger.debug("the depth of the queue of %r, priority %d: %r", name.kind, name.priority, error)
        finally:
            del self._sending[name]
        if was_full and not _is_full(state):
            self.ring([name.kind])

    async def _send(self, name: QueueName, tasks: Sequence[Moved]) -> None:
        state, tickets = self._states[name], {task.id: Ticket(id=task.id, fence=task.fence) for task in tasks}
        try:
            unsent = {ticket.id for ticket in await _in_time(self._queues.send(name, list(tickets.values())))}
            why = f"{len(unsent)} of {len(tasks)} messages were refused"
            if not unsent:
                state.measured_at = asyncio.get_running_loop().time()
                state.depth = await _in_time(self._queues.depth(name))
        except Exception as error:  # noqa: BLE001 - whatever the queue's own library raises, its tasks are put back
            unsent, why = set(tickets), str(error) or f"no answer within {_TIMEOUT:g} s"
        try:
            if unsent:
                self._fail(name, state, why)
                await self._commit(PUT_BACK, [task for task in tasks if task.id in unsent], len(unsent))
            else:
                self._succeed(name, state, more=len(tasks) >= _BATCH)
        except BackendError as error:
            logger.debug("tasks stay enqueued until their timeout: %s", error)
        finally:
            del self._sending[name]

    def _fail(self, name: QueueName, state: _State, why: str) -> None:
        if not self.failing:
            logger.warning(
                "the queue of %r, priority %d, takes no messages, and is tried again; its tasks wait in the store: %s",
                name.kind, name.priority, why,
            )  # fmt: skip
        state.failures += 1
        state.depth = None
        pause = min(0.5 * 2**state.failures, _LONGEST_PAUSE) * (0.5 + self._random.random() / 2)
        state.again_at = asyncio.get_running_loop().time() + pause

    def _succeed(self, name: QueueName, state: _State, *, more: bool) -> None:
        if state.failures:
            state.failures = 0
            logger.warning("the queue of %r, priority %d, takes messages again", name.kind, name.priority)
        state.again_at = 0.0
        if more and not _is_full(state):
            self.ring([name.kind])


def _is_full(state: _State) -> bool:
    return state.depth is not None and state.depth >= _FULL


async def _in_time(call: Awaitable[_T]) -> _T:
    async with asyncio.timeout(_TIMEOUT):
        return await call
