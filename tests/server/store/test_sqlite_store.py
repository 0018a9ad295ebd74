"""A store in a file: what belongs to the file itself."""

import errno
import logging
import os
import re
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import NullPool, create_engine
from sqlalchemy.dialects import sqlite

import leasekit
from leasekit.errors import BackendError, ConfigError, StoreDamaged, StoreLocked, Unavailable
from leasekit.server.store import RETENTION, Dedupe, Entity, Filter, KindRow, Run, Trigger, View
from leasekit.server.store.memory import MemoryStore
from leasekit.server.store.schema import HEAD, metadata
from leasekit.server.store.sql import lanes, leases, tasks
from leasekit.server.store.sql.statements import Statement
from leasekit.server.store.sqlite import admission, migrations
from leasekit.server.store.sqlite import store as sql
from leasekit.server.store.sqlite.session import bound
from leasekit.server.store.sqlite.store import SqliteStore
from leasekit.server.store.sqlite.tx import SqliteView
from leasekit.server.store.urls import open_store

MIGRATIONS = Path(migrations.__file__).parent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tasks.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    one = SqliteStore(path)
    one.open()
    yield one
    one.close()


def put(store: SqliteStore, seq: int = 1) -> None:
    entity = Entity(seq, f"t{seq}", "k", None, 2, 1.0, 1.0, None, 5, None, 60.0, None, None, None, None, b"", b"1")
    with store.transaction() as tx:
        tx.add([entity], [Trigger(seq, f"t{seq}", "k", 2, 300.0, 300.0, next_trigger_at=1.0)])


def driver(view: View) -> sqlite3.Connection:
    assert isinstance(view, SqliteView)
    return view._session.driver


def is_there(store: SqliteStore, seq: int = 1) -> bool:
    with store.view() as view:
        return bool(view.triggers([f"t{seq}"]))


FILES = ["tasks.db", "tasks.db-wal", "tasks.db-shm", "tasks.db.id"]


def modes(path: Path) -> dict[str, int]:
    return {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}


# Schema


def schema(path: Path) -> Any:
    """What SQLite knows of tables and indexes."""
    with closing(sqlite3.connect(path)) as connection:
        tables = set(connection.execute("SELECT * FROM pragma_table_list WHERE name NOT LIKE 'sqlite%'"))
        indexes = set(connection.execute("SELECT tbl_name, name, sql FROM sqlite_master WHERE type = 'index'"))
        columns = {name: list(connection.execute(f'PRAGMA table_info("{name}")')) for name in metadata.tables}
        keys = {name: list(connection.execute(f'PRAGMA foreign_key_list("{name}")')) for name in metadata.tables}
    return tables, indexes, columns, keys


def test_the_tables_are_those_of_the_last_migration(store: SqliteStore, path: Path) -> None:
    with create_engine(f"sqlite:///{path}", poolclass=NullPool).connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    assert ScriptDirectory(str(MIGRATIONS)).get_current_head() == HEAD


ANOTHER = """
import sqlalchemy as sa
from alembic import op

revision = "9999"
down_revision = BEFORE


def upgrade():
    op.add_column("task", sa.Column("color", sa.Text()))
    op.execute("UPDATE task SET color = id")
    op.execute("UPDATE missing SET color = id") if FAILS else None
"""


@pytest.fixture
def next_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A version of leasekit that has one migration more; the file of that is returned."""
    migrations = tmp_path / "migrations"
    shutil.copytree(MIGRATIONS, migrations, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sql, "_MIGRATIONS", str(migrations))
    for module in (sql, admission):
        monkeypatch.setattr(module, "HEAD", "9999")
    return migrations / "versions" / "9999_another.py"


def test_a_store_of_an_earlier_version_is_migrated_with_its_tasks(
    store: SqliteStore, path: Path, next_version: Path
) -> None:
    put(store)
    store.close()
    next_version.write_text(f"BEFORE, FAILS = {HEAD!r}, False{ANOTHER}")
    for _ in range(2):  # the second start finds nothing to do
        migrated = SqliteStore(path)
        migrated.open()
        migrated.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT id, color FROM task").fetchall() == [("t1", "t1")]
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [("9999",)]


def test_a_migration_that_fails_leaves_the_store_as_it_was(store: SqliteStore, path: Path, next_version: Path) -> None:
    put(store)
    store.close()
    before = schema(path)
    next_version.write_text(f"BEFORE, FAILS = {HEAD!r}, True{ANOTHER}")
    with pytest.raises(Unavailable, match="missing"):
        SqliteStore(path).open()
    assert schema(path) == before
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [(HEAD,)]


@pytest.mark.parametrize("dump", sorted((Path(__file__).parent / "dumps").glob("sqlite_*.sql")), ids=lambda it: it.stem)
def test_a_file_of_each_earlier_version_becomes_one_of_this_version_with_its_tasks(
    store: SqliteStore, path: Path, dump: Path
) -> None:
    old = path.with_name("old.db")
    with closing(sqlite3.connect(old)) as connection:
        connection.executescript(dump.read_text(encoding="utf-8"))
    migrated = SqliteStore(old)
    migrated.open()
    with migrated.transaction() as tx:
        assert {row.id: row.status for row in tx.triggers(["done", "held", "waiting"]).values()} == {
            "done": "success", "held": "processing", "waiting": "new",
        }  # fmt: skip
        tx.set_kind("waiting", b"{}", at=1.0, by=None)
    with migrated.view() as view:
        assert view.kinds() == [KindRow("waiting", b"{}", 1.0, None, 1)]
    migrated.close()
    _, indexes, columns, keys = schema(path)
    assert schema(old)[1:] == (indexes, columns, keys)


def test_only_a_store_of_an_earlier_version_needs_alembic(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "alembic", None)
    for _ in range(2):
        store = SqliteStore(path)
        store.open()
        store.close()


def test_the_rows_are_in_the_order_of_the_columns() -> None:
    assert list(Entity.__struct_fields__) == metadata.tables["task"].columns.keys()
    assert [*Trigger.__struct_fields__, "lease_until"] == metadata.tables["trigger"].columns.keys()
    assert list(Run.__struct_fields__) == metadata.tables["run"].columns.keys()


@pytest.mark.parametrize(
    ("revision", "needs"), [("0005_leasekit_9.1.0", "leasekit 9.1.0 or newer"), ("9999", "a newer leasekit")]
)
def test_a_store_of_a_newer_version_is_refused_with_the_version_it_needs(path: Path, revision: str, needs: str) -> None:
    store = SqliteStore(path)
    store.open()
    store.close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))
        connection.execute("ALTER TABLE store RENAME COLUMN commits TO changes")
    with pytest.raises(ConfigError, match=f"tasks.db' needs {needs}, and this is {version('leasekit')}: upgrade it"):
        store.open()


def test_each_migration_names_the_version_that_it_needs() -> None:
    revisions = sorted(script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions())
    assert [name for name in revisions[1:] if not re.fullmatch(r"\d{4}_leasekit_\d+\.\d+\.\d+", name)] == []
    assert revisions[-1] == HEAD


@pytest.mark.parametrize("journal", ["delete", "wal"])
@pytest.mark.parametrize("table", ["orders", "alembic_version"])
def test_a_database_of_another_program_is_refused_and_stays_as_it_is(path: Path, journal: str, table: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"PRAGMA journal_mode = {journal}")
        connection.execute(f"CREATE TABLE {table} (version_num TEXT)")
    before = path.read_bytes(), list(path.parent.iterdir())
    with pytest.raises(ConfigError, match="is the database of another program: name a new file"):
        SqliteStore(path).open()
    assert (path.read_bytes(), list(path.parent.iterdir())) == before


def test_a_database_whose_tables_are_in_its_log_alone_is_refused_too(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = wal")
        connection.execute("CREATE TABLE orders (id)")
        with pytest.raises(ConfigError, match="is the database of another program"):
            SqliteStore(path).open()
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("orders",)]


@pytest.mark.parametrize(
    ("statement", "index"),
    [
        (lanes.READY, "ix_trigger_waiting (kind=? AND priority=?"),
        (lanes.LANES, "ix_trigger_waiting (kind=? AND priority=?"),
        (leases.EXPIRED, "ix_trigger_leased"),
        (leases.FOLLOW, "ix_trigger_leased"),
        (tasks.BY_ID, "uq_task_id|sqlite_autoindex_task_1"),
        (tasks.BY_SEQ, "INTEGER PRIMARY KEY"),
        (leases.RENEW, "INTEGER PRIMARY KEY"),
        (tasks.CONTENTS, "INTEGER PRIMARY KEY"),
    ],
)
def test_the_hot_statements_are_index_scans(store: SqliteStore, statement: Statement, index: str) -> None:
    compiled = statement.compiled(sqlite.dialect())
    values = bound(compiled, dict.fromkeys(compiled.names, ""))
    with store.transaction() as tx:
        plan = [row[-1] for row in driver(tx).execute(f"EXPLAIN QUERY PLAN {compiled.sql}", values)]
    assert any(one in step for step in plan for one in index.split("|")), plan
    tables = {"trigger", "task", "progress"}
    assert not [step for step in plan if step.startswith("SCAN") and step.split()[1] in tables], plan
    assert not [step for step in plan if "TEMP B-TREE" in step], plan


@pytest.mark.parametrize("count", [1, 49, 50, 51, 123])
def test_rows_that_come_together_are_all_kept_as_they_are(store: SqliteStore, count: int) -> None:
    entities = [
        Entity(seq, f"t{seq}", "k", None, 2, 1.0, 1.0, None, 5, None, 60.0, None, None, None, None, b"", b"%d" % seq)
        for seq in range(1, count + 1)
    ]
    triggers = [Trigger(seq, f"t{seq}", "k", 2, 300.0 + seq, 300.0, next_trigger_at=1.0) for seq in range(1, count + 1)]
    with store.transaction() as tx:
        tx.add(entities, triggers)
    with store.view() as view:
        assert list(view.entities(range(count + 2)).values()) == entities
        assert view.page(Filter(), after=0, limit=1000) == triggers


def test_a_row_that_is_there_already_spoils_all_that_come_with_it(store: SqliteStore) -> None:
    put(store, 60)
    with pytest.raises(sqlite3.IntegrityError), store.transaction() as tx:
        tx.add(
            [
                Entity(seq, f"t{seq}", "k", None, 2, 1.0, 1.0, None, 5, None, 60.0, None, None, None, None, b"", b"1")
                for seq in range(1, 70)
            ],
            [],
        )
    with store.view() as view:
        assert list(view.entities(range(1, 70))) == [60]


def test_a_dedupe_key_that_was_not_read_is_not_replaced(store: SqliteStore) -> None:
    """Another writer may have added it since."""
    first, second = Dedupe("k", "a", "t1", None), Dedupe("k", "a", "t2", None)
    with store.transaction() as tx:
        tx.set_dedupes([first])
    with pytest.raises(sqlite3.IntegrityError), store.transaction() as tx:
        tx.set_dedupes([second])
    with store.view() as view:
        assert view.dedupes([("k", "a")]) == {("k", "a"): first}


# The file


def test_nobody_else_can_read_the_files(store: SqliteStore, path: Path) -> None:
    put(store)
    assert modes(path) == dict.fromkeys(FILES, 0o600)


@pytest.mark.parametrize(("mode", "then"), [(0o644, 0o600), (0o666, 0o600), (0o640, 0o640), (0o660, 0o660)])
def test_a_store_that_is_open_to_all_users_is_closed_to_them(path: Path, mode: int, then: int) -> None:
    """What its group shares was set by a person, and stays."""
    store = SqliteStore(path)
    store.open()
    with store.view():  # a reader, so that the log stays when the store is copied, as after a crash
        contents = {file: file.read_bytes() for file in path.parent.iterdir()}
    store.close()
    for file, content in contents.items():
        file.write_bytes(content)
        file.chmod(mode)
    store = SqliteStore(path)
    store.open()
    assert modes(path) == dict.fromkeys(FILES, then)
    store.close()


def test_a_store_of_another_user_that_is_open_to_all_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chmod(file: Path, mode: int) -> None:
        raise PermissionError

    path.touch()
    path.chmod(0o666)
    monkeypatch.setattr(Path, "chmod", chmod)
    with pytest.raises(ConfigError, match="chmod it to 0600, or to 0660 for its group"):
        SqliteStore(path).open()


def test_a_write_is_on_the_disk_when_it_is_acknowledged(store: SqliteStore) -> None:
    with store.transaction() as tx:

        def pragma(name: str) -> Any:
            return driver(tx).execute(f"PRAGMA {name}").fetchone()[0]

        assert (pragma("journal_mode"), pragma("synchronous"), pragma("foreign_keys")) == ("wal", 2, 1)


def test_a_transaction_has_the_store_to_itself_from_its_start(store: SqliteStore, path: Path) -> None:
    stranger = sqlite3.connect(path, isolation_level=None, timeout=0)
    with store.transaction(), pytest.raises(sqlite3.OperationalError, match="locked"):
        stranger.execute("BEGIN IMMEDIATE")
    stranger.close()


def test_readers_cannot_write(store: SqliteStore) -> None:
    def write() -> None:
        with store.view() as view:
            driver(view).execute("DELETE FROM task")

    with pytest.raises(Unavailable, match="readonly"):
        write()


def test_a_reader_does_not_hold_up_the_writer(store: SqliteStore) -> None:
    put(store)
    with store.view() as view:
        assert view.counts() == {"k": {"new": 1}}
        put(store, 2)
        assert view.counts() == {"k": {"new": 1}}, "one consistent look"
    assert is_there(store, 2)


def test_it_can_be_read_from_any_thread(store: SqliteStore) -> None:
    put(store)
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(is_there(store))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8


def test_closing_leaves_one_whole_file(store: SqliteStore, path: Path) -> None:
    put(store)
    store.close()
    assert sorted(file.name for file in path.parent.iterdir()) == ["tasks.db", "tasks.db.id"]
    store.open()
    assert is_there(store)


def test_a_writer_that_failed_goes_on_with_a_new_connection(store: SqliteStore, path: Path) -> None:
    put(store)
    with sqlite3.connect(path, isolation_level=None) as stranger:
        stranger.execute("BEGIN IMMEDIATE")
        with store._writer_connection() as connection:
            connection.connection.driver_connection.execute("PRAGMA busy_timeout = 1")  # type: ignore[union-attr]
        with pytest.raises(Unavailable, match="the store failed: database is locked"):
            put(store, 2)
        stranger.execute("ROLLBACK")
    stranger.close()
    put(store, 3)
    assert [is_there(store, seq) for seq in (1, 2, 3)] == [True, False, True]


# Doors


def test_a_file_in_a_directory_that_is_missing_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"directory of the store .* does not exist"):
        open_store(f"sqlite:///{tmp_path}/missing/tasks.db")


def test_a_path_that_cannot_be_a_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "dir.db").mkdir()
    store = open_store(f"sqlite:///{tmp_path}/dir.db")
    with pytest.raises(ConfigError, match="cannot be opened"):
        store.open()


def test_a_directory_that_cannot_be_written_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    store = open_store(f"sqlite:///{tmp_path}/tasks.db")
    monkeypatch.setattr(os, "open", refuse)  # root may write anywhere
    with pytest.raises(BackendError, match=r"Permission denied: all processes .* as its owner, \w+, or chown"):
        store.open()


def test_a_new_store_is_logged_once_with_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "leasekit.server")
    for is_new in (True, False):
        store = open_store("sqlite:///tasks.db")
        store.open()
        store.close()
        assert store.is_new is is_new
    assert [record.getMessage() for record in caplog.records] == [f"created a new store: {tmp_path}/tasks.db"]


def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    path.write_bytes(b"something else entirely, and long enough to be looked at" * 100)
    store = SqliteStore(path)
    with pytest.raises(StoreDamaged, match="not a database"):
        store.open()
    assert path.read_bytes().startswith(b"something else")


@pytest.mark.parametrize(
    "url",
    ["", "tasks.db", "sqlite://", "sqlite:///", "sqlite://tasks.db", "sqlite:///:memory:", "mysql://u:secret@h/d"],
)
def test_other_urls_are_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_store(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["memory:", "memory://"])
def test_memory_is_a_store_too(url: str) -> None:
    assert isinstance(open_store(url), MemoryStore)


def test_an_option_in_the_url_is_refused_by_name_and_no_part_of_the_file() -> None:
    with pytest.raises(ConfigError, match="a sqlite URL has one option, `retention`, but this one has 'timeout'"):
        open_store("sqlite:///tasks.db?timeout=30")


@pytest.mark.parametrize("url", ["memory:", "sqlite:///tasks.db"])
def test_how_long_ended_tasks_are_kept_is_in_the_url(url: str) -> None:
    assert open_store(url).retention == RETENTION
    store = open_store(f"{url}?retention=90d")
    assert (store.retention, store.url) == (90 * 86400.0, open_store(url).url)
    with pytest.raises(ConfigError, match="retention must be from a minute to 100 years"):
        open_store(f"{url}?retention=10s")


def test_all_processes_of_a_file_are_told_its_retention(tmp_path: Path) -> None:
    """Any of them may be the one that has the file open, and deletes."""
    url = f"sqlite:///{tmp_path}/tasks.db?retention=12h"
    assert leasekit.connect(url).url == f"sqlite:///{tmp_path}/tasks.db?retention=43200"
    assert leasekit.connect(url.partition("?")[0]).url == f"sqlite:///{tmp_path}/tasks.db"


def test_a_relative_path_is_taken_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("sqlite:///tasks %25 #?.db")
    store.open()
    store.close()
    assert (tmp_path / "tasks %25 #?.db").is_file()


# The lock


def test_a_second_engine_in_this_process_is_refused(store: SqliteStore, path: Path) -> None:
    other = SqliteStore(path)
    with pytest.raises(StoreLocked, match=f"process {os.getpid()}"):
        other.open()
    put(store)
    assert is_there(store), "and the first has lost nothing"


HOLD = """
import sys
from pathlib import Path
from leasekit.server.store.sqlite.store import SqliteStore
store = SqliteStore(Path(sys.argv[1]))
store.open()
print("open", flush=True)
sys.stdin.read()
"""

FORK = """
import os, sys
from pathlib import Path
from leasekit.server.store.sqlite.store import SqliteStore
store = SqliteStore(Path(sys.argv[1]))
store.open()
child = os.fork()
if not child:
    print("open", flush=True)  # by the child: it has let go of what it inherited
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""


@pytest.fixture(params=[HOLD, FORK], ids=["alone", "with a forked child"])
def holder(request: pytest.FixtureRequest, path: Path) -> "Iterator[subprocess.Popen[str]]":
    with subprocess.Popen(
        [sys.executable, "-c", request.param, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
        process.kill()


def test_an_engine_in_another_process_is_refused_and_told_who_has_it(
    holder: "subprocess.Popen[str]", path: Path
) -> None:
    with pytest.raises(StoreLocked, match=f"'tasks.db' open .process {holder.pid}."):
        SqliteStore(path).open()


def test_a_killed_server_leaves_no_lock(holder: "subprocess.Popen[str]", path: Path) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait(60)
    store = SqliteStore(path)
    store.open()
    store.close()
