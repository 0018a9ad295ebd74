"""Workers whose handlers run in executors: processes, killed and stopped like any other."""

import contextlib
import importlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from leasekit import Worker
from leasekit.testing.faults import Faulty
from tests.waiting import eventually


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The handlers, as a module that executors find by its name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("bodies")


@pytest.fixture
def worker(faulty: Faulty) -> Worker:
    return Worker(faulty, concurrency=1)


class Runs:
    """The lines that bodies leave in a file: who ran them."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._file = path

    @property
    def all(self) -> list[tuple[int, int]]:
        """(executor, guard) of each run."""
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        return [(int(line.split()[0]), int(line.split()[1])) for line in lines]

    def nth(self, count: int) -> tuple[int, int]:
        """The run of that number, from 1, as soon as it has begun."""
        eventually(lambda: len(self.all) >= count)
        return self.all[count - 1]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path / "runs")


@pytest.fixture
def is_dead() -> Callable[[int], bool]:
    return _is_dead


def _is_dead(pid: int) -> bool:
    """True where nothing of this process runs."""
    try:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return not Path(f"/proc/{pid}").exists()
    return all(stat.rpartition(")")[2].split()[0] in "ZX" for stat in stats)


@pytest.fixture
def runs_no_more() -> Callable[[int], bool]:
    return _runs_no_more


def _runs_no_more(pid: int) -> bool:
    """Tell whether no code of this process runs any more: it is dead, or SIGKILL is all that each thread will see.

    On a busy machine the kernel takes a while to end a process that was killed.
    """
    try:
        threads = [(task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return _is_dead(pid)
    pending = [int(line.split()[1], 16) for text in threads for line in text.splitlines() if line.startswith("SigPnd")]
    return _is_dead(pid) or all(mask & 1 << signal.SIGKILL - 1 for mask in pending)


def children_of(pid: int) -> list[int]:
    """All child processes of this process."""
    found: list[int] = []
    threads: list[Path] = []
    with contextlib.suppress(FileNotFoundError):  # a process that has ended
        threads += Path(f"/proc/{pid}/task").iterdir()
    for task in threads:
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended meanwhile
            found += map(int, (task / "children").read_text().split())
    return found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No guard outlives its worker."""
    before = set(children_of(os.getpid()))
    yield
    until = time.monotonic() + 20
    while (left := set(children_of(os.getpid())) - before) and time.monotonic() < until:
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "a guard is left"
