"""A system that has no thread to give, for a moment: nothing is left over, and nothing waits for ever."""
# pyright: reportPrivateUsage=false

import threading
from collections.abc import Callable

import pytest

from leasekit.server.daemon_threads import DaemonThreads
from leasekit.server.engine import Engine
from leasekit.server.store.postgres.store import PostgresStore
from tests.postgres_server import PostgresServer

Refuse = Callable[[str, int], None]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """Refuse so many threads whose names begin like this."""

    def refusing(name: str, count: int) -> None:
        left, start = [None] * count, threading.Thread.start

        def started(thread: threading.Thread) -> None:
            if left and thread.name.startswith(name):
                left.pop()
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", started)

    return refusing


@pytest.mark.parametrize("count", [1, 2])
def test_calls_are_run_once_threads_can_be_had_again(refuse: Refuse, count: int) -> None:
    threads = DaemonThreads(count, name="of-this-test")
    refuse("of-this-test", count)
    for _ in range(count):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threads.submit(str)
    assert threads.submit(int, "7").result(timeout=30) == 7
    threads.shutdown()


def test_the_threads_that_there_are_do_the_work_of_those_that_are_refused(refuse: Refuse) -> None:
    threads = DaemonThreads(2, name="of-this-test")
    assert threads.submit(int, "1").result(timeout=30) == 1
    refuse("of-this-test", 1)
    assert [threads.submit(int, "7").result(timeout=30) for _ in range(2)] == [7, 7]
    threads.shutdown()


def test_calls_are_run_though_no_thread_can_be_had_for_the_log(refuse: Refuse) -> None:
    threads = DaemonThreads(1, name="of-this-test")
    refuse("leasekit-log", 1)
    assert threads.submit(int, "7").result(timeout=30) == 7
    threads.shutdown()


@pytest.mark.anyio
async def test_an_engine_that_cannot_listen_to_other_nodes_leaves_no_writer_behind(
    postgres: PostgresServer, refuse: Refuse
) -> None:
    engine = Engine(PostgresStore(postgres.emptied()))
    refuse("leasekit-listener", 1)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        await engine.__aenter__()
    assert not engine.commit._thread.is_alive()
