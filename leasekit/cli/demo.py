"""`leasekit demo`: show that long work survives a killed worker, on real files, and verify the results."""

import contextlib
import os
import sysconfig
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import leasekit
from leasekit.cli.demo_check import Finding, check, read_log, under_way
from leasekit.cli.demo_fleet import Fleet
from leasekit.cli.errors import spoken
from leasekit.cli.tasks import all_tasks
from leasekit.task import NewTask, Status, TaskInfo

EXAMPLES = """\b
Examples:
  leasekit demo
  leasekit demo ~/pictures --workers 5
  leasekit demo --keep
"""

_TTL = 5.0  # short, so that the tasks of a killed worker do not wait for long
_SLOTS = 6  # of each worker, as in demo_handlers
_AIM = 10.0  # seconds that all runs together should take
_LONGEST = 4.0  # seconds of one run
_PATIENCE = 40.0
_MOST = 1000  # files …
_MOST_BYTES = 100_000_000  # … and what they hold together
_NOT_OURS = {"site-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3", "turtledemo"}

_INTRODUCTION = (
    "Worker processes digest files, each a task under a lease, and one worker is killed (SIGKILL) in the middle. "
    "Watch its tasks run again elsewhere after a few seconds; at the end every result is checked."
)


Directory = Annotated[
    Path | None,
    typer.Argument(exists=True, file_okay=False, help="Files to work on; default: the standard library's sources."),
]
Workers = Annotated[int, typer.Option(min=2, max=8, help="Worker processes; one of them is killed.")]
Keep = Annotated[
    bool, typer.Option("--keep", help="Keep the server at the end, for a look at the web console, until Ctrl-C.")
]


@spoken
def demo(
    directory: Directory = None,
    workers: Workers = 3,
    keep: Keep = False,  # noqa: FBT002 - a flag for typer
) -> None:
    """See long work survive a killed worker.

    Digests the files of a directory (up to 1000, of up to 100 MB together) under leases, kills a worker in the middle,
    and verifies the results, all within a minute.

    Starts a server on an embedded store and worker processes, schedules one task a file, kills one worker with SIGKILL,
    and checks every digest, that every task was settled once, and that no two runs of a task overlapped.
    Exit code 1 if a check fails.
    """
    console = Console()
    files = _files(directory)
    if not files:
        raise leasekit.LeasekitError(
            f"there are no files in {directory} that can be read and have up to 100 MB: name another directory"
        )
    console.print(_INTRODUCTION)
    with tempfile.TemporaryDirectory(prefix="leasekit-demo-") as home, Fleet(Path(home), workers) as fleet:
        findings = _run(console, fleet, files, Path(home) / "runs.jsonl")
        _print_summary(console, findings)
        if keep:
            _wait(console, fleet.url)
    if any(finding.wrong for finding in findings):
        raise typer.Exit(1)


def _run(console: Console, fleet: Fleet, files: Sequence[Path], log: Path) -> list[Finding]:
    """Have the files digested while a worker is killed, and check what came of it."""
    workers = len(fleet.workers)
    with leasekit.connect(fleet.url) as client:
        _schedule(client, files, log, seconds=min(_LONGEST, _AIM * workers * _SLOTS / len(files)))
        console.print(f"watch it in a browser: {fleet.url}/console")
        console.print(f"{len(files)} tasks scheduled at {fleet.url}, {workers} workers, leases of {_TTL:g} s")
        killed_at = _watch_and_kill(console, client, fleet, log, total=len(files))
        tasks = _all(client)
    findings = check(tasks, read_log(log), killed_at=killed_at, ended=fleet.ended)
    if len(tasks) != len(files) or not all(task.status is Status.SUCCESS for task in tasks):
        findings.insert(0, Finding(what="tasks that ended well", count=len(tasks), wrong=["not all did", fleet.log()]))
    return findings


def _wait(console: Console, url: str) -> None:
    console.print(f"the server goes on, with its console at {url}/console: Ctrl-C ends it")
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()


def _files(directory: Path | None) -> list[Path]:
    """Return up to `_MOST` files of a directory (None: the standard library), of up to `_MOST_BYTES` in all."""
    if directory is not None:
        found = (path.resolve() for path in directory.rglob("*") if path.is_file() and os.access(path, os.R_OK))
    else:
        library = Path(sysconfig.get_path("stdlib"))
        found = (path for path in library.rglob("*.py") if not _NOT_OURS & set(path.relative_to(library).parts))
    chosen, left = list[Path](), _MOST_BYTES
    for path in found:
        if (size := path.stat().st_size) <= left and len(chosen) < _MOST:
            chosen.append(path)
            left -= size
    return sorted(chosen)


def _schedule(client: leasekit.Client, files: Sequence[Path], log: Path, *, seconds: float) -> None:
    tasks = [
        NewTask(
            kind="digest",
            payload={"path": str(path), "seconds": seconds, "log": str(log)},
            claim_timeout=_TTL,
            heartbeat_timeout=_TTL,
        )
        for path in files
    ]
    for i in range(0, len(tasks), 500):
        client.schedule_all(tasks[i : i + 500])


def _watch_and_kill(
    console: Console, client: leasekit.Client, fleet: Fleet, log: Path, *, total: int
) -> dict[int, float]:
    """Show each worker's tasks until all are done, and kill one worker meanwhile. Ends after 40 s at most.

    Returns when the killed worker was gone, by its pid; empty if none was killed.
    """
    killed_at: dict[int, float] = {}
    until = time.monotonic() + _PATIENCE
    bar = Progress(TextColumn("digests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
    progress, told = bar.add_task("", total=total), 0.0
    with Live(console=console, refresh_per_second=8, transient=True) as live:
        while time.monotonic() < until:
            held = _held(client)
            done = client.stats().kinds["digest"].get("success", 0)
            if not killed_at and done >= total // 4 and (killed := _kill_one(fleet, log)) is not None:
                pid, runs = killed
                killed_at[pid] = time.monotonic()
                console.print(f"worker {pid} was killed (SIGKILL) in the middle of {runs} runs")
            bar.update(progress, completed=done)
            live.update(Group(_table(fleet, held, log, killed_at), bar))
            if not console.is_terminal and time.monotonic() - told > 2:
                told = time.monotonic()
                console.print(f"{done} of {total} done")
            if done >= total:
                break
            time.sleep(0.15)
    return killed_at


def _kill_one(fleet: Fleet, log: Path) -> tuple[int, int] | None:
    """Kill the worker with the most runs in progress. Returns its pid and their number; None: no worker was killed.

    The worker is paused while its runs are counted, so that none of them ends before the process does.
    """
    runs = under_way(read_log(log))
    busy = [worker for worker in fleet.workers if runs[worker.pid] and worker.poll() is None]
    victim = max(busy, key=lambda worker: len(runs[worker.pid]), default=None)
    if victim is None or not fleet.pause(victim):
        return None
    if not (left := under_way(read_log(log))[victim.pid]):
        fleet.resume(victim)
        return None
    fleet.kill(victim)
    return victim.pid, len(left)


def _held(client: leasekit.Client) -> dict[int, list[TaskInfo]]:
    held: dict[int, list[TaskInfo]] = defaultdict(list)
    for status in (Status.CLAIMED, Status.PROCESSING):
        for task in client.list_tasks(kind="digest", status=status, limit=200).tasks:
            if task.worker is not None:
                held[int(task.worker.split(":")[1])].append(task)
    return held


def _table(fleet: Fleet, held: dict[int, list[TaskInfo]], log: Path, killed_at: dict[int, float]) -> Table:
    ended = Counter(entry.pid for entry in read_log(log) if entry.event == "end")
    table = Table("worker", "", "done", "holds", expand=True)
    for worker in fleet.workers:
        names = ", ".join(Path(task.payload["path"]).name for task in held[worker.pid])
        state = "[red]killed[/]" if worker.pid in killed_at else "[green]runs[/]"
        table.add_row(str(worker.pid), state, str(ended[worker.pid]), names)
    return table


def _all(client: leasekit.Client) -> list[TaskInfo]:
    listed = all_tasks(lambda cursor, size: client.list_tasks(kind="digest", cursor=cursor, limit=size))
    return [task for task_id in [task.id for task in listed] if (task := client.get(task_id)) is not None]


def _print_summary(console: Console, findings: Sequence[Finding]) -> None:
    for finding in findings:
        mark = "[red]✗[/]" if finding.wrong else "[green]✓[/]"
        console.print(f"{mark} {finding.count:>5} {finding.what}")
        for wrong in finding.wrong[:10]:
            console.print(f"        {wrong}", markup=False)
    if not any(finding.wrong for finding in findings):
        console.print(
            "[bold]A worker died in the middle of its work; nothing was lost, and nothing ran twice at once.[/]"
        )
