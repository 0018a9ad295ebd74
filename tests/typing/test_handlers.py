"""What type checkers know of a declared handler. They are what fails here: the tests only run what they read."""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import assert_type

import msgspec
import pytest

from leasekit import Client, ConfigError, Lease, Worker
from leasekit.task import KindSettings, Scheduled, TaskDefaults
from leasekit.testing.memory import MemoryBackend, MemoryService
from leasekit.worker import HandlerFunction


class Thumbnail(msgspec.Struct):
    path: str
    width: int = 100


worker = Worker()


@worker.handler("plain")
def plain(payload: Thumbnail) -> int:
    return payload.width


@worker.periodic("0 7 * * *", tz="Europe/Berlin", payload=Thumbnail("a.png"), overlap="queue")
@worker.handler("held", run="thread", concurrency=2)
def with_lease(payload: Thumbnail, held: Lease | None = None) -> str:
    return payload.path


@worker.handler("process", run="process", threads=4)
def in_process(payload: Thumbnail) -> int:
    return payload.width


@worker.handler("async")
async def in_loop(payload: list[int]) -> int:
    return sum(payload)


@worker.periodic(every=60, priority=0)
@worker.handler("periodic")
def periodic(payload: None) -> str:
    return "done"


declared: HandlerFunction[Thumbnail, [], int] = plain


def test_a_call_has_the_parameters_and_the_result_of_the_function() -> None:
    thumbnail = Thumbnail("a.png")
    assert_type(plain(thumbnail), int)
    assert_type(with_lease(thumbnail, held=None), str)
    assert_type(periodic(None), str)
    with pytest.raises(AttributeError):
        plain("a.png")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        plain(thumbnail, 1)  # type: ignore[call-arg]


@pytest.mark.anyio
async def test_an_async_function_is_awaited() -> None:
    assert_type(await in_loop([1, 2]), int)


@pytest.mark.anyio
async def test_what_is_scheduled_is_the_payload() -> None:
    with Client(MemoryBackend(MemoryService(), worker="w")) as client:
        urgent = plain.options(client=client, priority=0)
        assert_type(urgent.schedule(Thumbnail("a.png")), Scheduled)
        assert_type(urgent.schedule(path="a.png", width=7), Scheduled)
        assert_type(await in_loop.options(client=client).aschedule([1]), Scheduled)
        with pytest.raises(ValueError, match="does not fit"):
            urgent.schedule(7)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="urgency"):
            plain.options(client=client, urgency=0)  # type: ignore[call-arg]


def test_the_defaults_of_tasks_are_named() -> None:
    def key(payload: Thumbnail) -> str:
        return payload.path

    defaults: TaskDefaults = {"max_attempts": 5, "max_runtime": 3600, "expiry": "retry"}
    assert_type(Worker().handler("k", dedupe=key, **defaults)(plain.function)(Thumbnail("a.png")), int)
    settings = KindSettings(concurrency=4, retention=3600)
    assert_type(Worker().handler("k", settings=settings)(plain.function)(Thumbnail("a.png")), int)
    with pytest.raises(TypeError, match="max_attempt"):
        Worker().handler("k", max_attempt=5)(plain.function)  # type: ignore[call-arg]


@worker.around
def around(held: Lease) -> Iterator[None]:
    yield


@worker.around("async")
async def around_async(held: Lease) -> AsyncIterator[None]:
    yield


@worker.lifespan
def lifespan() -> Iterator[None]:
    yield


@worker.lifespan
async def lifespan_of_loop() -> AsyncIterator[None]:
    yield


def test_what_is_declared_around_runs_and_processes_keeps_its_type() -> None:
    kept: Callable[[Lease], Iterator[None]] = around
    kept_async: Callable[[Lease], AsyncIterator[None]] = around_async
    assert (kept, kept_async) == (around, around_async)
    assert_type(lifespan, Callable[[], Iterator[None]])
    assert_type(lifespan_of_loop, Callable[[], AsyncIterator[None]])
    with pytest.raises(ConfigError):
        worker.around(lifespan)  # type: ignore[type-var] # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(ConfigError):
        worker.lifespan(print)  # type: ignore[type-var] # pyright: ignore[reportArgumentType]
