"""A claim that a network has kept until its worker was dead, and all that it held was handed back."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from harness.proxy import Proxy
from leasekit._driver.reporting.ledger import Holder, Past, PendingClaim
from leasekit._worker.handback import hand_back
from leasekit.task import NewTask, Status
from leasekit_redis import RedisBackend, connect
from tests.redis_server import Server

pytestmark = pytest.mark.anyio


def waiting(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@pytest.fixture
async def backend(server: Server) -> AsyncIterator[RedisBackend]:
    backend = connect(server.url, worker="other")
    yield backend
    await backend.aclose()


async def test_a_claim_that_arrives_after_all_was_handed_back_is_granted_nothing(
    server: Server, backend: RedisBackend, kind: str
) -> None:
    kinds = [kind, f"{kind}-b"]
    async with Proxy(f"tcp://127.0.0.1:{server.port}") as proxy:
        dead = connect(f"redis://127.0.0.1:{proxy.port}", worker="dead")
        assert not (await dead.claim([kind], limit=1, wait=0, claim_id="before")).tasks  # connected, scripts loaded
        proxy.hang("requests")
        claim = asyncio.create_task(dead.claim([kind], limit=1, wait=0, claim_id="late"))
        await proxy.until(lambda: proxy.fired["hang"] > 0)
        past = Past(Holder(worker="dead", url=server.url), [], [], [PendingClaim("late", kinds)])
        await asyncio.to_thread(hand_back, past, "killed", waiting=waiting)
        [task] = await backend.schedule([NewTask(kind=kind)])
        proxy.mend()
        assert (await claim).tasks == []
        await dead.aclose()
    info = await backend.get(task.id)
    assert info is not None
    assert (info.status, info.attempt) == (Status.NEW, 0)
    assert len((await backend.claim([kind], limit=1, wait=0, claim_id="another")).tasks) == 1


async def test_what_a_claim_of_several_kinds_was_granted_is_given_back(
    server: Server, backend: RedisBackend, kind: str
) -> None:
    kinds = [kind, f"{kind}-b"]
    ids = [answer.id for answer in await backend.schedule([NewTask(kind=one) for one in kinds])]
    dead = connect(server.url, worker="dead")
    assert len((await dead.claim(kinds, limit=2, wait=0, claim_id="unheard")).tasks) == 2
    await dead.aclose()
    past = Past(Holder(worker="dead", url=server.url), [], [], [PendingClaim("unheard", kinds)])
    await asyncio.to_thread(hand_back, past, "killed", waiting=waiting)
    infos = [await backend.get(task_id) for task_id in ids]
    assert [info.status for info in infos if info is not None] == [Status.ENQUEUED] * 2
