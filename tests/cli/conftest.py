"""Commands in this process on a service in memory, and commands as processes: in a pipe, or on a terminal of ours."""

import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import pytest
from typer.testing import CliRunner, Result

import leasekit
from leasekit.cli.app import app

LEASEKIT = [sys.executable, "-m", "leasekit"]
PATIENCE = 60.0


@pytest.fixture
def url() -> str:
    """A service in memory that all clients of this process share, and no other test."""
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def client(url: str) -> Iterator[leasekit.Client]:
    with leasekit.connect(url) as client:
        yield client


class Run(Protocol):
    def __call__(self, *arguments: str, stdin: str | bytes | None = None) -> Result: ...


@pytest.fixture
def run(url: str) -> Run:
    """Run a command in this process; stdout is no terminal."""

    def invoke(*arguments: str, stdin: str | bytes | None = None) -> Result:
        result = CliRunner().invoke(
            app, arguments, prog_name="leasekit", input=stdin, env={"LEASEKIT_URL": url, "COLUMNS": "200"}
        )
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """A pipe that nobody reads, and that takes no byte more: its end for writing."""
    unread, pipe = os.pipe()
    os.set_blocking(pipe, False)
    for size in (4096, 1):
        with suppress(BlockingIOError):
            while True:
                os.write(pipe, b"." * size)
    os.set_blocking(pipe, True)
    yield pipe
    os.close(unread)
    os.close(pipe)


class Server:
    """A real server, as `leasekit serve` starts it."""

    def __init__(self, url: str) -> None:
        self.url = url

    @property
    def environment(self) -> Mapping[str, str]:
        return os.environ | {"LEASEKIT_URL": self.url, "PYTHONUNBUFFERED": "1"}

    def command(self, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        """A command in a pipe."""
        return subprocess.run(
            [*LEASEKIT, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
            **options,
        )

    def start(self, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
        """A command that goes on; its stdout and stderr are pipes."""
        return subprocess.Popen(
            [*LEASEKIT, *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    process = subprocess.Popen(
        [*LEASEKIT, "serve", "--port", "0", "--store", "memory:"],
        cwd=tmp_path_factory.mktemp("server"),
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found
        yield Server(found[0])
        process.terminate()


class Terminal:
    """A command whose stdin, stdout and stderr are a terminal; leaving the block ends it."""

    def __init__(self, *arguments: str, environment: Mapping[str, str], cwd: Path | None = None) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(self._master, (40, 120))
        self.process = subprocess.Popen(
            [*LEASEKIT, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=cwd,
            env={**environment, "TERM": "xterm-256color", "COLUMNS": "120"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - Ctrl-C reaches all its processes
        )
        os.close(slave)
        self.seen = ""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)

    def until(self, pattern: str) -> str:
        """Read until the pattern has been shown, since the last call; what was shown, without colours."""
        end = time.monotonic() + PATIENCE
        shown = ""
        while re.search(pattern, shown) is None:
            assert time.monotonic() < end, f"{pattern!r} did not come: {shown!r}"
            chunk = self._read()
            assert chunk is not None, f"{pattern!r} did not come before the end: {shown!r}"
            shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", chunk)
        return shown

    def interrupt(self) -> int:
        """Ctrl-C; returns the exit code."""
        self.press_ctrl_c()
        return self.ended()

    def press_ctrl_c(self) -> None:
        self.type("\x03")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def ended(self) -> int:
        """The exit code, when it has ended; what it shows meanwhile is read."""
        end = time.monotonic() + PATIENCE
        while self._read() is not None:
            assert time.monotonic() < end, "it does not end"
        return self.process.wait(PATIENCE)

    def _read(self) -> str | None:
        """What is shown now; None when it has ended."""
        if not select.select([self._master], [], [], 0.2)[0]:
            return ""
        try:
            chunk = os.read(self._master, 65536).decode(errors="replace")
        except OSError:  # the last who had it open has ended
            return None
        self.seen += chunk
        return chunk


class Start(Protocol):
    def __call__(self, *arguments: str) -> Terminal: ...


@pytest.fixture
def terminal(server: Server) -> Iterator[Start]:
    """Start a command on a terminal, on the server."""
    opened: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        opened.append(Terminal(*arguments, environment=server.environment))
        return opened[-1]

    yield start
    for one in opened:
        one.__exit__()
