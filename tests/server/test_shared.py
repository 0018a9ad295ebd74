"""One SQLite file, several processes: the first serves the others, and when it ends another one takes over."""

import asyncio
import contextlib
import datetime as dt
import errno
import fcntl
import itertools
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import anyio
import pytest

import leasekit
from leasekit.errors import BackendError, ConfigError, Refused, StoreDamaged, StoreLocked, Unavailable
from leasekit.server import local_socket
from leasekit.server.engine import Engine
from leasekit.server.http import process as module
from leasekit.server.local_socket import bound
from leasekit.server.shared import SharedBackend, connect
from leasekit.server.store.sqlite.lock import is_reserved, reserved
from leasekit.server.store.urls import open_store
from leasekit.task import NewTask, Stats
from tests.waiting import eventually, until

pytestmark = pytest.mark.anyio

HOLD = """
import sys, leasekit
with leasekit.connect(sys.argv[1]) as client:
    client.schedule("theirs", id="theirs")
    with leasekit.lease(next(client.tasks("theirs"))) as held:
        print("open", flush=True)
        sys.stdin.readline()
"""

TAKE = """
import sys, leasekit
with leasekit.connect(sys.argv[1]) as client:
    client.schedule_all([leasekit.NewTask(kind="k") for _ in range(20)])
    print("ready", flush=True)
    sys.stdin.readline()
    for task in client.tasks("k", until_idle=0.5):
        with leasekit.lease(task) as held:
            print(task.id, flush=True)
"""

Start = Callable[[str], "subprocess.Popen[str]"]


def told(process: "subprocess.Popen[str]") -> "IO[str]":
    assert process.stdout is not None
    return process.stdout


def say(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()


SERVE = [sys.executable, "-m", "leasekit", "serve", "--port", "0", "--store"]


@contextlib.contextmanager
def serving(url: str) -> "Iterator[subprocess.Popen[str]]":
    with subprocess.Popen([*SERVE, url], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert "listening" in told(server).readline()
            yield server
        finally:
            server.kill()


def holder(url: str) -> int:
    """The process that has the store open, or had it last."""
    return int(Path(url.removeprefix("sqlite:///") + ".id").read_text().split()[-1])


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/tasks.db"


@pytest.fixture
def start(url: str) -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []

    def begin(program: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", program, url]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        with process:
            pass


@pytest.mark.slow
def test_a_lease_outlives_the_process_that_served_it(start: Start, url: str) -> None:
    owner = start(HOLD)
    assert told(owner).readline() == "open\n"
    with leasekit.connect(url, heartbeats=leasekit.Heartbeats().for_ttl(6)) as client:
        client.schedule("ours", id="ours", claim_timeout=6, heartbeat_timeout=6)
        with leasekit.lease(next(client.tasks("ours"))) as held:
            owner.kill()
            owner.wait(60)
            end = time.monotonic() + 8  # longer than the lease would last without heartbeats
            while time.monotonic() < end:
                held.check()
                time.sleep(0.05)
            held.complete("done")
        info = client.get("ours")
        assert info is not None
        assert (info.result, info.attempt, info.crashes) == ("done", 1, 0)


async def test_a_dead_task_is_handed_out_though_no_process_has_the_file_open_for_its_ttl(url: str) -> None:
    holder = connect(url, worker="dead")
    await holder.schedule([NewTask(kind="k", claim_timeout=2.0, heartbeat_timeout=2.0)])
    await holder.claim(["k"], limit=1, wait=0, claim_id="1")
    await holder.aclose()
    with anyio.fail_after(60):
        for number in itertools.count():
            backend = connect(url, worker="w")
            claimed = await backend.claim(["k"], limit=1, wait=0, claim_id=f"c{number}")
            await backend.aclose()
            if claimed.tasks:
                break


@pytest.mark.slow
def test_an_owner_that_leaves_hands_the_store_over(start: Start, url: str) -> None:
    owner = start(HOLD)
    assert told(owner).readline() == "open\n"
    with leasekit.connect(url) as client:
        assert client.stats().kinds.keys() == {"theirs"}
        say(owner)
        assert owner.wait(30) == 0
        assert client.stats().kinds == {"theirs": {"success": 1}}


@pytest.mark.slow
def test_processes_that_start_together_share_the_work(start: Start) -> None:
    processes = [start(TAKE) for _ in range(3)]
    for process in processes:
        assert told(process).readline() == "ready\n"
    for process in processes:
        say(process)
    ids = [told(process).read().split() for process in processes]  # one after the other: each may be the owner
    assert sorted(len(set(some)) == len(some) for some in ids) == [True] * 3
    assert len({task for some in ids for task in some}) == sum(map(len, ids)) == 60


def test_a_server_on_the_file_is_joined(url: str, tmp_path: Path) -> None:
    with serving(url) as server, leasekit.connect(url) as client:
        assert stat.S_IMODE((tmp_path / "tasks.db.sock").stat().st_mode) == 0o600
        client.schedule("k")
        assert client.stats().kinds == {"k": {"new": 1}}
        (tmp_path / "tasks.db.sock").unlink()
        eventually((tmp_path / "tasks.db.sock").exists)
        with leasekit.connect(url, retry_for=10) as another:
            assert another.stats().kinds == {"k": {"new": 1}}
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        assert client.stats().kinds == {"k": {"new": 1}}


WORK = """
import pathlib, sys, time, leasekit
worker = leasekit.Worker(sys.argv[1], concurrency=1)
goal = pathlib.Path(sys.argv[1].removeprefix("sqlite:///")).with_name("goal")

@worker.handler("k", claim_timeout=20, heartbeat_timeout=20)
def handle(_, held):
    print("began", flush=True)
    while not goal.exists():
        held.check()
        time.sleep(0.05)
    print("ended", flush=True)

handle.options(id="t").schedule()
worker.run()
"""


@pytest.mark.slow
def test_a_worker_gives_its_store_to_a_server_keeps_its_lease_and_has_the_store_again_after_the_server(
    start: Start, url: str, tmp_path: Path
) -> None:
    worker = start(WORK)
    assert told(worker).readline() == "began\n"
    for _ in range(2):
        assert holder(url) == worker.pid
        with serving(url) as server:
            assert holder(url) == server.pid
            server.kill()
            eventually(lambda: holder(url) == worker.pid)
    with serving(url) as server, leasekit.connect(url) as client:
        info = client.get("t")
        assert info is not None
        assert (info.status, info.attempt) == ("processing", 1)
        (tmp_path / "goal").touch()
        assert told(worker).readline() == "ended\n"
        eventually(lambda: client.stats().kinds == {"k": {"success": 1}})
        ended = client.get("t")
        assert ended is not None
        assert (ended.attempt, ended.crashes) == (1, 0)
        assert holder(url) == server.pid
        worker.send_signal(signal.SIGTERM)
        assert told(worker).read() == ""
        assert worker.wait(60) == 0


def test_a_process_that_looked_for_a_server_as_it_forked_keeps_none_from_the_store(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with leasekit.connect(url) as client:
        client.stats()
    store, flock, shared = tmp_path / "tasks.db", fcntl.flock, list[int]()

    def forking(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        if operation & fcntl.LOCK_SH:
            shared.append(os.dup(descriptor))  # as a child's, which shares the lock

    with reserved(store):
        pass
    monkeypatch.setattr(fcntl, "flock", forking)
    assert not is_reserved(store)
    with reserved(store) as is_ours:
        assert is_ours
    for descriptor in shared:
        os.close(descriptor)
    assert shared


@pytest.mark.slow
def test_a_second_server_is_refused(url: str) -> None:
    with serving(url) as server:
        refused = subprocess.run([*SERVE, url], capture_output=True, text=True, timeout=60, check=False)
        assert refused.returncode == 1
        assert f"process {server.pid}" in refused.stderr


async def test_a_server_is_refused_a_store_that_its_owner_does_not_give_up(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "YIELD_TIMEOUT", 0.2)
    async with Engine(open_store(url)):  # as of a process that is stopped
        with pytest.raises(StoreLocked, match=f"process {os.getpid()}"):
            async with module._engine(open_store(url), "http://127.0.0.1:1"):
                pass


async def test_a_store_that_changes_hands_under_load_loses_no_answer_and_no_claim(url: str) -> None:
    backends = [connect(url, worker=f"w{number}") for number in range(3)]
    scheduled, claimed, over = list[str](), list[str](), asyncio.Event()

    async def answered(call: Callable[[], Awaitable[Any]]) -> Any:
        while True:  # a call without an answer is repeated
            with contextlib.suppress(Unavailable):
                return await call()
            await asyncio.sleep(0.01)

    async def schedule(backend: SharedBackend, number: int) -> None:
        for count in itertools.count():
            if over.is_set():
                return
            task = NewTask(kind="k", id=f"{number}-{count}")
            scheduled.extend(answer.id for answer in await answered(partial(backend.schedule, [task])))

    async def claim(backend: SharedBackend) -> None:
        for number in map(str, itertools.count()):
            answer = await answered(partial(backend.claim, ["k"], limit=5, wait=60, claim_id=number))
            claimed.extend(task.id for task in answer.tasks)
            if over.is_set():
                return

    calls = [asyncio.create_task(schedule(backend, number)) for number, backend in enumerate(backends)]
    calls += [asyncio.create_task(claim(backend)) for backend in backends]
    await until(lambda: len(scheduled) > 100)
    with await asyncio.to_thread(serving(url).__enter__) as server:
        assert holder(url) == server.pid
        seen = len(scheduled)
        await until(lambda: len(scheduled) > seen + 100)
        over.set()
        await backends[0].schedule([NewTask(kind="k", id=f"last-{number}") for number in range(20)])
        async with asyncio.timeout(30):
            await asyncio.gather(*calls)
        counts = (await backends[0].stats()).kinds["k"]
        assert sum(counts.values()) == len(scheduled) + 20
        assert len(claimed) == len(set(claimed)) == len(scheduled) + 20 - counts.get("new", 0)
        for backend in backends:
            await backend.aclose()


async def test_an_owner_that_does_not_answer_is_named(url: str, tmp_path: Path) -> None:
    owner, joined = connect(url, worker="w"), connect(url, worker="w")
    await owner.stats()
    (tmp_path / "tasks.db.sock").unlink()
    (tmp_path / "tasks.db.sock").touch()
    with pytest.raises(
        Unavailable, match=f"'tasks.db' open .process {os.getpid()}.: .*tasks.db.sock cannot be reached"
    ):
        await joined.stats()
    await joined.aclose()
    await owner.aclose()


async def test_a_deleted_socket_is_there_again(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bind = local_socket.bound

    def fails_once(path: Path) -> Any:
        monkeypatch.setattr(local_socket, "bound", bind)
        raise OSError(errno.EMFILE, "Too many open files")

    owner, before, after = (connect(url, worker="w") for _ in range(3))
    for joined in (owner, before):
        await joined.stats()
    monkeypatch.setattr(local_socket, "bound", fails_once)
    (tmp_path / "tasks.db.sock").unlink()
    await until((tmp_path / "tasks.db.sock").exists)
    assert "Too many open files" in caplog.text
    for joined in (before, after):
        assert await joined.stats() == Stats(kinds={})
    for backend in (before, after, owner):
        await backend.aclose()
    assert not (tmp_path / "tasks.db.sock").exists()


async def test_a_path_that_is_too_long_for_a_socket_is_used_alone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/{'x' * 100}.db"
    first, second = connect(url, worker="w"), connect(url, worker="w")
    await first.stats()
    why = "which cannot be joined, because a socket beside the file would have a path of more than 103 bytes: move the"
    with pytest.raises(StoreLocked, match=why):
        await second.stats()
    await first.aclose()
    assert await second.stats() == Stats(kinds={})
    await second.aclose()


def test_a_client_hears_at_once_that_a_store_cannot_be_joined_or_is_damaged(tmp_path: Path) -> None:
    url, damaged = f"sqlite:///{tmp_path}/{'x' * 100}.db", tmp_path / "damaged.db"
    damaged.write_text("no database, but long enough to be read as one" * 100)
    with leasekit.connect(url, retry_for=1_000) as first, leasekit.connect(url, retry_for=1_000) as second:
        first.stats()
        with pytest.raises(StoreLocked):
            second.stats()
    with leasekit.connect(f"sqlite:///{damaged}", retry_for=1_000) as client, pytest.raises(StoreDamaged):
        client.stats()


def test_a_client_hears_at_once_that_the_store_belongs_to_another_user(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with leasekit.connect(url, retry_for=1_000) as first, leasekit.connect(url, retry_for=1_000) as second:
        first.stats()
        monkeypatch.setattr(os, "access", lambda *_: False)  # root may do anything
        with pytest.raises(
            BackendError, match=r"runs as another user: all processes .* must run as one user"
        ) as refused:
            second.stats()
        assert not isinstance(refused.value, Unavailable)


async def test_what_a_killed_process_left_at_the_place_of_the_socket_is_replaced(url: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.db.sock").write_text("")
    first, second = connect(url, worker="w"), connect(url, worker="w")
    await first.stats()
    assert await second.stats() == Stats(kinds={})
    await second.aclose()
    await first.aclose()
    assert not (tmp_path / "tasks.db.sock").exists()


ALONE = """
import sys, leasekit
with leasekit.connect(sys.argv[1]) as client:
    client.stats()
print("starlette" in sys.modules)
"""


def test_a_process_that_is_alone_with_its_file_loads_no_http_server(start: Start) -> None:
    alone = start(ALONE)
    assert told(alone).readline() == "False\n"


async def test_a_closed_backend_stays_closed_whether_it_joined_or_not(url: str) -> None:
    owner, joined = connect(url, worker="w"), connect(url, worker="w")
    for backend in (owner, joined):
        await backend.stats()
    for backend in (joined, owner):
        await backend.aclose()
        with pytest.raises(Unavailable, match="closed"):
            await backend.stats()


def test_a_refusal_reads_the_same_whether_a_client_joined_or_not(url: str) -> None:
    with leasekit.connect(url) as owner, leasekit.connect(url) as joined:
        owner.stats()  # opens the store
        for client in (owner, joined):
            with pytest.raises(Refused, match=r"^the task does not fit, and nothing was applied: at: "):
                client.schedule("k", at=dt.datetime(2026, 1, 1))  # noqa: DTZ001


async def test_joining_changes_no_capability(url: str) -> None:
    backend = connect(url, worker="w")
    assert isinstance(backend, SharedBackend)
    assert backend._joined is not None
    assert backend._joined.capabilities == backend.capabilities


JOIN = """
import sys, leasekit
with leasekit.connect(sys.argv[1], retry_for=0) as client:
    client.schedule("k", "x" * 100_000)
    print(client.stats().kinds)
"""


IMPORTS = """
import sys, threading, leasekit

class Finder:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is not threading.main_thread():
            print(threading.current_thread().name, "imports", name)

sys.meta_path.insert(0, Finder())
with leasekit.connect(sys.argv[1]) as client:
    client.schedule("k")
    with leasekit.lease(next(client.tasks("k"))) as held:
        held.progress(1)
    print("over")
"""


def test_a_first_request_imports_nothing(start: Start) -> None:
    """A child that is forked meanwhile would wait for ever for what the other thread imports."""
    owner = start(HOLD)
    assert told(owner).readline() == "open\n"
    assert told(start(IMPORTS)).readline() == "over\n"


MAIN_THREAD_ENDS = """
import sys, threading, leasekit
client = leasekit.connect(sys.argv[1])
client.stats()
def go_on():
    threading.main_thread().join()
    print("main thread ended", flush=True)
    sys.stdin.readline()
threading.Thread(target=go_on).start()
"""


@pytest.mark.slow
def test_an_owner_whose_main_thread_has_ended_serves_reads_and_long_bodies(start: Start) -> None:
    owner = start(MAIN_THREAD_ENDS)
    assert told(owner).readline() == "main thread ended\n"
    assert told(start(JOIN)).readline() == "{'k': {'new': 1}}\n"


FORK = """
import os, sys, leasekit
client = leasekit.connect(sys.argv[1])
client.stats()
print("open", flush=True)
sys.stdin.readline()
if os.fork():
    os.kill(os.getpid(), 9)
while client.stats() and f" {os.getpid()}\\n" not in open(sys.argv[1].removeprefix("sqlite:///") + ".id").read():
    pass
print("open", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_fork_that_takes_over_from_its_parent_serves_long_bodies(start: Start) -> None:
    owner = start(FORK)
    assert told(owner).readline() == "open\n"
    before = start(JOIN)
    assert told(before).readline() == "{'k': {'new': 1}}\n"
    before.wait()
    say(owner)
    assert told(owner).readline() == "open\n"
    assert told(start(JOIN)).readline() == "{'k': {'new': 2}}\n"
    say(owner)


async def test_a_process_that_stopped_in_the_middle_of_a_request_does_not_hold_up_the_hand_over(
    url: str, tmp_path: Path
) -> None:
    owner, joined = connect(url, worker="w"), connect(url, worker="w")
    await owner.stats()
    await joined.stats()
    answers, stuck = await asyncio.open_unix_connection(tmp_path / "tasks.db.sock")
    stuck.write(b"GET /v1/stats HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert await answers.readuntil(b"}")
    headers = b"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    stuck.write(b"POST /v1/tasks HTTP/1.1\r\n" + headers)
    await joined.stats()  # a later request is answered, so that one has begun
    async with asyncio.timeout(20):  # less than the time in which the body must arrive
        await owner.aclose()
    stuck.close()
    await joined.aclose()


async def test_a_server_that_cannot_start_is_started_again(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    serve = module.serve_engine

    async def fails_once(*args: Any) -> None:
        monkeypatch.setattr(module, "serve_engine", serve)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(module, "serve_engine", fails_once)
    owner, joined = connect(url, worker="w"), connect(url, worker="w")
    await owner.stats()
    async with asyncio.timeout(60):
        assert await joined.stats() == Stats(kinds={})
    assert "Too many open files" in caplog.text
    await joined.aclose()
    await owner.aclose()


async def test_a_server_that_ends_by_itself_is_started_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    startup, failed = module.Server.startup, list[str]()

    async def fails_once(self: module.Server, sockets: list[socket.socket] | None = None) -> None:
        monkeypatch.setattr(module.Server, "startup", startup)
        failed.append("once")
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(module.Server, "startup", fails_once)
    owner, joined = connect(url, worker="w"), connect(url, worker="w")
    await owner.stats()
    async with asyncio.timeout(60):
        assert await joined.stats() == Stats(kinds={})
    assert failed
    await joined.aclose()
    await owner.aclose()


async def test_an_owner_of_a_deleted_store_says_so_and_leaves_the_socket_of_its_successor(
    url: str, tmp_path: Path
) -> None:
    first, second, third = (connect(url, worker="w") for _ in range(3))
    await first.stats()
    for ending in (".sock", ".id", "-wal", "-shm", ""):
        (tmp_path / f"tasks.db{ending}").unlink()
    await second.stats()
    for call in (first.stats(), first.schedule([NewTask(kind="k")])):
        with pytest.raises(Unavailable, match=r"tasks\.db' was moved, deleted or replaced"):
            await call
    await first.aclose()
    assert await third.stats() == Stats(kinds={})
    await third.aclose()
    await second.aclose()


def test_a_fork_keeps_no_connection_of_a_process_that_has_joined(url: str) -> None:
    with leasekit.connect(url) as owner, leasekit.connect(url) as joined:
        owner.stats()
        joined.stats()
        (server,) = [server for server in module._inner_servers if server.server_state.connections]
        accepted = [connection.transport.get_extra_info("socket") for connection in server.server_state.connections]
        served = {f"socket:[{os.fstat(connection.fileno()).st_ino}]" for connection in accepted}
        child = os.fork()
        if not child:
            os._exit(len(served & set(_open_files())))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert served <= set(_open_files())
        joined.stats()


def _open_files() -> Iterator[str]:
    for number in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of this very listing
            yield str(number.readlink())


def test_what_cannot_be_removed_at_the_place_of_the_socket_is_named(tmp_path: Path) -> None:
    (tmp_path / "tasks.db.sock").mkdir()
    with pytest.raises(ConfigError, match="no socket can be made at"), bound(tmp_path / "tasks.db.sock"):
        pass
