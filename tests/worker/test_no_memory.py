"""A body that used up all memory has let go of it before its failure is reported."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import leasekit
from leasekit._leased_run import LeasedRun


class _Much:
    """Stands for all that there is."""


def out_of_memory() -> None:
    """Raise, and let the traceback refer to much."""
    mine = _Much()
    MUCH.append(weakref.ref(mine))
    raise MemoryError


def alone() -> None:
    out_of_memory()


def in_a_group() -> None:
    try:
        out_of_memory()
    except MemoryError as error:
        caught = [error]
    raise ExceptionGroup("of a task group", caught)


def in_a_group_of_a_cause() -> None:
    try:
        in_a_group()
    except ExceptionGroup as group:
        raise MemoryError from ExceptionGroup("outer", [group])


def beside_a_cause() -> None:
    try:
        out_of_memory()
    except MemoryError:
        raise MemoryError from ValueError()


MUCH: list["weakref.ref[_Much]"] = []


@pytest.mark.parametrize("fail", [alone, in_a_group, in_a_group_of_a_cause, beside_a_cause])
def test_what_a_body_had_when_memory_ran_out_is_free_when_it_is_reported(
    monkeypatch: pytest.MonkeyPatch, fail: Callable[[], None]
) -> None:
    held_then: list[bool] = []
    MUCH.clear()
    ended = LeasedRun.ended

    def look(run: LeasedRun, error: BaseException | None, **options: Any) -> Any:
        held_then.append(MUCH[0]() is not None)
        worker.stop()
        return ended(run, error, **options)

    monkeypatch.setattr(LeasedRun, "ended", look)
    with leasekit.connect("memory://") as client:
        worker = leasekit.Worker(client, concurrency=1)

        @worker.handler("job")
        def job(payload: None) -> None:
            fail()

        client.schedule("job", max_attempts=1)

        async def serve() -> None:
            async with asyncio.timeout(20):
                await worker.serve()

        gc.disable()
        try:
            asyncio.run(serve())
        finally:
            gc.enable()
    assert held_then == [False]


def test_an_error_whose_causes_go_round_in_a_circle_is_reported_all_the_same() -> None:
    def body(payload: None) -> None:
        error, cause = MemoryError(), ValueError()
        error.__cause__, cause.__cause__ = cause, error
        raise error

    with leasekit.connect("memory://") as client:
        worker = leasekit.Worker(client)
        worker.handler("job")(body)
        task = client.schedule("job", max_attempts=1)
        asyncio.run(_until_ended(worker, client, task.id))


async def _until_ended(worker: leasekit.Worker, client: leasekit.Client, task_id: str) -> None:
    serving = asyncio.create_task(worker.serve())
    await client.await_tasks(task_id, timeout=60)
    worker.stop()
    await serving
