"""Commands as processes on a real server: in a pipe, and on a terminal."""

import json
import re
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path
from typing import IO

import pytest

import leasekit
from tests.cli.conftest import LEASEKIT, Server, Start
from tests.ports import free_port
from tests.sampling import slow_after
from tests.waiting import eventually


@pytest.mark.slow
def test_workers_are_told_of_with_what_they_hold(server: Server) -> None:
    with leasekit.connect(server.url, worker="busy") as client:
        client.schedule("held")
        task = next(client.tasks("held"))
        with leasekit.lease(task):
            plain = server.command("workers")
            document = server.command("workers", "--json")
            assert [worker.name for worker in client.workers()] == ["busy"]
    name, running, _, overdue, draining = plain.stdout.strip().split("\t")
    assert (plain.returncode, name, running, overdue, draining) == (0, "busy", "1", "-", "-")
    assert json.loads(document.stdout)["running"] == 1
    assert json.loads(document.stdout)["kinds"] == ["held"]


@pytest.mark.anyio
async def test_workers_have_a_second_door(server: Server) -> None:
    async with leasekit.connect(server.url) as client:
        assert await client.aworkers() == client.workers()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_an_embedded_server_tells_of_its_workers(tmp_path: Path) -> None:
    with leasekit.connect(f"sqlite:///{tmp_path / 'tasks.db'}", worker="busy") as client:
        client.schedule("held")
        with leasekit.lease(next(client.tasks("held"))):
            assert [(worker.name, worker.kinds) for worker in client.workers()] == [("busy", ["held"])]


WAITS = """
import leasekit

worker = leasekit.Worker(concurrency=8)

@worker.handler("waits")
def waits(payload):
    raise leasekit.NotYet(after=5)
"""


def test_the_window_of_a_worker_can_be_given_when_it_is_started(server: Server, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(WAITS)
    with leasekit.connect(server.url) as client:
        client.schedule_all([leasekit.NewTask(kind="waits", claim_timeout=3, heartbeat_timeout=3)] * 5)
        command = ["work", "app:worker", "--window", "3", "--concurrency", "2", "--no-supervise"]
        with server.start(*command, cwd=tmp_path) as process:
            worker = eventually(lambda: next((it for it in client.workers() if it.waiting == 3), None), "waiting runs")
            assert (worker.window, worker.running) == (3, 3)
            process.terminate()
            process.communicate()


@pytest.mark.parametrize("window", ["0", "many", "1000001"])
def test_a_window_that_is_none_is_refused(server: Server, window: str) -> None:
    done = server.command("work", "app:worker", "--window", window)
    assert (done.returncode, f"'{window}' is not a number of tasks: write 1 to 1000000, or auto" in done.stderr) == (
        2,
        True,
    )


FULL_DISK = """
from leasekit.cli import main
from leasekit.server.store.sqlite.store import SqliteStore

SqliteStore.cramped = lambda self: "the disk of the store is almost full"
main()
"""


@pytest.mark.slow
def test_a_log_that_nobody_reads_holds_up_neither_a_server_nor_its_end(tmp_path: Path, full_pipe: int) -> None:
    command = [sys.executable, "-c", FULL_DISK, "serve", "--port", "0", "--store", "sqlite:///tasks.db"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=full_pipe, text=True)
    too_late = threading.Timer(60, process.kill)
    too_late.start()
    with process:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found, "it waits for its log"
        with leasekit.connect(found[0]) as client:
            assert client.stats().kinds == {}
        process.terminate()
        assert process.wait() == 0
    too_late.cancel()


ENDLESS_EXIT = """
import atexit, threading
from leasekit import cli

cli.LAST_WORDS = 0.1
atexit.register(threading.Event().wait)
cli.main()
"""


def test_exit_handlers_do_not_hold_up_an_end_for_ever(server: Server) -> None:
    command = [sys.executable, "-c", ENDLESS_EXIT, "stats", "--backend", server.url]
    assert subprocess.run(command, timeout=60, check=True, capture_output=True).returncode == 0


@pytest.mark.slow
def test_a_server_whose_address_nobody_reads_serves_and_ends(tmp_path: Path, full_pipe: int) -> None:
    port = free_port()
    command = [*LEASEKIT, "serve", "--port", str(port), "--store", "sqlite:///tasks.db"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=full_pipe, stderr=full_pipe)
    too_late = threading.Timer(60, process.kill)
    too_late.start()
    with process, leasekit.connect(f"http://127.0.0.1:{port}", retry_for=30) as client:
        assert client.schedule("k").created
        process.terminate()
        assert process.wait() == 0
    too_late.cancel()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk here that is always full")
@pytest.mark.parametrize("command", [
    ["schedule", "full"],
    pytest.param(["stats"], marks=pytest.mark.slow),
    pytest.param(["tasks", "--json"], marks=pytest.mark.slow),
], ids=" ".join)  # fmt: skip
def test_what_stdout_does_not_take_is_said_in_one_sentence(server: Server, command: list[str]) -> None:
    server.command("schedule", "full")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "leasekit", *command],
            env=server.environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert re.fullmatch(
        rf"leasekit {command[0]}: the output cannot be written to stdout: No space left on device\n", done.stderr
    )


def out(process: "subprocess.Popen[str]") -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def err(process: "subprocess.Popen[str]") -> IO[str]:
    assert process.stderr is not None
    return process.stderr


def test_on_a_terminal_followed_tasks_are_rows_below_a_header(server: Server, terminal: Start) -> None:
    following = terminal("tasks", "--kind", "in-rows", "--follow", "--interval", "0.05")
    header = following.until(r"id +kind +status +try +due *\r?\n").strip()
    with leasekit.connect(server.url) as client:
        client.schedule("in-rows", id="a-row")
        row = following.until(r"a-row.*\r?\n").strip()
        client.cancel("a-row")
        following.until(r"a-row +in-rows +cancelled +0 ")
    for column, value in [("kind", "in-rows"), ("status", "new"), ("try", "0")]:
        assert row[header.index(column) :].startswith(value)
    assert datetime.fromisoformat(row[header.index("due") :]).utcoffset() is not None
    assert following.interrupt() == 130


def test_followed_tasks_are_lines_as_they_change(server: Server) -> None:
    with leasekit.connect(server.url) as client:
        client.schedule("followed", id="first")
        following = ["tasks", "--kind", "followed", "--follow", "--interval", "0.05"]
        with server.start(*following) as process:
            assert out(process).readline().split("\t")[:3] == ["first", "followed", "new"]
            client.schedule("followed", id="second")
            assert out(process).readline().split("\t")[:3] == ["second", "followed", "new"]
            client.cancel("first")
            assert out(process).readline().split("\t")[:3] == ["first", "followed", "cancelled"]
            process.send_signal(2)
            assert process.wait(60) == 130
            assert err(process).read() == ""


def test_only_so_many_of_those_that_are_there_are_shown_before_following(server: Server) -> None:
    with leasekit.connect(server.url) as client:
        client.schedule_all([leasekit.NewTask(kind="many", id=f"many{number}") for number in range(5)])
        with server.start("tasks", "-k", "many", "-f", "-n", "2", "--interval", "0.05", "--json") as process:
            assert [json.loads(out(process).readline())["id"] for _ in range(2)] == ["many3", "many4"]
            process.kill()


def test_a_pipe_that_nobody_reads_ends_it_without_a_word(server: Server) -> None:
    with leasekit.connect(server.url) as client:
        client.schedule_all([leasekit.NewTask(kind="piped", payload="x" * 2000) for _ in range(500)])
    with server.start("tasks", "-k", "piped", "-n", "0", "--json") as process:
        assert out(process).readline().startswith("{")
        out(process).close()
        assert process.wait(60) == 1
        assert err(process).read() == ""


def test_a_short_answer_into_a_closed_pipe_is_no_traceback_either(server: Server) -> None:
    with server.start("stats", stdin=subprocess.DEVNULL) as process:
        out(process).close()
        process.wait(60)
        assert err(process).read() == ""


def test_the_overview_on_a_terminal_is_replaced_as_tasks_end(server: Server, terminal: Start) -> None:
    with leasekit.connect(server.url) as client:
        client.schedule("shown", id="shown")
        screen = terminal("status", "--watch", "--interval", "0.05")
        screen.until(r"shown +1 ")
        client.cancel("shown")
        screen.until(r"cancelled")
    assert screen.interrupt() == 130
    assert "\x1b[" in screen.seen
    assert "Traceback" not in screen.seen
    assert screen.seen.rstrip().endswith("\x1b[?25h"), "the cursor was not shown again"


def test_a_task_that_is_watched_on_a_terminal_is_shown_until_it_has_ended(server: Server, terminal: Start) -> None:
    with leasekit.connect(server.url) as client:
        client.schedule("watched", {"n": 1}, id="watched")
        screen = terminal("status", "watched", "--watch", "--interval", "0.05")
        screen.until(r"status +new")
        with leasekit.lease(next(client.tasks("watched"))) as held:
            held.progress({"page": 7})
            screen.until(r"status +(claimed|processing)")
        screen.until(r"status +success")
    assert screen.ended() == 0


def test_a_waiting_schedule_shows_where_the_task_is_and_then_its_result(server: Server, terminal: Start) -> None:
    screen = terminal("schedule", "awaited", '{"n": 1}', "--id", "awaited", "--wait")
    screen.until("awaited")
    with leasekit.connect(server.url) as client, leasekit.lease(next(client.tasks("awaited"))) as held:
        screen.until("awaited (claimed|processing)")
        held.complete({"pages": 3})
    screen.until('{"pages":3}')
    assert screen.ended() == 0


@pytest.mark.parametrize("command", slow_after(1, [["tasks"], ["stats"], ["status"]]))
def test_a_terminal_is_shown_a_table_with_a_head(server: Server, terminal: Start, command: list[str]) -> None:
    with leasekit.connect(server.url) as client:
        client.schedule("tabled", {"x": "\x1b]0;title\x07"})
    screen = terminal(*command)
    screen.until(r"kind.*\n.*──")
    assert screen.ended() == 0
    assert "\x1b]0;" not in screen.seen


def test_the_workers_on_a_terminal_are_replaced_until_ctrl_c(server: Server, terminal: Start) -> None:
    with leasekit.connect(server.url, worker="seen-on-screen") as client:
        list(client.tasks("nothing", until_idle=0))
    screen = terminal("workers", "--watch", "--interval", "0.05")
    screen.until("seen-on-screen +0")
    assert screen.interrupt() == 130


def test_an_error_is_one_sentence_and_exit_code_1(server: Server) -> None:
    done = server.command("status", "nope")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
