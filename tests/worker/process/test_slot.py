"""A slot and its executor: what dies again and again is not started again and again without a pause."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from leasekit._driver.clock import BOOT_CLOCK
from leasekit.worker.process.messages import Address, Setup
from leasekit.worker.process.slot import Slot


@pytest.fixture
def slot(bodies: ModuleType) -> Iterator[Slot]:
    address = Address(kind="k", module=bodies.__name__, name="add")
    slot = Slot(Setup(handlers=[address], main={}, argv=[], accepts_work=True, max_progress=100), BOOT_CLOCK.now)
    yield slot
    slot.close()
    slot.finish()


def test_executors_that_die_without_a_task_are_replaced_more_and_more_slowly(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    backoff = slot._backoff

    class Noted:
        reset = backoff.reset

        def wait(self) -> float:
            waits.append(backoff.wait())
            return 0.0

    monkeypatch.setattr(slot, "_backoff", Noted())
    for _ in range(5):
        assert slot.start()
        assert slot._pair is not None
        os.kill(slot._pair._executor, signal.SIGKILL)
        while slot.ready:
            slot._pair.step(1.0)
    assert slot.start()
    assert len(waits) == 5
    assert max(waits) > 0.4  # of 0.1 s at first


def test_the_end_of_a_guard_does_not_end_a_worker_that_has_made_sigpipe_deadly() -> None:
    code = """
import os, signal
from pathlib import Path
from leasekit._driver.clock import BOOT_CLOCK
from leasekit.worker.process.pair import Pair
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
pair = Pair(lambda: None, os.eventfd(0), BOOT_CLOCK.now)
pair.meet()
while b"guard.py" in Path(f"/proc/{pair._executor}/cmdline").read_bytes():
    pass  # it has yet to become an executor
pair._guard.kill()
pair._guard.wait()
while not pair.over:
    pair.step(1.0)
pair.arm(BOOT_CLOCK.now() + 100)
pair._out += b"!"
pair._flush()
print(pair.bury())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert "was killed with its guard" in done.stdout
