"""A lease that the ledger shows as guarded is guarded: each record is made before the kernel's timer moves away.

A supervisor gives back what a dead process ran, where the service obeys stale writes, only because the timer proves
that these leases have not expired. The process may be stopped for long, and killed, after any change of the timer.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from leasekit import Client, LeaseLost
from leasekit._driver.guarding.watchdog import Watchdog
from leasekit._driver.keeping.held_lease import HeldLease
from leasekit._driver.reporting.ledger import Ledger, SharedMemory
from leasekit._leased_run import LeasedRun
from leasekit.testing.memory import MemoryBackend, MemoryService


class Guarded:
    """A process with two leases: the end of the second is later, and nothing ends it."""

    def __init__(self) -> None:
        self.memory = SharedMemory()
        self.ledger = Ledger(self.memory.fd)
        self.watchdog = Watchdog("off", timer=self)
        self.watchdog.elsewhere = False  # the timer is that of this process
        self.ends: dict[str, float] = {}  # when trust in each lease ends
        self.unproven: list[str] = []  # tasks that were shown as guarded, though the timer fired only later, or never
        self.changes = 0
        client = self.client = Client(MemoryBackend(MemoryService(), worker="w"))
        for _ in range(2):
            client.schedule("k")
        connection = client.__connection__()
        self.keeper, self.run_in_driver = connection.keeper, connection.run
        self.connection = connection
        self._iterators = [client.tasks("k") for _ in range(2)]
        self._tasks = [next(tasks) for tasks in self._iterators]  # given back once nothing refers to them
        self.first, self.second = map(self.hold, self._tasks)

    def hold(self, task: Any) -> HeldLease:
        held = self.keeper.get(task)
        assert held is not None
        held.watchdog = self.watchdog
        held.enter(self.ledger)
        self.ends[task.id] = held.term.trusted_until
        return held

    def arm(self, at: float) -> None:
        self.changes += 1
        shown = [left for left in self.memory.read().leases if left.begun and not left.unguarded]
        self.unproven += [left.task_id for left in shown if at > self.ends[left.task_id]]

    def disarm(self) -> None:
        self.arm(float("inf"))

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


def waits(guarded: Guarded) -> None:
    guarded.first.begin(None)
    guarded.first.pause()


def is_lost_as_it_begins(guarded: Guarded) -> None:
    begins = guarded.ledger.begins

    def lose(entry: int, *, elsewhere: bool = False) -> None:
        begins(entry, elsewhere=elsewhere)
        guarded.first.reason = "expired"

    guarded.ledger.begins = lose  # type: ignore[method-assign]
    with pytest.raises(LeaseLost):
        guarded.first.begin(None)


def is_ended_by_the_keeper(guarded: Guarded) -> None:
    guarded.first.begin(None)

    async def end() -> None:
        guarded.keeper.ended(guarded.first)

    guarded.run_in_driver(end())


@pytest.mark.parametrize("end", [ends, waits, is_lost_as_it_begins, is_ended_by_the_keeper])
@pytest.mark.parametrize("others_run", [False, True])
def test_no_lease_is_shown_as_guarded_that_the_timer_has_left(
    guarded: Guarded, end: Callable[[Guarded], None], *, others_run: bool
) -> None:
    if others_run:
        guarded.second.begin(None)
    end(guarded)
    assert guarded.changes >= 2
    assert guarded.unproven == []
