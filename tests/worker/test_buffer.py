"""The buffer between claims and executors."""

import threading
from typing import Any

from leasekit._driver.clock import BOOT_CLOCK
from leasekit._driver.keeping.held_lease import HeldLease
from leasekit._worker.buffer import Buffer
from leasekit._worker.claimed_task import ClaimedTask
from leasekit._worker.handlers import declare
from leasekit.config import Heartbeats
from leasekit.task import Task

HANDLER = declare("k", lambda payload: payload, run=None, idle_timeout=None)
NOWHERE: Any = None


def work(name: str, *, priority: int = 2, since: float = 0.0) -> ClaimedTask:
    task = Task(id=name, kind="k", token=name, ttl=300, priority=priority)
    held = HeldLease(task, Heartbeats(), BOOT_CLOCK, granted_at=0, confirmed=True, started=False)
    return ClaimedTask(held, HANDLER, NOWHERE, since=since, ended=lambda work, settlement: None)


def names(works: list[ClaimedTask]) -> list[str]:
    return [work.task_id for work in works]


def drained(buffer: Buffer) -> list[str]:
    return names(list(iter(buffer.take, None)))


def test_the_most_urgent_come_first_and_equals_in_their_order() -> None:
    buffer = Buffer()
    buffer.put([work("a", priority=2), work("b", priority=4), work("c", priority=0)])
    buffer.put([work("d", priority=2), work("e", priority=0), work("f", priority=1)])
    assert drained(buffer) == ["c", "e", "f", "a", "d", "b"]


def test_it_counts_what_is_in_it() -> None:
    buffer = Buffer()
    buffer.put([work("a", priority=2), work("b", priority=4)])
    assert len(buffer) == 2
    buffer.take()
    assert len(buffer) == 1


def test_what_has_been_in_it_for_too_long_is_taken_back_and_nothing_else() -> None:
    buffer = Buffer()
    buffer.put([work("old", since=1), work("older", since=0, priority=4), work("new", since=3)])
    assert sorted(names(buffer.take_back(1))) == ["old", "older"]
    assert drained(buffer) == ["new"]


def test_who_waits_gets_what_comes() -> None:
    buffer = Buffer()
    got: list[ClaimedTask | None] = []
    waiting = [threading.Thread(target=lambda: got.append(buffer.wait())) for _ in range(2)]
    for thread in waiting:
        thread.start()
    buffer.put([work("a"), work("b")])
    for thread in waiting:
        thread.join(20)
    assert sorted(w.task_id for w in got if w) == ["a", "b"]


def test_closing_sends_away_who_waits_once_it_is_empty() -> None:
    buffer = Buffer()
    buffer.put([work("a")])
    buffer.close()
    assert (left := buffer.wait()) is not None
    assert left.task_id == "a"
    assert buffer.wait() is None
