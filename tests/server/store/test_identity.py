"""Which store a file is: one server for it under all of its names, and nothing is lost from it without a word."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from leasekit.errors import ConfigError, StoreDamaged, StoreLocked
from leasekit.server.store import Dedupe
from leasekit.server.store.sqlite.store import SqliteStore
from tests.sampling import slow_after

HOLD = """
import sys
from pathlib import Path
from leasekit.server.store import Dedupe
from leasekit.server.store.sqlite.store import SqliteStore
store = SqliteStore(Path(sys.argv[1]))
store.open()
for key in sys.argv[2:]:
    with store.transaction() as tx:
        tx.set_dedupes([Dedupe("k", key, "id", None)])
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data" / "tasks.db"
    path.parent.mkdir()
    return path


@contextmanager
def server(path: Path, *keys: str) -> "Iterator[subprocess.Popen[str]]":
    """A process that has the store open, has written these keys, and is killed at the end."""
    command = [sys.executable, "-c", HOLD, str(path), *keys]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
        process.send_signal(signal.SIGKILL)


def write(path: Path, *keys: str) -> None:
    with opened(path) as store:
        for key in keys:
            with store.transaction() as tx:
                tx.dedupes([("k", key)])
                tx.set_dedupes([Dedupe("k", key, "id", None)])


def keys(path: Path) -> set[str]:
    with opened(path) as store, store.transaction() as tx:
        return {key for _, key in tx.dedupes([("k", name) for name in "abc"])}


@contextmanager
def opened(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path)
    store.open()
    try:
        yield store
    finally:
        store.close()


# One server for one file


def by_link_to_file(path: Path) -> Path:
    other = path.parent.parent / "other.db"
    other.symlink_to(path)
    return other


def by_link_to_directory(path: Path) -> Path:
    link = path.parent.parent / "link"
    link.symlink_to(path.parent)
    return link / path.name


def by_second_name(path: Path) -> Path:
    other = path.parent.parent / "other.db"
    other.hardlink_to(path)
    return other


def by_the_same_name_without_what_is_beside_it(path: Path) -> Path:
    for file in path.parent.iterdir():
        if file.name not in ("tasks.db", "tasks.db-wal", "tasks.db-shm"):
            file.unlink()
    return path


def by_the_same_name_for_another_file(path: Path) -> Path:
    copy = path.with_name("copy.db")
    shutil.copy(path, copy)
    copy.replace(path)
    return path


WAYS = [
    by_link_to_file,
    by_link_to_directory,
    by_second_name,
    by_the_same_name_without_what_is_beside_it,
    by_the_same_name_for_another_file,
]


@pytest.mark.parametrize("way", WAYS)
def test_a_second_server_is_refused_by_whatever_way_it_comes(path: Path, way: Callable[[Path], Path]) -> None:
    with server(path, "a"):
        other = way(path)
        with pytest.raises((StoreLocked, ConfigError)):
            SqliteStore(other).open()


@pytest.mark.parametrize("way", WAYS)
def test_a_refusal_in_the_same_process_drops_no_lock_of_the_first(path: Path, way: Callable[[Path], Path]) -> None:
    # Without SQLite's lock on the file, a stranger who closes it takes itself for the last, and deletes the log.
    script = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT * FROM store').fetchall(); c.close()"
    )
    with opened(path) as store:
        with store.transaction() as tx:
            tx.set_dedupes([Dedupe("k", "a", "id", None)])
        other = way(path)
        with pytest.raises((StoreLocked, ConfigError)):
            SqliteStore(other).open()
        if way is not by_the_same_name_for_another_file:
            subprocess.run([sys.executable, "-c", script, str(path)], check=True)
            assert path.with_name("tasks.db-wal").exists()


def test_a_file_with_two_names_is_refused_with_what_to_do(path: Path) -> None:
    write(path, "a")
    other = by_second_name(path)
    with pytest.raises(ConfigError, match=r"2 names .hard links.*remove the others"):
        SqliteStore(path).open()
    other.unlink()
    assert keys(path) == {"a"}


def test_a_link_that_leads_in_a_circle_is_one_clear_error(path: Path) -> None:
    path.symlink_to(path)
    with pytest.raises(ConfigError, match="cannot be opened"):
        SqliteStore(path).open()


def test_a_killed_server_leaves_its_store_to_the_next(path: Path) -> None:
    with server(path, "a", "b"):
        pass
    assert keys(by_link_to_file(path)) == {"a", "b"}


# Nothing is lost without a word


@pytest.mark.parametrize("ending", ["closed", "killed"])
@pytest.mark.parametrize("loss", slow_after(1, ["cut", "removed", "replaced by an empty one"]))
def test_an_empty_file_where_a_store_was_is_refused_and_left_as_it_is(path: Path, ending: str, loss: str) -> None:
    if ending == "closed":
        write(path, "a")
    else:
        with server(path, "a"):
            pass
    log = path.with_name("tasks.db-wal")
    size = log.stat().st_size if log.exists() else None
    if loss == "cut":
        os.truncate(path, 0)
    else:
        path.unlink()
        if loss != "removed":
            path.touch()
    for _ in range(2):
        with pytest.raises(StoreDamaged, match=r"empty or missing.*delete tasks.db.id"):
            SqliteStore(path).open()
    assert path.exists() == (loss != "removed")
    assert (log.stat().st_size if log.exists() else None) == size, "the log can still be saved"


def test_a_new_store_has_its_schema_in_the_file_before_the_first_request(path: Path) -> None:
    with server(path):
        shutil.copy(path, path.with_name("copy.db"))
    with sqlite3.connect(path.with_name("copy.db")) as connection:
        assert connection.execute("SELECT count(*) FROM task").fetchone() == (0,)
    connection.close()


def test_a_server_that_was_killed_before_its_new_store_had_an_id_leaves_a_store(path: Path) -> None:
    write(path)
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM store")
    connection.close()
    path.with_name("tasks.db.id").write_bytes(b"")
    write(path, "a")
    assert keys(path) == {"a"}


DAMAGED = [b"", b"\0" * 65, b"nonsense", b"a b c", b"\xff" * 300, b"-", b"a" * 40]


@pytest.mark.parametrize("line", DAMAGED)
def test_a_note_that_makes_no_sense_is_refused_until_it_is_deleted(path: Path, line: bytes) -> None:
    write(path, "a")
    note = path.with_name("tasks.db.id")
    note.write_bytes(line)
    for _ in range(2):
        with pytest.raises(StoreDamaged, match=r"tasks\.db\.id is damaged.*delete tasks\.db\.id"):
            SqliteStore(path).open()
        assert note.read_bytes() == line
    note.unlink()
    assert keys(path) == {"a"}


@pytest.mark.parametrize("cut", range(0, 130, 10))
def test_half_a_note_is_no_note(path: Path, cut: int) -> None:
    write(path, "a")
    os.truncate(path.with_name("tasks.db.id"), cut)
    with pytest.raises(StoreDamaged, match="is damaged"):
        SqliteStore(path).open()


def test_a_note_of_an_earlier_version_is_understood(path: Path) -> None:
    write(path, "a", "b")
    note = path.with_name("tasks.db.id")
    fields = note.read_text().split()
    note.write_text(f"{fields[0]:<32} {fields[1]:>20} {fields[-1]:>10}\n")
    assert keys(path) == {"a", "b"}
    note.write_text(f"{fields[0]:<32} {99:>20} {fields[-1]:>10}\n")
    with pytest.raises(StoreDamaged, match="lost its last 97 transactions"):
        SqliteStore(path).open()


@pytest.mark.parametrize("went_on", [False, True])
def test_a_copy_that_was_served_elsewhere_is_refused_in_the_place_of_its_original(
    path: Path, tmp_path: Path, *, went_on: bool
) -> None:
    write(path, "a")
    copy = tmp_path / "copy.db"
    shutil.copy(path, copy)
    if went_on:
        write(path, "b")
    write(copy, "c", "c", "c")  # by now it has seen more than the original
    copy.replace(path)
    for _ in range(2):
        with pytest.raises(StoreDamaged, match=r"copy .* served elsewhere.*delete tasks\.db\.id"):
            SqliteStore(path).open()
    path.with_name("tasks.db.id").unlink()
    assert keys(path) == {"a", "c"}


def test_a_copy_that_nobody_has_written_to_is_as_good_as_its_original(path: Path, tmp_path: Path) -> None:
    write(path, "a")
    copy = tmp_path / "copy.db"
    shutil.copy(path, copy)
    assert keys(copy) == {"a"}
    copy.replace(path)
    assert keys(path) == {"a"}


@pytest.mark.parametrize("writes", [(), ("b",), ("b", "c")])
def test_a_note_from_any_moment_of_a_start_belongs_to_its_store(
    path: Path, writes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, "a")
    # Power fails after the start was noted, and `at - 2` more notes have come to the disk.
    for at in range(2, len(writes) + 3):
        count = iter(range(at, -1, -1))
        pwrite = os.pwrite
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", lambda *args, left=count, do=pwrite: do(*args) if next(left, 0) else 0)
            write(path, *writes)
        assert keys(path) == {"a", *writes}


def test_a_log_that_was_removed_after_a_kill_is_missed(path: Path) -> None:
    with server(path, "a", "b"):
        pass
    log = path.with_name("tasks.db-wal")
    saved = log.rename(path.with_name("saved"))
    for _ in range(2):
        with pytest.raises(StoreDamaged, match=r"lost its last 2 transactions.*tasks\.db-wal"):
            SqliteStore(path).open()
    log.unlink(missing_ok=True)
    saved.rename(log)
    assert keys(path) == {"a", "b"}


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8192)  # the pages after the first
        file.write(b"\xff" * (path.stat().st_size - 8192))


def serve_elsewhere(path: Path) -> None:
    elsewhere = shutil.copytree(path.parent, path.with_name("elsewhere")) / path.name
    with server(elsewhere, "b"):
        pass
    for suffix in ("", "-wal"):
        Path(f"{elsewhere}{suffix}").replace(f"{path}{suffix}")


@pytest.mark.parametrize("spoil", [damage, serve_elsewhere])
def test_a_store_that_is_refused_stays_as_it_is_with_its_log(path: Path, spoil: Callable[[Path], None]) -> None:
    """The log may belong to another copy, which must not get its pages."""
    with server(path, "a"):
        pass
    spoil(path)
    log = path.with_name("tasks.db-wal")
    before = path.read_bytes(), log.read_bytes()
    for _ in range(2):
        with pytest.raises(StoreDamaged):
            SqliteStore(path).open()
        assert (path.read_bytes(), log.read_bytes()) == before


def test_a_store_without_a_log_that_is_refused_gets_none(path: Path, tmp_path: Path) -> None:
    write(path, "a")
    write(tmp_path / "other.db", "b")
    (tmp_path / "other.db").replace(path)
    before = path.read_bytes(), set(path.parent.iterdir())
    with pytest.raises(StoreDamaged):
        SqliteStore(path).open()
    assert (path.read_bytes(), set(path.parent.iterdir())) == before


def test_a_log_that_a_stranger_has_put_into_the_file_is_not_missed(path: Path) -> None:
    with server(path, "a"):
        pass
    with sqlite3.connect(path) as shell:  # what an operator does who looks what is wrong
        shell.execute("SELECT count(*) FROM dedupe").fetchone()
    shell.close()
    assert not path.with_name("tasks.db-wal").exists()
    assert keys(path) == {"a"}


def test_an_older_copy_in_its_place_is_refused_until_it_is_said_to_be_meant(path: Path) -> None:
    write(path, "a")
    backup = path.with_name("backup.db")
    shutil.copy(path, backup)
    write(path, "b", "c")
    backup.replace(path)
    with pytest.raises(StoreDamaged, match=r"lost its last 2 transactions.*delete tasks.db.id"):
        SqliteStore(path).open()
    path.with_name("tasks.db.id").unlink()
    assert keys(path) == {"a"}


def test_another_store_in_its_place_is_refused(path: Path, tmp_path: Path) -> None:
    write(path, "a")
    write(tmp_path / "other.db", "b")
    (tmp_path / "other.db").replace(path)
    with pytest.raises(StoreDamaged, match=r"another store .*delete tasks.db.id"):
        SqliteStore(path).open()


def test_a_directory_can_be_moved_as_a_whole(path: Path, tmp_path: Path) -> None:
    with server(path, "a"):
        pass
    path.parent.rename(tmp_path / "elsewhere")
    assert keys(tmp_path / "elsewhere" / "tasks.db") == {"a"}


def test_a_backup_that_was_made_while_the_server_ran_is_a_store_elsewhere(path: Path, tmp_path: Path) -> None:
    with server(path, "a"):
        source, target = sqlite3.connect(path), sqlite3.connect(tmp_path / "backup.db")
        with target:
            source.backup(target)
        target.close()
        source.close()
    write(tmp_path / "backup.db", "b")
    assert keys(tmp_path / "backup.db") == {"a", "b"}
    assert keys(path) == {"a"}


def test_reading_alone_writes_nothing(path: Path) -> None:
    write(path, "a")
    with opened(path) as store:
        for _ in range(3):
            with store.transaction() as tx:
                assert tx.dedupes([("k", "a")])
        assert path.with_name("tasks.db-wal").stat().st_size == 0
