"""What holds for every test: no keeper outlives it, and randomised tests say how to repeat them.

And what many of them stand on: a service in memory whose time and faults are decided by hand.
"""

import functools
import gc
import importlib.metadata
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import certifi
import pytest
from hypothesis import settings

from leasekit import Client, _log
from leasekit.hooks import Event
from leasekit.testing.clock import FakeClock
from leasekit.testing.faults import Faulty
from leasekit.testing.memory import MemoryBackend, MemoryService

if TYPE_CHECKING:
    from tests.postgres_server import PostgresServer

# A shell ignores Ctrl-C in what it runs in the background, and tests send it: it is heard again here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The harness is imported from the tree; last in the path, so that leasekit itself is the installed one.
sys.path.append(str(Path(__file__).parents[1]))

# Tests read a log at once: on a busy machine too, what the driver's thread logs is written when its call returns.
_log._PATIENCE, _log._SHARE = 20.0, 1.0

# Timings never decide. CI repeats the same examples, so that what turns red there is the change; developers explore.
settings.register_profile("dev", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None, max_examples=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "dev"))


@pytest.hookimpl(trylast=True)  # after the reporter itself
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures(reporter), "leasekit-failures")


class _Failures:
    """Prints each failure when it happens: a log that is cut off before the summary names them all the same."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        why = (str(report.longrepr) if crash is None else crash.message).strip().partition("\n")[0]
        self._reporter.write_line(f"\nFAILED {report.nodeid} ({report.when}, {report.duration:.0f} s): {why}"[:500])
        self._reporter.flush()


# Files whose tests wait for seconds: for the ttls of real processes, for restarts, for stops.
_SLOW = 300  # seconds for a test that is slow, on a machine ten times slower
_WAITING = (
    "adapters/brokers/test_celery.py", "adapters/redis/test_contract_redis.py", "adapters/redis/test_redis_",
    "adapters/sqs/", "cli/test_demo.py", "cli/test_processes.py", "cli/test_supervisor.py", "driver/guarding/",
    "harness/test_chaos.py", "model/", "process/", "server/store/test_identity.py", "server/test_enqueuer.py",
    "server/test_shared.py", "test_benchmarks.py", "test_docs_console.py", "test_examples.py", "test_named.py",
    "worker/",
)  # fmt: skip


@pytest.hookimpl(wrapper=True)  # before `-m` leaves tests out, and after it
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark tests that are slow with one store, and give slow tests more time.

    Half of the processes of pytest-xdist begin with the tests that wait; the other half computes meanwhile.

    `--dist worksteal` gives each process an equal part of the list. The tests that wait would otherwise come together,
    or last.
    """
    for item in items:
        store = item.get_closest_marker("slow_with")
        if store is not None and store.args[0] in item.name:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_SLOW))
    yield
    workers: int = getattr(config, "workerinput", {}).get("workercount", 1)
    tests = Path(__file__).parent
    waits = [item.path.relative_to(tests).as_posix().startswith(_WAITING) for item in items]
    waiting = [item for item, wait in zip(items, waits, strict=True) if wait]
    others = [item for item, wait in zip(items, waits, strict=True) if not wait]
    half, part = workers // 2, len(items) // workers
    if not half or len(waiting) > half * part:
        return
    items.clear()
    for number in range(half):
        mine = waiting[number::half]
        items += mine + others[: part - len(mine)]
        del others[: part - len(mine)]
    items += others


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Keep how the run has ended, for `.ci/run`."""
    cache: pytest.Cache | None = getattr(session.config, "cache", None)
    if cache is not None and not hasattr(session.config, "workerinput"):
        cache.set("run/exit", int(exitstatus))


def pytest_collection() -> None:
    """Collect no garbage while tests are collected: there is none."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Spare the collected tests from garbage collection: a test that asks for one would scan all of them each time."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """More processes than cores: most tests wait for other processes, for disks, and for leases to end.

    Single files have one for each core: to start more takes longer than their tests.
    """
    cores = os.cpu_count() or 1
    return cores if all(".py" in named for named in config.args) else 3 * cores


@pytest.fixture(scope="session")
def postgres() -> "Iterator[PostgresServer]":
    """A PostgreSQL of this test process."""
    from leasekit.server.store.postgres import wakes  # most tests need neither it nor its libraries
    from tests.postgres_server import PostgresServer

    server = PostgresServer()
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wakes, "_LOOK", 0.05)  # the end of a node waits for a look
        yield server
    server.remove()


@pytest.fixture(autouse=True, scope="session")
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What workers keep on disk is not kept in the home of who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="session")
def one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Spare each client of httpx from reading all root certificates (20 ms): no server of the tests has one."""
    path, end = tmp_path_factory.mktemp("authority") / "one.pem", "-----END CERTIFICATE-----\n"
    path.write_text(Path(certifi.where()).read_text(encoding="utf-8").partition(end)[0] + end, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certifi, "where", lambda: str(path))
        yield


@pytest.fixture(autouse=True, scope="session")
def installed_backends() -> Iterator[None]:
    """Spare each client from looking through all installed packages for backends (5 ms)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "entry_points", functools.cache(importlib.metadata.entry_points))
        yield


@pytest.fixture(autouse=True)
def no_driver_is_left() -> Iterator[None]:
    """The driver's thread ends with its last client: a test that leaves one alive has not closed what it opened."""
    before = _drivers()
    yield
    left = _drivers() - before
    for thread in left:
        thread.join(timeout=30)
    assert not {thread for thread in left if thread.is_alive()}, "a client or a lease was not closed"


def _drivers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "leasekit-driver"}


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port of this machine at which nothing listens, and nothing will while the test runs."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


# A service in memory ------------------------------------------------------------------------------------------


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000)


@pytest.fixture
def service(clock: FakeClock) -> MemoryService:
    return MemoryService(now=clock, random=Random(1))


@pytest.fixture
def faulty(service: MemoryService, clock: FakeClock) -> Faulty:
    return Faulty(MemoryBackend(service, worker="w"), sleep=clock.sleep)


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def client(faulty: Faulty, clock: FakeClock, events: list[Event]) -> Iterator[Client]:
    with Client(faulty, clock=clock, hooks=[events.append]) as client:
        yield client
        faulty.clear()
        clock.advance(60)
