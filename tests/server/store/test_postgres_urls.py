"""URLs of PostgreSQL databases, in the forms that libpq reads."""

import pytest

from leasekit.server.store.postgres.store import PostgresStore
from leasekit.server.store.urls import open_store


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
