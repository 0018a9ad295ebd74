"""How tests wait: for facts, never for time. What ends a wait that hangs is generous, and decides nothing."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import anyio
import pytest

__all__ = ["eventually", "interrupting", "turns", "until"]

T = TypeVar("T")


def eventually(fact: Callable[[], T | None], what: str = "it", *, within: float = 60) -> T:
    """The first true value of `fact`. Fails the test, also where an `Exception` would be swallowed: in a lost block."""
    end, pause = time.monotonic() + within, 0.001
    while not (value := fact()):
        if time.monotonic() >= end:
            pytest.fail(f"waited {within:g} s for {what}")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)
    return value


async def until(fact: Callable[[], object], *, within: float = 60) -> None:
    """Let an event loop go on until this is true."""
    with anyio.move_on_after(within):
        while not fact():  # noqa: ASYNC110 - a fact of another thread has no event
            await anyio.sleep(0.001)
        return
    pytest.fail(f"waited {within:g} s for it")


async def turns() -> None:
    """Give an event loop the turns in which it does all that is due, where nothing of that waits for anything else."""
    for _ in range(30):
        await asyncio.sleep(0)


class interrupting:  # noqa: N801 - reads as a statement
    """Ctrl-C, once, when the fact holds and the main thread waits."""

    def __init__(self, fact: Callable[[], object]) -> None:
        self.thread = threading.Thread(target=self.run, args=[fact])

    def run(self, fact: Callable[[], object]) -> None:
        eventually(fact)
        time.sleep(0.05)  # let the main thread come to wait; before that it is interrupted all the same
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.thread.join()
