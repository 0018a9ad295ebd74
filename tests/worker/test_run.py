"""Kinds with a concurrency of their own: slots and a window beside those of the worker."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest

from leasekit import Worker
from leasekit._driver.answer import Answer
from leasekit._worker import run
from leasekit.testing.faults import Faulty
from tests.waiting import eventually
from tests.worker.conftest import AtWork, Submitter


class Slots:
    """How many bodies are inside at once; they leave when they may."""

    def __init__(self) -> None:
        self.now, self.most, self.ran = 0, 0, 0
        self.go = threading.Event()
        self._lock = threading.Lock()

    @contextmanager
    def one(self) -> Iterator[None]:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            yield
        finally:
            with self._lock:
                self.now -= 1
                self.ran += 1


@pytest.fixture
def few() -> Slots:
    return Slots()


def declare(worker: Worker, run: str, kind: str, concurrency: int | None, slots: Slots) -> None:
    def in_thread(payload: Any) -> None:
        with slots.one():
            assert slots.go.wait(60)

    async def in_loop(payload: Any) -> None:
        with slots.one():
            while not slots.go.is_set():  # noqa: ASYNC110 - set by a thread
                await anyio.sleep(0.002)

    if run == "thread":
        worker.handler(kind, concurrency=concurrency)(in_thread)
    else:
        worker.handler(kind, concurrency=concurrency)(in_loop)


def claimed(faulty: Faulty, kind: str) -> int:
    answers = [call.answer for call in list(faulty.log) if call.kind == "claim" and call.answer is not None]
    return sum(task.kind == kind for answer in answers for task in answer.tasks)


@pytest.mark.parametrize("run", ["thread", "async"])
def test_a_kind_runs_no_more_bodies_than_its_concurrency_and_is_claimed_for_no_more(
    run: str, door: str, few: Slots, faulty: Faulty, submitter: Submitter, at_work: AtWork
) -> None:
    worker = Worker(faulty, concurrency=8, ahead=0)
    declare(worker, run, "few", 2, few)
    others = Slots()
    declare(worker, run, "others", None, others)
    with at_work(worker):
        submitter.schedule_many("few", 6)
        submitter.schedule_many("others", 8)
        eventually(lambda: few.now == 2 and others.now == 8)
        assert claimed(faulty, "few") == 2
        eventually(lambda: worker.running == 10)
        few.go.set()
        eventually(lambda: few.ran == 6)
        assert others.now == 8
        others.go.set()
        eventually(lambda: others.ran == 8)
    assert (few.most, others.most) == (2, 8)


@pytest.mark.parametrize("run", ["thread", "async"])
def test_a_kind_may_have_more_slots_than_the_worker(
    run: str, few: Slots, faulty: Faulty, submitter: Submitter, at_work: AtWork
) -> None:
    worker = Worker(faulty, concurrency=1)
    declare(worker, run, "many", 5, few)
    with at_work(worker):
        submitter.schedule_many("many", 9)
        eventually(lambda: few.now == 5)
        few.go.set()
        eventually(lambda: few.ran == 9)
    assert few.most == 5


@pytest.mark.parametrize("run", ["thread", "async"])
def test_two_kinds_of_equal_concurrency_share_no_slots(
    run: str, few: Slots, faulty: Faulty, submitter: Submitter, at_work: AtWork
) -> None:
    worker = Worker(faulty, ahead=0)
    other = Slots()
    declare(worker, run, "few", 1, few)
    declare(worker, run, "other", 1, other)
    with at_work(worker):
        submitter.schedule_many("few", 3)
        eventually(lambda: few.now == 1)
        submitter.schedule_many("other", 3)
        eventually(lambda: other.now == 1)
        other.go.set()
        eventually(lambda: other.ran == 3)
        few.go.set()
    assert (few.most, other.most) == (1, 1)


def test_an_answer_that_comes_as_a_wait_for_it_ends_is_no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    answer: Answer[None] = Answer()
    wait = Answer.exception

    def comes_late(answer: Answer[None], timeout: float | None = None) -> BaseException | None:
        if answer.done():
            return wait(answer, timeout)
        answer.set_result(None)
        raise TimeoutError

    monkeypatch.setattr(Answer, "exception", comes_late)
    run._until_done(answer)
