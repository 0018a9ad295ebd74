"""Claims that wait: who is woken when."""

import asyncio
from typing import Any

import pytest

from leasekit.server.claims import Answer, Asked
from leasekit.server.clock import StoreClock
from leasekit.server.commit import Done
from leasekit.server.turn import Readied
from leasekit.server.waiting import Waiting
from leasekit.task import Claimed

pytestmark = pytest.mark.anyio


async def test_a_claim_of_two_kinds_that_are_due_at_once_is_tried_and_nothing_stumbles() -> None:
    time = [4.999]
    tried: asyncio.Queue[tuple[Asked, Done]] = asyncio.Queue()
    stumbled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: stumbled.append(context))
    waiting = Waiting(lambda asked, done: tried.put_nowait((asked, done)), StoreClock(lambda: time[0], None))
    claim = asyncio.create_task(waiting.claim(worker="w", claim_id="c", kinds=["a", "b"], limit=1, wait=60))
    (await tried.get())[1](Answer())
    waiting.ready({"a": Readied(0, 5.0), "b": Readied(0, 5.0)})
    time[0] = 5.0
    (await tried.get())[1](Answer(Claimed(tasks=[])))
    await claim
    await asyncio.sleep(0)
    assert stumbled == []
