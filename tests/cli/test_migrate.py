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
    versions = ", ".join(f"version {number}" for number in range(1, schema.HEAD + 1))
    looked = run("migrate", "--check")
    assert (looked.exit_code, looked.stdout) == (1, f"lacking: {versions}\n")
    made = run("migrate")
    assert (made.exit_code, made.stdout) == (0, f"made: {versions}\n")
    assert run("migrate", "--check").stdout == "up to date\n"
