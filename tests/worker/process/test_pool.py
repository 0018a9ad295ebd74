"""Processes of a kind: whose tasks they run, how many there are, and that no more are kept than are needed."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

import pytest

from leasekit import Worker
from leasekit._worker.process import pool
from leasekit._worker.process.place import Place
from leasekit.testing.faults import Faulty
from tests.waiting import eventually
from tests.worker.conftest import Submitter
from tests.worker.process.conftest import Runs, children_of

AtWork = Callable[[Worker], AbstractContextManager[Worker]]
Ready = Callable[[], list[int]]

SHORT = {"claim_timeout": 2, "heartbeat_timeout": 2}  # so that a cancel is soon heard of


@pytest.fixture
def ready() -> Ready:
    """The executors that live, apart from forks of guards that are to become executors."""

    def executors() -> list[int]:
        guards = [pid for pid in children_of(os.getpid()) if b"guard.py" in _command(pid)]  # no servers
        found = [pid for guard in guards for pid in children_of(guard)]
        return [pid for pid in found if b"guard.py" not in _command(pid)]

    return executors


def _command(pid: int) -> bytes:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b"guard.py"


def test_two_kinds_share_no_process(
    faulty: Faulty, at_work: AtWork, submitter: Submitter, bodies: ModuleType, runs: Runs
) -> None:
    worker = Worker(faulty, concurrency=2)
    pids: dict[str, set[int]] = {}
    for kind in ("a", "b"):
        worker.handler(kind, run="process")(bodies.who)
    with at_work(worker):
        ids = {kind: submitter.schedule_many(kind, 10) for kind in ("a", "b")}
        for kind, tasks in ids.items():
            pids[kind] = {submitter.success(task_id).result["executor"] for task_id in tasks}
    assert pids["a"].isdisjoint(pids["b"])


def test_a_process_imports_the_module_of_its_kind_alone(
    worker: Worker,
    at_work: AtWork,
    submitter: Submitter,
    bodies: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "lonely.py").write_text("import sys\ndef modules(payload):\n    return sorted(sys.modules)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import lonely  # type: ignore[import-not-found, unused-ignore]

    worker.handler("lonely", run="process")(lonely.modules)
    worker.handler("k", run="process")(bodies.who)
    with at_work(worker):
        submitter.success(submitter.schedule("k"))
        modules = submitter.success(submitter.schedule("lonely")).result
    assert "lonely" in modules
    assert "bodies" not in modules


def test_a_kind_without_tasks_has_one_process(
    faulty: Faulty, at_work: AtWork, submitter: Submitter, bodies: ModuleType, ready: Ready
) -> None:
    worker = Worker(faulty, concurrency=4)
    for kind in ("a", "b", "c"):
        worker.handler(kind, run="process")(bodies.who)
    with at_work(worker):
        eventually(lambda: len(ready()) == 3)
        pids = set(ready())
        for _ in range(5):  # one at a time: no other is needed
            assert submitter.success(submitter.schedule("a")).result["executor"] in pids


def test_one_process_more_than_are_busy_is_ready_and_no_more_than_the_concurrency(
    faulty: Faulty, at_work: AtWork, submitter: Submitter, bodies: ModuleType, runs: Runs, ready: Ready
) -> None:
    worker = Worker(faulty, concurrency=3, drain_grace=0)
    worker.handler("k", run="process")(bodies.heeds)
    with at_work(worker):
        submitter.schedule("k", runs.path)
        runs.nth(1)
        eventually(lambda: len(ready()) == 2)
        for count in (2, 3):
            submitter.schedule("k", runs.path)
            runs.nth(count)
        submitter.schedule("k", runs.path)
        assert len({pid for pid, _ in runs.all}) == 3
        assert len(ready()) == 3


def test_processes_that_are_not_needed_end_and_the_first_stays(
    faulty: Faulty,
    at_work: AtWork,
    submitter: Submitter,
    bodies: ModuleType,
    runs: Runs,
    ready: Ready,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_IDLE", 0.2)
    worker = Worker(faulty, concurrency=3, drain_grace=0)
    worker.handler("k", run="process")(bodies.calls)
    with at_work(worker):
        tasks = [submitter.schedule("k", ["heeds", runs.path], **SHORT) for _ in range(3)]
        runs.nth(3)
        first = runs.nth(1)[0]
        for task_id in tasks:
            submitter.client.cancel(task_id)
        eventually(lambda: ready() == [first])
        assert submitter.success(submitter.schedule("k", ["who", ""])).result["executor"] == first


def test_tasks_run_in_other_places_while_the_first_cannot_start(
    faulty: Faulty,
    at_work: AtWork,
    submitter: Submitter,
    bodies: ModuleType,
    ready: Ready,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker(faulty, concurrency=2)
    worker.handler("k", run="process")(bodies.who)
    with at_work(worker):
        first = submitter.success(submitter.schedule("k")).result["executor"]
        start = Place.start

        def fails_first(place: Place) -> bool:
            if threading.current_thread().name == "leasekit-executor-0":
                place.pause()
                return False
            return start(place)

        monkeypatch.setattr(Place, "start", fails_first)
        os.kill(first, signal.SIGKILL)
        eventually(lambda: ready() and first not in ready())
        assert submitter.success(submitter.schedule("k")).result["executor"] != first
