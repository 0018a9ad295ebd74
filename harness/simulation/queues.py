"""The queues of messages, one for each kind and priority: a service of its own, which outlives all processes.

They lose, repeat and reorder messages, and are away for a while. None of this may break a promise.
"""

import asyncio
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Sequence

from harness.simulation.world import Process, World
from leasekit.errors import Unavailable
from leasekit.queues import PRIORITIES, Message, QueueName
from leasekit.task import Ticket

_HIDDEN = 30.0  # seconds for which a received message is invisible
_LOOK = 2.0  # seconds between two looks of a receiver
_TRIES = 0.5  # the odds that a fault hits a message


class Queues:
    """The state of the queues; each process has `SimulatedQueues` of its own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.chance = world.chance("queues")
        self.faults: dict[int, str] = {}  # number → name, while it lasts
        self._numbers = itertools.count()
        self._messages: dict[QueueName, dict[int, tuple[float, Ticket]]] = defaultdict(dict)  # and visible from when

    def hits(self, fault: str, odds: float = _TRIES) -> bool:
        """Whether a fault is on, and hits now."""
        if fault not in self.faults.values() or self.chance.random() >= odds:
            return False
        self.world.fired[fault] += 1
        return True

    def check(self) -> None:
        if self.hits("queue_away", 1.0):
            raise Unavailable("the queues are away")

    def put(self, queue: QueueName, ticket: Ticket) -> None:
        if self.hits("queue_lose"):
            return
        for _ in range(2 if self.hits("queue_repeat") else 1):
            late = self.chance.uniform(0, 600) if self.hits("queue_delay") else 0.0
            self._messages[queue][next(self._numbers)] = (self.world.now + late, ticket)

    def depth(self, queue: QueueName) -> int:
        return len(self._messages[queue])

    def take(self, kinds: Sequence[str], limit: int) -> list[Message]:
        taken: list[Message] = []
        for queue in (QueueName(kind, priority) for priority in PRIORITIES for kind in kinds):
            messages = self._messages[queue]
            numbers = [number for number, (visible_at, _) in messages.items() if visible_at <= self.world.now]
            if self.hits("queue_reorder"):
                self.chance.shuffle(numbers)
            for number in numbers[: limit - len(taken)]:
                ticket = messages[number][1]
                messages[number] = (self.world.now + _HIDDEN, ticket)
                taken.append(Message(queue, ticket, number))
        return taken

    def delete(self, message: Message) -> None:
        self._messages[message.queue].pop(message.receipt, None)

    def show(self, message: Message) -> None:
        if message.receipt in self._messages[message.queue]:
            self._messages[message.queue][message.receipt] = (self.world.now, message.ticket)


class SimulatedQueues:
    """A `TaskQueues`: the connection of one process to the queues."""

    def __init__(self, queues: Queues, process: Process) -> None:
        self._queues = queues
        self._chance = random.Random(f"{process.who}/{queues.world.scenario.seed}")

    async def send(self, queue: QueueName, tickets: Sequence[Ticket]) -> list[Ticket]:
        await self._answer()
        for ticket in tickets:
            self._queues.put(queue, ticket)
        return []

    async def depth(self, queue: QueueName) -> int:
        await self._answer()
        return self._queues.depth(queue)

    async def receive(self, kinds: Sequence[str], *, limit: int, wait: float) -> list[Message]:
        time = asyncio.get_running_loop().time
        until = time() + wait
        await self._answer()
        while not (taken := self._queues.take(kinds, limit)) and time() < until:
            await asyncio.sleep(_LOOK)
            self._queues.check()
        return taken

    async def delete(self, messages: Sequence[Message]) -> None:
        await self._change(messages, self._queues.delete)

    async def show(self, messages: Sequence[Message]) -> None:
        await self._change(messages, self._queues.show)

    async def _change(self, messages: Sequence[Message], change: Callable[[Message], None]) -> None:
        await self._answer()
        for message in messages:
            change(message)

    async def _answer(self) -> None:
        """Let the time of a call pass. Raises `Unavailable` while the queues are away."""
        await asyncio.sleep(self._chance.uniform(0.001, 0.02))
        self._queues.check()

    async def aclose(self) -> None:
        """Do nothing: there is no connection."""
