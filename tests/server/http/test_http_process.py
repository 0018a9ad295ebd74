"""`leasekit serve` as a process: it starts, refuses with one sentence, and stops when it is told to."""

import gc
import json
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from leasekit.errors import ConfigError
from leasekit.server.http import process as module
from leasekit.server.node_roles import Role
from tests.sampling import slow_after

SERVE = [sys.executable, "-c", "import typer; from leasekit.cli.serve import serve; typer.run(serve)"]
PATIENCE = 60.0


@contextmanager
def serving(store: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and the address that it printed."""
    process = subprocess.Popen(
        [*SERVE, "--port", "0", "--store", f"sqlite:///{store}", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(r"leasekit is listening on http://(\S+)\n", line)
            if found is None:
                process.kill()
                pytest.fail(f"it did not start: {line!r} {process.communicate()}")
            yield process, found[1]
        finally:
            process.kill()


def post(address: str, path: str, body: Any) -> Any:
    with closing(HTTPConnection(address, timeout=PATIENCE)) as connection:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        return json.loads(connection.getresponse().read())


def refusal(*options: str, code: int = 1) -> str:
    """What a server that does not start says; that it says one line, and ends with this exit code."""
    ended = subprocess.run([*SERVE, *options], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == code, ended
    assert ended.stdout == ""
    assert ended.stderr.startswith("leasekit serve: ")
    assert ended.stderr.count("\n") == 1, ended.stderr
    return ended.stderr


@pytest.mark.parametrize("number", slow_after(1, [signal.SIGTERM, signal.SIGINT]))
def test_a_signal_ends_it_with_exit_code_0(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path / "tasks.db") as (process, _):
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE)
    created = f"leasekit serve: created a new store: {tmp_path}/tasks.db\n"
    assert (process.returncode, out, err) == (0, "", created)


def test_clients_may_be_more_than_the_soft_limit_of_open_files(tmp_path: Path) -> None:
    """A shell allows 1,024 files, and each client is a connection or two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        with serving(tmp_path / "tasks.db") as (_, address), ExitStack() as idle:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            host, _, port = address.rpartition(":")
            for _ in range(100):
                idle.enter_context(socket.create_connection((host, int(port)), timeout=20))
            assert post(address, "/v1/tasks/cancel", {"ids": ["a"]})["verdicts"][0]["verdict"] == "gone"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("soft", "hard", "then"), [(1024, 4096, 4096), (1024, 1_000_000, 10_000), (50_000, 1_000_000, 50_000)]
)
def test_a_limit_of_open_files_is_raised_to_ten_thousand_and_never_lowered(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, then: int
) -> None:
    """Each connection with TLS takes fifty kilobytes before its first request: a million would fill the memory."""
    limits = {resource.RLIMIT_NOFILE: (soft, hard)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    module._allow_open_files()
    assert limits[resource.RLIMIT_NOFILE] == (then, hard)


def test_the_system_keeps_little_of_what_a_client_sends_and_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps megabytes otherwise, and TLS as much again, for each connection."""
    monkeypatch.setattr(module, "_RECEIVED", 40_000)
    monkeypatch.setattr(module, "_SENT", 50_000)
    with module.bound_to_loopback(0) as listener:
        kept = [listener.getsockopt(socket.SOL_SOCKET, each) for each in (socket.SO_RCVBUF, socket.SO_SNDBUF)]
    assert kept in ([40_000, 50_000], [80_000, 100_000]), "Linux tells twice as much"


@pytest.mark.slow
def test_a_line_of_its_log_has_time_and_level(tmp_path: Path) -> None:
    with serving(tmp_path / "tasks.db") as (process, _):
        (tmp_path / "tasks.db.sock").unlink()
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        line = next(line for line in lines if not line.startswith("leasekit serve: created"))
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ WARNING leasekit\.server: \S+\.sock was deleted", line), line


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--role", "frontend", "--store", "memory:"), "a server of this store has all roles"),
        (("--role", "reaper", "--store", "memory:"), "there is no role 'reaper'"),
    ],
    ids=str,
)
def test_roles_that_a_server_cannot_have_are_refused(options: tuple[str, ...], why: str) -> None:
    assert why in refusal("--port", "0", *options)


def test_queues_without_a_consumer_are_refused() -> None:
    store, role = "postgresql://nobody@127.0.0.1:1/tasks", frozenset({Role.HSC})
    with pytest.raises(ConfigError, match="leave --queue out, or add consumer to --role"):
        module.serve("127.0.0.1", 0, store, queue="memory://", roles=role)


def test_a_signal_ends_long_polls_at_once_with_empty_answers(tmp_path: Path) -> None:
    body = json.dumps({"worker": "w", "kinds": ["k"], "wait": 60, "claim_id": "c"}).encode()
    head = (
        b"POST /v1/claims HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    with serving(tmp_path / "tasks.db") as (process, address):
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(head % len(body) + body)
            post(address, "/v1/tasks/cancel", {"ids": ["nobody"]})  # the claim arrived before this was answered
            process.send_signal(signal.SIGTERM)
            answer = b""
            while chunk := connection.recv(65536):  # times out long before the poll would
                answer += chunk
        process.communicate(timeout=PATIENCE)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.endswith(b',"tasks":[]}')
    assert process.returncode == 0


@pytest.mark.slow
def test_what_was_scheduled_is_there_after_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path / "tasks.db") as (process, address):
        post(address, "/v1/tasks", {"tasks": [{"kind": "k", "id": "kept"}]})
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
    with serving(tmp_path / "tasks.db") as (_, address):
        again = post(address, "/v1/tasks", {"tasks": [{"kind": "k", "id": "kept"}]})
    assert again == {"tasks": [{"id": "kept", "created": False, "status": "new"}]}


@pytest.mark.slow
def test_a_second_server_on_the_same_store_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path / "tasks.db"):
        assert "store" in refusal("--port", "0", "--store", f"sqlite:///{tmp_path}/tasks.db")


def test_a_server_that_was_killed_leaves_no_lock(tmp_path: Path) -> None:
    with serving(tmp_path / "tasks.db") as (process, _):
        process.kill()
        process.communicate(timeout=PATIENCE)
    with serving(tmp_path / "tasks.db"):
        pass


@pytest.mark.slow
def test_a_store_that_is_damaged_is_refused_and_says_how_to_recover(tmp_path: Path) -> None:
    path = tmp_path / "tasks.db"
    with serving(path) as (process, _):
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
    data = path.read_bytes()
    path.write_bytes(data[:8192] + bytes(byte ^ 0xFF for byte in data[8192:]))
    options = ["--port", "0", "--store", f"sqlite:///{path}"]
    said = refusal(*options, code=65)
    assert "is damaged" in said
    assert "put a backup in its place, or save what can be read of it" in said


def test_a_store_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    refusal("--port", "0", "--store", f"sqlite:///{tmp_path}/no/such/directory/tasks.db")


def test_a_store_of_an_unknown_kind_is_refused_without_its_password() -> None:
    assert "hunter2" not in refusal("--port", "0", "--store", "nosuch://user:hunter2@host/tasks")


@pytest.mark.slow
def test_a_port_that_is_taken_is_refused_and_no_store_left_behind(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert port in refusal("--port", port, "--store", f"sqlite:///{tmp_path}/tasks.db")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", slow_after(1, ["0.0.0.0", "::"]))  # noqa: S104 - that is what must be refused
def test_an_address_that_others_can_reach_is_refused(tmp_path: Path, host: str) -> None:
    said = refusal("--host", host, "--port", "0", "--store", f"sqlite:///{tmp_path}/tasks.db")
    assert "--tls-cert" in said
    assert "--behind-proxy" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("host", "found"),
    [("0.0.0.0", socket.gethostname()), ("127.0.0.1", "127.0.0.1")],  # noqa: S104
)
def test_other_nodes_are_told_an_address_that_leads_to_this_one(host: str, found: str) -> None:
    with socket.socket() as bound:
        bound.bind((host, 0))
        assert module._address(bound) == f"http://{found}:{bound.getsockname()[1]}"


def test_it_is_found_under_localhost(tmp_path: Path) -> None:
    with serving(tmp_path / "tasks.db", "--host", "localhost") as (_, address):
        assert post(address, "/v1/tasks/cancel", {"ids": ["a"]})["verdicts"][0]["verdict"] == "gone"


def test_the_store_is_for_its_owner_alone(tmp_path: Path) -> None:
    with serving(tmp_path / "tasks.db") as (_, address):
        post(address, "/v1/tasks", {"tasks": [{"kind": "k"}]})
        modes = {entry.name: oct(entry.stat().st_mode & 0o077) for entry in tmp_path.iterdir()}
    assert set(modes.values()) == {"0o0"}, modes


def test_what_is_loaded_at_the_start_is_not_looked_through_for_garbage_again(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []

    async def serve(*_: Any, **__: Any) -> None:
        frozen.append(gc.get_freeze_count())

    monkeypatch.setattr(module.Server, "serve", serve)
    try:
        module.serve("127.0.0.1", 0, "memory:")
    finally:
        gc.unfreeze()
    assert frozen[0] > 10_000
