"""`leasekit status`: one task with its history, or an overview."""

from collections.abc import Callable, Mapping
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from leasekit.cli import options, output
from leasekit.cli.errors import FAILED, spoken
from leasekit.cli.gates import closed, spoken_of
from leasekit.cli.service import connected, looks
from leasekit.cli.stats import counts_table, folded
from leasekit.cli.tasks import WAITING, running_for
from leasekit.cli.workers import listed, unhandled, workers_table
from leasekit.client import Client
from leasekit.errors import LeasekitError
from leasekit.task import Stats, Status, TaskInfo, WorkerInfo

if TYPE_CHECKING:
    from rich.console import RenderableType

EXAMPLES = """\b
With --watch, one task is watched until it has ended: exit code 1 if it did
not end as a success. In a pipe, a task is printed as lines of name and value,
and one line for each run, with its error; without an id, a line of names,
then one for each kind: kind, tasks, ended, running and dead ones. Kinds
once:celery:… are one line.
With --json, one document; with --watch too, a JSON line for each change.

\b
Examples:
  leasekit status
  leasekit status --watch
  leasekit status 0199c1f0-… --json | jq .progress
"""


@spoken
def status(
    task_id: Annotated[str | None, typer.Argument(metavar="ID", help="One task; without it, all.")] = None,
    *,
    service: options.Service,
    watch: options.Watch = False,
    interval: options.Interval = 1.0,
    as_json: options.Json = False,
) -> None:
    """Show one task, or an overview of all.

    A task is shown with its history; without an id, all are counted by kind and status, beside the workers.
    """
    with connected(service) as client:
        view = _Task(client, task_id) if task_id is not None else _Overview(client)
        if watch:
            _watch(view, every=interval, as_json=as_json)
        else:
            view.look()
            _show(view, as_json=as_json)


def _watch(view: "_Task | _Overview", *, every: float, as_json: bool) -> None:
    """Show what changes until it is over. Raises `Exit` if that is a task which did not end as a success."""
    if as_json or not output.on_terminal():
        for _ in groupby(looks(view.look, every=every), _without_lease_end):  # once for each change
            _show(view, as_json=as_json)
            if view.is_over:
                break
    else:
        with output.live() as screen:
            for _ in looks(view.look, every=every):
                screen.update(view.picture(), refresh=True)
                if view.is_over:
                    break
    if view.failed:
        raise typer.Exit(FAILED)


def show_task(client: Client, task_id: str, *, as_json: bool) -> None:
    """Show one task with its history."""
    view = _Task(client, task_id)
    view.look()
    _show(view, as_json=as_json)


def _without_lease_end(seen: Any) -> Any:
    """Return what was seen without what each heartbeat changes: the end of a lease, and when it was heard of last."""
    return replace(seen, lease_until=None, heartbeat_at=None) if isinstance(seen, TaskInfo) else seen


def _show(view: "_Task | _Overview", *, as_json: bool) -> None:
    if as_json:
        output.print_json(view.document)
    elif output.on_terminal():
        output.console().print(view.picture())
    else:
        for line in view.lines():
            output.print_line(line)
    if view.note and (as_json or not output.on_terminal()):
        typer.echo(f"leasekit status: {view.note}", err=True)


class _Task:
    """View of one task."""

    document: TaskInfo
    note = ""

    def __init__(self, client: Client, task_id: str) -> None:
        self._client = client
        self._id = task_id

    def look(self) -> TaskInfo:
        if (found := self._client.get(self._id)) is None:
            raise LeasekitError(
                f"there is no task {self._id!r}: look for it with 'leasekit tasks', or at another --backend"
            )
        self.document = found
        self.note = unhandled(self._client, found.kind, found.requires) if found.status in WAITING else ""
        if found.gate is not None:
            self.note = f"it waits behind a gate: {spoken_of(found.gate)}"
        return found

    @property
    def is_over(self) -> bool:
        return self.document.status.ended

    @property
    def failed(self) -> bool:
        return self.is_over and self.document.status is not Status.SUCCESS

    def _facts(self, moment: Callable[[datetime], str] = output.moment) -> dict[str, object]:
        task = self.document
        error = "error" if task.status.ended or task.status in WAITING else "error_of_the_run_before"
        facts: dict[str, object] = {
            "id": task.id, "kind": task.kind, "status": task.status, "priority": task.priority,
            "collection": task.collection, "tags": ", ".join(task.tags),
            "requires": _listed(task.requires), "prefers": _listed(task.prefers), "prefer_for": task.prefer_for,
            "key": task.key, "attempt": task.attempt, "crashes": task.crashes, "fence": task.fence,
            **{name: moment(at) for name in _TIMES if (at := getattr(task, name)) is not None},
            "running_for": running_for(task), "worker": task.worker,
            "lease_until": task.lease_until and output.moment(task.lease_until),
            "cancel_requested": "yes" if task.cancel_requested else None,
            "payload": output.compact(task.payload), "progress": output.compact(task.progress),
            "result": output.compact(task.result),
            error: output.compact(last_error(task)), "reason": task.reason,
        }  # fmt: skip
        return {name: value for name, value in facts.items() if value not in (None, "")}

    def lines(self) -> list[list[object]]:
        """Return the lines of a pipe, as lists of fields: name and value, then a line for each ended run."""
        runs: list[list[object]] = [
            [
                "run",
                run.fence,
                run.attempt,
                run.outcome,
                output.moment(run.at),
                run.worker or "",
                output.error_text(run.error),
            ]
            for run in self.document.history
        ]
        return [*([name, value] for name, value in self._facts().items()), *runs]

    def picture(self) -> "RenderableType":
        """Return the fields of the task, and below each run that has ended its error, for people."""
        from rich.console import Group
        from rich.padding import Padding
        from rich.table import Table

        facts = Table.grid(padding=(0, 2))
        for name, value in self._facts(_aged).items():
            if not name.startswith("error"):  # it is with its run
                style = output.STYLES.get(self.document.status, "") if name == "status" else ""
                facts.add_row(output.styled(name, "dim"), output.styled(value, style))
        parts: list[RenderableType] = [facts]
        for run in self.document.history:
            who = f", {run.worker}" if run.worker else ""
            attempt = "no attempt counted" if run.outcome == "release" else f"attempt {run.attempt}"
            lasted = f", after {output.span(run.claimed_at, run.at)}" if run.claimed_at else ""
            line = f"run {run.fence}, {attempt}: {run.outcome}, {output.moment(run.at)}{lasted}{who}"
            parts.append(output.styled(line, "bold"))
            if run.error is not None:
                parts.append(Padding(output.styled(output.error_text(run.error)), (0, 0, 0, 4)))
        if self.note:
            parts.append(output.styled(self.note, "yellow"))
        return Group(*parts)


class _Counts(Stats, frozen=True, kw_only=True):
    workers: list[WorkerInfo] | None


class _Overview:
    """View of the counts of all tasks, and the workers."""

    document: _Counts
    is_over = False
    failed = False
    note = ""

    def __init__(self, client: Client) -> None:
        self._client = client

    def look(self) -> _Counts:
        """Fetch the counts. `workers` is None if the backend cannot list them."""
        found = self._client.stats()
        self.document = _Counts(kinds=found.kinds, damaged=found.damaged, workers=listed(self._client))
        self.note = "; ".join(map(spoken_of, closed(self._client)))
        return self.document

    def lines(self) -> list[list[object]]:
        """Return a line of names, then one for each kind: its tasks, the ended, claimed or running, dead ones."""
        names: list[object] = ["kind", "tasks", "ended", "running", "dead"]
        kinds = sorted(folded(self.document.kinds).items())
        return [names, *([kind, *_sums(counts), counts.get(Status.DEAD, 0)] for kind, counts in kinds)]

    def picture(self) -> "RenderableType":
        """Return a table of the counts, a progress bar, and a table of the workers."""
        from rich.console import Group
        from rich.padding import Padding
        from rich.progress_bar import ProgressBar

        kinds, workers = folded(self.document.kinds), self.document.workers
        if not kinds:
            return "no tasks"
        total, ended, running = (sum(column) for column in zip(*map(_sums, kinds.values()), strict=True))
        said = f"{ended:,} of {total:,} ended, {running:,} claimed or running"
        bar = Padding(ProgressBar(total, ended, width=40), 0)  # the bar itself does not end its line
        parts: list[RenderableType] = [counts_table(kinds), output.styled(said), bar]
        if workers:
            parts.append(workers_table(workers))
        if self.note:
            parts.append(output.styled(self.note, "yellow"))
        return Group(*parts)


def _aged(at: datetime) -> str:
    """Return a moment, and how long ago that was."""
    return f"{output.moment(at)}, {output.ago(at)}"


def _listed(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in labels.items())


def last_error(task: TaskInfo) -> Any:
    """Return the error of the last run that has one (a run that has expired has none), unless it ended as a success."""
    if task.status is Status.SUCCESS:
        return None
    return next((run.error for run in reversed(task.history) if run.error is not None), task.error)


def _sums(counts: dict[str, int]) -> tuple[int, int, int]:
    """Return the numbers of all tasks, of ended tasks, and of tasks that are claimed or run."""
    ended = sum(number for name, number in counts.items() if name in _ENDED)
    running = sum(counts.get(name, 0) for name in (Status.CLAIMED, Status.PROCESSING))
    return sum(counts.values()), ended, running


_TIMES = ("scheduled_at", "at", "claimed_at", "started_at", "heartbeat_at", "progress_at", "ended_at")
_ENDED = frozenset(status for status in Status if status.ended)
