"""A worker and its supervisor as processes: whatever the worker dies of, its tasks run elsewhere at once, and once."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import leasekit
from harness.proxy import Exchange, Proxy
from leasekit import Status
from leasekit.task import TaskInfo
from tests.cli.conftest import Terminal
from tests.ports import free_port
from tests.sampling import slow_after
from tests.waiting import eventually

LEASEKIT = [sys.executable, "-m", "leasekit"]
PATIENCE = 60.0
TTL = 300  # no task comes back by itself while these tests run

HANDLERS = """
import asyncio, ctypes, multiprocessing, os, re, signal, subprocess, sys, time
import leasekit

worker = leasekit.Worker(concurrency=2)

def handler(kind):
    return worker.handler(kind + OF_THIS_TEST)

def note(*words):
    with open("notes", "ab", buffering=0) as file:
        file.write(" ".join(map(str, words)).encode() + b"\\n")

@handler("first_waits")
def first_waits(payload, held):
    note("begun", held.task.id, os.getpid())
    while held.fence == 1:
        time.sleep(0.01)
    return "elsewhere"

@handler("prints")
def prints(payload, held):
    for stream in (sys.stdout, sys.stderr):
        print(300 * "x", file=stream, flush=True)
    first_waits(payload, held)

@handler("dies")
def dies(how, held):
    note("begun", held.task.id, os.getpid())
    if how == "exit 0":
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)

@handler("dies_in_loop")
async def dies_in_loop(payload, held):
    if not os.path.exists("died"):
        open("died", "x").close()
        os.kill(os.getpid(), signal.SIGKILL)  # the other is in the loop too, and has not had its turn

@handler("closes_descriptors")
async def closes_descriptors(payload, held):
    if not os.path.exists("closed"):
        open("closed", "x").close()
        os.closerange(3, 1024)
        time.sleep(1)  # the others have not had their turn

@handler("forks")
def forks(payload, held):
    is_there, here = os.pipe()

    def waits():
        os.write(here, b"!")
        while True:
            time.sleep(0.05)  # a signal just before a sleep does not end that sleep

    child = multiprocessing.get_context("fork").Process(target=waits)
    child.start()
    os.read(is_there, 1)  # a signal that comes in the middle of a fork is dropped by Python
    child.terminate()
    child.join()
    return child.exitcode

@handler("leaves_orphans")
def leaves_orphans(payload, held):
    note("begun", held.task.id, os.getpid())
    if held.fence == 1:
        code = "import os, time\\nif os.fork() == 0:\\n os.setsid()\\n if os.fork():\\n  os._exit(0)\\n"
        code += "os.write(1, b'%d\\\\n' % os.getpid())\\nwhile True: time.sleep(1)"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        orphans = [int(child.stdout.readline()) for _ in range(2)]
        note("orphans", *orphans)
        time.sleep(600)
    return "done"

@handler("async_waits")
async def async_waits(payload, held):
    note("begun", held.task.id, os.getpid())
    if held.fence == 1:
        held.progress({"page": 7})
        await asyncio.sleep(600)
    return held.checkpoint

@handler("checks")
def checks(payload, held):
    note("begun", held.task.id, os.getpid())
    while held.fence == 1:
        held.progress({"page": 7})
        time.sleep(0.01)
    return held.checkpoint

@handler("counts")
def counts(payload, held):
    note("begun", held.task.id, os.getpid())
    page = 0
    while held.fence == 1:
        page += 1
        held.progress({"page": page})
        note("page", page)
        time.sleep(0.01)
    return held.checkpoint

@handler("never_checks")
def never_checks(payload, held):
    note("begun", held.task.id, os.getpid())
    held.progress({"page": 7})
    time.sleep(600 if held.fence == 1 else 0)
    return held.checkpoint

@handler("hangs")
def hangs(how, held):
    note("begun", held.task.id, os.getpid())
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    re.match("(a+)+$", 64 * "a" + "b")  # holds the interpreter's lock

@handler("changes_its_user")
def changes_its_user(payload, held):
    with open("notes", "ab", buffering=0) as file:  # no more of this user's after that
        if os.geteuid() == 0:
            os.setresuid(65534, 65534, 65534)
        else:
            ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # what the kernel makes of that: PR_SET_PDEATHSIG is gone
        file.write(b"changed\\n")
    time.sleep(600)

@handler("ends_when_told")
def ends_when_told(payload, held):
    note("begun", held.task.id, os.getpid())
    while not os.path.exists("finish"):
        time.sleep(0.01)
    note("ended", held.task.id, os.getpid())
    return "x" * payload
"""


def state(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "Z"
    return stat.rpartition(")")[2].split()[0]


def is_gone(pid: int) -> bool:
    return state(pid) == "Z"


class Worker:
    """`leasekit work`: the process that was started, and the one that works."""

    def __init__(self, home: Path, name: str, url: str, *options: str) -> None:
        self._log = home / f"{name}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*LEASEKIT, "work", "app:worker", "--backend", url, *options],
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"XDG_STATE_HOME": str(home / "state")},
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def pid(self) -> int:
        """Of the process that works: a child of the one that was started."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(eventually(lambda: children.read_text().split(), "the worker's process")[0])

    def at_work(self, times: int = 1) -> "Worker":
        eventually(lambda: self.log.count("at work") >= times or self.process.poll() is not None, "the worker")
        assert self.process.poll() is None, self.log
        return self

    def started_again(self) -> None:
        """Wait until another worker calls a service that is away."""
        eventually(lambda: "does not answer" in self.log.partition("is started again")[2], "another worker")

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE)


class Server:
    """`leasekit serve`."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self.url = ""
        self._process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        """At the port that it had before."""
        port = self.url.rpartition(":")[2] or str(free_port())
        command = [*LEASEKIT, "serve", "--port", port, "--store", "sqlite:///tasks.db"]
        with (self._home / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=self._home, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._process.stdout is not None
        found = re.search(r"http://\S+", self._process.stdout.readline())
        assert found
        self.url = found[0]

    def kill(self) -> None:
        if self._process is None:
            return
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._process = None


class Place:
    """A folder with handlers of kinds of its own, and workers."""

    def __init__(self, home: Path, url: str) -> None:
        self.home = home
        self.url = url
        self._workers: list[Worker] = []
        (home / "app.py").write_text(f"OF_THIS_TEST = {home.name!r}\n{textwrap.dedent(HANDLERS)}")

    def kind(self, name: str) -> str:
        """What this test calls it: all tests share a server."""
        return name + self.home.name

    def work(self, *options: str) -> Worker:
        self._workers.append(Worker(self.home, f"worker-{len(self._workers)}", self.url, *options))
        return self._workers[-1]

    def notes(self, word: str) -> list[list[str]]:
        path = self.home / "notes"
        lines = path.read_text().splitlines() if path.exists() else []
        return [words[1:] for line in lines if (words := line.split())[0] == word]

    def begun(self, count: int = 1) -> list[list[str]]:
        eventually(lambda: len(self.notes("begun")) >= count, f"{count} bodies")
        return self.notes("begun")

    def close(self) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.process.wait()
            print(f"--- a worker\n{worker.log[-3000:]}")  # shown by pytest where a test fails


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


@pytest.fixture
def place(tmp_path: Path, server: Server) -> Iterator[Place]:
    place = Place(tmp_path, server.url)
    yield place
    place.close()


@pytest.fixture
def client(place: Place) -> Iterator[leasekit.Client]:
    with leasekit.connect(place.url) as client:
        yield client


def ended(client: leasekit.Client, task_id: str) -> TaskInfo:
    return client.wait_tasks(task_id, timeout=PATIENCE)[0]


def outcomes(info: TaskInfo) -> list[str]:
    return [run.outcome for run in info.history]


@pytest.mark.slow
def test_the_task_of_a_worker_that_was_killed_runs_elsewhere_at_once(place: Place, client: leasekit.Client) -> None:
    """Before its lease ends; `killed-under-a-long-lease` of the chaos kit holds that it takes less than a second."""
    worker = place.work().at_work()
    pid = worker.pid
    task = client.schedule(place.kind("first_waits"), claim_timeout=TTL, heartbeat_timeout=TTL)
    assert place.begun() == [[task.id, str(pid)]]
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    info = ended(client, task.id)
    assert time.monotonic() - killed_at < TTL / 3
    assert info.result == "elsewhere"
    assert outcomes(info) == ["crash", "success"]
    assert info.crashes == 1
    assert info.history[0].error["message"] == f"the worker (process {pid}) was killed by SIGKILL"
    assert place.begun(2)[1][1] == str(worker.pid)  # the same supervisor's next worker


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_what_a_worker_without_streams_prints_and_logs_goes_nowhere_else(
    place: Place, client: leasekit.Client, closed: str
) -> None:
    command = [*LEASEKIT, "work", "app:worker", "--backend", place.url, "--spool", ""]
    closing = ["sh", "-c", f'exec "$@" </dev/null >/dev/null 2>&1 {closed}', "sh"]
    supervisor = subprocess.Popen([*closing, *command], cwd=place.home)
    try:
        task = client.schedule(place.kind("prints"), claim_timeout=TTL, heartbeat_timeout=TTL)
        os.kill(int(place.begun()[0][1]), signal.SIGKILL)
        assert outcomes(ended(client, task.id)) == ["crash", "success"]
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(PATIENCE) == 0
    finally:
        supervisor.kill()
        supervisor.wait()


@pytest.mark.slow
def test_the_kernels_timer_is_named_where_it_has_killed_the_worker(place: Place, client: leasekit.Client) -> None:
    worker = place.work().at_work()
    task = client.schedule(place.kind("first_waits"), claim_timeout=4, heartbeat_timeout=4)
    place.begun()
    os.kill(worker.pid, signal.SIGSTOP)
    info = ended(client, task.id)
    assert "killed by SIGKILL: by the kernel's timer, because a handler outlived its lease" in worker.log
    assert info.result == "elsewhere"
    assert "handed back: 1 of the worker's leases, 1 of them as crashed" in worker.log
    worker.process.send_signal(signal.SIGTERM)
    assert worker.exit_code() == 0


@pytest.mark.slow
def test_a_log_that_nobody_reads_holds_up_no_task_of_a_dead_worker(place: Place, client: leasekit.Client) -> None:
    unread, log = os.pipe()
    command = [*LEASEKIT, "work", "app:worker", "--backend", place.url, "--spool", ""]
    supervisor = subprocess.Popen(command, cwd=place.home, stdout=log, stderr=log, start_new_session=True)
    try:
        task = client.schedule(place.kind("first_waits"), claim_timeout=TTL, heartbeat_timeout=TTL)
        pid = int(place.begun()[0][1])
        os.set_blocking(log, False)
        with suppress(BlockingIOError):
            while True:
                os.write(log, b".")
        os.set_blocking(log, True)  # of supervisor and worker too
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        assert ended(client, task.id).result == "elsewhere"
        assert time.monotonic() - killed_at < TTL / 3
    finally:
        supervisor.kill()
        supervisor.wait()
        os.close(unread)
        os.close(log)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--no-supervise"]], ids=["supervised", "alone"])
def test_a_log_that_nobody_reads_holds_up_no_end(
    place: Place, client: leasekit.Client, full_pipe: int, options: list[str]
) -> None:
    command = [*LEASEKIT, "work", "app:worker", "--backend", place.url, "--spool", "", *options]
    worker = subprocess.Popen(command, cwd=place.home, stdout=full_pipe, stderr=full_pipe, start_new_session=True)
    try:
        task = client.schedule(place.kind("ends_when_told"), 1)
        place.begun()
        (place.home / "finish").touch()
        assert ended(client, task.id).result == "x"
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(PATIENCE) == 0
    finally:
        worker.kill()
        worker.wait()


@pytest.mark.slow
@pytest.mark.parametrize("pages", [60, 200], ids=["before any beat", "after some seconds"])
def test_the_next_holder_begins_where_a_killed_worker_was(place: Place, client: leasekit.Client, pages: int) -> None:
    worker = place.work().at_work()
    task = client.schedule(place.kind("counts"), claim_timeout=TTL, heartbeat_timeout=TTL)
    eventually(lambda: len(place.notes("page")) >= pages, "pages")
    os.kill(worker.pid, signal.SIGKILL)
    info = ended(client, task.id)
    assert outcomes(info) == ["crash", "success"]
    last = int(place.notes("page")[-1][0])
    # Of what was reported in the last moment nobody may have heard: that of a half second, on a machine in a hurry.
    assert info.result is not None
    assert last - 50 <= info.result["page"] <= last + 1


def test_a_task_is_processing_and_its_progress_with_the_service_long_before_its_next_beat(
    place: Place, client: leasekit.Client
) -> None:
    worker = place.work().at_work()
    task = client.schedule(place.kind("never_checks"), claim_timeout=TTL, heartbeat_timeout=TTL)
    place.begun()
    before = time.monotonic()

    def seen() -> bool:
        info = client.get(task.id)
        return info is not None and info.status is Status.PROCESSING and info.progress == {"page": 7}

    eventually(seen, "the progress")
    assert time.monotonic() - before < leasekit.Heartbeats().cycle / 3
    worker.process.kill()


def test_what_had_not_begun_counts_no_crash(place: Place, client: leasekit.Client) -> None:
    tasks = client.schedule_all([leasekit.NewTask(kind=place.kind("dies_in_loop")) for _ in range(2)])
    place.work().at_work()
    infos = [ended(client, task.id) for task in tasks]
    assert sorted(info.history[0].outcome for info in infos) == ["crash", "release"]
    assert sorted(info.crashes for info in infos) == [0, 1]


def test_what_had_not_begun_comes_back_although_its_process_could_send_no_heartbeats(
    place: Place, client: leasekit.Client
) -> None:
    tasks = client.schedule_all([leasekit.NewTask(kind=place.kind("closes_descriptors")) for _ in range(4)])
    place.work().at_work()
    infos = [ended(client, task.id) for task in tasks]
    assert {info.status for info in infos} == {Status.SUCCESS}
    assert sum(info.crashes for info in infos) == 1


def test_a_claim_of_a_dead_worker_that_arrives_after_all_was_handed_back_is_granted_nothing(
    server: Server, tmp_path: Path, client: leasekit.Client
) -> None:
    """As a request does that a proxy has kept in its queue: nobody would hear of the lease, and it would run out."""
    with Proxy(server.url) as proxy:
        place = Place(tmp_path, proxy.url)
        worker = place.work().at_work()

        def claims() -> list[Exchange]:
            return [one for one in list(proxy.log) if b'"claim_id"' in one.raw and b'"wait":20' in one.raw]

        proxy.wait(lambda: bool(claims()))
        os.kill(worker.pid, signal.SIGKILL)
        worker.at_work(2)
        worker.process.send_signal(signal.SIGTERM)
        assert worker.exit_code() == 0
        place.close()
        task = client.schedule(place.kind("first_waits"), claim_timeout=TTL, heartbeat_timeout=TTL)
        # The next worker's too: it has given up its own.
        answers = [asyncio.run(proxy.again(claim)) for claim in claims()]
        assert all(b'"tasks":[]' in answer for answer in answers), answers
    info = client.get(task.id)
    assert info is not None
    assert (info.status, info.attempt) == (Status.NEW, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "says"), [("kill", "SIGKILL"), ("exit 0", "exit code 0")])
def test_a_task_that_kills_every_worker_is_dead_after_max_crashes(
    place: Place, client: leasekit.Client, how: str, says: str
) -> None:
    worker = place.work().at_work()
    task = client.schedule(place.kind("dies"), how, max_crashes=1)
    info = ended(client, task.id)
    assert info.status is Status.DEAD
    assert outcomes(info) == ["crash", "crash"]
    assert all(says in run.error["message"] for run in info.history)
    eventually(lambda: "at work" in "".join(worker.log.split("is started again")[2:]), "the third process")
    worker.process.send_signal(signal.SIGTERM)
    assert worker.exit_code() == 0


def test_nothing_is_handed_back_before_all_orphans_are_gone(place: Place, client: leasekit.Client) -> None:
    worker = place.work().at_work()
    task = client.schedule(place.kind("leaves_orphans"))
    orphans = [int(pid) for pid in eventually(lambda: place.notes("orphans"), "the orphans")[0]]
    assert not any(map(is_gone, orphans))
    os.kill(worker.pid, signal.SIGKILL)
    place.begun(2)
    assert all(map(is_gone, orphans))  # its next run has begun, and they ended before
    assert ended(client, task.id).result == "done"


@pytest.mark.slow
def test_children_that_the_supervisor_had_before_are_spared(place: Place, client: leasekit.Client) -> None:
    command = f"sleep 600 & echo $! > sidecar; exec {' '.join(LEASEKIT)} work app:worker --backend {place.url}"
    shell = subprocess.Popen(["sh", "-c", command], cwd=place.home, stderr=subprocess.PIPE, start_new_session=True)
    assert shell.stderr is not None
    try:
        assert b"at work" in shell.stderr.readline()
        sidecar = int((place.home / "sidecar").read_text())
        [worker] = [
            int(pid)
            for pid in Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text().split()
            if int(pid) != sidecar
        ]
        os.kill(worker, signal.SIGKILL)
        while b"at work" not in shell.stderr.readline():
            pass
        assert not is_gone(sidecar)
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.stderr.close()
        shell.wait()


def test_the_worker_ends_with_a_supervisor_that_was_killed(place: Place, client: leasekit.Client) -> None:
    worker = place.work().at_work()
    pid = worker.pid
    worker.process.kill()
    worker.process.wait()
    eventually(lambda: is_gone(pid), "the worker's end")


@pytest.mark.slow
def test_it_does_so_although_a_handler_has_changed_its_user(place: Place, client: leasekit.Client) -> None:
    """The kernel forgets then with whom a process is to end."""
    worker = place.work().at_work()
    pid = worker.pid
    client.schedule(place.kind("changes_its_user"))
    eventually(lambda: place.notes("changed"), "another user")
    worker.process.kill()
    worker.process.wait()
    eventually(lambda: is_gone(pid), "the worker's end")


@pytest.mark.parametrize("number", slow_after(1, [signal.SIGTERM, signal.SIGINT]))
def test_a_signal_is_passed_on_and_bodies_end(place: Place, client: leasekit.Client, number: signal.Signals) -> None:
    worker = place.work().at_work()
    task = client.schedule(place.kind("ends_when_told"), 3)
    place.begun()
    worker.process.send_signal(number)
    eventually(lambda: "the worker stops" in worker.log, "the signal")
    (place.home / "finish").touch()
    assert worker.exit_code() == 0
    assert client.get(task.id).result == "xxx"  # type: ignore[union-attr]


@pytest.mark.parametrize("number", slow_after(1, [signal.SIGTERM, signal.SIGINT]))
def test_a_second_signal_ends_all_at_once_and_bodies_are_given_back_without_a_crash(
    place: Place, client: leasekit.Client, number: signal.Signals
) -> None:
    worker = place.work().at_work()
    task = client.schedule(place.kind("first_waits"))
    place.begun()
    worker.process.send_signal(number)
    eventually(lambda: "the worker stops" in worker.log, "the signal")
    worker.process.send_signal(number)
    assert worker.exit_code() == 128 + number
    info = client.get(task.id)
    assert info is not None
    assert (outcomes(info), info.crashes, info.status) == (["release"], 0, Status.ENQUEUED)


@pytest.mark.slow
def test_a_signal_to_a_child_that_a_handler_forked_is_not_taken_for_the_workers(
    place: Place, client: leasekit.Client
) -> None:
    worker = place.work().at_work()
    assert ended(client, client.schedule(place.kind("forks")).id).result == -signal.SIGTERM
    worker.process.send_signal(signal.SIGTERM)
    assert worker.exit_code() == 0


@pytest.mark.slow
def test_a_signal_to_the_whole_group_counts_once(place: Place, client: leasekit.Client) -> None:
    worker = place.work().at_work()
    task = client.schedule(place.kind("ends_when_told"), 3)
    place.begun()
    os.killpg(worker.process.pid, signal.SIGINT)  # as Ctrl-C does
    eventually(lambda: "the worker stops" in worker.log, "the signal")
    (place.home / "finish").touch()
    assert worker.exit_code() == 0
    assert client.get(task.id).status is Status.SUCCESS  # type: ignore[union-attr]


def has_pending_interrupt(pid: int) -> bool:
    found = re.search(r"^ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return found is not None and bool(int(found[1], 16) >> (signal.SIGINT - 1) & 1)


def test_ctrl_c_in_a_terminal_is_one_line_of_the_log(place: Place) -> None:
    environment = os.environ | {"XDG_STATE_HOME": str(place.home / "state")}
    with Terminal("work", "app:worker", "--backend", place.url, environment=environment, cwd=place.home) as terminal:
        terminal.until("at work on")
        assert terminal.interrupt() == 0
    assert terminal.seen.count("the worker stops") == 1


@pytest.mark.parametrize("late", slow_after(1, ["supervisor", "worker"]))
def test_ctrl_c_twice_in_a_terminal_ends_all_at_once(place: Place, client: leasekit.Client, late: str) -> None:
    """Ctrl-C reaches both processes, in any order."""
    task = client.schedule(place.kind("first_waits"))
    environment = os.environ | {"XDG_STATE_HOME": str(place.home / "state")}
    command = ("work", "app:worker", "--backend", place.url, "--drain-grace", "inf", "--drain-timeout", "inf")
    with Terminal(*command, environment=environment, cwd=place.home) as terminal:
        pids = [terminal.process.pid, int(place.begun()[0][1])]
        first, second = pids[::-1] if late == "supervisor" else pids

        def press() -> None:
            os.kill(second, signal.SIGSTOP)
            eventually(lambda: state(second) == "T", "the stop")
            terminal.press_ctrl_c()
            eventually(lambda: has_pending_interrupt(second) and not has_pending_interrupt(first), "Ctrl-C")
            os.kill(second, signal.SIGCONT)
            eventually(lambda: not has_pending_interrupt(second), "Ctrl-C later")

        press()
        terminal.until("the worker stops; a second signal ends it at once")
        press()
        assert terminal.ended() == 128 + signal.SIGINT
    info = client.get(task.id)
    assert info is not None
    assert (outcomes(info), info.crashes, info.status) == (["release"], 0, Status.ENQUEUED)


@pytest.mark.slow
def test_a_signal_that_is_ignored_stays_so(place: Place, client: leasekit.Client) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup has it
    try:
        worker = place.work().at_work()
    finally:
        signal.signal(signal.SIGHUP, before)
    pid = worker.pid
    worker.process.send_signal(signal.SIGHUP)
    os.kill(pid, signal.SIGKILL)
    worker.at_work(2)  # it was not taken for one that stops
    worker.process.send_signal(signal.SIGTERM)
    assert worker.exit_code() == 0


def test_who_never_came_to_work_is_not_started_again(place: Place, client: leasekit.Client) -> None:
    (place.home / "app.py").write_text("import os\nopen('tries', 'a').write('x')\nos.abort()\n")
    worker = place.work()
    assert worker.exit_code() == 128 + signal.SIGABRT
    assert (place.home / "tries").read_text() == "x"


def test_without_a_supervisor_there_is_one_process_that_is_not_started_again(
    place: Place, client: leasekit.Client
) -> None:
    worker = place.work("--no-supervise").at_work()
    client.schedule(place.kind("dies"), "kill")
    assert worker.exit_code() == -signal.SIGKILL
    assert len(place.begun()) == 1


@pytest.mark.slow
def test_an_embedded_store_is_opened_by_the_supervisor_when_its_worker_has_died(place: Place) -> None:
    place.url = "sqlite:///embedded.db"
    with leasekit.connect(f"sqlite:///{place.home}/embedded.db") as client:
        task = client.schedule(place.kind("first_waits"))
    worker = place.work().at_work()
    pid = worker.pid
    place.begun()
    os.kill(pid, signal.SIGKILL)
    assert place.begun(2)[1][1] != str(pid)
    eventually(lambda: "1 of them as crashed" in worker.log, "the supervisor's report")
    worker.process.send_signal(signal.SIGTERM)
    assert worker.exit_code() == 0
    with leasekit.connect(f"sqlite:///{place.home}/embedded.db") as client:
        assert outcomes(ended(client, task.id)) == ["crash", "success"]


# Draining -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", slow_after(1, ["checks", "async_waits"]))
def test_past_the_grace_bodies_are_told_to_end_and_their_tasks_given_back_with_their_progress(
    place: Place, client: leasekit.Client, kind: str
) -> None:
    worker = place.work("--drain-grace", "0.1", "--drain-timeout", "inf").at_work()
    task = client.schedule(place.kind(kind))
    place.begun()
    worker.process.send_signal(signal.SIGTERM)
    assert worker.exit_code() == 0
    info = client.get(task.id)
    assert info is not None
    assert (outcomes(info), info.crashes, info.progress) == (["release"], 0, {"page": 7})


def test_past_the_timeout_the_process_ends_and_its_supervisor_gives_back_what_it_ran(
    place: Place, client: leasekit.Client
) -> None:
    worker = place.work("--drain-grace", "0.1", "--drain-timeout", "0.3").at_work()
    task = client.schedule(place.kind("never_checks"))
    place.begun()
    worker.process.send_signal(signal.SIGTERM)
    assert worker.exit_code() == 128 + signal.SIGTERM
    info = client.get(task.id)
    assert info is not None
    assert (outcomes(info), info.crashes, info.progress) == (["release"], 0, {"page": 7})


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "in C code"])
def test_past_the_timeout_a_worker_that_hangs_is_killed_and_what_it_ran_handed_back(
    place: Place, client: leasekit.Client, how: str
) -> None:
    worker = place.work("--drain-grace", "0", "--drain-timeout", "0").at_work()
    task = client.schedule(place.kind("hangs"), how)
    ((*_, pid),) = place.begun()
    if how == "stopped":  # before that, the worker gives the task back by itself
        eventually(lambda: state(int(pid)) == "T", "the worker is stopped")
    worker.process.send_signal(signal.SIGTERM)
    assert worker.exit_code() == 128 + signal.SIGKILL
    info = client.get(task.id)
    assert info is not None
    assert (outcomes(info), info.status) == (["crash"], Status.ENQUEUED)
    assert worker.log.count("hangs: it is killed") == 1


def test_a_worker_that_an_operator_drains_ends_well_and_is_not_started_again(
    place: Place, client: leasekit.Client
) -> None:
    worker = place.work("--drain-grace", "0", "--drain-timeout", "0").at_work()
    running = client.schedule(place.kind("ends_when_told"), 1)
    place.begun()
    (name,) = [known.name for known in client.workers() if f":{worker.pid}:" in known.name]
    assert client.drain_worker(name).running == 1
    waiting = client.schedule(place.kind("ends_when_told"), 1)
    eventually(lambda: "an operator drains this worker: it ends once its 1 handlers have ended" in worker.log)
    (place.home / "finish").touch()
    assert worker.exit_code() == 0
    assert "started again" not in worker.log
    assert outcomes(ended(client, running.id)) == ["success"]
    left = client.get(waiting.id)
    assert left is not None
    assert (left.status, left.attempt) == (Status.NEW, 0)
    place.work().at_work()  # under a name of its own
    assert outcomes(ended(client, waiting.id)) == ["success"]


# The spool ----------------------------------------------------------------------------------------------------


def has_whole_result(spool: Path, size: int) -> bool:
    """A file grows while its line is written: who is killed before the end of the line has kept nothing."""
    texts = [path.read_bytes() for path in spool.glob("*")]
    return any(len(text) > size and text.endswith(b"\n") for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize(("whom", "size"), [("the worker", 3), ("all", 1024 * 1024 - 2)])
def test_a_result_that_could_not_be_reported_survives_and_its_task_does_not_run_twice(
    server: Server, place: Place, client: leasekit.Client, whom: str, size: int
) -> None:
    worker = place.work("--spool", "results").at_work()
    pid = worker.pid
    task = client.schedule(place.kind("ends_when_told"), size, claim_timeout=TTL, heartbeat_timeout=TTL)
    place.begun()
    server.kill()
    (place.home / "finish").touch()
    kept = place.home / "results"
    eventually(lambda: has_whole_result(kept, size), "the spool")
    if whom == "all":
        worker.process.kill()
        worker.process.wait()
        eventually(lambda: is_gone(pid), "the worker's end")
    else:
        os.kill(pid, signal.SIGKILL)
        worker.started_again()
    server.start()
    if whom == "all":
        worker = place.work("--spool", "results").at_work()
    info = ended(client, task.id)
    assert info.result == "x" * size
    assert outcomes(info) == ["success"]
    assert len(place.notes("begun")) == 1
    worker.process.send_signal(signal.SIGTERM)
    assert worker.exit_code() == 0
    assert list(kept.iterdir()) == []


@pytest.mark.slow
def test_a_result_that_another_worker_on_the_same_spool_has_taken_up_is_no_crash(
    server: Server, place: Place, client: leasekit.Client
) -> None:
    """The supervisor comes late, and who took the result up has not reported it yet."""
    first, second = (place.work("--spool", "results", "--concurrency", "1").at_work() for _ in range(2))
    task = client.schedule(place.kind("ends_when_told"), 3, claim_timeout=TTL, heartbeat_timeout=TTL)
    if int(place.begun()[0][1]) != first.pid:
        first, second = second, first
    pid = first.pid
    server.kill()
    (place.home / "finish").touch()
    kept = place.home / "results"
    eventually(lambda: has_whole_result(kept, 3), "the spool")
    first.process.send_signal(signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: is_gone(pid), "the worker's end")
    os.kill(second.pid, signal.SIGKILL)
    second.started_again()
    eventually(lambda: "that earlier processes could not report" in second.log, "the result to be taken up")
    os.kill(second.pid, signal.SIGSTOP)
    server.start()
    first.process.send_signal(signal.SIGCONT)
    first.at_work(2)
    os.kill(second.pid, signal.SIGCONT)
    info = ended(client, task.id)
    assert outcomes(info) == ["success"]
    assert len(place.notes("begun")) == 1
    eventually(lambda: list(kept.iterdir()) == [], "an empty spool")
