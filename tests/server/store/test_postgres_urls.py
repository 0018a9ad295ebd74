"""URLs of PostgreSQL databases, in the forms that libpq reads."""
# pyright: reportPrivateUsage=false

from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from leasekit.server.store.postgres.store import PostgresStore
from leasekit.server.store.urls import open_store
from tests.postgres_server import PostgresServer


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("postgresql://", "the database"),
        ("postgresql:///tasks", "the database 'tasks'"),
        ("postgresql:///tasks?host=/run/postgresql", "the database 'tasks' on /run/postgresql"),
        ("postgresql:///?service=nightly", "the database 'nightly'"),
        ("postgres://user:secret@a:5432,b:5433/tasks?sslmode=verify-full", "the database 'tasks' on a,b"),
    ],
)
def test_a_url_reaches_libpq_without_the_options_of_leasekit(
    url: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGHOST", raising=False)
    monkeypatch.delenv("PGDATABASE", raising=False)
    store = open_store(f"{url}{'&' if '?' in url else '?'}retention=90d&prepare=off")
    assert isinstance(store, PostgresStore)
    assert (store.where, store.retention) == (where, 90 * 86_400)


def test_what_a_url_leaves_out_is_of_the_environment_and_the_files_of_libpq(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, passwords, services = str(postgres.folder), tmp_path / "pgpass", tmp_path / "services"
    services.write_text(f"[tasks]\nhost={folder}\ndbname=postgres\n")
    passwords.write_text(f"{folder}:*:postgres:ada:secret\n")
    passwords.chmod(0o600)
    for name, value in {"PGUSER": "ada", "PGPASSFILE": passwords, "PGSERVICEFILE": services}.items():
        monkeypatch.setenv(name, str(value))
    with psycopg.connect(postgres.url("postgres"), autocommit=True) as connection:
        connection.execute("CREATE ROLE ada LOGIN")
    store = open_store("postgresql:///?service=tasks")
    assert isinstance(store, PostgresStore)
    with closing(store._connect()) as connection:
        assert (connection.info.user, connection.info.password) == ("ada", "secret")
        assert (connection.info.host, connection.info.dbname) == (folder, "postgres")


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_an_encoding_in_the_url_changes_no_texts(postgres: PostgresServer, encoding: str) -> None:
    url = postgres.url("postgres")
    store = open_store(f"{url}{'&' if '?' in url else '?'}client_encoding={encoding}")
    assert isinstance(store, PostgresStore)
    with closing(store._connect()) as connection:
        assert connection.execute("SELECT '漢'::text").fetchone() == ("漢",)
