"""What a handler's process can reach of the processes above it: a line to its worker, and nothing of its guard."""

import json
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from leasekit import Worker
from leasekit._worker.process.messages import Address, Ended, LeaseState, Run, Setup
from leasekit.task import Task
from leasekit.testing.faults import Faulty
from tests.worker.conftest import AtWork, Submitter
from tests.worker.process.test_guarded_process import BEATS, Spinner, now, spinner

__all__ = ["spinner"]


@pytest.fixture
def seen(worker: Worker, at_work: AtWork, submitter: Submitter, bodies: ModuleType) -> dict[str, Any]:
    worker.handler("k", run="process")(bodies.sees)
    with at_work(worker):
        result: dict[str, Any] = submitter.success(submitter.schedule("k")).result
    return result


def test_a_handler_has_no_descriptor_of_its_guard_and_what_it_starts_has_none_at_all(seen: dict[str, Any]) -> None:
    # Beside its standard files; and the folder of the list.
    others = [link for fd, link in seen["files"].items() if int(fd) > 2 and not link.startswith("/proc/")]
    assert [link.partition(":")[0] for link in others] == ["socket"]
    held = {link for link in seen["guard's"] if link.startswith(("socket:", "pidfd:", "anon_inode:"))}
    assert any(link.startswith("socket:") for link in held)
    assert held.isdisjoint(others)
    assert len(seen["inherited"]) == 4  # its standard files, and the folder of the list


def test_the_guard_and_the_worker_add_nothing_to_environment_and_no_token_to_the_command_line_of_a_handler(
    seen: dict[str, Any], faulty: Faulty
) -> None:
    code = "import os, json; print(json.dumps(dict(os.environ)))"
    ours = json.loads(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout)
    assert {name for name, value in seen["environ"].items() if ours.get(name) != value} <= {"PYTEST_CURRENT_TEST"}
    tokens = [task.token for call in faulty.log if call.kind == "claim" and call.answer for task in call.answer.tasks]
    assert tokens
    assert not any(token in seen["command"] for token in tokens)


def test_an_executor_imports_nothing_that_a_later_message_names(spinner: Spinner) -> None:
    address = Address(kind="this", module="this", name="s")
    spinner.guarded.send(
        Setup(handler=address, main={"init_main_from_name": "this"}, argv=[], accepts_work=False, max_progress=1)
    )
    task = Task(id="t", kind="this.s", token="x", ttl=60, payload=["has_imported_this", ""])
    spinner.guarded.send(Run(number=1, task=task, state=LeaseState(granted_at=now(), heartbeats=BEATS)))
    (ended,) = spinner.said()
    assert isinstance(ended, Ended)
    assert ended.settlement is not None
    assert bytes(ended.settlement.result) == b"0"
