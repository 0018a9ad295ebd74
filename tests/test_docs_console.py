"""What a page of docs/ has typed into a shell happens as it shows.

The ```console blocks of a page are one session, in an empty folder that has the page's titled blocks as files. A block
with `<!-- not run: reason -->` before it is left out. A page that uses LEASEKIT_STORE has an empty PostgreSQL.
Lines below a `$ command` must be seen in that order among what is written from then on; `…` stands for anything.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.ports import free_port
from tests.postgres_server import PostgresServer

DOCS = Path(__file__).parents[1] / "docs"
FENCED = re.compile(r"(?P<before>^[^\n]*\n)```(?P<language>\w+)(?P<more>[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S)
PATIENCE = 240.0
PORTS = "8077", "8078"  # in the pages; here some that are free
LONG, SHORT = "240", "20"  # numbers that the tutorial counts: a reader needs time to kill the worker


class Step(NamedTuple):
    """A command, and what is to be seen."""

    command: str
    shown: list[str]


def steps(page: str) -> Iterator[Step]:
    for block in FENCED.finditer(page):
        if block["language"] == "console" and not block["before"].startswith("<!-- not run: "):
            for typed in re.split(r"^\$ ", block["text"], flags=re.M)[1:]:
                command = re.match(r"(?:.*\\\n)*.*", typed)
                assert command is not None
                yield Step(command[0], typed[command.end() + 1 :].splitlines())


def files(page: str) -> Iterator[tuple[str, str]]:
    for block in FENCED.finditer(page):
        if title := re.search(r'title="([\w.-]+)"', block["more"]):
            yield title[1], block["text"]


PAGES = [path for path in sorted(DOCS.rglob("*.md")) if list(steps(path.read_text(encoding="utf-8")))]


class Shell:
    """A bash whose output is kept, and all that it has started."""

    def __init__(self, home: Path, environment: Mapping[str, str]) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._process = subprocess.Popen(
            ["bash", "--norc"],
            cwd=home,
            # Two processes write to one terminal: without a buffer, one line could come between a text and its end.
            env=os.environ | environment | {"PATH": path, "PYTHONUNBUFFERED": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._more:
                self.lines.append(line.rstrip("\n"))
                self._more.notify_all()

    def type(self, step: Step) -> None:
        """Run it, and wait until all is seen that is to be seen."""
        assert self._process.stdin is not None
        begin, wanted = len(self.lines), [as_pattern(line) for line in step.shown]
        mark = f"--- done {begin} ---"
        self._process.stdin.write(f"{step.command}\necho; echo '{mark}'\n")
        self._process.stdin.flush()
        until = time.monotonic() + PATIENCE
        with self._more:
            while mark not in self.lines[begin:] or missing(wanted, self.lines[begin:]):
                if not self._more.wait(until - time.monotonic()):
                    left = missing(wanted, self.lines[begin:])
                    shown = "\n".join(self.lines[begin:])
                    pytest.fail(f"$ {step.command}\nnot seen: {left}\nbut:\n{shown}")

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._reader.join()


def as_pattern(line: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, line.split("…"))))


def missing(wanted: list[re.Pattern[str]], lines: list[str]) -> list[str]:
    """Those that are not seen, whatever their order: a command and the worker beside it write at the same time."""
    left = list(wanted)
    for line in lines:
        if (seen := next((pattern for pattern in left if pattern.fullmatch(line)), None)) is not None:
            left.remove(seen)
    return [pattern.pattern for pattern in left]


@pytest.fixture
def environment(path: Path) -> Iterator[dict[str, str]]:
    """What the commands of a page find: a database, if the page needs one."""
    if "LEASEKIT_STORE" not in "".join(step.command for step in steps(path.read_text(encoding="utf-8"))):
        yield {}
        return
    server = PostgresServer()
    server.start()
    yield {"LEASEKIT_STORE": server.new_database()}
    server.remove()


def test_the_pages_that_promise_a_session_have_one() -> None:
    assert {"tutorial.md", "configuring.md", "protocol.md", "operations.md", "adapters.md", "postgresql.md"} <= {
        page.name for page in PAGES
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_what_is_typed_happens_as_it_shows(path: Path, environment: Mapping[str, str], tmp_path: Path) -> None:
    page = path.read_text(encoding="utf-8").replace(LONG, SHORT)
    for port in PORTS:
        page = page.replace(port, str(free_port()))
    if absent := [tool for tool in ("bash", "curl") if f"{tool} " in f"bash {page}" and shutil.which(tool) is None]:
        pytest.skip(f"there is no {absent[0]} here")
    for name, text in files(page):
        (tmp_path / name).write_text(text, encoding="utf-8")
    shell = Shell(tmp_path, environment)
    try:
        for step in steps(page):
            shell.type(step)
    finally:
        shell.close()


def test_a_line_that_is_not_seen_is_missed() -> None:
    wanted = [as_pattern("a…"), as_pattern("b")]
    assert missing(wanted, ["abc", "x", "b"]) == []
    assert missing(wanted, ["b", "abc"]) == []
    assert missing(wanted, ["abc", "abc"]) == ["b"]
