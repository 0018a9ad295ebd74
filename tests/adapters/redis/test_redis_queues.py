"""Queues in a real Redis."""

import uuid
from collections.abc import AsyncIterator

import pytest

from leasekit.errors import Unavailable
from leasekit.queues import QueueName
from leasekit.task import Ticket
from leasekit_redis import queues
from leasekit_redis.queues import RedisQueues, connect
from tests.redis_server import Server

pytestmark = pytest.mark.anyio

K0, K2, J1 = QueueName("k", 0), QueueName("k", 2), QueueName("j/{x}", 1)
A, B, C = Ticket(id="a", fence=0), Ticket(id="b 7", fence=3), Ticket(id="c", fence=2**62)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def of_redis(server: Server) -> AsyncIterator[RedisQueues]:
    found = connect(f"{server.url}?prefix={uuid.uuid4().hex}")
    yield found
    await found.aclose()


async def received(of: RedisQueues, *kinds: str, limit: int = 10) -> list[Ticket]:
    return [message.ticket for message in await of.receive(kinds or ("k",), limit=limit, wait=0)]


async def test_messages_come_as_they_were_sent_the_most_urgent_queue_first(of_redis: RedisQueues) -> None:
    assert await of_redis.send(K2, [A]) == []
    await of_redis.send(J1, [C])
    await of_redis.send(K0, [B])
    assert await received(of_redis, "k", "j/{x}") == [B, C, A]


async def test_a_received_message_is_invisible_until_it_is_shown(of_redis: RedisQueues) -> None:
    await of_redis.send(K2, [A])
    (message,) = await of_redis.receive(["k"], limit=1, wait=5)
    assert await received(of_redis) == []
    await of_redis.show([message])
    assert await received(of_redis) == [A]


async def test_a_message_whose_receiver_died_comes_again(
    of_redis: RedisQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "_HIDDEN", 0)
    await of_redis.send(K2, [A])
    assert await received(of_redis) == await received(of_redis) == [A]


async def test_a_deleted_message_does_not_come_again_and_is_not_shown(of_redis: RedisQueues) -> None:
    await of_redis.send(K2, [A, B])
    messages = await of_redis.receive(["k"], limit=10, wait=0)
    await of_redis.delete(messages)
    await of_redis.show(messages)
    assert await received(of_redis) == []
    assert await of_redis.depth(K2) == 0


async def test_a_task_that_is_enqueued_again_has_one_message(of_redis: RedisQueues) -> None:
    await of_redis.send(K2, [A])
    await of_redis.send(K2, [A])
    assert await of_redis.depth(K2) == 1


async def test_kinds_have_queues_of_their_own(of_redis: RedisQueues) -> None:
    await of_redis.send(K2, [A])
    assert await received(of_redis, "kk") == []


async def test_a_limit_leaves_the_rest_in_the_queue(of_redis: RedisQueues) -> None:
    await of_redis.send(K2, [A, B])
    assert len(await received(of_redis, limit=1)) == 1
    assert len(await received(of_redis)) == 1


async def test_queues_of_a_redis_that_is_away_are_unavailable() -> None:
    away = connect("redis://127.0.0.1:1")
    with pytest.raises(Unavailable):
        await away.send(K2, [A])
    await away.aclose()
