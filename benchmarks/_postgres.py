"""A PostgreSQL for benchmarks, a process of its own: a commit is answered when it is on the disk."""

import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from _common import cpu_of
from leasekit.server.store.postgres.store import PostgresStore

sys.path.append(str(Path(__file__).parent.parent))  # a benchmark is run as a script
from tests.postgres_server import PostgresServer

__all__ = ["PostgresServer", "cpu_of_server", "database", "running"]

_OPTIONS = ("shared_buffers=512MB", "max_wal_size=4GB")


@contextmanager
def running(folder: Path | None = None) -> Generator[PostgresServer]:
    """Run a server until the block ends; with `folder`, its databases are kept there."""
    options = [part for option in _OPTIONS for part in ("-c", option)]
    server = PostgresServer(options=options, is_durable=True, folder=folder)
    try:
        server.start()
        yield server
    finally:
        server.stop() if folder else server.remove()


def database(server: PostgresServer) -> str:
    """Return the URL of a new database with the tables of leasekit."""
    url = server.new_database()
    PostgresStore(url).migrate()
    return url


def cpu_of_server(server: PostgresServer) -> float:
    """Seconds of CPU that all processes of a server have used, on Linux."""
    assert server.process is not None
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    seconds = cpu_of(pid, ended_too=True)
    for child in children:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            seconds += cpu_of(int(child))
    return seconds
