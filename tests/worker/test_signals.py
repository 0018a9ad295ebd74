"""Which signal is a second one, where a terminal signals the worker and its supervisor, which passes each of its on."""

import signal
from collections.abc import Iterator
from itertools import product

import pytest

from leasekit._driver.reporting.ledger import Ledger, SharedMemory
from leasekit._worker import signals
from leasekit._worker.signals import Signals

# Ctrl-C: the worker receives it (w), the supervisor passes it on (s), the worker receives that (p), or both in one (b).
ORDERS = ["wsp", "swp", "spw", "sb"]


class Ended(Exception):
    """The process would have been ended."""


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedMemory]:
    memory = SharedMemory()
    ledger = Ledger(memory.fd)
    monkeypatch.setattr(signals, "attached", lambda: ledger)
    yield memory
    memory.close()


class Counting(Signals):
    def end_at_once(self) -> None:  # type: ignore[override]
        raise Ended


def press(worker: Counting, memory: SharedMemory, order: str) -> None:
    for event in order:
        if event == "s":
            memory.count_signal()
        else:
            worker._handle(signal.SIGINT, None)


@pytest.mark.parametrize(("first", "second"), list(product(ORDERS, ORDERS)))
def test_the_second_ctrl_c_ends_the_worker_and_the_first_does_not(
    memory: SharedMemory, first: str, second: str
) -> None:
    worker = Counting(lambda number: None)
    press(worker, memory, first)
    with pytest.raises(Ended):
        press(worker, memory, second)


@pytest.mark.parametrize("order", ["sp", "w"], ids=["the supervisor", "the worker"])
def test_two_signals_to_one_of_the_processes_end_the_worker(memory: SharedMemory, order: str) -> None:
    worker = Counting(lambda number: None)
    press(worker, memory, order)
    with pytest.raises(Ended):
        press(worker, memory, order)
