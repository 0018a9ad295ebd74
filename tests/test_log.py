"""A log that holds up its writers holds up no heartbeat: not in the driver's thread, nor at a server."""

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import leasekit
from leasekit import _log
from leasekit._driver.thread import acquire
from leasekit._log import LogThread, write


class Stuck(logging.Handler):
    """A handler that waits for a lock that an interrupt has left held."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.written: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.go_on.wait(20)
        self.written.append(record.getMessage())


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the log as briefly as outside of tests (see the conftest)."""
    monkeypatch.setattr(_log, "_PATIENCE", 0.2)
    monkeypatch.setattr(_log, "_SHARE", 0.02)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    handler = Stuck()
    root = logging.getLogger()
    root.addHandler(handler)
    yield handler
    handler.go_on.set()
    root.removeHandler(handler)


@pytest.mark.parametrize("name", ["leasekit", "leasekit.server", "asyncio", "httpx", "uvicorn.asgi"])
def test_a_log_that_nobody_can_write_to_holds_up_nothing(stuck: Stuck, name: str) -> None:
    driver = acquire()

    async def log() -> bool:
        for number in range(100):
            logging.getLogger(name).warning("%s: line %d", name, number)
        return stuck.go_on.is_set()

    async def log_once_more() -> None:
        logging.getLogger(name).warning("%s: the last line", name)

    try:
        assert not driver.submit(log()).result(15)
        stuck.go_on.set()
        while sum(line.startswith(f"{name}:") for line in stuck.written) < 100:
            driver.submit(log_once_more()).result(15)
    finally:
        driver.release()
    written = [line for line in stuck.written if line.startswith(f"{name}:")]  # without what an earlier test has left
    assert written[:100] == [f"{name}: line {number}" for number in range(100)]


def test_a_store_is_opened_and_served_beside_a_log_that_nobody_can_write_to(
    stuck: Stuck, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (None, "sqlalchemy"):
        caplog.set_level(1, name)  # then each message, request and statement is logged
    stuck.addFilter(lambda record: record.thread != threading.main_thread().ident)
    url = f"sqlite:///{tmp_path / 'tasks.db'}"
    with leasekit.connect(url) as owner, leasekit.connect(url, retry_for=10) as joined:
        for client in (owner, joined):
            client.schedule("k")
            with leasekit.lease(next(client.tasks("k"))) as held:
                held.complete("done")
            assert client.get(held.task.id)
            assert client.stats()
        assert not stuck.go_on.is_set()
        stuck.go_on.set()  # the connections to the server that ends are closed in time too


def test_a_line_is_written_when_the_call_returns() -> None:
    """It may be the last one before the process ends itself."""
    lines: list[str] = []
    with LogThread():
        for number in range(1000):
            write(lines.append, str(number))
            assert lines[-1] == str(number)


def test_not_everything_is_kept_for_a_log_that_is_stuck() -> None:
    go_on, lines = threading.Event(), list[int]()
    with LogThread() as log:
        log.call(go_on.wait, 20)
        for number in range(5000):
            log.call(lines.append, number)
        go_on.set()
        done = threading.Event()
        while not done.is_set():
            log.call(done.set)
            done.wait(0.1)
    assert lines == list(range(len(lines)))
    assert len(lines) <= 1000


def test_an_error_of_a_log_ends_no_log_thread() -> None:
    lines: list[str] = []
    with LogThread():
        write(lines.__getitem__, 7)
        write(lines.append, "the next line")
    assert lines == ["the next line"]


def test_other_threads_write_for_themselves() -> None:
    lines: list[int] = []
    write(lambda: lines.append(threading.get_ident()))
    assert lines == [threading.get_ident()]


def test_a_lock_of_logging_that_is_held_for_ever_holds_up_nothing() -> None:
    """An interrupt can leave it held, and every first record of a level takes it."""
    driver, logger = acquire(), logging.getLogger("httpx")

    async def log() -> bool:
        logger.info("a request")
        logger.debug("more of it")
        return logging.getLogger("uvicorn.access") is not logger  # for each connection to a server

    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with logging._lock:  # type: ignore[attr-defined]
            held.set()
            go_on.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    logger._cache.clear()  # type: ignore[attr-defined]  # as after a change of levels
    try:
        assert driver.submit(log()).result(15)
    finally:
        go_on.set()
        holder.join()
        driver.release()


def test_a_slow_log_is_waited_for_only_now_and_then() -> None:
    with LogThread() as log:
        for _ in range(20):
            log.call(time.sleep, 0.05)
        assert log._spare < 0.05  # seconds that it may still wait


def test_what_a_record_factory_or_handler_raises_ends_nothing() -> None:
    driver, lines = acquire(), list[str]()

    def factory(*args: object, **kwargs: object) -> logging.LogRecord:
        raise SystemExit

    async def log() -> bool:
        logging.getLogger("leasekit").error("a line")
        return True

    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(factory)
    try:
        assert driver.submit(log()).result(15)
        logging.setLogRecordFactory(before)
        with LogThread():
            write(lines.append, "still there")
        assert driver.submit(log()).result(15)
    finally:
        logging.setLogRecordFactory(before)
        driver.release()
    assert lines == ["still there"]
