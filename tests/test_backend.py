"""What `leasekit.backend` offers to adapters."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from leasekit import backend
from leasekit.backend import cancel_all

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def _stubborn(cancels: int) -> None:
    """Go on in spite of as many cancels, as a task does in which a library swallows them."""
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if cancels == 0:
                raise
            cancels -= 1


async def _failing() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        raise OSError("as it closes")


@pytest.mark.anyio
@pytest.mark.parametrize(
    "work", [lambda: _stubborn(0), lambda: _stubborn(3), _failing], ids=["ends", "swallows", "fails"]
)
async def test_tasks_end_however_they_take_their_cancel(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    monkeypatch.setattr(backend, "_CANCEL_AGAIN", 0.01)
    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    await cancel_all([task])
    assert task.done()


async def test_no_tasks_need_no_wait() -> None:
    await cancel_all([])
