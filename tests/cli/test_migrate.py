"""`leasekit migrate`: a shared database is changed only where somebody asks for it."""

import subprocess

import pytest

from leasekit.server.store.postgres import schema
from tests.cli.conftest import LEASEKIT, Run
from tests.postgres_server import PostgresServer


def test_only_who_is_asked_to_makes_the_tables(
    postgres: PostgresServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.new_database()
    monkeypatch.setenv("LEASEKIT_STORE", url)
    serve = [*LEASEKIT, "serve", "--port", "0"]
    refused = subprocess.run(serve, check=False, capture_output=True, text=True)
    assert (refused.returncode, "has no tables of leasekit: create them" in refused.stderr) == (1, True)
    looked = run("migrate", "--check")
    assert (looked.exit_code, looked.stdout) == (1, f"lacking: version {schema.HEAD}\n")
    made = run("migrate")
    assert (made.exit_code, made.stdout) == (0, f"made: version {schema.HEAD}\n")
    assert run("migrate", "--check").stdout == "up to date\n"
