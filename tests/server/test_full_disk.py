"""A disk that is full or sick: nothing is acknowledged that is not on it, and it heals without a restart."""

import os
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leasekit.errors import Unavailable
from leasekit.server.engine import Engine
from leasekit.server.store.sqlite import store as module
from leasekit.server.store.sqlite.store import SqliteStore
from leasekit.task import Beat, NewTask, Settlement

pytestmark = pytest.mark.anyio

TASK = [NewTask(kind="k", id="a")]


# A disk that is almost full


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the disk says of itself."""
    shown = SimpleNamespace(f_bavail=2**20, f_frsize=4096, f_blocks=2**24)
    monkeypatch.setattr(os, "statvfs", lambda _: shown)
    return shown


async def test_a_disk_that_is_almost_full_takes_no_new_tasks_and_goes_on_with_those_it_has(
    tmp_path: Path, disk: SimpleNamespace
) -> None:
    async with Engine(SqliteStore(tmp_path / "tasks.db")) as engine:
        await engine.schedule(TASK)
        disk.f_bavail = 63 * 2**20 // 4096
        await engine.tick()
        with pytest.raises(Unavailable, match=r"almost full \(63 MiB left, 64 are kept"):
            await engine.schedule([NewTask(kind="k", id="b")])
        assert await engine.ready() is None  # or a proxy would cut off the heartbeats
        assert "almost full" in (engine.room.lack or "")
        (task,) = (await engine.claim(worker="w", kinds=["k"], limit=1, wait=0, claim_id="c")).tasks
        (beat,) = await engine.heartbeat("w", [Beat(id=task.id, token=task.token)])
        (result,) = await engine.results("w", [Settlement(id=task.id, token=task.token, outcome="success")])
        assert (beat.verdict, result.verdict) == ("renewed", "settled")
        assert await engine.queries.get("b") is None


async def test_a_result_with_successors_waits_for_room_and_the_others_do_not_wait_for_it(
    tmp_path: Path, disk: SimpleNamespace
) -> None:
    async with Engine(SqliteStore(tmp_path / "tasks.db")) as engine:
        await engine.schedule([NewTask(kind="k") for _ in range(3)])
        tasks = (await engine.claim(worker="w", kinds=["k"], limit=3, wait=0, claim_id="c")).tasks
        disk.f_bavail = 0
        await engine.tick()
        results = [
            Settlement(id=task.id, token=task.token, outcome="success", then=[NewTask(kind="next")] if at == 1 else [])
            for at, task in enumerate(tasks)
        ]
        verdicts = await engine.results("w", results)
        assert [verdict.verdict for verdict in verdicts] == ["settled", "failed", "settled"]
        assert "almost full" in (verdicts[1].reason or "")
        (beat,) = await engine.heartbeat("w", [Beat(id=tasks[1].id, token=tasks[1].token)])
        assert beat.verdict == "renewed"
        disk.f_bavail = 2**20
        await engine.tick()
        assert [verdict.verdict for verdict in await engine.results("w", results)] == ["settled"] * 3
        assert (await engine.queries.stats()).kinds["next"] == {"new": 1}


async def test_when_there_is_room_again_new_tasks_are_taken_again(
    tmp_path: Path, disk: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    disk.f_bavail = 0
    async with Engine(SqliteStore(tmp_path / "tasks.db")) as engine:
        with pytest.raises(Unavailable):
            await engine.schedule(TASK)
        disk.f_bavail = module._RESERVE // 4096
        await engine.tick()
        assert engine.room.lack is None
        await engine.schedule(TASK)
    assert caplog.text.count("no new tasks are accepted") == 1
    assert caplog.text.count("there is room again") == 1


async def test_a_file_system_that_does_not_tell_is_believed_to_have_room(tmp_path: Path, disk: SimpleNamespace) -> None:
    disk.f_bavail = disk.f_blocks = 0
    async with Engine(SqliteStore(tmp_path / "tasks.db")) as engine:
        await engine.schedule(TASK)


async def test_a_disk_that_cannot_be_looked_at_takes_no_new_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise OSError(5, "Input/output error")

    async with Engine(SqliteStore(tmp_path / "tasks.db")) as engine:
        monkeypatch.setattr(os, "statvfs", fail)
        await engine.tick()
        with pytest.raises(Unavailable, match="cannot be checked for free space: Input/output error"):
            await engine.schedule(TASK)


# A sync that fails


class Sick:
    """Commits that end as a failed fsync does, injected where they are asked for; for real: store/test_failed_sync."""

    def __init__(self, store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commits = 0
        self.connections: list[int] = []
        dialect = store._writing.dialect
        commit = dialect.do_commit

        def do_commit(connection: Any) -> None:
            self.connections.append(id(connection.driver_connection))
            if self.commits > 0:
                self.commits -= 1
                raise sqlite3.OperationalError("disk I/O error")
            commit(connection)

        monkeypatch.setattr(dialect, "do_commit", do_commit)


async def test_a_failed_sync_is_not_acknowledged_and_its_connection_is_used_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path / "tasks.db")
    async with Engine(store) as engine:
        sick = Sick(store, monkeypatch)
        before = store._connection
        sick.commits = 1
        with pytest.raises(Unavailable, match="the store failed: disk I/O error"):
            await engine.schedule(TASK)
        assert await engine.queries.get("a") is None
        assert store._connection is None
        [scheduled] = await engine.schedule(TASK)
        assert scheduled.created
        assert store._connection is not before
        assert await engine.queries.get("a") is not None


async def test_it_is_not_ready_while_nothing_can_be_written_and_is_when_it_can_be_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path / "tasks.db")
    async with Engine(store) as engine:
        sick = Sick(store, monkeypatch)
        sick.commits = 1_000_000
        with pytest.raises(Unavailable):
            await engine.schedule(TASK)
        assert await engine.ready() == "the store failed: disk I/O error"
        sick.commits = 0
        assert await engine.ready() is None
