"""The enqueuer: messages of due tasks, and queues that fail, hang, or lose what they have."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from leasekit.errors import Refused, Unavailable
from leasekit.queues import QueueName
from leasekit.server.engine import Engine
from leasekit.server.http.metrics import Metrics
from leasekit.server.store import Store
from leasekit.server.store.memory import MemoryStore
from leasekit.task import Claimed, NewTask, Ticket
from leasekit.testing.queues import MemoryQueues
from tests.waiting import until

pytestmark = pytest.mark.anyio

K, J = QueueName("k", 2), QueueName("j", 2)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def queues() -> MemoryQueues:
    return MemoryQueues()


@pytest.fixture
async def engine(queues: MemoryQueues) -> AsyncIterator[Engine]:
    async with Engine(MemoryStore(), queues=queues) as engine:
        yield engine


async def put(engine: Engine, *ids: str, kind: str = "k", **options: float) -> None:
    await engine.schedule([NewTask(id=task_id, kind=kind, **options) for task_id in ids])  # type: ignore[arg-type]


async def tickets(queues: MemoryQueues, kind: str = "k") -> list[Ticket]:
    """What the messages of a kind say, once there are some."""
    return [message.ticket for message in await queues.receive([kind], limit=100, wait=60)]


async def test_a_due_task_has_a_message_soon(engine: Engine, queues: MemoryQueues) -> None:
    await put(engine, "a")
    assert await tickets(queues) == [Ticket(id="a", fence=0)]


async def test_a_task_that_becomes_due_later_has_a_message_then(engine: Engine, queues: MemoryQueues) -> None:
    await put(engine, "a", delay=0.01)
    assert await tickets(queues) == [Ticket(id="a", fence=0)]


@pytest.mark.parametrize("option", ["requires", "prefers"])
async def test_a_task_for_some_workers_is_refused(engine: Engine, option: str) -> None:
    tasks = [NewTask(kind="k", id="a"), NewTask(kind="k", **{option: {"gpu": "t4"}})]  # type: ignore[arg-type]
    with pytest.raises(Refused, match="hands tasks out by queues"):
        await engine.schedule(tasks)
    assert await engine.queries.get("a") is None


async def test_a_lost_message_comes_again_after_the_enqueue_timeout(engine: Engine, queues: MemoryQueues) -> None:
    queues.losing = True
    await put(engine, "a", enqueue_timeout=1)
    await until(lambda: engine.commit.tally.total("enqueued") == 1)
    queues.losing = False
    assert await tickets(queues) == [Ticket(id="a", fence=0)]


async def test_a_queue_that_fails_does_not_keep_the_others_and_its_tasks_stay_claimable(
    engine: Engine, queues: MemoryQueues, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    queues.failing = {K}
    await put(engine, "a")
    await put(engine, "b", kind="j")
    assert await tickets(queues, "j") == [Ticket(id="b", fence=0)]
    await until(lambda: engine.commit.tally.total("unsent") >= 1)

    claimed = Claimed(tasks=[])
    while not claimed.tasks:
        claimed = await engine.claim(worker="w", kinds=["k"], limit=1, wait=1, claim_id="c")
    assert [task.id for task in claimed.tasks] == ["a"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("the queue of 'k', priority 2, takes no messages, and is tried again; its tasks wait in the")
    assert line.endswith(": this queue fails, as the test wants it")


async def test_a_queue_that_works_again_gets_its_messages_and_the_log_says_so(
    engine: Engine, queues: MemoryQueues, caplog: pytest.LogCaptureFixture
) -> None:
    queues.failing = {K}
    await put(engine, "a")
    await until(lambda: engine.commit.tally.total("unsent") >= 1)
    queues.failing = set()
    assert await tickets(queues) == [Ticket(id="a", fence=0)]
    await until(lambda: "takes messages again" in caplog.text)


async def test_a_queue_that_hangs_keeps_only_its_own_tasks(engine: Engine, queues: MemoryQueues) -> None:
    send, hangs = queues.send, asyncio.Event()

    async def hang(queue: QueueName, tickets: Sequence[Ticket]) -> list[Ticket]:
        if queue == K:
            await hangs.wait()
        return await send(queue, tickets)

    queues.send = hang  # type: ignore[method-assign]
    await put(engine, "a")
    await put(engine, "b", kind="j")
    assert await tickets(queues, "j") == [Ticket(id="b", fence=0)]
    hangs.set()
    assert await tickets(queues) == [Ticket(id="a", fence=0)]


async def test_what_a_queue_refuses_is_sent_again(engine: Engine, queues: MemoryQueues) -> None:
    send = queues.send

    async def refuse_b(queue: QueueName, tickets: Sequence[Ticket]) -> list[Ticket]:
        queues.send = send  # type: ignore[method-assign]
        await send(queue, [ticket for ticket in tickets if ticket.id != "b"])
        return [ticket for ticket in tickets if ticket.id == "b"]

    queues.send = refuse_b  # type: ignore[method-assign]
    await put(engine, "a", "b")
    assert await tickets(queues) == [Ticket(id="a", fence=0)]
    assert await tickets(queues) == [Ticket(id="b", fence=0)]


async def test_a_full_queue_gets_no_more_until_it_has_room(
    engine: Engine, queues: MemoryQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasekit.server.enqueuer._FULL", 1)
    monkeypatch.setattr("leasekit.server.enqueuer._FULL_FOR", 1e9)
    enqueuer = engine.enqueuer
    assert enqueuer is not None
    await put(engine, "a")
    await until(lambda: engine.enqueuer is not None and engine.enqueuer.depths.get(K) == 1)
    await put(engine, "b")
    await put(engine, "c", kind="j")
    assert await tickets(queues, "j") == [Ticket(id="c", fence=0)]
    await enqueuer.look()
    await enqueuer.settled()
    assert engine.commit.tally.total("enqueued") == 2
    monkeypatch.setattr("leasekit.server.enqueuer._FULL_FOR", 0.0)
    assert await tickets(queues) == [Ticket(id="a", fence=0)]
    assert await tickets(queues) == [Ticket(id="b", fence=0)]


async def test_metrics_have_the_depth_of_queues_and_what_failed(engine: Engine, queues: MemoryQueues) -> None:
    await put(engine, "a")
    await until(lambda: engine.enqueuer is not None and engine.enqueuer.depths.get(K) == 1)
    exposition = (await Metrics(engine).exposition()).decode()
    assert 'leasekit_queue_depth{kind="k",priority="2"} 1.0' in exposition
    assert 'leasekit_tasks_enqueued_total{kind="k"} 1.0' in exposition
    assert "leasekit_queues_failing 0.0" in exposition


async def test_the_depth_of_a_queue_that_gets_no_more_messages_is_asked_again(
    engine: Engine, queues: MemoryQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasekit.server.enqueuer._MEASURED_FOR", 0.0)
    assert engine.enqueuer is not None
    enqueuer = engine.enqueuer
    await put(engine, "a")
    await put(engine, "later", delay=1000)  # the kind stays
    await until(lambda: enqueuer.depths.get(K) == 1)
    await tickets(queues)
    await until(lambda: enqueuer.depths.get(K) == 0)


async def test_the_depth_of_a_queue_that_does_not_answer_is_unknown(
    engine: Engine, queues: MemoryQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasekit.server.enqueuer._MEASURED_FOR", 0.0)
    assert engine.enqueuer is not None
    enqueuer = engine.enqueuer
    await put(engine, "a")
    await until(lambda: enqueuer.depths.get(K) == 1)

    async def away(queue: QueueName) -> int:
        raise Unavailable("away")

    queues.depth = away  # type: ignore[method-assign]
    await until(lambda: K not in enqueuer.depths)
    assert "leasekit_queue_depth{" not in (await Metrics(engine).exposition()).decode()


async def test_the_depth_of_a_queue_whose_kind_has_no_tasks_is_forgotten(engine: Engine, queues: MemoryQueues) -> None:
    assert engine.enqueuer is not None
    enqueuer = engine.enqueuer
    await put(engine, "a")
    await until(lambda: enqueuer.depths.get(K) == 1)
    await engine.cancel(["a"])
    await until(lambda: not enqueuer.depths)


async def test_two_nodes_send_one_message_for_each_task(
    postgres_stores: Callable[[], Store], queues: MemoryQueues
) -> None:
    async with (
        Engine(postgres_stores(), queues=queues) as first,
        Engine(postgres_stores(), queues=queues) as second,
    ):
        ids = [f"t{number}" for number in range(300)]
        await put(first, *ids[::2])
        await put(second, *ids[1::2])
        got = list[str]()
        while len(got) < len(ids):
            got += [ticket.id for ticket in await tickets(queues)]
        assert sorted(got) == sorted(ids)
        enqueued = first.commit.tally.total("enqueued") + second.commit.tally.total("enqueued")
        assert enqueued == len(ids)
