"""Two servers of one database: whichever of them is asked, the answer is that of the service."""

import contextlib
import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import leasekit
from leasekit.cli.nodes import nodes_table, state
from leasekit.task import NodeInfo
from tests.cli.conftest import LEASEKIT, Run, Server
from tests.postgres_server import PostgresServer
from tests.waiting import eventually


@contextlib.contextmanager
def serving(url: str) -> Iterator[tuple[Server, "subprocess.Popen[str]"]]:
    command = [*LEASEKIT, "serve", "--port", "0", "--store", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found
        yield Server(found[0]), process
        process.terminate()


@pytest.fixture
def servers(postgres: PostgresServer) -> Iterator[list[tuple[Server, "subprocess.Popen[str]"]]]:
    url = postgres.emptied()
    with serving(url) as one, serving(url) as other:
        yield [one, other]


def lines(server: Server, *arguments: str) -> list[list[str]]:
    done = server.command(*arguments)
    assert done.returncode == 0, done.stderr
    return [line.split("\t") for line in done.stdout.splitlines()]


def told(server: Server, kind: str) -> str:
    """What is said of a new task of this kind."""
    done = server.command("schedule", kind, "--wait", "--timeout", "0.01")
    return done.stdout + done.stderr


@pytest.mark.slow
def test_two_servers_tell_of_each_other_and_of_all_workers(
    servers: list[tuple[Server, "subprocess.Popen[str]"]],
) -> None:
    (one, process), (other, _) = servers

    def states(server: Server) -> dict[str, str]:
        return {address: state for _, _, role, address, _, _, state in lines(server, "nodes") if role == "server"}

    eventually(lambda: states(one) == states(other) == {one.url: "alive", other.url: "alive"})
    document = json.loads(other.command("nodes", "--json").stdout.splitlines()[0])
    assert document.keys() == {"id", "name", "version", "role", "address", "started_at", "last_seen", "has_left"}
    with leasekit.connect(one.url, worker="busy") as client:
        client.schedule("held")
        with leasekit.lease(next(client.tasks("held"))):
            eventually(lambda: [line[:2] for line in lines(other, "workers") if line[2] != "-"] == [["busy", "1"]])
            assert "no worker" not in told(other, "held")
            assert "no worker that handles 'else' is known" in told(other, "else")
    process.send_signal(signal.SIGTERM)
    process.wait()
    assert states(other) == {one.url: "left", other.url: "alive"}


@pytest.mark.slow
def test_a_cancel_and_events_reach_the_client_of_another_server(
    servers: list[tuple[Server, "subprocess.Popen[str]"]],
) -> None:
    (one, _), (other, process) = servers
    connection = HTTPConnection(other.url.removeprefix("http://"), timeout=60)
    connection.request("GET", "/v1/events?kind=held")
    stream, seen = connection.getresponse(), list[str]()
    reader = threading.Thread(
        target=lambda: seen.extend(line.decode().split()[1] for line in stream if line.startswith(b"event: "))
    )
    reader.start()
    with leasekit.connect(one.url) as client:
        eventually(lambda: seen or not client.schedule("held"))  # until one of them is heard elsewhere
        with contextlib.suppress(leasekit.Cancelled), leasekit.lease(next(client.tasks("held"))) as lease:
            began_at = time.monotonic()
            assert other.command("cancel", lease.task.id).returncode == 0
            eventually(lease.check, "the cancel")
        assert time.monotonic() - began_at < 60  # not with the heartbeat of the next cycle
    eventually(lambda: {"scheduled", "claimed", "cancel_requested"} <= set(seen))
    process.terminate()  # which ends the stream
    reader.join()
    connection.close()


@pytest.mark.slow
def test_a_worker_at_one_server_is_drained_at_another(
    servers: list[tuple[Server, "subprocess.Popen[str]"]], tmp_path: Path
) -> None:
    (one, _), (other, _) = servers
    (tmp_path / "app.py").write_text(
        "import leasekit, os, time\nworker = leasekit.Worker(concurrency=1)\n"
        "@worker.handler('k')\ndef handle(payload):\n    while not os.path.exists('end'):\n        time.sleep(0.01)\n"
    )
    command = [*LEASEKIT, "work", "app:worker", "--backend", one.url]
    with leasekit.connect(other.url) as client, subprocess.Popen(command, cwd=tmp_path) as worker:
        running = client.schedule("k")

        def statuses(*tasks: leasekit.Scheduled) -> list[str]:
            return [info.status.value for task in tasks if (info := client.get(task.id)) is not None]

        eventually(lambda: statuses(running) == ["processing"])
        eventually(lambda: [line[1] for line in lines(other, "workers")] == ["1"])
        ((name, *_),) = lines(other, "workers")
        done = other.command("workers", "drain", name)
        assert (done.returncode, done.stderr) == (0, f"leasekit workers: {name!r} drains: it holds 1 task\n")
        assert lines(one, "workers")[0][4] == "draining"
        waiting = client.schedule("k")
        (tmp_path / "end").touch()
        assert worker.wait(60) == 0
        assert statuses(running, waiting) == ["success", "new"]
        assert other.command("workers", "undrain", name).returncode == 0
        assert lines(one, "workers")[0][4] == "-"


@pytest.mark.slow
def test_readiness_says_which_tables_a_server_found_and_needs(
    servers: list[tuple[Server, "subprocess.Popen[str]"]],
) -> None:
    connection = HTTPConnection(servers[0][0].url.removeprefix("http://"))
    connection.request("GET", "/readyz")
    document = json.load(connection.getresponse())
    connection.close()
    assert (document["status"], document["tables"].keys()) == ("ready", {"found", "needs"})
    assert document["tables"]["found"] == document["tables"]["needs"]


def test_a_store_in_memory_has_one_node(run: Run) -> None:
    name, version, role, address, *_, how = run("nodes").stdout.strip().split("\t")
    assert (role, address, how) == ("process", "-", "alive")
    assert name.partition(":")[2].isdigit()
    assert version


def test_nodes_on_a_terminal_show_how_long_they_are_up_and_which_fell_silent() -> None:
    now = datetime.now(UTC)

    def node(name: str, silent: float, *, has_left: bool = False) -> NodeInfo:
        seen = now - timedelta(seconds=silent)
        return NodeInfo(
            id=name,
            name=name,
            version="1.0",
            role="process",
            address=None,
            started_at=seen - timedelta(hours=5),
            last_seen=seen,
            has_left=has_left,
        )

    found = [node("here", 0), node("dead", 30), node("gone", 30, has_left=True)]
    assert [state(one) for one in found] == ["alive", "silent", "left"]
    text = StringIO()
    Console(file=text, width=120).print(nodes_table(found))
    assert re.search(r"dead\s.*1\.0\s.*-\s.*5 h\s.*30 s ago\s.*silent", text.getvalue())
