"""Successors: they come with the end of a task, or not at all."""

# ruff: noqa: PT012 - what a whole block raises is what is tested here

from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import leasekit
from leasekit import Client, Fatal, LeasekitError, LeaseLost, NotHeld, Task, Worker
from leasekit._batches import parts
from leasekit.backend import Capabilities
from leasekit.errors import Refused
from leasekit.server.embedded import DirectBackend
from leasekit.server.shared import SharedBackend
from leasekit.task import NewTask, Status, TaskInfo
from leasekit.testing import faults
from leasekit.testing.faults import Faulty
from leasekit.testing.memory import MemoryBackend, MemoryService


@pytest.fixture(params=["memory", "sqlite"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    with leasekit.connect("memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/tasks.db") as client:
        yield client


def claimed(client: Client, kind: str = "first") -> Task:
    client.schedule(kind)
    return next(client.tasks(kind))


def successors(client: Client) -> list[TaskInfo]:
    return client.list_tasks(kind="next").tasks


def test_a_success_schedules_what_follows(client: Client) -> None:
    with leasekit.lease(claimed(client)) as held:
        held.then("next", {"page": 1})
        held.then("next", {"page": 2}, priority=0, collection="pages")
        assert successors(client) == []
    found = {info.payload["page"]: info for info in successors(client)}
    assert set(found) == {1, 2}
    assert (found[2].priority, found[2].collection) == (0, "pages")


def test_a_fatal_failure_schedules_what_follows(client: Client) -> None:
    with pytest.raises(Fatal), leasekit.lease(claimed(client)) as held:
        held.then("next")
        raise Fatal
    with leasekit.lease(claimed(client)) as held:
        held.then("next")
        held.fail("for good", retry=False)
    assert len(successors(client)) == 2


def fails(held: leasekit.Lease) -> None:
    raise ValueError


def completes_and_fails(held: leasekit.Lease) -> None:
    held.complete()
    raise ValueError


@pytest.mark.parametrize(
    "end", [fails, completes_and_fails, lambda held: held.fail("again"), lambda held: held.release(after=60)]
)
def test_what_is_tried_again_drops_what_would_follow(client: Client, end: Callable[[leasekit.Lease], Any]) -> None:
    task = claimed(client)
    try:
        with leasekit.lease(task) as held:
            held.then("next")
            end(held)
    except ValueError:
        pass
    info = client.get(task.id)
    assert info is not None
    assert not info.status.ended
    assert successors(client) == []


def test_a_lost_lease_drops_what_would_follow(client: Client) -> None:
    with pytest.raises(LeaseLost), leasekit.lease(claimed(client)) as held:
        held.then("next")
        raise LeaseLost("somebody else said so")
    assert successors(client) == []


def test_the_payload_is_that_of_the_moment(client: Client) -> None:
    pages = [1]
    with leasekit.lease(claimed(client)) as held:
        held.then("next", pages)
        pages.append(2)
    assert [info.payload for info in successors(client)] == [[1]]


@pytest.mark.parametrize(
    ("payload", "options"),
    [
        (object(), {}),
        ("x" * (1024 * 1024), {}),
        (None, {"priority": 9}),
        (None, {"at": datetime(2030, 1, 1)}),  # noqa: DTZ001 - without a zone it is no moment
        (None, {"id": "a/b"}),
        (None, {"id": "itself", "after": ["itself"]}),
    ],
)
def test_what_no_service_would_take_is_refused_at_once_and_the_result_is_kept(
    client: Client, payload: Any, options: Any
) -> None:
    task = claimed(client)
    with leasekit.lease(task) as held:
        with pytest.raises(ValueError, match=r"payload|cannot be scheduled|names itself"):
            held.then("next", payload, **options)
        held.complete("done")
    info = client.get(task.id)
    assert info is not None
    assert (info.status, info.result) == (Status.SUCCESS, "done")
    assert successors(client) == []


def test_dependencies_that_a_service_does_not_have_are_refused_at_once(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for backend in (DirectBackend, SharedBackend):
        monkeypatch.setattr(backend, "capabilities", Capabilities(dependencies=False))
    task = claimed(client)
    with leasekit.lease(task) as held:
        with pytest.raises(LeasekitError, match="has no dependencies"):
            held.then("next", after=["other"])
        held.complete("done")
    info = client.get(task.id)
    assert info is not None
    assert info.result == "done"


def test_there_are_no_more_than_a_service_takes(client: Client) -> None:
    with leasekit.lease(claimed(client)) as held:
        for _ in range(1000):
            held.then("next")
        with pytest.raises(ValueError, match="1000 successors"):
            held.then("next")
    assert client.stats().kinds["next"]["new"] == 1000


def test_successors_run_after_no_more_tasks_than_a_service_takes(client: Client) -> None:
    after = [f"other-{n}" for n in range(100)]
    with leasekit.lease(claimed(client)) as held:
        for _ in range(100):
            held.then("next", after=after)
        with pytest.raises(ValueError, match="run after 10,001 tasks together, 10,000 at most"):
            held.then("next", after=["other-0"])
        held.then("next")
    assert client.stats().kinds["next"]["new"] == 101


def test_a_batch_that_runs_after_more_tasks_than_a_request_takes_is_sent_in_parts(client: Client) -> None:
    after = [f"other-{n}" for n in range(100)]
    scheduled = client.schedule_all([NewTask(kind="next", after=after) for _ in range(201)])
    assert client.stats().kinds["next"]["new"] == len({task.id for task in scheduled}) == 201


def test_one_task_after_too_many_is_refused_with_what_is_wrong(client: Client) -> None:
    after = [f"other-{n}" for n in range(20_000)]
    with pytest.raises(Refused, match="after"):
        client.schedule_all([NewTask(kind="next", after=after)])
    with leasekit.lease(claimed(client)) as held, pytest.raises(ValueError, match="after"):
        held.then("next", after=after)
    with pytest.raises((Refused, ValueError), match="after"):
        client.schedule("next", after=None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_no_part_of_a_batch_is_empty_but_that_of_an_empty_batch() -> None:
    most = NewTask(kind="next", after=[f"other-{n}" for n in range(20_000)])
    assert [(first, len(part)) for first, part in parts([most, most])] == [(0, 1), (1, 1)]
    assert [(first, len(part)) for first, part in parts([NewTask(kind="next")] * 1001)] == [(0, 1000), (1000, 1)]
    assert [*parts([])] == [(0, [])]


def test_successors_are_said_within_the_block(client: Client) -> None:
    held = leasekit.lease(claimed(client))
    with pytest.raises(NotHeld):
        held.then("next")
    with held:
        pass
    with pytest.raises(NotHeld):
        held.then("next")


def test_a_report_that_is_repeated_makes_no_second_successor() -> None:
    faulty = Faulty(MemoryBackend(MemoryService(), worker="w"))
    with Client(faulty) as client:
        faulty.script("settle", faults.lose_answer)
        with leasekit.lease(claimed(client)) as held:
            held.then("next")
        assert faulty.calls["settle"] == 2
        assert len(successors(client)) == 1


def test_a_backend_that_accepts_no_work_is_named() -> None:
    service = MemoryService()

    class HandsOut:
        """Only the seam of a backend."""

        def __init__(self) -> None:
            backend = MemoryBackend(service, worker="w")
            self.capabilities, self.claim, self.beat = backend.capabilities, backend.claim, backend.beat
            self.settle, self.aclose = backend.settle, backend.aclose

    with Client(MemoryBackend(service, worker="submitter")) as submitter, Client(HandsOut()) as client:
        submitter.schedule("first")
        with (
            leasekit.lease(next(client.tasks("first"))) as held,
            pytest.raises(LeasekitError, match="HandsOut accepts no work"),
        ):
            held.then("next")


@pytest.mark.anyio
async def test_async_blocks_have_successors_too(client: Client) -> None:
    await client.aschedule("first")
    async with leasekit.lease(await anext(client.tasks("first"))) as held:
        held.then("next")
    assert len((await client.alist_tasks(kind="next")).tasks) == 1


@pytest.mark.parametrize(("fails", "expected"), [(False, 1), (True, 0)])
def test_handlers_have_successors_too(client: Client, fails: bool, expected: int) -> None:
    worker = Worker(client)

    @worker.handler("first")
    def first(payload: None, held: leasekit.Lease) -> None:
        held.then("next")
        worker.stop()
        if fails:
            raise ValueError

    client.schedule("first")
    worker.run()
    assert len(successors(client)) == expected
