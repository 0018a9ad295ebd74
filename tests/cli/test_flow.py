"""`leasekit flow`: flows from the shell."""

import json
from pathlib import Path

import pytest

import leasekit
from leasekit.client import Client
from tests.cli.conftest import Run


def started(client: Client, *ids: str, fails: bool = False) -> None:
    """Start flows of two steps, and run them; the second step may fail."""
    flow = leasekit.Flow("order", state=dict)

    @flow.step(on_success="pay")
    def check(order: dict[str, str]) -> None: ...

    @flow.step(max_attempts=1)
    def pay(order: dict[str, str]) -> None:
        if fails:
            raise RuntimeError("no money")

    for flow_id in ids:
        flow.start(client, {"item": "a"}, id=flow_id)
    worker = leasekit.Worker(client)
    worker.add(flow)
    worker.drain()


def test_flows_are_listed(run: Run, client: Client) -> None:
    started(client, "a", "b")
    lines = [line.split("\t") for line in run("flow", "list", "order").stdout.splitlines()]
    assert [line[:4] for line in lines] == [["b", "succeeded", "-", "2"], ["a", "succeeded", "-", "2"]]
    assert len(run("flow", "list", "order", "-n", "1").stdout.splitlines()) == 1
    assert run("flow", "list", "other").stdout == ""
    assert json.loads(run("flow", "list", "order", "-n", "1", "--json").stdout)["workload"] == 2


def test_a_flow_is_shown_and_resumed(run: Run, client: Client) -> None:
    started(client, "a", fails=True)
    shown = run("flow", "show", "a")
    assert [line.split("\t") for line in shown.stdout.splitlines()] == [
        ["check", "success", "1", "success: pay", "-"],
        ["pay", "fatal_failure", "1", "-", "RuntimeError: no money"],
    ]
    assert shown.stderr == "leasekit flow: 'a' (order) is failed at pay, 2 executions of steps\n"
    assert json.loads(run("flow", "show", "a", "--json").stdout)["status"] == "failed"
    done = run("flow", "resume", "a")
    assert (done.exit_code, done.stderr) == (0, "leasekit flow: 'a' (order) is running at pay, 2 executions of steps\n")
    assert run("flow", "resume", "a").exit_code == 1


def test_a_flow_is_cancelled(run: Run, client: Client) -> None:
    client.schedule("flow:order", {"step": "check"}, id="a", delay=60)
    done = run("flow", "cancel", "a")
    assert done.stderr == "leasekit flow: 'a' (order) is cancelled, 0 executions of steps\n"
    assert json.loads(run("flow", "cancel", "a", "--json").stdout)["status"] == "cancelled"


@pytest.mark.parametrize("action", ["show", "cancel", "resume"])
def test_a_flow_that_is_not_there_is_told(run: Run, action: str) -> None:
    done = run("flow", action, "nothing")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "there is no flow 'nothing'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["start", "x"], "'start' is no action: use list, show, cancel, resume, draw"),
        (["show", "x", "--mermaid"], "it goes with draw"),
        (["draw", "x"], "'x' does not name a flow: write module:attribute, as in app.tasks:flow"),
        (["draw", "json:loads"], "'json:loads' is not a leasekit.Flow, but of type function"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_told(run: Run, arguments: list[str], why: str) -> None:
    done = run("flow", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert why in done.stderr


def test_a_flow_is_drawn(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = 'import leasekit\nflow = leasekit.Flow("f", state=dict)\n\n@flow.step()\ndef only(state): ...\n'
    (tmp_path / "drawn_flow.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert run("flow", "draw", "drawn_flow:flow").stdout == "only\n  ──■ end\n"
    assert run("flow", "draw", "drawn_flow:flow", "--mermaid").stdout.startswith("flowchart LR\n")
