"""Helpers of all benchmarks: the command line, servers as processes, CPU time, and lines of results.

A benchmark writes one JSON line for each case; `_report` makes the tables and charts of README.md from these.
"""

import argparse
import asyncio
import json
import os
import platform
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

__all__ = ["RESULTS", "Bench", "Caller", "Server", "cpu_of", "cpu_seconds", "memory_bytes", "percentile", "stored_in"]

HERE = Path(__file__).parent
RESULTS = HERE / "results"


class Bench:
    """The run of one benchmark: its command line and its results."""

    def __init__(self, name: str) -> None:
        parser = argparse.ArgumentParser(prog=name)
        parser.add_argument(
            "--quick", action="store_true", help="run for a few seconds to see that it works; the figures mean little"
        )
        parser.add_argument(
            "--out", type=Path, help="write the results into this folder, not into results/ and README.md"
        )
        parser.add_argument("--only", default="", help="run only cases whose names contain this")
        parser.add_argument("--repeat", type=int, help="how often each case is measured (the median counts)")
        parser.add_argument("--seconds", type=float, help="for how long leases are held")
        parser.add_argument("--folder", type=Path, help="keep the database here; another run with it goes on")
        options = parser.parse_args()
        self.name = name
        self.quick: bool = options.quick
        self.repeat: int = options.repeat or (1 if options.quick else 3)
        self.seconds: float | None = options.seconds
        self.folder: Path | None = options.folder
        self._only: str = options.only
        self._out: Path | None = options.out
        self._lines: list[dict[str, Any]] = []

    def wants(self, case: str) -> bool:
        """Whether the options choose this case."""
        return self._only in case

    def note(self, case: str, **values: Any) -> None:
        """Keep and print the result of a case."""
        line = {"benchmark": self.name, "case": case, **values}
        self._lines.append(line)
        print(json.dumps(line), flush=True)

    def compare(self, cases: Mapping[str, Callable[[], float]]) -> None:
        """Measure all cases in turn, five rounds at the least, and note the CPU in µs of each, by itself and as ratios.

        Each is compared with the first case of its own round. A case that is the first one again shows the spread.
        """
        rounds = self.repeat if self.quick else max(5, self.repeat)
        spent: dict[str, list[float]] = {case: [] for case in cases}
        for _ in range(rounds):
            for case, measure in cases.items():
                spent[case].append(measure())
        first = next(iter(spent.values()))
        for case, values in spent.items():
            ratios = sorted(mine / of_first for mine, of_first in zip(values, first, strict=True))
            middle, bounds = statistics.median(ratios), [round(ratios[0], 2), round(ratios[-1], 2)]
            self.note(case, cpu_us=round(statistics.median(values), 1), ratio=round(middle, 2), ratios=bounds)

    @property
    def results(self) -> Path:
        """The folder of the results."""
        return self._out or RESULTS

    def close(self) -> None:
        """Write the results, and after a whole run README.md."""
        whole = not self.quick and not self._only and self._out is None
        if self._out is None and not whole:
            return
        folder = self.results
        folder.mkdir(parents=True, exist_ok=True)
        lines = [{**line, **_machine()} for line in self._lines]
        (folder / f"{self.name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        if whole:
            import _report  # imports this module

            _report.write()


def _machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "on": time.strftime("%Y-%m-%d"),
    }


class Server:
    """A `leasekit serve` in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self.process = process
        self.url = url

    @property
    def cpu(self) -> float:
        """Seconds of CPU that the server has used."""
        return cpu_of(self.process.pid)

    @classmethod
    @contextmanager
    def running(cls, url: str | None = None) -> Generator["Server"]:
        """Run a server until the block ends, on the store at `url` or on a new SQLite store."""
        with nullcontext(url) if url else stored_in() as store:
            command = [sys.executable, "-m", "leasekit", "serve", "--port", "0", "--store", store]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            with process:
                try:
                    assert process.stdout is not None
                    line = process.stdout.readline()
                    assert " http://" in line, f"the server did not start: {line!r}"
                    yield cls(process, line.split()[-1])
                finally:
                    process.terminate()


class Caller:
    """A connection that posts one request after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: str) -> None:
        self._reader, self._writer, self._headers = reader, writer, headers

    @classmethod
    async def connected(cls, url: str, *, token: str | None = None) -> "Caller":
        address = urlsplit(url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        return cls(reader, writer, f"host: {address.netloc}\r\n" + f"authorization: Bearer {token}\r\n" * bool(token))

    async def post_all(self, path: str, bodies: Any) -> list[bytes]:
        return [await self._post(path, body) for body in bodies]

    async def _post(self, path: str, body: bytes) -> bytes:
        head = f"POST {path} HTTP/1.1\r\n{self._headers}content-type: application/json\r\n"
        self._writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        assert lines[0].split()[1] == b"200", lines[0]
        length = next(int(line[15:]) for line in lines if line.lower().startswith(b"content-length:"))
        return await self._reader.readexactly(length)

    def close(self) -> None:
        self._writer.close()


@contextmanager
def stored_in() -> Generator[str]:
    """Yield the URL of a new store beside this file: /tmp may be in memory, where FULL sync costs nothing."""
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=HERE) as folder:
        yield f"sqlite:///{folder}/tasks.db"


def cpu_seconds() -> float:
    """Seconds of CPU that this process has used."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def cpu_of(pid: int, *, ended_too: bool = False) -> float:
    """Seconds of CPU that another process has used, and its children that have ended, on Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if ended_too else 13])) / os.sysconf("SC_CLK_TCK")


def memory_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def percentile(values: Sequence[float], percent: int) -> float:
    """The value below which so many percent of all values are."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
