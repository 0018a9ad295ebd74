"""The driver's thread: one for all, ended with the last user, and ended by nothing else."""

import asyncio
import gc
import inspect
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import CancelledError, Future
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import anyio
import pytest

from leasekit._driver import thread
from leasekit._driver.answer import Answer
from leasekit._driver.thread import NAME, Driver, acquire, spawn
from leasekit.errors import Closed
from tests.waiting import until


async def answer(value: int) -> int:
    return value


def test_all_users_share_one_daemon_thread_that_ends_with_the_last() -> None:
    """A daemon does not keep the process alive."""
    first, second = acquire(), acquire()
    assert first is second
    [running] = [t for t in threading.enumerate() if t.name == NAME]
    assert running.daemon
    first.release()
    assert second.submit(answer(1)).result(20) == 1
    second.release()
    assert not running.is_alive()


def test_the_next_user_gets_a_new_thread() -> None:
    first = acquire()
    first.release()
    second = acquire()
    assert second is not first
    assert second.submit(answer(2)).result(20) == 2
    second.release()


def test_it_knows_its_own_thread() -> None:
    driver = acquire()

    async def here() -> bool:
        return driver.here

    assert driver.submit(here()).result(20)
    assert not driver.here
    driver.release()


def test_work_for_a_thread_that_was_let_go_of_is_refused_and_closed() -> None:
    driver = acquire()
    driver.release()
    work = answer(1)
    with pytest.raises(Closed):
        driver.submit(work)
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED  # nobody warns that it was never awaited
    driver.call_soon(pytest.fail, "it was called")


def test_whoever_waits_for_work_gets_to_know_when_the_thread_ends() -> None:
    driver = acquire()
    waiting = driver.submit(asyncio.sleep(3600))
    driver.release()
    with pytest.raises(CancelledError):
        waiting.result(20)


def test_work_that_is_handed_in_at_the_last_moment_is_run_or_refused() -> None:
    """It is never left hanging, with somebody waiting for it."""
    for _ in range(100):
        driver = acquire()
        go = threading.Barrier(2)
        futures: list[Answer[int]] = []

        def hand_in(driver: Driver = driver, go: threading.Barrier = go, futures: list[Answer[int]] = futures) -> None:
            go.wait()
            try:
                while True:
                    futures.append(driver.submit(answer(1)))
            except Closed:
                return

        handing = threading.Thread(target=hand_in)
        handing.start()
        go.wait()
        driver.release()
        handing.join(20)
        for future in futures:
            try:
                assert future.result(20) == 1
            except CancelledError:
                continue
    gc.collect()


def test_what_is_begun_while_the_thread_ends_is_ended_too() -> None:
    driver = acquire()
    ended: list[str] = []
    begun = threading.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def courtesy() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("courtesy")

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            spawn(courtesy(), tasks)
            await asyncio.sleep(0)
            ended.append("work")

    driver.submit(work())
    begun.wait(20)
    driver.release()
    assert "work" in ended
    gc.collect()


def test_a_task_that_does_not_end_when_told_to_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(thread, "_LAST_CALLS", 0.1)
    driver = acquire()
    begun, go = threading.Event(), threading.Event()

    async def stubborn() -> None:
        begun.set()
        while not go.is_set():
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                await asyncio.sleep(0)

    driver.submit(stubborn())
    begun.wait(60)
    ending = threading.Thread(target=driver.release)
    ending.start()
    ending.join(60)
    has_ended = not ending.is_alive()
    go.set()
    assert has_ended
    del driver, ending
    gc.collect()  # here, and not in a test that looks at the log
    assert "Task was destroyed but it is pending!" in caplog.text


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt, pytest.fail.Exception])
def test_nothing_that_is_raised_in_it_ends_the_thread(end: type[BaseException]) -> None:
    """Leases of others hang on it."""
    driver = acquire()

    def callback() -> None:
        raise end("no")

    async def work() -> None:
        raise end("no")

    driver.call_soon(callback)
    with pytest.raises(end):
        driver.submit(work()).result(20)
    assert driver.submit(answer(3)).result(20) == 3
    driver.release()


def test_the_context_of_a_user_stays_with_the_user() -> None:
    """It may say that trio runs here, or hold on to a request."""
    variable: ContextVar[str] = ContextVar("variable", default="none")
    driver = acquire()
    seen: Future[str] = Future()

    async def get() -> str:
        return variable.get()

    variable.set("the user's")
    assert driver.submit(get()).result(20) == "none"
    driver.call_soon(lambda: seen.set_result(variable.get()))
    assert seen.result(20) == "none"
    driver.release()


AFTER_MAIN = """
import asyncio, threading
from leasekit._driver.thread import acquire

async def look():
    return bool(await asyncio.get_running_loop().getaddrinfo("localhost", 80))

def body():
    threading.main_thread().join()
    driver = acquire()
    print(driver.submit(look()).result(20), driver.submit(asyncio.to_thread(str, 7)).result(20))
    driver.release()

threading.Thread(target=body).start()
"""


def test_a_connection_can_be_made_anew_when_the_main_thread_has_ended() -> None:
    """Bodies in other threads may go on for long, and Python's own pools take no work from then on."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", AFTER_MAIN], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.stdout, ended.stderr) == ("True 7\n", "")


def test_an_error_in_a_thread_of_the_loop_is_raised_where_it_is_awaited() -> None:
    driver = acquire()
    with pytest.raises(ValueError, match="invalid literal"):
        driver.submit(asyncio.to_thread(int, "x")).result(20)
    driver.release()


def test_bytes_that_arrive_as_their_read_is_cancelled_are_no_error_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """anyio tells a Unix socket's cancelled read in the same turn of the loop that there is something to read."""

    async def work() -> None:
        path = str(tmp_path / "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            async with await anyio.connect_unix(path) as stream:
                peer, _ = listener.accept()
                with peer:
                    reading = asyncio.create_task(stream.receive())
                    await until(lambda: getattr(stream, "_receive_future", None) is not None)
                    peer.send(b"x")
                    asyncio.get_running_loop().call_soon(reading.cancel)
                    await asyncio.wait([reading])
                    assert reading.cancelled()

    driver = acquire()
    driver.submit(work()).result(60)
    driver.release()
    assert caplog.records == []


def test_other_errors_of_callbacks_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    driver = acquire()
    ended: asyncio.Future[None] = driver.loop.create_future()
    driver.call_soon(ended.set_result, None)
    driver.call_soon(ended.set_result, None)
    driver.submit(answer(1)).result(60)
    driver.release()
    assert ["InvalidStateError" in f"{record.exc_info}" for record in caplog.records] == [True]


def test_spawned_work_is_held_until_it_ends() -> None:
    driver = acquire()
    tasks: set[asyncio.Task[None]] = set()

    async def work() -> None:
        gc.collect()

    async def check() -> Any:
        spawn(work(), tasks)
        held = len(tasks)
        await asyncio.gather(*tasks)
        await asyncio.sleep(0)
        return held, len(tasks)

    assert driver.submit(check()).result(20) == (1, 0)
    driver.release()


GREENLETS = """
import sys
import {library} as _, {patcher} as patcher
patcher.{patch}({options})
import leasekit
from leasekit.testing.memory import MemoryBackend, MemoryService
with leasekit.connect(MemoryBackend(MemoryService(), worker="w")) as client:
    client.schedule("k")
    with leasekit.lease(next(client.tasks("k"))) as held:
        held.check()
print("done")
"""


@pytest.mark.parametrize(
    ("library", "patcher", "patch"),
    [
        ("gevent", "gevent.monkey", "patch_all"),
        pytest.param("eventlet", "eventlet", "monkey_patch", marks=pytest.mark.slow),
    ],
)
def test_greenlets_are_refused_with_what_to_do(library: str, patcher: str, patch: str) -> None:
    def run(options: str) -> subprocess.CompletedProcess[str]:
        code = GREENLETS.format(library=library, patcher=patcher, patch=patch, options=options)
        command = [sys.executable, "-W", "ignore", "-c", code]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    for options in ("", "thread=False"):
        refused = run(options)
        assert f"ConfigError: {library} has replaced " in refused.stderr
    advice = re.search(rf"patch with .*\b{patch}\((.*)\)", refused.stderr)
    assert advice is not None
    instead = run(advice[1])
    assert instead.stdout.endswith("done\n"), instead.stderr


GREENLETS_LATER = """
import gevent.monkey
import leasekit
client = leasekit.connect("memory://")
client.schedule("k")
gevent.monkey.patch_all()
client.schedule("k")
"""


def test_greenlets_that_come_after_the_first_call_are_refused_too() -> None:
    command = [sys.executable, "-W", "ignore", "-c", GREENLETS_LATER]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert "ConfigError: gevent has replaced threading, " in refused.stderr
