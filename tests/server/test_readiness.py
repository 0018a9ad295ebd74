"""Readiness and `leasekit_store_up` tell the truth under real faults of a store, also while nothing else uses it."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NoReturn

import pytest

from leasekit.errors import Unavailable
from leasekit.server import engine as module
from leasekit.server.engine import Engine
from leasekit.server.http.metrics import Metrics
from leasekit.server.store.sqlite.store import SqliteStore
from leasekit.task import NewTask

pytestmark = pytest.mark.anyio

PAGE = 8192

UNWRITABLE = """
import asyncio, ctypes, os, platform, struct, sys
from pathlib import Path
from leasekit.server import engine as module
from leasekit.server.engine import Engine
from leasekit.server.http.metrics import Metrics
from leasekit.server.store.sqlite.store import SqliteStore

PWRITE = {"x86_64": 18, "aarch64": 68}[platform.machine()]

def op(code, jump_if, jump_else, value):
    return struct.pack("HBBI", code, jump_if, jump_else, value)

FILTER = b"".join([
    op(0x20, 0, 0, 0),                              # the number of the system call
    op(0x15, 0, 1, PWRITE),
    op(0x06, 0, 0, 0x00050000 | int(sys.argv[2])),  # this error
    op(0x06, 0, 0, 0x7FFF0000),                     # as ever
])

def fail_writes():
    libc = ctypes.CDLL(None, use_errno=True)
    program = ctypes.create_string_buffer(FILTER, len(FILTER))
    header = struct.pack("HxxxxxxP", len(FILTER) // 8, ctypes.addressof(program))
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    # For all threads: SECCOMP_SET_MODE_FILTER with SECCOMP_FILTER_FLAG_TSYNC.
    call = {"x86_64": 317, "aarch64": 277}[platform.machine()]
    assert libc.syscall(call, 1, 1, header) == 0, os.strerror(ctypes.get_errno())

async def main():
    module._PERIOD = 3600.0  # nothing is written but by probes
    async with Engine(SqliteStore(Path(sys.argv[1]))) as engine:
        for _ in range(2):
            print(await engine.ready())
            print(*[line for line in (await Metrics(engine).exposition()).decode().splitlines() if "store_up " in line
                    and line[0] != "#"])
            fail_writes()
        sys.stdout.flush()
        os._exit(0)  # the store cannot be closed in order

asyncio.run(main())
"""


@pytest.mark.parametrize(("errno", "why"), [(5, "disk I/O error"), (28, "database or disk is full")])
def test_an_idle_store_that_takes_no_writes_is_down(tmp_path: Path, errno: int, why: str) -> None:
    command = [sys.executable, "-c", UNWRITABLE, str(tmp_path / "tasks.db"), str(errno)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == f"writes fail, and no restart is needed once they succeed again: the store failed: {why}\n"
    assert done.stdout.splitlines() == [
        *("None", "leasekit_store_up 1.0"),
        *(f"the store failed: {why}", "leasekit_store_up 0.0"),
    ]


@pytest.fixture
async def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    """An engine over 3,000 tasks in a file whose pages are not checked; it does nothing by itself."""
    monkeypatch.setattr(module, "_PERIOD", 3600.0)
    path = tmp_path / "tasks.db"
    async with Engine(SqliteStore(path)) as engine:
        for _ in range(3):
            await engine.schedule([NewTask(kind="k") for _ in range(1000)])
    async with Engine(SqliteStore(path, check=0)) as engine:
        yield engine


async def is_up(engine: Engine) -> bool:
    lines = (await Metrics(engine).exposition()).decode().splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith("leasekit_store_up ")]
    return value == "1.0"


async def test_a_store_with_damaged_pages_is_down_although_other_pages_can_be_written(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert await engine.ready() is None
    with (tmp_path / "tasks.db").open("r+b") as file:
        size = file.seek(0, 2)
        for page in range(8, size // PAGE):
            file.seek(page * PAGE)
            file.write(b"\xff" * 64)
    with pytest.raises(Unavailable, match="malformed"):
        await engine.queries.list_tasks(limit=1000)
    assert "is damaged (database disk image is malformed): put a backup in its place" in (await engine.ready() or "")
    assert engine.commit.fault is None
    assert not await is_up(engine)
    assert caplog.text.count("is damaged") == 1


async def test_a_store_without_its_writer_is_down_although_it_can_be_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave() -> NoReturn:
        raise SystemExit

    assert await is_up(engine)
    monkeypatch.setattr(engine._store, "transaction", leave)
    for _ in range(2):
        assert "the writer thread has failed" in (await engine.ready() or "")
        assert not await is_up(engine)
    assert (await engine.queries.stats()).kinds == {"k": {"new": 3000}}


async def test_a_file_that_was_moved_away_is_down_until_it_is_back(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "tasks.db"
    await asyncio.to_thread(path.rename, tmp_path / "elsewhere")
    assert "was moved, deleted or replaced" in (await engine.ready() or "")
    assert not await is_up(engine)
    await asyncio.to_thread((tmp_path / "elsewhere").rename, path)
    assert await is_up(engine)
