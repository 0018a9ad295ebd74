"""A task is data: without a handler for its kind nothing runs, and nothing that a message names is imported."""

import importlib
import logging
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec import structs

from leasekit import Worker
from leasekit.task import Status
from leasekit.testing.faults import Call, Fault, Faulty
from tests.waiting import eventually
from tests.worker.conftest import AtWork, Submitter

KINDS = ["planted", "planted.run", "planted:run", "os.system", "builtins.eval", "/etc/passwd", "__import__('planted')"]


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that exists once this process, or an executor, has imported the module `planted`."""
    traces = tmp_path / "traces"
    trace = f"import pathlib; pathlib.Path({str(traces)!r}).touch()\n"
    (tmp_path / "planted.py").write_text(f"{trace}def run(payload):\n    {trace}")
    (tmp_path / "declared.py").write_text(
        "async def doubles_async(payload):\n    return 2 * payload\n"
        "def doubles_thread(payload):\n    return 2 * payload\n"
        "doubles_process = doubles_thread\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "declared", raising=False)
    return traces


def granting(kind: str) -> Fault:
    """The service answers a claim with tasks that are of another kind than was claimed."""

    async def act(call: Call) -> Any:
        answer = await call.send()
        return structs.replace(answer, tasks=[structs.replace(task, kind=kind) for task in answer.tasks])

    return Fault("granting", act)


@pytest.mark.parametrize(
    ("run", "kind"), [("async", "planted"), ("process", "planted.run"), *(("thread", kind) for kind in KINDS)]
)
def test_a_granted_task_of_a_kind_that_was_not_declared_is_given_back_and_nothing_is_imported(
    run: Literal["async", "thread", "process"],
    kind: str,
    faulty: Faulty,
    submitter: Submitter,
    at_work: AtWork,
    traces: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker(faulty, concurrency=1)
    worker.handler("k", run=run)(getattr(importlib.import_module("declared"), f"doubles_{run}"))
    faulty.script("claim", granting(kind))
    task_id = submitter.schedule("k", 2)
    with caplog.at_level(logging.ERROR, "leasekit"), at_work(worker):
        info = submitter.success(task_id)  # it runs as what it is, once it is granted as that
    assert [entry.outcome for entry in info.history] == ["release", "success"]
    assert (info.result, info.crashes) == (4, 0)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "given back" in line
    assert f"task {task_id} is of kind {kind!r}, but this claim was for 'k'" in line
    assert "planted" not in sys.modules
    assert not traces.exists()


def test_a_service_that_goes_on_so_is_asked_ever_less_often(
    faulty: Faulty, submitter: Submitter, at_work: AtWork, traces: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faulty.always("claim", granting("planted"))
    worker = Worker(faulty, concurrency=1)
    worker.handler("k")(lambda payload: None)
    with caplog.at_level(logging.ERROR, "leasekit"), at_work(worker):
        task_id = submitter.schedule("k")
        eventually(lambda: len(caplog.records) >= 4)
        assert submitter.get(task_id).status != Status.SUCCESS
    first, *_, fourth = [record.created for record in caplog.records[:4]]
    assert fourth - first > 0.1 + 0.2 + 0.4  # the least that the three waits can be
    assert not traces.exists()
