"""A worker whose process can open no more files: it claims nothing, and ends if that lasts."""

import asyncio
import errno
import logging
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import leasekit
from leasekit import LeasekitError
from leasekit._worker.descriptors import Descriptors
from leasekit.testing.memory import MemoryBackend, MemoryService


def unexpected(error: BaseException) -> None:
    raise AssertionError from error


class Opening:
    """Stands for `os.open`: it fails as long as it has an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: int | None = None
        self._open = os.open
        monkeypatch.setattr(os, "open", self)

    def __call__(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == os.devnull and self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        return self._open(path, flags, mode, dir_fd=dir_fd)


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch) -> Opening:
    return Opening(monkeypatch)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_lack_is_said_once_and_ends_the_run_once_if_it_lasts(
    opening: Opening, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    failed: list[BaseException] = []
    free = Descriptors(failed.append)
    assert free.are_free(0)
    opening.error = number
    assert not any(free.are_free(now) for now in (10, 11, 14.9))
    assert not failed
    assert not any(free.are_free(now) for now in (15, 16))
    (error,) = failed
    assert isinstance(error, LeasekitError)
    for text in (str(error), caplog.text):
        assert "ulimit -n is " in text
        assert "find what leaves some open" in text
    assert len(caplog.records) == 1


def test_a_lack_that_ends_in_time_ends_nothing(opening: Opening, caplog: pytest.LogCaptureFixture) -> None:
    failed: list[BaseException] = []
    free = Descriptors(failed.append)
    with caplog.at_level(logging.INFO):
        for now in (0, 4, 8, 12):
            opening.error = errno.EMFILE
            assert not free.are_free(now)
            opening.error = None
            assert free.are_free(now + 3)
    assert not failed
    assert len(caplog.records) == 8


def test_a_process_without_dev_null_claims_all_the_same(opening: Opening) -> None:
    opening.error = errno.ENOENT
    assert Descriptors(unexpected).are_free(0)


def test_no_descriptor_is_left_open() -> None:
    free, place = Descriptors(unexpected), os.open(os.devnull, os.O_RDONLY)
    os.close(place)
    for _ in range(100):
        assert free.are_free(0)
    again = os.open(__file__, os.O_RDONLY)
    os.close(again)
    assert again < place + 50


SCRIPT = """
    import logging, os, resource, sys, threading
    limit = resource.setrlimit, resource.RLIMIT_NOFILE
    del sys.modules["resource"]  # as where nothing else has loaded it
    import leasekit
    from leasekit._worker import descriptors
    from leasekit.testing.memory import MemoryBackend, MemoryService

    descriptors._PATIENCE = 2.0
    limit[0](limit[1], (64, 64))
    service = MemoryService()
    submitter = leasekit.Client(MemoryBackend(service, worker="submitter"))
    worker = leasekit.Worker(MemoryBackend(service, worker="worker"), drain_grace=0, drain_timeout=20)
    ran = []

    def leak():
        try:
            while True:
                os.open(os.devnull, os.O_RDONLY)
        except OSError:
            pass

    @worker.handler("leaks")
    def leaks(payload):
        leak()

    class Log(logging.Handler):
        def emit(self, record):
            if "nothing is claimed" in record.getMessage():
                threading.Timer(0.5, submitter.schedule, ["innocent"], {"id": "innocent"}).start()

    logging.getLogger("leasekit").addHandler(Log())
    worker.handler("innocent")(lambda payload: ran.append(payload))
    if sys.argv[1] == "handler":
        submitter.schedule("leaks", id="leaks")
    else:
        threading.Timer(1.5, leak).start()
    try:
        worker.run()
    except leasekit.LeasekitError as error:
        print(type(error).__name__, error)
    for task in submitter.list_tasks().tasks:
        print(task.id, task.status.value, task.crashes)
    print("ran", len(ran), flush=True)
    os._exit(0)  # a thread that Python ends may need a descriptor, to load libgcc
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit")
@pytest.mark.parametrize("who", ["handler", "other code"])
def test_a_worker_without_descriptors_claims_nothing_and_ends_with_an_error(tmp_path: Path, who: str) -> None:
    (tmp_path / "script.py").write_text(dedent(SCRIPT))
    command = [sys.executable, "script.py", who]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    error, *tasks, ran = ended.stdout.splitlines()
    assert error.startswith("LeasekitError this process can open no more files and sockets (Too many open files, ")
    assert "ulimit -n is 64" in error
    assert sorted(tasks) == ["innocent new 0", *(["leaks success 0"] if who == "handler" else [])]
    assert ran == "ran 0"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_loop_without_descriptors_claims_nothing_and_raises(opening: Opening, number: int) -> None:
    service = MemoryService()
    with leasekit.Client(MemoryBackend(service, worker="a")) as client:
        task_id = client.schedule("k").id
        tasks = client.tasks("k")
        opening.error = number
        with pytest.raises(LeasekitError, match=r"no task is claimed: .* ulimit -n is "):
            next(tasks)
        with pytest.raises(LeasekitError, match="no task is claimed: "):
            asyncio.run(anext(tasks))
        info = client.get(task_id)
        assert info is not None
        assert (info.status, info.attempt) == ("new", 0)
        opening.error = None
        assert next(tasks).id == task_id
