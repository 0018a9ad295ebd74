"""`leasekit workers drain` and `undrain`; the list itself is with `leasekit status`."""

import json

import pytest

import leasekit
from leasekit.client import Client
from tests.cli.conftest import Run


def test_a_worker_is_drained_and_taken_back(run: Run, client: Client) -> None:
    task = client.schedule("k")
    with leasekit.lease(next(client.tasks("k"))) as held:
        assert held.task.id == task.id
        done = run("workers", "drain", client.worker)
        assert (done.exit_code, done.stdout) == (0, "")
        assert done.stderr == f"leasekit workers: {client.worker!r} drains: it holds 1 task\n"
        assert run("workers").stdout.rstrip("\n").split("\t")[3:] == ["-", "draining"]
        assert json.loads(run("workers", "drain", client.worker, "--json").stdout)["draining_since"]
    assert list(client.tasks("k")) == []
    assert "it holds 0 tasks" in run("workers", "drain", client.worker, "--wait").stderr
    for _ in range(2):
        assert run("workers", "undrain", client.worker).stderr.endswith(f"{client.worker!r} does not drain\n")
    assert run("workers").stdout.rstrip("\n").split("\t")[3:] == ["-", "-"]


def test_an_unknown_worker_is_not_drained(run: Run, client: Client) -> None:
    done = run("workers", "drain", "typo")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "there is no worker 'typo'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["fill"], "'fill' is no action: use list, drain or undrain"),
        (["drain"], "write: leasekit workers drain NAME..."),
        (["list", "w"], "list takes no names"),
        (["drain", "w", "--watch"], "it goes with list"),
        (["undrain", "w", "--wait"], "it goes with drain"),
    ],
)
def test_wrong_usage_is_told(run: Run, arguments: list[str], why: str) -> None:
    done = run("workers", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert why in done.stderr
