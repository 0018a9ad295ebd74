"""Queues in Redis: messages by which a server tells workers of due tasks. The URL is as `leasekit_redis.address` says.

A queue is a sorted set: message → when it is visible, by the clock of Redis. The same message is in it once, however
often its task is enqueued. All queues of a prefix are in one slot of a cluster, so that one call looks at all of them.
A Redis that forgets messages, or a primary that is replaced, costs the enqueue timeout of their tasks and nothing else.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from leasekit.errors import ProtocolError
from leasekit.queues import PRIORITIES, Message, QueueName
from leasekit.registry import needs_extra
from leasekit.task import Ticket

with needs_extra("redis"):
    from leasekit_redis.address import Address, parse
    from leasekit_redis.client import Link
    from leasekit_redis.records import encode
    from leasekit_redis.scripts import QUEUE_RECEIVE, QUEUE_SEND

__all__ = ["RedisQueues", "connect"]

_HIDDEN = 30_000  # milliseconds for which a received message is invisible
_KEPT = 7 * 86_400_000  # milliseconds for which a queue is kept that gets no messages
_SOONEST, _LATEST = 0.02, 0.25  # seconds between two looks of a receiver at empty queues

_decode = msgspec.msgpack.Decoder(list[tuple[int, str]]).decode


def connect(url: str) -> "RedisQueues":
    """Return the queues in the Redis at this URL. Nothing is opened yet. Raises `ConfigError` if the URL is wrong."""
    return RedisQueues(parse(url))


class RedisQueues:
    """The queues of one prefix in a Redis: a `TaskQueues`."""

    def __init__(self, address: Address, *, rng: random.Random | None = None) -> None:
        self._link = Link(address, keeps_tasks=False)
        self._prefix = address.prefix
        self._rng = rng or random.SystemRandom()

    async def send(self, queue: QueueName, tickets: Sequence[Ticket]) -> list[Ticket]:
        texts = [_text(ticket) for ticket in tickets]
        await self._link.run(QUEUE_SEND, [self._key(queue)], encode([texts, _KEPT]))
        return []

    async def depth(self, queue: QueueName) -> int:
        return int(await self._link.command("ZCARD", self._key(queue)))

    async def receive(self, kinds: Sequence[str], *, limit: int, wait: float) -> list[Message]:
        """Receive messages. Redis is asked again and again, because no blocking command hides what it returns."""
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + wait, _SOONEST
        while not (messages := await self._look(kinds, limit)) and (left := until - loop.time()) > 0:
            await asyncio.sleep(min(left, pause * (0.5 + self._rng.random())))
            pause = min(2 * pause, _LATEST)
        return messages

    async def delete(self, messages: Sequence[Message]) -> None:
        for queue, texts in _by_queue(messages).items():
            await self._link.command("ZREM", self._key(queue), *texts)

    async def show(self, messages: Sequence[Message]) -> None:
        for queue, texts in _by_queue(messages).items():
            first = [part for text in texts for part in (0, text)]
            await self._link.command("ZADD", self._key(queue), "XX", *first)

    async def aclose(self) -> None:
        await self._link.aclose()

    async def _look(self, kinds: Sequence[str], limit: int) -> list[Message]:
        taking_turns = self._rng.sample(list(kinds), len(kinds))
        queues = [QueueName(kind, priority) for priority in PRIORITIES for kind in taking_turns]
        keys = [self._key(queue) for queue in queues]
        answer = await self._link.run(QUEUE_RECEIVE, keys, encode([limit, _HIDDEN]))
        try:
            return [_message(queues[number - 1], text) for number, text in _decode(answer or b"\x90")]
        except (msgspec.MsgspecError, ValueError, IndexError) as error:
            raise ProtocolError(f"a queue in {self._link.address} has a message of other origin: {error}") from None

    def _key(self, queue: QueueName) -> bytes:
        return f"{self._prefix}:{{queues}}:{queue.kind}:{queue.priority}".encode()


def _text(ticket: Ticket) -> str:
    return f"{ticket.fence} {ticket.id}"


def _message(queue: QueueName, text: str) -> Message:
    fence, _, task_id = text.partition(" ")
    return Message(queue, Ticket(id=task_id, fence=int(fence)), text)


def _by_queue(messages: Sequence[Message]) -> dict[QueueName, list[str]]:
    texts = defaultdict[QueueName, list[str]](list)
    for message in messages:
        texts[message.queue].append(message.receipt)
    return texts
