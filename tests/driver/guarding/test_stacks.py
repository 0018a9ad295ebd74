"""Stacks: where the code of a lost lease is, and nothing of any other thread."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import coroutine as generator_coroutine
from typing import Any

import pytest

from leasekit._driver.guarding.stacks import Stack


@contextmanager
def in_thread(wait_here: Any) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=wait_here)
    thread.start()
    try:
        yield thread
    finally:
        over.set()
        thread.join()


over = threading.Event()


@pytest.fixture(autouse=True)
def _anew() -> None:
    over.clear()


def test_the_stack_of_a_thread_is_that_of_its_code_alone() -> None:
    begun = threading.Event()

    def renders() -> None:
        begun.set()
        over.wait()

    with in_thread(renders) as thread:
        begun.wait()
        text = str(Stack(thread.ident or 0))
    assert "in renders\n    over.wait()" in text
    assert "test_the_stack_of_a_thread" not in text


def test_a_thread_that_has_ended_has_no_stack() -> None:
    assert str(Stack(0)) == "  (its thread has ended)"


async def _waits() -> None:
    await _forever()


@generator_coroutine
def _forever() -> Any:
    yield from asyncio.Event().wait()


@pytest.mark.anyio
async def test_the_stack_of_a_coroutine_that_waits_is_not_that_of_its_event_loop() -> None:
    waiting = asyncio.create_task(_waits())
    await asyncio.sleep(0)
    coroutine: Any = waiting.get_coro()
    text = str(Stack(threading.get_ident(), coroutine))
    assert "in _waits\n    await _forever()" in text
    assert "in _forever\n" in text
    assert "test_the_stack_of_a_coroutine" not in text
    waiting.cancel()


@pytest.mark.anyio
async def test_the_stack_of_a_coroutine_that_blocks_its_event_loop_is_that_of_its_thread() -> None:
    found: list[str] = []

    def blocks(coroutine: Any) -> None:
        found.append(str(Stack(threading.get_ident(), coroutine)))

    async def runs() -> None:
        current = asyncio.current_task()
        assert current is not None
        blocks(current.get_coro())

    await asyncio.create_task(runs())
    assert "in runs\n" in found[0]
    assert "in blocks\n" in found[0]
