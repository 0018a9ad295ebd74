"""Client.adopt: a task that somebody else received from the service, kept by us from `lease(task)` on."""

import asyncio
import gc
import threading
import uuid
from collections.abc import Iterator, Sequence
from random import Random

import anyio
import pytest

import leasekit
from leasekit import Client, ConfigError, LeaseLost, NewTask, NotHeld, Task
from leasekit.task import Beat, Settlement, Status, Verdict
from leasekit.testing.memory import MemoryBackend, MemoryService
from tests.waiting import eventually


@pytest.fixture
def service() -> MemoryService:
    return MemoryService(random=Random(1))


@pytest.fixture
def client(service: MemoryService) -> Iterator[Client]:
    with Client(MemoryBackend(service, worker="keeper")) as client:
        yield client


def received(service: MemoryService, payload: object = None, *, ttl: float = 300) -> Task:
    """What a loop of the user's own got from the service."""
    loop = MemoryBackend(service, worker="loop")

    async def claim() -> Task:
        await loop.schedule([NewTask(kind="k", payload=payload, claim_timeout=ttl, heartbeat_timeout=ttl)])
        return (await loop.claim(["k"], limit=1, wait=0, claim_id=uuid.uuid4().hex)).tasks[0]

    return asyncio.run(claim())


def settled(service: MemoryService, task: Task) -> None:
    done = Settlement(id=task.id, token=task.token, outcome="success")
    asyncio.run(MemoryBackend(service, worker="loop").settle([done]))


def status(client: Client, task: Task) -> Status:
    found = client.get(task.id)
    assert found is not None
    return found.status


def test_the_block_begins_when_the_service_has_acknowledged_it(client: Client, service: MemoryService) -> None:
    task = client.adopt(received(service, {"page": 1}))
    with leasekit.lease(task) as held:
        assert status(client, task) is Status.PROCESSING
        assert held.task.payload == {"page": 1}
        assert held.remaining() > 0
    assert status(client, task) is Status.SUCCESS


def test_progress_of_an_adopted_task_replaces_that_of_who_claimed_it(client: Client, service: MemoryService) -> None:
    """That may have reported a hundred times: where an adopter stands in the order of its claim, it does not know."""
    task = received(service)
    earlier = Beat(id=task.id, token=task.token, progress="loop", progress_seq=100)
    asyncio.run(MemoryBackend(service, worker="loop").beat([earlier]))
    with leasekit.lease(client.adopt(task)) as held:
        held.progress("adopter")
        eventually(lambda: client.get(task.id).progress == "adopter")  # type: ignore[union-attr]


def test_a_task_that_is_gone_by_then_never_begins(client: Client, service: MemoryService) -> None:
    task = client.adopt(received(service))
    settled(service, task)
    with pytest.raises(LeaseLost, match="settled"), leasekit.lease(task):
        pytest.fail("its body ran")


def test_a_task_is_adopted_for_one_lease(client: Client, service: MemoryService) -> None:
    task = client.adopt(received(service))
    with leasekit.lease(task):
        pass
    with pytest.raises(NotHeld), leasekit.lease(task):
        pytest.fail("its body ran again")


def test_two_leases_of_one_adoption_run_one_body(client: Client, service: MemoryService) -> None:
    task = client.adopt(received(service))
    first, second = leasekit.lease(task), leasekit.lease(task)
    with first, pytest.raises(NotHeld), second:
        pytest.fail("its body ran twice")


def test_an_adopted_task_of_which_no_lease_is_made_is_not_touched(client: Client, service: MemoryService) -> None:
    task = client.adopt(received(service))
    assert len(client.__connection__().keeper) == 0
    assert status(client, task) is Status.CLAIMED


def test_a_lease_of_it_that_is_dropped_gives_it_back(client: Client, service: MemoryService) -> None:
    task = client.adopt(received(service))
    held = leasekit.lease(task)
    del held
    gc.collect()
    eventually(lambda: status(client, task) is Status.ENQUEUED)


def test_a_ttl_without_room_for_heartbeats_is_refused(client: Client) -> None:
    with pytest.raises(ConfigError, match="ttl"):
        leasekit.lease(client.adopt(Task(id="t", kind="k", token="x", ttl=1)))


@pytest.mark.anyio
async def test_a_lease_that_two_blocks_enter_at_once_is_that_of_one(service: MemoryService) -> None:
    """The second is refused at once: if both waited for the first heartbeat, the end of one could end the lease."""
    task = await anyio.to_thread.run_sync(received, service)
    answering = threading.Event()

    class Slow(MemoryBackend):
        async def beat(self, beats: Sequence[Beat]) -> list[Verdict]:
            await asyncio.to_thread(answering.wait)
            return await super().beat(beats)

    async with Client(Slow(service, worker="keeper")) as client:
        held = leasekit.lease(client.adopt(task))
        refused = anyio.Event()

        async def block() -> None:
            try:
                async with held:
                    await refused.wait()
            except NotHeld:
                refused.set()

        async with anyio.create_task_group() as blocks:
            blocks.start_soon(block)
            blocks.start_soon(block)
            try:
                with anyio.fail_after(20):
                    await refused.wait()  # and the heartbeat has no answer yet
            finally:
                answering.set()
        found = await client.aget(task.id)
    assert found is not None
    assert found.status is Status.SUCCESS


@pytest.mark.anyio
async def test_the_async_door_keeps_it_too(service: MemoryService) -> None:
    task = await anyio.to_thread.run_sync(received, service)
    async with Client(MemoryBackend(service, worker="keeper")) as client:
        async with leasekit.lease(client.adopt(task)) as held:
            held.complete(7)
        found = await client.aget(task.id)
    assert found is not None
    assert found.result == 7
