"""A fork holds nothing of its parent, and harms nothing of it."""

import gc
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import leasekit
from leasekit import Client, ConfigError, NotHeld, _session
from leasekit._driver import thread
from leasekit._driver.thread import NAME
from leasekit.hooks import Event, Renewed
from leasekit.task import Stats, Status
from leasekit.testing.memory import MemoryBackend, MemoryService


def in_child(call: Callable[[], Any]) -> str:
    """What a call returns or raises in a forked child, which ends without cleaning up, as a fork of pytest must."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of any fork beside threads
        pid = os.fork()
    if pid == 0:
        try:
            said = repr(call())
        except BaseException as error:  # noqa: BLE001 - told to the parent
            said = "".join(traceback.format_exception(error))
        os.write(write, said.encode()[:60_000])
        os._exit(0)
    os.close(write)
    try:
        ready, _, _ = select.select([read], [], [], 30)
        if not ready:
            os.kill(pid, signal.SIGKILL)
            pytest.fail("the child hung")
        with open(read, closefd=False) as pipe:
            return pipe.read()
    finally:
        os.close(read)
        os.waitpid(pid, 0)


@pytest.fixture
def client() -> Iterator[Client]:
    with leasekit.connect("memory://") as client:
        yield client


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except NotHeld as error:
        return str(error)
    return "it was not refused"


def test_a_fork_holds_none_of_its_parents_leases(client: Client) -> None:
    client.schedule("k")
    task = next(client.tasks("k"))
    with leasekit.lease(task) as held:
        assert "holds nothing" in in_child(lambda: refused(held.check))
        assert "holds nothing" in in_child(lambda: refused(lambda: held.progress(1)))
        assert "another process" in in_child(lambda: refused(lambda: leasekit.lease(task).__enter__()))
        held.check()


def test_a_lease_that_the_parent_has_made_does_not_begin_in_a_fork(client: Client) -> None:
    client.schedule("k")
    held = leasekit.lease(next(client.tasks("k")))
    assert "another process" in in_child(lambda: refused(held.__enter__))
    with held:
        held.check()


def leave(held: leasekit.Lease, error: BaseException | None) -> None:
    held.__exit__(None if error is None else type(error), error, None)


@pytest.mark.parametrize("error", [None, ValueError("in the child")])
def test_a_fork_that_leaves_the_block_settles_nothing(client: Client, error: BaseException | None) -> None:
    client.schedule("k")
    with leasekit.lease(next(client.tasks("k"))) as held:
        assert in_child(lambda: leave(held, error)) == "None"
        found = client.get(held.task.id)
        assert found is not None
        assert found.status in (Status.CLAIMED, Status.PROCESSING)
        held.check()
    found = client.get(held.task.id)
    assert found is not None
    assert found.status is Status.SUCCESS


def test_a_fork_gets_a_connection_of_its_own(client: Client) -> None:
    client.schedule("k")
    parent = client.worker

    def use() -> Any:
        task = client.schedule("mine")  # in a service of the child's own: memory does not cross a fork
        with leasekit.lease(next(client.tasks("mine"))) as held:
            held.complete(1)
        found = client.get(task.id)
        client.close()
        drivers = [t for t in threading.enumerate() if t.name == NAME]
        return found and found.status.value, client.worker != parent, len(drivers)

    assert in_child(use) == "('success', True, 0)"
    assert client.stats().kinds == {"k": {"new": 1}}


def test_a_fork_that_changes_its_directory_uses_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with leasekit.connect("sqlite:///t.db", retry_for=0.5) as client:
        client.schedule("k", id="there")

        def use() -> Any:
            os.chdir("elsewhere")
            return client.get("there")

        assert "there" in in_child(use)  # the child joins its parent
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_url_means_the_same_store_in_every_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with leasekit.connect("sqlite:///t.db") as client:
        assert client.url == f"sqlite:///{tmp_path.resolve() / 't.db'}"


def test_a_backend_object_does_not_cross_a_fork() -> None:
    with Client(MemoryBackend(MemoryService(), worker="w")) as client:
        client.stats()
        said = in_child(client.stats)
        assert ConfigError.__name__ in said
        assert "connect() by URL, or in the child" in said
        client.stats()


def test_a_client_that_was_not_used_yet_may_be_used_on_both_sides() -> None:
    with leasekit.connect("memory://") as client:
        assert in_child(lambda: client.schedule("k").created) == "True"
        assert client.stats() == Stats(kinds={})


def test_closing_in_a_fork_closes_nothing_of_the_parent(client: Client) -> None:
    client.schedule("k")
    with leasekit.lease(next(client.tasks("k"))) as held:
        assert in_child(client.close) == "None"
        assert client.stats()
        held.check()


def test_a_loop_that_goes_on_in_a_fork_gives_back_nothing_of_the_parent(client: Client) -> None:
    task = client.schedule("k")
    tasks = client.tasks("k", until_idle=0)
    first = next(tasks)
    assert first.id == task.id
    assert in_child(lambda: list(tasks)) == "[]"
    found = client.get(task.id)
    assert found is not None
    assert found.status in (Status.CLAIMED, Status.PROCESSING)


def test_what_a_fork_drops_is_not_given_back(client: Client) -> None:
    task = client.schedule("k")
    held = [leasekit.lease(next(client.tasks("k")))]

    def drop() -> str:
        held.clear()
        gc.collect()
        return "dropped"

    assert in_child(drop) == "'dropped'"
    client.stats()  # whatever was asked of the driver before is done
    found = client.get(task.id)
    assert found is not None
    assert found.status in (Status.CLAIMED, Status.PROCESSING)


def test_the_parent_goes_on_beating() -> None:
    """Also after the child has ended as interpreters do: what it inherits of the loop is the parent's too."""
    events: list[Event] = []
    with leasekit.connect("memory://", hooks=[events.append]) as client:

        def use() -> None:
            gc.collect()
            client.schedule("k")
            client.close()

        client.schedule("k", claim_timeout=2, heartbeat_timeout=2)
        with leasekit.lease(next(client.tasks("k"))) as held:
            in_child(use)
            renewed = sum(isinstance(event, Renewed) for event in events)
            until = time.monotonic() + 20
            while sum(isinstance(event, Renewed) for event in events) < renewed + 3:
                assert time.monotonic() < until
                held.check()
                time.sleep(0.01)
        found = client.get(held.task.id)
        assert found is not None
        assert found.history[0].outcome == "success"


@pytest.mark.parametrize("lock", [lambda: thread._lock, lambda: _session._connecting])
def test_a_fork_while_another_thread_has_a_lock_does_not_hang(client: Client, lock: Callable[[], Any]) -> None:
    client.schedule("k")
    has, go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock():
            has.set()
            go.wait(60)

    def use() -> str:
        client.schedule("mine")
        with leasekit.lease(next(client.tasks("mine"))):
            pass
        client.close()
        return "used"

    holder = threading.Thread(target=hold)
    holder.start()
    has.wait(20)
    try:
        assert in_child(use) == "'used'"
    finally:
        go.set()
        holder.join()


def test_forks_at_any_moment_do_not_hang(client: Client) -> None:
    """While other threads claim, begin and settle."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            client.schedule("k")
            for task in client.tasks("k", until_idle=0):
                with leasekit.lease(task) as held:
                    held.progress(1)

    def use() -> str:
        with leasekit.connect("memory://") as mine:
            mine.schedule("k")
            for task in mine.tasks("k", until_idle=0):
                with leasekit.lease(task):
                    pass
        return "used"

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    try:
        for _ in range(15):
            assert in_child(use) == "'used'"
    finally:
        stop.set()
        for worker in workers:
            worker.join()


def child_of_multiprocessing(url: str, held: Any, answers: Any) -> None:
    refusal = refused(held.check)
    with leasekit.connect(url) as client:
        client.schedule("k", id="in the child")
        with leasekit.lease(next(client.tasks("k"))) as mine:
            answers.put((refusal, mine.task.id))


def test_a_multiprocessing_fork_from_within_a_body() -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with leasekit.connect("memory://") as client:
        client.schedule("k")
        with leasekit.lease(next(client.tasks("k"))) as held:
            process = context.Process(target=child_of_multiprocessing, args=("memory://", held, answers))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            refusal, task_id = answers.get(timeout=30)
            process.join(30)
            held.check()
    assert "holds nothing" in refusal
    assert task_id == "in the child"
    assert process.exitcode == 0


SCRIPT = """
import logging, os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
logging.getLogger("asyncio").setLevel(logging.ERROR)  # in dev mode it warns of each call that a busy machine slows down
import leasekit
client = leasekit.connect("memory://")
client.schedule("k")
with leasekit.lease(next(client.tasks("k"))) as held:
    if (pid := os.fork()) == 0:
        pass  # leaves the block as its parent does, and ends as interpreters do
    else:
        assert os.waitpid(pid, 0)[1] == 0
        held.check()
if pid:
    print(client.get(held.task.id).status)
"""


@pytest.mark.slow
def test_a_child_that_ends_as_interpreters_do_neither_hangs_nor_complains() -> None:
    for flags in ([], ["-W", "error"], ["-X", "dev"]):
        ended = subprocess.run(
            [sys.executable, *flags, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "success\n", "")
