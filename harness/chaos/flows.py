"""A worker that runs the flow of an example, and kills itself at a step's boundary, once for each flow.

The id of a flow says where: `STEP:before` its function is called, `STEP:after` it has returned and before that is
reported, `STEP:settled` once the service has acknowledged the end of the step. Any other id: nowhere.
"""

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import leasekit
from harness.chaos.handlers import act, logged, worker
from leasekit import hooks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "17_create_vm.py"


def example() -> ModuleType:
    """Return the example, whose name is none that an import takes."""
    spec = importlib.util.spec_from_file_location("create_vm", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["create_vm"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


vms: Any = example()
worker.add(vms.flow)
_at: dict[str, tuple[str, str]] = {}  # the flow and the step of each task that this process has begun


def _die(flow_id: str, place: str) -> None:
    """Kill this process if that is the place of the flow, and it was not killed there before."""
    mark = Path(f"killed-{flow_id}")
    if flow_id.partition("#")[0] == place and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def dying(held: leasekit.Lease) -> Iterator[None]:
    call: dict[str, Any] = held.task.payload
    flow_id, step = call.get("flow") or held.task.id, call["step"]
    _at[held.task.id] = flow_id, step
    with logged(held):
        act(held)
        _die(flow_id, f"{step}:before")
        yield
        _die(flow_id, f"{step}:after")


worker.around("flow:create-vm")(dying)


def settled(event: hooks.Event) -> None:
    if isinstance(event, hooks.Settled) and event.task_id in _at:
        flow_id, step = _at[event.task_id]
        _die(flow_id, f"{step}:settled")


worker.listen(settled)
