"""A file that is not whole is refused with one sentence that says how to recover, and the check is bounded."""

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from leasekit.errors import StoreDamaged
from leasekit.server.store import Entity, Trigger
from leasekit.server.store.sqlite.store import SqliteStore
from leasekit.server.store.urls import open_store

PAGE = 8192


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.db"
    store = SqliteStore(path)
    store.open()
    seqs = range(1, 3001)
    with store.transaction() as tx:
        tx.add(
            [
                Entity(n, f"t{n}", "k", None, 2, 1.0, 1.0, None, 5, None, 60.0, None, None, None, None, b"", b"1")
                for n in seqs
            ],
            [Trigger(n, f"t{n}", "k", 2, 300.0, 300.0, next_trigger_at=1.0) for n in seqs],
        )
    store.close()
    return path


def flip(path: Path, at: int, count: int) -> None:
    """Every bit of so many bytes is another one."""
    data = bytearray(path.read_bytes())
    data[at : at + count] = bytes(byte ^ 0xFF for byte in data[at : at + count])
    path.write_bytes(data)


def opened(store: SqliteStore) -> Iterator[None]:
    store.open()
    yield
    store.close()


@pytest.mark.parametrize("page", [5, 20, 40])
def test_a_page_that_was_overwritten_is_found_at_the_start(path: Path, page: int) -> None:
    flip(path, page * PAGE, 64)
    with pytest.raises(StoreDamaged) as refused:
        SqliteStore(path).open()
    said = str(refused.value)
    assert "is damaged" in said
    assert "put a backup in its place" in said
    assert "'A damaged store' in leasekit's docs/operations.md" in said


@pytest.mark.parametrize(("at", "count"), [(0, 16), (16, 84), (100, 50)])
def test_a_header_that_was_overwritten_is_found_too(path: Path, at: int, count: int) -> None:
    flip(path, at, count)
    with pytest.raises(StoreDamaged, match="is damaged"):
        SqliteStore(path).open()


def test_a_file_that_was_cut_off_is_found_too(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(10 * PAGE)
    with pytest.raises(StoreDamaged, match="is damaged"):
        SqliteStore(path).open()


@pytest.mark.parametrize(("table", "other"), [("task", "trigger"), ("trigger", "task")])
def test_a_salvaged_store_that_lacks_rows_is_refused_with_the_statement_that_mends_it(
    path: Path, table: str, other: str
) -> None:
    """Each `schedule` would fail: the numbers of new tasks are taken."""
    with closing(sqlite3.connect(path, isolation_level=None)) as shell:
        shell.execute(f"DELETE FROM {table} WHERE seq > 2990")  # noqa: S608
        with pytest.raises(StoreDamaged, match=f"10 rows of '{other}' have none in '{table}'") as refused:
            SqliteStore(path).open()
        shell.execute(str(refused.value).partition("shell: ")[2])
    for _ in opened(SqliteStore(path)):
        pass


def test_who_was_refused_leaves_no_lock(path: Path) -> None:
    whole = path.read_bytes()
    flip(path, 5 * PAGE, 64)
    with pytest.raises(StoreDamaged):
        SqliteStore(path).open()
    path.write_bytes(whole)
    for _ in opened(SqliteStore(path)):
        pass


def ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("leasekit")]


def test_a_store_that_is_whole_is_opened_without_a_word(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in opened(SqliteStore(path)):
        assert not ours(caplog)


def test_the_check_ends_when_its_time_is_over_and_the_store_is_opened(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="leasekit.server"):
        for _ in opened(SqliteStore(path, check=1e-9)):
            assert "has found no damage so far" in caplog.text


def test_no_time_for_it_is_no_check(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip(path, path.stat().st_size - 20 * PAGE, 64)  # among the tasks
    store = open_store(f"sqlite:///{path}", check=0)
    assert isinstance(store, SqliteStore)
    for _ in opened(store):
        assert not ours(caplog)
