"""Code around runs, and around the life of a process, in executors."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

import pytest

from leasekit import ConfigError, Worker
from leasekit.testing.faults import Faulty
from tests.waiting import eventually
from tests.worker.conftest import Submitter

AtWork = Callable[[Worker], AbstractContextManager[Worker]]


def test_executors_have_both(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    ends = tmp_path / "ends"
    monkeypatch.setenv("LEASEKIT_TEST_ENDS", str(ends))
    worker.around(bodies.around)
    worker.lifespan(bodies.lifespan)
    worker.handler("k", run="process")(bodies.add)
    with at_work(worker):
        assert submitter.success(submitter.schedule("k", [1, 2])).result == ["started", "before", "after"]
    assert set(ends.read_text().splitlines()) == {"ended"}
    assert bodies._around == []  # no handler runs in the worker's process


def test_an_executor_whose_start_up_fails_ends_the_worker_which_claims_nothing(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType, faulty: Faulty
) -> None:
    worker.lifespan(bodies.broken)
    worker.handler("k", run="process")(bodies.add)
    task = submitter.schedule("k", [1])
    with pytest.raises(ConfigError, match="an executor for 'k' cannot start") as raised, at_work(worker):
        eventually(lambda: not worker._busy.locked())
    assert "no database" in str(raised.value)
    assert "the start-up of broken failed" in str(raised.value)
    assert not [call for call in list(faulty.log) if call.kind == "claim"]
    assert submitter.get(task).attempt == 0


def test_a_function_that_an_executor_would_not_find_is_refused(worker: Worker, bodies: ModuleType) -> None:
    @worker.lifespan
    def nested() -> Iterator[None]:
        yield

    worker.handler("k", run="process")(bodies.add)
    with pytest.raises(ConfigError, match=r"@worker.lifespan: run='process' finds a function by its name"):
        worker.run()
