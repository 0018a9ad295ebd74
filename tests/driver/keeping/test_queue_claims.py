"""Claims by messages of queues: what is claimed, which messages are deleted, and from when trust counts."""

from typing import Any

import pytest

import leasekit
from leasekit._driver.keeping.queue_claims import QueueClaims
from leasekit.errors import ConfigError, Unavailable, UnknownScheme
from leasekit.queues import QueueName
from leasekit.task import Claimed, NewTask, Settlement, Ticket
from leasekit.testing.clock import FakeClock
from leasekit.testing.memory import MemoryBackend, MemoryService
from leasekit.testing.queues import MemoryQueues
from tests.waiting import until

pytestmark = pytest.mark.anyio

K = QueueName("k", 2)
A, B = Ticket(id="a", fence=0), Ticket(id="b", fence=0)


class Rig:
    """Two scheduled tasks, `a` and `b`, queues without messages, and claims by them."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.backend = MemoryBackend(MemoryService(now=self.clock), worker="w")
        self.queues = MemoryQueues()
        self.claims = QueueClaims(self.backend, self.queues, now=self.clock)

    async def claim(self, claim_id: str = "c", *, kinds: tuple[str, ...] = ("k",), wait: float = 0) -> Claimed:
        return await self.claims.claim(kinds, limit=10, wait=wait, claim_id=claim_id)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def rig() -> Rig:
    rig = Rig()
    await rig.backend.schedule([NewTask(id=task_id, kind="k") for task_id in "ab"])
    return rig


async def test_a_task_is_claimed_by_its_message_which_is_deleted(rig: Rig) -> None:
    await rig.queues.send(K, [B])
    assert [task.id for task in (await rig.claim()).tasks] == ["b"]
    await until(lambda: rig.queues.deleted == [B])


async def test_without_a_message_nothing_is_claimed(rig: Rig) -> None:
    assert (await rig.claim()).tasks == []


async def test_a_message_that_is_refused_is_deleted(rig: Rig) -> None:
    await rig.backend.cancel(["a"])
    await rig.queues.send(K, [A])
    assert (await rig.claim()).tasks == []
    await until(lambda: rig.queues.deleted == [A])


async def test_a_message_that_may_be_good_later_comes_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing_now(*_: Any, **__: Any) -> Claimed:
        monkeypatch.undo()
        return Claimed(tasks=[])

    monkeypatch.setattr(rig.backend, "claim_tickets", nothing_now)
    await rig.queues.send(K, [A])
    assert (await rig.claim()).tasks == []
    await until(lambda: rig.queues.received == 0)
    assert rig.queues.deleted == []
    assert [task.id for task in (await rig.claim("another")).tasks] == ["a"]


async def test_a_claim_whose_answer_was_lost_gets_the_same_tasks_when_it_is_repeated(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    granted = list[str]()
    claim = rig.backend.claim_tickets

    async def lost(*args: Any, **options: Any) -> Claimed:
        monkeypatch.undo()
        granted.extend(task.token for task in (await claim(*args, **options)).tasks)
        raise Unavailable("the answer was lost")

    monkeypatch.setattr(rig.backend, "claim_tickets", lost)
    await rig.queues.send(K, [A])
    with pytest.raises(Unavailable):
        await rig.claim()
    assert rig.queues.deleted == []
    assert [task.token for task in (await rig.claim()).tasks] == granted != []
    await until(lambda: rig.queues.deleted == [A])


async def test_trust_counts_from_when_the_service_was_asked_not_from_when_the_wait_began(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = rig.queues.receive

    async def slow(*args: Any, **options: Any) -> Any:
        rig.clock.advance(7)
        return await receive(*args, **options)

    monkeypatch.setattr(rig.queues, "receive", slow)
    await rig.queues.send(K, [A])
    assert (await rig.claim(wait=20)).waited == 7


async def test_names_are_claimed_from_the_service(rig: Rig) -> None:
    await rig.backend.schedule([NewTask(id="named:n", kind="named:n")])
    assert [task.id for task in (await rig.claim(kinds=("named:n",))).tasks] == ["named:n"]


async def test_a_message_that_came_twice_gives_no_second_lease(rig: Rig) -> None:
    await rig.queues.send(K, [A, A])
    assert len((await rig.claim()).tasks) == 1
    await until(lambda: len(rig.queues.deleted) == 2)
    assert (await rig.claim("another")).tasks == []


async def test_a_released_task_is_not_claimed_again_by_its_old_message(rig: Rig) -> None:
    await rig.queues.send(K, [A])
    (task,) = (await rig.claim()).tasks
    await rig.backend.settle([Settlement(id="a", token=task.token, outcome="release", retry_after=60)])
    await rig.queues.send(K, [A])
    assert (await rig.claim("another")).tasks == []


def test_a_service_without_queues_says_so() -> None:
    with pytest.raises(ConfigError, match="RedisBackend has no queues: they are filled by `leasekit serve --queue`"):
        leasekit.connect("redis://127.0.0.1:1", queue="memory://")


def test_queues_of_an_unknown_scheme_are_refused() -> None:
    with pytest.raises(UnknownScheme, match="no queues answer to pigeon://: installed are memory, redis"):
        leasekit.connect("memory://", queue="pigeon://loft")
