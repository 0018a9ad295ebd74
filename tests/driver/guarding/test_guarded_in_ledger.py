"""A lease that the ledger shows as guarded is guarded, at any line: the process may be stopped there, and killed later.

A supervisor gives back what a dead process ran, where the service obeys stale writes, only because the timer proves
that these leases have not expired.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from leasekit import Client, LeaseLost
from leasekit._driver.guarding.watchdog import Watchdog
from leasekit._driver.keeping import held_lease
from leasekit._driver.keeping.held_lease import HeldLease
from leasekit._driver.reporting.ledger import Ledger, SharedMemory
from leasekit._leased_run import LeasedRun
from leasekit.testing.memory import MemoryBackend, MemoryService

_LIBRARY = str(Path(held_lease.__file__).parents[2])


class Guarded:
    """A process with two leases: the end of the second is later, and nothing ends it."""

    def __init__(self) -> None:
        self.memory = SharedMemory()
        self.ledger = Ledger(self.memory.fd)
        self.watchdog = Watchdog("off", timer=self)
        self.watchdog.elsewhere = False  # the timer is that of this process
        self.leases: dict[str, HeldLease] = {}
        self.unproven: list[str] = []  # places where one was shown as guarded, though the timer fires later, or never
        self.lines = 0
        self.at: float | None = None  # when the timer fires
        client = self.client = Client(MemoryBackend(MemoryService(), worker="w"))
        for _ in range(2):
            client.schedule("k")
        connection = client.__connection__()
        self.keeper, self.connection = connection.keeper, connection
        self._iterators = [client.tasks("k") for _ in range(2)]
        self._tasks = [next(tasks) for tasks in self._iterators]  # given back once nothing refers to them
        self.first, self.second = map(self.hold, self._tasks)

    def hold(self, task: Any) -> HeldLease:
        held = self.keeper.get(task)
        assert held is not None
        held.watchdog = self.watchdog
        held.enter(self.ledger)
        self.leases[task.id] = held
        return held

    def arm(self, at: float) -> None:
        self.at = at

    def disarm(self) -> None:
        self.at = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at each line of the library that this thread comes to."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._look if _LIBRARY in frame.f_code.co_filename else None

    def _look(self, frame: FrameType, event: str, arg: Any) -> Any:
        sys.settrace(None)  # not of what looks
        self.lines += 1
        shown = [left for left in self.memory.read().leases if left.begun and not left.unguarded]
        at = math.inf if self.at is None else self.at  # read before the ends: a renewal moves these first
        if any(at > self.leases[left.task_id].term.trusted_until for left in shown):
            self.unproven.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        sys.settrace(self._enter)
        return self._look

    def close(self) -> None: ...


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    guarded = Guarded()
    with guarded.client:
        yield guarded
    guarded.memory.close()


def ends(guarded: Guarded) -> None:
    run = LeasedRun(guarded.first.task)
    run.begin(guarded.connection, guarded.first)
    run.ended(None)


def waits_and_goes_on(guarded: Guarded) -> None:
    guarded.first.begin(None)
    guarded.first.pause()
    guarded.first.resume()


def is_lost_as_it_begins(guarded: Guarded) -> None:
    lose_at_begin(guarded, leaves=False)


def has_left_the_ledger_as_it_begins(guarded: Guarded) -> None:
    lose_at_begin(guarded, leaves=True)


def lose_at_begin(guarded: Guarded, *, leaves: bool) -> None:
    """Begin a lease that the driver finds lost meanwhile, at the worst moment."""
    begins = guarded.ledger.begins

    def lose(entry: int, *, elsewhere: bool = False) -> None:
        guarded.first.reason = "expired"
        if leaves:
            guarded.first.leave_ledger()
        begins(entry, elsewhere=elsewhere)

    guarded.ledger.begins = lose  # type: ignore[method-assign]
    with pytest.raises(LeaseLost):
        guarded.first.begin(None)


def is_ended_by_the_keeper(guarded: Guarded) -> None:
    guarded.first.begin(None)

    guarded.keeper.ended(guarded.first)  # in this thread, because the lines of two threads have no order


@pytest.mark.parametrize(
    "end", [ends, waits_and_goes_on, is_lost_as_it_begins, has_left_the_ledger_as_it_begins, is_ended_by_the_keeper]
)
@pytest.mark.parametrize("others_run", [False, True])
def test_no_lease_is_shown_as_guarded_that_the_timer_has_left(
    guarded: Guarded, end: Callable[[Guarded], None], *, others_run: bool
) -> None:
    with guarded.watched():
        if others_run:
            guarded.second.begin(None)
        end(guarded)
    assert guarded.lines > 30
    assert guarded.unproven == []
