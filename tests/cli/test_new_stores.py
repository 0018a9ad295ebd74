"""A path that was mistyped, or means another working directory, is noticed: nothing creates a store without a word."""

import socket
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import LEASEKIT, PATIENCE, Run


@pytest.mark.parametrize("command", [["status"], ["status", "id"], ["tasks"], ["workers"], ["stats"], ["cancel", "id"]])
def test_a_command_that_reads_refuses_a_store_that_does_not_exist(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*command, "--backend", "sqlite:///typo.db")
    assert done.exit_code == 1
    assert done.stderr.startswith(f"leasekit {command[0]}: there is no store at {tmp_path}/typo.db: name another")
    assert list(tmp_path.iterdir()) == []


def test_a_schedule_that_creates_a_store_says_so_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = run("schedule", "k", "--backend", "sqlite:///tasks.db")
    second = run("schedule", "k", "--backend", "sqlite:///tasks.db")
    assert first.stderr == f"leasekit schedule: created a new store: {tmp_path}/tasks.db\n"
    assert (second.exit_code, second.stderr) == (0, "")
    assert run("stats", "--backend", "sqlite:///tasks.db").stdout == "k\tnew\t2\n"


def serve_until_ready(home: Path, *options: str) -> str:
    """What a server writes to stderr."""
    command = [*LEASEKIT, "serve", *options]
    with subprocess.Popen(
        command, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        return process.communicate(timeout=PATIENCE)[1]


def test_a_server_that_creates_a_store_says_so_once(tmp_path: Path) -> None:
    options = ["--port", "0", "--store", "sqlite:///tasks.db"]
    assert serve_until_ready(tmp_path, *options) == f"leasekit serve: created a new store: {tmp_path}/tasks.db\n"
    assert serve_until_ready(tmp_path, *options) == ""


def test_a_server_whose_port_is_taken_asks_for_another_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = serve_until_ready(tmp_path, "--store", "memory:", "--port", str(taken.getsockname()[1]))
    assert "Address already in use; is another leasekit server running?" in said
