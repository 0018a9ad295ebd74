"""A place and its executor: what dies again and again is not started again and again without a pause."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from leasekit._driver.clock import BOOT_CLOCK
from leasekit._worker.process.messages import Address, Setup
from leasekit._worker.process.place import Place


@pytest.fixture
def place(bodies: ModuleType) -> Iterator[Place]:
    address = Address(kind="k", module=bodies.__name__, name="add")
    setup = Setup(handler=address, main={}, argv=[], accepts_work=True, max_progress=100)
    place = Place(setup, BOOT_CLOCK.now, take=lambda: None, filled=lambda: None)
    yield place
    place.close()
    place.finish()


def test_executors_that_die_without_a_task_are_replaced_more_and_more_slowly(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    backoff = place._backoff

    class Noted:
        reset = backoff.reset

        def wait(self) -> float:
            waits.append(backoff.wait())
            return 0.0

    monkeypatch.setattr(place, "_backoff", Noted())
    for _ in range(5):
        assert place.start()
        assert place._executor is not None
        os.kill(place._executor._executor, signal.SIGKILL)
        while place.has_executor:
            place.step()
    assert place.start()
    assert len(waits) == 5
    assert max(waits) > 0.4  # of 0.1 s at first


def test_the_end_of_a_guard_does_not_end_a_worker_that_has_made_sigpipe_deadly() -> None:
    code = """
import os, signal
from pathlib import Path
from leasekit._driver.clock import BOOT_CLOCK
from leasekit._worker.process.guarded_process import GuardedProcess
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
guarded = GuardedProcess(lambda: None, os.eventfd(0), BOOT_CLOCK.now)
guarded.wait_started()
while b"guard.py" in Path(f"/proc/{guarded._executor}/cmdline").read_bytes():
    pass  # it has yet to become an executor
guarded._guard.kill()
guarded._guard.wait()
while not guarded.over:
    guarded.step(1.0)
guarded.arm(BOOT_CLOCK.now() + 100)
guarded._out += b"!"
guarded._flush()
print(guarded.reap())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert "was killed with its guard" in done.stdout
