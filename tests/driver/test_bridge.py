"""From the driver's thread back into asyncio and trio."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError

import anyio
import anyio.lowlevel
import pytest

from leasekit._driver.answer import Answer
from leasekit._driver.bridge import call_soon_here, outcome, ring, whole


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def elsewhere(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@pytest.mark.anyio
async def test_the_outcome_of_another_thread_is_waited_for() -> None:
    future: Answer[int] = Answer()
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, future.set_result, 7)
        assert await outcome(future) == 7


@pytest.mark.anyio
async def test_an_outcome_that_is_there_already_is_had_at_once() -> None:
    future: Answer[int] = Answer()
    future.set_result(1)
    with anyio.fail_after(20):
        assert await outcome(future) == 1


@pytest.mark.anyio
async def test_an_error_of_another_thread_is_raised() -> None:
    future: Answer[int] = Answer()
    future.set_exception(KeyError("k"))
    with pytest.raises(KeyError):
        await outcome(future)


@pytest.mark.anyio
async def test_what_was_cancelled_elsewhere_is_no_cancellation_of_who_waits() -> None:
    future: Answer[int] = Answer()
    future.cancel()
    with pytest.raises(CancelledError):
        await outcome(future)


@pytest.mark.anyio
@pytest.mark.parametrize("keep", [False, True])
async def test_being_cancelled_cancels_what_is_waited_for_unless_it_is_kept(*, keep: bool) -> None:
    future: Answer[int] = Answer()
    with anyio.move_on_after(0.01) as scope:
        await outcome(future, keep=keep)
    assert scope.cancelled_caught
    assert future.cancelled() is not keep


@pytest.mark.anyio
async def test_a_call_from_another_thread_arrives_here() -> None:
    called = anyio.Event()
    call_soon = call_soon_here()
    elsewhere(lambda: ring(call_soon, called.set))
    with anyio.fail_after(20):
        await called.wait()


def test_outside_of_a_loop_there_is_nothing_to_call_into() -> None:
    with pytest.raises(RuntimeError):
        call_soon_here()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_ringing_a_loop_that_has_ended_is_no_error(backend: str) -> None:
    async def get() -> Callable[..., object]:
        return call_soon_here()

    call_soon = anyio.run(get, backend=backend)
    ring(call_soon, lambda: pytest.fail("it was called"))


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_outcome_that_comes_after_its_loop_has_ended_harms_nobody(backend: str) -> None:
    future: Answer[int] = Answer()

    async def give_up() -> None:
        with anyio.move_on_after(0.01):
            await outcome(future, keep=True)

    anyio.run(give_up, backend=backend)
    future.set_result(1)
    assert future.result() == 1


@pytest.mark.anyio
async def test_a_whole_answer_is_waited_for_though_the_caller_is_cancelled() -> None:
    future: Answer[int] = Answer()
    ended: list[str] = []

    async def wait() -> None:
        try:
            await whole(future)
        finally:
            ended.append("over" if future.done() else "too early")

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
        threading.Timer(0.05, future.set_result, [7]).start()
    assert ended == ["over"]
