"""Thousands of calls at once are sent in turn: they do not keep the event loop from the heartbeats."""

import asyncio

import pytest

from leasekit.task import Beat, NewTask
from leasekit_http import transport
from tests.adapters.http.conftest import Meet, Stranger

pytestmark = pytest.mark.anyio


async def test_a_heartbeat_passes_the_calls_that_wait_for_their_turn(meet: Meet) -> None:
    waiting, is_full, is_answered = 0, asyncio.Event(), asyncio.Event()

    async def behave(stranger: Stranger) -> None:
        nonlocal waiting
        if b"/v1/heartbeats" in stranger.request:
            await stranger.answer(b'{"verdicts":[{"id":"a","verdict":"renewed"}]}', headers=_named(stranger))
            return
        waiting += 1
        if waiting == transport._TOGETHER:
            is_full.set()
        await is_answered.wait()
        await stranger.answer(b'{"tasks":[{"id":"b","created":true,"status":"new"}]}', headers=_named(stranger))

    async with meet(behave) as backend:
        calls = [asyncio.create_task(backend.schedule([NewTask(id="b", kind="k")])) for _ in range(120)]
        await is_full.wait()
        (verdict,) = await backend.beat([Beat(id="a", token="t")])
        assert (verdict.verdict, waiting) == ("renewed", transport._TOGETHER)
        is_answered.set()
        assert [scheduled.created for (scheduled,) in await asyncio.gather(*calls)] == [True] * 120


def _named(stranger: Stranger) -> str:
    """The header that names the request which is answered."""
    return "".join(line + "\r\n" for line in stranger.request.decode().split("\r\n") if line.startswith("leasekit-"))
