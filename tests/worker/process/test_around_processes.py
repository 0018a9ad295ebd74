"""Code around runs, and around the life of a process, in executors."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

import pytest

from leasekit import ConfigError, Worker
from leasekit.testing import faults
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


@pytest.mark.parametrize("handler", ["tenant", "async_tenant"])
def test_what_one_run_sets_is_not_seen_by_the_next_in_the_same_executor(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType, handler: str
) -> None:
    worker.around(bodies.around_tenant)
    worker.handler("k", run="process")(getattr(bodies, handler))
    with at_work(worker):
        infos = [submitter.success(submitter.schedule("k", name)) for name in ("acme", "other")]
    assert [(info.progress, info.result) for info in infos] == [("nobody", "acme"), ("nobody", "other")]


@pytest.mark.parametrize(("handler", "around", "noted"), [
    ("checks", "around_noting", "LeaseLost"), ("waits", "async_around", "put away"),
])  # fmt: skip
def test_an_executor_runs_it_to_its_end_when_the_lease_is_lost_and_nothing_is_reported(
    worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType, faulty: Faulty, tmp_path: Path,
    handler: str, around: str, noted: str,
) -> None:  # fmt: skip
    ends = tmp_path / "ends"
    faulty.script("beat", faults.ok, faults.steal)
    worker.around(getattr(bodies, around))
    worker.handler("k", run="process", idle_timeout=None)(getattr(bodies, handler))
    with at_work(worker):
        info = submitter.success(submitter.schedule("k", str(ends), claim_timeout=2, heartbeat_timeout=2))
    assert info.result == "second"
    assert ends.read_text().splitlines()[0] == noted
    assert [run.outcome for run in info.history if run.fence == 1] == ["expired"]


@pytest.mark.parametrize(("handler", "around"), [("checks", "around_noting"), ("waits", "async_around")])
def test_an_executor_that_is_killed_after_the_grace_of_a_stop_runs_nothing_after_the_handler(
    at_work: AtWork, submitter: Submitter, bodies: ModuleType, faulty: Faulty, tmp_path: Path,
    handler: str, around: str,
) -> None:  # fmt: skip
    worker, ends = Worker(faulty, concurrency=1, drain_grace=0), tmp_path / "ends"
    worker.around(getattr(bodies, around))
    worker.handler("k", run="process")(getattr(bodies, handler))
    with at_work(worker):
        task = submitter.schedule("k", str(ends))
        eventually(lambda: submitter.get(task).progress == "begun")
    assert not ends.exists()
    assert [run.outcome for run in submitter.get(task).history] == ["release"]


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
