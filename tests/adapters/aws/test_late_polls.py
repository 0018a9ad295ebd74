"""Long polls that outlive their claims: what they bring is lost to nobody."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from leasekit import Task
from leasekit.backend import Backend
from leasekit_aws import AwsBackend, polls
from leasekit_aws.polls import Polls
from leasekit_swf import connect
from tests.adapters.aws.conftest import Aws

pytestmark = pytest.mark.anyio


async def claim(backend: Backend, *kinds: str, wait: float = 20) -> list[Task]:
    async with asyncio.timeout(30):
        return (await backend.claim(kinds or ("resize",), limit=1, wait=wait, claim_id="c")).tasks


async def until(aws: Aws, fact: Callable[[], object]) -> None:
    await asyncio.to_thread(aws.wait_until, fact)


async def test_a_poll_goes_on_when_its_claim_is_cancelled_and_the_next_claim_gets_its_task(
    aws: Aws, backend: Backend
) -> None:
    aws.poll_seconds = 20
    given_up = asyncio.create_task(claim(backend))
    await until(aws, lambda: len(aws.asked("PollForActivityTask")) == 1)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    work = aws.schedule("render", "resize")
    (task,) = await claim(backend)
    assert task.token == work.token
    assert len(aws.asked("PollForActivityTask")) == 1


async def test_a_claim_counts_from_its_own_poll_but_not_from_that_of_another(aws: Aws, backend: Backend) -> None:
    """Nobody knows when SWF granted it: after the poll had left, that is all."""
    aws.schedule("render", "resize")
    assert (await backend.claim(["resize"], limit=1, wait=20, claim_id="a")).waited == 0
    aws.poll_seconds = 20
    assert await claim(backend, wait=0) == []
    aws.schedule("render", "resize")
    late = await backend.claim(["resize"], limit=1, wait=20, claim_id="b")
    assert (len(late.tasks), late.waited) == (1, None)


async def test_what_a_late_poll_brings_is_given_back_when_no_claim_comes(aws: Aws) -> None:
    backend = connect(f"swf://media/render?endpoint={aws.url}&ttl=2", worker="w")
    aws.poll_seconds = 20
    assert await claim(backend, wait=0) == []
    work = aws.schedule("render", "resize")
    await until(aws, lambda: work.state == "ended")
    assert work.end["reason"] == "released"
    await backend.aclose()


@pytest.mark.parametrize("glance", [1.0, 0.001], ids=["in time", "after its claim has ended"])
async def test_what_was_claimed_for_nobody_is_given_back_on_closing(
    aws: Aws, backend: Backend, glance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polls, "_GLANCE", glance)
    aws.schedule("render", "other")
    await claim(backend, wait=0)
    (work,) = aws.works
    assert isinstance(backend, AwsBackend)
    await until(aws, lambda: backend._polls._kept)  # it has come; SWF calls it started before that
    await backend.aclose()
    assert (work.state, work.end["reason"]) == ("ended", "released")


async def test_what_comes_after_closing_is_given_back_too(aws: Aws, backend: Backend) -> None:
    aws.poll_seconds = 20
    assert await claim(backend, wait=0) == []
    await backend.aclose()
    work = aws.schedule("render", "resize")
    await until(aws, lambda: work.state == "ended")
    assert work.end["reason"] == "released"


async def test_a_task_of_a_kind_that_was_not_asked_for_waits_for_a_claim_of_it(aws: Aws, backend: Backend) -> None:
    aws.schedule("render", "crop")
    aws.schedule("render", "resize")
    assert [task.kind for task in await claim(backend, "resize")] == ["resize"]
    assert [task.kind for task in await claim(backend, "crop")] == ["crop"]


async def test_a_worker_that_does_not_know_the_kinds_on_its_list_does_not_drain_it(aws: Aws, backend: Backend) -> None:
    works = [aws.schedule("render", "crop") for _ in range(15)]

    def taken() -> int:
        return sum(work.state != "waiting" for work in works)

    while taken() < 10:
        assert await claim(backend, "resize", wait=1) == []
    assert await claim(backend, "resize", wait=1) == []
    assert taken() == 10
    assert [task.kind for task in await claim(backend, "crop")] == ["crop"]


async def test_two_claims_have_two_polls(aws: Aws, backend: Backend) -> None:
    aws.poll_seconds = 20
    claims = [asyncio.create_task(claim(backend)) for _ in range(2)]
    await until(aws, lambda: len(aws.asked("PollForActivityTask")) == 2)
    for _ in range(2):
        aws.schedule("render", "resize")
    assert [len(await one) for one in claims] == [1, 1]


async def test_a_task_that_came_at_the_moment_of_closing_is_given_back() -> None:
    """The thread has its answer, the loop has not heard of it yet."""
    asked, answered, returned = threading.Event(), threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def ask(_: object) -> dict[str, str]:
        threads.append(threading.current_thread())
        asked.set()
        answered.wait(20)
        return {"taskToken": "t"}

    own = Polls(ask=ask, read=lambda *_: None, give_back=lambda _: returned.set(), keep=1)
    taking = asyncio.create_task(own.take(["k"], [None], wait=20))
    assert await asyncio.to_thread(asked.wait, 20)
    answered.set()
    threads[0].join(20)  # without giving the loop its turn
    taking.cancel()
    await own.aclose(within=20)
    assert returned.is_set()
